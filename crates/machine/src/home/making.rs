//! Making and removing a machine's directory.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onecopy_directory::{DirectoryLock, LockState, is_same_file, make_run, set_mode, short_directory};
use onecopy_disk::{BaseSpecification, CreateOptions, Disk};
use onecopy_postgres::ServiceUser;
use rustix::process::Signal;

use super::{MachineHome, copied_base};
use crate::files::{
    absent_is_fine, give_all, make_directory, make_own_directory, remove_any, remove_whole, write_own_file,
};
use crate::image::GuestImage;
use crate::keeper::{clear_memory, clear_network, end_left_servers, forget_restore};
use crate::migration::{self, Arrival, ArrivalSecrets};
use crate::{MachineConfiguration, MachineError};

/// What a new machine takes at first: a server's first data, its log, and what a guest writes about itself.
const NEW_MACHINE_BYTES: u64 = 256 << 20;

/// A child that is just being started has what its parent holds, for an instant.
const HOLD_TIMEOUT: Duration = Duration::from_millis(200);
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

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
            let _held = self.make_root(&image, user)?;
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

    /// What an attempt that fails has left is removed: nobody else would before the next attempt.
    pub(crate) fn make_or_remove(&self, make: impl FnOnce() -> Result<(), MachineError>) -> Result<(), MachineError> {
        let made = make();
        if made.as_ref().is_err_and(|error| !matches!(error, MachineError::Busy { .. }))
            && !self.is_made()
            && let Err(error) = self.remove_left()
        {
            tracing::warn!(machine = %self.name, %error, "a machine that could not be made has left something");
        }
        made
    }

    /// Makes a machine that comes from another host: all but its disk and its memory, which its keeper makes. What an
    /// interrupted attempt left, or one that has gone from here, is replaced; but the disk that is here stays where it
    /// may be compared with what comes: [`Arrival::may_compare`].
    ///
    /// # Errors
    /// As [`MachineHome::make`].
    pub fn make_arriving(
        &self,
        image: &GuestImage,
        configuration: &MachineConfiguration,
        record: &Arrival,
        secrets: ArrivalSecrets<'_>,
        user: &ServiceUser,
    ) -> Result<(), MachineError> {
        self.make_or_remove(|| {
            // Its disks lie over its image.
            let is_same_image = || {
                let digest = |image: &GuestImage| image.boot_digest().ok();
                GuestImage::find(Some(&self.image())).is_ok_and(|own| digest(&own) == digest(image))
            };
            let keeps_disks = record.compares_disk && Arrival::may_compare(self, secrets.came_by)? && is_same_image();
            self.remove_if(|| true, keeps_disks)?;
            let _held = match self.make_empty_root(image, user) {
                // Without the disk there may be.
                Err(MachineError::NoSpace { .. }) if keeps_disks => self.make_root(image, user)?,
                held => held?,
            };
            if let Some(password) = secrets.password {
                write_own_file(&self.password_file(), format!("{password}\n").as_bytes(), 0o600)?;
            }
            if let Some(secret) = secrets.secret {
                migration::note_came_by(self, secret)?;
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

    /// Makes its directory, with the image; what an interrupted attempt left is replaced. Nobody removes it while what
    /// is returned is held.
    pub(crate) fn make_root(&self, image: &GuestImage, user: &ServiceUser) -> Result<File, MachineError> {
        self.remove()?;
        self.make_empty_root(image, user)
    }

    fn make_empty_root(&self, image: &GuestImage, user: &ServiceUser) -> Result<File, MachineError> {
        self.check_space()?;
        make_directory(&self.root, 0o711)?;
        let held = self.hold()?.ok_or_else(|| self.busy())?;
        set_mode(&self.root, 0o711)?;
        user.check_reachable(&self.root)?;
        // The layers lie over it.
        if !self.layers_file().exists() {
            make_own_directory(&self.image(), 0o755)?;
            image.bring_to(&self.image())?;
        }
        Ok(held)
    }

    /// While this is held nobody else makes or removes it; none where it has no directory. It is the directory's own: a
    /// lock file in it would go with it, and whoever makes one of the same name meanwhile would have another.
    fn hold(&self) -> Result<Option<File>, MachineError> {
        let begun = Instant::now();
        while begun.elapsed() < HOLD_TIMEOUT {
            let root = match File::open(&self.root) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                root => root.map_err(MachineError::file("open", &self.root))?,
            };
            match root.try_lock() {
                Ok(()) if is_same_file(&root, &self.root) => return Ok(Some(root)),
                // It has gone meanwhile, or another one is there.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK_INTERVAL),
                Err(TryLockError::Error(error)) => return Err(MachineError::file("lock", &self.root)(error)),
            }
        }
        Err(self.busy())
    }

    fn busy(&self) -> MachineError {
        MachineError::Busy { doing: format!("{} is being made or removed", self.name) }
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
    /// [`MachineError::Runs`] when a keeper is there or comes meanwhile, [`MachineError::Busy`] while somebody else
    /// makes or removes it, [`MachineError::Directory`], [`MachineError::Disk`]: it is not known what the disk of
    /// another one lies over.
    pub fn remove(&self) -> Result<(), MachineError> {
        self.remove_if(|| true, false)
    }

    /// The same of what is left where no machine is, or is made meanwhile.
    ///
    /// # Errors
    /// As [`MachineHome::remove`].
    pub(crate) fn remove_left(&self) -> Result<(), MachineError> {
        self.remove_if(|| !self.is_made(), false)
    }

    /// The same of what is left of the copy that came by this token, and of no other one that is there by now.
    ///
    /// # Errors
    /// As [`MachineHome::remove`].
    pub fn remove_arrival(&self, token: &str) -> Result<(), MachineError> {
        let is_that = || matches!(Arrival::of(self), Ok(Some(known)) if known.token == token);
        self.remove_if(|| is_that() && Arrival::is_broken_off(self), false)
    }

    /// With `keeps_disks` all of its disks stay, with what they lie over, and what it went elsewhere by.
    fn remove_if(&self, is_to_go: impl Fn() -> bool, keeps_disks: bool) -> Result<(), MachineError> {
        let Some(_held) = self.hold()? else { return Ok(()) };
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
        let layers = match keeps_disks {
            true => {
                forget_restore(self)?;
                self.disks()
            }
            false => {
                remove_any(&self.went_by_file())?;
                self.layers()?
            }
        };
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
            let is_below_one = || layers.iter().any(|layer| copied_base(layer) == path);
            let others = [self.image(), self.layers_file(), self.keeper_lock(), self.went_by_file()];
            let is_kept = others.contains(&path);
            if is_kept || layers.contains(&path) || is_below_one() {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A small image of a guest in this directory.
    fn image_in(directory: &Path) -> GuestImage {
        let image = directory.join("image");
        fs::create_dir(&image).unwrap();
        for (name, content) in
            [("vmlinuz", "k"), ("initrd", "i"), ("root.img", "1234"), ("manifest.toml", "postgresql = \"17.6\"\n")]
        {
            fs::write(image.join(name), content).unwrap();
        }
        GuestImage::find(Some(&image)).unwrap()
    }

    /// A machine is made where a copy of before is being removed, and the other way round: one waits for the other, and
    /// neither takes what the other has.
    ///
    /// Spec: D8
    #[test]
    fn a_machine_is_not_removed_while_it_is_made_nor_made_while_it_is_removed() {
        const ROUNDS: usize = 300;
        let directory = tempfile::tempdir().unwrap();
        let (image, user) = (image_in(directory.path()), ServiceUser::resolve(None).unwrap());
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        let is_made = AtomicBool::new(false);
        let busy = |error: &MachineError| matches!(error, MachineError::Busy { .. } | MachineError::Runs { .. });
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| {
                while !is_made.load(Ordering::Relaxed) {
                    if let Err(error) = home.remove() {
                        assert!(busy(&error), "{error}");
                    }
                }
            });
            let mut made = 0;
            let result = loop {
                match home.make_root(&image, &user) {
                    Ok(_held) if made < ROUNDS => {
                        let password = write_own_file(&home.password_file(), b"secret", 0o600);
                        if let Err(error) = password.and(GuestImage::find(Some(&home.image())).map(|_| ())) {
                            break Err(error);
                        }
                        made += 1;
                    }
                    Ok(_held) => break Ok(()),
                    Err(error) if busy(&error) => {}
                    Err(error) => break Err(error),
                }
            };
            is_made.store(true, Ordering::Relaxed);
            removing.join().unwrap();
            result.unwrap();
        });

        // What is left of one copy is not what is left of the next.
        let held = home.make_root(&image, &user).unwrap();
        let record = r#"{"token":"second","origin":"there:1","keys":"/k","state":"begun","is_whole":false}"#;
        serde_json::from_str::<Arrival>(record).unwrap().write(&home).unwrap();
        assert!(matches!(home.remove_arrival("second"), Err(MachineError::Busy { .. })));
        drop(held);
        home.remove_arrival("first").unwrap();
        assert!(home.root().exists());
        home.remove_arrival("second").unwrap();
        assert!(!home.root().exists());
    }

    /// Spec: L2
    #[test]
    fn what_could_not_be_made_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let image = image_in(directory.path()).directory;
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        let user = ServiceUser::resolve(None).unwrap();
        let configuration = MachineConfiguration::new(image.clone());
        home.make(&configuration, Some("secret"), &user).unwrap();
        assert!(home.is_made());
        assert!(matches!(home.make(&configuration, None, &user), Err(MachineError::Exists { .. })) && home.is_made());
        home.remove().unwrap();
        let broken = || -> Result<(), MachineError> {
            let _held = home.make_root(&GuestImage::find(Some(&image))?, &user)?;
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
