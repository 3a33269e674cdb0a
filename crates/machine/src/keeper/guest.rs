//! The machine itself: what QEMU is told, and the guest's agent.

use std::time::Duration;

use onecopy_hypervisor::configuration::{
    Account, Balloon, Boot, Disk, DiskBackend, Forward, Generation, KERNEL_ARGUMENTS,
    MachineConfiguration as Configuration, MemoryBackend, MemoryLock, NbdServer, Network, NetworkEnd, OnPanic,
    SocketRole,
};
use onecopy_hypervisor::{Agent, Machine, MachineDirectory, Qemu, State, TimeLimits};
use onecopy_postgres::ServiceUser;

use super::arrive::Arriving;
use super::restore::{self, Restored};
use super::role::{self, Role};
use super::{memory, network};
use crate::desired_state::{self, DesiredState, Found, Takeover};
use crate::home::absent_is_fine;
use crate::migration::{Arrival, ArrivalState};
use crate::network::made_address;
use crate::network_holder::frames_socket;
use crate::{
    BridgedNetwork, GuestImage, MachineConfiguration, MachineError, MachineHome, Transport, hypervisor_failed,
};

/// The name of its card in QEMU.
pub(super) const CARD: &str = "net0";

/// How soon QEMU connects again to a disk server, or a network holder, that was started anew.
const RECONNECT_MS: u32 = 100;

/// How long the guest's requests wait for a disk server: as long as one is started anew, and for a person after that.
const RECONNECT_DELAY_S: u32 = 24 * 3600;

/// How long one attempt to reach the agent may take; the next one follows.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

/// The time between two attempts.
const GREETING_INTERVAL: Duration = Duration::from_millis(200);

/// How long whoever has the disk may take to give it back: the process that served it for a QEMU that has just died.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Says whether the kernel merges pages: what its owner has to switch on.
/// Source: <https://docs.kernel.org/admin-guide/mm/ksm.html>.
const KSM_RUN: &str = "/sys/kernel/mm/ksm/run";

/// What a machine begins with that does not boot.
pub(super) enum Begun {
    /// A checkpoint.
    Restored(Restored),
    /// What comes from another host.
    Arriving(Box<Arriving>),
}

impl Begun {
    fn restored(&self) -> &Restored {
        match self {
            Begun::Restored(restored) => restored,
            Begun::Arriving(arriving) => &arriving.restored,
        }
    }
}

/// Takes over the machine that runs; then it may be that a stop is to be gone on with. None: it has ended meanwhile.
pub(super) async fn adopt(home: &MachineHome, user: &ServiceUser) -> Result<Option<(Machine, Takeover)>, MachineError> {
    let failed = |error| hypervisor_failed(home.name(), error);
    let directory = MachineDirectory::new(home.run()).map_err(failed)?;
    let Some(machine) = Machine::adopt(&directory, TimeLimits::default()).await.map_err(failed)? else {
        return Ok(None);
    };
    let care = take_over(home, user, &machine).await?;
    if care == Takeover::End {
        end_unbegun(&machine).await;
        return Err(MachineError::Checkpoint {
            machine: home.name().to_string(),
            reason: "its restore was broken off when its keeper died; it keeps the disk that it had".to_owned(),
        });
    }
    Ok(Some((machine, care)))
}

/// Starts the machine, of which nothing runs.
pub(super) async fn start(
    home: &MachineHome,
    user: &ServiceUser,
    begun: Option<Begun>,
) -> Result<Machine, MachineError> {
    let failed = |error| hypervisor_failed(home.name(), error);
    // Where the link leads: QEMU's paths of sockets are short there.
    let directory = MachineDirectory::new(home.run()).map_err(failed)?;
    let limits = TimeLimits::default();
    let mut configuration = configuration(home, &home.configuration()?, user)?;
    // It is let go by us, once that is known to be right.
    configuration.starts_paused = true;
    let restored = begun.as_ref().map(Begun::restored);
    let (incoming, inherited) = restored.map(Restored::incoming).unzip();
    configuration.incoming = incoming;
    let is_arriving = matches!(begun, Some(Begun::Arriving(_)));
    if is_arriving {
        // The first sector is on the other host still.
        let bytes = home.configuration()?.disk_bytes;
        configuration.disks.iter_mut().for_each(|disk| disk.geometry_of_bytes = Some(bytes));
    }
    if let Some(frozen) = restored.and_then(|restored| restored.frozen.clone()) {
        let backend = MemoryBackend::File { path: frozen, shared: false, read_only: true, offset_bytes: 0 };
        configuration.memory.backend = backend;
        configuration.security.memory_lock = MemoryLock::Off;
        configuration.memory.mergeable = home.configuration()?.merge_equal_pages;
        if configuration.memory.mergeable && !merges_pages() {
            tracing::warn!("equal pages are to be merged, and the kernel does not: {KSM_RUN} has to be 1");
        }
    }
    let qemu = Qemu::find().map_err(failed)?;
    let made = restored.map(|restored| restored.disk);
    desired_state::begin(home, user, LEASE_TIMEOUT).await?;
    if is_arriving {
        // Before QEMU has anything: nobody lets it go who does not know that it was given away.
        desired_state::note(home, DesiredState::Arriving)?;
    }
    let machine =
        Machine::start(&qemu, &configuration, &directory, inherited.as_slice(), limits).await.map_err(failed)?;
    drop(inherited);
    let let_go = async {
        let fork = match begun {
            Some(Begun::Arriving(arriving)) => return arriving.finish(home, user, &machine).await,
            Some(Begun::Restored(mut restored)) => {
                let kept = restored.kept.take();
                if kept.is_some() {
                    network::silence(home, &machine).await?;
                }
                restored.load(home, &machine).await?;
                kept
            }
            None => None,
        };
        // Held until it runs: a fork's checkpoint stays as long.
        let _fork = fork;
        unplug_isolated(home, &machine).await?;
        run(home, user, &machine).await
    };
    if let Err(error) = let_go.await {
        end_unbegun(&machine).await;
        // One that was promised has its disk, whatever has become of it, and so has one of which that is not known.
        let is_promised = || {
            !matches!(Arrival::of(home), Ok(Some(Arrival { state: ArrivalState::Begun | ArrivalState::Discarded, .. })))
        };
        if let Some(disk) = made.filter(|_| !is_arriving || !is_promised()) {
            restore::give_up(home, disk)?;
        }
        return Err(error);
    }
    Ok(machine)
}

/// A fork has its parent's addresses until it is told its own, and its parent's server: it must not be heard, nor hear,
/// before. Behind the loading of its state, which has the card's.
async fn unplug_isolated(home: &MachineHome, machine: &Machine) -> Result<(), MachineError> {
    if !home.isolated_file().exists() {
        return Ok(());
    }
    machine.monitor().set_link(CARD, false).await.map_err(|error| hypervisor_failed(home.name(), error))
}

/// Puts the cable into the card of a machine that began without.
pub(super) async fn connect(home: &MachineHome, machine: &Machine) -> Result<(), MachineError> {
    machine.monitor().set_link(CARD, true).await.map_err(|error| hypervisor_failed(home.name(), error))?;
    let path = home.isolated_file();
    absent_is_fine(std::fs::remove_file(&path)).map_err(MachineError::file("remove", &path))?;
    // Back after a power cut, it would unplug the card at each start, and nobody plugs it in again.
    restore::synchronize(home)
}

/// Ends a machine that was not to begin: one that is there would be taken over.
async fn end_unbegun(machine: &Machine) {
    machine.kill();
    if let Err(error) = machine.wait_killed().await {
        tracing::error!(%error, "a machine that was not to begin does not end");
    }
}

/// Does with a machine that is there what was wanted of it before its keeper died.
async fn take_over(home: &MachineHome, user: &ServiceUser, machine: &Machine) -> Result<Takeover, MachineError> {
    let (found, state) = (desired_state::find(home, user), machine.state());
    let care = found.takeover(&state);
    tracing::info!(?found, %state, ?care, "the machine is there already");
    match (care, found) {
        (Takeover::Resume, _) => {
            unplug_isolated(home, machine).await?;
            run(home, user, machine).await?;
        }
        (Takeover::Pause, _) => machine.pause().await.map_err(|error| hypervisor_failed(home.name(), error))?,
        // It was let go, or not made to stand, and there was no time to write that down.
        (Takeover::Leave, Found::Own(DesiredState::Beginning | DesiredState::Taking | DesiredState::Paused))
            if state == State::Running =>
        {
            note_running(home);
        }
        (Takeover::Leave | Takeover::Stop | Takeover::End, _) => {}
    }
    Ok(care)
}

/// Lets a machine go, where it is known that its disk is as it left it: whoever lets one go does it here.
pub(super) async fn let_go(home: &MachineHome, user: &ServiceUser, machine: &Machine) -> Result<(), MachineError> {
    desired_state::check_may_run(home, user)?;
    restore::commit(home)?;
    machine.resume().await.map_err(|error| hypervisor_failed(home.name(), error))
}

/// Lets a machine go that shall run from now on.
pub(super) async fn run(home: &MachineHome, user: &ServiceUser, machine: &Machine) -> Result<(), MachineError> {
    let_go(home, user, machine).await?;
    note_running(home);
    Ok(())
}

/// It does, and whoever takes it over sees that: it is not given up because it cannot be written down.
fn note_running(home: &MachineHome) {
    if let Err(error) = desired_state::note(home, DesiredState::Running) {
        tracing::error!(%error, "it is not written down that the machine runs");
    }
}

pub(super) fn configuration(
    home: &MachineHome,
    machine: &MachineConfiguration,
    user: &ServiceUser,
) -> Result<Configuration, MachineError> {
    let image = GuestImage::find(Some(&home.image()))?;
    let name = home.name();
    let addresses = machine.network.as_ref().map(BridgedNetwork::kernel_arguments).unwrap_or_default();
    let boot = Boot::Kernel {
        kernel: image.kernel(),
        initrd: Some(image.initrd()),
        arguments: format!("{KERNEL_ARGUMENTS} root=/dev/vda onecopy.hostname={name}{addresses}"),
    };
    let mut configuration = Configuration::new(name.as_str(), machine.memory_bytes, boot);
    configuration.processors = machine.processors;
    let backend = match machine.transport() {
        Transport::Nbd => DiskBackend::Nbd {
            server: NbdServer::Unix(role::nbd_socket(home)),
            export: String::new(),
            reconnect_delay_s: RECONNECT_DELAY_S,
        },
        Transport::Vhost => {
            DiskBackend::VhostUser { socket: Role::Disk.socket(home), reconnect_ms: Some(RECONNECT_MS) }
        }
    };
    configuration.disks = vec![Disk::new("root", backend)];
    configuration.networks = vec![network_of(home, machine)];
    // A supervisor starts it again; the console's last lines say why.
    configuration.on_panic = OnPanic::End;
    if machine.checkpoints {
        let backend = MemoryBackend::File { path: home.memory(), shared: true, read_only: false, offset_bytes: 0 };
        configuration.memory.backend = backend;
        if memory::may_be_locked() {
            configuration.security.memory_lock = MemoryLock::OnFault;
        }
    } else {
        // Locked memory cannot be given back.
        configuration.balloon = Some(Balloon { free_page_reporting: true });
    }
    configuration.generation = Some(Generation::New);
    if rustix::process::geteuid().is_root() {
        configuration.security.account = Some(Account { user_id: user.user_id(), group_id: user.group_id() });
    }
    Ok(configuration)
}

fn merges_pages() -> bool {
    std::fs::read_to_string(KSM_RUN).is_ok_and(|run| run.trim() == "1")
}

/// Its one card, and what that is plugged into.
fn network_of(home: &MachineHome, machine: &MachineConfiguration) -> Network {
    let forward = |forward: &crate::Forward| Forward::tcp(forward.host_port, forward.guest_port);
    let (card, end) = match &machine.network {
        Some(network) => {
            let role = SocketRole::Connects { reconnect_ms: Some(RECONNECT_MS) };
            (network.card(home.root()), NetworkEnd::Stream { path: frames_socket(home), role })
        }
        None => {
            let forwards = machine.forwards.iter().map(forward).collect();
            (made_address(home.root()), NetworkEnd::User { forwards, restricted: false })
        }
    };
    Network { hardware_address: Some(card.to_string()), ..Network::new(CARD, end) }
}

/// Waits, as long as the machine runs, until its agent answers.
pub(super) async fn greet(machine: &Machine) -> Option<Agent> {
    loop {
        let socket = machine.directory().agent();
        tokio::select! {
            agent = Agent::connect(socket, GREETING_TIMEOUT) => match agent {
                Ok(agent) => return Some(agent),
                Err(error) => {
                    tracing::debug!(machine = machine.name(), %error, "the guest's agent does not answer yet")
                }
            },
            _ = machine.wait_ended() => return None,
        }
        tokio::time::sleep(GREETING_INTERVAL).await;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use onecopy_hypervisor::configuration::{AsynchronousIo, FileFormat, Incoming};
    use onecopy_hypervisor::{CommandLine, HostTraits, QemuVersion};
    use onecopy_testing::process;

    use super::*;
    use crate::configuration::PROCESSORS_MAX;

    /// A machine's directory, whose QEMU finds nothing to boot and ends with the test.
    pub(in crate::keeper) struct Machines {
        pub(in crate::keeper) home: MachineHome,
        pub(in crate::keeper) user: ServiceUser,
        _directory: onecopy_testing::TestDirectory,
    }

    impl Machines {
        pub(in crate::keeper) fn new() -> Machines {
            let directory = onecopy_testing::TestDirectory::new().unwrap();
            let (home, user) = (MachineHome::at(&directory.join("web")).unwrap(), ServiceUser::resolve(None).unwrap());
            std::fs::create_dir(home.root()).unwrap();
            user.create_directory(&home.disk()).unwrap();
            home.make_run(&user).unwrap();
            Machines { home, user, _directory: directory }
        }

        /// One that stands, or waits for what another one sends.
        pub(in crate::keeper) async fn start(&self, incoming: Option<Incoming>) {
            let image = self.home.root().join("empty.raw");
            std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
            let mut configuration = Configuration::new("nothing-to-boot", 64 << 20, Boot::FirstDisk);
            let (format, asynchronous_io) = (FileFormat::Raw, AsynchronousIo::Threads);
            let backend = DiskBackend::File { path: image, format, read_only: false, direct: false, asynchronous_io };
            configuration.disks.push(Disk::new("empty", backend));
            configuration.starts_paused = true;
            configuration.incoming = incoming;
            let directory = MachineDirectory::new(self.home.run()).unwrap();
            let qemu = Qemu::find().unwrap();
            drop(Machine::start(&qemu, &configuration, &directory, &[], TimeLimits::default()).await.unwrap());
        }
    }

    impl Drop for Machines {
        fn drop(&mut self) {
            if let Some(process_id) = self.home.process_id() {
                process::kill(process_id);
            }
        }
    }

    /// As it is when its keeper is killed at any moment: whatever was written down, whether or not it was done.
    ///
    /// What a machine shall do is written down before it does it; from every state that a killed keeper may leave the
    /// next one lets go what was beginning, goes on with a stop, leaves what is paused, and lets nothing run whose disk
    /// has gone on without it; no run begins on a disk that somebody has.
    ///
    /// Spec: D5
    #[tokio::test]
    async fn v33_a_machine_is_taken_over_in_every_state_that_a_keeper_may_have_left() {
        let machines = Machines::new();
        let (home, user) = (&machines.home, &machines.user);
        desired_state::begin(home, user, Duration::ZERO).await.unwrap();
        machines.start(None).await;
        let (machine, care) = adopt(home, user).await.unwrap().unwrap();
        assert_eq!((care, machine.state()), (Takeover::Resume, State::Running), "its keeper had not let it go");
        assert_eq!(desired_state::find(home, user), Found::Own(DesiredState::Running));

        let (beginning, running, paused) = (DesiredState::Beginning, DesiredState::Running, DesiredState::Paused);
        // What was written down, whether the machine runs; whether it does then, and what is written down.
        let table = [
            (beginning, false, true, Found::Own(running)),
            (beginning, true, true, Found::Own(running)),
            (running, false, false, Found::Own(running)),
            (running, true, true, Found::Own(running)),
            (DesiredState::Taking, false, true, Found::Own(running)),
            (DesiredState::Taking, true, true, Found::Own(running)),
            (paused, false, false, Found::Own(paused)),
            (paused, true, true, Found::Own(running)),
            (DesiredState::Stopping, false, false, Found::Own(DesiredState::Stopping)),
            (DesiredState::Stopping, true, true, Found::Own(DesiredState::Stopping)),
            // The last one: that is for good.
            (DesiredState::Migrated, false, false, Found::Moved),
            (DesiredState::Migrated, true, false, Found::Moved),
        ];
        for (standing, ran, runs, found) in table {
            match ran {
                true => machine.resume().await.unwrap(),
                false => machine.pause().await.unwrap(),
            }
            if desired_state::find(home, user) != Found::Moved {
                desired_state::note(home, standing).unwrap();
            }
            let care = take_over(home, user, &machine).await.unwrap();
            assert_eq!(care == Takeover::Stop, standing == DesiredState::Stopping, "{standing:?} {ran}");
            let expected = if runs { State::Running } else { State::Paused };
            assert_eq!((machine.state(), desired_state::find(home, user)), (expected, found), "{standing:?} {ran}");
        }
        let error = let_go(home, user, &machine).await.unwrap_err().to_string();
        assert!(error.contains("disk has gone on without it"), "{error}");
        assert_eq!(machine.state(), State::Paused);
        machine.quit().await.unwrap();
        assert!(adopt(home, user).await.unwrap().is_none(), "whoever comes to take it over begins nothing");
        // Nor is it booted again.
        let error = desired_state::begin(home, user, Duration::ZERO).await.unwrap_err().to_string();
        assert!(error.contains("does not run here again"), "{error}");
    }

    /// Of a keeper that was killed before QEMU had what the checkpoint says.
    ///
    /// Spec: D6, A3
    #[tokio::test]
    async fn t18_a_restore_whose_keeper_has_died_is_given_up_with_its_disk() {
        let machines = Machines::new();
        let (home, user) = (&machines.home, &machines.user);
        restore::give_up(home, 1).unwrap();
        user.create_directory(&home.numbered_disk(1)).unwrap();
        desired_state::begin(home, user, Duration::ZERO).await.unwrap();
        machines.start(Some(Incoming::Deferred)).await;
        let error = adopt(home, user).await.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("its restore was broken off"), "{error}");
        assert_eq!(home.process_id(), None);
        restore::forget(home).unwrap();
        assert_eq!(home.disk(), home.root().join("disk"));
        assert!(!home.numbered_disk(1).exists() && !home.restoring_file().exists());
    }

    /// QEMU's arguments for a machine.
    fn arguments(home: &MachineHome, machine: &MachineConfiguration) -> Vec<String> {
        let wanted = configuration(home, machine, &ServiceUser::resolve(None).unwrap()).unwrap();
        let host = HostTraits { version: QemuVersion { major: 10, minor: 0 }, kvm: false };
        let line = CommandLine::new(&wanted, &MachineDirectory::new("/machine").unwrap(), host).unwrap();
        line.arguments().iter().map(|word| word.to_str().unwrap().to_owned()).collect()
    }

    /// A machine's directory with the files of an image, which nobody boots.
    fn with_image() -> (tempfile::TempDir, MachineHome) {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        std::fs::create_dir_all(home.image()).unwrap();
        for name in ["vmlinuz", "initrd", "root.img", "manifest.toml"] {
            std::fs::write(home.image().join(name), "").unwrap();
        }
        (directory, home)
    }

    /// Spec: D6
    #[test]
    fn t15_a_machine_that_can_be_checkpointed_has_its_memory_in_a_file_and_nobody_else_writes_there() {
        let (_directory, home) = with_image();
        let usual = MachineConfiguration::new(home.image());
        let machine = MachineConfiguration { checkpoints: true, ..usual.clone() };
        let words = arguments(&home, &machine);
        let has = |words: &[String], begin: &str| words.iter().any(|word| word.starts_with(begin));
        let file = format!("memory-backend-file,mem-path={},share=on", home.memory().display());
        assert!(has(&words, &file) && has(&words, "virtio-blk-pci,"), "{words:?}");
        assert!(!has(&words, "vhost-user-blk-pci") && !has(&words, "virtio-balloon-pci"), "{words:?}");
        let words = arguments(&home, &usual);
        assert!(has(&words, "memory-backend-memfd") && has(&words, "vhost-user-blk-pci,"), "{words:?}");
        let told = role::disk_arguments(&home);
        let nbd = format!("unix:{}", role::nbd_socket(&home).display());
        assert!(told.iter().any(|word| *word == *nbd), "whichever its QEMU was started with: {told:?}");
        let error = MachineConfiguration::check_checkpoints(QemuVersion { major: 9, minor: 2 }).unwrap_err();
        assert!(error.to_string().contains("QEMU 10.0"), "{error}");
    }

    /// A machine has 1 to 64 processors, and its disk a queue for each; also after the process that serves the disk was
    /// killed.
    ///
    /// Spec: A7
    #[test]
    fn v32_a_disk_has_a_queue_for_each_processor_and_its_server_offers_as_many() {
        let (_directory, home) = with_image();
        let told = role::disk_arguments(&home);
        let position = told.iter().position(|word| word == "--queues").unwrap();
        let offered: u32 = told[position + 1].to_str().unwrap().parse().unwrap();
        for processors in [1, 2, PROCESSORS_MAX] {
            let machine = MachineConfiguration { processors, ..MachineConfiguration::new(home.image()) };
            machine.check().unwrap();
            let words = arguments(&home, &machine);
            let disks: Vec<&String> = words.iter().filter(|word| word.starts_with("vhost-user-blk-pci,")).collect();
            assert_eq!(disks.len(), 1, "{disks:?}");
            assert!(disks[0].ends_with(&format!(",num-queues={processors}")), "{disks:?}");
            assert!(
                processors <= offered,
                "QEMU does not start where it wants more than the {offered} that are offered"
            );
        }
    }
}
