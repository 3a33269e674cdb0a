//! `onecopy router`: over servers that somebody else started.

use std::process::Command;

use onecopy_testing::process::send;
use onecopy_testing::until;
use rustix::process::Signal;

use crate::directory::{ClusterDirectory, Foreground, page_of};

/// A configuration over the servers of a cluster that is up: the leader, and the follower if `with_follower`.
fn configuration(directory: &ClusterDirectory, freshness: &str, with_follower: bool) -> String {
    let mut text =
        format!("[router]\nlisten = \"127.0.0.1:0\"\nmetrics_listen = \"127.0.0.1:0\"\nfreshness = \"{freshness}\"\n");
    let servers = [("[leader]", "leader", 5432), ("[[follower]]", "follower-1", 5433)];
    for (table, name, port) in servers.into_iter().take(1 + usize::from(with_follower)) {
        let (run, secrets) = (directory.path().join("run"), directory.path().join("secrets"));
        text.push_str(&format!(
            "{table}\nname = \"{name}\"\nhost = \"{}\"\nport = {port}\nuser = \"postgres\"\npassword_file = \"{}\"\n",
            run.display(),
            secrets.join("superuser").display()
        ));
    }
    text
}

/// Starts the router; where clients connect, and where its metrics are.
fn start(directory: &ClusterDirectory, file: &str) -> (Foreground, String, String) {
    let mut running = directory.spawn(&["router", "--config", file]);
    let line = running.line();
    let addresses = line.strip_prefix("The router is on ").and_then(|rest| rest.strip_suffix('.'));
    let addresses = addresses.and_then(|rest| rest.split_once(", metrics are on "));
    let (address, metrics) = addresses.unwrap_or_else(|| panic!("{line:?}"));
    (running, address.to_owned(), metrics.to_owned())
}

/// The router alone serves from `onecopy.toml`, reads it again at SIGHUP with the followers that came or went, keeps
/// what it had when it is wrong, stops at SIGTERM.
///
/// Spec: L4
#[test]
fn c21_the_router_alone_serves_reloads_and_stops() {
    let directory = ClusterDirectory::new();
    directory.up(1);
    directory.sql("CREATE TABLE kept AS SELECT 3 AS number");
    let file = directory.path().join("onecopy.toml");
    std::fs::write(&file, configuration(&directory, "session", true)).expect("write");
    let (mut running, address, metrics) = start(&directory, file.to_str().expect("a plain path"));

    let dsn = directory.run(&["dsn"]).ok();
    let (before, after) = dsn.trim().split_once('@').expect("user and address");
    let (_, database) = after.split_once('/').expect("address and database");
    let url = format!("{before}@{address}/{database}");
    let ask = |statement: &str| Command::new("psql").args([&url, "-XAtc", statement]).output().expect("run psql");
    assert_eq!(String::from_utf8_lossy(&ask("SELECT number FROM kept").stdout).trim(), "3");
    until("it is well", || page_of(&metrics, "/healthz").0.ends_with("200 OK"));
    assert!(page_of(&metrics, "/status").1.contains("\"freshness\":\"session\""));

    std::fs::write(&file, configuration(&directory, "strict", false)).expect("write");
    send(running.id(), Signal::HUP);
    until("the file was read again", || page_of(&metrics, "/status").1.contains("\"freshness\":\"strict\""));
    until("the follower has gone", || !page_of(&metrics, "/status").1.contains("\"follower-1\""));
    assert_eq!(String::from_utf8_lossy(&ask("SELECT number FROM kept").stdout).trim(), "3");
    std::fs::write(&file, configuration(&directory, "strict", true)).expect("write");
    send(running.id(), Signal::HUP);
    until("reads reach the follower again", || {
        let answer = ask("SELECT number FROM kept");
        assert_eq!(String::from_utf8_lossy(&answer.stdout).trim(), "3");
        let status: serde_json::Value = serde_json::from_str(&page_of(&metrics, "/status").1).expect("JSON");
        status["servers"][1]["name"] == "follower-1" && status["servers"][1]["reads"].as_u64() > Some(0)
    });
    std::fs::write(&file, "[router]\nfreshness = 7\n").expect("write");
    send(running.id(), Signal::HUP);
    assert_eq!(String::from_utf8_lossy(&ask("SELECT number FROM kept").stdout).trim(), "3");
    assert!(page_of(&metrics, "/status").1.contains("\"freshness\":\"strict\""));

    assert_eq!(running.end_by(Signal::TERM), Some(0));
    assert_eq!(directory.postmasters().len(), 2, "its servers are not its own to stop");
}
