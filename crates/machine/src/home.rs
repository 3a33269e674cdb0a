//! Where a machine keeps what, and making and removing that.
//!
//! ```text
//! machines/web/    ours; the account that QEMU and the disk's server run as passes through it, and owns `disk/` and `run/` alone
//!   machine.toml   what it is made of
//!   password       of its server's superuser, where it has a server that is no cluster's; readable by its owner only
//!   image/         the guest image that it was made from: links or copies
//!   disk/          its disk, see docs/disk-format.md; it begins with the image's root file system
//!   disk.1/, ..    those of its restores, of which the last is its disk
//!   checkpoints/   see docs/checkpoint-format.md; frozen.*: their memory, as forks map it
//!   restore        at which checkpoint its next start begins; restoring: the disk that is being made for that
//!   memory         where its memory is mounted while it runs; memory.shadow, .sock, .log and .pid: of what serves that
//!   isolated       while it is a fork that has no network yet; layers: others lie over disks of a machine that was here
//!   network.sock, network.log and network.pid: of what passes its frames, where it is on a bridge; network.holding: they are held;
//!                  identity: of which boot the guest has the addresses that it shall have
//!   forks.lock     held while forks of it are made; fork.lock: while a checkpoint is taken for one
//!   keeper.log     what its keeper did
//!   keeper.lock    held by its keeper, from before that begins
//!   disk.log       what the process said that served its disk
//!   disk.pid       the number of that process, for people
//!   end.json       how its last run ended
//!   standing.json  what it shall do, for its next keeper
//!   run/           sockets, QEMU's number, console; a link to a short directory where the path would be too long for the kernel
//! ```
//!
//! Its path is in its disks' headers (the image, and what they lie over), in the start points of its forks, in `run`,
//! and in its card's address: a machine cannot be moved or renamed as it is.
//!
//! What a keeper or a command reads, writes or removes by its path, with the rights of whoever has started it, lies
//! where the other account can lay no links.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onecopy_disk::{BaseSpecification, CreateOptions, Disk};
use onecopy_hypervisor::MachineDirectory;
use onecopy_postgres::ServiceUser;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::image::GuestImage;
use super::keeper::{clear_memory, clear_network, end_left_servers};
use super::migration::Arrival;
use super::{MachineConfiguration, MachineError, MachineName, desired_state};
use onecopy_directory::{DirectoryLock, LockState};
use onecopy_directory::{make_run, set_mode, short_directory};

/// What a new machine takes at first: a server's first data, its log, and what a guest writes about itself.
const NEW_MACHINE_BYTES: u64 = 256 << 20;

/// The longest note about an end that is read.
const END_BYTES_MAX: u64 = 1 << 20;

/// How long a fork waits while its parent forgets checkpoints.
const FORGET_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Restores of a machine, each of which makes a disk.
const DISKS_MAX: u64 = 1 << 16;

/// How a machine's last run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineEnd {
    /// It was asked to, or has switched itself off.
    pub clean: bool,
    /// Why, with the last it said where that was not wanted.
    pub reason: String,
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
}

/// The directory of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineHome {
    name: MachineName,
    root: PathBuf,
}

impl MachineHome {
    /// The machine of this name below the directory `machines`, which may not be there.
    pub fn of(machines: &Path, name: &MachineName) -> MachineHome {
        MachineHome { name: name.clone(), root: machines.join(name.as_str()) }
    }

    /// The machine that lies in this directory.
    ///
    /// # Errors
    /// [`MachineError::InvalidName`] when its last part is no machine's name, [`MachineError::Directory`].
    pub fn at(root: &Path) -> Result<MachineHome, MachineError> {
        let root = std::path::absolute(root).map_err(MachineError::file("resolve", root))?;
        let name = root.file_name().unwrap_or_default().to_string_lossy().parse()?;
        Ok(MachineHome { name, root })
    }

    /// Names of the machines below the directory `machines`, in their order.
    ///
    /// # Errors
    /// [`MachineError::Directory`].
    pub fn names(machines: &Path) -> Result<Vec<MachineName>, MachineError> {
        let entries = match fs::read_dir(machines) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(MachineError::file("read", machines))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(MachineError::file("read", machines))?;
            names.extend(entry.file_name().to_str().and_then(|name| name.parse().ok()));
        }
        names.sort();
        Ok(names)
    }

    /// The machine's name.
    pub fn name(&self) -> &MachineName {
        &self.name
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What it is made of.
    pub fn configuration_file(&self) -> PathBuf {
        self.root.join("machine.toml")
    }

    /// The password of its server's superuser, where it has a server that is no cluster's.
    pub fn password_file(&self) -> PathBuf {
        self.root.join("password")
    }

    /// Its disk: `disk`, or after restores the last of `disk.1`, `disk.2`, .., each of which begins as a checkpoint
    /// found the one that it was taken of.
    pub fn disk(&self) -> PathBuf {
        self.numbered_disk(self.last_disk())
    }

    /// Its disk, and those that its restores have left behind.
    pub(super) fn disks(&self) -> Vec<PathBuf> {
        let disks = (0..=self.last_disk()).map(|number| self.numbered_disk(number));
        // What was removed from between others has left its name.
        disks.filter(|disk| disk.join("header").exists()).collect()
    }

    /// The number that a new disk has.
    pub(super) fn next_disk(&self) -> u64 {
        let last = self.last_disk();
        let first = fs::symlink_metadata(self.numbered_disk(0));
        match last == 0 && matches!(first, Err(error) if error.kind() == ErrorKind::NotFound) {
            true => 0,
            false => last + 1,
        }
    }

    /// Removes a disk, and leaves its name where numbers behind it are in use.
    pub(super) fn empty_disk(&self, disk: &Path) -> Result<(), MachineError> {
        absent_is_fine(fs::remove_dir_all(disk)).map_err(MachineError::file("remove", disk))?;
        match *disk == self.numbered_disk(0) {
            true => Ok(()),
            false => fs::create_dir(disk).map_err(MachineError::file("create", disk)),
        }
    }

    /// There while disks lie here over which others lie, of a machine that is gone, or was made anew.
    pub(super) fn layers_file(&self) -> PathBuf {
        self.root.join("layers")
    }

    /// The number of its disk; 0 is the one that it was made with. Each restore makes the next one, so the last before
    /// a gap is it, whatever copies somebody has laid beside. One that cannot be looked at counts as there: an older
    /// one must not take its place.
    pub(super) fn last_disk(&self) -> u64 {
        let is_there = |number: &u64| {
            let looked = fs::symlink_metadata(self.numbered_disk(*number));
            !matches!(looked, Err(error) if error.kind() == ErrorKind::NotFound)
        };
        (1..=DISKS_MAX).take_while(is_there).last().unwrap_or(0)
    }

    /// Its checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// The number of the checkpoint at which it shall begin, for one start.
    pub(super) fn restore_file(&self) -> PathBuf {
        self.root.join("restore")
    }

    /// Held shared while a fork of it is made, and alone by who forgets what that may need.
    fn forks_lock(&self) -> PathBuf {
        self.root.join("forks.lock")
    }

    /// While this is held, neither its checkpoints nor it itself go. Blocks while some are being forgotten, a minute at
    /// most.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn keep_for_forks(&self) -> Result<File, MachineError> {
        let path = self.forks_lock();
        let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
        let lock = lock.map_err(MachineError::file("open", &path))?;
        let begun = Instant::now();
        loop {
            match lock.try_lock_shared() {
                Ok(()) => return Ok(lock),
                Err(TryLockError::WouldBlock) if begun.elapsed() < FORGET_TIMEOUT => std::thread::sleep(LOOK_INTERVAL),
                Err(error) => return Err(MachineError::file("lock", &path)(error.into())),
            }
        }
    }

    /// Held by the command that takes a checkpoint for a fork: one at a time is taken, and others wait for theirs.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn take_turn_to_fork(&self) -> Result<File, MachineError> {
        let path = self.root.join("fork.lock");
        let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
        let lock = lock.and_then(|lock| lock.lock().map(|()| lock));
        lock.map_err(MachineError::file("lock", &path))
    }

    /// The same for who deletes it.
    ///
    /// # Errors
    /// [`MachineError::Runs`] while a fork of it is being made, [`MachineError::File`].
    pub fn keep_from_new_forks(&self) -> Result<File, MachineError> {
        let alone = self.keep_from_forks().map_err(MachineError::file("lock", self.forks_lock()))?;
        alone.ok_or_else(|| MachineError::Runs { name: self.name.clone() })
    }

    /// While this is held no fork of it is made; none while one is being made.
    pub(super) fn keep_from_forks(&self) -> std::io::Result<Option<File>> {
        let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(self.forks_lock())?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(lock)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// While a fork's network card has no cable in it: it does not know yet who it is.
    pub(super) fn isolated_file(&self) -> PathBuf {
        self.root.join("isolated")
    }

    /// While there may be a checkpoint of a held server, for forks: the number of that.
    pub(super) fn held_file(&self) -> PathBuf {
        self.root.join("held")
    }

    /// While a restore has made a disk that no guest has run on: the number of that.
    pub(super) fn restoring_file(&self) -> PathBuf {
        self.root.join("restoring")
    }

    /// The disk of this number.
    pub(super) fn numbered_disk(&self, number: u64) -> PathBuf {
        match number {
            0 => self.root.join("disk"),
            number => self.root.join(format!("disk.{number}")),
        }
    }

    /// The image that it was made from.
    pub fn image(&self) -> PathBuf {
        self.root.join("image")
    }

    /// What its keeper did.
    pub fn keeper_log(&self) -> PathBuf {
        self.root.join("keeper.log")
    }

    /// What the process said that served its disk.
    pub fn disk_log(&self) -> PathBuf {
        self.root.join("disk.log")
    }

    /// Held by the keeper.
    pub(super) fn keeper_lock(&self) -> PathBuf {
        self.root.join("keeper.lock")
    }

    /// Whether a keeper is there, also one that does not listen yet, or not any more.
    pub fn has_keeper(&self) -> bool {
        // A lock that cannot be looked at is nobody's: whoever needs it is told why.
        DirectoryLock::is_held(&self.keeper_lock()).unwrap_or(false)
    }

    /// The number of the process that serves its disk, for people.
    pub(super) fn disk_process_file(&self) -> PathBuf {
        self.root.join("disk.pid")
    }

    /// Its memory, a file that its memory server serves, where it has one. Here, and not in `run`: where something is
    /// mounted only we may write.
    pub fn memory(&self) -> PathBuf {
        self.root.join("memory")
    }

    /// What of its memory is kept beside the page cache.
    pub(super) fn memory_shadow(&self) -> PathBuf {
        self.root.join("memory.shadow")
    }

    /// Where its memory server is asked; as with [`MachineHome::keeper_socket`].
    pub(super) fn memory_socket(&self) -> PathBuf {
        self.root.join("memory.sock")
    }

    /// What the process said that served its memory.
    pub fn memory_log(&self) -> PathBuf {
        self.root.join("memory.log")
    }

    /// The number of the process that serves its memory, for people.
    pub(super) fn memory_process_file(&self) -> PathBuf {
        self.root.join("memory.pid")
    }

    /// Where its network holder is asked; as with [`MachineHome::keeper_socket`].
    pub(super) fn network_socket(&self) -> PathBuf {
        self.root.join("network.sock")
    }

    /// What the process said that passed its frames.
    pub fn network_log(&self) -> PathBuf {
        self.root.join("network.log")
    }

    /// The number of that process, for people.
    pub(super) fn network_process_file(&self) -> PathBuf {
        self.root.join("network.pid")
    }

    /// What it sends is held, also by a holder that finds nothing of the one before.
    pub(super) fn holding_file(&self) -> PathBuf {
        self.root.join("network.holding")
    }

    /// Which boot of the guest has got the addresses that it shall have.
    pub(super) fn identity_file(&self) -> PathBuf {
        self.root.join("identity")
    }

    /// `run`, or where that leads.
    pub fn run(&self) -> PathBuf {
        let run = self.root.join("run");
        fs::read_link(&run).unwrap_or(run)
    }

    /// A file in `run`.
    pub fn in_run(&self, name: &str) -> PathBuf {
        self.run().join(name)
    }

    /// QEMU's process, while the machine runs, whoever looks after it.
    pub fn process_id(&self) -> Option<u32> {
        let directory = MachineDirectory::new(self.run()).ok()?;
        onecopy_hypervisor::Machine::running_process(&directory).ok().flatten()
    }

    /// The keeper's socket; its name may be too long for the kernel: see the keeper's own functions for it.
    pub fn keeper_socket(&self) -> PathBuf {
        self.root.join("keeper.sock")
    }

    /// What the guest writes to its console.
    pub fn console_log(&self) -> PathBuf {
        self.in_run("console.log")
    }

    fn end_file(&self) -> PathBuf {
        self.root.join("end.json")
    }

    /// Whether there is a machine that was made completely.
    pub fn is_made(&self) -> bool {
        self.configuration_file().exists()
    }

    /// What it is made of.
    ///
    /// # Errors
    /// As [`MachineConfiguration::read`].
    pub fn configuration(&self) -> Result<MachineConfiguration, MachineError> {
        MachineConfiguration::read(&self.configuration_file())
    }

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
        self.make_root(image, user)?;
        if let Some(password) = password {
            write_own_file(&self.password_file(), format!("{password}\n").as_bytes(), 0o600)?;
        }
        record.write(self)?;
        configuration.write(&self.configuration_file())
    }

    /// Whether its disk has gone on elsewhere for good, and its memory with it.
    pub fn is_migrated(&self) -> bool {
        desired_state::is_migrated(self)
    }

    /// Whether it has come from elsewhere, and may run there still.
    pub fn is_arriving(&self) -> bool {
        desired_state::is_arriving(self)
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
    pub(super) fn make_root(&self, image: &GuestImage, user: &ServiceUser) -> Result<(), MachineError> {
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
        if !self.root.exists() {
            return Ok(());
        }
        // Nobody starts it from now on.
        let LockState::Taken(_lock) = DirectoryLock::take(&self.keeper_lock())? else {
            return Err(MachineError::Runs { name: self.name.clone() });
        };
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
            true => absent_is_fine(fs::remove_dir_all(&self.root)).map_err(MachineError::file("remove", &self.root)),
            false => self.remove_all_but(&layers),
        }
    }

    /// Leaves these disks, what they lie over here, and the lock that is held.
    fn remove_all_but(&self, layers: &[PathBuf]) -> Result<(), MachineError> {
        let highest = (0..=self.last_disk()).filter(|number| layers.contains(&self.numbered_disk(*number))).max();
        let failed = |path: &Path| MachineError::file("remove", path.to_owned());
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
            let metadata = fs::symlink_metadata(&path).map_err(failed(&path))?;
            let removed = if metadata.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            absent_is_fine(removed).map_err(failed(&path))?;
        }
        Ok(())
    }

    /// How its last run ended; none when nobody has noted that.
    pub fn end(&self) -> Option<MachineEnd> {
        let path = self.end_file();
        if fs::metadata(&path).ok()?.len() > END_BYTES_MAX {
            return None;
        }
        serde_json::from_slice(&fs::read(&path).ok()?).ok()
    }

    /// Notes how a run ended.
    pub(super) fn note_end(&self, end: &MachineEnd) -> std::io::Result<()> {
        let unfinished = self.end_file().with_extension("unfinished");
        fs::write(&unfinished, serde_json::to_vec(end).expect("an end is text and a number"))?;
        fs::rename(&unfinished, self.end_file())
    }

    /// Forgets how the last run ended: another one begins.
    pub(super) fn forget_end(&self) -> std::io::Result<()> {
        absent_is_fine(fs::remove_file(self.end_file()))
    }

    /// For `map_err`: its memory failed.
    pub(crate) fn memory_failed(&self) -> impl FnOnce(onecopy_checkpoint::CheckpointError) -> MachineError {
        let machine = self.name.to_string();
        move |source| MachineError::Memory { machine, source }
    }

    /// For `map_err`: its network failed.
    pub(crate) fn network_failed(&self) -> impl FnOnce(onecopy_network::NetworkError) -> MachineError {
        let machine = self.name.to_string();
        move |source| MachineError::Network { machine, source }
    }

    /// For `map_err`: its disk failed.
    pub(crate) fn disk_failed(&self) -> impl FnOnce(onecopy_disk::DiskError) -> MachineError {
        let machine = self.name.to_string();
        move |source| MachineError::Disk { machine, source }
    }
}

/// Writes a file of our own, whole or not at all, durable when it returns but for its name.
pub(super) fn write_own_file(path: &Path, content: &[u8], mode: u32) -> Result<(), MachineError> {
    let unfinished = path.with_extension("unfinished");
    absent_is_fine(fs::remove_file(&unfinished)).map_err(MachineError::file("remove", &unfinished))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&unfinished);
    let mut file = file.map_err(MachineError::file("create", &unfinished))?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(MachineError::file("write", &unfinished))?;
    fs::rename(&unfinished, path).map_err(MachineError::file("replace", path))
}

fn make_own_directory(path: &Path, mode: u32) -> Result<(), MachineError> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(MachineError::file("create", path)(error)),
        _ => Ok(set_mode(path, mode)?),
    }
}

pub(super) fn absent_is_fine(outcome: std::io::Result<()>) -> std::io::Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Gives a directory and all in it to the account that machines run as; the directory last, so that nobody changes what
/// is in it meanwhile.
pub(super) fn give_all(path: &Path, user: &ServiceUser) -> Result<(), MachineError> {
    let metadata = fs::symlink_metadata(path).map_err(MachineError::file("look at", path))?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).map_err(MachineError::file("read", path))? {
            give_all(&entry.map_err(MachineError::file("read", path))?.path(), user)?;
        }
    }
    Ok(user.own(path)?)
}
