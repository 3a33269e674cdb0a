//! A second host: a network namespace, a wire of 100 Mbit/s to it that can be cut.

use std::process::{Command, Output};

const RATE: &str = "100mbit";
/// Networks of tests that run at once, in whatever process, and of those that were killed.
const NUMBERS: std::ops::Range<u8> = 1..250;

pub struct Network {
    number: u8,
}

impl Network {
    pub fn make() -> Network {
        // Who makes the namespace has the number: nobody else can make it then.
        let mut numbers = NUMBERS;
        let number = numbers.find(|&number| succeeds(&format!("ip netns add {}", space_of(number))));
        let network = Network { number: number.expect("a free network: see `ip netns list`") };
        let (space, near, far) = (network.space(), network.near(), network.far());
        run(&format!("ip link add {near} type veth peer name {far} netns {space}"));
        run(&format!("ip addr add {}/24 dev {near}", network.address(1)));
        run(&format!("ip link set {near} up"));
        run(&format!("ip -n {space} addr add {}/24 dev {far}", network.address(2)));
        run(&format!("ip -n {space} link set {far} up"));
        run(&format!("ip -n {space} link set lo up"));
        run(&format!("tc qdisc add dev {near} root tbf rate {RATE} burst 64kb latency 50ms"));
        run(&format!("tc -n {space} qdisc add dev {far} root tbf rate {RATE} burst 64kb latency 50ms"));
        network
    }

    pub fn space(&self) -> String {
        space_of(self.number)
    }

    /// Pulls the wire out, on this side.
    pub fn cut(&self) {
        run(&format!("ip link set {} down", self.near()));
    }

    /// Puts it in again.
    pub fn mend(&self) {
        run(&format!("ip link set {} up", self.near()));
    }

    /// Bytes that went to the other host so far, all headers included.
    pub fn sent_bytes(&self) -> u64 {
        let counter = format!("/sys/class/net/{}/statistics/tx_bytes", self.near());
        std::fs::read_to_string(counter).expect("a counter").trim().parse().expect("a number")
    }

    fn near(&self) -> String {
        format!("oc-near-{}", self.number)
    }

    fn far(&self) -> String {
        format!("oc-far-{}", self.number)
    }

    /// Of host 1, here, or 2, there.
    pub fn address(&self, host: u8) -> String {
        format!("10.231.{}.{host}", self.number)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The link first: a namespace goes with its last process, its end of the link only then.
        let _ = Command::new("ip").args(["link", "del", &self.near()]).status();
        let _ = Command::new("ip").args(["netns", "del", &self.space()]).status();
    }
}

fn space_of(number: u8) -> String {
    format!("onecopy-test-{number}")
}

fn run(command: &str) {
    let output = output(command);
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

fn succeeds(command: &str) -> bool {
    output(command).status.success()
}

fn output(command: &str) -> Output {
    let mut words = command.split(' ');
    Command::new(words.next().expect("a program")).args(words).output().expect("it runs")
}
