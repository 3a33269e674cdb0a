//! The machine itself: what QEMU is told, and the guest's agent.

use std::time::Duration;

use onecopy_hypervisor::configuration::{
    Account, Balloon, Boot, Disk, DiskDoor, Forward, Generation, KERNEL_ARGUMENTS,
    MachineConfiguration as Configuration, Network, NetworkEnd, OnPanic,
};
use onecopy_hypervisor::{Agent, Machine, MachineDirectory, Qemu, State, TimeLimits};
use onecopy_postgres::ServiceUser;
use sha2::{Digest, Sha256};

use super::disk_server::DiskServer;
use crate::HostError;
use crate::machines::{GuestImage, MachineConfiguration, MachineHome, hypervisor_failed};

/// How soon QEMU connects again to a disk server that was started anew.
const RECONNECT_MS: u32 = 100;

/// How long one attempt to reach the agent may take; the next one follows.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

/// The time between two attempts.
const GREETING_INTERVAL: Duration = Duration::from_millis(200);

/// Starts the machine, or takes over the one that runs.
pub(super) async fn start(home: &MachineHome, user: &ServiceUser) -> Result<Machine, HostError> {
    let failed = |error| hypervisor_failed(home.name(), error);
    // Where the link leads: QEMU's paths of sockets are short there.
    let directory = MachineDirectory::new(home.run()).map_err(failed)?;
    let limits = TimeLimits::default();
    if let Some(machine) = Machine::adopt(&directory, limits).await.map_err(failed)? {
        // Its keeper died before it let the guest begin.
        if machine.state() == State::Paused {
            machine.resume().await.map_err(failed)?;
        }
        return Ok(machine);
    }
    let configuration = configuration(home, &home.configuration()?, user)?;
    let qemu = Qemu::find().map_err(failed)?;
    Machine::start(&qemu, &configuration, &directory, &[], limits).await.map_err(failed)
}

fn configuration(
    home: &MachineHome,
    machine: &MachineConfiguration,
    user: &ServiceUser,
) -> Result<Configuration, HostError> {
    let image = GuestImage::find(Some(&home.image()))?;
    let name = home.name();
    let boot = Boot::Kernel {
        kernel: image.kernel(),
        initrd: Some(image.initrd()),
        arguments: format!("{KERNEL_ARGUMENTS} root=/dev/vda onecopy.hostname={name}"),
    };
    let mut configuration = Configuration::new(name.as_str(), machine.memory_bytes, boot);
    configuration.processors = machine.processors;
    let door = DiskDoor::VhostUser { socket: DiskServer::socket(home), reconnect_ms: Some(RECONNECT_MS) };
    configuration.disks = vec![Disk::new("root", door)];
    let forwards = machine.forwards.iter().map(|forward| Forward::tcp(forward.host_port, forward.guest_port)).collect();
    let end = NetworkEnd::User { forwards, restricted: false };
    configuration.networks =
        vec![Network { hardware_address: Some(hardware_address(home)), ..Network::new("net0", end) }];
    // A supervisor starts it again; the console's last lines say why.
    configuration.on_panic = OnPanic::End;
    configuration.balloon = Some(Balloon { free_page_reporting: true });
    configuration.generation = Some(Generation::New);
    if rustix::process::geteuid().is_root() {
        configuration.security.account = Some(Account { user_id: user.user_id(), group_id: user.group_id() });
    }
    Ok(configuration)
}

/// The card's address: the same at each start, another one for each machine, locally administered (IEEE 802).
fn hardware_address(home: &MachineHome) -> String {
    let digest = Sha256::digest(home.root().as_os_str().as_encoded_bytes());
    format!("52:54:00:{:02x}:{:02x}:{:02x}", digest[0], digest[1], digest[2])
}

/// Waits, as long as the machine runs, until its agent answers.
pub(super) async fn greet(machine: &Machine) -> Option<Agent> {
    loop {
        let socket = machine.directory().agent();
        tokio::select! {
            agent = Agent::connect(socket, GREETING_TIMEOUT) => match agent {
                Ok(agent) => return Some(agent),
                Err(error) => tracing::debug!(machine = machine.name(), %error, "the guest's agent does not answer yet"),
            },
            _ = machine.wait_ended() => return None,
        }
        tokio::time::sleep(GREETING_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use onecopy_hypervisor::{CommandLine, HostTraits, QemuVersion};

    use super::super::disk_server;
    use super::*;
    use crate::machines::configuration::PROCESSORS_MAX;

    #[test]
    fn v32_a_disk_has_a_queue_for_each_processor_and_its_server_offers_as_many() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        std::fs::create_dir_all(home.image()).unwrap();
        for name in ["vmlinuz", "initrd", "root.img", "manifest.toml"] {
            std::fs::write(home.image().join(name), "").unwrap();
        }
        let user = ServiceUser::resolve(None).unwrap();
        let told = disk_server::arguments(&home);
        let position = told.iter().position(|word| word == "--queues").unwrap();
        let offered: u32 = told[position + 1].to_str().unwrap().parse().unwrap();
        for processors in [1, 2, PROCESSORS_MAX] {
            let machine = MachineConfiguration { processors, ..MachineConfiguration::new(home.image()) };
            machine.check().unwrap();
            let wanted = configuration(&home, &machine, &user).unwrap();
            let version = QemuVersion { major: 10, minor: 0 };
            let host = HostTraits { version, kvm: false, time_stamp_khz: None };
            let line = CommandLine::new(&wanted, &MachineDirectory::new("/machine").unwrap(), host).unwrap();
            let words = line.arguments().iter().filter_map(|word| word.to_str());
            let disks: Vec<&str> = words.filter(|word| word.starts_with("vhost-user-blk-pci,")).collect();
            assert_eq!(disks.len(), 1, "{disks:?}");
            assert!(disks[0].ends_with(&format!(",num-queues={processors}")), "{disks:?}");
            assert!(
                processors <= offered,
                "QEMU does not start where it wants more than the {offered} that are offered"
            );
        }
    }
}
