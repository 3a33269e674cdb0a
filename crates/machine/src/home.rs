//! Where a machine keeps what.
//!
//! ```text
//! machines/web/    ours; the account that QEMU and the disk's server run as passes through it, and owns `disk/` and `run/` alone
//!   machine.toml   what it is made of
//!   password       of its server's superuser, where it has a server that is no cluster's; readable by its owner only
//!   image/         the guest image that it was made from: links or copies
//!   disk/          its disk, see docs/disk-format.md; it begins with the image's root file system
//!   disk.1/, ..    those of its restores, or of its coming where disks were, of which the last is its disk
//!   protected.raw, protected.1.raw, ..: the copy of another host's disk on which `disk`, `disk.1`, .. stands
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

mod forks_lock;
mod making;

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use onecopy_directory::DirectoryLock;
use onecopy_hypervisor::{MachineDirectory, open_of_account};
use serde::{Deserialize, Serialize};

use super::files::{absent_is_fine, remove_any};
use super::{MachineConfiguration, MachineError, MachineName, hypervisor_failed};

/// The longest note about an end that is read.
const END_BYTES_MAX: u64 = 1 << 20;

/// Restores of a machine, each of which makes a disk.
const DISKS_MAX: u64 = 1 << 16;

/// What makes a directory a disk; see `docs/disk-format.md`.
const HEADER: &str = "header";

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

    /// The name of its disk's directory.
    pub(super) fn disk_name(&self) -> String {
        self.disk().file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Its disk, and those that its restores have left behind.
    pub(super) fn disks(&self) -> Vec<PathBuf> {
        let disks = (0..=self.last_disk()).map(|number| self.numbered_disk(number));
        // What was removed from between others has left its name.
        disks.filter(|disk| disk.join(HEADER).exists()).collect()
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

    /// Removes a disk, with the copy that it stands on, and leaves its name where numbers behind it are in use: there
    /// is no instant without the name, in which a disk before it would be the machine's. Its header goes last; before
    /// that the next one goes on with it.
    pub(crate) fn empty_disk(&self, disk: &Path) -> Result<(), MachineError> {
        for entry in fs::read_dir(disk).map_err(MachineError::file("read", disk))? {
            let entry = entry.map_err(MachineError::file("read", disk))?;
            if entry.file_name() != HEADER {
                remove_any(&entry.path())?;
            }
        }
        remove_any(&copied_base(disk))?;
        remove_any(&disk.join(HEADER))?;
        if *disk == self.numbered_disk(0) { remove_any(disk) } else { Ok(()) }
    }

    /// There while disks lie here over which others lie, of a machine that is gone, or was made anew.
    pub(super) fn layers_file(&self) -> PathBuf {
        self.root.join("layers")
    }

    /// The number of its disk; 0 is the one that it was made with. Each restore or arrival makes the next one, so the
    /// last before a gap is it, whatever copies somebody has laid beside. One that cannot be looked at counts as there:
    /// an older one must not take its place.
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
        self.find_process().ok().flatten()
    }

    /// The same, where it is told why it is not known.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn find_process(&self) -> Result<Option<u32>, MachineError> {
        let directory = MachineDirectory::new(self.run());
        let found = directory.and_then(|directory| onecopy_hypervisor::Machine::running_process(&directory));
        found.map_err(|error| hypervisor_failed(self.name(), error))
    }

    /// The keeper's socket; its name may be too long for the kernel: see the keeper's own functions for it.
    pub fn keeper_socket(&self) -> PathBuf {
        self.root.join("keeper.sock")
    }

    /// What the guest writes to its console.
    pub fn console_log(&self) -> PathBuf {
        self.in_run("console.log")
    }

    /// The same, to read: its directory is that of QEMU's account, in which nothing is followed with our rights.
    ///
    /// # Errors
    /// It is not there, or no file of one name.
    pub fn open_console_log(&self) -> std::io::Result<File> {
        open_of_account(OpenOptions::new().read(true), &self.console_log())
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

/// The copy of another host's disk on which this disk of a machine stands, where it has come by a protection. Only root
/// writes there.
pub(crate) fn copied_base(disk: &Path) -> PathBuf {
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    disk.with_file_name(format!("{}.raw", name.replacen("disk", "protected", 1)))
}
