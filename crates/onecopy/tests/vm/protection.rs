//! Machines that survive their host.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use onecopy_testing::process::{kill, wait_ended};

use crate::checkpoints::is_left_out;
use crate::directory::Ran;
use crate::machines::{MachineDirectory, until};
use crate::migration::{CHECK, Host, Hosts};
use crate::network::{Client, ECHO, interfaces, make_network};

type Side = (Host, MachineDirectory);

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
struct Writer(Arc<AtomicU64>);

impl Writer {
    fn connect(address: &str, first: u64) -> Writer {
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
    fn answered(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    #[track_caller]
    fn goes_on(&self) {
        let before = self.answered();
        until("its writes are answered", || self.answered() > before + 5);
    }
}

/// The last number that the guest has on its disk; they follow one another from this one on.
#[track_caller]
fn logged(side: &Side, first: u64) -> u64 {
    let check = format!(
        "awk '$1 >= {first} {{ if ($1 != {first} + n++) {{ print \"gap\", $1; exit }} last = $1 }} END {{ print last }}' \
         /root/log"
    );
    side.1.guest("web", &check).parse().expect("a number, and no gap")
}

/// Protects the machine of one side by the other one.
fn protect(from: &Side, to: &Side, more: &[&str]) -> Ran {
    let keys = from.0.keys.to_str().expect("UTF-8");
    let words =
        ["vm", "protect", "web", "--to", &to.0.address, "--keys", keys, "--origin", &from.0.address, "--json"];
    from.1.directory.run(&[&words, more].concat())
}

#[track_caller]
fn wait_protected(side: &Side) {
    until("it is protected", || side.1.machine("web")["protection"]["state"] == "protected");
}

/// It runs here, as it was.
#[track_caller]
fn check(side: &Side, boot: &str) {
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
    let network = "--network=bridge=br0,address=192.0.2.10/24,gateway=192.0.2.1";
    let create = ["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", network, "--start"];
    here.1.directory.run(&create).ok();
    here.1.guest("web", ECHO);
    here.1.guest("web", LOG);
    here.1.guest("web", WRITER);
    let boot = here.1.guest("web", BOOT);
    let (client, writer) = (Client::connect("192.0.2.10"), Writer::connect("192.0.2.10", 1));
    client.goes_on("all is well");

    protect(here, there, &[]).ok();
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

    // The other way round; it is given away.
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
    let died: Vec<u32> = ["keeper.lock", "qemu.pid", "disk.pid", "memory.pid", "network.pid"]
        .iter()
        .filter_map(|file| here.1.process("web", file))
        .collect();
    hosts.here.0.kill();
    died.iter().for_each(|process| kill(*process));
    died.into_iter().for_each(wait_ended);
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
