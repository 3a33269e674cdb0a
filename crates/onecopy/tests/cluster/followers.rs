//! Followers that come and go while the cluster serves.

use onecopy_testing::process::{children_of, kill};
use onecopy_testing::{Frozen, until};
use rustix::process::Signal;
use serde_json::Value;

use crate::directory::ClusterDirectory;

/// The ways that a test directory on this machine allows.
const MODES: [&str; 2] = ["--mode=lazy", "--mode=copy"];

fn names(directory: &ClusterDirectory) -> Vec<String> {
    let status = directory.status();
    let servers = status["servers"].as_array().expect("a list");
    servers.iter().map(|server| server["name"].as_str().expect("a name").to_owned()).collect()
}

/// Waits until there are exactly these followers, and all of them stream.
#[track_caller]
fn wait_for(directory: &ClusterDirectory, followers: usize) {
    let streams = |server: &Value| server["state"] == "running" && server["replication"] == "streaming";
    until(&format!("{followers} followers stream"), || {
        let status = directory.status();
        let servers = status["servers"].as_array().expect("a list");
        servers.len() == 1 + followers && servers[1..].iter().all(streams)
    });
}

/// What a session reads that has asked for this follower and for everything that was written; asked again where the
/// follower is out of the epoch: on a busy machine it is behind for moments.
#[track_caller]
fn read_at(directory: &ClusterDirectory, follower: &str, query: &str) -> String {
    let question = format!("SET onecopy.freshness = 'strict'; SET onecopy.server = '{follower}'; {query}");
    let mut answer = None;
    until("it is in the epoch", || {
        let ran = directory.run(&["psql", "--", "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", &question]);
        let is_out = ran.stderr.contains("is not in the current epoch");
        answer = Some(ran);
        !is_out
    });
    answer.expect("asked").ok().trim().to_owned()
}

fn slots(directory: &ClusterDirectory) -> String {
    directory.sql("BEGIN; SELECT string_agg(slot_name, ',' ORDER BY slot_name) FROM pg_replication_slots; COMMIT")
}

fn events(output: &str) -> Vec<Value> {
    output.lines().map(|line| serde_json::from_str(line).expect("an event")).collect()
}

fn make_data(directory: &ClusterDirectory) {
    directory
        .sql("CREATE TABLE kept AS SELECT number, repeat('x', 200) AS filler FROM generate_series(1, 20000) number");
}

/// `scale` makes and removes followers while clients read; nothing of a removed one is left; the numbers come back; one
/// whose first start fails is taken in when it can start.
///
/// Spec: A4
#[test]
fn c23_followers_come_and_go_while_clients_read() {
    for mode in MODES {
        let directory = ClusterDirectory::new();
        directory.up(1);
        make_data(&directory);
        let told = events(&directory.run(&["scale", "3", "--json", "--wait", mode]).ok());
        let of = |name: &str| told.iter().filter(|event| event["event"] == name).collect::<Vec<_>>();
        assert_eq!(of("way")[0]["way"], mode.trim_start_matches("--mode="), "{told:?}");
        assert_eq!(of("answering").len(), 2, "{told:?}");
        let steps = |text: &str| {
            of("step").iter().filter(|event| event["message"].as_str().expect("text").contains(text)).count()
        };
        assert_eq!(steps("removing"), 0, "there was nothing: {told:?}");
        assert_eq!(steps("the image is taken"), usize::from(mode == "--mode=lazy"), "one freeze: {told:?}");
        let last = told.last().expect("an end");
        assert_eq!(last["followers"].as_array().map(Vec::len), Some(3), "{last}");
        wait_for(&directory, 3);
        for follower in ["follower-2", "follower-3"] {
            assert_eq!(read_at(&directory, follower, "SELECT sum(number) FROM kept"), "200010000");
        }
        assert_eq!(directory.status()["servers"][3]["clone"]["whole"], true);

        directory.sql("UPDATE kept SET number = number + 1");
        directory.run(&["scale", "1"]).ok();
        assert_eq!(names(&directory), ["leader", "follower-1"]);
        assert_eq!(directory.postmasters().len(), 2);
        assert_eq!(slots(&directory), "follower_1");
        for gone in ["follower-2", "follower-3"] {
            assert!(!directory.path().join(gone).exists(), "{gone} is left");
        }
        directory.run(&["scale", "0"]).ok();
        assert_eq!(directory.sql("SELECT sum(number) FROM kept"), "200030000");
        // The same numbers again, after a restart too.
        directory.run(&["scale", "1", mode]).ok();
        directory.run(&["down"]).ok();
        directory.run(&["up", "--detach"]).ok();
        wait_for(&directory, 1);
        assert_eq!(read_at(&directory, "follower-1", "SELECT sum(number) FROM kept"), "200030000");
    }
}

/// Spec: A4
#[test]
fn c23_a_follower_that_cannot_start_at_first_comes_when_it_can() {
    for mode in MODES {
        let directory = ClusterDirectory::new();
        directory.up(0);
        make_data(&directory);
        // The name of its socket is taken, by a process that lives.
        let lock = directory.path().join("run/.s.PGSQL.5433.lock");
        std::fs::write(&lock, format!("{}\n", directory.postmaster("leader"))).expect("take its socket");
        let complaint = directory.run(&["scale", "1", mode]).refused(1);
        assert!(complaint.contains("lock file"), "{complaint}");
        assert_ne!(directory.status()["servers"][1]["state"], "running");
        std::fs::remove_file(&lock).expect("give it back");
        wait_for(&directory, 1);
        assert_eq!(read_at(&directory, "follower-1", "SELECT sum(number) FROM kept"), "200010000");
    }
}

/// `reinit` makes a follower anew under its name and leaves the others alone.
///
/// Spec: A4
#[test]
fn c24_a_follower_is_made_anew_under_its_name() {
    for mode in MODES {
        let directory = ClusterDirectory::new();
        directory.up(2);
        make_data(&directory);
        let before = directory.postmasters();
        directory.run(&["reinit", "follower-1", mode]).ok();
        let after = directory.postmasters();
        assert_eq!(before[2], after[2], "the leader is left alone: {before:?} {after:?}");
        assert_eq!(before[1], after[1], "the other follower is left alone");
        assert_ne!(before[0], after[0]);
        assert_eq!(read_at(&directory, "follower-1", "SELECT sum(number) FROM kept"), "200010000");
        assert_eq!(slots(&directory), "follower_1,follower_2");
        wait_for(&directory, 2);
    }
}

/// Kills the daemon when `arguments` have told `step`, and lets the next `up` come to `followers`.
fn killed_at(before: usize, arguments: &[&str], step: &str, followers: usize) {
    let directory = ClusterDirectory::new();
    directory.up(before);
    make_data(&directory);
    let mut change = directory.spawn(arguments);
    assert!(change.read_until(step), "{arguments:?} never told {step:?}");
    directory.kill_daemon();
    directory.run(&["up", "--detach"]).ok();
    wait_for(&directory, followers);
    for number in 1..=followers {
        let read = read_at(&directory, &format!("follower-{number}"), "SELECT sum(number) FROM kept");
        assert_eq!(read, "200010000", "killed at {step:?} of {arguments:?}");
    }
    let expected: Vec<String> = (1..=followers).map(|number| format!("follower_{number}")).collect();
    assert_eq!(slots(&directory), expected.join(","), "killed at {step:?} of {arguments:?}");
    for number in followers + 1..=before {
        assert!(!directory.path().join(format!("follower-{number}")).exists(), "killed at {step:?} of {arguments:?}");
    }
}

const SCALE_UP: &[&str] = &["scale", "2", "--json", "--wait", "--mode=lazy", "--limit=4"];
const SCALE_DOWN: &[&str] = &["scale", "0", "--json"];
const REINIT: &[&str] = &["reinit", "follower-1", "--json", "--mode=lazy"];

/// A change whose daemon is killed at any step goes on with the next `up`.
///
/// Spec: A3
#[test]
fn c25_a_scale_up_whose_daemon_is_killed_goes_on() {
    killed_at(0, SCALE_UP, "the image is taken", 2);
}

/// Spec: A3
#[test]
fn c25_a_scale_down_whose_daemon_is_killed_goes_on() {
    killed_at(2, SCALE_DOWN, "removing what there is of follower-2", 0);
}

/// Spec: A3
#[test]
fn c25_a_reinit_whose_daemon_is_killed_goes_on() {
    killed_at(1, REINIT, "removing what there is", 1);
}

/// Spec: A3, nightly
#[test]
fn c25_changes_whose_daemon_is_killed_at_every_step_go_on() {
    for step in ["\"way\"", "cloning the leader", "answering"] {
        killed_at(0, SCALE_UP, step, 2);
    }
    killed_at(0, &["scale", "1", "--json", "--mode=copy"], "copying the leader", 1);
    for step in ["stopping follower-2", "stopping follower-1"] {
        killed_at(2, SCALE_DOWN, step, 0);
    }
    for step in ["stopping follower-1", "cloning the leader"] {
        killed_at(1, REINIT, step, 1);
    }
}

/// Spec: L4
#[test]
fn c26_changes_that_cannot_be_are_refused_by_name() {
    let directory = ClusterDirectory::new();
    let complaint = directory.run(&["scale", "1"]).refused(3);
    assert!(complaint.contains("onecopy up --dir"), "{complaint}");
    directory.up(0);
    let complaint = directory.run(&["scale", "9"]).refused(1);
    assert!(complaint.contains("at most 8"), "{complaint}");
    let complaint = directory.run(&["reinit", "follower-7"]).refused(1);
    assert!(complaint.contains("\"follower-7\"") && complaint.contains("there are: none"), "{complaint}");
    for wrong in [&["scale"][..], &["scale", "-1"], &["scale", "many"], &["scale", "1", "--mode=magic"], &["reinit"]] {
        directory.run(wrong).refused(2);
    }
    assert_eq!(names(&directory), ["leader"]);
    directory.run(&["down"]).ok();
    directory.run(&["scale", "1"]).refused(3);
}

/// One change at a time; it goes on when who asked for it is killed.
///
/// Spec: A3
#[test]
fn c27_one_change_at_a_time_and_it_goes_on_without_who_asked() {
    let directory = ClusterDirectory::new();
    directory.up(0);
    make_data(&directory);
    // A copy begins with a checkpoint: until then it is not done.
    let checkpointer = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'";
    let checkpointer: u32 = directory.superuser_sql("leader", checkpointer).parse().expect("a process");
    let held = Frozen::of([checkpointer]);
    let mut first = directory.spawn(&["scale", "2", "--json", "--mode=copy"]);
    assert!(first.read_until("copying the leader"));
    let complaint = directory.run(&["scale", "1"]).refused(1);
    assert!(complaint.contains("being changed (scale 2)"), "{complaint}");
    first.end_by(Signal::KILL);
    drop(held);
    wait_for(&directory, 2);
}

/// Followers are changed on the Unix socket only.
///
/// Spec: A4
#[test]
fn c28_followers_are_changed_on_the_socket_only() {
    let directory = ClusterDirectory::new();
    directory.up(0);
    let answer = directory.post_to_page("/scale", "{\"replicas\":1}");
    assert!(answer.starts_with("HTTP/1.0 404"), "{answer}");
    assert_eq!(names(&directory), ["leader"]);
}

/// `up` with more replicas serves first and makes them then.
///
/// Spec: A4
#[test]
fn c29_up_serves_first_and_makes_more_followers_then() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    make_data(&directory);
    directory.run(&["down"]).ok();
    let ready = directory.run(&["up", "--detach", "--json", "--replicas=2"]).ok();
    assert!(!ready.contains("copying"), "{ready}");
    assert_eq!(directory.sql("SELECT count(*) FROM kept"), "20000");
    wait_for(&directory, 2);
}

/// A follower that cannot catch up is told by `status` with the remedy.
///
/// Spec: A4
#[test]
fn c30_a_follower_that_cannot_catch_up_is_told_with_the_remedy() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    make_data(&directory);
    let as_superuser = |statement: &str| directory.superuser_sql("leader", statement);
    as_superuser("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'");
    as_superuser("SELECT pg_reload_conf()");
    // The postmaster tells its processes after it has read it itself; a new session shows what it has read.
    until("the postmaster has read it", || directory.superuser_sql("leader", "SHOW max_slot_wal_keep_size") == "1MB");
    // Its slot loses its log while nobody uses it, as when the follower is away.
    as_superuser("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active");
    let follower = directory.postmaster("follower-1");
    let frozen = Frozen::of([follower]);
    children_of(follower).into_iter().for_each(kill);
    for _ in 0..3 {
        as_superuser("INSERT INTO kept SELECT number, repeat('y', 400) FROM generate_series(1, 50000) number");
        as_superuser("SELECT pg_switch_wal()");
        as_superuser("CHECKPOINT");
    }
    until("status tells the remedy", || {
        let problem = directory.status()["servers"][1]["problem"].to_string();
        problem.contains("onecopy reinit follower-1")
    });
    drop(frozen);
    directory.run(&["reinit", "follower-1"]).ok();
    wait_for(&directory, 1);
    until("nothing is wrong", || directory.status()["servers"][1]["problem"] == Value::Null);
}

/// With `--warm full` the leader's hot pages are in a new follower's shared buffers without any query.
///
/// Spec: A5
#[test]
fn c32_hot_pages_are_in_the_buffers_of_a_new_follower() {
    for mode in MODES {
        let directory = ClusterDirectory::new();
        directory.up(0);
        make_data(&directory);
        directory.superuser_sql("leader", "CREATE EXTENSION pg_buffercache");
        // Nobody else changes its pages.
        directory.superuser_sql("leader", "ALTER TABLE kept SET (autovacuum_enabled = off)");
        directory.superuser_sql("leader", "VACUUM kept");
        // What is written before it, hints too, must not come to a follower by replay.
        directory.superuser_sql("leader", "CHECKPOINT");
        for _ in 0..4 {
            directory.sql("BEGIN; SELECT sum(number) FROM kept; COMMIT");
        }
        let buffered = "SELECT count(*) FROM pg_buffercache WHERE relfilenode = pg_relation_filenode('kept')
            AND relforknumber = 0 AND reldatabase = (SELECT oid FROM pg_database WHERE datname = current_database())";
        let pages: u32 = directory.superuser_sql("leader", buffered).parse().expect("a number");
        assert!(pages > 100, "{pages}");
        directory.run(&["scale", "2", "--warm=full", mode]).ok();
        directory.run(&["reinit", "follower-2", "--warm=cache", mode]).ok();
        until("the hot pages are there", || directory.superuser_sql("follower-1", buffered) == pages.to_string());
        let read = "SELECT coalesce(seq_scan, 0) FROM pg_stat_all_tables WHERE relname = 'kept'";
        assert_eq!(directory.superuser_sql("follower-1", read), "0", "nobody has read it there");
        assert_eq!(directory.superuser_sql("follower-2", buffered), "0", "that one was not told to");
    }
}

/// A daemon whose program file was replaced goes on making followers.
///
/// Spec: A3
#[test]
fn c33_a_daemon_whose_program_was_replaced_still_makes_followers() {
    let directory = ClusterDirectory::new();
    directory.up_by_a_program_that_goes();
    make_data(&directory);
    directory.run(&["scale", "1", "--mode=lazy", "--wait"]).ok();
    assert_eq!(read_at(&directory, "follower-1", "SELECT sum(number) FROM kept"), "200010000");
}
