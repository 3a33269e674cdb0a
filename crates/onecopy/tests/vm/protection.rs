//! Machines that survive their host.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use onecopy_testing::TestDirectory;
use onecopy_testing::mount::{FileSystem, MountedDisk};
use onecopy_testing::process::{Frozen, kill, send, wait_ended};
use rustix::process::Signal;

use crate::checkpoints::is_left_out;
use crate::directory::Ran;
use crate::machines::{MachineDirectory, until};
use crate::migration::{CHECK, Host, Hosts, STORM};
use crate::network::{Client, ECHO, interfaces, make_network};

pub type Side = (Host, MachineDirectory);

const BOOT: &str = "cat /proc/sys/kernel/random/boot_id";

/// Numbers that follow one another, in memory and on the disk, a hundred a second.
const WRITER: &str = "for p in /dev/shm /root; do setsid perl -e '$| = 1; \
                      while (1) { print ++$i, \"\\n\"; select undef, undef, undef, 0.01 }' \
                      > $p/numbers 2>/dev/null < /dev/null & done";

/// A server in the guest that writes each line to its disk, and answers with it then.
const LOG: &str = "setsid perl -MIO::Socket::INET -MIO::Handle -e '$SIG{CHLD}=\"IGNORE\"; \
     $l = IO::Socket::INET->new(LocalPort => 9, Listen => 5, ReuseAddr => 1) or die; \
     while ($c = $l->accept) { if (!fork) { open $f, \">>/root/log\"; \
     while (<$c>) { syswrite $f, $_; $f->sync; syswrite $c, $_ } exit } }' \
     </dev/null >/dev/null 2>&1 &";

/// A client that sends number after number over one connection, each when the one before was answered, until that ends.
pub struct Writer(Arc<AtomicU64>);

impl Writer {
    pub fn connect(address: &str, first: u64) -> Writer {
        let mut connected = None;
        until("the guest's server listens", || {
            connected = TcpStream::connect((address, 9)).ok();
            connected.is_some()
        });
        let (mut sends, answered) = (connected.expect("a connection"), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&answered);
        std::thread::spawn(move || {
            let mut receives = BufReader::new(sends.try_clone().expect("a copy"));
            for number in first.. {
                let mut line = String::new();
                let sent = writeln!(sends, "{number}").and_then(|()| receives.read_line(&mut line));
                if sent.is_err() || line != format!("{number}\n") {
                    return;
                }
                counted.store(number, Ordering::Release);
            }
        });
        Writer(answered)
    }

    /// The last number that was answered.
    pub fn answered(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    #[track_caller]
    pub fn goes_on(&self) {
        let before = self.answered();
        until("its writes are answered", || self.answered() > before + 5);
    }
}

/// The last number that the guest has on its disk; they follow one another from this one on.
#[track_caller]
pub fn logged(side: &Side, first: u64) -> u64 {
    let check = format!(
        "awk '$1 >= {first} {{ if ($1 != {first} + n++) {{ print \"gap\", $1; exit }} last = $1 }} \
         END {{ print last }}' /root/log"
    );
    side.1.guest("web", &check).parse().expect("a number, and no gap")
}

/// A machine on the bridge at work, which answers a [`Client`] and a [`Writer`]; of which boot it is.
#[track_caller]
pub fn make_web(side: &Side) -> String {
    let network = "--network=bridge=br0,address=192.0.2.10/24,gateway=192.0.2.1";
    let create = ["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", network, "--start"];
    side.1.directory.run(&create).ok();
    for program in [ECHO, LOG, WRITER] {
        side.1.guest("web", program);
    }
    side.1.guest("web", BOOT)
}

/// Protects the machine of one side by the other one.
pub fn protect(from: &Side, to: &Side, more: &[&str]) -> Ran {
    let keys = from.0.keys.to_str().expect("UTF-8");
    let words = ["vm", "protect", "web", "--to", &to.0.address, "--keys", keys, "--origin", &from.0.address, "--json"];
    from.1.directory.run(&[&words, more].concat())
}

#[track_caller]
pub fn wait_protected(side: &Side) {
    until("it is protected", || side.1.machine("web")["protection"]["state"] == "protected");
}

/// Its copy has come without what its host had of its disk: so many blocks of 4 KiB at least. What of it has travelled.
#[track_caller]
fn left_out(side: &Side, least: u64) -> u64 {
    let protection = &side.1.machine("web")["protection"];
    let blocks = |kind: &str| protection[kind].as_u64().expect("a number");
    let (same, sent) = (blocks("same_blocks"), blocks("data_blocks") + blocks("known_blocks"));
    assert!(same > least && sent < same, "{same} blocks were there, and {sent} have travelled");
    println!("{same} blocks were there, and {sent} have travelled");
    same
}

/// By what a side knows its copy.
fn token(side: &Side) -> Option<String> {
    let record = std::fs::read_to_string(side.1.home("web").join("arrival.json")).ok()?;
    let record: serde_json::Value = serde_json::from_str(&record).expect("JSON");
    Some(record["token"].as_str().expect("a text").to_owned())
}

/// It runs here, as it was.
#[track_caller]
pub fn check(side: &Side, boot: &str) {
    until("it runs", || side.1.machine("web")["state"] == "running");
    assert_eq!(side.1.guest("web", BOOT), boot, "it was not booted");
    assert_eq!(side.1.guest("web", CHECK), "whole");
}

/// A machine that dies goes on at its backup, with its connections, and nothing that was answered is missing; so does
/// one that is given away, and one whose host is dead, where a person says so. Where what it sends is not held, what
/// was answered since the last checkpoint is missing: the control.
///
/// Spec: D8
#[test]
fn t46_a_machine_survives_its_death_and_its_hosts_with_all_that_was_answered() {
    if is_left_out("t46_a_machine_survives_its_death_and_its_hosts_with_all_that_was_answered") {
        return;
    }
    make_network();
    let bridge = |_: &MachineDirectory| vec!["--bridge".into(), "br0".into()];
    let mut hosts = Hosts::both(bridge);
    let (here, there) = (&hosts.here, &hosts.there);
    let boot = make_web(here);
    let (client, writer) = (Client::connect("192.0.2.10"), Writer::connect("192.0.2.10", 1));
    client.goes_on("all is well");

    protect(here, there, &[]).ok();
    // As much as its image has.
    let of_image = left_out(here, 50_000);
    client.goes_on("what it sends is held until the backup has it");
    writer.goes_on();
    let refused = here.1.directory.run(&["vm", "checkpoint", "web"]).refused(1);
    assert!(refused.contains("onecopy vm unprotect web"), "{refused}");
    let refused = protect(here, there, &[]).refused(1);
    assert!(refused.contains("it is protected already"), "{refused}");
    // Its QEMU dies.
    here.1.kill("web", "qemu.pid");
    let answered = writer.answered();
    client.goes_on("it runs at its backup");
    check(there, &boot);
    assert!(logged(there, 1) >= answered, "{answered} was answered");
    writer.goes_on();
    assert_eq!(here.1.machine("web")["state"], "migrated");
    assert!(here.1.directory.run(&["vm", "start", "web"]).refused(1).contains("does not run here again"));

    // The other way round, and once more at once; it is given away.
    protect(there, here, &[]).ok();
    left_out(there, of_image);
    there.1.directory.run(&["vm", "unprotect", "web"]).ok();
    protect(there, here, &[]).ok();
    client.goes_on("it is protected by where it came from");
    let said = here.1.directory.run(&["vm", "failover", "web"]).ok();
    assert!(said.contains("web runs here"), "{said}");
    client.goes_on("it runs where it came from");
    writer.goes_on();
    check(here, &boot);
    until("it has left nothing running", || there.1.machine("web")["state"] == "migrated");

    // Its keeper dies, and then all of its host.
    protect(here, there, &[]).ok();
    here.1.kill("web", "keeper.lock");
    client.goes_on("its keeper died");
    here.1.guest("web", "true");
    wait_protected(here);
    client.goes_on("it is protected again");
    die(&mut hosts.here);
    let answered = writer.answered();
    let there = &hosts.there;
    until("the source is missed", || there.1.machine("web")["protection"]["state"] == "unprotected");
    let refused = there.1.directory.run(&["vm", "failover", "web"]).refused(1);
    assert!(refused.contains("--force") && refused.contains("s old"), "{refused}");
    there.1.directory.run(&["vm", "failover", "web", "--force"]).ok();
    client.goes_on("its host died");
    check(there, &boot);
    assert!(logged(there, 1) >= answered, "{answered} was answered");
    // Its host comes back.
    let refused = hosts.here.1.directory.run(&["vm", "start", "web"]).refused(1);
    assert!(refused.contains("does not run here again"), "{refused}");
    hosts.here.0.start_again(&hosts.here.1);

    // The control: what it sends is not held.
    let (here, there) = (&hosts.here, &hosts.there);
    protect(there, here, &["--durability=periodic", "--period-ms=20000"]).ok();
    assert_eq!(there.1.machine("web")["protection"]["durability"], "periodic");
    let listed = there.1.directory.run(&["vm", "list"]).ok();
    assert!(listed.contains("does not wait"), "{listed}");
    let writer = Writer::connect("192.0.2.10", 1_000_000);
    until("much is answered", || writer.answered() > 1_000_050);
    there.1.kill("web", "qemu.pid");
    let answered = writer.answered();
    until("it runs", || here.1.machine("web")["state"] == "running");
    let log = here.1.guest("web", "tail -n 1 /root/log; true").parse().unwrap_or(0);
    assert!(log < answered, "{log} of {answered}: nothing that was answered is missing");
    here.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
    assert_eq!(interfaces(), Vec::<String>::new());
}

/// Whoever is killed, on either side or on both: the machine goes on on one side, as it was, with its connections and
/// all that was answered, and is protected again by itself or by the same command. Only where it dies together with its
/// copy does it begin anew, from its disk, and nothing that was flushed is missing.
///
/// Spec: D8, nightly
#[test]
fn t47_a_protected_machine_goes_on_whoever_is_killed() {
    if is_left_out("t47_a_protected_machine_goes_on_whoever_is_killed") {
        return;
    }
    make_network();
    let hosts = Hosts::both(|_| vec!["--bridge".into(), "br0".into()]);
    let boot = make_web(&hosts.here);
    let (client, writer) = (Client::connect("192.0.2.10"), Writer::connect("192.0.2.10", 1));
    // By side (where it runs: 0) and file; whether it goes to the other side.
    let table: [(&[(usize, &str)], bool); 16] = [
        (&[(1, "memory.pid")], false),
        (&[(0, "network.pid")], false),
        (&[(0, "disk.pid")], false),
        (&[(0, "memory.pid")], false),
        (&[(0, "keeper.lock")], false),
        (&[(1, "keeper.lock")], false),
        (&[(1, "qemu.pid")], false),
        (&[(1, "disk.pid")], false),
        (&[(0, "qemu.pid")], true),
        (&[(0, "qemu.pid"), (0, "keeper.lock")], true),
        (&[(0, "qemu.pid"), (0, "disk.pid"), (0, "network.pid")], true),
        (&[(0, "keeper.lock"), (1, "keeper.lock")], false),
        (&[(0, "keeper.lock"), (0, "network.pid"), (1, "qemu.pid")], false),
        (&[(1, "keeper.lock"), (1, "qemu.pid"), (1, "memory.pid")], false),
        (&[(1, "keeper.lock"), (1, "memory.pid")], false),
        // Of one that has come as a copy.
        (&[(0, "memory.pid")], false),
    ];
    let mut sides = [&hosts.here, &hosts.there];
    protect(sides[0], sides[1], &[]).ok();
    for (victims, goes) in table {
        let what = format!("{victims:?}");
        println!("{what}");
        wait_protected(sides[0]);
        writer.goes_on();
        let copied = token(sides[1]);
        // At the same time.
        let named = victims.iter().filter_map(|(side, file)| sides[*side].1.process("web", file));
        let killed: Vec<u32> = named.filter(|process| send(*process, Signal::KILL)).collect();
        assert_eq!(killed.len(), victims.len(), "{what}");
        killed.into_iter().for_each(wait_ended);
        // Others go on where they were.
        let voids = [(0, "keeper.lock"), (0, "disk.pid"), (1, "keeper.lock"), (1, "qemu.pid"), (1, "memory.pid")];
        let is_void = |victim: &(usize, &str)| voids.contains(victim);
        if !goes && victims.iter().any(is_void) {
            until(&format!("it is copied anew: {what}"), || token(sides[1]).is_some_and(|now| Some(now) != copied));
        }
        let answered = writer.answered();
        client.goes_on(&what);
        writer.goes_on();
        if goes {
            until("it has left nothing running", || sides[0].1.machine("web")["state"] == "migrated");
            sides.reverse();
            protect(sides[0], sides[1], &[]).ok();
        }
        check(sides[0], &boot);
        assert!(logged(sides[0], 1) >= answered, "{what}: {answered} was answered");
        let states = sides.map(|side| side.1.machine("web")["state"].clone());
        assert!(states[0] == "running" && states[1] != "running", "{what}: {states:?}");
    }
    // One that dies just when it is given another keeper.
    wait_protected(sides[0]);
    writer.goes_on();
    let [keeper, qemu] = ["keeper.lock", "qemu.pid"].map(|file| sides[0].1.process("web", file).expect("it runs"));
    assert!(send(qemu, Signal::STOP) && send(keeper, Signal::KILL));
    wait_ended(keeper);
    // Its daemon holds the lock before, for a moment.
    let is_keepers = |process: u32| {
        let words = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == b"machine-keeper")
    };
    until("it has another keeper", || sides[0].1.process("web", "keeper.lock").is_some_and(is_keepers));
    let servers: Vec<u32> = ["disk.pid", "memory.pid", "network.pid"]
        .iter()
        .map(|file| sides[0].1.process("web", file).expect("it runs"))
        .collect();
    let answered = writer.answered();
    assert!(send(qemu, Signal::KILL));
    wait_ended(qemu);
    client.goes_on("it died before its keeper had reached it");
    writer.goes_on();
    servers.into_iter().for_each(wait_ended);
    until("it has gone", || sides[0].1.machine("web")["state"] == "migrated");
    sides.reverse();
    protect(sides[0], sides[1], &[]).ok();
    check(sides[0], &boot);
    assert!(logged(sides[0], 1) >= answered, "{answered} was answered");
    // Both at once.
    wait_protected(sides[0]);
    writer.goes_on();
    let both = sides.map(|side| side.1.process("web", "qemu.pid").expect("it runs"));
    both.iter().for_each(|process| assert!(send(*process, Signal::KILL)));
    both.into_iter().for_each(wait_ended);
    let answered = writer.answered();
    until("its keeper knows", || sides[0].1.machine("web")["state"] != "running");
    sides[0].1.directory.run(&["vm", "start", "web"]).ok();
    assert_ne!(sides[0].1.guest("web", BOOT), boot);
    assert!(logged(sides[0], 1) >= answered, "{answered} was answered, and flushed");
    // With their keepers, as when both hosts lose their power: it is the copy's host that asks then. It is protected
    // again by itself.
    wait_protected(sides[0]);
    let of = |side: &Side| ["keeper.lock", "qemu.pid"].map(|file| side.1.process("web", file).expect("it runs"));
    let all: Vec<u32> = sides.iter().flat_map(|side| of(side)).collect();
    all.iter().for_each(|process| assert!(send(*process, Signal::KILL)));
    all.into_iter().for_each(wait_ended);
    until("its copy's host has asked", || sides[0].1.machine("web")["state"] == "migrated");
    sides[0].1.directory.run(&["vm", "start", "web"]).ok();
    sides[0].1.guest("web", "true");
    sides[0].1.directory.run(&["vm", "stop", "web", "--force"]).ok();
}

/// All processes of a side's machine, which die at once.
#[track_caller]
pub fn die(side: &mut Side) {
    side.0.kill();
    let files = ["keeper.lock", "qemu.pid", "disk.pid", "memory.pid", "network.pid"];
    let died: Vec<u32> = files.iter().filter_map(|file| side.1.process("web", file)).collect();
    assert_eq!(died.len(), files.len());
    died.iter().for_each(|process| kill(*process));
    died.into_iter().for_each(wait_ended);
}

/// Where a host is told how to fence another one, a machine goes on there by itself when its host has died. Where only
/// the way there is cut nobody is fenced that is reached, and the machine runs on alone, after as long as the other
/// host might have fenced it, and is protected again when the way is there.
///
/// Spec: D8, nightly
#[test]
fn t48_a_host_that_is_fenced_has_its_machine_go_on_and_one_that_is_reached_keeps_it() {
    if is_left_out("t48_a_host_that_is_fenced_has_its_machine_go_on_and_one_that_is_reached_keeps_it") {
        return;
    }
    make_network();
    let directory = TestDirectory::new().expect("a directory");
    let log = directory.join("fenced");
    let fence = format!("echo $ONECOPY_MACHINE $ONECOPY_ORIGIN >> {}", log.display());
    let options = |_: &MachineDirectory| ["--bridge", "br0", "--fence", &fence].map(std::ffi::OsString::from).to_vec();
    let mut hosts = Hosts::both(options);
    let boot = make_web(&hosts.here);
    let (client, writer) = (Client::connect("192.0.2.10"), Writer::connect("192.0.2.10", 1));
    let refused = protect(&hosts.here, &hosts.there, &["--detection=1"]).refused(1);
    assert!(refused.contains("give 2 to 15"), "{refused}");
    protect(&hosts.here, &hosts.there, &[]).ok();
    writer.goes_on();
    let origin = hosts.here.0.address.clone();
    die(&mut hosts.here);
    let answered = writer.answered();
    client.goes_on("its host was fenced");
    let refused = hosts.here.1.directory.run(&["vm", "delete", "web"]).refused(1);
    assert!(refused.contains("onecopy vm unprotect web"), "{refused}");
    check(&hosts.there, &boot);
    assert!(logged(&hosts.there, 1) >= answered, "{answered} was answered");
    assert_eq!(std::fs::read_to_string(&log).expect("it was fenced"), format!("web {origin}\n"));

    hosts.here.0.start_again(&hosts.here.1);
    protect(&hosts.there, &hosts.here, &["--detection=12"]).ok();
    writer.goes_on();
    for (side, role) in [(&hosts.there, "primary"), (&hosts.here, "backup")] {
        side.0.tells(&[format!("onecopy_machine_protected{{server=\"web\",role=\"{role}\"}} 1")]);
        assert!(side.1.directory.run(&["vm", "delete", "web"]).refused(1).contains("web runs"));
    }
    // Its host does not answer, and its epochs come: it runs there, whatever a person says.
    let silent = Frozen::of([hosts.there.0.process()]);
    let refused = hosts.here.1.directory.run(&["vm", "failover", "web", "--force"]).refused(1);
    assert!(refused.contains("no connection within"), "{refused}");
    drop(silent);
    writer.goes_on();
    let frozen = Frozen::of([hosts.here.0.process()]);
    let since = Instant::now();
    // Each side says something every second, and misses that for as long as it was told.
    for side in [&hosts.here, &hosts.there] {
        until("it runs alone", || side.1.machine("web")["protection"]["state"] == "unprotected");
        assert!(since.elapsed() > Duration::from_secs(10), "{:?} after the last sign of life", since.elapsed());
    }
    client.goes_on("it runs alone");
    drop(frozen);
    wait_protected(&hosts.there);
    client.goes_on("it is protected again");
    check(&hosts.there, &boot);
    assert_eq!(std::fs::read_to_string(&log).expect("it is there").lines().count(), 1, "nobody else was fenced");
    hosts.there.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
    until("nothing of it is left", || !hosts.here.1.home("web").exists());
}

/// A machine that changes faster than the link carries stands until each checkpoint is there, and stays protected; what
/// it sends comes, and nothing of it is missing when it dies then.
///
/// Spec: D8, nightly
#[test]
fn t50_a_machine_that_changes_faster_than_its_copies_travel_stands_for_them() {
    if is_left_out("t50_a_machine_that_changes_faster_than_its_copies_travel_stands_for_them") {
        return;
    }
    make_network();
    let hosts = Hosts::both(|_| vec!["--bridge".into(), "br0".into()]);
    let (here, there) = (&hosts.here, &hosts.there);
    let boot = make_web(here);
    let (client, writer) = (Client::connect("192.0.2.10"), Writer::connect("192.0.2.10", 1));
    protect(here, there, &["--bandwidth=16M"]).ok();
    // Some hundred megabytes a second.
    here.1.guest("web", STORM);
    let told = || here.1.machine("web")["protection"].clone();
    until("it has stood for its copies", || {
        let told = told();
        assert_eq!(told["state"], "protected", "{told}");
        told["braked_us"].as_u64().expect("a number") > 2_000_000
    });
    client.goes_on("it stands in between");
    writer.goes_on();
    assert_eq!(told()["state"], "protected");
    here.1.kill("web", "qemu.pid");
    let answered = writer.answered();
    client.goes_on("it runs at its backup");
    check(there, &boot);
    assert!(logged(there, 1) >= answered, "{answered} was answered");
    there.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
}

/// A backup whose disk is full is none: its machine is as it was, and says why it is not protected.
///
/// Spec: D8
#[test]
fn t49_a_backup_without_room_leaves_the_machine_as_it_is() {
    if is_left_out("t49_a_backup_without_room_leaves_the_machine_as_it_is") {
        return;
    }
    make_network();
    let directory = TestDirectory::new().expect("a directory");
    let small = MountedDisk::new(FileSystem::Ext4, directory.path(), "small", 600 << 20).expect("a file system");
    let bridge = |_: &MachineDirectory| vec!["--bridge".into(), "br0".into()];
    let hosts = Hosts::both_in(bridge, Some(small.path()));
    let network = "--network=bridge=br0,address=192.0.2.10/24,gateway=192.0.2.1";
    let create = ["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", network, "--start"];
    hosts.here.1.directory.run(&create).ok();
    hosts.here.1.guest("web", ECHO);
    let client = Client::connect("192.0.2.10");
    let refused = protect(&hosts.here, &hosts.there, &[]).refused(1);
    assert!(refused.contains("No space left on device"), "{refused}");
    client.goes_on("it is not protected");
    assert!(hosts.here.1.machine("web")["protection"].is_null());
    until("nothing of it is left there", || !hosts.there.1.home("web").exists());
    hosts.here.1.directory.run(&["vm", "checkpoint", "web"]).ok();
    hosts.here.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
}
