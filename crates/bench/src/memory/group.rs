//! The control group (version 1, `memory`) that takes memory away from a server.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use onecopy_postgres::{Server, processes_of};

const HIERARCHY: &str = "/sys/fs/cgroup/memory";
/// The kernel gives up after some rounds of reclaim of its own and has come nearer by then.
const LIMIT_TRIES_MAX: u32 = 600;
const LIMIT_PAUSE: Duration = Duration::from_millis(50);
/// A group can be removed when its last process is reaped.
const REMOVE_TRIES_MAX: u32 = 200;
const REMOVE_PAUSE: Duration = Duration::from_millis(20);

/// A group; removed with the value, its processes go to the root's.
#[derive(Debug)]
pub struct Group(PathBuf);

impl Group {
    /// Makes one without a limit, of which nobody is killed for want of memory: who needs some waits until some is
    /// swapped out (`memory.oom_control`, the kernel's Documentation/admin-guide/cgroup-v1/memory.rst).
    pub fn make() -> anyhow::Result<Group> {
        let directory = PathBuf::from(HIERARCHY).join(format!("onecopy-bench-{}", std::process::id()));
        std::fs::create_dir(&directory)
            .with_context(|| format!("{}: needs root and control groups of version 1", directory.display()))?;
        let group = Group(directory);
        group.write("memory.oom_control", 1)?;
        Ok(group)
    }

    /// Takes in a server with all its processes.
    pub fn take(&self, server: &Server) -> anyhow::Result<()> {
        // The postmaster first: its later children are born here.
        self.write("cgroup.procs", server.process_id().context("the server does not run")?)?;
        for process in processes_of(server.data_directory()) {
            // One that has ended meanwhile needs no place.
            let _ = self.write("cgroup.procs", process);
        }
        Ok(())
    }

    /// Limits its memory; what is over the limit is reclaimed before this ends.
    pub async fn limit(&self, bytes: u64) -> anyhow::Result<()> {
        for _ in 1..LIMIT_TRIES_MAX {
            if self.write("memory.limit_in_bytes", bytes).is_ok() {
                return Ok(());
            }
            tokio::time::sleep(LIMIT_PAUSE).await;
        }
        self.write("memory.limit_in_bytes", bytes)
    }

    /// What lies in swap, in bytes.
    pub fn swap_bytes(&self) -> anyhow::Result<u64> {
        self.value("memory.stat", "total_swap")
    }

    /// Processes that were killed for want of memory.
    pub fn kills(&self) -> anyhow::Result<u64> {
        self.value("memory.oom_control", "oom_kill")
    }

    fn value(&self, file: &str, key: &str) -> anyhow::Result<u64> {
        let path = self.0.join(file);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(' '));
        let (_, value) = pairs.find(|(name, _)| *name == key).with_context(|| format!("{file} has no {key}"))?;
        Ok(value.trim().parse()?)
    }

    fn write(&self, file: &str, value: impl std::fmt::Display) -> anyhow::Result<()> {
        let path = self.0.join(file);
        std::fs::write(&path, value.to_string()).with_context(|| format!("{value} to {}", path.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..REMOVE_TRIES_MAX {
            let processes = std::fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
            for process in processes.lines() {
                let _ = std::fs::write(PathBuf::from(HIERARCHY).join("cgroup.procs"), process);
            }
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(REMOVE_PAUSE);
        }
        eprintln!("onecopy-bench: {} is left behind", self.0.display());
    }
}
