//! Machines that go on from where another one was, beside it.

use onecopy_testing::{ControlGroup, skip};

use crate::checkpoints::is_left_out;
use crate::machines::{MachineDirectory, until};

/// Kilobytes of memory that are a process's alone.
fn private_kib(process: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).expect("it lives");
    let figures = rollup.lines().filter(|line| line.starts_with("Private_") && !line.starts_with("Private_Hugetlb"));
    figures.map(|line| line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0)).sum()
}

/// Whether the kernel may merge what a process has changed of frozen memory; see proc(5), `VmFlags`.
pub fn is_mergeable(process: u32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{process}/smaps")).expect("it lives");
    let frozen = maps.lines().skip_while(|line| !line.contains("/frozen."));
    frozen.filter_map(|line| line.strip_prefix("VmFlags:")).next().is_some_and(|flags| flags.contains(" mg"))
}

/// A fork has all that its parent had in memory and on its disk; from then on neither sees what the other one does, nor
/// does another fork. They share in memory what none has changed. The parent may end.
///
/// Spec: D6, C5
#[test]
fn t19_forks_go_on_from_where_their_parent_is_and_see_nothing_of_each_other() {
    if is_left_out("t19_forks_go_on_from_where_their_parent_is_and_see_nothing_of_each_other") {
        return;
    }
    let machines = MachineDirectory::new();
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    run(&["vm", "create", "first", "--memory=512MB", "--disk=4GB", "--checkpoints", "--start"]).ok();
    let all = "md5sum < /dev/shm/filled; cat /dev/shm/kept /root/kept; cut -d' ' -f1 /proc/1/stat; cat /tmp/boot";
    machines
        .guest("first", "cp /proc/sys/kernel/random/boot_id /tmp/boot; head -c 150M /dev/urandom > /dev/shm/filled");
    machines.guest("first", "echo one | tee /dev/shm/kept > /root/kept");
    let before = machines.guest("first", all);

    // It needs a tenth of that at once, and 64 MiB.
    match ControlGroup::make() {
        Ok(group) => {
            tokio::runtime::Runtime::new().expect("a runtime").block_on(group.limit(96 << 20)).expect("a limit");
            let complaint = machines.directory.run_in(group.directory(), &["vm", "fork", "first", "second"]).refused(1);
            assert!(complaint.contains("forks of first need") && !machines.home("second").exists(), "{complaint}");
        }
        Err(error) => skip("t19_forks_in_little_memory", &error.to_string()),
    }

    // What a making that was broken off has left keeps nobody, and can be deleted.
    std::fs::create_dir(machines.home("left")).expect("a directory");
    run(&["vm", "delete", "left"]).ok();
    assert!(!machines.home("left").exists());
    assert!(run(&["vm", "delete", "left"]).refused(3).contains("there are: first"));

    run(&["vm", "fork", "first", "second"]).ok();
    machines.configure("first", "merge_equal_pages = true");
    run(&["vm", "fork", "first", "third", "--checkpoint=1"]).ok();
    let mergeable = ["second", "third"].map(|fork| is_mergeable(machines.process(fork, "qemu.pid").expect("it runs")));
    assert_eq!(mergeable, [false, true], "only where that is wished for");
    for fork in ["second", "third"] {
        assert_eq!((machines.guest(fork, all), machines.guest(fork, "hostname")), (before.clone(), fork.to_owned()));
    }
    // They have names of their own before they are heard, and their cables since.
    let numbers = ["first", "second", "third"].map(|name| machines.guest(name, "cat /etc/machine-id"));
    assert!(numbers[0] != numbers[1] && numbers[1] != numbers[2] && numbers[0] != numbers[2], "{numbers:?}");
    for fork in ["second", "third"] {
        assert_eq!(machines.guest(fork, "cat /sys/class/net/eth0/carrier"), "1", "{fork}");
    }
    // The two are of one instant, and draw other random numbers.
    let drawn = ["first", "second", "third"].map(|name| machines.guest(name, "head -c 16 /dev/urandom | md5sum"));
    assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2] && drawn[0] != drawn[2], "{drawn:?}");
    let alone = machines.process("third", "qemu.pid").map(private_kib).expect("QEMU runs");
    assert!(alone < 150 << 10, "what was filled is shared: {alone} kB are its own");

    for name in ["first", "second", "third"] {
        machines.guest(name, &format!("echo {name} | tee /dev/shm/kept > /root/kept; sync"));
    }
    for name in ["first", "second", "third"] {
        assert_eq!(machines.guest(name, "cat /dev/shm/kept /root/kept"), format!("{name}\n{name}"));
    }
    let complaint = run(&["vm", "checkpoint", "second"]).refused(1);
    assert!(complaint.contains("shares its memory with other forks"), "{complaint}");

    // What a fork stands on stays when it is forgotten, also while the fork is at rest.
    run(&["vm", "stop", "third"]).ok();
    for _ in 0..2 {
        run(&["vm", "checkpoint", "first", "--keep=1"]).ok();
    }
    let checkpoints = run(&["vm", "checkpoints", "first", "--json"]).ok();
    assert!(!checkpoints.contains("\"number\":1,"), "{checkpoints}");
    let complaint = run(&["vm", "fork", "first", "sixth", "--checkpoint=1"]).refused(1);
    assert!(complaint.contains("there is no 1; there are: "), "{complaint}");
    assert!(!machines.home("sixth").exists());
    let frozen = std::fs::read_dir(machines.home("first"))
        .expect("read")
        .filter(|entry| entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("frozen.")));
    assert_eq!(frozen.count(), 0, "who has it mapped keeps it");

    // Its forks need the parent's disk and not the parent.
    run(&["vm", "stop", "first", "--force"]).ok();
    assert!(run(&["vm", "delete", "first"]).refused(1).contains("the disks of second, third lie over that of first"));
    assert_eq!(machines.guest("second", "md5sum < /dev/shm/filled"), before.lines().next().unwrap_or_default());
    // A fork's memory is its own from its next start on.
    run(&["vm", "start", "third"]).ok();
    assert_eq!(machines.guest("third", "cat /root/kept; ls /dev/shm"), "third");
    // Of one that has memory of its own, others can be made.
    run(&["vm", "fork", "third", "fourth", "--independent"]).ok();
    machines.guest("fourth", "echo fourth > /dev/shm/kept");
    std::thread::scope(|scope| {
        for name in ["fifth", "sixth"] {
            scope.spawn(move || run(&["vm", "fork", "fourth", name]).ok());
        }
    });
    for name in ["fifth", "sixth"] {
        assert_eq!(machines.guest(name, "cat /dev/shm/kept /root/kept"), "fourth\nthird");
    }
    // One that cannot take its identity is not heard, and nobody goes on from it, until it can.
    machines.guest("fourth", "chattr +i /etc/hostname");
    let complaint = run(&["vm", "fork", "fourth", "seventh", "--independent"]).refused(1);
    assert!(complaint.contains("take its own identity; its card is unplugged"), "{complaint}");
    let complaint = run(&["vm", "checkpoint", "seventh"]).refused(1);
    assert!(complaint.contains("has not got its own identity yet"), "{complaint}");
    assert_ne!(machines.guest("seventh", "cat /sys/class/net/eth0/carrier || true"), "1");
    machines.guest("seventh", "chattr -i /etc/hostname");
    until("it is heard", || machines.guest("seventh", "cat /sys/class/net/eth0/carrier || true") == "1");
    assert_eq!(machines.guest("seventh", "hostname"), "seventh");
    run(&["vm", "checkpoint", "seventh"]).ok();
    for name in ["seventh", "sixth", "fifth", "fourth", "third", "second", "first"] {
        run(&["vm", "stop", name, "--force"]).ok();
        run(&["vm", "delete", name]).ok();
    }
    assert_eq!(machines.processes(), Vec::<u32>::new());
}
