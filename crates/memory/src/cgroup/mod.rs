//! An instance's own cgroup: made, given limits, removed; versions 1 and 2.
//!
//! ```text
//!  <parent>/onecopy/<instance>     parent: the cgroup that the server was in, where a limit is above it: that limit still holds;
//!                                  else the root of the file system of cgroups
//! ```
//!
//! Memory that a process has touched before it was moved stays with the cgroup that it was in then: the whole pool is
//! counted here only when the server is moved before it has used it. A cgroup outlives the agent that made it; the next
//! one takes it over.
//!
//! A limit is never set below what cannot be had back, since the kernel would swap or kill then: pools are shrunk
//! first.
//!
//! Version 1 is tried on real hosts by the tests, version 2 on recorded files: see [`crate::pressure::Host`].

mod limits;
mod parent;
mod processes;

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::pressure::{GroupMemory, Hierarchy, Host, Version};
use crate::{InstanceName, MemoryError};

pub use limits::Limits;
pub use parent::parent_of;

/// All cgroups of ours are below one of this name.
const OURS: &str = "onecopy";
/// A cgroup whose last process is just ending cannot be removed for a moment; it is tried so often, with this pause.
const REMOVALS_MAX: u32 = 100;
const REMOVAL_PAUSE: Duration = Duration::from_millis(20);
/// The directory of all our cgroups goes with the last of them; it is made so often.
const CREATIONS_MAX: u32 = 100;

/// The cgroup of one instance.
#[derive(Debug)]
pub struct InstanceGroup {
    host: Arc<Host>,
    hierarchy: Hierarchy,
    directory: PathBuf,
    /// Where its first process came from, and where all go when it is removed.
    home: PathBuf,
}

impl InstanceGroup {
    /// Makes the cgroup of an instance below `parent` ([`parent_of`]), or takes over the one that is there.
    ///
    /// # Errors
    /// [`MemoryError::NotAllowed`] when this host has no controller for memory, or does not let this process use it:
    /// the reason says which and what would help.
    pub fn create(host: &Arc<Host>, parent: &Path, instance: &InstanceName) -> Result<InstanceGroup, MemoryError> {
        let hierarchy = host.hierarchy().ok_or_else(|| refused("no controller for memory is mounted"))?;
        let ours = parent.join(OURS);
        let directory = ours.join(instance.as_str());
        let mut tries = 1;
        while !make_both(hierarchy.version, parent, &ours, &directory)? {
            if tries == CREATIONS_MAX {
                return Err(refused(format!("{} is removed again and again", ours.display())));
            }
            tries += 1;
        }
        if GroupMemory::read(hierarchy.version, &directory)?.is_none() {
            return Err(refused(format!("{} has no files of the controller for memory", directory.display())));
        }
        let (host, hierarchy) = (Arc::clone(host), hierarchy.clone());
        Ok(InstanceGroup { host, hierarchy, directory, home: parent.to_owned() })
    }

    /// Its directory in the file system of cgroups.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its name for people: the path below the mount point.
    pub fn name(&self) -> String {
        self.hierarchy.name(&self.directory)
    }

    /// Moves a server's first process and all below it. Those that it starts later are born here. Tells how many were
    /// moved.
    ///
    /// # Errors
    /// [`MemoryError::Malformed`] when there is no such process, [`MemoryError::File`] when it may not be moved.
    pub fn take_in(&mut self, pid: u32) -> Result<usize, MemoryError> {
        if let Some(home) = self.host.group_of(pid)?.filter(|home| *home != self.directory) {
            self.home = home;
        }
        processes::move_family(&self.host, &self.directory, pid)
    }

    /// What it uses, and how often it was short of memory; none when somebody has removed it.
    ///
    /// # Errors
    /// [`MemoryError::File`], [`MemoryError::Malformed`].
    pub fn memory(&self) -> Result<Option<GroupMemory>, MemoryError> {
        GroupMemory::read(self.hierarchy.version, &self.directory)
    }

    /// Sets all limits at once.
    ///
    /// # Errors
    /// [`MemoryError::LimitBelowUsage`] with the figures, [`MemoryError::NotAllowed`] for what this version cannot do;
    /// nothing has changed then. [`MemoryError::File`].
    pub fn limit(&self, limits: &Limits) -> Result<(), MemoryError> {
        limits.set(self.hierarchy.version, &self.directory, &self.name())
    }

    /// Moves what is left in it to where its processes came from, and removes it. Waits up to two seconds for processes
    /// that end.
    ///
    /// # Errors
    /// [`MemoryError::File`] when it cannot be emptied.
    pub fn remove(self) -> Result<(), MemoryError> {
        let mut failure = ErrorKind::TimedOut.into();
        for _ in 0..REMOVALS_MAX {
            processes::move_all(&self.directory, &self.home)?;
            match fs::remove_dir(&self.directory) {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                Err(error) => failure = error,
            }
            thread::sleep(REMOVAL_PAUSE);
        }
        if self.directory.exists() {
            return Err(MemoryError::file("remove cgroup", &self.directory)(failure));
        }
        // Other instances may live there: then it stays.
        if let Some(ours) = self.directory.parent() {
            let _ = fs::remove_dir(ours);
        }
        Ok(())
    }
}

/// Makes the cgroup of all of ours and in it that of an instance, as far as they are not there. False when another
/// instance has gone just then and taken the first with it.
fn make_both(version: Version, parent: &Path, ours: &Path, directory: &Path) -> Result<bool, MemoryError> {
    for (above, group) in [(parent, ours), (ours, directory)] {
        if version == Version::V2 {
            enable_memory_controller(above)?;
        }
        match fs::create_dir(group) {
            Err(error) if error.kind() == ErrorKind::NotFound && group == directory => return Ok(false),
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(not_made(group, &error)),
            _ => {}
        }
    }
    Ok(true)
}

/// Version 2: what is below a cgroup has the controller for memory when the cgroup hands it down.
fn enable_memory_controller(group: &Path) -> Result<(), MemoryError> {
    write(&group.join("cgroup.subtree_control"), "+memory").map_err(|error| match error.kind() {
        ErrorKind::ResourceBusy => refused(format!(
            "processes are in {} itself, which must not have cgroups with limits then; limit that one from outside",
            group.display()
        )),
        ErrorKind::NotFound => refused(format!("{} is not handed the controller for memory", group.display())),
        _ => not_made(group, &error),
    })
}

fn not_made(group: &Path, error: &io::Error) -> MemoryError {
    let group = group.display();
    refused(match error.kind() {
        ErrorKind::ReadOnlyFilesystem => {
            format!("{group} is mounted read-only, as in most containers; set the limit where the container is started")
        }
        ErrorKind::PermissionDenied => {
            format!("{group} is not this user's to change; run as root, or have it delegated")
        }
        _ => format!("{group}: {error}"),
    })
}

fn refused(reason: impl Into<String>) -> MemoryError {
    MemoryError::NotAllowed { what: "a cgroup for an instance", reason: reason.into() }
}

/// Writes one of the kernel's files.
fn write(path: &Path, content: &str) -> io::Result<()> {
    OpenOptions::new().write(true).truncate(true).open(path)?.write_all(content.as_bytes())
}

#[cfg(test)]
mod tests;
