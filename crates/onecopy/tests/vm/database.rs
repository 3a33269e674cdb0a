//! A database in a machine that dies or moves: what its clients were told is there, once, over the same connections.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use onecopy_testing::process::{send, wait_ended};
use onecopy_testing::seed;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::at_work::DIFFERENCE;
use crate::checkpoints::is_left_out;
use crate::machines::{MachineDirectory, until};
use crate::migration::{Hosts, migrate, wait_whole};
use crate::network::make_network;
use crate::protection::{Side, die, protect, wait_protected};

const ADDRESS: &str = "192.0.2.10";
const CLIENTS: u64 = 4;
/// The numbers of one client; the next one's begin behind them.
const NUMBERS: u64 = 1_000_000_000;

/// psql with one connection, which commits number after number, each when the one before was answered.
struct Committer {
    psql: Child,
    first: u64,
    answered: Arc<AtomicU64>,
}

impl Committer {
    /// Called in the network of the test, which psql goes on in.
    fn connect(machines: &MachineDirectory, number: u64) -> Committer {
        let password = std::fs::read_to_string(machines.home("web").join("password")).expect("a password");
        let mut psql = Command::new("psql");
        psql.args(["-XAtq", "-h", ADDRESS, "-U", "postgres", "postgres"]).env("PGPASSWORD", password.trim());
        let mut psql = psql.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("psql runs");
        let (mut asks, answers) = (psql.stdin.take().expect("piped"), psql.stdout.take().expect("piped"));
        let (first, answered) = (number * NUMBERS + 1, Arc::new(AtomicU64::new(number * NUMBERS)));
        let counted = Arc::clone(&answered);
        std::thread::spawn(move || {
            let mut answers = BufReader::new(answers);
            for number in first.. {
                let mut line = String::new();
                let asked = writeln!(asks, "INSERT INTO answered VALUES ({number}) RETURNING number;");
                let heard = asked.and_then(|()| asks.flush()).and_then(|()| answers.read_line(&mut line));
                if heard.is_err() || line != format!("{number}\n") {
                    return;
                }
                counted.store(number, Ordering::Release);
            }
        });
        Committer { psql, first, answered }
    }

    #[track_caller]
    fn goes_on(&self, when: &str) {
        let before = self.answered.load(Ordering::Acquire);
        let what = format!("commits over a connection of before are answered: {when}");
        until(&what, || self.answered.load(Ordering::Acquire) > before + 2);
    }

    /// What was answered is there, and once; of the one that is asked for nobody knows.
    #[track_caller]
    fn check(&self, machines: &MachineDirectory) {
        let answered = self.answered.load(Ordering::Acquire);
        let last = self.first + NUMBERS - 2;
        let question = format!(
            "SELECT count(*), count(DISTINCT number), max(number) FROM answered WHERE number BETWEEN {} AND {last}",
            self.first
        );
        let told = machines.sql("web", &question);
        let told: Vec<u64> = told.split('|').map(|number| number.parse().expect("a number")).collect();
        let [count, distinct, last] = told[..] else { panic!("{told:?}") };
        assert!(last >= answered, "{answered} was answered, and {last} is the last one");
        assert_eq!((count, distinct), (last + 1 - self.first, count), "each is there once, and none is left out");
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        let _ = self.psql.kill();
        let _ = self.psql.wait();
    }
}

/// A machine with a server at work, on a bridge, and clients of its server.
fn begin(side: &Side) -> Vec<Committer> {
    let network = format!("--network=bridge=br0,address={ADDRESS}/24,gateway=192.0.2.1");
    let create = ["vm", "create", "web", "--memory=512MB", "--disk=4GB", "--postgresql", "--checkpoints", &network];
    side.1.run(&[&create[..], &["--start"]].concat());
    side.1.begin_work("web");
    side.1.sql("web", "CREATE TABLE answered (number bigint)");
    (0..CLIENTS).map(|number| Committer::connect(&side.1, number)).collect()
}

#[track_caller]
fn check(side: &Side, clients: &[Committer]) {
    clients.iter().for_each(|client| client.check(&side.1));
    assert_eq!(side.1.sql("web", DIFFERENCE), "");
}

/// A machine dies at any moment, twenty times, each fifth time with its host: no commit that a client was told of is
/// missing or there twice, no connection is lost, and memory, file system, indexes and checksums are right.
///
/// Spec: D8, nightly
#[test]
fn t53_a_database_in_a_protected_machine_loses_no_commit_and_no_connection() {
    if is_left_out("t53_a_database_in_a_protected_machine_loses_no_commit_and_no_connection") {
        return;
    }
    make_network();
    let Hosts { here, there, _keys } = Hosts::both(|_| vec!["--bridge".into(), "br0".into()]);
    let clients = begin(&here);
    let (mut sides, mut random) = ([here, there], StdRng::seed_from_u64(seed()));
    protect(&sides[0], &sides[1], &[]).ok();
    for round in 1..=20 {
        wait_protected(&sides[0]);
        clients.iter().for_each(|client| client.goes_on("it is protected"));
        std::thread::sleep(Duration::from_millis(random.random_range(0..2000)));
        if round % 5 == 0 {
            die(&mut sides[0]);
            let survivor = &sides[1].1;
            until("the source is missed", || survivor.machine("web")["protection"]["state"] == "unprotected");
            survivor.run(&["vm", "failover", "web", "--force"]);
        } else {
            let others = ["keeper.lock", "disk.pid", "memory.pid", "network.pid"];
            let with: Vec<&str> = others.into_iter().filter(|_| random.random_range(0..4) == 0).collect();
            println!("round {round}: QEMU dies with {with:?}");
            let files = with.into_iter().chain(["qemu.pid"]);
            let processes: Vec<u32> = files.map(|file| sides[0].1.process("web", file).expect("it runs")).collect();
            processes.iter().for_each(|process| assert!(send(*process, Signal::KILL)));
            processes.into_iter().for_each(wait_ended);
        }
        clients.iter().for_each(|client| client.goes_on(&format!("round {round}")));
        if round % 5 == 0 {
            let (host, machines) = &mut sides[0];
            host.start_again(machines);
        } else {
            until("it has left nothing running", || sides[0].1.machine("web")["state"] == "migrated");
        }
        sides.reverse();
        check(&sides[0], &clients);
        protect(&sides[0], &sides[1], &[]).ok();
    }
    clients.iter().for_each(|client| client.goes_on("afterwards"));
    check(&sides[0], &clients);
    sides[0].1.verify("web");
    sides[0].1.run(&["vm", "stop", "web", "--force"]);
}

/// The same of a machine that goes to another host and back, ten times, to where its storage is, too, and from there.
///
/// Spec: D6, D7, nightly
#[test]
fn t54_a_database_that_moves_loses_no_commit_and_no_connection() {
    if is_left_out("t54_a_database_that_moves_loses_no_commit_and_no_connection") {
        return;
    }
    make_network();
    let Hosts { here, there, _keys } = Hosts::both(|here| {
        let storage = here.path().parent().expect("it is in one").into();
        vec!["--bridge".into(), "br0".into(), "--shared-storage".into(), storage]
    });
    let clients = begin(&here);
    let (mut sides, mut random) = ([here, there], StdRng::seed_from_u64(seed()));
    for round in 1..=10 {
        std::thread::sleep(Duration::from_millis(random.random_range(0..2000)));
        migrate(&sides[0], &sides[1].0, &["--on-timeout=go", "--timeout-s=60"]).ok();
        sides.reverse();
        clients.iter().for_each(|client| client.goes_on(&format!("move {round}")));
        wait_whole(&sides[0].1);
        sides[1].1.run(&["vm", "delete", "web"]);
        check(&sides[0], &clients);
    }
    sides[0].1.verify("web");
    sides[0].1.run(&["vm", "stop", "web", "--force"]);
}
