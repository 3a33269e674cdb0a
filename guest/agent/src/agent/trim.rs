//! Free blocks of the root file system, told to the disk.

use super::process::{Program, run};
use super::replies::{Result, failed, failure};
use crate::protocol::FailureKind;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(300);

/// Bytes that were told.
pub(crate) fn trim() -> Result<u64> {
    let ended = run(&Program::new(&["fstrim", "--verbose", "/"]), TIMEOUT)?;
    if ended.status != Some(0) {
        return Err(failed("fstrim", ended.stderr.to_text()));
    }
    let text = ended.stdout.to_text();
    bytes(&text).ok_or_else(|| failure(FailureKind::Failed, format!("fstrim said: {text}")))
}

/// Out of `/: 1.4 GiB (1526272000 bytes) trimmed`.
fn bytes(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once('(')?;
    rest.split_once(" bytes")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_read_from_what_fstrim_says() {
        assert_eq!(bytes("/: 1.4 GiB (1526272000 bytes) trimmed\n"), Some(1_526_272_000));
        assert_eq!(bytes("/: 0 B (0 bytes) trimmed"), Some(0));
        assert_eq!(bytes("what?"), None);
    }
}
