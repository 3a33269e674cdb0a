//! A control group of a test's own that bounds the memory of a server: the squeeze.
//!
//! Version 1 of the memory controller (kernel documentation, `admin-guide/cgroup-v1/memory.rst`).

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::Context;
use onecopy_postgres::{Server, processes_of};

/// Where the memory controller is mounted.
const MEMORY: &str = "/sys/fs/cgroup/memory";
/// Where processes can be put into groups: version 2 beside version 1, a hierarchy of version 1, version 2 alone.
const HIERARCHIES: [&str; 3] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup/freezer", "/sys/fs/cgroup"];
/// A group can be removed once its last process is reaped.
const REMOVE_ROUNDS_MAX: u32 = 3000;
const REMOVE_PAUSE: Duration = Duration::from_millis(20);

/// The kernel's own.
const SWAPPINESS_DEFAULT: u32 = 60;

/// How often a limit below what is used is tried.
const LIMIT_ROUNDS_MAX: u32 = 2400;
const LIMIT_PAUSE: Duration = Duration::from_millis(50);

/// A memory control group; removed with the value, its processes go to the root group.
#[derive(Debug)]
pub struct ControlGroup {
    directory: PathBuf,
}

/// What a group has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Shared memory in RAM.
    pub shared_bytes: u64,
    /// What lies in swap.
    pub swap_bytes: u64,
    /// Processes that were killed for want of memory.
    pub oom_kills: u64,
    /// All of it: processes, shared memory, page cache.
    pub total_bytes: u64,
    /// What the kernel cannot take back where nothing is swapped: locked memory, and what processes have of their own.
    pub kept_bytes: u64,
    /// How often the limit was met.
    pub limit_met: u64,
}

impl ControlGroup {
    /// Makes one without a limit.
    ///
    /// # Errors
    ///
    /// This is not root, or the machine has no memory controller of version 1.
    pub fn make() -> anyhow::Result<ControlGroup> {
        ControlGroup::make_in(Path::new(MEMORY)).context("needs root and the memory controller of version 1")
    }

    /// Makes one whose processes are known, and which bounds nothing: in any hierarchy, of either version.
    ///
    /// # Errors
    ///
    /// This is not root, or the machine has no control groups.
    pub fn make_unbounded() -> anyhow::Result<ControlGroup> {
        let hierarchy = HIERARCHIES.map(Path::new).into_iter().find(|path| path.join("cgroup.procs").exists());
        ControlGroup::make_in(hierarchy.context("the machine has no control groups")?)
    }

    fn make_in(hierarchy: &Path) -> anyhow::Result<ControlGroup> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = hierarchy.join(format!("onecopy-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&directory).with_context(|| directory.display().to_string())?;
        Ok(ControlGroup { directory })
    }

    /// Takes a running server with all its processes; what they touch from now on is counted here.
    ///
    /// # Errors
    ///
    /// The server does not run, the kernel refuses.
    pub fn take(&self, server: &Server) -> anyhow::Result<()> {
        // The postmaster first: its later children are born here.
        let postmaster = server.process_id().context("the server does not run")?;
        self.write("cgroup.procs", postmaster)?;
        for process in processes_of(server.data_directory()) {
            // One that has ended meanwhile needs no place.
            let _ = self.write("cgroup.procs", process);
        }
        Ok(())
    }

    /// Takes any process; what it touches from now on is counted here.
    ///
    /// # Errors
    ///
    /// There is no such process, the kernel refuses.
    pub fn take_process(&self, process: u32) -> anyhow::Result<()> {
        self.write("cgroup.procs", process)
    }

    /// Gives a process back to the group that all are in at first; what it has stays counted here.
    ///
    /// # Errors
    ///
    /// There is no such process, the kernel refuses.
    pub fn release_process(&self, process: u32) -> anyhow::Result<()> {
        std::fs::write(self.directory.with_file_name("cgroup.procs"), process.to_string())
            .with_context(|| format!("process {process}"))
    }

    /// Whether the kernel may move its memory to swap, unless it is over its limit and nothing else is left.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    pub fn set_swapped(&self, is_swapped: bool) -> anyhow::Result<()> {
        self.write("memory.swappiness", if is_swapped { SWAPPINESS_DEFAULT } else { 0 })
    }

    /// Sets the limit of RAM; what is over it is reclaimed before this returns.
    ///
    /// Copies of files that are not on disk yet cannot go: they are written first. On a slow disk memory of sleeping
    /// processes would go in their place, or processes would be killed.
    ///
    /// # Errors
    ///
    /// The kernel cannot reclaim so much.
    pub async fn limit(&self, bytes: u64) -> anyhow::Result<()> {
        tokio::task::spawn_blocking(rustix::fs::sync).await?;
        for _ in 0..LIMIT_ROUNDS_MAX {
            // The kernel gives up after some rounds of its own, and has reclaimed a part by then.
            if self.write("memory.limit_in_bytes", bytes).is_ok() {
                return Ok(());
            }
            tokio::time::sleep(LIMIT_PAUSE).await;
        }
        self.write("memory.limit_in_bytes", bytes)
    }

    /// What is used now.
    ///
    /// # Errors
    ///
    /// The kernel's files are not as documented.
    pub fn usage(&self) -> anyhow::Result<Usage> {
        Ok(Usage {
            shared_bytes: self.value("memory.stat", "total_shmem")?,
            swap_bytes: self.value("memory.stat", "total_swap")?,
            oom_kills: self.value("memory.oom_control", "oom_kill")?,
            total_bytes: self.read("memory.usage_in_bytes")?.trim().parse()?,
            kept_bytes: self.value("memory.stat", "total_unevictable")? + self.value("memory.stat", "total_rss")?,
            limit_met: self.read("memory.failcnt")?.trim().parse()?,
        })
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn value(&self, file: &str, key: &str) -> anyhow::Result<u64> {
        let text = self.read(file)?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(' '));
        let (_, value) = pairs.find(|(name, _)| *name == key).with_context(|| format!("{file} has no {key}"))?;
        Ok(value.trim().parse()?)
    }

    fn read(&self, file: &str) -> anyhow::Result<String> {
        let path = self.directory.join(file);
        std::fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    fn write(&self, file: &str, value: impl std::fmt::Display) -> anyhow::Result<()> {
        let path = self.directory.join(file);
        std::fs::write(&path, value.to_string()).with_context(|| format!("{value} to {}", path.display()))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        for _ in 0..REMOVE_ROUNDS_MAX {
            for process in self.read("cgroup.procs").unwrap_or_default().lines() {
                let _ = std::fs::write(self.directory.with_file_name("cgroup.procs"), process);
            }
            if std::fs::remove_dir(&self.directory).is_ok() {
                return;
            }
            std::thread::sleep(REMOVE_PAUSE);
        }
        eprintln!("{} is left behind", self.directory.display());
    }
}
