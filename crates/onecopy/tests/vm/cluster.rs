//! A cluster whose servers run in machines, from its first start to its last: one cluster for all of it, because a
//! guest takes long to make.

use onecopy_testing::process::{lives, send};
use rustix::process::Signal;

use crate::machines::{MachineDirectory, until};

/// The servers are well, each with a machine that runs.
pub fn is_well(machines: &MachineDirectory, servers: usize) -> bool {
    let ran = machines.directory.run(&["status", "--json"]);
    let Ok(status) = serde_json::from_str::<serde_json::Value>(&ran.stdout) else { return false };
    let all = status["servers"].as_array().cloned().unwrap_or_default();
    let is_up = |server: &serde_json::Value| server["state"] == "running" && server["machine"]["state"] == "running";
    let streams = |server: &serde_json::Value| server["role"] == "leader" || server["replication"] == "streaming";
    all.len() == servers && all.iter().all(|server| is_up(server) && streams(server))
}

/// A read that this server answers.
pub fn read_on(machines: &MachineDirectory, server: &str, statement: &str) -> String {
    let ran = machines.directory.run(&[
        "psql",
        "--",
        "-XAtq",
        "-v",
        "ON_ERROR_STOP=1",
        "-c",
        &format!("SET onecopy.server = '{server}'"),
        "-c",
        statement,
    ]);
    ran.stdout.trim().to_owned()
}

/// Reads of clients that a server has answered.
fn reads_of(machines: &MachineDirectory, server: &str) -> u64 {
    let status = machines.directory.status();
    let routed = status["router"]["servers"].as_array().expect("a list").iter().find(|routed| routed["name"] == server);
    routed.and_then(|routed| routed["reads"].as_u64()).unwrap_or(0)
}

/// A cluster in machines serves reads on its followers through the router; server, keeper, daemon, disk's process and
/// QEMU killed in turn: each recovers, nothing acknowledged is lost, and no guest is booted that had not died; `down`
/// switches guests off in order, `up` goes on; what would break the cluster is refused.
///
/// Spec: A4, nightly
#[test]
fn v30_a_cluster_in_machines_serves_scales_stops_and_survives_every_death() {
    let machines = MachineDirectory::new();
    let directory = &machines.directory;
    let shape = ["--runtime=vm", "--vm-memory=512MB", "--vm-disk=4GB"];
    directory.run(&[&["up", "--detach", "--port=0", "--replicas=1"], &shape[..]].concat()).ok();
    directory.sql("CREATE TABLE kept (number int); INSERT INTO kept VALUES (1)");
    until("both are well", || is_well(&machines, 2));
    until("the follower answers clients", || {
        // On a busy machine it may be behind for a moment, and refuse.
        read_on(&machines, "follower-1", "SELECT sum(number) FROM kept") == "1" && reads_of(&machines, "follower-1") > 0
    });
    told_of_machines(&machines);
    refused_where_the_cluster_would_break(&machines);

    // The leader's server dies in its guest: it is started there, and the guest is not booted again.
    let machine = machines.process("leader", "qemu.pid");
    let boot = machines.guest("leader", "cat /proc/sys/kernel/random/boot_id");
    machines.guest("leader", "pkill -KILL -o -u postgres postgres");
    until("the server is back in its guest", || {
        directory.status()["servers"][0]["restarts"] == 1 && is_well(&machines, 2)
    });
    directory.sql("INSERT INTO kept VALUES (2)");
    assert_eq!(machines.guest("leader", "cat /proc/sys/kernel/random/boot_id"), boot);
    assert_eq!(machines.process("leader", "qemu.pid"), machine);

    // The daemon and a keeper die: the servers run on, the next daemon takes them over.
    directory.kill_daemon();
    machines.kill("follower-1", "keeper.lock");
    directory.run(&["up", "--detach"]).ok();
    until("all is taken over", || is_well(&machines, 2));
    assert_eq!(machines.process("leader", "qemu.pid"), machine);
    assert_eq!(directory.status()["servers"][0]["restarts"], 0);

    // The leader's disk server dies: nobody but the guest's clock notices.
    machines.kill("leader", "disk.pid");
    directory.sql("INSERT INTO kept VALUES (3)");
    // The follower's machine dies: it is booted again, and catches up.
    machines.kill("follower-1", "qemu.pid");
    until("the follower is back", || is_well(&machines, 2));
    until("it answers with all there is", || read_on(&machines, "follower-1", "SELECT sum(number) FROM kept") == "6");

    directory.run(&["down"]).ok();
    assert_eq!(machines.processes(), [0; 0]);
    for server in ["leader", "follower-1"] {
        assert_eq!(machines.machine(server)["end"]["clean"], true, "{server} was switched off");
    }
    directory.run(&["up", "--detach"]).ok();
    assert_eq!(directory.sql("SELECT sum(number) FROM kept"), "6");
}

/// Status, list and metrics tell of the machines.
fn told_of_machines(machines: &MachineDirectory) {
    let directory = &machines.directory;
    let leader = &directory.status()["servers"][0];
    assert_eq!(leader["machine"]["memory_bytes"], 512 << 20);
    assert_eq!(leader["process_id"], leader["machine"]["process_id"]);
    // A guest that has more to do does not tell in time each time it is asked.
    until("the guest tells of its memory", || {
        directory.status()["servers"][0]["machine"]["memory_available_bytes"].as_u64().is_some_and(|bytes| bytes > 0)
    });
    let told = directory.run(&["status"]).ok();
    assert!(told.contains("machine running") && told.contains("not managed"), "{told}");
    let listed = machines.machine("follower-1");
    assert_eq!((&listed["of_cluster"], &listed["state"]), (&true.into(), &"running".into()));
    let samples = ["onecopy_machine_running{server=\"leader\"} 1", "onecopy_machine_disk_restarts_total{server="];
    until("the metrics tell of the machines", || {
        let (_, metrics) = directory.page("/metrics");
        samples.iter().all(|sample| metrics.contains(sample))
    });
    let (_, metrics) = directory.page("/metrics");
    let guide = include_str!("../../../../docs/guide/metrics.md");
    for name in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        assert!(guide.contains(name), "the guide does not name the metric {name}");
    }
    // QEMU and the disk's process have no more rights than a server, and lay no links where others look.
    let home = machines.home("leader");
    let owner =
        |path: &std::path::Path| std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(path).expect("it is there"));
    let us = owner(std::path::Path::new("/proc/self"));
    for file in ["", "machine.toml", "image", "keeper.log", "keeper.lock", "keeper.sock", "disk.log", "disk.pid"] {
        assert_eq!(owner(&home.join(file)), us, "{file}");
    }
    assert_eq!(owner(&home.join("disk")), owner(&home.join("run")));
    let own = std::fs::metadata(home.join("run")).expect("a directory");
    for file in ["qemu.pid", "disk.pid"] {
        let process = machines.process("leader", file).expect("it runs");
        let runs = std::fs::metadata(format!("/proc/{process}")).expect("a process");
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&runs), std::os::unix::fs::MetadataExt::uid(&own), "{file}");
    }
}

fn refused_where_the_cluster_would_break(machines: &MachineDirectory) {
    for action in [&["vm", "stop", "leader"][..], &["vm", "stop", "--force", "leader"], &["vm", "delete", "follower-1"]]
    {
        let complaint = machines.directory.run(action).refused(1);
        assert!(complaint.contains("is a server of the cluster"), "{complaint}");
    }
    let complaint = machines.directory.run(&["scale", "2", "--mode=reflink"]).refused(1);
    assert!(complaint.contains("--mode"), "{complaint}");
}

/// Followers in machines come, go and are made anew by base backups in their guests, with progress, and leave nothing
/// behind.
///
/// Spec: A4, nightly
#[test]
fn v31_followers_in_machines_come_and_go_and_are_made_anew() {
    let machines = MachineDirectory::new();
    let directory = &machines.directory;
    let shape = ["--runtime=vm", "--vm-memory=512MB", "--vm-disk=4GB"];
    directory.run(&[&["up", "--detach", "--port=0", "--replicas=0"], &shape[..]].concat()).ok();
    directory.sql("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS number");
    let events = directory.run(&["scale", "1", "--mode=copy", "--json"]).ok();
    for event in ["\"copying\"", "\"answering\"", "\"done\""] {
        assert!(events.contains(event), "{events}");
    }
    until("it answers with all there is", || read_on(&machines, "follower-1", "SELECT count(*) FROM kept") == "1000");
    until("it is well", || is_well(&machines, 2));
    until("its answers are counted", || reads_of(&machines, "follower-1") > 0);

    // A follower whose disk is gone is made anew under its name.
    let machine = machines.process("follower-1", "qemu.pid").expect("it runs");
    directory.run(&["reinit", "follower-1", "--mode=copy"]).ok();
    assert!(!lives(machine));
    until("it answers with all there is", || read_on(&machines, "follower-1", "SELECT count(*) FROM kept") == "1000");

    // A daemon that is killed while a follower leaves: the next one finishes.
    directory.run(&["scale", "0"]).ok();
    assert!(!machines.home("follower-1").exists());
    assert_eq!(directory.sql("SELECT count(*) FROM pg_replication_slots"), "0");
    let daemon = directory.daemon();
    send(daemon, Signal::TERM);
    until("the daemon has stopped all", || !lives(daemon) && machines.processes().is_empty());
}
