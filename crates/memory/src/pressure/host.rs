//! The pressure on this host, from the kernel's files.

use std::path::{Path, PathBuf};

use tokio::sync::OnceCell;

use crate::{BindingLimit, Bytes, HostPressure, MemoryError};

use super::group::GroupMemory;
use super::hierarchy::{Hierarchy, below};
use super::meminfo::MemoryInformation;
use super::psi::{Stall, Threshold, Trigger};
use super::watch::Watch;
use super::{Source, StallFuture, text};

/// The kernel's files of this host. Of cgroups the version is found out that has the controller for memory.
///
/// Version 1 is tried on real hosts by the tests. Version 2 is tried on recorded files: the hosts of our tests have it
/// without the controller for memory.
#[derive(Debug)]
pub struct Host {
    root: PathBuf,
    hierarchy: Option<Hierarchy>,
    trigger: OnceCell<Option<Watch>>,
}

impl Host {
    /// This host.
    ///
    /// # Errors
    /// [`MemoryError::File`] when the kernel's files cannot be read.
    pub fn new() -> Result<Host, MemoryError> {
        Host::recorded(Path::new("/"))
    }

    /// A host whose files (`proc/..`, `sys/fs/cgroup/..`) were recorded below `root`.
    ///
    /// # Errors
    /// As [`Host::new`].
    pub fn recorded(root: &Path) -> Result<Host, MemoryError> {
        let hierarchy = Hierarchy::find(root)?;
        Ok(Host { root: root.to_owned(), hierarchy, trigger: OnceCell::new() })
    }

    /// Where cgroups with the controller for memory are; none where there are none.
    pub fn hierarchy(&self) -> Option<&Hierarchy> {
        self.hierarchy.as_ref()
    }

    /// The directory of a process's cgroup; none where there are no cgroups with the controller for memory.
    ///
    /// # Errors
    /// [`MemoryError::Malformed`] when there is no such process; [`MemoryError::File`].
    pub fn group_of(&self, pid: u32) -> Result<Option<PathBuf>, MemoryError> {
        self.hierarchy.as_ref().map(|hierarchy| hierarchy.group_of(&self.root, pid)).transpose()
    }

    /// What `/proc/meminfo` says.
    ///
    /// # Errors
    /// [`MemoryError::File`], [`MemoryError::Malformed`].
    pub fn memory(&self) -> Result<MemoryInformation, MemoryError> {
        let path = below(&self.root, Path::new("/proc/meminfo"));
        let content = text::read(&path)?.ok_or_else(|| text::malformed(&path, "there is no such file"))?;
        MemoryInformation::parse(&content, &path)
    }

    /// Every cgroup above a process that has a limit, from its own upwards.
    ///
    /// # Errors
    /// [`MemoryError::Malformed`] when there is no such process; [`MemoryError::File`].
    pub fn limits_of(&self, pid: u32) -> Result<Vec<BindingLimit>, MemoryError> {
        let Some(hierarchy) = &self.hierarchy else {
            return Ok(Vec::new());
        };
        let mut limits = Vec::new();
        for group in hierarchy.upwards(&hierarchy.group_of(&self.root, pid)?) {
            let memory = GroupMemory::read(hierarchy.version, &group)?;
            limits.extend(memory.and_then(|memory| memory.limit(hierarchy.name(&group))));
        }
        Ok(limits)
    }

    fn stall_path(&self) -> PathBuf {
        below(&self.root, Path::new("/proc/pressure/memory"))
    }

    /// Set once and kept: a new one would not know of stalls before it.
    async fn trigger(&self) -> Option<&Watch> {
        let set = async || {
            let trigger = Trigger::set(&self.stall_path(), Threshold::default());
            let watched = trigger.map_err(|error| error.to_string());
            let watched = watched.and_then(|trigger| Watch::of(trigger).map_err(|error| error.to_string()));
            watched.inspect_err(|error| tracing::info!(error, "stalls for memory are seen at the next round only")).ok()
        };
        self.trigger.get_or_init(set).await.as_ref()
    }
}

impl Source for Host {
    /// Without a limit: those above a server come with its observation ([`Host::limits_of`]), and this process may have
    /// others.
    fn pressure(&self) -> Result<HostPressure, MemoryError> {
        let memory = self.memory()?;
        let stall = Stall::read(&self.stall_path())?;
        Ok(HostPressure {
            available_bytes: memory.available_bytes,
            total_bytes: memory.total_bytes,
            swap_used_bytes: memory.swap_used_bytes(),
            psi_some_avg10: stall.map(|stall| stall.some.avg10),
            psi_full_avg10: stall.map(|stall| stall.full.avg10),
            limit: None,
        })
    }

    fn stalled(&self) -> StallFuture<'_> {
        Box::pin(async {
            match self.trigger().await {
                Some(trigger) if trigger.fired().await.is_ok() => {}
                _ => std::future::pending().await,
            }
        })
    }
}

impl BindingLimit {
    /// Where it begins to hurt: the lower of both limits.
    pub fn bound_bytes(&self) -> Bytes {
        self.limit_bytes.unwrap_or(Bytes::MAX).min(self.high_bytes.unwrap_or(Bytes::MAX))
    }

    /// What can still be had below it without swapping.
    pub fn available_bytes(&self) -> Bytes {
        self.bound_bytes().saturating_sub(self.usage_bytes.saturating_sub(self.reclaimable_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A container of version 2: its cgroup has a limit, the one above a lower one in effect, since others use it, too.
    fn container() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let write = |path: &str, content: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("a directory");
            fs::write(path, content).expect("a file");
        };
        write("proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\nSwapTotal: 1024 kB\nSwapFree: 1000 kB\n");
        write(
            "proc/pressure/memory",
            "some avg10=1.50 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=1\n",
        );
        write("proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        write("proc/1/cgroup", "0::/pod/server\n");
        write("proc/7/cgroup", "0::/\n");
        write("sys/fs/cgroup/cgroup.controllers", "memory\n");
        write("sys/fs/cgroup/pod/memory.current", "900\n");
        write("sys/fs/cgroup/pod/memory.max", "1000\n");
        write("sys/fs/cgroup/pod/memory.high", "max\n");
        write("sys/fs/cgroup/pod/server/memory.current", "200\n");
        write("sys/fs/cgroup/pod/server/memory.max", "600\n");
        write("sys/fs/cgroup/pod/server/memory.high", "500\n");
        root
    }

    #[test]
    fn every_limit_above_a_process_is_seen() {
        let root = container();
        let host = Host::recorded(root.path()).expect("readable");
        let pressure = host.pressure().expect("whole files");
        assert_eq!((pressure.total_bytes, pressure.available_bytes), (1 << 30, 1 << 29));
        assert_eq!(
            (pressure.swap_used_bytes, pressure.psi_some_avg10, pressure.psi_full_avg10),
            (24 << 10, Some(1.5), Some(0.5))
        );
        let limits = host.limits_of(1).expect("a process");
        let bounds: Vec<_> = limits.iter().map(|limit| (limit.cgroup.as_str(), limit.bound_bytes())).collect();
        assert_eq!(bounds, [("/pod/server", 500), ("/pod", 1000)], "high binds before max");
        assert_eq!(limits.iter().map(BindingLimit::available_bytes).min(), Some(100), "the looser one is fuller");
        assert_eq!(host.limits_of(7).expect("a process in the root"), []);
        assert!(host.limits_of(8).expect_err("no such process").to_string().contains("no such process"));
    }

    #[test]
    fn a_host_without_psi_and_without_cgroups_has_neither() {
        let root = container();
        fs::remove_file(root.path().join("proc/pressure/memory")).expect("it was there");
        fs::write(root.path().join("sys/fs/cgroup/cgroup.controllers"), "cpu\n").expect("a file");
        let host = Host::recorded(root.path()).expect("readable");
        assert_eq!(host.pressure().expect("whole files").psi_some_avg10, None);
        assert_eq!(host.limits_of(1).expect("no controller, no limit"), []);
    }
}
