//! Making and removing a machine's directory.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use onecopy_directory::{DirectoryLock, LockState, make_run, set_mode, short_directory};
use onecopy_disk::{BaseSpecification, CreateOptions, Disk};
use onecopy_postgres::ServiceUser;
use rustix::process::Signal;

use super::{MachineHome, absent_is_fine, remove_any};
use crate::image::GuestImage;
use crate::keeper::{clear_memory, clear_network, end_left_servers};
use crate::migration::Arrival;
use crate::{MachineConfiguration, MachineError};

/// What a new machine takes at first: a server's first data, its log, and what a guest writes about itself.
const NEW_MACHINE_BYTES: u64 = 256 << 20;

impl MachineHome {
    /// Makes the machine, at rest, with the password of its server's superuser, if it has a server of its own; what an
    /// interrupted attempt left is replaced.
    ///
    /// # Errors
    /// [`MachineError::Exists`], [`MachineError::NoSpace`], [`MachineError::InvalidConfiguration`],
    /// [`MachineError::NoImage`], [`MachineError::Disk`], [`MachineError::Directory`].
    pub fn make(
        &self,
        configuration: &MachineConfiguration,
        password: Option<&str>,
        user: &ServiceUser,
    ) -> Result<(), MachineError> {
        configuration.check()?;
        let image = GuestImage::find(Some(&configuration.image))?;
        if configuration.disk_bytes < image.root_bytes {
            let (wanted, least) = (configuration.disk_bytes, image.root_bytes);
            let reason = format!("a disk of {wanted} bytes does not hold the image's {least}; give another --disk");
            return Err(MachineError::InvalidConfiguration { reason });
        }
        if self.is_made() {
            return Err(MachineError::Exists { name: self.name.clone() });
        }
        self.make_or_remove(|| {
            self.make_root(&image, user)?;
            let own = GuestImage::find(Some(&self.image()))?;
            let options = CreateOptions {
                size_bytes: configuration.disk_bytes,
                base: Some(BaseSpecification::Raw { path: own.root() }),
                copy_base: false,
            };
            let disk = self.numbered_disk(self.next_disk());
            Disk::create(&disk, &options).map_err(self.disk_failed())?;
            give_all(&disk, user)?;
            if let Some(password) = password {
                write_own_file(&self.password_file(), format!("{password}\n").as_bytes(), 0o600)?;
            }
            // Last: what has it is whole.
            configuration.write(&self.configuration_file())
        })
    }

    /// What an attempt that fails has left is removed: nobody else would before the next attempt. Nobody else makes it
    /// meanwhile.
    pub(crate) fn make_or_remove(&self, make: impl FnOnce() -> Result<(), MachineError>) -> Result<(), MachineError> {
        let made = make();
        if made.is_err()
            && !self.is_made()
            && let Err(error) = self.remove_if(|| !self.is_made())
        {
            tracing::warn!(machine = %self.name, %error, "a machine that could not be made has left something");
        }
        made
    }

    /// Makes a machine that comes from another host: all but its disk and its memory, which its keeper makes. What an
    /// interrupted attempt left, or one that has gone from here, is replaced.
    ///
    /// # Errors
    /// As [`MachineHome::make`].
    pub fn make_arriving(
        &self,
        image: &GuestImage,
        configuration: &MachineConfiguration,
        record: &Arrival,
        password: Option<&str>,
        user: &ServiceUser,
    ) -> Result<(), MachineError> {
        self.make_or_remove(|| {
            self.make_root(image, user)?;
            if let Some(password) = password {
                write_own_file(&self.password_file(), format!("{password}\n").as_bytes(), 0o600)?;
            }
            record.write(self)?;
            configuration.write(&self.configuration_file())
        })
    }

    /// Makes what a run needs and a restart of the host may have removed.
    ///
    /// # Errors
    /// [`MachineError::Directory`], [`onecopy_directory::DirectoryError::SocketDirectoryForeign`].
    pub fn make_run(&self, user: &ServiceUser) -> Result<(), MachineError> {
        make_run(&self.root, user)?;
        Ok(())
    }

    /// Makes its directory, with the image; what an interrupted attempt left is replaced.
    pub(crate) fn make_root(&self, image: &GuestImage, user: &ServiceUser) -> Result<(), MachineError> {
        self.remove()?;
        self.check_space()?;
        make_own_directory(&self.root, 0o711)?;
        user.check_reachable(&self.root)?;
        if self.layers_file().exists() {
            // The layers lie over it.
            return Ok(());
        }
        make_own_directory(&self.image(), 0o755)?;
        image.bring_to(&self.image())
    }

    fn check_space(&self) -> Result<(), MachineError> {
        let there = self.root.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
        let space = rustix::fs::statvfs(there)
            .map_err(|error| MachineError::file("ask for the free space of", there)(error.into()))?;
        let free_bytes = space.f_bavail * space.f_frsize;
        if free_bytes < NEW_MACHINE_BYTES {
            let (directory, name) = (there.to_owned(), self.name.clone());
            return Err(MachineError::NoSpace { directory, free_bytes, wanted_bytes: NEW_MACHINE_BYTES, name });
        }
        Ok(())
    }

    /// Removes all of a machine that does not run, and ends what served its disk; one that is not there is removed
    /// already. Disks that others lie over stay, see [`MachineHome::forget_layers`].
    ///
    /// # Errors
    /// [`MachineError::Runs`] when a keeper is there or comes meanwhile, [`MachineError::Directory`],
    /// [`MachineError::Disk`]: it is not known what the disk of another one lies over.
    pub fn remove(&self) -> Result<(), MachineError> {
        self.remove_if(|| true)
    }

    fn remove_if(&self, is_to_go: impl Fn() -> bool) -> Result<(), MachineError> {
        if !self.root.exists() {
            return Ok(());
        }
        // Nobody starts it from now on.
        let LockState::Taken(_lock) = DirectoryLock::take(&self.keeper_lock())? else {
            return Err(MachineError::Runs { name: self.name.clone() });
        };
        if !is_to_go() {
            return Ok(());
        }
        if self.process_id().is_some() {
            return Err(MachineError::Runs { name: self.name.clone() });
        }
        end_left_servers(self, Signal::KILL);
        clear_network(self)?;
        clear_memory(self)?;
        let run = self.root.join("run");
        let layers = self.layers()?;
        if !layers.is_empty() {
            let path = self.layers_file();
            fs::write(&path, "").map_err(MachineError::file("create", &path))?;
        }
        // First what makes it a machine: broken off here, it is none.
        let made = self.configuration_file();
        absent_is_fine(fs::remove_file(&made)).map_err(MachineError::file("remove", &made))?;
        // Only where our own link leads: this may remove anything.
        if let Ok(short) = fs::read_link(&run)
            && short == short_directory(&self.root)
        {
            absent_is_fine(fs::remove_dir_all(&short)).map_err(MachineError::file("remove", &short))?;
        }
        match layers.is_empty() {
            true => remove_whole(&self.root).map_err(MachineError::file("remove", &self.root)),
            false => self.remove_all_but(&layers),
        }
    }

    /// Leaves these disks, what they lie over here, and the lock that is held.
    fn remove_all_but(&self, layers: &[PathBuf]) -> Result<(), MachineError> {
        let highest = (0..=self.last_disk()).filter(|number| layers.contains(&self.numbered_disk(*number))).max();
        for entry in fs::read_dir(&self.root).map_err(MachineError::file("read", &self.root))? {
            let path = entry.map_err(MachineError::file("read", &self.root))?.path();
            if layers.contains(&path) || [self.image(), self.layers_file(), self.keeper_lock()].contains(&path) {
                continue;
            }
            let is_below = |number: u64| (1..number).any(|number| self.numbered_disk(number) == path);
            if highest.is_some_and(is_below) {
                self.empty_disk(&path)?;
                continue;
            }
            remove_any(&path)?;
        }
        Ok(())
    }
}

/// Writes a file of our own, whole or not at all, durable when it returns but for its name.
pub(crate) fn write_own_file(path: &Path, content: &[u8], mode: u32) -> Result<(), MachineError> {
    let unfinished = path.with_extension("unfinished");
    absent_is_fine(fs::remove_file(&unfinished)).map_err(MachineError::file("remove", &unfinished))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&unfinished);
    let mut file = file.map_err(MachineError::file("create", &unfinished))?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(MachineError::file("write", &unfinished))?;
    fs::rename(&unfinished, path).map_err(MachineError::file("replace", path))
}

/// Removes a directory, also where somebody who looks for what is in it makes a lock anew meanwhile: without what says
/// which machine it was nobody would remove the rest.
fn remove_whole(path: &Path) -> std::io::Result<()> {
    const TRIES: u32 = 100;
    for _ in 1..TRIES {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
            removed => return absent_is_fine(removed),
        }
    }
    absent_is_fine(fs::remove_dir_all(path))
}

fn make_own_directory(path: &Path, mode: u32) -> Result<(), MachineError> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(MachineError::file("create", path)(error)),
        _ => Ok(set_mode(path, mode)?),
    }
}

/// Gives a directory and all in it to the account that machines run as; the directory last, so that nobody changes what
/// is in it meanwhile.
pub(crate) fn give_all(path: &Path, user: &ServiceUser) -> Result<(), MachineError> {
    let metadata = fs::symlink_metadata(path).map_err(MachineError::file("look at", path))?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).map_err(MachineError::file("read", path))? {
            give_all(&entry.map_err(MachineError::file("read", path))?.path(), user)?;
        }
    }
    Ok(user.own(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: L2
    #[test]
    fn what_could_not_be_made_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        fs::create_dir(&image).unwrap();
        for (name, content) in
            [("vmlinuz", "k"), ("initrd", "i"), ("root.img", "1234"), ("manifest.toml", "postgresql = \"17.6\"\n")]
        {
            fs::write(image.join(name), content).unwrap();
        }
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        let user = ServiceUser::resolve(None).unwrap();
        let configuration = MachineConfiguration::new(image.clone());
        home.make(&configuration, Some("secret"), &user).unwrap();
        assert!(home.is_made());
        assert!(matches!(home.make(&configuration, None, &user), Err(MachineError::Exists { .. })) && home.is_made());
        home.remove().unwrap();
        let broken = || -> Result<(), MachineError> {
            home.make_root(&GuestImage::find(Some(&image))?, &user)?;
            write_own_file(&home.root().join("none").join("file"), b"", 0o600)
        };
        assert!(matches!(broken(), Err(MachineError::File { .. })) && home.root().exists());
        assert!(matches!(home.make_or_remove(broken), Err(MachineError::File { .. })));
        assert!(!home.root().exists());
    }

    /// Spec: L2
    #[test]
    fn who_asks_for_a_lock_meanwhile_does_not_keep_a_machine_from_being_removed() {
        const ASKED: u32 = 3;
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("web");
        let home = MachineHome::at(&root).unwrap();
        fs::create_dir(&root).unwrap();
        for number in 0..2000 {
            fs::write(root.join(number.to_string()), b"").unwrap();
        }
        let lock = home.keeper_lock();
        let asking = std::thread::spawn(move || {
            for _ in 0..ASKED {
                // Made by who removes the machine, and gone with what it has removed.
                while !lock.exists() && root.join("0").exists() {}
                while lock.exists() {}
                let _ = fs::File::create_new(&lock);
            }
        });
        home.remove().unwrap();
        asking.join().unwrap();
        assert!(!home.root().exists());
    }
}
