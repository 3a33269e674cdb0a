//! Checkpoints and forks of machines at work.

use std::path::Path;
use std::process::Child;
use std::time::SystemTime;

use onecopy_testing::{ControlGroup, process, seed, skip};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

use crate::at_work::DIFFERENCE;
use crate::checkpoints::is_left_out;
use crate::machines::{MachineDirectory, until};

/// Machines at work.
struct Work {
    machines: MachineDirectory,
    random: StdRng,
}

impl std::ops::Deref for Work {
    type Target = MachineDirectory;

    fn deref(&self) -> &MachineDirectory {
        &self.machines
    }
}

impl Work {
    /// Makes a machine of a name, with all that writes in it.
    fn begin(name: &str) -> Work {
        let work = Work::create(name);
        work.run(&["vm", "start", name]);
        work.begin_work(name);
        work
    }

    /// Makes the machine alone.
    fn create(name: &str) -> Work {
        let work = Work { machines: MachineDirectory::new(), random: StdRng::seed_from_u64(seed()) };
        work.run(&["vm", "create", name, "--memory=512MB", "--disk=4GB", "--postgresql", "--checkpoints"]);
        work
    }

    /// Ends a machine as a power cut would, and lets it go on from its last checkpoint.
    fn restore(&self, name: &str) {
        self.run(&["vm", "stop", "--force", name]);
        self.run(&["vm", "restore", name]);
    }

    /// Waits for a moment of the next second.
    fn rest(&mut self) {
        let rest = std::time::Duration::from_millis(self.random.random_range(0..1000));
        std::thread::sleep(rest);
    }
}

/// So many checkpoints at any moment of a machine at work; every `each`th is restored and all in it is right. The disk
/// of another instant is found by the same look.
fn take_and_restore(takes: u32, each: u32) {
    let mut work = Work::begin("shop");
    for take in 1..=takes {
        work.rest();
        work.run(&["vm", "checkpoint", "shop", "--keep=4"]);
        if take % each == 0 {
            work.restore("shop");
            work.verify("shop");
            // And once more: what is verified has ended there.
            work.restore("shop");
        }
    }
    // The control: the snapshot is made anew, under its name, at another instant than the memory's.
    work.run(&["vm", "checkpoint", "shop", "--keep=1"]);
    let disk = work.machines.home("shop").join(format!("disk.{}", takes / each * 2));
    let disk = disk.to_str().expect("UTF-8");
    let list: Value = serde_json::from_str(&work.run(&["disk", "snapshot", disk, "--list", "--json"])).expect("JSON");
    let last = list.as_array().and_then(|list| list.last()?["name"].as_str()).expect("a list of one").to_owned();
    let history = || work.sql("shop", "SELECT count(*) FROM pgbench_history").parse::<u64>().expect("a number");
    let before = history();
    work.run(&["disk", "snapshot", disk, &last, "--delete"]);
    until("something was written since", || history() > before + 10);
    work.run(&["disk", "snapshot", disk, &last]);
    work.restore("shop");
    let found = work.wrong("shop").expect("a disk of another instant is found");
    assert!(found.contains("expected"), "{found}");
}

/// The shortest form.
///
/// Spec: D6, nightly
#[test]
fn t39_a_machine_at_work_goes_on_from_a_checkpoint_and_a_disk_of_another_instant_is_found() {
    if !is_left_out("t39_a_machine_at_work_goes_on_from_a_checkpoint_and_a_disk_of_another_instant_is_found") {
        take_and_restore(2, 2);
    }
}

/// The long one.
///
/// Spec: D6, nightly
#[test]
fn t40_a_machine_at_work_goes_on_from_checkpoints_at_any_moment() {
    if !is_left_out("t40_a_machine_at_work_goes_on_from_checkpoints_at_any_moment") {
        take_and_restore(50, 10);
    }
}

/// A moment of a checkpoint, as it is seen from outside.
#[derive(Debug, Clone, Copy)]
enum Moment {
    Asked,
    Recorded,
    DevicesSaved,
    GoneOn,
    Writing,
    Written,
}

impl Moment {
    const ALL: [Moment; 6] =
        [Moment::Asked, Moment::Recorded, Moment::DevicesSaved, Moment::GoneOn, Moment::Writing, Moment::Written];

    /// Waits until it is there, or the command has ended; whether it was there.
    fn wait(self, home: &Path, number: u64, command: &mut Child) -> bool {
        let begun = SystemTime::now();
        let has =
            |name: &str| std::fs::read_to_string(home.join("standing.json")).is_ok_and(|text| text.contains(name));
        let there = |name: String| home.join("checkpoints").join(name).exists();
        let mut was_taking = false;
        while command.try_wait().expect("a child").is_none() {
            was_taking |= has("taking");
            let is_there = match self {
                Moment::Asked => true,
                Moment::Recorded => was_taking,
                // The file of the take before is there until the next one.
                Moment::DevicesSaved => {
                    let saved = std::fs::metadata(home.join("run/devices")).and_then(|file| file.modified());
                    was_taking && saved.is_ok_and(|saved| saved > begun)
                }
                Moment::GoneOn => was_taking && has("running"),
                Moment::Writing => there(format!("checkpoint.{number}.new")),
                Moment::Written => there(format!("checkpoint.{number}")),
            };
            if is_there {
                return true;
            }
        }
        false
    }
}

/// Whoever is killed at whatever moment of a checkpoint: the machine goes on where it has not died itself, and from
/// its last checkpoint where it has.
///
/// Spec: D6, A3, nightly
#[test]
fn t41_whoever_is_killed_at_any_moment_of_a_checkpoint_nothing_of_it_is_wrong() {
    let name = "t41_whoever_is_killed_at_any_moment_of_a_checkpoint_nothing_of_it_is_wrong";
    if is_left_out(name) {
        return;
    }
    let work = Work::begin("shop");
    let machines = &work.machines;
    let home = machines.home("shop");
    work.run(&["vm", "checkpoint", "shop", "--keep=3"]);
    let all = ["keeper.lock", "memory.pid", "disk.pid", "qemu.pid"];
    let last = || {
        let list: Value = serde_json::from_str(&work.run(&["vm", "checkpoints", "shop", "--json"])).expect("JSON");
        list.as_array().and_then(|list| list.last()?["number"].as_u64()).expect("one")
    };
    let mut met = [0; Moment::ALL.len()];
    for victims in [&all[..1], &all[1..2], &all[2..3], &all[3..], &all[..]] {
        for (moment, met) in Moment::ALL.into_iter().zip(&mut met) {
            println!("{victims:?} at {moment:?}");
            let (machine, before) = (machines.process("shop", "qemu.pid"), last());
            let mut command = machines.directory.spawn_unheard(&["vm", "checkpoint", "shop", "--keep=3"]);
            *met += u32::from(moment.wait(&home, before + 1, &mut command));
            let killed: Vec<u32> = victims.iter().filter_map(|file| machines.process("shop", file)).collect();
            for victim in &killed {
                process::send(*victim, rustix::process::Signal::KILL);
            }
            command.wait().expect("a child");
            killed.into_iter().for_each(process::wait_ended);
            assert!((before..=before + 1).contains(&last()), "{moment:?}");
            if victims.contains(&"qemu.pid") {
                until("nothing of it runs", || machines.process("shop", "qemu.pid").is_none());
                work.restore("shop");
            } else {
                // Whoever comes next finds it as it is.
                until("somebody looks after it", || {
                    machines.directory.run(&["vm", "exec", "shop", "--", "true"]).code == Some(0)
                });
                assert_eq!(machines.process("shop", "qemu.pid"), machine, "the guest was never booted again");
            }
            assert_eq!(work.sql("shop", DIFFERENCE), "", "{victims:?} at {moment:?}");
            let before = last();
            work.run(&["vm", "checkpoint", "shop", "--keep=3"]);
            assert_eq!(last(), before + 1, "the next one is taken");
        }
    }
    assert!(met.iter().all(|met| *met > 0), "a moment was never met: {met:?} of {:?}", Moment::ALL);
    // All that was restored on the way is in it.
    work.verify("shop");
    work.restore("shop");
    work.verify("shop");
}

/// The server of a machine's memory is killed again and again, also while a checkpoint is taken, where there is hardly
/// more memory for QEMU than what cannot be taken from it: the guest goes on, and nothing in it is wrong.
///
/// Spec: D6, A3, nightly
#[test]
fn t52_a_memory_server_that_is_killed_where_memory_is_short_loses_nothing() {
    let name = "t52_a_memory_server_that_is_killed_where_memory_is_short_loses_nothing";
    if is_left_out(name) {
        return;
    }
    let group = match ControlGroup::make() {
        Ok(group) => group,
        Err(error) => return skip(name, &error.to_string()),
    };
    let mut work = Work::create("shop");
    work.machines.directory.run_in(group.directory(), &["vm", "start", "shop"]).ok();
    // Whoever serves the memory is not among those that wait for it.
    for file in ["keeper.lock", "memory.pid"] {
        group.release_process(work.machines.process("shop", file).expect("it runs")).expect("another group");
    }
    work.begin_work("shop");
    work.run(&["vm", "checkpoint", "shop", "--keep=3"]);
    let usage = || group.usage().expect("what is used");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let machine = work.machines.process("shop", "qemu.pid");
    for kill in 1..=12 {
        // The translator's buffer grows, and nothing can be taken from that.
        runtime.block_on(group.limit(usage().kept_bytes + (128 << 20))).expect("a limit");
        work.rest();
        let take =
            (kill % 3 == 0).then(|| work.machines.directory.spawn_unheard(&["vm", "checkpoint", "shop", "--keep=3"]));
        if take.is_some() {
            std::thread::sleep(std::time::Duration::from_millis(work.random.random_range(0..500)));
        }
        let server = work.machines.process("shop", "memory.pid").expect("somebody serves its memory");
        process::kill(server);
        process::wait_ended(server);
        if let Some(mut take) = take {
            take.wait().expect("a child");
        }
        until("the guest goes on", || {
            work.machines.directory.run(&["vm", "exec", "shop", "--", "true"]).code == Some(0)
        });
        assert_eq!(work.machines.process("shop", "qemu.pid"), machine, "the guest was never booted again");
    }
    let used = usage();
    runtime.block_on(group.limit(4 << 30)).expect("no limit");
    assert_eq!(work.sql("shop", DIFFERENCE), "");
    assert!(used.limit_met > 0 && used.oom_kills == 0, "{used:?}");
    work.run(&["vm", "checkpoint", "shop", "--keep=3"]);
    // All that was written on the way is in it.
    work.verify("shop");
    work.restore("shop");
    work.verify("shop");
}

/// Forks of a machine at work, one after the other, and of forks: each is right, has other random numbers, and goes on
/// when its parent is killed; what one writes no other one sees.
///
/// Spec: D6, nightly
#[test]
fn t42_forks_of_a_machine_at_work_are_right_and_their_own() {
    let name = "t42_forks_of_a_machine_at_work_are_right_and_their_own";
    if is_left_out(name) {
        return;
    }
    let mut work = Work::begin("first");
    for number in 1..=20 {
        work.rest();
        let fork = format!("fork{number}");
        work.run(&["vm", "fork", "first", &fork]);
        let drawn = |name: &str| work.guest(name, "head -c 16 /dev/urandom | md5sum");
        assert_ne!(drawn("first"), drawn(&fork));
        assert_eq!(work.wrong(&fork), None, "{fork}");
        assert_eq!(work.sql(&fork, DIFFERENCE), "", "{fork}");
        if number % 5 == 0 {
            work.verify(&fork);
        }
        work.run(&["vm", "stop", "--force", &fork]);
        work.run(&["vm", "delete", &fork]);
    }
    assert_eq!(work.sql("first", DIFFERENCE), "", "the parent");

    // Forks of forks. Where nothing writes, their tables are the same.
    work.sql("first", "CREATE TABLE told AS SELECT 0 AS depth");
    work.guest("first", "pkill -x pgbench; true");
    let hash =
        |name: &str| work.sql(name, "SELECT md5(string_agg(a::text, chr(10) ORDER BY aid)) FROM pgbench_accounts AS a");
    let names = ["first", "second", "third", "fourth"];
    for depth in 1..names.len() {
        let (parent, fork) = (names[depth - 1], names[depth]);
        work.run(&["vm", "fork", parent, fork, "--independent"]);
        assert_eq!(hash(parent), hash(fork));
        work.sql(fork, &format!("INSERT INTO told VALUES ({depth}); UPDATE pgbench_accounts SET abalance = {depth}"));
        work.guest(fork, &format!("echo {fork} | tee /root/told > /dev/shm/told"));
    }
    for (depth, name) in (0..).zip(names) {
        assert_eq!(work.sql(name, "SELECT max(depth) FROM told"), depth.to_string());
        if depth > 0 {
            assert_eq!(work.guest(name, "cat /root/told /dev/shm/told"), format!("{name}\n{name}"));
            assert_eq!(
                work.sql(
                    name,
                    "SELECT count(*) FROM pgbench_accounts WHERE abalance <> {depth}"
                        .replace("{depth}", &depth.to_string())
                        .as_str()
                ),
                "0"
            );
        }
    }
    // Their parent is killed.
    let files = ["keeper.lock", "memory.pid", "disk.pid", "qemu.pid"];
    let all: Vec<u32> = files.into_iter().filter_map(|file| work.machines.process("first", file)).collect();
    all.into_iter().for_each(process::kill);
    for name in ["fourth", "third", "second"] {
        assert_eq!(work.wrong(name), None, "{name}");
        work.run(&["vm", "stop", "--force", name]);
    }
}

/// A checkpoint that is cut short or has another bit, and a disk that is full while one is made: refused by name, and
/// the others and the machine are as before.
///
/// Spec: D6, C6, L2, nightly
#[test]
fn t43_a_damaged_checkpoint_and_a_full_disk_are_refused_by_name() {
    let name = "t43_a_damaged_checkpoint_and_a_full_disk_are_refused_by_name";
    if is_left_out(name) {
        return;
    }
    let place = onecopy_testing::TestDirectory::new().expect("a directory");
    let mounted = onecopy_testing::MountedDisk::new(onecopy_testing::FileSystem::Ext4, place.path(), "d", 3 << 30);
    let mounted = mounted.expect("a file system");
    let machines = MachineDirectory::within(mounted.path());
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    run(&["vm", "create", "web", "--memory=512MB", "--disk=4GB", "--checkpoints", "--start"]).ok();
    machines.guest("web", "echo one > /dev/shm/kept");
    run(&["vm", "checkpoint", "web"]).ok();
    run(&["vm", "checkpoint", "web"]).ok();
    machines.guest("web", "head -c 160M /dev/urandom > /dev/shm/filled; echo two > /dev/shm/kept");
    let whole = machines.guest("web", "md5sum /dev/shm/filled");

    // Of what is left the next one would take more: that is known when it is taken.
    let ballast = mounted.path().join("ballast");
    let free = || {
        let told = rustix::fs::statvfs(mounted.path()).expect("told");
        told.f_bfree * told.f_frsize
    };
    let fill = |left: u64| {
        let file = std::fs::File::create(&ballast).expect("create");
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, free() - left).expect("room");
    };
    fill(96 << 20);
    let complaint = run(&["vm", "checkpoint", "web"]).refused(1);
    assert!(complaint.contains("room") || complaint.contains("space"), "{complaint}");
    assert_eq!(machines.guest("web", "cat /dev/shm/kept; md5sum /dev/shm/filled"), format!("two\n{whole}"));
    std::fs::remove_file(&ballast).expect("remove");
    run(&["vm", "checkpoint", "web"]).ok();
    run(&["vm", "stop", "--force", "web"]).ok();

    let file = machines.home("web").join("checkpoints/checkpoint.3");
    let sound = std::fs::read(&file).expect("read");
    for damage in [sound.len() / 2, 0, usize::MAX] {
        let mut bytes = sound.clone();
        match damage {
            usize::MAX => bytes.truncate(sound.len() - 100),
            place => bytes[place] ^= 1,
        }
        std::fs::write(&file, bytes).expect("write");
        let complaint = run(&["vm", "restore", "web"]).refused(1);
        assert!(complaint.contains("checkpoint.3"), "{complaint}");
        assert!(machines.processes().is_empty());
    }
    std::fs::write(&file, sound).expect("write");
    run(&["vm", "restore", "web"]).ok();
    assert_eq!(machines.guest("web", "cat /dev/shm/kept; md5sum /dev/shm/filled"), format!("two\n{whole}"));
}
