//! Arguments by tables. That QEMU takes them is seen in `tests/qemu/accepted.rs`.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use super::*;
use crate::configuration::{
    Account, AsynchronousIo, Balloon, Disk, DiskBackend, FileFormat, Forward, NbdServer, Network, NetworkEnd, Protocol,
    SocketRole,
};

const HOST: HostTraits = HostTraits { version: QemuVersion { major: 10, minor: 0 }, kvm: false };
const OLD: HostTraits = HostTraits { version: QemuVersion { major: 7, minor: 2 }, kvm: false };

fn machine() -> MachineConfiguration {
    let arguments = format!("{} root=/dev/vda", crate::configuration::KERNEL_ARGUMENTS);
    let boot = Boot::Kernel { kernel: "/g/vmlinuz".into(), initrd: Some("/g/initrd".into()), arguments };
    MachineConfiguration::new("m", 512 << 20, boot)
}

fn arguments(configuration: &MachineConfiguration, host: HostTraits) -> Result<Vec<String>, String> {
    let directory = MachineDirectory::new("/run/m").unwrap();
    let line = CommandLine::new(configuration, &directory, host).map_err(|error| error.to_string())?;
    Ok(line.arguments().iter().map(|argument| argument.to_string_lossy().into_owned()).collect())
}

/// All values of one flag.
fn values(configuration: &MachineConfiguration, host: HostTraits, flag: &str) -> Vec<String> {
    let all = arguments(configuration, host).unwrap();
    all.windows(2).filter(|pair| pair[0] == flag).map(|pair| pair[1].clone()).collect()
}

/// What a machine's configuration says becomes QEMU's arguments, names with commas and spaces included; QEMU takes
/// every kind of it; what contradicts itself is refused before QEMU starts.
///
/// Spec: A7
#[test]
fn v1_a_whole_command_line() {
    let mut configuration = machine();
    let socket = DiskBackend::VhostUser { socket: "/run/m/vhost.sock".into(), reconnect_ms: Some(200) };
    configuration.disks.push(Disk::new("root", socket));
    let user = NetworkEnd::User { forwards: vec![Forward::tcp(15432, 5432)], restricted: false };
    configuration.networks.push(Network::new("net0", user));
    let expected = "\
        -no-user-config -nodefaults -display none -vga none -name guest=m \
        -accel tcg,tb-size=256 \
        -machine q35,vmport=off,mem-merge=off,dump-guest-core=off,memory-backend=pc.ram -cpu max -smp 1 -m size=512M \
        -object memory-backend-memfd,share=on,id=pc.ram,size=536870912,prealloc=off,\
        x-use-canonical-path-for-ramblock-id=off \
        -kernel /g/vmlinuz -initrd /g/initrd -append console=ttyS0_no_timer_check_root=/dev/vda \
        -chardev socket,id=monitor0,path=/run/m/qmp.sock,server=on,wait=off -mon chardev=monitor0,mode=control \
        -chardev socket,id=console,path=/run/m/console.sock,server=on,wait=off,logfile=/run/m/console.log,logappend=on \
        -serial chardev:console \
        -chardev socket,id=agent,path=/run/m/agent.sock,server=on,wait=off \
        -device virtio-serial-pci,id=serial,max_ports=2 \
        -device virtserialport,id=agent-port,bus=serial.0,nr=1,chardev=agent,name=org.onecopy.agent.0 \
        -object rng-random,id=random,filename=/dev/urandom -device virtio-rng-pci,id=random-device,rng=random \
        -device pvpanic-pci,id=panic \
        -chardev socket,id=root-socket,path=/run/m/vhost.sock,reconnect-ms=200 \
        -device vhost-user-blk-pci,id=root,chardev=root-socket,num-queues=1 \
        -netdev user,id=net0-end,ipv6=off,restrict=off,hostfwd=tcp:127.0.0.1:15432-:5432 \
        -device virtio-net-pci,id=net0,romfile=,netdev=net0-end \
        -action panic=pause,reboot=reset,shutdown=poweroff \
        -sandbox on,elevateprivileges=deny,spawn=deny,resourcecontrol=deny,obsolete=deny -S -pidfile /run/m/qemu.pid";
    let found: Vec<String> =
        arguments(&configuration, HOST).unwrap().iter().map(|argument| argument.replace(' ', "_")).collect();
    assert_eq!(found, expected.split_whitespace().collect::<Vec<&str>>());
}

/// Spec: A7
#[test]
fn v1_accelerators() {
    let kvm = HostTraits { kvm: true, ..HOST };
    let given = "kvm,device=/dev/fdset/900";
    let tcg = "tcg,tb-size=256";
    let table = [
        (Accelerator::Detected, HOST, vec![tcg]),
        (Accelerator::Detected, kvm, vec![given, tcg]),
        (Accelerator::Detected, HostTraits { kvm: true, ..OLD }, vec!["kvm", tcg]),
        (Accelerator::Kvm, HOST, vec![given]),
        (Accelerator::Tcg, kvm, vec![tcg]),
    ];
    for (accelerator, host, expected) in table {
        let configuration = MachineConfiguration { accelerator, ..machine() };
        assert_eq!(values(&configuration, host, "-accel"), expected, "{accelerator:?} {host:?}");
        let passed = values(&configuration, host, "-add-fd");
        assert_eq!(passed.is_empty(), !expected.contains(&given), "{passed:?}");
    }
    let newer = HostTraits { version: QemuVersion { major: 10, minor: 1 }, ..HOST };
    let single = "tcg,tb-size=256,thread=single";
    for (processors, host, expected) in [(1, HOST, tcg), (2, HOST, single), (2, OLD, single), (2, newer, tcg)] {
        let configuration = MachineConfiguration { processors, ..machine() };
        assert_eq!(values(&configuration, host, "-accel"), [expected], "{processors} {host:?}");
    }
}

/// Spec: A7
#[test]
fn v1_boards() {
    let board = |version: Option<&str>| {
        let board_version = version.map(str::to_owned);
        values(&MachineConfiguration { board_version, ..machine() }, HOST, "-machine").remove(0)
    };
    let rest = "vmport=off,mem-merge=off,dump-guest-core=off,memory-backend=pc.ram";
    assert_eq!(board(None), format!("q35,{rest}"));
    assert_eq!(board(Some("7.2")), format!("pc-q35-7.2,{rest}"));
}

/// Spec: A7
#[test]
fn v1_memory_back_ends() {
    let object = |backend, preallocated| {
        let mut configuration = machine();
        configuration.memory.backend = backend;
        configuration.memory.preallocated = preallocated;
        values(&configuration, HOST, "-object").remove(0)
    };
    let tail = |preallocated| {
        format!("id=pc.ram,size=536870912,prealloc={preallocated},x-use-canonical-path-for-ramblock-id=off")
    };
    let mut mergeable = machine();
    mergeable.memory.mergeable = true;
    let told = values(&mergeable, HOST, "-object").remove(0);
    assert!(told.contains("prealloc=off,merge=on,"), "{told}");
    let file = |shared, read_only, offset_bytes| MemoryBackend::File {
        path: "/m/ram, one".into(),
        shared,
        read_only,
        offset_bytes,
    };
    let table = [
        (MemoryBackend::Anonymous { shared: false, huge_page_bytes: None }, "memory-backend-memfd,share=off"),
        (
            MemoryBackend::Anonymous { shared: true, huge_page_bytes: Some(2 << 20) },
            "memory-backend-memfd,share=on,hugetlb=on,hugetlbsize=2048k",
        ),
        (file(true, false, 0), "memory-backend-file,mem-path=/m/ram,, one,share=on,readonly=off"),
        (file(false, true, 0), "memory-backend-file,mem-path=/m/ram,, one,share=off,readonly=on,rom=off"),
        (file(false, false, 4096), "memory-backend-file,mem-path=/m/ram,, one,share=off,readonly=off,offset=4096"),
    ];
    for (backend, expected) in table {
        assert_eq!(object(backend.clone(), false), format!("{expected},{}", tail("off")));
        assert_eq!(object(backend, true), format!("{expected},{}", tail("on")));
    }
}

/// Spec: A7
#[test]
fn v1_disks() {
    let with = |backend: DiskBackend, host| {
        let mut configuration = MachineConfiguration { processors: 4, ..machine() };
        configuration.disks.push(Disk { queue_size: Some(256), ..Disk::new("d", backend) });
        let flags = ["-chardev", "-blockdev", "-device"];
        let all = flags.iter().flat_map(|flag| values(&configuration, host, flag)).collect::<Vec<String>>();
        all.into_iter().filter(|value| value.contains("d-") || value.contains("id=d,")).collect::<Vec<String>>()
    };
    let file = |format, read_only, direct, asynchronous_io| DiskBackend::File {
        path: "/d,1".into(),
        format,
        read_only,
        direct,
        asynchronous_io,
    };
    let nbd = |server| DiskBackend::Nbd { server, export: "e,1".into(), reconnect_delay_s: 60 };
    let vhost = |reconnect_ms| DiskBackend::VhostUser { socket: "/s,1".into(), reconnect_ms };
    let blocks = "virtio-blk-pci,id=d,drive=d-blocks,serial=d,num-queues=4,queue-size=256";
    let shared = "vhost-user-blk-pci,id=d,chardev=d-socket,num-queues=4,queue-size=256";
    let node = "node-name=d-blocks,discard=unmap";
    let table = [
        (vhost(Some(200)), HOST, vec!["socket,id=d-socket,path=/s,,1,reconnect-ms=200".to_owned(), shared.to_owned()]),
        (vhost(Some(200)), OLD, vec!["socket,id=d-socket,path=/s,,1,reconnect=1".to_owned(), shared.to_owned()]),
        (vhost(None), HOST, vec!["socket,id=d-socket,path=/s,,1".to_owned(), shared.to_owned()]),
        (
            nbd(NbdServer::Unix("/n,1".into())),
            HOST,
            vec![
                format!("{node},driver=nbd,export=e,,1,reconnect-delay=60,server.type=unix,server.path=/n,,1"),
                blocks.to_owned(),
            ],
        ),
        (
            nbd(NbdServer::Tcp { host: "h".into(), port: 10809 }),
            HOST,
            vec![
                format!(
                    "{node},driver=nbd,export=e,,1,reconnect-delay=60,server.type=inet,server.host=h,server.port=10809"
                ),
                blocks.to_owned(),
            ],
        ),
        (
            file(FileFormat::Raw, true, true, AsynchronousIo::IoUring),
            HOST,
            vec![
                format!(
                    "{node},driver=raw,read-only=on,file.driver=file,file.filename=/d,,1,file.aio=io_uring,\
                     file.discard=unmap,cache.direct=on,file.cache.direct=on"
                ),
                blocks.to_owned(),
            ],
        ),
        (
            file(FileFormat::Qcow2, false, false, AsynchronousIo::Threads),
            HOST,
            vec![
                format!(
                    "{node},driver=qcow2,read-only=off,file.driver=file,file.filename=/d,,1,file.aio=threads,\
                     file.discard=unmap,cache.direct=off,file.cache.direct=off"
                ),
                blocks.to_owned(),
            ],
        ),
    ];
    for (backend, host, expected) in table {
        assert_eq!(with(backend.clone(), host), expected, "{backend:?}");
    }
}

/// Spec: A7
#[test]
fn v1_a_disk_may_have_a_thread_of_its_own() {
    let backend =
        DiskBackend::Nbd { server: NbdServer::Unix("/n".into()), export: String::new(), reconnect_delay_s: 0 };
    let mut configuration = machine();
    configuration.disks.push(Disk { own_thread: true, ..Disk::new("d", backend) });
    assert!(values(&configuration, HOST, "-object").contains(&"iothread,id=d-thread".to_owned()));
    let device = "virtio-blk-pci,id=d,drive=d-blocks,serial=d,iothread=d-thread,num-queues=1";
    assert!(values(&configuration, HOST, "-device").contains(&device.to_owned()));
}

/// Spec: A7
#[test]
fn v1_networks() {
    let with = |end: NetworkEnd, host| {
        let mut configuration = machine();
        configuration.networks.push(Network::new("n", end));
        values(&configuration, host, "-netdev").join(" ")
    };
    let forward =
        Forward { protocol: Protocol::Udp, host_address: Ipv4Addr::new(10, 0, 0, 1), host_port: 53, guest_port: 5353 };
    let path = || PathBuf::from("/s,1");
    let connects = |reconnect_ms| NetworkEnd::Stream { path: path(), role: SocketRole::Connects { reconnect_ms } };
    let table = [
        (
            NetworkEnd::User { forwards: vec![forward, Forward::tcp(1, 2)], restricted: true },
            HOST,
            "user,id=n-end,ipv6=off,restrict=on,hostfwd=udp:10.0.0.1:53-:5353,hostfwd=tcp:127.0.0.1:1-:2",
        ),
        (
            NetworkEnd::Stream { path: path(), role: SocketRole::Listens },
            HOST,
            "stream,id=n-end,server=on,addr.type=unix,addr.path=/s,,1",
        ),
        (connects(Some(500)), HOST, "stream,id=n-end,server=off,addr.type=unix,addr.path=/s,,1,reconnect-ms=500"),
        (connects(None), OLD, "stream,id=n-end,server=off,addr.type=unix,addr.path=/s,,1"),
        (NetworkEnd::Unplugged, HOST, ""),
    ];
    for (end, host, expected) in table {
        assert_eq!(with(end.clone(), host), expected, "{end:?}");
    }
}

/// Spec: A7
#[test]
fn v1_devices_that_are_asked_for() {
    let mut configuration = machine();
    (configuration.agent, configuration.random_numbers, configuration.panic_notice) = (false, false, false);
    assert_eq!(values(&configuration, HOST, "-device"), Vec::<String>::new());
    configuration.balloon = Some(Balloon { free_page_reporting: true });
    configuration.generation = Some(Generation::New);
    configuration.hot_plug_ports = 2;
    let expected = [
        "virtio-balloon-pci,id=balloon,deflate-on-oom=on,free-page-reporting=on",
        "vmgenid,id=generation,guid=auto",
        "pcie-root-port,id=port0,chassis=1,slot=0",
        "pcie-root-port,id=port1,chassis=2,slot=1",
    ];
    assert_eq!(values(&configuration, HOST, "-device"), expected);
}

/// Spec: A7
#[test]
fn v1_where_a_machine_begins() {
    let with = |incoming, starts_paused| {
        let configuration = MachineConfiguration { incoming, starts_paused, ..machine() };
        let configuration = MachineConfiguration {
            security: crate::configuration::Security { sandboxed: false, ..configuration.security.clone() },
            ..configuration
        };
        let all = arguments(&configuration, HOST).unwrap();
        (values(&configuration, HOST, "-incoming").join(" "), all.iter().any(|argument| argument == "-S"))
    };
    // What boots is always let go by the monitor.
    assert_eq!(with(None, false), (String::new(), true));
    let table = [
        (Incoming::Deferred, "defer"),
        (Incoming::Unix("/i,1".into()), "unix:/i,1"),
        (Incoming::Descriptor(510), "fd:510"),
        (Incoming::Command("cat /f".into()), "exec:cat /f"),
    ];
    for (incoming, expected) in table {
        assert_eq!(with(Some(incoming.clone()), false), (expected.to_owned(), false));
        assert_eq!(with(Some(incoming), true), (expected.to_owned(), true));
    }
}

/// Spec: A7
#[test]
fn v1_what_contradicts_itself_is_refused() {
    let refused = |change: &dyn Fn(&mut MachineConfiguration), host| {
        let mut configuration = machine();
        change(&mut configuration);
        arguments(&configuration, host).expect_err("refused")
    };
    let long = PathBuf::from(format!("/{}", "x".repeat(200)));
    let vhost = |socket: PathBuf| Disk::new("d", DiskBackend::VhostUser { socket, reconnect_ms: None });
    let unplugged = |id: &str| Network::new(id, NetworkEnd::Unplugged);
    type Change<'a> = &'a dyn Fn(&mut MachineConfiguration);
    let table: [(Change<'_>, &str); 18] = [
        (&|m| m.name.clear(), "no name"),
        (&|m| m.name = "a\0b".into(), "zero character"),
        (&|m| m.processors = 0, "0 processors"),
        (&|m| m.processors = 256, "256 processors"),
        (&|m| m.memory.size_bytes = 0, "0 bytes of memory"),
        (&|m| m.memory.size_bytes += 4096, "multiple of 1 MiB"),
        (
            &|m| {
                m.memory.size_bytes = 3 << 20;
                m.memory.backend = MemoryBackend::Anonymous { shared: true, huge_page_bytes: Some(2 << 20) };
            },
            "huge pages of 2097152",
        ),
        (
            &|m| {
                m.memory.backend =
                    MemoryBackend::File { path: "/f".into(), shared: true, read_only: true, offset_bytes: 0 };
            },
            "read only",
        ),
        (
            &|m| {
                m.memory.backend = MemoryBackend::Anonymous { shared: false, huge_page_bytes: None };
                m.disks.push(vhost("/s".into()));
            },
            "needs shared memory",
        ),
        (&|m| m.disks.push(vhost(long.clone())), "possible are 107"),
        (&|m| m.more_monitors.push(long.clone()), "possible are 107"),
        (&|m| m.incoming = Some(Incoming::Unix(long.clone())), "possible are 107"),
        (&|m| m.networks = vec![unplugged("n"), unplugged("n")], "two devices are called \"n\""),
        (&|m| m.networks = vec![unplugged("port1")], "two devices"),
        (&|m| m.networks = vec![unplugged("a,b")], "no name of a device"),
        (&|m| m.board_version = Some("7,2".into()), "no version of the board"),
        (&|m| m.boot = Boot::FirstDisk, "no disk to boot from"),
        (&|m| m.incoming = Some(Incoming::Command("cat".into())), "runs no command"),
    ];
    for (change, reason) in table {
        let error = refused(change, HOST);
        assert!(error.contains(reason), "{error} does not say {reason:?}");
    }
    let reconnects = |m: &mut MachineConfiguration| {
        let role = SocketRole::Connects { reconnect_ms: Some(1) };
        m.networks.push(Network::new("n", NetworkEnd::Stream { path: "/s".into(), role }));
    };
    assert!(refused(&reconnects, OLD).contains("7.2 does not reconnect"));
    let locks = |m: &mut MachineConfiguration| m.security.memory_lock = MemoryLock::OnFault;
    assert!(refused(&locks, OLD).contains("7.2 does not lock memory as it is used"));
}

/// Spec: A7
#[test]
fn v1_a_directory_with_a_long_name_is_refused() {
    let error = MachineDirectory::new(format!("/{}", "x".repeat(100))).unwrap_err().to_string();
    assert!(error.contains("possible are 107") && error.contains("shorter directory"), "{error}");
}

/// Spec: A7
#[test]
fn v1_a_configuration_is_kept_in_a_file() {
    let mut configuration = machine();
    configuration.disks.push(Disk::new("d", DiskBackend::VhostUser { socket: "/s".into(), reconnect_ms: Some(1) }));
    configuration
        .networks
        .push(Network::new("n", NetworkEnd::User { forwards: vec![Forward::tcp(1, 2)], restricted: false }));
    configuration.generation = Some(Generation::New);
    configuration.security.account = Some(Account { user_id: 1, group_id: 2 });
    let text = serde_json::to_string(&configuration).unwrap();
    assert_eq!(serde_json::from_str::<MachineConfiguration>(&text).unwrap(), configuration);
}
