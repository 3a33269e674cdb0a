//! Followers of a cluster in machines that are forks of a machine of it.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use onecopy_testing::{ControlGroup, skip};
use serde_json::Value;

use crate::checkpoints::is_left_out;
use crate::cluster::{is_well, read_on};
use crate::forks::is_mergeable;
use crate::machines::{MachineDirectory, until};

/// A new cluster with one table.
fn cluster() -> MachineDirectory {
    let machines = MachineDirectory::new();
    let shape = ["--runtime=vm", "--vm-memory=512MB", "--vm-disk=4GB", "--vm-checkpoints=on"];
    machines.directory.run(&[&["up", "--detach", "--port=0", "--replicas=0"], &shape[..]].concat()).ok();
    machines.directory.sql("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS number");
    machines
}

/// What a server has in its data directory's top.
fn is_standby(machines: &MachineDirectory, server: &str) -> bool {
    machines.guest(server, "ls /var/lib/onecopy/data").lines().any(|name| name == "standby.signal")
}

fn has_all(machines: &MachineDirectory, server: &str, rows: &str) {
    until("it answers with all there is", || read_on(machines, server, "SELECT count(*) FROM kept") == rows);
}

/// Row by row what the leader has.
fn has_what_was_written(machines: &MachineDirectory, server: &str) {
    const CONTENT: &str = "SELECT count(*) || ' ' || md5(string_agg(number::text, ',' ORDER BY number)) FROM written";
    let written = read_on(machines, "leader", CONTENT);
    until("it has caught up", || read_on(machines, server, CONTENT) == written);
}

/// Bytes that a process has of memory, by its part of what it shares; and how many of these are of a frozen file. What
/// a memory server has mapped of its state is told as a shadow, mapped or not.
fn pss_bytes(process: u32, is_memory_server: bool) -> (u64, u64) {
    let (mut all, mut frozen, mut is_frozen, mut is_state) = (0, 0, false, false);
    for line in std::fs::read_to_string(format!("/proc/{process}/smaps")).expect("it lives").lines() {
        let figure = line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10;
        match line.split_ascii_whitespace().next() {
            Some("Pss:") if !is_state => {
                all += figure;
                frozen += if is_frozen { figure } else { 0 };
            }
            Some("Anonymous:") if is_frozen => frozen -= figure,
            Some(word) if !word.ends_with(':') => {
                is_frozen = line.contains("/frozen.");
                is_state = is_memory_server && line.contains("/memfd:");
            }
            _ => {}
        }
    }
    (all, frozen)
}

fn frozen_files(machines: &MachineDirectory) -> Vec<PathBuf> {
    let homes = std::fs::read_dir(machines.path().join("machines")).expect("machines").flatten();
    let files = homes.flat_map(|home| std::fs::read_dir(home.path()).expect("a directory").flatten());
    let is_frozen = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("frozen."));
    files.map(|file| file.path()).filter(is_frozen).collect()
}

/// Bytes that the processes of some machines have of memory, and how many of these are of frozen files.
fn processes_bytes(machines: &MachineDirectory, names: &[&str]) -> (u64, u64) {
    let files = ["qemu.pid", "disk.pid", "memory.pid", "keeper.lock"];
    let processes = names.iter().flat_map(|name| files.map(|file| (machines.process(name, file), file)));
    let taken = processes.filter_map(|(process, file)| Some(pss_bytes(process?, file == "memory.pid")));
    taken.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// All that is said of the machines' memory is what their processes have, and once what forks have in common.
fn told_as_the_kernel_tells(machines: &MachineDirectory, forks: usize) {
    let mut names = vec!["leader", "follower-1", "follower-2"];
    names.truncate(forks + 1);
    let before = processes_bytes(machines, &names);
    let status = machines.directory.status();
    let after = processes_bytes(machines, &names);
    let servers = status["servers"].as_array().expect("a list");
    assert_eq!(servers.len(), names.len(), "{status}");
    let all: Vec<&Value> = servers.iter().map(|server| &server["machine"]).collect();
    let shared: Vec<&Value> = all.iter().map(|one| &one["footprint"]["shared"]).filter(|one| !one.is_null()).collect();
    assert_eq!(shared.len(), forks, "{status}");
    let files: BTreeSet<&str> = shared.iter().filter_map(|one| one["file"].as_str()).collect();
    assert_eq!(files.len(), forks.min(1), "all have the same: {shared:?}");
    let told = |figure: &str| status["machines"][figure].as_u64().expect("a figure");
    let mapped = before.1.min(after.1);
    assert!(told("shared_bytes") >= mapped, "what is mapped of it is in the page cache: {mapped} of {status}");
    // The machines go on between the looks.
    let own = [before, after].map(|(all, mapped)| all - mapped);
    let (least, most) = (own[0].min(own[1]), own[0].max(own[1]));
    let said = told("private_bytes") + told("overhead_bytes");
    let slack = 8 << 20;
    assert!((least.saturating_sub(slack)..=most + slack).contains(&said), "{least} to {most} bytes: {status}");
}

/// A cluster in machines grows by forks of one checkpoint of its leader: each follower follows the leader by a slot of
/// its own, and none of them leads; they share their memory, which is told once;
/// without followers nothing of them is left, on no disk and in no memory.
///
/// Spec: A4, D6
#[test]
fn v36_followers_in_machines_are_forks_and_leave_nothing_behind() {
    if is_left_out("v36_followers_in_machines_are_forks_and_leave_nothing_behind") {
        return;
    }
    let machines = cluster();
    let directory = &machines.directory;
    let events = directory.run(&["scale", "2", "--mode=fork", "--json"]).ok();
    assert!(events.contains("\"way\":\"fork\"") && events.matches(" stood ").count() == 1, "{events}");
    directory.sql("INSERT INTO kept VALUES (1001)");
    let system = |server: &str| machines.guest(server, "cat /proc/sys/kernel/hostname");
    for follower in ["follower-1", "follower-2"] {
        has_all(&machines, follower, "1001");
        assert!(is_standby(&machines, follower), "{follower} would lead");
        assert_eq!(system(follower), follower);
    }
    until("all are well", || is_well(&machines, 3));
    let slots = "SELECT string_agg(slot_name, ' ' ORDER BY slot_name) FROM pg_replication_slots WHERE active";
    // A follower that loses its connection for a moment connects again.
    until("both have a slot", || directory.sql(slots) == "follower_1 follower_2");
    assert_eq!(
        machines.guest("follower-1", "ls /var/lib/onecopy/data/pg_replslot"),
        "",
        "the leader's own are not its"
    );
    told_as_the_kernel_tells(&machines, 2);
    assert_eq!(frozen_files(&machines), Vec::<PathBuf>::new(), "only who has it mapped has it");

    directory.run(&["scale", "0"]).ok();
    assert_eq!(directory.sql("SELECT count(*) FROM pg_replication_slots"), "0");
    only_the_leader_is_left(&machines);
    told_as_the_kernel_tells(&machines, 0);
    nothing_is_kept_for_forks(&machines);

    // Where a fork has no memory nothing larger is made in its place.
    match ControlGroup::make() {
        Ok(group) => {
            tokio::runtime::Runtime::new().expect("a runtime").block_on(group.limit(96 << 20)).expect("a limit");
            group.take_process(directory.daemon()).expect("the daemon's group");
            let complaint = directory.run(&["scale", "1"]).refused(1);
            assert!(complaint.contains("forks of leader need"), "{complaint}");
            only_the_leader_is_left(&machines);
            nothing_is_kept_for_forks(&machines);
        }
        Err(error) => skip("v36_forks_in_little_memory", &error.to_string()),
    }
}

fn only_the_leader_is_left(machines: &MachineDirectory) {
    let homes = std::fs::read_dir(machines.path().join("machines")).expect("machines").flatten();
    let names: Vec<_> = homes.map(|home| home.file_name()).collect();
    assert_eq!(names, ["leader"]);
}

/// The leader has neither checkpoints nor what belongs to them.
fn nothing_is_kept_for_forks(machines: &MachineDirectory) {
    let home = machines.home("leader");
    let checkpoints = std::fs::read_dir(home.join("checkpoints")).expect("its checkpoints").flatten();
    let names = checkpoints.map(|file| file.file_name().to_string_lossy().into_owned());
    let left: Vec<String> = names.filter(|name| name.starts_with("checkpoint.")).collect();
    assert_eq!(left, Vec::<String>::new(), "what forks were made of is kept");
    assert!(!home.join("held").exists());
    assert_eq!(frozen_files(machines), Vec::<PathBuf>::new(), "only who has it mapped has it");
    let info = machines.directory.run(&["disk", "info", &home.join("disk").to_string_lossy()]).ok();
    assert!(info.contains(" 0 snapshots"), "one is kept for nobody: {info}");
}

/// Forks go on from a follower where one has all that the leader has, share nothing of its identity, and survive their
/// parent's end, a restart of all, and being made anew; the disks that they lie over stay as long as they need them.
///
/// Spec: A4, D6, nightly
#[test]
fn v38_forks_of_followers_survive_restarts_and_their_parents() {
    if is_left_out("v38_forks_of_followers_survive_restarts_and_their_parents") {
        return;
    }
    let machines = cluster();
    let directory = &machines.directory;
    directory.run(&["scale", "1", "--mode=fork"]).ok();
    // Of checkpoints that are gone it counts no more what they were taken on.
    directory.run(&["scale", "0"]).ok();
    directory.run(&["down"]).ok();
    directory.run(&["up", "--detach", "--vm-memory=640MB"]).ok();
    directory.run(&["scale", "1", "--mode=fork"]).ok();
    // From its next start on its memory is its own.
    directory.run(&["down"]).ok();
    machines.configure("follower-1", "merge_equal_pages = true");
    directory.run(&["up", "--detach"]).ok();
    until("both are well", || is_well(&machines, 2));
    directory.sql("CREATE TABLE written AS SELECT 1 AS number");
    let is_made = AtomicBool::new(false);
    let events = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut written = 0;
            while !is_made.load(Relaxed) {
                directory.sql("INSERT INTO written SELECT max(number) + 1 FROM written");
                written += 1;
            }
            written
        });
        let made = directory.run(&["scale", "3", "--mode=fork", "--json"]);
        is_made.store(true, Relaxed);
        let written: u32 = writing.join().expect("each row is written");
        assert!(written > 10, "{written} rows while two followers were made");
        made.ok()
    });
    assert!(events.contains("follower-1 stood "), "{events}");
    for follower in ["follower-1", "follower-2", "follower-3"] {
        has_what_was_written(&machines, follower);
    }
    assert!(is_mergeable(machines.process("follower-2", "qemu.pid").expect("it runs")), "as its parent's file says");
    directory.sql("INSERT INTO kept VALUES (1001)");
    until("all are well", || is_well(&machines, 4));
    for follower in ["follower-1", "follower-2", "follower-3"] {
        has_all(&machines, follower, "1001");
    }
    // The parent is made anew: its forks go on, also from their disks.
    directory.run(&["reinit", "follower-1", "--mode=fork"]).ok();
    machines.kill("follower-3", "qemu.pid");
    until("it is booted again", || is_well(&machines, 4));
    directory.run(&["down"]).ok();
    directory.run(&["up", "--detach"]).ok();
    until("all are well", || is_well(&machines, 4));
    directory.sql("INSERT INTO kept VALUES (1002)");
    for follower in ["follower-1", "follower-2", "follower-3"] {
        has_all(&machines, follower, "1002");
        assert!(is_standby(&machines, follower), "{follower} would lead");
    }
    directory.run(&["scale", "1"]).ok();
    assert!(!machines.home("follower-2").exists() && !machines.home("follower-3").exists());
    assert!(!machines.home("follower-1").join("layers").exists(), "nobody lies over what it had before");
    has_all(&machines, "follower-1", "1002");
}

/// A fork of the leader never leads, at whatever step of its making the daemon is killed: what it leaves is held or
/// follows, and the next daemon makes it anew; of the checkpoints that were taken for it nothing is left.
///
/// Spec: A4, D6, nightly
#[test]
fn v39_a_fork_whose_making_is_broken_off_never_leads() {
    if is_left_out("v39_a_fork_whose_making_is_broken_off_never_leads") {
        return;
    }
    let machines = cluster();
    let directory = &machines.directory;
    for step in ["\"way\"", "taking a checkpoint", " stood ", "\"answering\""] {
        let mut scaling = directory.spawn(&["scale", "1", "--mode=fork", "--json"]);
        assert!(scaling.read_until(step), "{step}");
        let runs = || machines.process("follower-1", "qemu.pid").is_some();
        let shall_run = matches!(step, " stood " | "\"answering\"");
        if shall_run {
            until("the fork runs", runs);
        }
        directory.kill_daemon();
        drop(scaling);
        assert!(runs() || !shall_run, "after {step} nothing is looked at");
        if runs() {
            let held = "cat /sys/fs/cgroup/postgresql/cgroup.freeze; ls /var/lib/onecopy/data";
            let told = machines.guest("follower-1", held);
            assert!(told.starts_with('1') || told.contains("standby.signal"), "after {step}: {told}");
        }
        directory.run(&["up", "--detach"]).ok();
        until("it is made", || is_well(&machines, 2));
        has_all(&machines, "follower-1", "1000");
        assert!(is_standby(&machines, "follower-1"), "after {step}");
        // It serves before the change that made it is over.
        until("the change is over", || {
            let ran = directory.run(&["scale", "0"]);
            assert!(ran.code == Some(0) || ran.stderr.contains("is being changed"), "{ran:?}");
            ran.code == Some(0)
        });
        assert_eq!(directory.sql("SELECT count(*) FROM pg_replication_slots"), "0", "after {step}");
        nothing_is_kept_for_forks(&machines);
    }
}
