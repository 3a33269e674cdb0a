//! Machines on a bridge, in a network namespace of the test's own.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::thread::UnshareFlags;
use serde_json::Value;

use crate::machines::{MachineDirectory, until};

/// A server in the guest that sends back what it gets, for many clients.
pub const ECHO: &str = "setsid perl -MIO::Socket::INET -e '$SIG{CHLD}=\"IGNORE\"; \
     $l = IO::Socket::INET->new(LocalPort => 7, Listen => 5, ReuseAddr => 1) or die; \
     while ($c = $l->accept) { if (!fork) { while (sysread $c, $b, 65536) { syswrite $c, $b } exit } }' \
     </dev/null >/dev/null 2>&1 &";

/// Puts this thread, and all that it starts, into a namespace with a bridge.
pub fn make_network() {
    // SAFETY: nothing in this thread uses the network of before.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.expect("root may");
    for arguments in ["link set lo up", "link add br0 type bridge", "addr add 192.0.2.1/24 dev br0", "link set br0 up"]
    {
        let ran = Command::new("ip").args(arguments.split(' ')).status().expect("ip runs");
        assert!(ran.success(), "ip {arguments}");
    }
}

/// Names of the machines' interfaces in this namespace.
pub fn interfaces() -> Vec<String> {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").expect("read");
    let names = table.lines().filter_map(|line| line.trim().split_once(':').map(|(name, _)| name.to_owned()));
    names.filter(|name| name.starts_with("oc")).collect()
}

/// A client that sends line after line over one connection, each when the one before has come back.
pub struct Client(Arc<AtomicU64>);

impl Client {
    pub fn connect(address: &str) -> Client {
        let place = (address.to_owned(), 7);
        let mut connected = None;
        until("the guest's server listens", || {
            connected = TcpStream::connect((place.0.as_str(), place.1)).ok();
            connected.is_some()
        });
        let (mut sends, echoes) = (connected.expect("a connection"), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&echoes);
        std::thread::spawn(move || {
            let mut receives = BufReader::new(sends.try_clone().expect("a copy"));
            for number in 0u64.. {
                writeln!(sends, "{number}").expect("the connection goes on");
                let mut line = String::new();
                receives.read_line(&mut line).expect("the connection goes on");
                assert_eq!(line, format!("{number}\n"));
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Client(echoes)
    }

    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    #[track_caller]
    pub fn goes_on(&self, when: &str) {
        let before = self.count();
        until(&format!("its connection goes on: {when}"), || self.count() > before + 2);
    }
}

/// What the network holder of the first machine answers.
fn ask(machines: &MachineDirectory, request: &str) -> Value {
    let mut stream = UnixStream::connect(machines.home("first").join("network.sock")).expect("it listens");
    writeln!(stream, "{request}").expect("it reads");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("it answers");
    let answer: Value = serde_json::from_str(&line).expect("JSON");
    assert!(answer.get("error").is_none(), "{request}: {answer}");
    answer["ok"].clone()
}

/// One connection lives through all of it; what is held waits, also over the death of who holds it. A fork has its own
/// card and address before the network hears of it.
///
/// Spec: D7, A3
#[test]
fn e9_a_machine_on_a_bridge_keeps_its_connections_and_a_fork_has_its_own_addresses() {
    if crate::checkpoints::is_left_out(
        "e9_a_machine_on_a_bridge_keeps_its_connections_and_a_fork_has_its_own_addresses",
    ) {
        return;
    }
    make_network();
    let machines = MachineDirectory::new();
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    let network = "--network=bridge=br0,address=192.0.2.10/24,gateway=192.0.2.1";
    run(&["vm", "create", "first", "--memory=512MB", "--disk=4GB", "--checkpoints", network, "--start"]).ok();
    machines.guest("first", ECHO);
    let client = Client::connect("192.0.2.10");
    client.goes_on("all is well");
    assert!(run(&["vm", "list"]).ok().contains("192.0.2.10/24 on br0"));
    run(&["vm", "pause", "first"]).ok();
    run(&["vm", "resume", "first"]).ok();
    client.goes_on("it stood");
    machines.kill("first", "network.pid");
    until("another one holds", || machines.machine("first")["network"]["restarts"] == 1);
    client.goes_on("its holder died");
    run(&["vm", "checkpoint", "first"]).ok();
    client.goes_on("a checkpoint was taken");
    let named = interfaces();
    machines.kill("first", "keeper.lock");
    machines.guest("first", "true");
    machines.kill("first", "network.pid");
    client.goes_on("keeper and holder died, one after the other");
    machines.kill("first", "keeper.lock");
    machines.kill("first", "network.pid");
    assert_eq!(interfaces(), Vec::<String>::new(), "it goes with those who have it");
    machines.guest("first", "true");
    assert_eq!(interfaces(), named);
    client.goes_on("both died at once");

    ask(&machines, r#"{"command":"hold","enabled":true}"#);
    until("its answers wait", || ask(&machines, r#"{"command":"info"}"#)["held_frames"].as_u64() > Some(0));
    let waiting = client.count();
    let held = ask(&machines, r#"{"command":"info"}"#)["held_frames"].as_u64();
    machines.kill("first", "network.pid");
    until("another one holds", || machines.machine("first")["network"]["statistics"]["connected"] == true);
    let told = ask(&machines, r#"{"command":"info"}"#);
    assert!(told["held_frames"].as_u64() >= held && told["holding"] == true && told["sent_frames"].is_u64(), "{told}");
    assert_eq!(client.count(), waiting, "what is held has not been sent");
    let taken = run(&["vm", "checkpoint", "first", "--json"]).ok();
    let taken: Value = serde_json::from_str(&taken).expect("JSON");
    let epoch = taken["network_epoch"].as_u64().expect("it ends an epoch of the network");
    assert_eq!(client.count(), waiting, "nothing goes before it is released");
    let release = |epoch: u64| ask(&machines, &format!(r#"{{"command":"release","epoch":{epoch}}}"#));
    release(epoch);
    assert!(ask(&machines, r#"{"command":"info"}"#)["freed_frames"].as_u64() >= held, "what was held is sent");
    // What was in hand of the holder that died is sent anew by either end, and is of a later epoch.
    until("its connection goes on, epoch by epoch", || {
        release(ask(&machines, r#"{"command":"cut"}"#)["epoch"].as_u64().expect("a number"));
        client.count() > waiting + 2
    });
    ask(&machines, r#"{"command":"hold","enabled":false}"#);
    client.goes_on("nothing is held any more");

    let complaint = run(&["vm", "fork", "first", "second"]).refused(1);
    assert!(complaint.contains("--address"), "{complaint}");
    run(&["vm", "fork", "first", "second", "--address=192.0.2.11/24"]).ok();
    let second = Client::connect("192.0.2.11");
    second.goes_on("the fork has its own address");
    client.goes_on("its parent has its own still");
    let card = |name: &str| machines.machine(name)["network"]["mac"].clone();
    assert_ne!(card("first"), card("second"));
    assert_eq!(machines.guest("second", "cat /sys/class/net/eth0/address"), card("second").as_str().expect("a text"));
    for name in ["first", "second"] {
        run(&["vm", "stop", name, "--force"]).ok();
    }
    assert_eq!((interfaces(), machines.processes()), (Vec::new(), Vec::new()));
}
