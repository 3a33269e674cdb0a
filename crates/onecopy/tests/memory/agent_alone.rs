//! `onecopy memory agent`: servers that somebody else has started.

use std::process::Command;

use onecopy_testing::{TestDirectory, until};
use rustix::process::Signal;
use serde_json::Value;

use crate::cluster::{CONFIGURATION, MIB, START_BYTES, pool_bytes, up};
use crate::directory::{ClusterDirectory, page_of};

/// The leader of a cluster, as a server that somebody else runs.
fn configuration(directory: &ClusterDirectory) -> String {
    let (run, data) = (directory.path().join("run"), directory.path().join("leader/data"));
    format!(
        "[memory]\nauto = false\nbudget = \"2GB\"\n[[memory.instance]]\nname = \"shop\"\nkind = \"postgresql\"\n\
         dsn = \"host={} port=5432 user=postgres dbname=postgres\"\ndata_directory = \"{}\"\npassword_file = \"{}\"\n\
         floor = \"200MB\"\n",
        run.display(),
        data.display(),
        directory.path().join("secrets/superuser").display()
    )
}

/// Servers of others are looked after and left as they are: PostgreSQL by `onecopy memory agent`, MariaDB by its own
/// means (`crates/memory/tests/mariadb.rs`).
///
/// Spec: A6
#[test]
fn a_server_of_others_is_looked_after_and_left_as_it_is() {
    let directory = up(CONFIGURATION, 0);
    until("it tells its pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
    let elsewhere = TestDirectory::new().expect("a directory");
    let (file, socket) = (elsewhere.join("onecopy.toml"), elsewhere.join("below/memory.sock"));
    std::fs::write(&file, configuration(&directory)).expect("write");
    let option = format!("--socket={}", socket.display());
    let config = format!("--config={}", file.display());
    let mut running = directory.spawn(&["memory", "agent", "--metrics-listen=127.0.0.1:0", &config, &option]);
    let line = running.line();
    assert!(line.starts_with("The memory of shop is looked after"), "{line}");
    let shop = || -> Value {
        let status = directory.run(&["memory", "status", "--json", &option]).ok();
        serde_json::from_str::<Value>(&status).expect("a JSON document")["instances"][0].clone()
    };
    until("it tells its pool", || shop()["observation"]["pool_bytes"] == START_BYTES);
    assert_eq!(shop()["instance"], "shop");
    let complaint = directory.run(&["memory", "set", "shop", "180MB", &option]).refused(1);
    assert!(complaint.contains("its floor is 200MB"), "{complaint}");
    let told = directory.run(&["memory", "set", "shop", "220MB", "--wait", &option]).ok();
    assert_eq!(told, "shop has 220MB, it had 256MB.\n");

    directory.run(&["memory", "agent", &config, &option]).refused(5);

    let (_, metrics) = line.trim_end_matches('.').rsplit_once(" metrics are on ").expect("an address");
    let (_, body) = page_of(metrics, "/metrics");
    assert!(body.contains(&format!("onecopy_memory_pool_bytes{{instance=\"shop\"}} {}\n", 220 * MIB)), "{body}");
    assert!(page_of(metrics, "/healthz").0.ends_with("200 OK"));
    assert!(page_of(metrics, "/memory/auto").0.ends_with("404 Not Found"));

    assert_eq!(running.end_by(Signal::TERM), Some(0));
    assert!(!socket.exists());
    directory.run(&["memory", "status", &option]).refused(3);
    let pool = "SELECT pool_bytes FROM onecopy_memory.onecopy_memory_status";
    assert_eq!(directory.superuser_sql("leader", pool), (220 * MIB).to_string());
}

#[test]
fn an_agent_without_servers_is_refused() {
    let elsewhere = TestDirectory::new().expect("a directory");
    let file = elsewhere.join("onecopy.toml");
    std::fs::write(&file, "[memory]\nauto = true\n").expect("write");
    let mut command = Command::new(env!("CARGO_BIN_EXE_onecopy"));
    let ran = command.args(["memory", "agent", "--config"]).arg(&file).output().expect("run onecopy");
    assert_eq!(ran.status.code(), Some(4), "{ran:?}");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("[[memory.instance]]"), "{ran:?}");
}
