//! Kills at every step, and what the next command makes of it.

use crate::directory::{TestDirectory, send, wait_until};

#[test]
fn c7_a_killed_daemon_loses_nothing() {
    let directory = TestDirectory::new();
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

#[test]
fn c8_down_stops_servers_whose_daemon_was_killed() {
    let directory = TestDirectory::new();
    directory.up(1);
    directory.kill_daemon();
    assert_eq!(directory.postmasters().len(), 2);
    directory.run(&["down"]).ok();
    assert_eq!(directory.postmasters(), []);
}

/// The steps of a first start, as its events name them.
const STEPS: [&str; 5] =
    ["making the leader", "starting the leader", "copying the leader", "starting 1 followers", "starting the router"];

#[test]
fn c9_a_first_start_killed_at_any_step_goes_on() {
    for step in STEPS {
        let directory = TestDirectory::new();
        let mut up = directory.spawn_up(1);
        assert!(up.read_until(step), "no step {step:?}");
        up.end_by("KILL");
        directory.up(1);
        assert_eq!(directory.sql("SELECT 1"), "1", "killed at {step:?}");
        let status = directory.status();
        assert_eq!(status["servers"].as_array().map(Vec::len), Some(2), "killed at {step:?}");
        assert_eq!(status["servers"][1]["state"], "running", "killed at {step:?}: {status}");
    }
}

#[test]
fn c10_a_first_start_interrupted_at_any_step_leaves_nothing_running() {
    let directory = TestDirectory::new();
    for step in STEPS {
        let mut up = directory.spawn_up(1);
        // A later start has fewer steps: what was made before the signal stays made.
        if up.read_until(step) {
            let code = up.end_by("INT");
            assert!(matches!(code, Some(130 | 0)), "interrupted at {step:?}: {code:?}");
        }
        assert_eq!(directory.postmasters(), [], "interrupted at {step:?}");
    }
    directory.up(1);
    assert_eq!(directory.sql("SELECT 1"), "1");
}

#[test]
fn c11_killed_servers_are_started_again() {
    let directory = TestDirectory::new();
    directory.up(1);
    for (index, (name, postmaster)) in [("leader", 0), ("follower-1", 1)].into_iter().map(|(name, index)| {
        let (_, number) = directory.postmasters().into_iter().find(|(found, _)| found == name).expect("it runs");
        (index, (name, number))
    }) {
        send("KILL", postmaster);
        wait_until("the server was started again", || {
            let server = &directory.status()["servers"][index];
            server["state"] == "running" && server["restarts"] == 1 && server["name"] == name
        });
    }
    wait_until("the follower streams again", || directory.status()["servers"][1]["replication"] == "streaming");
}

#[test]
fn c12_a_follower_without_data_is_copied_again() {
    let directory = TestDirectory::new();
    directory.up(1);
    directory.run(&["down"]).ok();
    std::fs::remove_dir_all(directory.path().join("follower-1/data")).expect("lose the data");
    let notice = directory.run(&["up", "--detach"]);
    assert!(notice.stderr.contains("the data of follower-1 is gone"), "{notice:?}");
    wait_until("the follower streams", || directory.status()["servers"][1]["replication"] == "streaming");
    directory.run(&["down"]).ok();

    std::fs::remove_dir_all(directory.path().join("leader/data")).expect("lose the data");
    let complaint = directory.run(&["up", "--detach"]).refused(1);
    assert!(complaint.contains("nothing else has all the data"), "{complaint}");
    assert!(!directory.path().join("leader/data").exists(), "an empty leader must not take the place of a lost one");
}
