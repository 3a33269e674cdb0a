//! `onecopy router`: over servers that somebody else started.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::directory::{TestDirectory, page_of, send, wait_until};

/// Killed when dropped, also by a failing test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A configuration over the servers of a cluster that is up: the leader, and the follower if `with_follower`.
fn configuration(directory: &TestDirectory, freshness: &str, with_follower: bool) -> String {
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
fn start(file: &Path) -> (Running, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onecopy"));
    command.args(["router", "--config"]).arg(file).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut running = Running(command.spawn().expect("run onecopy"));
    let mut line = String::new();
    let stdout = running.0.stdout.take().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    let addresses = line.trim().strip_prefix("The router is on ").and_then(|rest| rest.strip_suffix('.'));
    let addresses = addresses.and_then(|rest| rest.split_once(", metrics are on "));
    let (address, metrics) = addresses.unwrap_or_else(|| panic!("{line:?}"));
    (running, address.to_owned(), metrics.to_owned())
}

#[test]
fn c21_the_router_alone_serves_reloads_and_stops() {
    let directory = TestDirectory::new();
    directory.up(1);
    directory.sql("CREATE TABLE kept AS SELECT 3 AS number");
    let file = directory.path().join("onecopy.toml");
    std::fs::write(&file, configuration(&directory, "session", true)).expect("write");
    let (mut running, address, metrics) = start(&file);

    let dsn = directory.run(&["dsn"]).ok();
    let (before, after) = dsn.trim().split_once('@').expect("user and address");
    let (_, database) = after.split_once('/').expect("address and database");
    let url = format!("{before}@{address}/{database}");
    let ask = |statement: &str| Command::new("psql").args([&url, "-XAtc", statement]).output().expect("run psql");
    assert_eq!(String::from_utf8_lossy(&ask("SELECT number FROM kept").stdout).trim(), "3");
    wait_until("it is well", || page_of(&metrics, "/healthz").0.ends_with("200 OK"));
    assert!(page_of(&metrics, "/status").1.contains("\"freshness\":\"session\""));

    std::fs::write(&file, configuration(&directory, "strict", false)).expect("write");
    send("HUP", running.0.id());
    wait_until("the file was read again", || page_of(&metrics, "/status").1.contains("\"freshness\":\"strict\""));
    wait_until("the follower has gone", || !page_of(&metrics, "/status").1.contains("\"follower-1\""));
    assert_eq!(String::from_utf8_lossy(&ask("SELECT number FROM kept").stdout).trim(), "3");
    std::fs::write(&file, configuration(&directory, "strict", true)).expect("write");
    send("HUP", running.0.id());
    wait_until("reads reach the follower again", || {
        let answer = ask("SELECT number FROM kept");
        assert_eq!(String::from_utf8_lossy(&answer.stdout).trim(), "3");
        let status: serde_json::Value = serde_json::from_str(&page_of(&metrics, "/status").1).expect("JSON");
        status["servers"][1]["name"] == "follower-1" && status["servers"][1]["reads"].as_u64() > Some(0)
    });
    std::fs::write(&file, "[router]\nfreshness = 7\n").expect("write");
    send("HUP", running.0.id());
    assert_eq!(String::from_utf8_lossy(&ask("SELECT number FROM kept").stdout).trim(), "3");
    assert!(page_of(&metrics, "/status").1.contains("\"freshness\":\"strict\""));

    send("TERM", running.0.id());
    assert_eq!(running.0.wait().expect("it ends").code(), Some(0));
    assert_eq!(directory.postmasters().len(), 2, "its servers are not its own to stop");
}
