//! Sizes by hand, and by the automatic.

use onecopy_testing::process::{arguments, children_of, kill};
use onecopy_testing::until;
use serde_json::Value;

use crate::cluster::{CEILING_BYTES, CONFIGURATION, MIB, START_BYTES, instance, pool_bytes, status, up};

fn events(output: &str) -> Vec<Value> {
    output.lines().map(|line| serde_json::from_str(line).expect("an event")).collect()
}

/// A size by hand is reached, told as it comes, and outlives a crash of its server; `auto on` takes it back; what is
/// impossible is refused with figures.
///
/// Spec: A6
#[test]
fn a_size_by_hand_is_reached_and_told() {
    let directory = up(CONFIGURATION, 1);
    for name in ["leader", "follower-1"] {
        until("it tells its pool", || pool_bytes(&directory, name) == Some(START_BYTES));
        for (size, bytes) in [("180MB", 180 * MIB), ("100%", CEILING_BYTES), ("50%", CEILING_BYTES / 2)] {
            let told = events(&directory.run(&["memory", "set", name, size, "--wait", "--json"]).ok());
            let (last, before) = told.split_last().expect("events");
            assert_eq!((&last["event"], &last["instance"]), (&Value::from("resized"), &Value::from(name)));
            assert_eq!(last["change"]["target_bytes"], bytes, "{last}");
            assert_eq!(last["change"]["pool_bytes"], bytes, "{last}");
            assert!(before.iter().all(|event| event["event"] == "resizing"), "{before:?}");
            let pool = "SELECT pool_bytes FROM onecopy_memory.onecopy_memory_status";
            assert_eq!(directory.superuser_sql(name, pool), bytes.to_string());
        }
    }
    let told = directory.run(&["memory", "set", "leader", "200MB", "--wait"]).ok();
    assert_eq!(told, "leader has 200MB, it had 256MB.\n");
    until("the other one is not meant", || pool_bytes(&directory, "follower-1") == Some(CEILING_BYTES / 2));
    let history = directory.run(&["memory", "history", "leader"]).ok();
    assert!(history.contains("set by hand to 200MB") && !history.contains("follower"), "{history}");
    let logged = directory.run(&["memory", "history", "leader", "--json"]).ok();
    let last: Value = serde_json::from_str(logged.lines().last().expect("a decision")).expect("JSON");
    assert_eq!(last["decision"]["to_bytes"], 200 * MIB, "{last}");
}

/// Spec: A6
#[test]
fn a_size_by_hand_outlives_a_crash_of_its_server() {
    let directory = up(CONFIGURATION, 0);
    until("it tells its pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
    directory.run(&["memory", "set", "leader", "180MB", "--wait"]).ok();
    let postmaster = directory.postmaster("leader");
    // One that does not end by itself just now.
    let is_checkpointer = |child: &u32| arguments(*child).concat().contains("checkpointer");
    let back_end = children_of(postmaster).into_iter().find(is_checkpointer).expect("every server has one");
    kill(back_end);
    until("it has crashed", || !children_of(postmaster).contains(&back_end));
    until("it has its size again", || {
        let status = status(&directory);
        let leader = instance(&status, "leader");
        leader["observation"]["answered"] == true && leader["observation"]["pool_bytes"] == 180 * MIB
    });
    kill(postmaster);
    until("another one runs", || directory.postmasters().first().is_some_and(|(_, other)| *other != postmaster));
    until("it has its size again", || {
        pool_bytes(&directory, "leader") == Some(180 * MIB)
            && instance(&status(&directory), "leader")["mode"] == "pinned"
    });
}

/// Spec: A6
#[test]
fn the_automatic_takes_back_what_was_set_by_hand() {
    let directory = up(CONFIGURATION, 1);
    until("it tells its pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
    let mode = |name: &str| instance(&status(&directory), name)["mode"].as_str().unwrap_or_default().to_owned();
    assert_eq!((mode("leader").as_str(), mode("follower-1").as_str()), ("watched", "watched"));
    directory.run(&["memory", "set", "leader", "200MB"]).ok();
    assert_eq!(mode("leader"), "pinned");
    assert_eq!(directory.run(&["memory", "auto", "on", "leader"]).ok(), "leader gets what it needs from now on.\n");
    assert_eq!((mode("leader").as_str(), mode("follower-1").as_str()), ("automatic", "watched"));
    let switched = directory.run(&["memory", "auto", "on", "--json"]).ok();
    assert_eq!(switched.trim(), "{\"event\":\"switched\",\"instance\":null,\"automatic\":true}");
    assert_eq!(mode("follower-1"), "automatic");
    assert_eq!(status(&directory)["automatic"], true);
    directory.run(&["memory", "auto", "off"]).ok();
    assert_eq!((mode("leader").as_str(), status(&directory)["automatic"].clone()), ("watched", Value::from(false)));
}

#[test]
fn a_budget_that_all_exceed_is_kept() {
    let configuration = CONFIGURATION.replace("auto = false", "auto = true").replace("2GB", "400MB");
    let directory = up(&configuration, 1);
    until("all pools together are within the budget", || {
        let pools = ["leader", "follower-1"].map(|name| pool_bytes(&directory, name));
        pools.iter().copied().sum::<Option<u64>>().is_some_and(|sum| sum <= 400 * MIB)
    });
    let refused = directory.run(&["memory", "set", "leader", "350MB"]).refused(1);
    assert!(refused.contains("400MB"), "{refused}");
    let why = directory.run(&["memory", "history"]).ok();
    assert!(why.contains("400MB"), "{why}");
}
