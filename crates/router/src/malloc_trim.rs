//! Freed memory goes back to the kernel.
//!
//! glibc gives back what is free at a heap's end, and keeps what is free between pieces in use. Its settings do not
//! help: after a burst of long statements 28 MB stayed by default, 28 MB with the lowest thresholds, 95 MB with two
//! arenas, and 12 MB after `malloc_trim`, of 127 MB at the peak.

use std::time::Duration;

/// Time between two looks. One takes milliseconds, in which whoever allocates may wait.
const INTERVAL: Duration = Duration::from_secs(30);

/// Gives back what is free, again and again, until the task is aborted.
pub async fn trim_periodically() {
    loop {
        tokio::time::sleep(INTERVAL).await;
        if let Err(error) = tokio::task::spawn_blocking(trim).await {
            tracing::warn!(%error, "cannot give memory back");
        }
    }
}

fn trim() {
    // SAFETY: it has no arguments that could be wrong, and any thread may call it at any time.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident_bytes() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
    }

    #[test]
    fn what_is_free_between_pieces_in_use_goes_back() {
        const PIECES: usize = 64 << 10;
        let mut pieces: Vec<_> = (0..PIECES).map(|_| Some(Box::new([1_u8; 1024]))).collect();
        let before = resident_bytes();
        let in_use = |number: usize| number.is_multiple_of(256);
        pieces.iter_mut().enumerate().filter(|(number, _)| !in_use(*number)).for_each(|(_, piece)| *piece = None);
        trim();
        assert!(before - resident_bytes() > PIECES * 1024 / 2);
        assert_eq!(pieces.iter().flatten().count(), PIECES / 256);
    }
}
