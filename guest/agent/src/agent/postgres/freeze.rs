//! The server's control group held still: for the instant in which the guest is copied, and until the copy's server has
//! been told whom it follows, or is ended before it can do anything.

use crate::agent::memory::GROUP;
use crate::agent::replies::{Result, failed, failure};
use crate::protocol::FailureKind;
use std::fs::{read_to_string, write};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the kernel may take until all of the group stands: who waits for a disk stands after that.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the killed may take to be gone.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How soon either is seen.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// Holds all of the server's processes; done when none runs any more. One that cannot be held goes on.
pub(super) fn freeze() -> Result<()> {
    hold(Path::new(GROUP), FREEZE_TIMEOUT)
}

fn hold(group: &Path, limit: Duration) -> Result<()> {
    set(group, "1")?;
    if wait(limit, || is_held(group)) {
        return Ok(());
    }
    set(group, "0")?;
    Err(failure(FailureKind::Timeout, format!("the server's processes still run after {} ms", limit.as_millis())))
}

/// Lets them go on; nothing happens where they are not held.
pub(super) fn thaw() -> Result<()> {
    set(Path::new(GROUP), "0")
}

/// Ends those that are held where they stand, none of which does anything more: they can be killed so (Linux:
/// Documentation/admin-guide/cgroup-v2.rst, `cgroup.freeze`, `cgroup.kill`).
pub(super) fn kill() -> Result<()> {
    let group = Path::new(GROUP);
    if !is_held(group) {
        return Err(failure(FailureKind::Failed, "the server is not held: it may have done anything"));
    }
    write(group.join("cgroup.kill"), "1").map_err(|error| failed("killing the server", error))?;
    if !wait(END_TIMEOUT, || is_empty(group)) {
        let message = format!("the server's processes are still there after {} ms", END_TIMEOUT.as_millis());
        return Err(failure(FailureKind::Timeout, message));
    }
    // The next server is to run.
    set(group, "0")
}

fn set(group: &Path, is_held: &str) -> Result<()> {
    write(group.join("cgroup.freeze"), is_held).map_err(|error| failed("writing cgroup.freeze", error))
}

fn is_held(group: &Path) -> bool {
    read_to_string(group.join("cgroup.events")).is_ok_and(|events| events.lines().any(|line| line == "frozen 1"))
}

fn is_empty(group: &Path) -> bool {
    read_to_string(group.join("cgroup.procs")).is_ok_and(|processes| processes.trim().is_empty())
}

fn wait(limit: Duration, holds: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    loop {
        if holds() {
            return true;
        }
        if begin.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(LOOK_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_held_goes_on() {
        let group = tempfile::tempdir().unwrap();
        let group = group.path();
        write(group.join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        let error = hold(group, Duration::ZERO).unwrap_err();
        assert_eq!(error.kind, FailureKind::Timeout, "{error}");
        assert_eq!(read_to_string(group.join("cgroup.freeze")).unwrap(), "0");
        write(group.join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
        hold(group, Duration::ZERO).unwrap();
        assert_eq!(read_to_string(group.join("cgroup.freeze")).unwrap(), "1");
    }
}
