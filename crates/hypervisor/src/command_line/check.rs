//! What QEMU would refuse in its own words, or take and do something else: said before it is started.

use std::collections::BTreeSet;

use crate::configuration::{Boot, DiskBackend, Incoming, MemoryBackend, MemoryLock, NbdServer, NetworkEnd, SocketRole};
use crate::directory::check_socket_path;
use crate::{MachineConfiguration, QemuVersion};

/// QEMU's own bound of a q35's processors without an interrupt remapper.
const PROCESSORS_MAX: u32 = 255;
const MIB: u64 = 1 << 20;

/// The configuration makes sense, or what is wrong with it.
pub(super) fn check(configuration: &MachineConfiguration, version: QemuVersion) -> Result<(), String> {
    if configuration.name.is_empty() {
        return Err("it has no name".to_owned());
    }
    if !(1..=PROCESSORS_MAX).contains(&configuration.processors) {
        return Err(format!("{} processors: possible are 1 to {PROCESSORS_MAX}", configuration.processors));
    }
    texts(configuration)?;
    memory(configuration)?;
    board(configuration)?;
    ids(configuration)?;
    sockets(configuration)?;
    for network in &configuration.networks {
        let reconnects = SocketRole::Connects { reconnect_ms: None };
        if let NetworkEnd::Stream { role, .. } = &network.end
            && !matches!(role, SocketRole::Listens)
            && *role != reconnects
            && version < QemuVersion::STREAM_RECONNECTS
        {
            return Err(format!("QEMU {version} does not reconnect the stream of network {}", network.id));
        }
    }
    if configuration.security.memory_lock == MemoryLock::OnFault && version < QemuVersion::LOCKS_ON_FAULT {
        let needed = QemuVersion::LOCKS_ON_FAULT;
        return Err(format!("QEMU {version} does not lock memory as it is used, needed is {needed} or newer"));
    }
    match &configuration.incoming {
        Some(Incoming::Command(_)) if configuration.security.sandboxed => {
            Err("a sandboxed QEMU runs no command to read its state from: use a descriptor or a socket".to_owned())
        }
        _ => Ok(()),
    }
}

/// Arguments end at a zero.
fn texts(configuration: &MachineConfiguration) -> Result<(), String> {
    let mut texts = vec![&configuration.name, &configuration.processor_model];
    if let Boot::Kernel { arguments, .. } = &configuration.boot {
        texts.push(arguments);
    }
    match texts.into_iter().chain(&configuration.more_arguments).find(|text| text.contains('\0')) {
        Some(text) => Err(format!("{text:?} holds a zero character")),
        None => Ok(()),
    }
}

fn memory(configuration: &MachineConfiguration) -> Result<(), String> {
    let memory = &configuration.memory;
    if memory.size_bytes == 0 || !memory.size_bytes.is_multiple_of(MIB) {
        return Err(format!("{} bytes of memory: it must be a multiple of 1 MiB", memory.size_bytes));
    }
    let shared = match &memory.backend {
        MemoryBackend::Anonymous { shared, huge_page_bytes } => {
            if let Some(bytes) = huge_page_bytes
                && (!bytes.is_power_of_two() || *bytes < 2 * MIB || !memory.size_bytes.is_multiple_of(*bytes))
            {
                return Err(format!("{} bytes of memory in huge pages of {bytes} bytes", memory.size_bytes));
            }
            *shared
        }
        MemoryBackend::File { shared, read_only, path, .. } => {
            if *shared && *read_only {
                let path = path.display();
                return Err(format!("the guest cannot share {path}, which is read only: it could not write"));
            }
            *shared
        }
    };
    let sees_memory = |backend: &DiskBackend| matches!(backend, DiskBackend::VhostUser { .. });
    match configuration.disks.iter().find(|disk| sees_memory(&disk.backend)) {
        Some(disk) if !shared => {
            Err(format!("the vhost-user back end of disk {} needs shared memory: `shared: true`", disk.id))
        }
        _ => Ok(()),
    }
}

fn board(configuration: &MachineConfiguration) -> Result<(), String> {
    match &configuration.board_version {
        Some(version) if version.chars().any(|c| !c.is_ascii_digit() && c != '.') => {
            Err(format!("{version:?} is no version of the board, such as 7.2"))
        }
        _ if configuration.boot == Boot::FirstDisk && configuration.disks.is_empty() => {
            Err("there is no disk to boot from".to_owned())
        }
        _ => Ok(()),
    }
}

/// Names of QEMU's objects: letters first (QEMU's `id_wellformed`), and each once.
fn ids(configuration: &MachineConfiguration) -> Result<(), String> {
    const OWN: [&str; 7] = ["serial", "agent-port", "random-device", "panic", "balloon", "generation", "console"];
    let mut seen: BTreeSet<&str> = OWN.into_iter().collect();
    let disks = configuration.disks.iter().map(|disk| disk.id.as_str());
    for id in disks.chain(configuration.networks.iter().map(|network| network.id.as_str())) {
        let well_formed = id.starts_with(|first: char| first.is_ascii_alphabetic())
            && id.chars().all(|character| character.is_ascii_alphanumeric() || character == '-');
        // The serial number of a virtio disk holds 20 bytes.
        if !well_formed || id.len() > 20 {
            return Err(format!("{id:?} is no name of a device: up to 20 letters, digits and '-', a letter first"));
        }
        if id.starts_with("port") || !seen.insert(id) {
            return Err(format!("two devices are called {id:?}"));
        }
    }
    Ok(())
}

fn sockets(configuration: &MachineConfiguration) -> Result<(), String> {
    let mut paths: Vec<&std::path::Path> = configuration.more_monitors.iter().map(AsRef::as_ref).collect();
    for disk in &configuration.disks {
        match &disk.backend {
            DiskBackend::VhostUser { socket, .. } => paths.push(socket),
            DiskBackend::Nbd { server: NbdServer::Unix(socket), .. } => paths.push(socket),
            _ => {}
        }
    }
    for network in &configuration.networks {
        if let NetworkEnd::Stream { path, .. } = &network.end {
            paths.push(path);
        }
    }
    if let Some(Incoming::Unix(path)) = &configuration.incoming {
        paths.push(path);
    }
    paths.into_iter().try_for_each(check_socket_path)
}
