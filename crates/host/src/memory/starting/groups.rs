//! The control groups of a cluster's servers: made when a server runs, followed over its restarts, removed when it has
//! stopped.
//!
//! A server outlives a daemon that is killed, and so does its group: the next daemon finds the server in it and takes
//! it over.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use onecopy_memory::cgroup::{InstanceGroup, Limits, parent_of};
use onecopy_memory::pressure::Host;
use onecopy_memory::{Bytes, InstanceName, MemoryError};
use onecopy_postgres::Server;

use super::super::configuration::CgroupUse;
use super::ServersMemory;
use crate::{HostError, Progress};

/// What is known of the groups, by the servers' data directories.
#[derive(Debug, Default)]
pub(in super::super) struct ServerGroups {
    taken: Mutex<BTreeMap<PathBuf, Taken>>,
    /// It was said that this host does not allow them.
    is_told: AtomicBool,
}

/// A server that was tried to be moved into its group.
#[derive(Debug, Clone)]
struct Taken {
    process_id: u32,
    group: InstanceName,
    /// Below which cgroup; none where it was not possible.
    parent: Option<PathBuf>,
}

impl ServerGroups {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn knows(&self, data_directory: &Path, process_id: u32) -> bool {
        self.lock().get(data_directory).is_some_and(|taken| taken.process_id == process_id)
    }
}

impl ServersMemory {
    /// Moves a server that has just started, or was taken over, into its group, and sets the limit. Where no groups are
    /// wanted, one that is left from before is given up.
    ///
    /// # Errors
    /// [`HostError::Memory`] where the configuration has `cgroup = "on"`; else it is said once, and the server runs on
    /// without.
    pub async fn group(&self, name: &str, server: &Server, progress: &dyn Progress) -> Result<(), HostError> {
        let Some(process_id) = server.process_id() else { return Ok(()) };
        if self.configuration().cgroup == CgroupUse::Off {
            self.remember_group(name, server);
            self.remove_group(name, server.data_directory(), progress).await;
            return Ok(());
        }
        match self.place(name, server.data_directory(), process_id).await {
            Err(error) if self.configuration().cgroup == CgroupUse::On => Err(error),
            Err(error) => {
                if !self.groups().is_told.swap(true, Ordering::Relaxed) {
                    progress.notice(format!("{name} and others run without a control group of their own: {error}"));
                }
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Moves servers that have come or were restarted, and removes the groups of those that have gone. What fails is
    /// logged once a start.
    pub async fn follow_groups(&self, servers: &BTreeMap<InstanceName, Arc<Server>>) {
        if self.configuration().cgroup == CgroupUse::Off {
            return;
        }
        for (name, server) in servers {
            let Some(process_id) = server.process_id() else { continue };
            if self.groups().knows(server.data_directory(), process_id) {
                continue;
            }
            match self.place(name.as_str(), server.data_directory(), process_id).await {
                Ok(()) => tracing::info!(server = %name, process_id, "memory: it is in its control group"),
                Err(error) => tracing::error!(server = %name, %error, "memory: it runs without its control group"),
            }
        }
        let there: BTreeSet<&Path> = servers.values().map(|server| server.data_directory()).collect();
        let tell = |event| tracing::warn!(?event, "memory: a control group stays");
        self.remove_groups_but(&there, &tell).await;
    }

    /// Removes the groups of servers that have ended, but those of `there`, by their data directories.
    pub async fn remove_groups_but(&self, there: &BTreeSet<&Path>, progress: &dyn Progress) {
        let gone: Vec<PathBuf> = {
            let taken = self.groups().lock();
            let gone = taken.iter().filter(|(directory, taken)| {
                !there.contains(directory.as_path()) && !Path::new(&format!("/proc/{}", taken.process_id)).exists()
            });
            gone.map(|(directory, _)| directory.clone()).collect()
        };
        for directory in gone {
            self.remove_group("a follower that has gone", &directory, progress).await;
        }
    }

    /// Notes in which group a server is that runs: when it has stopped, that cannot be seen any more.
    pub fn remember_group(&self, name: &str, server: &Server) {
        let Some(process_id) = server.process_id() else { return };
        let Ok(group) = group_name(name, server.data_directory()) else { return };
        let parent = Host::new().and_then(|host| {
            let present = host.group_of(process_id)?.filter(|present| present.ends_with(group.as_str()));
            present.map(|_| parent_of(&host, process_id, &group)).transpose()
        });
        if let Ok(Some(parent)) = parent {
            let taken = Taken { process_id, group, parent: Some(parent) };
            self.groups().lock().insert(server.data_directory().to_owned(), taken);
        }
    }

    /// Removes a server's group, if there is one; processes that are left in it live on outside.
    pub async fn remove_group(&self, name: &str, data_directory: &Path, progress: &dyn Progress) {
        let taken = self.groups().lock().remove(data_directory);
        let (group, parent) = match taken {
            Some(taken) => (Ok(taken.group), taken.parent),
            None => (group_name(name, data_directory), None),
        };
        let removed = match group {
            Ok(group) => blocking(move || remove(&group, parent)).await,
            Err(error) => Err(error.into()),
        };
        if let Err(error) = removed {
            progress.notice(format!("the control group of {name} stays: {error}"));
        }
    }

    async fn place(&self, name: &str, data_directory: &Path, process_id: u32) -> Result<(), HostError> {
        let group = group_name(name, data_directory)?;
        let taken = Taken { process_id, group: group.clone(), parent: None };
        // Also of what fails: it would fail again all the time.
        self.groups().lock().insert(data_directory.to_owned(), taken);
        let limit_bytes = self.limit_of(name, data_directory).map_err(HostError::InvalidMemory)?;
        let host = Arc::new(Host::new()?);
        let parent = parent_of(&host, process_id, &group)?;
        if let Some(taken) = self.groups().lock().get_mut(data_directory) {
            taken.parent = Some(parent.clone());
        }
        blocking(move || take_in(&host, &parent, &group, process_id, limit_bytes)).await
    }
}

fn take_in(
    host: &Arc<Host>,
    parent: &Path,
    name: &InstanceName,
    process_id: u32,
    limit_bytes: Option<Bytes>,
) -> Result<(), MemoryError> {
    let mut group = InstanceGroup::create(host, parent, name)?;
    if let Err(error) = group.take_in(process_id) {
        // A group without its server is of no use; that it may be left is less than why.
        let _ = group.remove();
        return Err(error);
    }
    group.limit(&Limits { max_bytes: limit_bytes, ..Limits::default() })
}

/// Without knowing the parent it is looked for where it can only be when this process stands where the one before did.
fn remove(name: &InstanceName, parent: Option<PathBuf>) -> Result<(), MemoryError> {
    let host = Arc::new(Host::new()?);
    let root = host.hierarchy().map(|hierarchy| hierarchy.mount_point.clone());
    let parents: BTreeSet<PathBuf> = parent.into_iter().chain(root).chain(host.group_of(std::process::id())?).collect();
    for parent in parents.into_iter().filter(|parent| parent.join("onecopy").join(name.as_str()).is_dir()) {
        InstanceGroup::create(&host, &parent, name)?.remove()?;
    }
    Ok(())
}

/// The kernel lets nobody run on while it moves processes, some milliseconds each.
async fn blocking(work: impl FnOnce() -> Result<(), MemoryError> + Send + 'static) -> Result<(), HostError> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.expect("it does not panic, and nobody cancels it")?)
}

/// Servers of several clusters of a host have the same names: a number made of the data directory's path tells them
/// apart, the same one each time.
fn group_name(name: &str, data_directory: &Path) -> Result<InstanceName, MemoryError> {
    let path = fs::canonicalize(data_directory).unwrap_or_else(|_| data_directory.to_owned());
    // FNV-1a; the standard library's hash may be another one in its next version. Source: Fowler, Noll, Vo.
    let number = path
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |number, byte| (number ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    Ok(format!("{name}.{number:016x}").parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_two_clusters_have_groups_of_their_own() {
        let name = |directory: &str| group_name("leader", Path::new(directory)).unwrap();
        assert_eq!(name("/nonexistent/a/leader/data"), name("/nonexistent/a/leader/data"));
        assert_ne!(name("/nonexistent/a/leader/data"), name("/nonexistent/b/leader/data"));
        // Also by the next version of this program.
        assert_eq!(group_name("a", Path::new("")).unwrap().as_str(), "a.cbf29ce484222325");
    }
}
