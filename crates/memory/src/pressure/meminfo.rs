//! The host's memory: `/proc/meminfo` (proc_meminfo(5)).

use std::path::Path;

use crate::{Bytes, MemoryError};

use super::text;

/// What `/proc/meminfo` says that is of use here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryInformation {
    /// RAM that the kernel has.
    pub total_bytes: Bytes,
    /// What can be had without swapping, by the kernel's own estimate.
    pub available_bytes: Bytes,
    /// Shared memory and tmpfs: the pools of servers that do not use huge pages are part of it.
    pub shared_bytes: Bytes,
    /// Swap there is.
    pub swap_total_bytes: Bytes,
    /// Swap that is free.
    pub swap_free_bytes: Bytes,
    /// Size of the usual huge page.
    pub huge_page_bytes: Bytes,
    /// Huge pages set aside, in pages of that size.
    pub huge_pages_total: u64,
    /// Huge pages nobody has, in pages of that size.
    pub huge_pages_free: u64,
}

impl MemoryInformation {
    /// Swap in use.
    pub fn swap_used_bytes(&self) -> Bytes {
        self.swap_total_bytes.saturating_sub(self.swap_free_bytes)
    }

    /// Takes the content of the file apart; `path` is for messages only.
    ///
    /// # Errors
    /// [`MemoryError::Malformed`] when the total or what is available is missing (Linux tells it since 3.14); the rest
    /// counts as 0.
    pub fn parse(content: &[u8], path: &Path) -> Result<MemoryInformation, MemoryError> {
        let wanted = |key| value(content, key).ok_or_else(|| text::malformed(path, format!("it has no {key}")));
        let other = |key| value(content, key).unwrap_or(0);
        Ok(MemoryInformation {
            total_bytes: wanted("MemTotal")?,
            available_bytes: wanted("MemAvailable")?,
            shared_bytes: other("Shmem"),
            swap_total_bytes: other("SwapTotal"),
            swap_free_bytes: other("SwapFree"),
            huge_page_bytes: other("Hugepagesize"),
            huge_pages_total: other("HugePages_Total"),
            huge_pages_free: other("HugePages_Free"),
        })
    }
}

/// The value of one line, in bytes where it has the unit kB.
fn value(content: &[u8], key: &str) -> Option<u64> {
    let line = text::lines(content).find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    match line.trim().strip_suffix(" kB") {
        Some(kibibytes) => kibibytes.trim().parse::<u64>().ok()?.checked_mul(1024),
        None => line.trim().parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RECORDED: &[u8] = b"MemTotal:       24684092 kB\nMemFree:        19612556 kB\nMemAvailable:   19956740 kB\n\
        Shmem:           4171000 kB\nShmemHugePages:        7 kB\nSwapTotal:       2097148 kB\n\
        SwapFree:        2000000 kB\n\
        HugePages_Total:     600\nHugePages_Free:      100\nHugepagesize:       2048 kB\n";

    #[test]
    fn a_recorded_file_is_understood() {
        let memory = MemoryInformation::parse(RECORDED, Path::new("meminfo")).expect("a whole file");
        assert_eq!(memory.total_bytes, 24_684_092 << 10);
        assert_eq!(memory.available_bytes, 19_956_740 << 10);
        assert_eq!(memory.shared_bytes, 4_171_000 << 10);
        assert_eq!(memory.swap_used_bytes(), 97_148 << 10);
        assert_eq!((memory.huge_pages_total, memory.huge_pages_free, memory.huge_page_bytes), (600, 100, 2 << 20));
    }

    #[test]
    fn what_is_missing_or_absurd_is_said() {
        for content in [&b""[..], b"MemTotal: 5 kB\n", b"MemTotal: 5 kB\nMemAvailable: 99999999999999999999 kB\n"] {
            let error = MemoryInformation::parse(content, Path::new("meminfo")).expect_err("not whole").to_string();
            assert!(error.contains("meminfo") && error.contains("Mem"), "{error}");
        }
        let absurd = b"MemTotal: 18446744073709551615 kB\nMemAvailable: 1 kB\n";
        assert!(MemoryInformation::parse(absurd, Path::new("meminfo")).is_err(), "more than can be counted");
    }

    proptest! {
        #[test]
        fn no_content_makes_it_panic(content: Vec<u8>, at in 0..RECORDED.len(), byte: u8) {
            let _ = MemoryInformation::parse(&content, Path::new("meminfo"));
            let mut damaged = RECORDED.to_vec();
            damaged[at] = byte;
            let _ = MemoryInformation::parse(&damaged, Path::new("meminfo"));
        }
    }
}
