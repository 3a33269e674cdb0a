//! The image boots into a guest that is well, does what its host asks, and ends in order.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use onecopy_guest_agent::protocol::{
    Answer, Command as AgentCommand, FailureKind, Identity, LINE_BYTES_MAX, Outcome, Reply,
};
use onecopy_hypervisor::MachineConfiguration;
use onecopy_hypervisor::configuration::{Network, NetworkEnd};
use onecopy_tests::guest::{IMAGE, Image, TestGuest, file_disk};

const GIBIBYTE: u64 = 1 << 30;
/// What a guest may take for anything; an emulated processor is slow, and may have to share.
const TIMEOUT: Duration = Duration::from_secs(240);

/// What `dumpe2fs` says of a file system in a file.
fn file_system(path: &Path) -> String {
    let output = Command::new("/sbin/dumpe2fs").arg("-h").arg(path).output().expect("e2fsprogs are installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Nothing was left to be repaired or replayed.
fn assert_clean(path: &Path) {
    let described = file_system(path);
    assert!(described.contains("Filesystem state:         clean"), "{described}");
    assert!(!described.contains("needs_recovery"), "{described}");
    let checked = Command::new("/sbin/e2fsck").args(["-f", "-n"]).arg(path).output().expect("e2fsprogs are installed");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

/// An empty second disk, `data.img` in the guest's directory.
fn add_data_disk(configuration: &mut MachineConfiguration, directory: &Path) -> anyhow::Result<()> {
    let path = directory.join("data.img");
    std::fs::File::create(&path)?.set_len(GIBIBYTE / 8)?;
    configuration.disks.push(file_disk("data", path));
    Ok(())
}

/// A guest comes up without a complaint, on both boards, with the kernel and packages that its manifest names.
///
/// Spec: A7
#[tokio::test]
async fn v11_a_guest_is_well_and_has_what_its_image_says() {
    let guest = TestGuest::boot_with(|configuration, _| {
        configuration.networks.push(Network::new("net0", NetworkEnd::User { forwards: Vec::new(), restricted: true }));
        Ok(())
    })
    .await
    .unwrap();
    let health = guest.agent().health().await.unwrap();
    assert_eq!(health.complaints, Vec::<String>::new());
    assert_eq!(health.postgres.major, Some(17));
    let manifest: toml::Table =
        std::fs::read_to_string(Image::find(IMAGE).unwrap().manifest()).unwrap().parse().unwrap();
    assert_eq!(guest.agent().greeting().kernel, manifest["kernel"].as_str().unwrap());
    for (package, version) in
        manifest["packages"].as_table().unwrap().iter().filter(|(name, _)| name.starts_with("postgres"))
    {
        let installed = guest.run(&format!("dpkg-query -W -f '${{Version}}' {package}")).await.unwrap();
        assert_eq!(Some(installed.as_str()), version.as_str());
    }
    for (place, kind) in [("/", "ext4"), ("/dev/shm", "tmpfs"), ("/run", "tmpfs"), ("/sys/fs/cgroup", "cgroup2")] {
        let mounted = guest.run(&format!("findmnt --noheadings --output FSTYPE,OPTIONS {place}")).await.unwrap();
        assert!(mounted.starts_with(kind) && mounted.contains("rw"), "{place}: {mounted}");
    }
    assert_eq!(
        guest.run("blkid -o value -s TYPE /dev/vda").await.unwrap(),
        "ext4",
        "the whole disk is the file system"
    );
    assert!(guest.run("ip -brief address show eth0").await.unwrap().contains("10.0.2.15/24"));
    assert_eq!(guest.run("ls /dev/virtio-ports").await.unwrap(), onecopy_guest_agent::protocol::PORT);
    for extension in ["amcheck", "pg_prewarm", "pg_buffercache", "pageinspect"] {
        guest.run(&format!("test -e /usr/share/postgresql/17/extension/{extension}.control")).await.unwrap();
    }
}

/// Spec: A7
#[tokio::test]
async fn v12_the_root_file_system_grows_to_its_disk() {
    let guest = TestGuest::boot_with(|_, directory| {
        let root = std::fs::OpenOptions::new().write(true).open(directory.join("root.img"))?;
        Ok(root.set_len(6 * GIBIBYTE)?)
    })
    .await
    .unwrap();
    let health = guest.agent().health().await.unwrap();
    assert!(health.root_total_bytes > 6 * GIBIBYTE * 9 / 10, "{health:?}");
    assert_eq!(health.complaints, Vec::<String>::new());
    let (_, directory) = guest.power_down().await.unwrap();
    assert_clean(&directory.path().join("root.img"));
}

/// The power button ends a guest in order, whatever runs: its file systems, mounted ones included, need neither repair
/// nor replay.
///
/// Spec: A7
#[tokio::test]
async fn v13_the_power_button_ends_a_guest_in_order_whatever_runs() {
    let guest = TestGuest::restored_with(add_data_disk).await.unwrap();
    guest.run("mkfs.ext4 -q /dev/vdb && mount /dev/vdb /mnt").await.unwrap();
    // One that ends when it is asked to, one that does not, and both write.
    guest.run("(while echo x >>/mnt/one; do sleep 0.05; done) >/dev/null 2>&1 &").await.unwrap();
    guest.run("(trap '' TERM; while echo x >>/mnt/two; do sleep 0.05; done) >/dev/null 2>&1 &").await.unwrap();
    let (ending, directory) = guest.power_down().await.unwrap();
    assert!(ending.is_orderly(), "{ending:?}");
    assert_clean(&directory.path().join("root.img"));
    assert_clean(&directory.path().join("data.img"));
}

/// A copy of a guest gets a name, a machine id, a hardware and a network address, and the host's time.
///
/// Spec: A7
#[tokio::test]
async fn v14_a_copy_of_a_guest_gets_an_identity_and_the_time() {
    let guest = TestGuest::restored_with(|configuration, _| {
        configuration.networks.push(Network::new("net0", NetworkEnd::User { forwards: Vec::new(), restricted: true }));
        Ok(())
    })
    .await
    .unwrap();
    let identity = Identity {
        hostname: Some("replica-2".to_owned()),
        machine_id: Some("0123456789abcdef0123456789abcdef".to_owned()),
        mac: Some("52:54:00:aa:bb:cc".to_owned()),
        address: Some("10.0.2.77/24".to_owned()),
        gateway: Some("10.0.2.2".to_owned()),
    };
    guest.agent().set_identity(identity).await.unwrap();
    assert_eq!(
        guest.run("hostname; cat /etc/machine-id").await.unwrap(),
        "replica-2\n0123456789abcdef0123456789abcdef"
    );
    let card = guest.run("ip address show eth0; ip route").await.unwrap();
    assert!(
        card.contains("10.0.2.77/24") && card.contains("52:54:00:aa:bb:cc") && card.contains("default via 10.0.2.2"),
        "{card}"
    );
    assert!(!card.contains("10.0.2.15"), "{card}");

    guest.run("date -s '2001-02-03 04:05:06'").await.unwrap();
    guest.agent().set_clock().await.unwrap();
    let there = guest.agent().health().await.unwrap().unix_ns;
    let here = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    assert!(here.abs_diff(there) < 60_000_000_000, "{there} in the guest, {here} on the host");

    // As in `/: 1.4 GiB (1526272000 bytes) trimmed`.
    let said = guest.run("fstrim --verbose /").await.unwrap();
    let trimmed = said.split_once('(').and_then(|(_, rest)| rest.split_once(" bytes")?.0.parse::<u64>().ok());
    assert!(trimmed.is_some_and(|bytes| bytes > GIBIBYTE), "{said}: of a root file system of 2 GiB");
}

/// The agent answers garbage with errors, is bounded in memory and in commands, and serves the next host whatever the
/// one before did.
///
/// Spec: C5
#[tokio::test]
async fn v15_an_agent_survives_whatever_comes_from_its_host() {
    let mut guest = TestGuest::restored().await.unwrap();
    let boot = guest.agent().greeting().boot_id;
    let socket = guest.machine().directory().agent();
    guest.hang_up();
    // The connection is closed by the runtime, which has to have a moment for that.
    tokio::time::sleep(Duration::from_millis(200)).await;
    // The port serves one connection at a time: each of these is another host that goes away in another way.
    let hostile: [&[u8]; 6] = [
        b"garbage\n",
        b"{\"id\":1,\"command\":{\"execute\":{\"argv\":[\"sleep\",\"3\"],\"timeout_ms\":9000}}}\n",
        b"{\"id\":2,\"command\":{\"hea",
        b"\x00\xff\xfe\n\n\n{}\n[]\nnull\n{\"id\":-1,\"command\":{\"health\":{}}}\n",
        &[b'['; 300_000],
        &[b'x'; LINE_BYTES_MAX + 4096],
    ];
    for bytes in hostile {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(bytes).unwrap();
        std::thread::sleep(Duration::from_millis(200));
    }
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let commands = b"\n{\"id\":77,\"command\":{\"power_on\":{}}}\n\
        {\"id\":78,\"command\":{\"write_file\":{\"path\":\"../x\",\"mode\":384,\"content\":\"\"}}}\n";
    stream.write_all(commands).unwrap();
    let mut refused = HashSet::new();
    for line in BufReader::new(&stream).lines() {
        let Ok(reply) = serde_json::from_str::<Reply>(&line.unwrap()) else { continue };
        if let Reply { id: Some(id @ (77 | 78)), outcome: Outcome::Error(failure) } = reply {
            assert_eq!(failure.kind, FailureKind::Malformed, "{failure}");
            refused.insert(id);
        }
        if refused.len() == 2 {
            break;
        }
    }
    assert_eq!(refused.len(), 2, "the agent has hung up");
    drop(stream);

    let agent = guest.machine().agent().await.unwrap();
    assert_eq!(agent.greeting().boot_id, boot);
    let answer = agent.request(AgentCommand::Health {}, TIMEOUT).await.unwrap();
    let Answer::Health(health) = answer else { panic!("{answer:?}") };
    assert_eq!(health.complaints, Vec::<String>::new(), "the agent was started again");
}

/// The verifying workload finds a lost, old, misplaced or damaged sector, also after a power cut.
///
/// Spec: A7
#[tokio::test]
async fn v19_the_workload_finds_what_a_disk_has_lost() {
    let guest = TestGuest::restored_with(add_data_disk).await.unwrap();
    // More seconds where more has to be done at once.
    for seconds in [5, 20, 60, 180] {
        let work = format!("--device /dev/vdb --seconds {seconds} --span 16777216 --log /root/log");
        let report = guest.exercise(&work).await.unwrap();
        assert_eq!(report["errors"], 0, "{report}");
        if report["writes"].as_u64() > Some(100) && report["flushes"].as_u64() > Some(10) {
            break;
        }
        assert!(seconds < 180, "{report}");
    }
    let report = guest.exercise("--device /dev/vdb --verify --log /root/log").await.unwrap();
    assert_eq!(report["errors"], 0, "{report}");

    // A disk that forgets one write: one sector reads as zeros, below the guest.
    let path = guest.path().join("data.img");
    let bytes = std::fs::read(&path).unwrap();
    let sector = bytes.chunks(512).position(|sector| sector.starts_with(b"onecopy!")).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 512], sector as u64 * 512).unwrap();
    let report = guest.exercise("--device /dev/vdb --verify --log /root/log").await.unwrap();
    assert!(report["errors"].as_u64() >= Some(1), "{report}");
}
