//! Machines that began as another one was: which stand on whose disk, and making one.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use onecopy_disk::{BaseSpecification, Disk};
use onecopy_postgres::ServiceUser;
use serde::{Deserialize, Serialize};

use crate::home::write_own_file;
use crate::{GuestImage, MachineConfiguration, MachineError, MachineHome, MachineName};

/// At which checkpoint a machine begins, for one start: the file `restore` in its directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StartPoint {
    /// The checkpoint's number.
    pub number: u64,
    /// The directory of the machine that it is of; none: its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<PathBuf>,
    /// Its memory begins as a private view of a file that the parent's forks have in common.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares: bool,
}

/// A disk that lies over a snapshot of another machine's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dependent {
    /// Whose disk it is.
    pub machine: MachineName,
    /// The disk's directory over which it lies.
    pub disk: PathBuf,
    /// The snapshot in that; empty where the fork has not begun, and its disk is not made.
    pub snapshot: String,
}

impl MachineHome {
    /// The disks of other machines beside this one that lie over disks of it.
    ///
    /// # Errors
    /// [`MachineError::File`], [`MachineError::Disk`]: it is not known what a disk lies over.
    pub fn dependents(&self) -> Result<Vec<Dependent>, MachineError> {
        let resolve = |path: &Path| fs::canonicalize(path).map_err(MachineError::file("resolve", path));
        let (own, machines) = (resolve(self.root())?, self.root().parent().unwrap_or(Path::new("/")));
        let mut dependents = Vec::new();
        for name in MachineHome::names(machines)?.into_iter().filter(|name| name != self.name()) {
            let other = MachineHome::of(machines, &name);
            // A fork that has not begun yet has no disk, and needs this machine as well.
            if let Ok(Some(StartPoint { parent: Some(parent), .. })) = StartPoint::of(&other)
                && fs::canonicalize(&parent).is_ok_and(|parent| parent == own)
            {
                dependents.push(Dependent { machine: name.clone(), disk: own.clone(), snapshot: String::new() });
            }
            // What is being made or removed has no disk to lose; a fork that is being made holds this machine's lock.
            for disk in other.disks().into_iter().filter(|_| other.is_made()) {
                let Some(BaseSpecification::Disk { directory, snapshot }) =
                    Disk::geometry(&disk).map_err(other.disk_failed())?.base
                else {
                    continue;
                };
                let directory = disk.join(directory);
                // One that is gone is nobody's.
                let directory = if directory.exists() { resolve(&directory)? } else { continue };
                if directory.starts_with(&own) {
                    dependents.push(Dependent { machine: name.clone(), disk: directory, snapshot });
                }
            }
        }
        Ok(dependents)
    }

    /// Makes a machine that begins as `parent` was at a checkpoint: all but the disk, which its first start makes, of
    /// whatever command. What an interrupted attempt left is replaced.
    ///
    /// # Errors
    /// As [`MachineHome::make`].
    pub fn make_fork(
        &self,
        parent: &MachineHome,
        configuration: &MachineConfiguration,
        (number, shares): (u64, bool),
        user: &ServiceUser,
    ) -> Result<(), MachineError> {
        if self.is_made() {
            return Err(MachineError::Exists { name: self.name().clone() });
        }
        let image = GuestImage::find(Some(&parent.image()))?;
        self.make_root(&image, user)?;
        match fs::read(parent.password_file()) {
            Ok(password) => write_own_file(&self.password_file(), &password, 0o600)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(MachineError::file("read", parent.password_file())(error)),
        }
        StartPoint { number, parent: Some(parent.root().to_owned()), shares }.write(self)?;
        // Last: what has it is whole, or can begin.
        configuration.write(&self.configuration_file())
    }
}

impl StartPoint {
    /// That of a machine, if it has one.
    pub(crate) fn of(home: &MachineHome) -> Result<Option<StartPoint>, MachineError> {
        let path = home.restore_file();
        match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(MachineError::file("read", &path)(error)),
            Ok(text) => {
                serde_json::from_slice(&text).map(Some).map_err(|error| MachineError::file("read", &path)(error.into()))
            }
        }
    }

    /// Writes it down for the machine's next start.
    pub(crate) fn write(&self, home: &MachineHome) -> Result<(), MachineError> {
        let path = home.restore_file();
        let text = serde_json::to_vec(self).map_err(|error| MachineError::file("write", &path)(error.into()))?;
        write_own_file(&path, &text, 0o600)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: D6
    #[test]
    fn who_has_not_begun_yet_needs_its_parent_too() {
        let directory = tempfile::tempdir().unwrap();
        let [parent, fork] = ["first", "second"].map(|name| MachineHome::at(&directory.path().join(name)).unwrap());
        for home in [&parent, &fork] {
            fs::create_dir(home.root()).unwrap();
        }
        assert_eq!(parent.dependents().unwrap(), []);
        StartPoint { number: 1, parent: Some(parent.root().to_owned()), shares: true }.write(&fork).unwrap();
        let names: Vec<String> = parent.dependents().unwrap().iter().map(|other| other.machine.to_string()).collect();
        assert_eq!(names, ["second"]);
        assert_eq!(fork.dependents().unwrap(), []);
    }
}
