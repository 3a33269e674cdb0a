//! A machine moves between two QEMUs, and its disk between two servers of one directory, under work that knows what the
//! disk must hold.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use onecopy_hypervisor::configuration::{Boot, Incoming};
use onecopy_hypervisor::monitor::{MigrationStatus, MigrationTarget};
use onecopy_hypervisor::{Agent, Machine, MachineConfiguration, MachineDirectory, Qemu, State};
use onecopy_testing::look_until;
use onecopy_tests::guest::{TestGuest, long_time_limits};
use serde_json::{Value, json};

use crate::served::{Server, create};

/// The disk of the files, and the one that is worked on.
const SIZES_BYTES: [(&str, u64); 2] = [("files", 192 << 20), ("work", 96 << 20)];
/// What a step may take, on a machine that has more to do.
const TIMEOUT: Duration = Duration::from_secs(240);
/// Files that [`PREPARE`] makes.
const FILES: usize = 96;
/// Files whose pages the device fills during the move, and no processor touches: what is not marked is missing there.
const PREPARE: &str = "set -e; mkdir /run/work; for disk in vdb:/mnt vdc:/run/work; do \
     mkfs.ext4 -q /dev/${disk%:*}; mount /dev/${disk%:*} ${disk#*:}; done; \
     head -c 67108864 /dev/zero > /run/work/work; sync; cd /mnt; \
     for file in $(seq 96); do head -c 1048576 /dev/urandom > $file; done; md5sum [0-9]* > /run/sums; \
     cd /; umount /mnt; mount /dev/vdb /mnt";
/// Memory hardly goes until the guest has begun to fill its page cache, however late that is: a guest that has moved
/// cannot be asked.
const CREEPING_BYTES_PER_SECOND: u64 = 1 << 20;
/// Then it goes so slowly that the page cache is filled behind its back ..
const SLOW_BYTES_PER_SECOND: u64 = 12 << 20;
/// .. until the disk's server has read so much of the files; then as fast as can be.
const FILLED_BYTES: u64 = 64 << 20;
const FAST_BYTES_PER_SECOND: u64 = 1 << 30;
/// Reads and writes during the whole move, and for a while after it; and fills the page cache.
const WORK: &str = "guest-exercise --device /run/work/work --seconds 30 --threads 4 --no-discards > /run/report";
const FILL: &str = "for file in $(seq 96); do cat /mnt/$file > /dev/null; sleep 0.05; done";
/// Compares the files with their sums.
const COMPARE: &str = "cd /mnt; md5sum -c /run/sums; true";
/// The report, once the work has ended.
const REPORT: &str = "if test -e /run/done; then cat /run/report; echo ended; fi";
/// Why work may not end: what its threads wait for, and what the kernel says.
const STUCK: &str = "pgrep -x guest-exercise | while read -r process; do cat /proc/$process/task/*/stack; done; \
     head -c 2000 /run/report; dmesg | tail -n 30";
/// Empties the page cache.
const FORGET: &str = "echo 3 > /proc/sys/vm/drop_caches";

/// Moves without marking of which one must be seen to go wrong: where nothing was read in the midst of the move, as on
/// a machine that has more to do, nothing is missed either.
const MOVES_MAX: u32 = 3;

/// What `md5sum -c` says of the files.
#[derive(Debug, Default, PartialEq)]
struct Compared {
    /// Files whose bytes are right.
    right: usize,
    /// Files with a wrong byte.
    wrong: usize,
    /// All else that it says: a file that cannot be read is none with wrong bytes.
    complaints: Vec<String>,
}

impl Compared {
    fn of(output: &str) -> Compared {
        let mut compared = Compared::default();
        for line in output.lines() {
            if line.ends_with(": OK") {
                compared.right += 1;
            } else if line.ends_with(": FAILED") {
                compared.wrong += 1;
            } else {
                compared.complaints.push(line.to_owned());
            }
        }
        compared
    }
}

/// What a moved guest tells.
#[derive(Debug)]
struct Moved {
    /// The files in the page cache, as it came.
    cached: Compared,
    /// What it tells after its work; a guest with wrong bytes in its memory may not come to that.
    later: anyhow::Result<Later>,
}

/// What a guest tells after its work.
#[derive(Debug)]
struct Later {
    /// The work's report.
    work: Value,
    /// The files on the disk.
    on_disk: Compared,
}

impl Moved {
    /// Whether somebody who knows what the disk must hold has seen another byte there. That something could not be
    /// read, or that the guest died, is no such thing.
    fn has_wrong_bytes(&self) -> bool {
        let in_later = self.later.as_ref().is_ok_and(|later| {
            // As the workload describes a sector with other bytes than it must have.
            let mut described = later.work["described"].as_array().into_iter().flatten().filter_map(Value::as_str);
            later.on_disk.wrong > 0 || described.any(|text| text.contains(" expected, "))
        });
        self.cached.wrong > 0 || in_later
    }
}

/// Moves a working guest; what it tells where it has arrived.
async fn move_at_work(source_arguments: &[&str]) -> anyhow::Result<Moved> {
    let directory = TestGuest::directory()?;
    let at = |name: &str| directory.path().join(name);
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for (disk, size_bytes) in SIZES_BYTES {
        create(&at(disk), size_bytes)?;
        here.push(Server::start(&at(disk), &at(&format!("{disk}-here.sock")), source_arguments)?);
        let control = at(&format!("{disk}-there-control.sock"));
        let arguments = ["--control", &control.to_string_lossy()];
        there.push(Server::start(&at(disk), &at(&format!("{disk}-there.sock")), &arguments)?);
    }
    let backends = |servers: &[Server]| -> Vec<_> {
        SIZES_BYTES.iter().zip(servers).map(|((disk, _), server)| server.backend(disk)).collect()
    };
    let mut moving: Option<MachineConfiguration> = None;
    let mut guest = TestGuest::boot_with(|configuration, _| {
        if let Boot::Kernel { arguments, .. } = &mut configuration.boot {
            // Else the processor clears each page just before the device fills it, and QEMU sees that.
            arguments.push_str(" init_on_alloc=0");
        }
        let mut arriving = configuration.clone();
        arriving.disks.extend(backends(&there));
        arriving.incoming = Some(Incoming::Deferred);
        moving = Some(arriving);
        configuration.disks.extend(backends(&here));
        Ok(())
    })
    .await?;
    let arriving = moving.expect("the guest was configured");
    guest.put_exercise().await?;
    guest.run(PREPARE).await?;
    let background = format!("(setsid bash -c '{WORK}; touch /run/done' > /dev/null 2>&1 &)");
    guest.run(&background).await?;
    let run = MachineDirectory::new(at("arriving"))?;
    let machine = Machine::start(&Qemu::find()?, &arriving, &run, &[], long_time_limits()).await?;
    let arrived = arrive(&mut guest, &here[0], &machine, at("migration.sock")).await;
    let told = match arrived {
        Ok(()) => report(&machine).await,
        Err(error) => Err(error),
    };
    machine.kill();
    for (side, servers) in [("source", &here), ("destination", &there)] {
        servers.iter().for_each(|server| eprintln!("a server of the {side}: {}", server.said()));
    }
    told
}

async fn arrive(guest: &mut TestGuest, files: &Server, machine: &Machine, socket: PathBuf) -> anyhow::Result<()> {
    let target = MigrationTarget::Unix(socket);
    machine.monitor().migrate_incoming(&target).await?;
    limit(guest, CREEPING_BYTES_PER_SECOND).await?;
    guest.machine().monitor().migrate(&target).await?;
    let read_before = files.read_bytes()?;
    guest.run(&format!("(setsid bash -c '{FILL}' > /dev/null 2>&1 &)")).await?;
    limit(guest, SLOW_BYTES_PER_SECOND).await?;
    guest.hang_up();
    let filled = look_until(async || Ok::<_, anyhow::Error>(files.read_bytes()? - read_before >= FILLED_BYTES));
    tokio::time::timeout(TIMEOUT, filled).await.context("the guest fills no page cache")??;
    let monitor = guest.machine().monitor();
    let status = monitor.migration().await?.status;
    anyhow::ensure!(
        status == Some(MigrationStatus::Active),
        "it has moved before the page cache was filled: {status:?}"
    );
    limit(guest, FAST_BYTES_PER_SECOND).await?;
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let migration = monitor.migration().await?;
        match migration.status {
            Some(MigrationStatus::Completed) => {
                eprintln!("moved in {:?} ms, the guest stood {:?} ms", migration.total_ms, migration.downtime_ms);
                break;
            }
            Some(status) if status.is_final() => anyhow::bail!("{migration:?}"),
            _ if tokio::time::Instant::now() > deadline => anyhow::bail!("the guest does not move: {migration:?}"),
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    machine.wait_for("running", |state| *state == State::Running, TIMEOUT).await?;
    Ok(())
}

/// How fast memory goes.
async fn limit(guest: &TestGuest, bytes_per_second: u64) -> anyhow::Result<()> {
    let parameters = [("max-bandwidth".to_owned(), Value::from(bytes_per_second))];
    Ok(guest.machine().monitor().set_migration_parameters(parameters.into_iter().collect()).await?)
}

/// What the guest has found, asked where it is now.
async fn report(machine: &Machine) -> anyhow::Result<Moved> {
    let agent = machine.agent().await?;
    let cached = compare(&agent).await?;
    let later = after_work(&agent).await;
    Ok(Moved { cached, later })
}

async fn compare(agent: &Agent) -> anyhow::Result<Compared> {
    let compared = agent.execute(&["bash", "-c", COMPARE], TIMEOUT).await?;
    Ok(Compared::of(&(compared.stdout.to_text() + &compared.stderr.to_text())))
}

async fn after_work(agent: &Agent) -> anyhow::Result<Later> {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let output = agent.execute(&["bash", "-c", REPORT], TIMEOUT).await?.stdout.to_text();
        if let Some(report) = output.trim_end().strip_suffix("ended") {
            agent.execute(&["bash", "-c", FORGET], TIMEOUT).await?;
            let work = serde_json::from_str(report).with_context(|| format!("the work reports {report:?}"))?;
            return Ok(Later { work, on_disk: compare(agent).await? });
        }
        if tokio::time::Instant::now() > deadline {
            let stuck = agent.execute(&["bash", "-c", STUCK], TIMEOUT).await?.stdout.to_text();
            anyhow::bail!("the work does not end: {stuck}");
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// A machine moves between two servers of one disk under work and sees no wrong byte; without marking it does.
///
/// Spec: D5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b46_a_machine_moves_between_two_servers_of_its_disk_and_sees_no_wrong_byte() {
    let moved = move_at_work(&[]).await.unwrap();
    eprintln!("{moved:?}");
    let whole = Compared { right: FILES, ..Compared::default() };
    assert_eq!(moved.cached, whole);
    let later = moved.later.expect("the guest tells");
    assert_eq!(later.on_disk, whole);
    assert_eq!(later.work["errors"], 0, "{}", later.work);
    assert!(later.work["compared"].as_u64() > Some(0), "{}", later.work);
}

/// The other half of the proof: the same move with the marking off, and wrong bytes are seen.
///
/// Spec: D5, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b46_without_dirty_marking_a_moved_machine_is_corrupt() {
    for _ in 0..MOVES_MAX {
        let moved = move_at_work(&["--unsafe-without-dirty-log"]).await.unwrap();
        eprintln!("{moved:?}");
        if moved.has_wrong_bytes() {
            return;
        }
        moved.later.expect("a guest that has seen nothing wrong can tell");
    }
    panic!("the proof proves nothing");
}

/// Spec: D5
#[test]
fn b46_only_other_bytes_are_wrong_ones() {
    let moved = |files: &str, described: &str, errors: u64| Moved {
        cached: Compared::of(files),
        later: Ok(Later {
            work: json!({ "errors": errors, "described": [described] }),
            on_disk: Compared::of("1: OK\n2: OK\n"),
        }),
    };
    assert!(!moved("1: OK\n2: OK\n", "", 0).has_wrong_bytes());
    assert!(moved("1: OK\n2: FAILED\nmd5sum: WARNING: 1 computed checksum did NOT match\n", "", 0).has_wrong_bytes());
    assert!(moved("1: OK\n", "sector 3 (byte 1536): Written(2) expected, Zeros found", 1).has_wrong_bytes());
    for unread in
        ["md5sum: 2: Input/output error\n2: FAILED open or read\n", "md5sum: /run/sums: No such file or directory\n"]
    {
        assert!(!moved(unread, "read of 8 sectors from 0: Input/output error", 1).has_wrong_bytes(), "{unread}");
    }
    let dead = Moved { cached: Compared::of(""), later: Err(anyhow::anyhow!("no answer")) };
    assert!(!dead.has_wrong_bytes());
}
