//! Huge pages of the machine: reserved for a test, given back afterwards.

use std::fs::File;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustix::fs::FlockOperation;

/// How many pages the pool of the machine has (kernel documentation, `admin-guide/mm/hugetlbpage.rst`).
const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// How many more it makes when they are wanted (same place).
const ON_DEMAND: &str = "/proc/sys/vm/nr_overcommit_hugepages";
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
    on_demand_before: u64,
    _lock: File,
}

impl HugePages {
    /// Adds this many pages of 2 MiB to the machine's pool, for as long as the value lives.
    ///
    /// # Errors
    ///
    /// This is not root; the machine's memory is too full or too scattered.
    pub fn reserve(pages: u64) -> anyhow::Result<HugePages> {
        let reserved = HugePages::alone()?;
        let before = reserved.before;
        let mut there = before;
        for _ in 0..RESERVE_ROUNDS_MAX {
            std::fs::write(POOL, (before + pages).to_string()).with_context(|| format!("{POOL}: needs root"))?;
            there = number(POOL)?;
            // Those of a server that has just ended may not be free yet.
            if there == before + pages && reserved.available()? >= pages {
                return Ok(reserved);
            }
            // Others have left memory scattered; a kernel that cannot move it together says so, and the next round may
            // do.
            let _ = std::fs::write(COMPACT, "1");
            std::thread::sleep(RESERVE_PAUSE);
        }
        bail!("{there} huge pages instead of {}", before + pages)
    }

    /// None of their own: as many as [`HugePages::allow_on_demand`] allows are made when a program wants them.
    ///
    /// # Errors
    ///
    /// This is not root; the machine has huge pages of its own.
    pub fn none() -> anyhow::Result<HugePages> {
        let none = HugePages::alone()?;
        ensure!(none.before == 0, "{POOL} is {}", none.before);
        // Whoever wants pages of the kernel gets them only of memory that lies together.
        std::fs::write(COMPACT, "1").with_context(|| format!("{COMPACT}: needs root"))?;
        Ok(none)
    }

    /// So many pages may be made beyond those that are there always.
    ///
    /// # Errors
    ///
    /// This is not root.
    pub fn allow_on_demand(&self, pages: u64) -> anyhow::Result<()> {
        std::fs::write(ON_DEMAND, pages.to_string()).with_context(|| format!("{ON_DEMAND}: needs root"))
    }

    fn alone() -> anyhow::Result<HugePages> {
        let lock = File::create(LOCK).with_context(|| LOCK.to_owned())?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
        Ok(HugePages { before: number(POOL)?, on_demand_before: number(ON_DEMAND)?, _lock: lock })
    }

    /// All pages of the machine, used or not, with those made on demand.
    ///
    /// # Errors
    ///
    /// `/proc/meminfo` has no such line.
    pub fn total(&self) -> anyhow::Result<u64> {
        meminfo("HugePages_Total:")
    }

    /// Pages of the machine that nobody uses and nobody was promised.
    ///
    /// # Errors
    ///
    /// `/proc/meminfo` has no such lines.
    pub fn available(&self) -> anyhow::Result<u64> {
        meminfo("HugePages_Free:")?.checked_sub(meminfo("HugePages_Rsvd:")?).context("more promised than free")
    }
}

fn number(path: &str) -> anyhow::Result<u64> {
    std::fs::read_to_string(path)?.trim().parse().with_context(|| path.to_owned())
}

fn meminfo(name: &str) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    Ok(line.with_context(|| name.to_owned())?.trim().parse()?)
}

impl Drop for HugePages {
    fn drop(&mut self) {
        for (path, before) in [(POOL, self.before), (ON_DEMAND, self.on_demand_before)] {
            if let Err(error) = std::fs::write(path, before.to_string()) {
                eprintln!("{path} is not {before} again: {error}");
            }
        }
    }
}
