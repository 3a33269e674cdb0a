//! Guests that have booted before. What an emulated processor takes many seconds for is done once for an image and kept
//! in a directory of the image's, from where tests go on in about one.
//!
//! ```text
//!  IMAGE/saved/booted.lock   shared by those who restore the guest, held alone by who makes it
//!  IMAGE/saved/booted/       state      the machine: QEMU's migration to a file
//!                            root.img   its root disk in that moment; neither is anything without the other
//!                            made-of    what both depend on: where that is something else, they are made anew
//! ```
//!
//! What is in a restored guest's memory was read from this very disk, so each gets a copy of it. Disks and network
//! cards beside it are on QEMU's command line as ever, behind the root disk, and no part of the state: the guest finds
//! them on its bus.

use std::fs::{self, File, Permissions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use onecopy_guest_agent::protocol::{Initialize, Postgres};
use onecopy_hypervisor::configuration::{Disk, DiskBackend, Generation, Memory, Security};
use onecopy_hypervisor::monitor::{MigrationStatus, MigrationTarget};
use onecopy_hypervisor::{
    CommandLine, HostTraits, HypervisorError, Machine, MachineConfiguration, MachineDirectory, Monitor, Qemu,
    QemuVersion, State, kvm_runs_guests,
};
use onecopy_testing::guest_exercise;
use rustix::fs::{FlockOperation, flock};

use super::image::{ROOT, copy_root};
use super::{IMAGE, Image, TestGuest, configuration, file_disk};

/// What lies in a saved guest's directory beside [`ROOT`].
const STATE: &str = "state";
const MADE_OF: &str = "made-of";
/// Since then each page may have its place in the file, and one of zeros none, which is read four times as fast
/// (QEMU's docs/devel/migration/mapped-ram.rst).
const MAPS_MEMORY: QemuVersion = QemuVersion { major: 9, minor: 0 };
/// What each step of saving and restoring may take, on a machine that has more to do.
const TIMEOUT: Duration = Duration::from_secs(300);
/// How often it is looked whether a guest is saved.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// The cluster of [`Saved::Initialized`].
const SETTINGS: &str = "shared_buffers = 16MB";
const INITDB_OPTIONS: [&str; 1] = ["--data-checksums"];

/// What a guest had done when it was saved. Each has the program of the verifying workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// It had booted.
    Booted,
    /// It had made PostgreSQL's cluster too, with checksums and few shared buffers, but had not started it.
    Initialized,
}

/// A saved guest, which stays as it is while this is held.
#[derive(Debug)]
pub(super) struct Held {
    directory: PathBuf,
    _lock: File,
}

impl Saved {
    /// A copy of its root disk, as `root.img` of `directory`, for a guest that boots from it.
    ///
    /// # Errors
    ///
    /// When it can be neither found nor made.
    pub async fn root_in(self, directory: &Path) -> anyhow::Result<PathBuf> {
        self.hold(&Image::find(IMAGE)?).await?.root_in(directory)
    }

    fn name(self) -> &'static str {
        match self {
            Saved::Booted => "booted",
            Saved::Initialized => "initialized",
        }
    }

    /// The saved guest; whoever comes first makes it.
    pub(super) async fn hold(self, image: &Image) -> anyhow::Result<Held> {
        let saved = image.saved();
        make_directory(&saved).with_context(|| {
            format!("guests are saved in {}: build an image of your own by ONECOPY_GUEST_DIRECTORY", saved.display())
        })?;
        let directory = saved.join(self.name());
        let made_of = made_of(&saved_configuration(image), &guest_exercise::program()?)?;
        let is_made = || fs::read_to_string(directory.join(MADE_OF)).is_ok_and(|text| text == made_of);
        loop {
            let lock = locked(directory.with_extension("lock"), FlockOperation::LockShared).await?;
            if is_made() {
                return Ok(Held { directory: directory.clone(), _lock: lock });
            }
            drop(lock);
            let _alone = locked(directory.with_extension("lock"), FlockOperation::LockExclusive).await?;
            if !is_made() {
                self.make(image, &directory, &made_of).await.context("a guest to be saved")?;
            }
        }
    }

    /// Boots a guest and saves it. One rename: what is there is complete.
    async fn make(self, image: &Image, directory: &Path, made_of: &str) -> anyhow::Result<()> {
        eprintln!("a guest boots to be saved in {}: the tests to come restore it", directory.display());
        let unfinished = directory.with_extension("new");
        for left in [directory, unfinished.as_path()] {
            if left.exists() {
                fs::remove_dir_all(left)?;
            }
        }
        make_directory(&unfinished)?;
        let root = file_disk("root", image.root_in(&unfinished, 0)?);
        let boot = TestGuest::boot_from(image, TestGuest::directory()?, root, |configuration, _| {
            let disks = configuration.disks.clone();
            *configuration = MachineConfiguration { disks, ..saved_configuration(image) };
            Ok(())
        });
        let mut guest = boot.await?;
        if self == Saved::Initialized {
            let options = INITDB_OPTIONS.map(str::to_owned).to_vec();
            let initialize = Initialize { options, settings: SETTINGS.to_owned(), ..Initialize::default() };
            guest.agent().postgres(Postgres::Initialize(initialize), TIMEOUT, |_| {}).await?;
        }
        guest.put_exercise().await?;
        // The disk is to be booted from as well.
        guest.run("sync").await?;
        guest.hang_up();
        let state = unfinished.join(STATE);
        save(&guest.machine().monitor(), &state).await?;
        guest.machine().quit().await?;
        // QEMU restores it under other accounts, too.
        fs::set_permissions(&state, Permissions::from_mode(0o644))?;
        fs::write(unfinished.join(MADE_OF), made_of)?;
        rustix::fs::syncfs(File::open(&unfinished)?)?;
        fs::rename(&unfinished, directory)?;
        Ok(())
    }
}

impl Held {
    /// A copy of the root disk that belongs to the state; `directory` gets it as `root.img`.
    pub(super) fn root_in(&self, directory: &Path) -> anyhow::Result<PathBuf> {
        copy_root(&self.directory.join(ROOT), directory)
    }

    /// Gives the state to a machine that waits for one; its guest runs then.
    pub(super) async fn load(&self, machine: &Machine) -> anyhow::Result<()> {
        let monitor = machine.monitor();
        map_memory(&monitor).await?;
        monitor.migrate_incoming(&file(self.directory.join(STATE))).await?;
        // It ran when it was saved, so it goes on by itself. A QEMU that cannot read the state ends, and says why.
        let running = machine.wait_for("running", |state| *state == State::Running, TIMEOUT).await;
        running.with_context(|| {
            format!("{} cannot be restored; when it is removed it is made anew", self.directory.display())
        })
    }
}

/// The machine of every saved guest, without its root disk.
pub(super) fn saved_configuration(image: &Image) -> MachineConfiguration {
    // By the id of a new generation a restored guest's kernel learns that its random numbers are others' too.
    MachineConfiguration { generation: Some(Generation::New), ..configuration(image) }
}

/// The state of a machine like `saved`, with its root disk, fits one like `wanted`: that one may have more disks and
/// networks, and another place in the host.
pub(super) fn ensure_fits(saved: &MachineConfiguration, wanted: &MachineConfiguration) -> anyhow::Result<()> {
    let of_state = |configuration: &MachineConfiguration| MachineConfiguration {
        disks: configuration.disks.first().map(of_device).into_iter().collect(),
        networks: Vec::new(),
        memory: Memory::shared(configuration.memory.size_bytes),
        security: Security::default(),
        ..configuration.clone()
    };
    let (saved, wanted) = (of_state(saved), of_state(wanted));
    ensure!(saved == wanted, "a restored guest's machine is {saved:?}: for {wanted:?} boot one");
    Ok(())
}

/// The disk without the place that its blocks come from, which is not in the state of a device of QEMU's own.
fn of_device(disk: &Disk) -> Disk {
    match disk.backend {
        DiskBackend::VhostUser { .. } => disk.clone(),
        DiskBackend::Nbd { .. } | DiskBackend::File { .. } => {
            Disk { backend: file_disk(&disk.id, PathBuf::new()).backend, ..disk.clone() }
        }
    }
}

/// What a machine's state and disk depend on.
fn made_of(configuration: &MachineConfiguration, program: &[u8]) -> anyhow::Result<String> {
    let qemu = Qemu::find()?;
    let version = Command::new(qemu.program()).arg("--version").output()?;
    let mut text = String::from_utf8_lossy(&version.stdout).into_owned();
    let host = HostTraits { version: qemu.version(), kvm: kvm_runs_guests() };
    if host.kvm {
        // The guest sees the host's own processor.
        let processors = fs::read_to_string("/proc/cpuinfo")?;
        let first = processors.lines().take_while(|line| !line.is_empty());
        text.extend(first.filter(|line| line.starts_with("model name") || line.starts_with("flags")));
    }
    let mut hasher = DefaultHasher::new();
    program.hash(&mut hasher);
    let program = hasher.finish();
    // Of a machine that could be anywhere.
    let line = CommandLine::new(configuration, &MachineDirectory::new("/machine")?, host)?;
    let arguments = line.arguments();
    Ok(format!("{text}\n{arguments:#?}\n{INITDB_OPTIONS:?} {SETTINGS}\nguest-exercise {program:016x}\n"))
}

/// The machine's state, all of it, to a new file. The machine runs until nearly all is there, and stands then for good.
async fn save(monitor: &Monitor, state: &Path) -> anyhow::Result<()> {
    map_memory(monitor).await?;
    monitor.migrate(&file(state.to_owned())).await?;
    tokio::time::timeout(TIMEOUT, wait_saved(monitor)).await.context("a guest takes too long to be saved")?
}

async fn wait_saved(monitor: &Monitor) -> anyhow::Result<()> {
    loop {
        let migration = monitor.migration().await?;
        match migration.status {
            Some(MigrationStatus::Completed) => return Ok(()),
            Some(status) if status.is_final() => bail!("a guest is not saved: {migration:?}"),
            _ => tokio::time::sleep(LOOK_INTERVAL).await,
        }
    }
}

fn file(path: PathBuf) -> MigrationTarget {
    MigrationTarget::File { path, offset_bytes: 0 }
}

/// Both who saves and who restores have to say so.
async fn map_memory(monitor: &Monitor) -> Result<(), HypervisorError> {
    match monitor.version() >= MAPS_MEMORY {
        true => monitor.set_migration_capabilities(&[("mapped-ram", true)]).await,
        false => Ok(()),
    }
}

/// A directory that QEMU under any account may enter.
fn make_directory(path: &Path) -> anyhow::Result<()> {
    if !path.exists() {
        fs::create_dir_all(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Waits for the lock as long as others have it; it goes with the file.
async fn locked(path: PathBuf, operation: FlockOperation) -> anyhow::Result<File> {
    let locking = tokio::task::spawn_blocking(move || -> anyhow::Result<File> {
        let file = File::create(&path).with_context(|| format!("cannot lock {}", path.display()))?;
        flock(&file, operation)?;
        Ok(file)
    });
    locking.await?
}

#[cfg(test)]
mod tests {
    use onecopy_hypervisor::configuration::{Account, Boot, NbdServer, Network, NetworkEnd};

    use super::*;

    type Change<'a> = &'a dyn Fn(&mut MachineConfiguration);

    #[test]
    fn a_state_goes_to_no_machine_that_it_does_not_fit() {
        let mut saved = MachineConfiguration::new("guest", 64 << 20, Boot::FirstDisk);
        saved.disks.push(file_disk("root", "/saved/root.img".into()));
        let nbd = NbdServer::Unix("/run/nbd.sock".into());
        let nbd = DiskBackend::Nbd { server: nbd, export: String::new(), reconnect_delay_s: 60 };
        let vhost = DiskBackend::VhostUser { socket: "/run/vhost.sock".into(), reconnect_ms: None };
        let changes: [(Change, bool); 9] = [
            (&|_| {}, true),
            (&|machine| machine.disks.push(Disk::new("data", vhost.clone())), true),
            (&|machine| machine.networks.push(Network::new("net0", NetworkEnd::Unplugged)), true),
            (&|machine| machine.disks[0].backend = nbd.clone(), true),
            (&|machine| machine.security.account = Some(Account { user_id: 65534, group_id: 65534 }), true),
            (&|machine| machine.disks[0].backend = vhost.clone(), false),
            (&|machine| machine.disks.insert(0, Disk::new("data", nbd.clone())), false),
            (&|machine| machine.memory.size_bytes *= 2, false),
            (&|machine| machine.processors = 2, false),
        ];
        for (number, (change, fits)) in changes.into_iter().enumerate() {
            let mut wanted = saved.clone();
            change(&mut wanted);
            assert_eq!(ensure_fits(&saved, &wanted).is_ok(), fits, "change {number}");
        }
    }
}
