//! A cluster's ordinary life.

use std::collections::BTreeSet;

use onecopy_testing::process::send;
use onecopy_testing::until;
use rustix::process::Signal;

use crate::directory::ClusterDirectory;

/// `up` makes a cluster that serves clients; `down` stops every process of it; `up` again continues with the same data
/// on the same port.
///
/// Spec: A3
#[test]
fn c1_a_cluster_serves_stops_and_keeps_its_data() {
    let directory = ClusterDirectory::new();
    directory.up(2);
    directory.sql("CREATE TABLE kept (number int); INSERT INTO kept VALUES (42)");
    assert_eq!(directory.sql("SELECT current_user || ' ' || current_database()"), "onecopy postgres");
    let port = directory.status()["address"].as_str().expect("an address").to_owned();
    assert_eq!(directory.postmasters().len(), 3);
    // None that the kernel gives to somebody else while the cluster is down.
    let number: u16 = port.rsplit(':').next().and_then(|number| number.parse().ok()).expect("a port");
    assert!((20_000..32_000).contains(&number), "{port}");

    directory.run(&["down"]).ok();
    assert_eq!(directory.postmasters(), []);
    assert_eq!(directory.run(&["status"]).code, Some(3));
    directory.run(&["down"]).ok();

    directory.run(&["up", "--detach"]).ok();
    assert_eq!(directory.sql("SELECT number FROM kept"), "42");
    assert_eq!(directory.status()["address"], port.as_str());
    assert_eq!(directory.postmasters().len(), 3);
}

/// `status`, `/status`, `/metrics` and `/healthz` tell of every server: role, state, lag, restarts.
///
/// Spec: L5
#[test]
fn c2_status_and_page_tell_of_every_server() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    let mut status = directory.status();
    until("the follower has told how far it is, and both answer", || {
        status = directory.status();
        let servers = &status["servers"];
        let streams = servers[1]["replay_lag_bytes"] == 0 && servers[1]["replication"] == "streaming";
        streams && (0..2_usize).all(|server| servers[server]["state"] == "running")
    });
    let servers = status["servers"].as_array().expect("a list");
    let told: Vec<_> = servers.iter().map(|server| [&server["name"], &server["role"], &server["state"]]).collect();
    assert_eq!(told, [["leader", "leader", "running"], ["follower-1", "follower", "running"]]);
    assert_eq!(status["servers"][1]["replication"], "streaming");
    assert_eq!(status["process_id"], directory.daemon());
    until("the table says so", || directory.run(&["status"]).ok().contains("streaming"));

    until("it is well", || directory.page("/healthz").0.ends_with("200 OK"));
    let (_, metrics) = directory.page("/metrics");
    assert!(metrics.contains("onecopy_instance_running{server=\"follower-1\",role=\"follower\"} 1\n"), "{metrics}");
    let guide = include_str!("../../../../docs/guide/metrics.md");
    let names: BTreeSet<&str> =
        metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert_eq!(metrics.matches("# TYPE ").count(), names.len(), "a metric comes twice: {metrics}");
    for name in names {
        assert!(guide.contains(name), "the guide does not name the metric {name}");
    }
    let (_, page) = directory.page("/status");
    assert!(page.contains("\"follower-1\""), "{page}");
}

/// `dsn` works with any client; its role is no superuser; a wrong password is refused.
///
/// Spec: C2
#[test]
fn c3_dsn_works_with_any_client_and_is_not_a_superuser() {
    let directory = ClusterDirectory::new();
    directory.up(0);
    let dsn = directory.run(&["dsn"]).ok();
    let output = std::process::Command::new("psql")
        .args([dsn.trim(), "-XAtc", "SELECT rolsuper, rolcreatedb FROM pg_roles WHERE rolname = current_user"])
        .output()
        .expect("run psql");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "f|t", "{output:?}");
    // Nor does it get the servers' account otherwise.
    for role in ["pg_execute_server_program", "pg_read_server_files", "pg_write_server_files"] {
        let refusal = directory.run(&["psql", "--", "-Xc", &format!("GRANT {role} TO onecopy")]).refused(1);
        assert!(refusal.contains("must have admin option") || refusal.contains("permission denied"), "{refusal}");
    }
    // Roles it makes where that gives it none of these rights.
    let makes_roles = "SELECT rolcreaterole = (current_setting('server_version_num')::int >= 160000) FROM pg_roles \
        WHERE rolname = current_user";
    assert_eq!(directory.sql(makes_roles), "t");
    let wrong = dsn.trim().replace("@", "x@");
    let output = std::process::Command::new("psql").args([&wrong, "-XAtc", "SELECT 1"]).output().expect("run psql");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("password authentication failed"), "{output:?}");
}

/// `--replicas` adds followers; fewer than there are is refused, nothing is thrown away.
///
/// Spec: A4
#[test]
fn c4_replicas_are_added_and_not_thrown_away() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    directory.run(&["down"]).ok();
    directory.run(&["up", "--detach", "--replicas=2"]).ok();
    assert_eq!(directory.status()["servers"].as_array().map(Vec::len), Some(3));
    directory.run(&["down"]).ok();
    let complaint = directory.run(&["up", "--detach", "--replicas=1"]).refused(1);
    assert!(complaint.contains("--replicas 2"), "{complaint}");
    assert_eq!(directory.postmasters(), []);
    let complaint = directory.run(&["up", "--detach", "--replicas=9"]).refused(1);
    assert!(complaint.contains("at most 8"), "{complaint}");
}

/// Ctrl-C and SIGTERM stop everything, each server cleanly.
///
/// Spec: A3
#[test]
fn c5_ctrl_c_stops_everything_cleanly() {
    let directory = ClusterDirectory::new();
    for signal in [Signal::INT, Signal::TERM] {
        let mut up = directory.spawn_up(1);
        assert!(up.read_until("\"ready\""));
        assert_eq!(directory.postmasters().len(), 2);
        assert_eq!(up.end_by(signal), Some(0), "by {signal:?}");
        assert_eq!(directory.postmasters(), []);
    }
    let log = std::fs::read_to_string(directory.path().join("leader/server.log")).expect("a log");
    assert_eq!(log.matches("database system was not properly shut down").count(), 0, "{log}");
}

/// Output that nobody reads any more ends neither a cluster nor a change.
///
/// Spec: A3
#[test]
fn c31_readers_that_are_gone_end_nothing() {
    let directory = ClusterDirectory::new();
    // Both outputs are pipes that nobody reads.
    let mut up = directory.spawn_unheard(&["up", "--port=0", "--replicas=1"]);
    until("it serves", || directory.run(&["status"]).code == Some(0));
    let mut scale = directory.spawn_unheard(&["scale", "2"]);
    assert_eq!(scale.wait().expect("wait for scale").code(), Some(0));
    assert_eq!(directory.postmasters().len(), 3);
    send(up.id(), Signal::TERM);
    assert_eq!(up.wait().expect("wait for up").code(), Some(0));
    assert_eq!(directory.postmasters(), []);
}

/// A directory with a path too long for Unix sockets works.
///
/// Spec: L4
#[test]
fn c6_a_long_path_gets_its_sockets_elsewhere() {
    let directory = ClusterDirectory::named(&"long".repeat(25));
    let notice = directory.run(&["up", "--detach", "--port=0", "--replicas=1"]);
    assert!(notice.stderr.contains("Unix sockets are in /"), "{notice:?}");
    let sockets = std::fs::read_link(directory.path().join("run")).expect("a link");
    assert_eq!(directory.sql("SELECT 1"), "1");
    directory.run(&["down"]).ok();
    std::fs::remove_dir_all(&sockets).expect("remove the sockets, as a restart of the machine does");
    directory.run(&["up", "--detach"]).ok();
    assert_eq!(directory.sql("SELECT 1"), "1");
    directory.run(&["down"]).ok();
    std::fs::remove_dir_all(&sockets).expect("leave nothing behind");
}
