//! Kills at every step, and what the next command makes of it.

use std::time::Duration;

use onecopy_testing::process::kill;
use onecopy_testing::{FileSystem, Frozen, MountedDisk, TestDirectory, skip, until};
use rustix::process::Signal;

use crate::directory::ClusterDirectory;

/// A daemon killed by SIGKILL loses nothing; the next `up` takes its servers over without a restart.
///
/// Spec: D1
#[test]
fn c7_a_killed_daemon_loses_nothing() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    directory.sql("CREATE TABLE kept (number int); INSERT INTO kept VALUES (1)");
    let before = directory.postmasters();
    directory.kill_daemon();
    assert_eq!(directory.run(&["status"]).code, Some(3));
    assert_eq!(directory.run(&["psql", "--", "-c", "SELECT 1"]).code, Some(3));

    directory.run(&["up", "--detach"]).ok();
    assert_eq!(directory.postmasters(), before, "the running servers are taken over, not started again");
    assert_eq!(directory.sql("SELECT number FROM kept"), "1");
}

/// `down` stops the servers of a killed daemon.
///
/// Spec: A3
#[test]
fn c8_down_stops_servers_whose_daemon_was_killed() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    directory.kill_daemon();
    assert_eq!(directory.postmasters().len(), 2);
    directory.run(&["down"]).ok();
    assert_eq!(directory.postmasters(), []);
}

/// The steps of a first start, as its events name them.
const STEPS: [&str; 5] =
    ["making the leader", "starting the leader", "copying the leader", "starting 1 followers", "starting the router"];

/// Kills first starts at a step, each so many milliseconds after it began, and expects the next `up` to go on.
fn first_starts_killed_at(kills: &[(&str, u64)]) {
    for (step, delay_ms) in kills {
        let directory = ClusterDirectory::new();
        let mut up = directory.spawn_up(1);
        assert!(up.read_until(step), "no step {step:?}");
        // Another moment within the step; whichever it is, what follows must hold.
        std::thread::sleep(Duration::from_millis(*delay_ms));
        up.end_by(Signal::KILL);
        let killed = format!("killed {delay_ms} ms after {step:?}");
        let ran = directory.run(&["up", "--detach", "--port=0", "--replicas=1"]);
        assert_eq!(ran.code, Some(0), "{killed}: {ran:?}");
        assert_eq!(directory.sql("SELECT 1"), "1", "{killed}");
        let status = directory.status();
        assert_eq!(status["servers"].as_array().map(Vec::len), Some(2), "{killed}");
        // On a busy machine one is unresponsive for a moment.
        until(&format!("it runs, {killed}"), || directory.status()["servers"][1]["state"] == "running");
    }
}

/// What the killed start leaves running is found; what it leaves in files, `onecopy-host` tries at every step.
///
/// A first start killed at any step goes on with the next `up`.
///
/// Spec: A3
#[test]
fn c9_a_first_start_killed_while_the_leader_is_made_goes_on() {
    first_starts_killed_at(&[("making the leader", 200)]);
}

/// Spec: A3, nightly
#[test]
fn c9_a_first_start_killed_at_every_step_goes_on() {
    first_starts_killed_at(&["making the leader", "copying the leader"].map(|step| (step, 0)));
    first_starts_killed_at(&[500, 900].map(|delay_ms| ("making the leader", delay_ms)));
    first_starts_killed_at(&[100, 300].map(|delay_ms| ("copying the leader", delay_ms)));
    first_starts_killed_at(
        &["starting the leader", "starting 1 followers", "starting the router"].map(|step| (step, 0)),
    );
}

/// Spec: A3
#[test]
fn c10_a_first_start_interrupted_at_any_step_leaves_nothing_running() {
    let mut interrupted = Vec::new();
    for step in STEPS {
        let directory = ClusterDirectory::new();
        let mut up = directory.spawn_up(1);
        assert!(up.read_until(step), "no step {step:?}");
        let code = up.end_by(Signal::INT);
        // On a busy machine the signal may come after a short step, and after the last one it is an ordinary end.
        assert!(matches!(code, Some(130 | 0)), "interrupted at {step:?}: {code:?}");
        assert_eq!(directory.postmasters(), [], "interrupted at {step:?}");
        interrupted.extend((code == Some(130)).then_some((step, directory)));
    }
    // These two take longer than a signal.
    assert!(interrupted.iter().any(|(step, _)| *step == "making the leader"));
    let copying = interrupted.iter().find(|(step, _)| *step == "copying the leader");
    let (_, directory) = copying.expect("interrupted while it copied");
    directory.up(1);
    assert_eq!(directory.sql("SELECT 1"), "1");
}

/// A killed server is started again, and a follower streams again.
///
/// Spec: A1
#[test]
fn c11_killed_servers_are_started_again() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    for (index, name) in ["leader", "follower-1"].into_iter().enumerate() {
        kill(directory.postmaster(name));
        until("the server was started again", || {
            let server = &directory.status()["servers"][index];
            server["state"] == "running" && server["restarts"] == 1 && server["name"] == name
        });
    }
    until("the follower streams again", || directory.status()["servers"][1]["replication"] == "streaming");
}

/// A follower whose data is lost is copied again; a lost leader is never replaced by an empty one.
///
/// Spec: D1
#[test]
fn c12_a_follower_without_data_is_copied_again() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    directory.run(&["down"]).ok();
    std::fs::remove_dir_all(directory.path().join("follower-1/data")).expect("lose the data");
    let notice = directory.run(&["up", "--detach"]);
    assert!(notice.stderr.contains("the data of follower-1 is gone"), "{notice:?}");
    until("the follower streams", || directory.status()["servers"][1]["replication"] == "streaming");
    directory.run(&["down"]).ok();

    std::fs::remove_dir_all(directory.path().join("leader/data")).expect("lose the data");
    let complaint = directory.run(&["up", "--detach"]).refused(1);
    assert!(complaint.contains("nothing else has all the data"), "{complaint}");
    assert!(!directory.path().join("leader/data").exists(), "an empty leader must not take the place of a lost one");
}

/// A server that runs and does not answer is told as such by `status`; a leader that does not answer fails `/healthz`.
///
/// Spec: L5
#[test]
fn c22_a_server_that_does_not_answer_is_told() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    let follower = Frozen::server(directory.postmaster("follower-1"));
    until("it is told", || directory.status()["servers"][1]["state"] == "unresponsive");
    until("the leader answers", || directory.status()["servers"][0]["state"] == "running");
    until("the leader serves", || directory.page("/healthz").0.ends_with("200 OK"));
    drop(follower);
    let leader = Frozen::server(directory.postmaster("leader"));
    until("it is told", || directory.status()["servers"][0]["state"] == "unresponsive");
    until("/healthz says so", || directory.page("/healthz").0.contains("503"));
    drop(leader);
    until("/healthz is good again", || directory.page("/healthz").0.ends_with("200 OK"));
    assert_eq!(directory.sql("SELECT 1"), "1");
}

/// Room for the data of one server and not of three.
const DISK_BYTES: u64 = 350 << 20;

/// A disk that fills up while the cluster runs loses nothing; with space again it serves again.
///
/// Spec: L2
#[test]
fn c20_a_disk_that_fills_up_loses_nothing() {
    if !rustix::process::geteuid().is_root() {
        skip("c20_a_disk_that_fills_up_loses_nothing", "only root may mount a disk");
        return;
    }
    let outer = TestDirectory::new().expect("a directory");
    let disk = MountedDisk::new(FileSystem::Ext4, outer.path(), "disk", DISK_BYTES).expect("a disk");
    let directory = ClusterDirectory::within(disk.path());
    let complaint = directory.run(&["up", "--detach", "--port=0", "--replicas=2"]).refused(1);
    assert!(complaint.contains("bytes free"), "{complaint}");

    let ballast = disk.path().join("ballast");
    directory.up(0);
    directory.sql("CREATE TABLE kept AS SELECT 7 AS number");
    std::fs::write(&ballast, vec![0; 120 << 20]).expect("fill most of the disk");
    let fill = "CREATE TABLE big AS SELECT repeat('x', 1000) FROM generate_series(1, 1000000)";
    let ran = directory.run(&["psql", "--", "-XAtq", "-v", "VERBOSITY=sqlstate", "-c", fill]);
    assert_ne!(ran.code, Some(0), "{ran:?}");
    // Which of its writes finds the disk full, and whether wholly full, is chance: a table's is refused (disk_full, in
    // one of two texts), one of the log ends the server. Then it depends on whether COMMIT had been sent what is known
    // (transaction_resolution_unknown, or admin_shutdown: rolled back).
    assert!(["53100", "08007", "57P01"].iter().any(|code| ran.stderr.contains(code)), "{ran:?}");

    std::fs::remove_file(&ballast).expect("free some space");
    until("the leader serves again", || {
        directory.run(&["psql", "--", "-XAtqc", "SELECT number FROM kept"]).stdout.trim() == "7"
    });
    directory.sql("INSERT INTO kept VALUES (8)");
    // Other sessions than those that wrote: what they must see, only `strict` says.
    let read = |what: &str| directory.sql(&format!("SET onecopy.freshness = 'strict'; SELECT {what}"));
    assert_eq!(read("count(*) FROM kept"), "2");
    if !ran.stderr.contains("08007") {
        assert_eq!(read("to_regclass('big') IS NULL"), "t", "told to have failed: {ran:?}");
    }
}
