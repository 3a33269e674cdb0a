//! A checkpoint of the machine, taken while it runs, into its directory `checkpoints`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_checkpoint::image::Image;
use onecopy_checkpoint::restore::{Prefix, stream};
use onecopy_checkpoint::take::{self, After, Cause, Parts, Taken};
use onecopy_disk_server::DiskClient;
use onecopy_disk_server::protocol::Request as DiskRequest;
use onecopy_hypervisor::Machine;
use tokio::runtime::Handle;

use super::admission::check_runs;
use super::parts::{Disk, Memory, Processors, Record, recover};
use super::prefix::prefix;
use super::processes::LOOK_INTERVAL;
use super::state::Keeper;
use super::unresponsive::unix_ms;
use super::{CheckpointTaken, PauseParts, frozen, held, memory, network};
use crate::desired_state;
use crate::files::{absent_is_fine, write_own_file};
use crate::hardware::Hardware;
use crate::machine::CHECKPOINT_TIMEOUT;
use crate::memory_server::{Appended, DEVICES, KeptPages, MemoryClient, Request, devices_file};
use crate::migration;
use crate::{MachineError, MachineHome};

/// What the snapshots of a disk begin with that are parts of checkpoints.
const SNAPSHOT: &str = "checkpoint-";

/// How long it may take to write down that a fork was plugged in.
const IDENTITY_WAIT: Duration = Duration::from_secs(1);

/// Takes one, and forgets the oldest where there are half as many more than `keep` then; with `holds_server` the
/// guest's server is held for the instant. One at a time.
pub(super) async fn checkpoint(
    keeper: &Arc<Keeper>,
    machine: &Machine,
    keep: Option<u64>,
    holds_server: bool,
) -> Result<CheckpointTaken, MachineError> {
    let (home, begun) = (keeper.home(), Instant::now());
    check_runs(home, machine)?;
    let failed = |reason: String| MachineError::Checkpoint { machine: home.name().to_string(), reason };
    let deadline = begun + CHECKPOINT_TIMEOUT;
    let first_pause = prepare(keeper, machine, deadline).await?;
    held::forget_left(home).map_err(|error| failed(error.to_string()))?;
    // The machine stands for nothing where there is no room for what the last one took.
    let image = Image::open(&home.checkpoints()).map_err(home.memory_failed())?;
    let pages = image.last().map_or(0, |last| last.data_pages);
    image.check_space(pages).map_err(|error| failed(error.to_string()))?;
    if holds_server {
        held::note(home, image.next_number())?;
    }
    let (keeper, machine) = (Arc::clone(keeper), machine.clone());
    let parts = MachineParts { keeper: Arc::clone(&keeper), machine, handle: Handle::current(), holds_server };
    let alone = keeper.no_take().await;
    let taken = tokio::task::spawn_blocking(move || parts.take()).await;
    drop(alone);
    let made = match taken {
        Ok(Ok((taken, pause, parts, network_epoch))) => {
            append(home, &taken, deadline).await.map(|appended| (appended, first_pause + pause, parts, network_epoch))
        }
        Ok(Err(reason)) => Err(reason),
        Err(error) => Err(format!("taking it ended: {error}")),
    };
    if let Err(error) = release(home).await {
        tracing::warn!(error, "the memory's epochs are let go before the next checkpoint");
    }
    let total_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    // What is taken is there, and the next one forgets what is left.
    let (own, keep) = (home.clone(), keep.filter(|_| made.is_ok()));
    match tokio::task::spawn_blocking(move || forget(&own, keep)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(error, "the oldest checkpoints are forgotten after the next one"),
        Err(error) => tracing::error!(%error, "forgetting checkpoints ended"),
    }
    let (appended, pause, parts, network_epoch) = made.map_err(failed)?;
    Ok(CheckpointTaken {
        number: appended.number,
        since: appended.since,
        pause_us: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
        parts,
        memory_bytes: appended.pages * onecopy_checkpoint::PAGE_BYTES as u64,
        total_ms,
        network_epoch,
    })
}

/// Sees to it that epochs can be cut of its memory, and that what QEMU tells of itself is in the directory of its
/// checkpoints. For how long the machine stood, which it does for its first one.
pub(super) async fn prepare(
    keeper: &Arc<Keeper>,
    machine: &Machine,
    deadline: Instant,
) -> Result<Duration, MachineError> {
    let home = keeper.home();
    let failed = |reason: String| MachineError::Checkpoint { machine: home.name().to_string(), reason };
    // Who goes on from there would have its parent's, and nobody would plug its card in. That it is plugged in is
    // written down a moment later, when somebody may have heard it.
    let begun = Instant::now();
    while home.isolated_file().exists() {
        if begun.elapsed() > IDENTITY_WAIT {
            return Err(failed(
                "it is a fork whose guest has not got its own identity yet; its keeper.log says why".into(),
            ));
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    let memory = MemoryClient::connect(home).await.map_err(|_| {
        failed(match memory::is_private(home) {
            true => "it shares its memory with other forks; make it with --independent, or stop and start it".into(),
            false => "its memory is QEMU's own, or lost; `checkpoints = true` in its machine.toml counts from its \
                      next start"
                .into(),
        })
    })?;
    let pages: KeptPages = memory.ask_until(Request::Keep, deadline).await.map_err(failed)?;
    if pages.missing > 0 {
        return Err(failed(format!("{} pages of its memory are lost", pages.missing)));
    }
    let hardware = Hardware::of_process(machine).map_err(failed)?;
    let directory = home.checkpoints();
    if desired_state::is_taking(home)? {
        // An earlier take has let it go, and could not write that down.
        keeper.note_taken()?;
    }
    let is_there = directory.join("machine").try_exists().map_err(MachineError::file("look into", &directory))?;
    let known = is_there.then(|| Hardware::read(&directory).and_then(|known| known.check(&hardware)));
    let mut first_pause = Duration::ZERO;
    if let Some(Err(reason)) = &known
        && !Image::open(&directory).is_ok_and(|image| image.checkpoints().is_empty())
    {
        let directory = directory.display();
        return Err(failed(format!("{reason}; new ones can be taken when {directory} is gone")));
    }
    // Where no checkpoint is left, what they would have been taken on counts no more.
    if !matches!(known, Some(Ok(()))) {
        let (prefix, stood) = prefix(keeper, machine).await?;
        first_pause = stood;
        make(&directory, &hardware, pages.size_bytes, &prefix).map_err(|error| failed(error.to_string()))?;
    }
    // Of a keeper that was killed: what they keep would be missing soon.
    release(home).await.map_err(failed)?;
    Ok(first_pause)
}

/// Makes what was taken durable.
async fn append(home: &MachineHome, taken: &Taken, deadline: Instant) -> Result<Appended, String> {
    let epoch = taken.memory.epoch.0;
    let (directory, devices) = (home.checkpoints(), devices_file(home, epoch));
    // What no restore would take is no checkpoint.
    check_devices(&directory, &taken.devices).map_err(|error| format!("its devices' state: {error}"))?;
    // Those of keepers that were killed.
    remove_devices(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    write_own_file(&devices, &taken.devices, 0o600).map_err(|error| error.to_string())?;
    let request = Request::Append { epoch, disk: disk_word(home, &taken.disk) };
    let appended = match MemoryClient::connect(home).await {
        Ok(memory) => memory.ask_until(request, deadline).await,
        Err(reason) => Err(reason),
    };
    if let Err(error) = remove_devices(&directory) {
        tracing::warn!(%error, "the devices' state of a checkpoint is left");
    }
    appended
}

fn check_devices(directory: &Path, devices: &[u8]) -> Result<(), Cause> {
    let image = Image::open(directory)?;
    stream(&Prefix::parse(image.prefix())?, devices)?;
    Ok(())
}

fn remove_devices(directory: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(DEVICES.as_bytes()) {
            absent_is_fine(fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}

/// Lets the epochs of the memory go: that of a checkpoint that is durable, and those of takes that are void.
pub(super) async fn release(home: &MachineHome) -> Result<(), String> {
    MemoryClient::connect(home).await?.ask(Request::Release).await
}

/// The disk's directory and the snapshot in it.
fn disk_word(home: &MachineHome, snapshot: &str) -> String {
    let directory = home.disk_name();
    format!("{directory}/{snapshot}")
}

/// Makes the directory of checkpoints, also where making it was broken off; one with checkpoints stays as it is.
pub(super) fn make(directory: &Path, hardware: &Hardware, size_bytes: u64, prefix: &[u8]) -> Result<(), Cause> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        entries => Some(entries?),
    };
    for entry in entries.into_iter().flatten() {
        if entry?.file_name().as_encoded_bytes().starts_with(b"checkpoint.") {
            let directory = directory.display();
            return Err(format!("{directory} has checkpoints and no file `machine`: move it away").into());
        }
    }
    absent_is_fine(fs::remove_dir_all(directory))?;
    fs::create_dir(directory)?;
    hardware.write(directory)?;
    Image::create(directory, size_bytes, prefix)?;
    File::open(directory.parent().unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(())
}

/// Forgets all checkpoints but the newest `keep`, of which there is one at least, several at a time: the oldest that
/// stays is written anew, whole. None goes as long as a fork has yet to begin at one that would. Then the snapshots of
/// its disk that no checkpoint names: of those that are forgotten, and of takes that came to nothing. Those stay that a
/// fork's disk lies over, and snapshots of earlier disks: a later disk may lie over them.
fn forget(home: &MachineHome, keep: Option<u64>) -> Result<(), Cause> {
    let Some(_alone) = home.keep_from_forks()? else {
        return Err("a fork of it is being made".into());
    };
    // Nobody writes one meanwhile, so nobody is about to name a snapshot.
    let mut image = Image::open_to_write(&home.checkpoints())?;
    let checkpoints = image.checkpoints();
    if let Some(keep) = keep {
        let keep = usize::try_from(keep)?.max(1);
        let oldest = checkpoints.len().saturating_sub(keep);
        let goes: Vec<u64> = checkpoints[..oldest].iter().map(|one| one.number).collect();
        if oldest >= keep.div_ceil(2) {
            match home.fork_to_begin_at(&image, &goes)? {
                None => image.compact(checkpoints[oldest].number)?,
                Some(fork) => {
                    tracing::warn!("no checkpoint is forgotten: {fork} has yet to begin at one; start it, or delete it")
                }
            }
        }
    }
    forget_unnamed(home, &image)
}

/// Forgets these checkpoints, that of a held server, where there is one, and what no checkpoint names. Its disk is
/// served.
pub(super) fn forget_served(home: &MachineHome, numbers: &[u64]) -> Result<(), Cause> {
    forget_numbers(home, numbers, |image| match forget_unnamed(home, image) {
        Err(error) if !numbers.is_empty() => {
            tracing::warn!(error, "what forgotten checkpoints had goes with the next one");
            Ok(())
        }
        forgotten => forgotten,
    })
}

/// The same of a machine that does not run. The snapshots of its disk stay until it forgets some while it runs.
pub(crate) fn forget_at_rest(home: &MachineHome, numbers: &[u64]) -> Result<(), Cause> {
    forget_numbers(home, numbers, |image| Ok(frozen::forget(home, image)?))
}

fn forget_numbers(
    home: &MachineHome,
    numbers: &[u64],
    then: impl FnOnce(&Image) -> Result<(), Cause>,
) -> Result<(), Cause> {
    let Some(_alone) = home.keep_from_forks()? else {
        return Err("a fork of it is being made".into());
    };
    if !home.checkpoints().join("machine").try_exists()? {
        return Ok(());
    }
    let mut image = Image::open_to_write(&home.checkpoints())?;
    // That of a held server goes with them.
    let goes: Vec<u64> = numbers.iter().copied().chain(held::noted(home)?).collect();
    if !numbers.is_empty()
        && let Some(fork) = home.fork_to_begin_at(&image, &goes)?
    {
        return Err(
            format!("its fork {fork} has not begun; start it before (onecopy vm start {fork}), or delete it").into()
        );
    }
    let before = image.checkpoints();
    held::forget(home, &mut image)?;
    // That of a held server may be one of them, and is gone then.
    let after = image.checkpoints();
    let is_gone =
        |number: &u64| before.iter().any(|one| one.number == *number) && !after.iter().any(|one| one.number == *number);
    let numbers: Vec<u64> = numbers.iter().copied().filter(|number| !is_gone(number)).collect();
    image.remove(&numbers)?;
    then(&image)
}

/// Removes what no checkpoint names: frozen memory, and snapshots of its disk.
fn forget_unnamed(home: &MachineHome, image: &Image) -> Result<(), Cause> {
    let mut named = BTreeSet::new();
    for checkpoint in image.checkpoints() {
        named.insert(image.disk(checkpoint.number)?);
    }
    frozen::forget(home, image)?;
    let disk = fs::canonicalize(home.disk())?;
    let stood_on = home.dependents()?;
    let stood_on: BTreeSet<_> = stood_on.iter().filter(|one| one.disk == disk).map(|one| &one.snapshot).collect();
    let (mut client, mut failed) = (DiskClient::connect(&home.disk())?, None);
    for snapshot in client.info()?.snapshots.unwrap_or_default() {
        let is_needed = named.contains(&disk_word(home, &snapshot.name)) || stood_on.contains(&snapshot.name);
        // Those of a migration that came to nothing, too: who makes checkpoints excludes that one is under way.
        let is_ours = snapshot.name.starts_with(SNAPSHOT) || migration::is_snapshot(&snapshot.name);
        if is_ours && !is_needed {
            let forgotten = client.ask::<()>(&DiskRequest::DeleteSnapshot { name: snapshot.name });
            // One that somebody reads does not keep the others.
            failed = forgotten.err().or(failed);
        }
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}

/// The parts of a machine that a keeper has at hand.
struct MachineParts {
    keeper: Arc<Keeper>,
    machine: Machine,
    handle: Handle,
    holds_server: bool,
}

impl MachineParts {
    fn take(self) -> Result<(Taken, Duration, PauseParts, Option<u64>), String> {
        let (home, handle) = (self.keeper.home(), &self.handle);
        let server = self.holds_server.then_some(&*self.keeper);
        let mut processors = Processors::new(home, &self.machine, handle, server);
        let mut memory = Memory::new(home, handle);
        // Never a name that was given before: what a dead keeper has asked for may still be written under its own.
        let mut disk = Disk::new(home, format!("{SNAPSHOT}{}-{}", unix_ms(), std::process::id()));
        let mut record = Record { keeper: &self.keeper };
        let mut network = network::of(home, handle)?;
        let mut parts = Parts {
            machine: &mut processors,
            memory: &mut memory,
            disk: &mut disk,
            network: &mut network,
            record: &mut record,
        };
        let taken = take::take(&mut parts, After::GoOn).map_err(|error| {
            if error.needs_recovery {
                recover(&mut parts, &self.machine);
            }
            error.to_string()
        })?;
        let (synchronize_us, disk_us, memory_us) = (memory.synchronize_us, disk.cut_us, memory.cut_us);
        let parts = PauseParts { synchronize_us, disk_us, memory_us, ..processors.parts };
        Ok((taken, processors.pause, parts, network.epoch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MachineConfiguration;
    use crate::fork::StartPoint;

    /// Spec: D6
    #[test]
    fn of_a_killed_keeper_only_the_devices_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        fs::create_dir_all(home.checkpoints()).unwrap();
        let (one, other) = (devices_file(&home, 7), devices_file(&home, 8));
        assert_ne!(one, other);
        let kept = ["machine", "hardware.json", "checkpoint.1"].map(|name| home.checkpoints().join(name));
        for path in kept.iter().chain([&one, &other]) {
            fs::write(path, "").unwrap();
        }
        remove_devices(&home.checkpoints()).unwrap();
        assert!(!one.exists() && !other.exists() && kept.iter().all(|path| path.exists()));
    }

    /// Spec: D6
    #[test]
    fn checkpoints_stay_where_what_they_are_of_is_gone() {
        let home = tempfile::tempdir().unwrap();
        let (directory, hardware) = (home.path().join("checkpoints"), Hardware::new("10.0", &[]).unwrap());
        make(&directory, &hardware, 4096, b"prefix").unwrap();
        // Broken off before it was whole.
        fs::remove_file(directory.join("machine")).unwrap();
        make(&directory, &hardware, 4096, b"prefix").unwrap();
        assert_eq!(Hardware::read(&directory), Ok(hardware.clone()));
        let mut image = Image::open_to_write(&directory).unwrap();
        image.begin(None).unwrap().commit(1, b"devices", "disk/checkpoint").unwrap();
        drop(image);
        fs::remove_file(directory.join("machine")).unwrap();
        let error = make(&directory, &hardware, 4096, b"prefix").unwrap_err().to_string();
        assert!(error.contains("move it away"), "{error}");
        assert!(directory.join("checkpoint.1").exists());
    }

    /// Others are, and one that has its number later is not taken for it.
    ///
    /// Spec: D6
    #[test]
    fn no_checkpoint_is_forgotten_at_which_a_fork_has_not_begun() {
        let machines = tempfile::tempdir().unwrap();
        let [home, fork] = ["web", "copy"].map(|name| MachineHome::at(&machines.path().join(name)).unwrap());
        fs::create_dir(home.root()).unwrap();
        fs::create_dir(fork.root()).unwrap();
        make(&home.checkpoints(), &Hardware::new("10.0", &[]).unwrap(), 4096, b"prefix").unwrap();
        for parent in [None, Some(1), Some(2)] {
            let mut image = Image::open_to_write(&home.checkpoints()).unwrap();
            image.begin(parent).unwrap().commit(1, b"devices", "disk/checkpoint").unwrap();
        }
        let held = |number: &str| fs::write(home.held_file(), number).unwrap();
        let left = || {
            let image = Image::open(&home.checkpoints()).unwrap();
            image.checkpoints().iter().map(|one| one.number).collect::<Vec<u64>>()
        };
        MachineConfiguration::new(fork.image()).write(&fork.configuration_file()).unwrap();
        // It asks its disk then, which nobody serves.
        let keep_one = || forget(&home, Some(1)).unwrap_err();
        StartPoint::of_fork(&home, 1, true).unwrap().write(&fork).unwrap();
        keep_one();
        assert_eq!(left(), [1, 2, 3]);
        let start_point = StartPoint::of_fork(&home, 3, true).unwrap();
        start_point.write(&fork).unwrap();
        for (numbers, is_held) in [(&[1, 3][..], ""), (&[1], "3")] {
            if !is_held.is_empty() {
                held(is_held);
            }
            let error = forget_at_rest(&home, numbers).unwrap_err().to_string();
            assert!(error.contains("onecopy vm start copy"), "{error}");
            assert_eq!(left(), [1, 2, 3]);
        }
        fs::remove_file(home.held_file()).unwrap();
        forget_at_rest(&home, &[1]).unwrap();
        assert_eq!(left(), [2, 3]);
        StartPoint { number: 3, taken_unix_ms: Some(7), ..start_point.clone() }.write(&fork).unwrap();
        assert_eq!(home.fork_to_begin_at(&Image::open(&home.checkpoints()).unwrap(), &[3]).unwrap(), None);
        StartPoint { taken_unix_ms: None, ..start_point.clone() }.write(&fork).unwrap();
        forget_at_rest(&home, &[3]).unwrap_err();
        let image = || Image::open_to_write(&home.checkpoints()).unwrap();
        assert_eq!(start_point.find(&image()).unwrap().number, 3);
        fs::remove_file(fork.restore_file()).unwrap();
        forget_at_rest(&home, &[3]).unwrap();
        image().begin(None).unwrap().commit(2, b"devices", "disk/checkpoint").unwrap();
        assert_eq!((left(), start_point.find(&image())), (vec![2, 3], None));
        StartPoint::of_fork(&home, 4, true).unwrap_err();
        keep_one();
        assert_eq!(left(), [3]);
    }
}
