//! The devices of a machine, in the order in which the guest finds them.

use super::option::OptionText;
use super::{CommandLine, generation};
use crate::configuration::{
    AsynchronousIo, Disk, DiskBackend, FileFormat, Forward, NbdServer, Network, NetworkEnd, Protocol, SocketRole,
};
use crate::{MachineConfiguration, MachineDirectory, QemuVersion};

/// Heads and sectors of a disk that has no partitions, as QEMU guesses them.
const HEADS: u64 = 16;
const SECTORS: u64 = 63;

/// Adds all devices.
pub(super) fn add(
    line: &mut CommandLine,
    configuration: &MachineConfiguration,
    directory: &MachineDirectory,
    version: QemuVersion,
) {
    console(line, directory);
    if configuration.agent {
        agent(line, directory);
    }
    if configuration.random_numbers {
        line.add("-object", OptionText::new("rng-random").with("id", "random").with("filename", "/dev/urandom"));
        line.add("-device", OptionText::new("virtio-rng-pci").with("id", "random-device").with("rng", "random"));
    }
    if configuration.panic_notice {
        line.add("-device", OptionText::new("pvpanic-pci").with("id", "panic"));
    }
    if let Some(balloon) = configuration.balloon {
        let device = OptionText::new("virtio-balloon-pci").with("id", "balloon").with_switch("deflate-on-oom", true);
        line.add("-device", device.with_switch("free-page-reporting", balloon.free_page_reporting));
    }
    if let Some(chosen) = &configuration.generation {
        line.add("-device", generation(chosen));
    }
    for number in 0..configuration.hot_plug_ports {
        let port = OptionText::new("pcie-root-port").with("id", format!("port{number}"));
        // Chassis and slot number a port for the guest; the chassis 0 is the board's own.
        line.add("-device", port.with("chassis", u16::from(number) + 1).with("slot", number));
    }
    for (position, disk) in configuration.disks.iter().enumerate() {
        let boots = position == 0 && configuration.boot == crate::configuration::Boot::FirstDisk;
        self::disk(line, disk, configuration.processors, boots, version);
    }
    for network in &configuration.networks {
        self::network(line, network, version);
    }
}

/// The serial console: all of it to a file, and to whoever connects to the socket.
fn console(line: &mut CommandLine, directory: &MachineDirectory) {
    let socket = OptionText::new("socket").with("id", "console").with_path("path", directory.console_socket());
    let socket = socket.with_switch("server", true).with_switch("wait", false);
    line.add("-chardev", socket.with_path("logfile", directory.console_log()).with_switch("logappend", true));
    line.add("-serial", "chardev:console");
}

fn agent(line: &mut CommandLine, directory: &MachineDirectory) {
    line.add_socket("agent", directory.agent());
    line.add("-device", OptionText::new("virtio-serial-pci").with("id", "serial").with("max_ports", 2));
    let port = OptionText::new("virtserialport").with("id", "agent-port").with("bus", "serial.0").with("nr", 1);
    line.add("-device", port.with("chardev", "agent").with("name", onecopy_guest_agent::protocol::PORT));
}

fn disk(line: &mut CommandLine, disk: &Disk, processors: u32, boots: bool, version: QemuVersion) {
    let queues = disk.queues.map_or(processors, u32::from);
    let id = &disk.id;
    let device = match &disk.backend {
        DiskBackend::VhostUser { socket, reconnect_ms } => {
            let chardev = OptionText::new("socket").with("id", format!("{id}-socket")).with_path("path", socket);
            line.add("-chardev", reconnecting(chardev, *reconnect_ms, version));
            OptionText::new("vhost-user-blk-pci").with("id", id).with("chardev", format!("{id}-socket"))
        }
        backend => {
            line.add("-blockdev", block_node(id, backend));
            let device = OptionText::new("virtio-blk-pci").with("id", id).with("drive", format!("{id}-blocks"));
            let device = device.with("serial", id);
            if disk.own_thread {
                line.add("-object", OptionText::new("iothread").with("id", format!("{id}-thread")));
            }
            let device = device.with_some("iothread", disk.own_thread.then(|| format!("{id}-thread")));
            disk.geometry_of_bytes.map(cylinders).into_iter().fold(device, |device, cylinders| {
                device.with("cyls", cylinders).with("heads", HEADS).with("secs", SECTORS)
            })
        }
    };
    let device = device.with("num-queues", queues).with_some("queue-size", disk.queue_size);
    line.add("-device", device.with_some("bootindex", boots.then_some(0)));
}

/// Cylinders of a disk, as QEMU guesses them of one that has no partitions (`hw/block/hd-geometry.c`).
fn cylinders(bytes: u64) -> u64 {
    (bytes / 512 / (HEADS * SECTORS)).clamp(2, 16383)
}

/// A socket that connects anew: since QEMU 9.2 in milliseconds, before in seconds.
fn reconnecting(socket: OptionText, reconnect_ms: Option<u32>, version: QemuVersion) -> OptionText {
    match reconnect_ms {
        Some(milliseconds) if version >= QemuVersion::RECONNECT_MS => socket.with("reconnect-ms", milliseconds),
        Some(milliseconds) => socket.with("reconnect", milliseconds.div_ceil(1000)),
        None => socket,
    }
}

fn block_node(id: &str, backend: &DiskBackend) -> OptionText {
    let node = OptionText::new("").with("node-name", format!("{id}-blocks")).with("discard", "unmap");
    match backend {
        DiskBackend::Nbd { server, export, reconnect_delay_s } => {
            let node = node.with("driver", "nbd").with("export", export).with("reconnect-delay", reconnect_delay_s);
            match server {
                NbdServer::Unix(path) => node.with("server.type", "unix").with_path("server.path", path),
                NbdServer::Tcp { host, port } => {
                    node.with("server.type", "inet").with("server.host", host).with("server.port", port)
                }
            }
        }
        DiskBackend::File { path, format, read_only, direct, asynchronous_io } => {
            let format = match format {
                FileFormat::Raw => "raw",
                FileFormat::Qcow2 => "qcow2",
            };
            let way = match asynchronous_io {
                AsynchronousIo::Threads => "threads",
                AsynchronousIo::Native => "native",
                AsynchronousIo::IoUring => "io_uring",
            };
            let node = node.with("driver", format).with_switch("read-only", *read_only).with("file.driver", "file");
            let node = node.with_path("file.filename", path).with("file.aio", way).with("file.discard", "unmap");
            node.with_switch("cache.direct", *direct).with_switch("file.cache.direct", *direct)
        }
        DiskBackend::VhostUser { .. } => node,
    }
}

fn network(line: &mut CommandLine, network: &Network, version: QemuVersion) {
    let id = format!("{}-end", network.id);
    let device = OptionText::new("virtio-net-pci").with("id", &network.id);
    // Nothing boots from the network, and a card without a boot ROM has no ROM to migrate.
    let device = device.with_some("mac", network.hardware_address.as_ref()).with("romfile", "");
    let end = match &network.end {
        NetworkEnd::Unplugged => {
            line.add("-device", device);
            return;
        }
        NetworkEnd::User { forwards, restricted } => {
            let user = OptionText::new("user").with("id", &id).with_switch("ipv6", false);
            let user = user.with_switch("restrict", *restricted);
            forwards.iter().fold(user, |user, forward| user.with("hostfwd", forwarded(forward)))
        }
        NetworkEnd::Stream { path, role } => {
            let stream = OptionText::new("stream").with("id", &id);
            let stream = stream.with_switch("server", *role == SocketRole::Listens).with("addr.type", "unix");
            let stream = stream.with_path("addr.path", path);
            match role {
                SocketRole::Listens => stream,
                SocketRole::Connects { reconnect_ms } => reconnecting(stream, *reconnect_ms, version),
            }
        }
    };
    line.add("-netdev", end);
    line.add("-device", device.with("netdev", id));
}

fn forwarded(forward: &Forward) -> String {
    let protocol = match forward.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    format!("{protocol}:{}:{}-:{}", forward.host_address, forward.host_port, forward.guest_port)
}
