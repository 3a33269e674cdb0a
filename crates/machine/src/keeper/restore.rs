//! A machine begins as it was at a checkpoint: its memory and its disk are made before QEMU starts, which then reads
//! the state of its devices.
//!
//! ```text
//!  file restoring: N ──> memory.shadow, disk.N ──> QEMU has read the devices ──> no such file: disk.N is its disk
//!          └── anything else: all of that is forgotten, and its disk is the one of before
//! ```

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_checkpoint::image::Image;
use onecopy_checkpoint::restore::{Prefix, stream};
use onecopy_directory::atomic_file;
use onecopy_disk::{BaseSpecification, CreateOptions, Disk};
use onecopy_hypervisor::configuration::Incoming;
use onecopy_hypervisor::monitor::RunState;
use onecopy_hypervisor::{
    CommandLine, HostTraits, InheritedDescriptor, Machine, MachineDirectory, Qemu, kvm_runs_guests,
};
use onecopy_postgres::ServiceUser;
use rustix::process::Signal;
use tokio::io::AsyncWriteExt;

use super::frozen;
use super::processes::end_left_server;
use super::qemu_configuration::configuration;
use super::role::Role;
use crate::files::{absent_is_fine, give_all, remove_any, synchronize};
use crate::fork::StartPoint;
use crate::hardware::Hardware;
use crate::home::copied_base;
use crate::{MachineConfiguration, MachineError, MachineHome, hypervisor_failed};

/// How long QEMU may take to read its devices' state.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is looked whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The number under which QEMU finds where it comes from.
const DESCRIPTOR: i32 = 500;

/// What a machine that begins at a checkpoint reads.
pub(super) struct Restored {
    stream: Vec<u8>,
    /// Where it is written to, and QEMU's end of that: nobody else has either.
    sends: UnixStream,
    receives: Arc<OwnedFd>,
    /// The number of the disk that was made for it.
    pub(super) disk: u64,
    /// What its memory is a private view of; none: what its memory server has.
    pub(super) frozen: Option<PathBuf>,
    /// Of a fork: its parent keeps what it needs until its guest is let go.
    pub(super) kept: Option<File>,
}

/// The checkpoint that the machine is to begin at, if there is one; it is for one start only. A fork's stays until
/// its guest is let go: without it there would be a machine that has no disk.
pub(super) fn start_point(home: &MachineHome) -> Result<Option<StartPoint>, MachineError> {
    let (path, start_point) = (home.restore_file(), StartPoint::of(home));
    if !matches!(&start_point, Ok(Some(StartPoint { parent: Some(_), .. }))) {
        absent_is_fine(fs::remove_file(&path)).map_err(MachineError::file("remove", &path))?;
    }
    start_point
}

/// The number in a small file of ours; none where there is no file.
fn number_in(path: &Path) -> Result<Option<u64>, MachineError> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(MachineError::file("read", path))?,
    };
    text.trim().parse().map(Some).map_err(|_| MachineError::file("read", path)(ErrorKind::InvalidData.into()))
}

/// Before a guest is let go: the disk that a restore has made is its disk from now on. Nothing else is to begin where
/// this one began, also when an earlier keeper has died between the two files.
pub(super) fn commit(home: &MachineHome) -> Result<(), MachineError> {
    let mut has_removed = false;
    for path in [home.restoring_file(), home.restore_file()] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            removed => {
                removed.map_err(MachineError::file("remove", &path))?;
                has_removed = true;
            }
        }
    }
    if has_removed { synchronize(home.root()) } else { Ok(()) }
}

/// No guest runs on this disk, which a restore makes or has made: [`forget`] removes it.
pub(super) fn give_up(home: &MachineHome, disk: u64) -> Result<(), MachineError> {
    Ok(atomic_file::write(&home.restoring_file(), 0o600, format!("{disk}\n").as_bytes())?)
}

/// Forgets what a restore has made where no guest was let go with it. The machine does not run.
pub(crate) fn forget(home: &MachineHome) -> Result<(), MachineError> {
    let path = home.restoring_file();
    let Some(number) = number_in(&path)? else { return Ok(()) };
    end_left_server(Role::Disk, home, Signal::TERM);
    for left in [new_disk(home), home.numbered_disk(number)] {
        absent_is_fine(fs::remove_dir_all(&left)).map_err(MachineError::file("remove", &left))?;
    }
    remove_any(&copied_base(&home.numbered_disk(number)))?;
    let shadow = home.memory_shadow();
    absent_is_fine(fs::remove_file(&shadow)).map_err(MachineError::file("remove", &shadow))?;
    // Without it the disk would be the machine's.
    synchronize(home.root())?;
    fs::remove_file(&path).map_err(MachineError::file("remove", &path))
}

/// A disk that is being made.
pub(super) fn new_disk(home: &MachineHome) -> PathBuf {
    home.root().join("disk.new")
}

/// Makes memory and disk as they were. The machine does not run, and nothing of an earlier restore is left: [`forget`].
pub(super) fn prepare(
    home: &MachineHome,
    user: &ServiceUser,
    start_point: &StartPoint,
) -> Result<Restored, MachineError> {
    let failed = |reason: String| MachineError::Checkpoint { machine: home.name().to_string(), reason };
    let parent = start_point.parent.as_deref().map_or_else(|| Ok(home.clone()), MachineHome::at)?;
    let kept = start_point.parent.as_ref().map(|_| parent.keep_for_forks()).transpose()?;
    let directory = parent.checkpoints();
    let image = Image::open(&directory).map_err(|error| failed(error.to_string()))?;
    let machine = home.configuration()?;
    if machine.memory_bytes != image.memory_bytes() {
        let (was, is) = (image.memory_bytes(), machine.memory_bytes);
        return Err(failed(format!("its checkpoints are of {was} bytes of memory, and it has {is}")));
    }
    let hardware = hardware_here(home, user, &machine)?;
    Hardware::read(&directory).and_then(|known| known.check(&hardware)).map_err(failed)?;
    let checkpoint = start_point.find(&image).ok_or_else(|| {
        let (number, name) = (start_point.number, parent.name());
        let remedy = match start_point.parent {
            Some(_) => "delete it, and make another fork",
            None => "choose another one",
        };
        failed(format!("checkpoint {number} of {name}, at which it is to begin, was forgotten: {remedy}"))
    })?;
    let view = image.view(checkpoint.number).map_err(|error| failed(error.to_string()))?;
    let prefix = Prefix::parse(image.prefix()).map_err(|error| failed(error.to_string()))?;
    let stream = stream(&prefix, view.devices()).map_err(|error| failed(error.to_string()))?;
    let (disk, snapshot) = view.disk().split_once('/').ok_or_else(|| failed("it names no disk".to_owned()))?;
    let base = BaseSpecification::Disk { directory: parent.root().join(disk), snapshot: snapshot.to_owned() };
    let next = home.next_disk();
    give_up(home, next)?;
    let shares = start_point.shares;
    let frozen = shares.then(|| frozen::freeze(&parent, &image, &checkpoint, user)).transpose()?;
    if frozen.is_none() {
        image.check_space(view.present().count() as u64).map_err(|error| failed(error.to_string()))?;
        let shadow = home.memory_shadow();
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&shadow);
        let file = file.map_err(MachineError::file("create", &shadow))?;
        view.fill(&file).map_err(home.memory_failed())?;
    }
    let options = CreateOptions { size_bytes: machine.disk_bytes, base: Some(base), copy_base: false };
    let new = new_disk(home);
    let _ = fs::remove_dir_all(&new);
    Disk::create(&new, &options).map_err(home.disk_failed())?;
    give_all(&new, user)?;
    fs::rename(&new, home.numbered_disk(next)).map_err(MachineError::file("rename", &new))?;
    let (sends, receives) = UnixStream::pair().map_err(MachineError::file("make a connection for", home.root()))?;
    Ok(Restored { stream, sends, receives: Arc::new(receives.into()), disk: next, frozen, kept })
}

/// What a machine would find here.
pub(super) fn hardware_here(
    home: &MachineHome,
    user: &ServiceUser,
    machine: &MachineConfiguration,
) -> Result<Hardware, MachineError> {
    let qemu = Qemu::find().map_err(|error| hypervisor_failed(home.name(), error))?;
    let host = HostTraits { version: qemu.version(), kvm: kvm_runs_guests() };
    let planned = configuration(home, machine, user)?;
    let run = MachineDirectory::new(home.run()).map_err(|error| hypervisor_failed(home.name(), error))?;
    let line = CommandLine::new(&planned, &run, host).map_err(|error| hypervisor_failed(home.name(), error))?;
    let words: Vec<String> = line.arguments().iter().map(|word| word.to_string_lossy().into_owned()).collect();
    Hardware::new(&qemu.version().to_string(), &words)
        .map_err(|reason| MachineError::Checkpoint { machine: home.name().to_string(), reason })
}

impl Restored {
    /// One whose stream comes while QEMU waits for it already.
    pub(super) fn waiting(home: &MachineHome, disk: u64) -> Result<Restored, MachineError> {
        let (sends, receives) = UnixStream::pair().map_err(MachineError::file("make a connection for", home.root()))?;
        let (stream, frozen, kept) = (Vec::new(), None, None);
        Ok(Restored { stream, sends, receives: Arc::new(receives.into()), disk, frozen, kept })
    }

    /// What QEMU shall read.
    pub(super) fn set_stream(&mut self, stream: Vec<u8>) {
        self.stream = stream;
    }

    /// Where QEMU waits for it.
    pub(super) fn incoming(&self) -> (Incoming, InheritedDescriptor) {
        let descriptor = InheritedDescriptor { descriptor: Arc::clone(&self.receives), number: DESCRIPTOR };
        (Incoming::Descriptor(DESCRIPTOR), descriptor)
    }

    /// Gives it to a QEMU that waits; the machine stands when this returns.
    pub(super) async fn load(self, home: &MachineHome, machine: &Machine) -> Result<(), MachineError> {
        let failed = |reason: String| MachineError::Checkpoint { machine: home.name().to_string(), reason };
        let Restored { stream, sends, receives, .. } = self;
        // QEMU has it: where that ends, this is told.
        drop(receives);
        let sent = async {
            sends.set_nonblocking(true)?;
            let mut socket = tokio::net::UnixStream::from_std(sends)?;
            socket.write_all(&stream).await?;
            socket.shutdown().await
        };
        let begun = Instant::now();
        let sent = tokio::time::timeout(LOAD_TIMEOUT, sent).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()));
        sent.map_err(|error| failed(format!("its devices' state is not sent to QEMU: {error}")))?;
        loop {
            if let Some(ending) = machine.state().ending() {
                return Err(failed(format!("QEMU does not take its devices' state: it {ending}")));
            }
            match machine.monitor().status().await {
                Ok(status) if status.state != RunState::Inmigrate => return Ok(()),
                Ok(_) | Err(_) if begun.elapsed() < LOAD_TIMEOUT => tokio::time::sleep(LOOK_INTERVAL).await,
                Ok(status) => return Err(failed(format!("QEMU is {:?} after {LOAD_TIMEOUT:?}", status.state))),
                Err(error) => return Err(failed(error.to_string())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with two disks, the second of which a restore has just made.
    fn restoring() -> (tempfile::TempDir, MachineHome) {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        for disk in ["disk", "disk.1", "disk.2", "disk.new"] {
            fs::create_dir_all(home.root().join(disk)).unwrap();
        }
        fs::write(home.memory_shadow(), "memory").unwrap();
        fs::write(home.restoring_file(), "2\n").unwrap();
        assert_eq!(home.disk(), home.root().join("disk.2"));
        (directory, home)
    }

    /// Spec: D6
    #[test]
    fn a_restore_that_has_failed_leaves_the_machine_its_disk() {
        let (_directory, home) = restoring();
        forget(&home).unwrap();
        assert_eq!(home.disk(), home.root().join("disk.1"));
        for gone in [new_disk(&home), home.memory_shadow(), home.restoring_file()] {
            assert!(!gone.exists(), "{}", gone.display());
        }
        // There is none any more.
        forget(&home).unwrap();
        assert_eq!(home.disk(), home.root().join("disk.1"));
        // A copy that somebody has laid beside is no disk of the machine.
        fs::create_dir(home.root().join("disk.20260101")).unwrap();
        assert_eq!(home.disk(), home.root().join("disk.1"));
    }

    /// Spec: D6
    #[test]
    fn a_machine_that_was_let_go_keeps_the_disk_of_its_restore() {
        let (_directory, home) = restoring();
        commit(&home).unwrap();
        forget(&home).unwrap();
        assert_eq!(home.disk(), home.root().join("disk.2"));
        commit(&home).unwrap();
    }

    /// Spec: D6
    #[test]
    fn a_start_point_is_for_one_start_also_when_it_is_none() {
        let (_directory, home) = restoring();
        assert_eq!(start_point(&home).unwrap(), None);
        fs::write(home.restore_file(), r#"{"number":7,"taken_unix_ms":9}"#).unwrap();
        let own = StartPoint { number: 7, taken_unix_ms: Some(9), parent: None, shares: false };
        assert_eq!(start_point(&home).unwrap(), Some(own));
        let fork = br#"{"number":7,"taken_unix_ms":9,"parent":"/m/first","shares":true}"#;
        fs::write(home.restore_file(), fork).unwrap();
        for _ in 0..2 {
            assert!(
                start_point(&home).unwrap().is_some_and(|start_point| start_point.shares),
                "it stays until its guest is let go"
            );
        }
        // A keeper has died after the first of the two files.
        fs::remove_file(home.restoring_file()).unwrap();
        commit(&home).unwrap();
        assert_eq!(start_point(&home).unwrap(), None);
        fs::write(home.restore_file(), "the last one").unwrap();
        start_point(&home).unwrap_err();
        assert_eq!(start_point(&home).unwrap(), None);
    }
}
