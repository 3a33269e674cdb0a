//! A machine that can be checkpointed: its memory outlives those that look after it, and it goes on from what was kept.

use rustix::process::{Pid, Signal, kill_process};

use crate::machines::{MachineDirectory, until};

/// Mounts below the directory.
fn mounts(machines: &MachineDirectory) -> usize {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("read");
    mounts.lines().filter(|line| line.contains(&*machines.path().to_string_lossy())).count()
}

/// Whether a test cannot run on this machine.
pub(crate) fn is_left_out(name: &str) -> bool {
    let is_possible = rustix::process::geteuid().is_root() && std::fs::metadata("/dev/fuse").is_ok();
    if !is_possible {
        onecopy_testing::skip(name, "it mounts: it needs root and /dev/fuse");
    }
    !is_possible
}

/// Spec: D6
#[test]
fn t14_a_machines_memory_outlives_its_server_its_keeper_and_the_next_server() {
    if is_left_out("t14_a_machines_memory_outlives_its_server_its_keeper_and_the_next_server") {
        return;
    }
    let machines = MachineDirectory::new();
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    run(&["vm", "create", "web", "--memory=512MB", "--disk=4GB", "--checkpoints", "--start"]).ok();
    let machine = machines.process("web", "qemu.pid").expect("QEMU runs");
    assert_eq!(mounts(&machines), 1);
    // In memory, and nowhere else.
    let filled = "head -c 100M /dev/urandom > /dev/shm/kept; md5sum /dev/shm/kept";
    let kept = machines.guest("web", filled);
    let goes_on = |when: &str| assert_eq!(machines.guest("web", "md5sum /dev/shm/kept"), kept, "{when}");

    let first = machines.kill("web", "memory.pid");
    until("another one serves", || machines.machine("web")["memory_restarts"] == 1);
    goes_on("its memory server died");
    machines.kill("web", "keeper.lock");
    goes_on("its keeper died");
    let second = machines.machine("web")["memory_process_id"].as_u64();
    assert!(second.is_some() && second != Some(u64::from(first)), "the next keeper has taken the server over");
    machines.kill("web", "memory.pid");
    until("another one serves", || machines.machine("web")["memory_restarts"] == 1);
    goes_on("its memory server died under the next keeper");
    // Whoever ends all processes of a host ends this one when its machine has ended.
    let served = machines.process("web", "memory.pid").expect("it serves");
    let process = Pid::from_raw(i32::try_from(served).expect("a number")).expect("a process");
    kill_process(process, Signal::TERM).expect("it lives");
    until("it has heard that", || {
        let log = std::fs::read_to_string(machines.home("web").join("memory.log"));
        log.is_ok_and(|log| log.contains("until no machine has it mapped"))
    });
    goes_on("its memory server was told to end");
    assert_eq!((machines.process("web", "memory.pid"), mounts(&machines)), (Some(served), 1));
    machines.kill("web", "disk.pid");
    assert_eq!(machines.guest("web", "echo kept > /root/kept; sync; cat /root/kept"), "kept");
    assert_eq!(machines.process("web", "qemu.pid"), Some(machine), "the guest was never booted again");

    // All at once: nothing is left that a next run would stumble over.
    for file in ["keeper.lock", "memory.pid", "qemu.pid"] {
        machines.kill("web", file);
    }
    run(&["vm", "start", "web"]).ok();
    assert_eq!((machines.guest("web", "cat /root/kept"), mounts(&machines)), ("kept".to_owned(), 1));
    run(&["vm", "stop", "web"]).ok();
    assert_eq!((machines.processes(), mounts(&machines)), (Vec::new(), 0));
    assert!(!machines.home("web").join("memory.shadow").exists(), "what was in memory is on no disk");
    run(&["vm", "delete", "web"]).ok();
    assert!(!machines.home("web").exists());
}

/// Numbers of the checkpoints that are there.
fn checkpoints(machines: &MachineDirectory) -> Vec<u64> {
    let told = machines.directory.run(&["vm", "checkpoints", "shop", "--json"]).ok();
    let list: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    list.as_array().expect("a list").iter().map(|one| one["number"].as_u64().expect("a number")).collect()
}

/// Spec: D6
#[test]
fn t16_a_machine_with_a_server_goes_on_from_any_of_its_checkpoints() {
    if is_left_out("t16_a_machine_with_a_server_goes_on_from_any_of_its_checkpoints") {
        return;
    }
    let machines = MachineDirectory::new();
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    let shape = ["--memory=512MB", "--disk=4GB", "--postgresql", "--checkpoints", "--start"];
    run(&[&["vm", "create", "shop"], &shape[..]].concat()).ok();
    let password = std::fs::read_to_string(machines.home("shop").join("password")).expect("a password");
    let password = format!("PGPASSWORD={}", password.trim());
    let sql = |statement: &str| {
        let psql = ["env", &password, "psql", "-h127.0.0.1", "-Upostgres", "-XAtqc", statement];
        run(&[&["vm", "exec", "shop", "--"], &psql[..]].concat()).ok().trim().to_owned()
    };
    // A whole one has all of the guest's memory; what an idle guest changes is less.
    let take = |since: Option<u64>, arguments: &[&str]| {
        let told = run(&[&["vm", "checkpoint", "shop", "--json"], arguments].concat()).ok();
        let taken: serde_json::Value = serde_json::from_str(&told).expect("JSON");
        assert_eq!(taken["since"].as_u64(), since, "{taken}");
        let parts = taken["parts"].as_object().expect("parts").values().map(|part| part.as_u64().expect("a number"));
        let parts: Vec<u64> = parts.collect();
        assert!(parts.len() == 6 && parts.iter().all(|part| *part > 0), "{taken}");
        assert!(taken["pause_us"].as_u64() >= Some(parts.iter().sum()), "{taken}");
        assert!(taken["memory_bytes"].as_u64().is_some_and(|bytes| (bytes > 64 << 20) == since.is_none()), "{taken}");
        taken["number"].as_u64().expect("a number")
    };
    sql("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS number");
    let started = sql("SELECT pg_postmaster_start_time()");
    let memory = machines.guest("shop", "head -c 50M /dev/urandom > /dev/shm/kept; md5sum /dev/shm/kept");
    assert_eq!(take(None, &[]), 1);
    machines.kill("shop", "memory.pid");
    sql("INSERT INTO kept VALUES (1001)");
    machines.guest("shop", "echo later > /dev/shm/kept");
    // Another server knows no epoch that it could stand on.
    assert_eq!(take(None, &[]), 2);
    sql("DROP TABLE kept");
    assert!(run(&["vm", "restore", "shop"]).refused(1).contains("vm stop shop"), "it runs");

    // As after a crash: what was done since the last checkpoint never was.
    machines.kill("shop", "qemu.pid");
    until("nothing of it runs", || machines.processes().is_empty());
    run(&["vm", "restore", "shop"]).ok();
    assert_eq!(
        (sql("SELECT count(*) FROM kept"), sql("SELECT pg_postmaster_start_time()")),
        ("1001".into(), started.clone())
    );
    assert_eq!(machines.guest("shop", "cat /dev/shm/kept"), "later");
    sql("INSERT INTO kept VALUES (1002)");

    // Another processor is another machine.
    run(&["vm", "stop", "--force", "shop"]).ok();
    let file = machines.home("shop").join("machine.toml");
    let text = std::fs::read_to_string(&file).expect("read");
    std::fs::write(&file, text.replace("processors = 1", "processors = 2")).expect("write");
    let complaint = run(&["vm", "restore", "shop"]).refused(1);
    assert!(complaint.contains("-smp 1 then") && complaint.contains("-smp 2 now"), "{complaint}");
    std::fs::write(&file, &text).expect("write");
    assert!(run(&["vm", "restore", "shop", "--checkpoint=7"]).refused(1).contains("no 7; there are: 1, 2"));

    // The first one, on which the memory was another.
    run(&["vm", "restore", "shop", "--checkpoint=1"]).ok();
    assert_eq!((sql("SELECT count(*) FROM kept"), sql("SELECT pg_postmaster_start_time()")), ("1000".into(), started));
    assert_eq!(machines.guest("shop", "md5sum /dev/shm/kept"), memory);
    // What a take that came to nothing has left goes with the oldest.
    let disk = machines.home("shop").join("disk.2");
    let disk = disk.to_str().expect("UTF-8");
    run(&["disk", "snapshot", disk, "checkpoint-1-1"]).ok();
    assert_eq!((take(None, &["--keep=2"]), checkpoints(&machines)), (3, vec![2, 3]));
    let snapshots = || run(&["disk", "snapshot", disk, "--list"]).ok().matches("checkpoint-").count();
    assert_eq!(snapshots(), 1);

    // What changed since, twice; then the three in one.
    machines.guest("shop", "echo fourth > /dev/shm/fourth");
    assert_eq!(take(Some(3), &[]), 4);
    // While it runs: what the later one stands on goes into it, and it is the same one.
    assert_eq!(snapshots(), 2);
    assert!(run(&["vm", "forget", "shop", "--checkpoint=9"]).refused(1).contains("no 9; there are: 2, 3, 4"));
    run(&["vm", "pause", "shop"]).ok();
    assert!(run(&["vm", "forget", "shop", "--all"]).refused(1).contains("vm resume shop"));
    run(&["vm", "resume", "shop"]).ok();
    assert!(run(&["vm", "forget", "shop", "--checkpoint=3"]).ok().contains("left: 2, 4."));
    assert_eq!((checkpoints(&machines), snapshots()), (vec![2, 4], 1));
    machines.guest("shop", "echo last > /dev/shm/kept");
    sql("INSERT INTO kept VALUES (1003)");
    assert_eq!((take(Some(4), &["--keep=1"]), checkpoints(&machines)), (5, vec![5]));

    // A machine that is started and not restored has its disk as it left it.
    run(&["vm", "stop", "shop"]).ok();
    // The wish of a restore that nobody began is none of this start.
    std::fs::write(machines.home("shop").join("restore"), "5\n").expect("write");
    run(&["vm", "start", "shop"]).ok();
    assert_eq!(sql("DELETE FROM kept WHERE number = 1003; SELECT count(*) FROM kept"), "1000");
    assert_eq!(machines.guest("shop", "ls /dev/shm | grep -c fourth || true"), "0", "it has booted");
    run(&["vm", "stop", "shop"]).ok();
    run(&["vm", "restore", "shop"]).ok();
    assert_eq!(sql("SELECT count(*) FROM kept"), "1001");
    assert_eq!(machines.guest("shop", "cat /dev/shm/fourth /dev/shm/kept"), "fourth\nlast");
    run(&["vm", "stop", "--force", "shop"]).ok();
    assert!(run(&["vm", "forget", "shop", "--keep=0"]).ok().contains("left: none."));
    assert!(run(&["vm", "restore", "shop"]).refused(1).contains("there are none"));
    run(&["vm", "delete", "shop"]).ok();
    assert!(!machines.home("shop").exists());
}
