//! Two hosts of a protected machine that have lost each other, and etcd, which decides where it goes on.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use onecopy_testing::{EtcdServer, Frozen};

use crate::checkpoints::is_left_out;
use crate::machines::{MachineDirectory, until};
use crate::migration::Hosts;
use crate::network::{Client, make_network};
use crate::protection::{Side, Writer, check, die, logged, make_web, protect, wait_protected};

/// How long nobody may be answered where nothing is decided: longer than either side takes to miss the other one.
const UNDECIDED: Duration = Duration::from_secs(12);

fn keeper(side: &Side) -> u32 {
    side.1.process("web", "keeper.lock").expect("it has a keeper")
}

/// The way between the hosts is cut: nothing of either comes to the other one.
fn cut(sides: [&Side; 2]) -> Frozen {
    Frozen::of(sides.map(|side| side.0.process()))
}

/// Whichever host etcd hears of first has the machine go on, with its connections and all that was answered; the other
/// one ends its own, of which nothing was heard since. Where neither the other host nor etcd answers nobody goes on.
///
/// Spec: D8, nightly
#[test]
fn t55_hosts_that_have_lost_each_other_agree_by_etcd_on_one() {
    if is_left_out("t55_hosts_that_have_lost_each_other_agree_by_etcd_on_one") {
        return;
    }
    make_network();
    let (etcd, another) = (EtcdServer::start(), EtcdServer::start());
    let options = |_: &MachineDirectory| ["--bridge", "br0", "--etcd", etcd.url()].map(OsString::from).to_vec();
    let mut hosts = Hosts::both(options);
    let boot = make_web(&hosts.here);
    let (client, writer) = (Client::connect("192.0.2.10"), Writer::connect("192.0.2.10", 1));
    let by_etcd = ["--etcd", etcd.url()];
    for (options, reason) in [
        (&["--etcd", another.url()][..], "is another one than that of its host"),
        (&["--etcd=http://127.0.0.1:1"], "etcd does not answer"),
        (&["--etcd", etcd.url(), "--durability=periodic"], "leave out --etcd or --durability periodic"),
    ] {
        let refused = protect(&hosts.here, &hosts.there, options).refused(1);
        assert!(refused.contains(reason), "{refused}");
    }
    drop(another);

    // Its host dies: nobody says so but etcd.
    protect(&hosts.here, &hosts.there, &by_etcd).ok();
    writer.goes_on();
    die(&mut hosts.here);
    let (answered, died) = (writer.answered(), Instant::now());
    client.goes_on("its host died");
    println!("its host died: its connection went on after {:.1} s", died.elapsed().as_secs_f64());
    check(&hosts.there, &boot);
    assert!(logged(&hosts.there, 1) >= answered, "{answered} was answered");
    hosts.here.0.start_again(&hosts.here.1);
    let refused = hosts.here.1.directory.run(&["vm", "start", "web"]).refused(1);
    assert!(refused.contains("does not run here again"), "{refused}");

    // The way is cut, and its own keeper asks later than its copy's: both run, and what the old one sends is not heard.
    let (from, to) = (&hosts.there, &hosts.here);
    protect(from, to, &by_etcd).ok();
    writer.goes_on();
    let late = Frozen::of([keeper(from)]);
    let way = cut([from, to]);
    let answered = writer.answered();
    client.goes_on("etcd has decided for its copy");
    writer.goes_on();
    assert!(from.1.process("web", "qemu.pid").is_some(), "nobody has told it");
    drop(late);
    until("it stands", || from.1.machine("web")["state"] == "migrated");
    assert!(from.1.process("web", "qemu.pid").is_some(), "nobody has said what has become of its copy");
    drop(way);
    until("it has left nothing running", || from.1.process("web", "qemu.pid").is_none());
    check(to, &boot);
    assert!(logged(to, 1) >= answered, "{answered} was answered");
    client.goes_on("it runs at its backup");

    // The same, and its copy's keeper asks later.
    let (from, to) = (&hosts.here, &hosts.there);
    protect(from, to, &by_etcd).ok();
    writer.goes_on();
    let late = Frozen::of([keeper(to)]);
    let way = cut([from, to]);
    until("it runs alone", || from.1.machine("web")["protection"]["state"] == "unprotected");
    client.goes_on("etcd has decided for it");
    drop(late);
    until("its copy is given up", || to.1.process("web", "qemu.pid").is_none());
    drop(way);
    wait_protected(from);
    client.goes_on("it is protected again");
    check(from, &boot);

    // Nobody decides: what was held goes once somebody does.
    let silent = Frozen::of([etcd.process()]);
    let way = cut([from, to]);
    until("its answers are held", || {
        let told = from.1.machine("web")["protection"].clone();
        told["reason"].as_str().is_some_and(|reason| reason.contains("onecopy vm unprotect web --force"))
    });
    let answered = (client.count(), writer.answered());
    std::thread::sleep(UNDECIDED);
    assert_eq!((client.count(), writer.answered()), answered, "nobody may be answered");
    let refused = to.1.directory.run(&["vm", "failover", "web"]).refused(1);
    assert!(refused.contains("--force"), "{refused}");
    drop(silent);
    client.goes_on("etcd has decided");
    writer.goes_on();
    drop(way);
    let mut sides = [from, to];
    until("the other one has ended its own", || {
        sides.sort_by_key(|side| side.1.machine("web")["state"] != "running");
        let loser = sides[1];
        loser.1.process("web", "qemu.pid").is_none() || loser.1.machine("web")["protection"]["role"] == "backup"
    });
    let [here, there] = sides;
    assert_eq!(here.1.machine("web")["state"], "running");
    check(here, &boot);
    assert!(logged(here, 1) >= answered.1, "{} was answered", answered.1);

    // A person decides without etcd.
    if here.1.machine("web")["protection"].is_null() {
        protect(here, there, &by_etcd).ok();
    }
    wait_protected(here);
    let (silent, way) = (Frozen::of([etcd.process()]), cut([here, there]));
    until("its answers are held", || {
        here.1.machine("web")["protection"]["reason"].as_str().is_some_and(|reason| reason.contains("--force"))
    });
    there.1.directory.run(&["vm", "migrate", "web", "--abandon"]).ok();
    here.1.directory.run(&["vm", "unprotect", "web", "--force"]).ok();
    client.goes_on("a person has decided");
    drop((way, silent));
    protect(here, there, &by_etcd).ok();

    // It is switched off while nobody can decide: that is seen to by whoever is there first, and by both alike.
    let (silent, way) = (Frozen::of([etcd.process()]), cut([here, there]));
    here.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
    assert_eq!(here.1.machine("web")["in_doubt"], true);
    let listed = here.1.directory.run(&["vm", "list"]).ok();
    assert!(listed.contains("not known here on which host"), "{listed}");
    let refused = here.1.directory.run(&["vm", "start", "web"]).refused(1);
    assert!(refused.contains("onecopy vm unprotect web --force"), "{refused}");
    drop((silent, way));
    let record = here.1.home("web").join("migration.json");
    until("it is decided, and what came of it known", || {
        let record = std::fs::read_to_string(&record).expect("it was protected");
        record.contains(r#""state":"kept""#) || record.contains(r#""state":"gone""#)
    });
    assert_eq!(here.1.machine("web")["in_doubt"], false);
    let goes_on = here.1.machine("web")["state"] == "migrated";
    until("that is done", || there.1.process("web", "qemu.pid").is_some() == goes_on);
    there.1.directory.run(&["vm", "stop", "web", "--force"]);
}
