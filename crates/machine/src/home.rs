//! Where a machine keeps what, and making and removing that.
//!
//! ```text
//! machines/web/    ours; the account that QEMU and the disk's server run as passes through it, and owns `disk/` and `run/` alone
//!   machine.toml   what it is made of
//!   password       of its server's superuser, where it has a server that is no cluster's; readable by its owner only
//!   image/         the guest image that it was made from: links or copies
//!   disk/          its disk, see docs/disk-format.md; it begins with the image's root file system
//!   keeper.log     what its keeper did
//!   keeper.lock    held by its keeper, from before that begins
//!   disk.log       what the process said that served its disk
//!   disk.pid       the number of that process, for people
//!   end.json       how its last run ended
//!   standing.json  what it shall do, for its next keeper
//!   run/           sockets, QEMU's number, console; a link to a short directory where the path would be too long for the kernel
//! ```
//!
//! What a keeper or a command reads, writes or removes by its path, with the rights of whoever has started it, lies
//! where the other account can lay no links.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use onecopy_disk::{BaseSpecification, CreateOptions, Disk};
use onecopy_hypervisor::MachineDirectory;
use onecopy_postgres::ServiceUser;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::image::GuestImage;
use super::keeper::end_left_disk_server;
use super::{MachineConfiguration, MachineError, MachineName};
use onecopy_directory::{DirectoryLock, LockState};
use onecopy_directory::{make_run, set_mode, short_directory};

/// What a new machine takes at first: a server's first data, its log, and what a guest writes about itself.
const NEW_MACHINE_BYTES: u64 = 256 << 20;

/// The longest note about an end that is read.
const END_BYTES_MAX: u64 = 1 << 20;

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

    /// Its disk.
    pub fn disk(&self) -> PathBuf {
        self.root.join("disk")
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
        self.remove()?;
        self.check_space()?;
        make_own_directory(&self.root, 0o711)?;
        user.check_reachable(&self.root)?;
        make_own_directory(&self.image(), 0o755)?;
        image.bring_to(&self.image())?;
        let own = GuestImage::find(Some(&self.image()))?;
        let options = CreateOptions {
            size_bytes: configuration.disk_bytes,
            base: Some(BaseSpecification::Raw { path: own.root() }),
            copy_base: false,
        };
        Disk::create(&self.disk(), &options).map_err(self.disk_failed())?;
        give_all(&self.disk(), user)?;
        if let Some(password) = password {
            write_own_file(&self.password_file(), format!("{password}\n").as_bytes(), 0o600)?;
        }
        // Last: what has it is whole.
        configuration.write(&self.configuration_file())
    }

    /// Makes what a run needs and a restart of the host may have removed.
    ///
    /// # Errors
    /// [`MachineError::Directory`], [`DirectoryError::SocketDirectoryForeign`].
    pub fn make_run(&self, user: &ServiceUser) -> Result<(), MachineError> {
        make_run(&self.root, user)?;
        Ok(())
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
    /// already.
    ///
    /// # Errors
    /// [`MachineError::Runs`] when a keeper is there or comes meanwhile, [`MachineError::Directory`].
    pub fn remove(&self) -> Result<(), MachineError> {
        if !self.root.exists() {
            return Ok(());
        }
        // Nobody starts it from now on.
        let LockState::Taken(_lock) = DirectoryLock::take(&self.keeper_lock())? else {
            return Err(MachineError::Runs { name: self.name.clone() });
        };
        end_left_disk_server(self, Signal::KILL);
        let run = self.root.join("run");
        // First what makes it a machine: broken off here, it is none.
        let made = self.configuration_file();
        absent_is_fine(fs::remove_file(&made)).map_err(MachineError::file("remove", &made))?;
        // Only where our own link leads: this may remove anything.
        if let Ok(short) = fs::read_link(&run)
            && short == short_directory(&self.root)
        {
            absent_is_fine(fs::remove_dir_all(&short)).map_err(MachineError::file("remove", &short))?;
        }
        absent_is_fine(fs::remove_dir_all(&self.root)).map_err(MachineError::file("remove", &self.root))
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

fn absent_is_fine(outcome: std::io::Result<()>) -> std::io::Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Gives a directory and all in it to the account that machines run as; the directory last, so that nobody changes what
/// is in it meanwhile.
fn give_all(path: &Path, user: &ServiceUser) -> Result<(), MachineError> {
    let metadata = fs::symlink_metadata(path).map_err(MachineError::file("look at", path))?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).map_err(MachineError::file("read", path))? {
            give_all(&entry.map_err(MachineError::file("read", path))?.path(), user)?;
        }
    }
    Ok(user.own(path)?)
}
