//! Migrations of which somebody is killed: the machine goes on on one side, without having been booted.

use onecopy_testing::process::{self, send};
use rustix::process::Signal;

use crate::checkpoints::is_left_out;
use crate::machines::{MachineDirectory, until};
use crate::migration::{CHECK, Host, Hosts, order, wait_whole};

type Side = (Host, MachineDirectory);

/// What a migration tells, in its order.
const EVENTS: [&str; 6] = ["accepted", "round", "waiting", "stopped", "loaded", "given"];

/// When there is a QEMU at the other side that is not let go yet.
const QEMU_WAITS: [&str; 2] = ["waiting", "stopped"];

/// Options of one that is not to fail for a pause on a busy machine.
const GO: [&str; 2] = ["--downtime-ms=2000", "--on-timeout=go"];

/// What [`CHECK`] looks at, a hundred numbers a second.
const WRITER: &str = "for p in /dev/shm /root; do setsid perl -e '$| = 1; \
                      while (1) { print ++$i, \"\\n\"; select undef, undef, undef, 0.01 }' \
                      > $p/numbers 2>/dev/null < /dev/null & done";

const BOOT: &str = "cat /proc/sys/kernel/random/boot_id";

fn event(name: &str) -> String {
    format!("\"event\":\"{name}\"")
}

fn runs(side: &Side) -> bool {
    side.1.machine("web")["state"] == "running"
}

/// Waits until it runs on one side, and never on both; whether it is the second one.
#[track_caller]
fn settle(here: &Side, there: &Side, what: &str) -> bool {
    let mut where_it_runs = (false, false);
    until(&format!("it goes on on one side: {what}"), || {
        where_it_runs = (runs(here), runs(there));
        assert_ne!(where_it_runs, (true, true), "{what}");
        where_it_runs != (false, false)
    });
    where_it_runs.1
}

/// It is as it was: what it wrote, in memory and on its disk, has no gap.
#[track_caller]
fn check(side: &Side, boot: &str, what: &str) {
    assert_eq!(side.1.guest("web", BOOT), boot, "{what}: it was not booted");
    assert_eq!(side.1.guest("web", CHECK), "whole", "{what}");
}

/// Whoever is killed at whichever step, keepers of either side or of both, or the QEMU that waits: the machine goes on
/// on one side, by itself, and another migration finds nothing in its way.
///
/// Spec: D6, nightly
#[test]
fn t44_a_machine_whose_keepers_are_killed_at_any_step_goes_on_on_one_side() {
    if is_left_out("t44_a_machine_whose_keepers_are_killed_at_any_step_goes_on_on_one_side") {
        return;
    }
    let hosts = Hosts::with_shared_storage();
    let (here, there) = (&hosts.here, &hosts.there);
    here.1.directory.run(&["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", "--start"]).ok();
    here.1.guest("web", WRITER);
    let boot = here.1.guest("web", BOOT);
    // By side (here: 0) and file. A QEMU is there once it waits. One that dies when it is being let go is a machine
    // that has crashed.
    let victims: [&[(usize, &str)]; 4] =
        [&[(0, "keeper.lock")], &[(1, "keeper.lock")], &[(0, "keeper.lock"), (1, "keeper.lock")], &[(1, "qemu.pid")]];
    let mut went = [0, 0];
    for at in EVENTS {
        for victims in victims.iter().filter(|victims| victims[0].1 != "qemu.pid" || QEMU_WAITS.contains(&at)) {
            let what = format!("{victims:?} at {at}");
            println!("{what}");
            let mut migrating = here.1.directory.spawn(&[&order(here, &there.0)[..], &GO].concat());
            assert!(migrating.read_until(&event(at)), "{what}");
            let machines = [&here.1, &there.1];
            let named = victims.iter().filter_map(|(side, file)| machines[*side].process("web", file));
            // At the same time.
            let killed: Vec<u32> = named.filter(|process| send(*process, Signal::KILL)).collect();
            assert_eq!(killed.len(), victims.len(), "{what}");
            killed.into_iter().for_each(process::wait_ended);
            while !migrating.line().is_empty() {}
            drop(migrating);
            let is_there = settle(here, there, &what);
            went[usize::from(is_there)] += 1;
            assert!(!is_there || at == "given" || at == "loaded", "{what}: it had not been given away");
            check(if is_there { there } else { here }, &boot, &what);
            if is_there {
                wait_whole(&there.1);
                until("what it has left here is out of the way", || {
                    there.1.directory.run(&[&order(there, &here.0)[..], &GO].concat()).code == Some(0)
                });
                check(here, &boot, &what);
                wait_whole(&here.1);
            } else {
                until("nothing of it is left there", || !there.1.home("web").exists());
            }
        }
    }
    assert!(went[0] > EVENTS.len() && went[1] > 0, "{went:?}");
}

/// Where a host is dead for good a person decides, and is asked to say that it is: before that neither side lets the
/// machine go, and afterwards the other one has it as it was.
///
/// Spec: D6, nightly
#[test]
fn t45_a_person_decides_where_a_machine_goes_on_whose_other_host_is_dead() {
    if is_left_out("t45_a_person_decides_where_a_machine_goes_on_whose_other_host_is_dead") {
        return;
    }
    let mut hosts = Hosts::with_shared_storage();
    hosts
        .here
        .1
        .directory
        .run(&["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", "--start"])
        .ok();
    hosts.here.1.guest("web", WRITER);
    let boot = hosts.here.1.guest("web", BOOT);
    // It is given away, and nobody there hears that; then one of the hosts is no more.
    let give = |hosts: &mut Hosts, dies_here: bool| {
        let (here, there) = (&mut hosts.here, &mut hosts.there);
        let mut migrating = here.1.directory.spawn(&[&order(here, &there.0)[..], &GO].concat());
        assert!(migrating.read_until(&event("loaded")));
        let keeper = there.1.process("web", "keeper.lock").expect("it has come");
        send(keeper, Signal::STOP);
        assert!(migrating.read_until(&event("given")));
        let dead = if dies_here { here } else { there };
        dead.0.kill();
        for file in ["keeper.lock", "qemu.pid"] {
            dead.1.kill("web", file);
        }
        process::kill(keeper);
    };
    let say = |side: &Side, words: &[&str]| side.1.directory.run(&[&["vm", "migrate", "web"], words].concat());

    give(&mut hosts, false);
    let (here, there) = (&hosts.here, &mut hosts.there);
    until("it is known that nobody answers there", || here.1.machine("web")["state"] == "migrated");
    let refused = say(here, &["--abandon"]).refused(1);
    assert!(refused.contains("--force") && !runs(here), "{refused}");
    let refused = say(here, &["--resume"]).refused(1);
    assert!(!refused.contains("--force") && !runs(here), "nobody runs it there: {refused}");
    say(here, &["--abandon", "--force"]).ok();
    until("it runs here", || runs(here));
    check(here, &boot, "taken back");
    there.0.start_again(&there.1);
    until("nothing of it is left there", || !there.1.home("web").exists());

    give(&mut hosts, true);
    let there = &hosts.there;
    until("another keeper looks after it", || there.1.process("web", "keeper.lock").is_some());
    let refused = say(there, &["--resume"]).refused(1);
    assert!(refused.contains("--force") && !runs(there), "{refused}");
    say(there, &["--resume", "--force"]).ok();
    until("it runs there", || runs(there));
    check(there, &boot, "let go");
    there.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
}
