//! A person's own machine, from its making to its removal.

use onecopy_testing::Frozen;

use crate::machines::{MachineDirectory, until};

/// A machine outlives its keeper and its disk's process: both are replaced while the guest goes on, and nothing that
/// was synchronized is lost; `exec` passes input, outputs and exit code.
///
/// Spec: A3, A7, D5
#[test]
fn v24_a_machine_outlives_what_looks_after_it() {
    let machines = MachineDirectory::deep();
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    run(&["vm", "create", "web", "--memory=512MB", "--disk=4GB", "--processors=2"]).ok();
    machines.configure("web", "silent_after_s = 3");
    run(&["vm", "start", "web"]).ok();
    let machine = machines.process("web", "qemu.pid").expect("QEMU runs");
    assert!(run(&["vm", "delete", "web"]).refused(1).contains("vm stop web"));

    // Input, outputs and exit code are the program's; the guest has the machine's name and the disk its size.
    let ran = run(&["vm", "exec", "web", "--", "sh", "-c", "echo out; echo complaint >&2; exit 7"]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(7), "out\n", "complaint\n"));
    assert_eq!(machines.guest("web", "hostname"), "web");
    assert!(run(&["vm", "exec", "web", "--", "nonexistent-program"]).refused(1).contains("nonexistent-program"));
    let root_mib: u64 = machines.guest("web", "df -m / | tail -1 | awk '{print $2}'").parse().expect("a number");
    assert!(root_mib > 3500, "the root file system has grown: {root_mib} MiB");
    assert_eq!(
        machines.guest("web", "nproc; ls /sys/block/vda/mq"),
        "2\n0\n1",
        "each processor has a queue of its own"
    );
    assert!(run(&["vm", "console", "web"]).ok().contains("onecopy-guest"));

    // Whoever dies of the two that look after it, the guest goes on, and what it had synchronized is there.
    machines.guest("web", "echo kept > /root/kept; sync");
    machines.kill("web", "keeper.lock");
    assert_eq!(machines.machine("web")["state"], "unkept");
    assert_eq!(machines.guest("web", "cat /root/kept"), "kept");
    let disk = machines.kill("web", "disk.pid");
    assert_eq!(machines.guest("web", "sync; echo 3 > /proc/sys/vm/drop_caches; cat /root/kept"), "kept");
    until("the disk's new process is known", || machines.machine("web")["disk_restarts"] == 1);
    assert_ne!(machines.machine("web")["disk_process_id"], disk);
    assert_eq!(machines.process("web", "qemu.pid"), Some(machine), "the guest was never booted again");

    // A guest that does not run says nothing: that is told, and nothing else follows.
    let unresponsive = Frozen::of([machine]);
    until("it is unresponsive", || machines.machine("web")["state"] == "unresponsive");
    drop(unresponsive);
    until("it answers", || machines.machine("web")["state"] == "running");
    assert_eq!(machines.guest("web", "cat /root/kept"), "kept");

    // One that is made to stand stands also when its keeper is another one, until somebody lets it go on.
    run(&["vm", "pause", "web"]).ok();
    machines.kill("web", "keeper.lock");
    assert!(run(&["vm", "start", "web"]).refused(1).contains("onecopy vm resume web"));
    assert_eq!(machines.machine("web")["state"], "paused");
    run(&["vm", "resume", "web"]).ok();
    assert_eq!(machines.guest("web", "cat /root/kept"), "kept");
    assert_eq!(machines.process("web", "qemu.pid"), Some(machine), "the guest was never booted again");

    run(&["vm", "stop", "web"]).ok();
    let stopped = machines.machine("web");
    assert_eq!((&stopped["state"], &stopped["end"]["clean"]), (&"stopped".into(), &true.into()));
    assert_eq!(machines.processes(), [0; 0]);
    run(&["vm", "delete", "web"]).ok();
}

/// A machine whose guest does not answer for a while although QEMU runs it is reported as unresponsive, and ended only
/// where its file says so.
///
/// Spec: A7
#[test]
fn v25_a_guest_that_has_become_silent_is_ended_where_that_is_wished_for() {
    let machines = MachineDirectory::new();
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    run(&["vm", "create", "web", "--memory=512MB", "--disk=4GB"]).ok();
    machines.configure("web", "silent_after_s = 45\nend_when_silent = true");
    run(&["vm", "start", "web"]).ok();
    // The agent stands after it has answered.
    machines.guest("web", "(sleep 1; kill -STOP $(pidof guest-agent)) >/dev/null 2>&1 </dev/null &");
    until("it is ended", || machines.machine("web")["state"] == "stopped");
    let end = &machines.machine("web")["end"];
    assert_eq!(end["clean"], false, "{end}");
    assert!(end["reason"].as_str().expect("a reason").contains("did not answer for 45 s"), "{end}");
    // Its keeper goes last, a moment after nobody can ask it any more.
    until("nothing of it is left", || machines.processes().is_empty());
}
