//! Machines that go to another host while they run.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use onecopy_machine::migration::MigrationResult;
use onecopy_testing::TestDirectory;
use onecopy_testing::process::{kill, send};
use rustix::process::Signal;

use crate::checkpoints::is_left_out;
use crate::directory::page_of;
use crate::machines::{MachineDirectory, until};
use crate::network::{Client, ECHO, interfaces, make_network};

const PROGRAM: &str = env!("CARGO_BIN_EXE_onecopy");

/// `onecopy host` for the machines of a directory; killed when dropped.
pub struct Host {
    child: Child,
    pub address: String,
    /// Where it tells of its machines.
    page: String,
    pub keys: PathBuf,
    more: Vec<OsString>,
}

impl Host {
    fn start(keys: &Path, machines: &MachineDirectory, more: &[OsString]) -> Host {
        let mut command = Command::new(PROGRAM);
        command.args(["host", "--listen", "127.0.0.1:0", "--keys"]).arg(keys).arg("--machines").arg(machines.path());
        command.args(["--metrics-listen", "127.0.0.1:0"]).args(more);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("run onecopy host");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it says where it listens");
        let [address, page] = ["served on ", "Metrics are on "].map(|word| {
            let behind = line.split_once(word).expect("it says where").1;
            behind.split_once([' ', '\n']).expect("an end").0.trim_end_matches('.').to_owned()
        });
        Host { child, address, page, keys: keys.to_owned(), more: more.to_owned() }
    }

    /// Another one, on another port, after this one was killed.
    pub fn start_again(&mut self, machines: &MachineDirectory) {
        self.kill();
        *self = Host::start(&self.keys, machines, &self.more);
    }

    /// Its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        kill(self.child.id());
        let _ = self.child.wait();
    }

    /// What it tells of its machine.
    #[track_caller]
    pub fn tells(&self, samples: &[String]) {
        let metrics = page_of(&self.page, "/metrics").1;
        for sample in samples {
            assert!(metrics.lines().any(|line| line == sample), "{sample}: {metrics}");
        }
        let guide = include_str!("../../../../docs/guide/metrics.md");
        for name in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
            assert!(guide.contains(name), "the guide does not name the metric {name}");
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Two hosts of one authority, each with machines of its own.
pub struct Hosts {
    pub _keys: TestDirectory,
    pub here: (Host, MachineDirectory),
    pub there: (Host, MachineDirectory),
}

impl Hosts {
    /// The second one has the storage of the first one, too.
    pub fn with_shared_storage() -> Hosts {
        // The directory of its machines is made with the first of them.
        Hosts::new(|here| vec!["--shared-storage".into(), here.path().parent().expect("it is in one").into()])
    }

    /// Both have the same options.
    pub fn both(more: impl Fn(&MachineDirectory) -> Vec<OsString>) -> Hosts {
        Hosts::both_in(more, None)
    }

    /// The second one's machines are in this place.
    pub fn both_in(more: impl Fn(&MachineDirectory) -> Vec<OsString>, there: Option<&Path>) -> Hosts {
        let mut hosts = Hosts::new_in(&more, there);
        hosts.here.0.more = more(&hosts.here.1);
        hosts.here.0.start_again(&hosts.here.1);
        hosts
    }

    /// `more`: options of the second one, by the first one's machines.
    fn new(more: impl FnOnce(&MachineDirectory) -> Vec<OsString>) -> Hosts {
        Hosts::new_in(more, None)
    }

    fn new_in(more: impl FnOnce(&MachineDirectory) -> Vec<OsString>, there: Option<&Path>) -> Hosts {
        let keys = TestDirectory::new().expect("a directory");
        let authority = keys.join("ca");
        let host = |name: &str, more: &[OsString], place: Option<&Path>| {
            let machines = place.map_or_else(MachineDirectory::new, MachineDirectory::within);
            let ca = authority.to_str().expect("UTF-8");
            machines.directory.run(&["host", "keys", "--ca", ca, "--name", name, "--address", "127.0.0.1"]).ok();
            (Host::start(&authority.join(name), &machines, more), machines)
        };
        let here = host("here", &[], None);
        let there = host("there", &more(&here.1), there);
        Hosts { here, there, _keys: keys }
    }
}

/// Sends a machine; what it says.
pub fn migrate(from: &(Host, MachineDirectory), to: &Host, more: &[&str]) -> crate::directory::Ran {
    from.1.directory.run(&[&order(from, to)[..], more].concat())
}

/// The words by which a machine is sent.
pub fn order<'a>(from: &'a (Host, MachineDirectory), to: &'a Host) -> [&'a str; 10] {
    let keys = from.0.keys.to_str().expect("UTF-8");
    ["vm", "migrate", "web", "--to", &to.address, "--keys", keys, "--origin", &from.0.address, "--json"]
}

/// What a migration has ended with.
fn result(told: &str) -> MigrationResult {
    let last: serde_json::Value = serde_json::from_str(told.lines().last().expect("a line")).expect("JSON");
    serde_json::from_value(last["result"].clone()).expect("a result")
}

/// Whether the snapshot of a disk that goes elsewhere is, or was, served from here.
fn serves_snapshot(machines: &MachineDirectory) -> bool {
    let run = std::fs::read_dir(machines.home("web").join("run")).expect("its sockets");
    run.map(|entry| entry.expect("an entry").file_name()).any(|name| name.to_string_lossy().starts_with("snapshot-"))
}

/// Until a machine that has come needs nothing of where it was.
#[track_caller]
pub fn wait_whole(machines: &MachineDirectory) {
    wait_whole_of(machines, "web");
}

#[track_caller]
fn wait_whole_of(machines: &MachineDirectory, name: &str) {
    let arrival = machines.home(name).join("arrival.json");
    until("all of its disk is there", || {
        std::fs::read_to_string(&arrival).is_ok_and(|text| text.contains("\"is_whole\":true"))
    });
}

/// A writer in the guest whose numbers follow one another, in memory and on the disk.
const WRITER: &str = "for p in /dev/shm /root; do setsid sh -c 'i=0; while :; do i=$((i+1)); echo $i; done' \
                      > $p/numbers 2>/dev/null < /dev/null & done; cat /proc/sys/kernel/random/boot_id";
/// A program in the guest that changes 64 MiB of memory again and again: noise, of which no page is as it was.
pub const STORM: &str = "setsid perl -e 'open $r, \"<\", \"/dev/urandom\"; read $r, $noise, 1 << 20; \
                         open $f, \"+>\", \"/dev/shm/storm\"; while (1) { sysseek $f, (++$n % 64) << 20, 0; \
                         syswrite $f, $noise ^ (pack(\"Q\", $n) x (1 << 17)) }' </dev/null >/dev/null 2>&1 &";
pub const CHECK: &str = "cp /dev/shm/numbers /dev/shm/seen; cp /root/numbers /root/seen; sync; \
                         for p in /dev/shm /root; do head -n -1 $p/seen | awk '$1 != NR { print NR, $1; exit 1 }' \
                         || exit 1; done; echo whole";

/// A machine goes to another host and back while it writes: all that it had in memory and on its disk is there, it was
/// never booted again, and what it leaves behind cannot be started. On its way to a host that has its storage, what the
/// disk holds does not travel, of memory and of the disk; on its way back all does. What its guest has free never does.
/// One that cannot stand for so short a time stays, and says why.
///
/// Spec: D5, D6
#[test]
fn t31_a_machine_goes_to_another_host_and_back_while_it_writes() {
    if is_left_out("t31_a_machine_goes_to_another_host_and_back_while_it_writes") {
        return;
    }
    let hosts = Hosts::with_shared_storage();
    let (here, there) = (&hosts.here, &hosts.there);
    here.1.directory.run(&["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", "--start"]).ok();
    let boot = here.1.guest("web", WRITER);
    // Some 60 MB of its memory are a cache of its disk.
    here.1.guest("web", "cat /usr/lib/postgresql/*/*/* /usr/bin/* > /dev/null 2>&1; true");
    // As many hold noise that nobody needs.
    here.1.guest("web", "head -c 64M /dev/urandom > /dev/shm/noise && rm /dev/shm/noise");

    let predicted = migrate(here, &there.0, &["--dry-run", "--bandwidth=100M"]).ok();
    assert!(!there.1.home("web").exists(), "{predicted}");
    let predicted: serde_json::Value = serde_json::from_str(&predicted).expect("JSON");
    let predicted = predicted["prediction"]["memory_bytes"].as_u64().expect("a figure");
    let refused = migrate(here, &there.0, &["--downtime-ms=1"]).refused(1);
    assert!(refused.contains("a pause of 1 ms cannot be kept"), "{refused}");
    let refused = migrate(here, &there.0, &["--bandwidth=1K"]).refused(1);
    assert!(refused.contains("give 100000 at least"), "{refused}");
    // Slowly enough that it is under way when its time is over, or when it is cancelled.
    let refused = migrate(here, &there.0, &["--bandwidth=2M", "--timeout-s=1"]).refused(1);
    assert!(refused.contains("not sent once within 1 s") && refused.contains("it goes on here"), "{refused}");
    until("nothing of it is left there", || !there.1.home("web").exists());
    let cancelled = std::thread::scope(|scope| {
        let migrating = scope.spawn(|| migrate(here, &there.0, &["--bandwidth=2M"]));
        until("it is under way", || there.1.home("web").join("memory.shadow").exists());
        let refused = there.1.directory.run(&["vm", "stop", "web", "--force"]).refused(1);
        assert!(refused.contains("comes from another host, and runs there"), "{refused}");
        here.1.directory.run(&["vm", "migrate", "web", "--cancel"]).ok();
        migrating.join().expect("it does not panic")
    });
    assert!(cancelled.refused(1).contains("it was cancelled, and goes on here"));
    assert_eq!(here.1.guest("web", CHECK), "whole");
    until("nothing of it is left there", || !there.1.home("web").exists());

    let told = migrate(here, &there.0, &["--downtime-ms=2000", "--on-timeout=go"]).ok();
    eprintln!("{told}");
    let shared = result(&told);
    assert!(shared.shares_disk && shared.disk_pages > 8192, "{shared:?}");
    assert!(shared.bytes < 64 << 20, "what is free does not travel: {shared:?}");
    let went = shared.zero_pages + shared.known_pages + shared.disk_pages + shared.data_pages;
    assert!(predicted < (went << 12) + (32 << 20), "nor was it predicted: {predicted} of {shared:?}");
    assert_eq!(there.1.guest("web", "cat /proc/sys/kernel/random/boot_id"), boot, "it was not booted");
    assert_eq!(there.1.guest("web", CHECK), "whole");
    until("nothing of it runs here", || {
        here.1.processes().iter().all(|process| {
            onecopy_testing::process::arguments(*process).iter().any(|word| word == "host" || word == "snapshot-server")
        })
    });
    assert_eq!(here.1.machine("web")["state"], "migrated");
    let pages =
        |kind: &str, count| format!("onecopy_machine_migration_pages{{server=\"web\",kind=\"{kind}\"}} {count}");
    here.0.tells(&[
        "onecopy_machine_running{server=\"web\"} 0".to_owned(),
        "onecopy_machine_migration_in_doubt{server=\"web\"} 0".to_owned(),
        format!("onecopy_machine_migration_bytes{{server=\"web\"}} {}", shared.bytes),
        pages("disk", shared.disk_pages),
        pages("data", shared.data_pages),
    ]);
    assert!(here.1.directory.run(&["vm", "start", "web"]).refused(1).contains("does not run here again"));

    // Its disk is all there at some time, and then it can go on.
    wait_whole(&there.1);
    there.0.tells(&["running", "arrival_disk_whole"].map(|name| format!("onecopy_machine_{name}{{server=\"web\"}} 1")));
    there.0.tells(&["onecopy_machine_checkpoints{server=\"web\"} 0".to_owned()]);
    assert_eq!(page_of(&there.0.page, "/healthz"), ("HTTP/1.0 200 OK".to_owned(), "ok\n".to_owned()));
    assert!(!serves_snapshot(&here.1) && serves_snapshot(&there.1), "its disk came from the storage of both");
    let told = migrate(there, &here.0, &["--downtime-ms=2000", "--on-timeout=go"]).ok();
    eprintln!("{told}");
    let copied = result(&told);
    assert!(!copied.shares_disk && copied.disk_pages == 0, "{copied:?}");
    assert_eq!(here.1.guest("web", "cat /proc/sys/kernel/random/boot_id"), boot, "it was not booted");
    assert_eq!(here.1.guest("web", CHECK), "whole");
    here.1.directory.run(&["vm", "checkpoint", "web"]).ok();
    here.0.tells(&["onecopy_machine_checkpoints{server=\"web\"} 1".to_owned()]);
    here.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
}

/// A fork goes to another host at once, and its parent runs on here: it has what its parent had, in memory and on its
/// disk, and neither sees what the other writes then. A host that cannot be reached is seen before there is a fork; of
/// one that is not taken the fork stays, and goes by the command that is told.
///
/// Spec: D6
#[test]
fn t56_a_fork_goes_to_another_host_and_its_parent_stays() {
    if is_left_out("t56_a_fork_goes_to_another_host_and_its_parent_stays") {
        return;
    }
    let hosts = Hosts::new(|_| Vec::new());
    let (here, there) = (&hosts.here, &hosts.there);
    here.1.directory.run(&["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", "--start"]).ok();
    here.1.guest("web", "for p in /dev/shm /root; do echo before > $p/kept; done; sync");
    let boot = here.1.guest("web", "cat /proc/sys/kernel/random/boot_id");
    let keys = here.0.keys.to_str().expect("UTF-8");
    let fork = |to: &str| {
        let order = ["vm", "fork", "web", "trial", "--to", to, "--keys", keys, "--origin", &here.0.address];
        here.1.directory.run(&order)
    };
    assert!(fork("127.0.0.1:1").refused(1).contains("cannot reach the host 127.0.0.1:1"));
    assert!(!here.1.home("trial").exists(), "nothing was made");

    there.1.directory.run(&["vm", "create", "trial", "--disk=4GB"]).ok();
    let refused = fork(&there.0.address).refused(1);
    let remedy = format!("vm migrate trial --to {} --keys {keys} --origin {}", there.0.address, here.0.address);
    assert!(refused.contains(&format!("`onecopy {remedy}`")), "{refused}");
    assert_eq!(here.1.machine("trial")["state"], "running", "it is here");
    there.1.directory.run(&["vm", "delete", "trial"]).ok();
    here.1.directory.run(&remedy.split(' ').collect::<Vec<&str>>()).ok();
    wait_whole_of(&there.1, "trial");
    there.1.directory.run(&["vm", "stop", "trial", "--force"]).ok();
    there.1.directory.run(&["vm", "delete", "trial"]).ok();
    here.1.directory.run(&["vm", "delete", "trial"]).ok();

    let told = fork(&there.0.address).ok();
    assert!(told.contains(&format!("trial runs at {}", there.0.address)), "{told}");
    here.1.guest("web", "for p in /dev/shm /root; do echo parent > $p/kept; done");
    let seen = "cat /proc/sys/kernel/hostname /proc/sys/kernel/random/boot_id /dev/shm/kept /root/kept";
    assert_eq!(there.1.guest("trial", seen), format!("trial\n{boot}\nbefore\nbefore"));
    there.1.guest("trial", "for p in /dev/shm /root; do echo fork > $p/kept; done");
    assert_eq!(here.1.guest("web", "cat /dev/shm/kept /root/kept"), "parent\nparent");
    wait_whole_of(&there.1, "trial");
    here.1.directory.run(&["vm", "delete", "trial"]).ok();
    assert_eq!(there.1.guest("trial", "cat /root/kept"), "fork", "it needs nothing from here any more");
}

/// A machine that changes faster than the link carries stays, and says why; slowed down it goes. Where it stays after
/// that its clock is right, and where whoever slows it down is killed while it stands, the next one lets it go.
///
/// Spec: D6, nightly
#[test]
fn t51_a_machine_that_changes_faster_than_it_travels_goes_where_it_may_be_slowed_down() {
    if is_left_out("t51_a_machine_that_changes_faster_than_it_travels_goes_where_it_may_be_slowed_down") {
        return;
    }
    let mut hosts = Hosts::with_shared_storage();
    let (here, there) = (&hosts.here, &mut hosts.there);
    here.1.directory.run(&["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", "--start"]).ok();
    let boot = here.1.guest("web", WRITER);
    here.1.guest("web", &STORM.replace("while (1) {", "while (1) { select undef, undef, undef, 0.03;"));
    let way = ["--bandwidth=8M", "--downtime-ms=1000"];
    let refused = migrate(here, &there.0, &[&way[..], &["--timeout-s=40"]].concat()).refused(1);
    assert!(refused.contains("a pause of 1000 ms cannot be kept") && refused.contains("throttle"), "{refused}");
    until("nothing of it is left there", || !there.1.home("web").exists());

    let slowed = [&way[..], &["--timeout-s=30", "--on-timeout=throttle"]].concat();
    let mut migrating = here.1.directory.spawn(&[&order(here, &there.0)[..], &slowed].concat());
    assert!(migrating.read_until("\"throttle_percent\":"));
    here.1.directory.run(&["vm", "migrate", "web", "--cancel"]).ok();
    assert!(!migrating.read_until("\"migrated\""));
    until("its clock is right", || {
        let clock: u64 = here.1.guest("web", "date +%s").parse().expect("a number");
        SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs().abs_diff(clock) <= 1
    });

    let mut migrating = here.1.directory.spawn(&[&order(here, &there.0)[..], &slowed].concat());
    assert!(migrating.read_until("\"throttle_percent\":"));
    let standing = here.1.home("web").join("standing.json");
    let keeper = here.1.process("web", "keeper.lock").expect("it runs");
    let is_taking = || std::fs::read_to_string(&standing).expect("a text").contains("taking");
    until("it stands while its state is being taken", || {
        // Its state does not change while it does not run.
        send(keeper, Signal::STOP);
        let is_taking = is_taking();
        if !is_taking {
            send(keeper, Signal::CONT);
        }
        is_taking
    });
    // Nobody else asks for it.
    there.0.kill();
    there.1.kill("web", "keeper.lock");
    kill(keeper);
    drop(migrating);
    until("its host gives it a keeper, which lets it go", || !is_taking());
    there.0.start_again(&there.1);
    until("nothing of it is left there", || !there.1.home("web").exists());
    assert_eq!(here.1.guest("web", CHECK), "whole");

    let told = migrate(here, &there.0, &slowed).ok();
    eprintln!("{told}");
    // Asked for is one second; more is left to a machine that is busy.
    let result = result(&told);
    assert!(result.pause_us < 5_000_000, "{result:?}");
    assert_eq!(there.1.guest("web", "cat /proc/sys/kernel/random/boot_id"), boot, "it was not booted");
    assert_eq!(there.1.guest("web", CHECK), "whole");
    there.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
}

/// A machine on a bridge keeps its card, its addresses and its connections, and is plugged in at the other host's
/// bridge only where that host was told so. One that stays, because nobody takes it, is where it was for all.
///
/// Spec: D5, D7
#[test]
fn t32_a_machine_on_a_bridge_takes_its_connections_with_it() {
    if is_left_out("t32_a_machine_on_a_bridge_takes_its_connections_with_it") {
        return;
    }
    make_network();
    let hosts = Hosts::new(|_| vec!["--bridge".into(), "br0".into()]);
    let (here, there) = (&hosts.here, &hosts.there);
    let network = "--network=bridge=br0,address=192.0.2.10/24,gateway=192.0.2.1";
    here.1
        .directory
        .run(&["vm", "create", "web", "--memory=256MB", "--disk=4GB", "--checkpoints", network, "--start"])
        .ok();
    here.1.guest("web", ECHO);
    let client = Client::connect("192.0.2.10");
    client.goes_on("all is well");
    let (card, own) = (here.1.machine("web")["network"]["mac"].clone(), interfaces());
    // An established connection has the state 01: proc(5).
    let boot =
        "cat /proc/sys/kernel/random/boot_id; awk '$2 ~ /:0007$/ && $4 == \"01\" { print $2, $3 }' /proc/net/tcp";
    let found = here.1.guest("web", boot);

    let refused = migrate(here, &there.0, &["--bridge=br1"]).refused(1);
    assert!(refused.contains("start `onecopy host` here with --bridge br1"), "{refused}");
    client.goes_on("it was not taken");

    let go: [&str; 2] = ["--downtime-ms=2000", "--on-timeout=go"];
    migrate(here, &there.0, &go).ok();
    client.goes_on("it runs on the other host");
    assert_eq!(there.1.guest("web", boot), found, "it was not booted, and its socket is the one that it was");
    client.goes_on("its agent was greeted there");
    let now = there.1.machine("web");
    assert_eq!((&now["network"]["mac"], &now["network"]["failure"]), (&card, &serde_json::Value::Null), "{now}");
    assert_eq!(there.1.guest("web", "cat /sys/class/net/eth0/address"), card.as_str().expect("a text"));
    until("its interface here is gone", || !interfaces().contains(&own[0]));
    assert_eq!(interfaces().len(), 1);

    wait_whole(&there.1);
    let refused = migrate(there, &here.0, &go).refused(1);
    assert!(refused.contains("start `onecopy host` here with --bridge br0"), "{refused}");
    client.goes_on("it stays where nobody takes it");
    there.1.kill("web", "keeper.lock");
    there.1.guest("web", "true");
    client.goes_on("its keeper there died");
    there.1.directory.run(&["vm", "stop", "web", "--force"]).ok();
    assert_eq!(interfaces(), Vec::<String>::new());
}
