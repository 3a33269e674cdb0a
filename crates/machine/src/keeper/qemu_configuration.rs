//! What QEMU is told of a machine.

use onecopy_hypervisor::configuration::{
    Account, Balloon, Boot, Disk, DiskBackend, Forward, Generation, KERNEL_ARGUMENTS,
    MachineConfiguration as Configuration, MemoryBackend, MemoryLock, NbdServer, Network, NetworkEnd, OnPanic,
    SocketRole,
};
use onecopy_postgres::ServiceUser;

use super::memory;
use super::network::CARD;
use super::role::{self, Role};
use crate::network::made_address;
use crate::network_holder::frames_socket;
use crate::{BridgedNetwork, GuestImage, MachineConfiguration, MachineError, MachineHome, Transport};

/// How soon QEMU connects again to a disk server, or a network holder, that was started anew.
const RECONNECT_MS: u32 = 100;

/// How long the guest's requests wait for a disk server: as long as one is started anew, and for a person after that.
const RECONNECT_DELAY_S: u32 = 24 * 3600;

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

#[cfg(test)]
mod tests {
    use onecopy_hypervisor::{CommandLine, HostTraits, MachineDirectory, QemuVersion};

    use super::*;
    use crate::configuration::PROCESSORS_MAX;

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
