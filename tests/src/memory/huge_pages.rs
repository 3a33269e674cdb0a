//! Huge pages of the machine: reserved for a test, given back afterwards.

use std::fs::File;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::fs::FlockOperation;

/// How many pages the pool of the machine has (kernel documentation, `admin-guide/mm/hugetlbpage.rst`).
const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// Moves memory together (kernel documentation, `admin-guide/sysctl/vm.rst`).
const COMPACT: &str = "/proc/sys/vm/compact_memory";
/// How often the kernel is asked for pages that it does not find at once.
const RESERVE_ROUNDS_MAX: u32 = 50;
const RESERVE_PAUSE: Duration = Duration::from_millis(200);
/// One test at a time: the pool is one number for the whole machine.
const LOCK: &str = "/run/lock/onecopy-test-huge-pages";

/// Reserved huge pages; the pool is as before when this is dropped.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
    _lock: File,
}

impl HugePages {
    /// Adds this many pages of 2 MiB to the machine's pool, for as long as the value lives.
    ///
    /// # Errors
    ///
    /// This is not root; the machine's memory is too full or too scattered.
    pub fn reserve(pages: u64) -> anyhow::Result<HugePages> {
        let lock = File::create(LOCK).with_context(|| LOCK.to_owned())?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
        let before: u64 = std::fs::read_to_string(POOL)?.trim().parse()?;
        let reserved = HugePages { before, _lock: lock };
        let mut there = before;
        for _ in 0..RESERVE_ROUNDS_MAX {
            std::fs::write(POOL, (before + pages).to_string()).with_context(|| format!("{POOL}: needs root"))?;
            there = std::fs::read_to_string(POOL)?.trim().parse()?;
            if there == before + pages {
                return Ok(reserved);
            }
            // Others have left memory scattered; a kernel that cannot move it together says so, and the next round may do.
            let _ = std::fs::write(COMPACT, "1");
            std::thread::sleep(RESERVE_PAUSE);
        }
        bail!("{there} huge pages instead of {}", before + pages)
    }

    /// Pages of the machine that nobody uses and nobody was promised.
    ///
    /// # Errors
    ///
    /// `/proc/meminfo` has no such lines.
    pub fn available(&self) -> anyhow::Result<u64> {
        let text = std::fs::read_to_string("/proc/meminfo")?;
        let pages = |name: &str| -> anyhow::Result<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            Ok(line.with_context(|| name.to_owned())?.trim().parse()?)
        };
        pages("HugePages_Free:")?.checked_sub(pages("HugePages_Rsvd:")?).context("more promised than free")
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(POOL, self.before.to_string()) {
            eprintln!("{POOL} is not {} again: {error}", self.before);
        }
    }
}
