//! QEMU takes what the configuration can say, also with names that hold commas and spaces.

use std::os::unix::net::UnixListener;

use onecopy_hypervisor::configuration::{
    Accelerator, AsynchronousIo, Balloon, Disk, DiskBackend, FileFormat, Forward, Generation, MemoryBackend, Network,
    NetworkEnd, OnPanic, Protocol, SocketRole,
};
use onecopy_hypervisor::{Machine, MachineConfiguration};
use onecopy_testing::free_port;
use serde_json::json;

use crate::machines::{Machines, patient};

/// Starts it paused, lets `look` ask, and ends it.
async fn accepted(machines: &mut Machines, name: &str, configuration: &MachineConfiguration) -> Machine {
    let directory = machines.directory(name);
    let configuration = MachineConfiguration { starts_paused: true, ..configuration.clone() };
    Machine::start(&machines.qemu, &configuration, &directory, &[], patient()).await.expect("QEMU takes it")
}

/// Spec: A7
#[tokio::test]
async fn v1_everything_at_once_is_accepted() {
    let mut machines = Machines::new();
    let mut configuration = machines.configuration();
    configuration.name = "a name, with = and \"quotes\"".to_owned();
    configuration.uuid = Some("12345678-1234-1234-1234-123456789abc".to_owned());
    configuration.processors = 2;
    configuration.balloon = Some(Balloon { free_page_reporting: true });
    configuration.generation = Some(Generation::Fixed("324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87".to_owned()));
    configuration.hot_plug_ports = 3;
    configuration.on_panic = OnPanic::End;
    configuration.more_monitors.push(machines.path("second, monitor.sock"));
    let machine = accepted(&mut machines, "m, with = comma", &configuration).await;
    let monitor = machine.monitor();
    assert_eq!(monitor.name().await.unwrap(), configuration.name);
    assert_eq!(monitor.processors().await.unwrap().len(), 2);
    assert_eq!(monitor.balloon_bytes().await.unwrap(), configuration.memory.size_bytes);
    let generation = monitor.execute("query-vm-generation-id", json!({})).await.unwrap();
    assert_eq!(generation["guid"], "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87");
    let sockets = monitor.character_devices().await.unwrap();
    let labels: Vec<&str> = sockets.iter().map(|device| device.label.as_str()).collect();
    assert!(labels.contains(&"agent") && labels.contains(&"console") && labels.contains(&"monitor1"), "{labels:?}");
    // A device is plugged in and its chassis taken.
    monitor.add_device(json!({ "driver": "virtio-rng-pci", "id": "later", "bus": "port0" })).await.unwrap();
    let tree = monitor.human("info qtree").await.unwrap();
    assert!(tree.contains("dev: virtio-rng-pci, id \"later\""), "{tree}");
    assert!(tree.contains("dev: pvpanic-pci"), "{tree}");
}

/// Spec: A7
#[tokio::test]
async fn v1_every_kind_of_memory_is_accepted() {
    let mut machines = Machines::new();
    let file = machines.path("memory, with comma");
    std::fs::File::create(&file).unwrap().set_len(65 << 20).unwrap();
    let on_file =
        |shared, read_only, offset_bytes| MemoryBackend::File { path: file.clone(), shared, read_only, offset_bytes };
    let kinds = [
        MemoryBackend::Anonymous { shared: true, huge_page_bytes: None },
        MemoryBackend::Anonymous { shared: false, huge_page_bytes: None },
        on_file(true, false, 0),
        on_file(false, false, 1 << 20),
        on_file(false, true, 0),
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let mut configuration = machines.configuration();
        let shared =
            matches!(kind, MemoryBackend::Anonymous { shared: true, .. } | MemoryBackend::File { shared: true, .. });
        configuration.memory.backend = kind.clone();
        configuration.memory.preallocated = number == 0;
        let machine = accepted(&mut machines, &format!("m{number}"), &configuration).await;
        let back_ends = machine.monitor().execute("query-memdev", json!({})).await.unwrap();
        assert_eq!(back_ends[0]["size"], configuration.memory.size_bytes, "{kind:?}");
        assert_eq!(back_ends[0]["share"], shared, "{kind:?}");
        let blocks = machine.monitor().human("info ramblock").await.unwrap();
        assert!(blocks.lines().any(|line| line.trim_start().starts_with("pc.ram ")), "{kind:?}: {blocks}");
        machine.quit().await.unwrap();
    }
}

/// Spec: A7
#[tokio::test]
async fn v1_every_kind_of_network_is_accepted() {
    let mut machines = Machines::new();
    let peer = machines.path("peer, with comma.sock");
    let _listener = UnixListener::bind(&peer).unwrap();
    let user = NetworkEnd::User {
        forwards: vec![
            Forward { protocol: Protocol::Udp, ..Forward::tcp(free_port(), 53) },
            Forward::tcp(free_port(), 5432),
        ],
        restricted: true,
    };
    let ends = [
        user,
        NetworkEnd::Stream { path: machines.path("listens, here.sock"), role: SocketRole::Listens },
        NetworkEnd::Stream { path: peer.clone(), role: SocketRole::Connects { reconnect_ms: Some(500) } },
        NetworkEnd::Unplugged,
    ];
    let mut configuration = machines.configuration();
    let cards = ends.into_iter().enumerate().map(|(number, end)| Network::new(format!("net{number}"), end));
    configuration.networks = cards.collect();
    configuration.networks[0].hardware_address = Some("52:54:00:aa:bb:cc".to_owned());
    let machine = accepted(&mut machines, "m", &configuration).await;
    let known = machine.monitor().human("info network").await.unwrap();
    assert!(known.contains("macaddr=52:54:00:aa:bb:cc"), "{known}");
    for number in 0..3 {
        assert!(known.contains(&format!("net{number}-end")), "{number}: {known}");
    }
    let forwards = machine.monitor().human("info usernet").await.unwrap();
    assert!(forwards.contains("UDP[HOST_FORWARD]") && forwards.contains("TCP[HOST_FORWARD]"), "{forwards}");
    machine.monitor().set_link("net0", false).await.unwrap();
    let error = machine.monitor().set_link("net7", false).await.unwrap_err().to_string();
    assert!(error.contains("net7"), "{error}");
}

/// Spec: A7
#[tokio::test]
async fn v1_every_kind_of_file_is_accepted() {
    let mut machines = Machines::new();
    let qcow2 = machines.path("disk, with comma.qcow2");
    let mut make = std::process::Command::new("qemu-img");
    make.args(["create", "-q", "-f", "qcow2"]).arg(&qcow2).arg("8M");
    assert!(make.status().unwrap().success());
    let file = |path, format, read_only, direct, asynchronous_io| DiskBackend::File {
        path,
        format,
        read_only,
        direct,
        asynchronous_io,
    };
    let raw = machines.path("raw, with comma.img");
    std::fs::File::create(&raw).unwrap().set_len(1 << 20).unwrap();
    let mut configuration = machines.configuration();
    configuration.disks.push(Disk::new("qcow", file(qcow2, FileFormat::Qcow2, false, false, AsynchronousIo::Threads)));
    configuration.disks.push(Disk {
        queues: Some(2),
        queue_size: Some(64),
        own_thread: true,
        ..Disk::new("raw", file(raw, FileFormat::Raw, true, false, AsynchronousIo::Threads))
    });
    let machine = accepted(&mut machines, "m", &configuration).await;
    let devices = machine.monitor().block_devices().await.unwrap();
    let inserted = |id: &str| {
        let device = devices.iter().find(|device| device.qdev.as_deref().is_some_and(|path| path.contains(id)));
        device.and_then(|device| device.inserted.clone()).expect("a disk with something in it")
    };
    assert_eq!(inserted("/qcow/")["drv"], "qcow2");
    assert_eq!(inserted("/raw/")["ro"], true);
    assert_eq!(inserted("/empty/")["ro"], false);
}

/// Spec: A7
#[tokio::test]
async fn v1_a_vhost_user_back_end_that_is_not_there_is_named() {
    let mut machines = Machines::new();
    let socket = machines.path("disk, with comma.sock");
    let mut configuration = machines.configuration();
    configuration.disks.push(Disk::new("shared", DiskBackend::VhostUser { socket, reconnect_ms: None }));
    let directory = machines.directory("m");
    let error = machines.start(&configuration, &directory).await.unwrap_err().to_string();
    assert!(error.contains("/disk, with comma.sock"), "{error}");
    assert_eq!(Machine::running_process(&directory).unwrap(), None);
}

/// Where the machine has no such device, there is nothing to hand over, and the error names it.
///
/// Spec: A7
#[tokio::test]
async fn v1_kvm_is_opened_for_an_account_that_could_not() {
    let has_kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    let mut machines = Machines::new();
    let configuration = MachineConfiguration {
        accelerator: Accelerator::Kvm,
        processor_model: "qemu64".to_owned(),
        ..machines.configuration()
    };
    let configuration = crate::bounds::confined(configuration);
    if has_kvm {
        let machine = accepted(&mut machines, "m", &configuration).await;
        assert!(machine.monitor().uses_kvm().await.unwrap());
    } else {
        let directory = machines.directory("m");
        let error = machines.start(&configuration, &directory).await.unwrap_err();
        assert!(error.to_string().contains("/dev/kvm"), "{error}");
    }
}
