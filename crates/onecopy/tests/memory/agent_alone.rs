//! `onecopy memory agent`: servers that somebody else has started.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::directory::{TestDirectory, page_of, send, wait_until};
use crate::laboratory::{CONFIGURATION, MIB, START_BYTES, pool_bytes, up};

/// Killed when dropped, also by a failing test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts an agent; its first line.
fn start(configuration: &Path, socket: &Path) -> (Running, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onecopy"));
    command.args(["memory", "agent", "--metrics-listen=127.0.0.1:0", "--config"]).arg(configuration);
    command.arg("--socket").arg(socket).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut running = Running(command.spawn().expect("run onecopy"));
    let mut line = String::new();
    let stdout = running.0.stdout.take().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    (running, line)
}

/// The leader of a cluster, as a server that somebody else runs.
fn configuration(directory: &TestDirectory) -> String {
    let (run, data) = (directory.path().join("run"), directory.path().join("leader/data"));
    format!(
        "[memory]\nauto = false\nbudget = \"2GB\"\n[[memory.instance]]\nname = \"shop\"\nkind = \"postgresql\"\n\
         dsn = \"host={} port=5432 user=postgres dbname=postgres\"\ndata_directory = \"{}\"\npassword_file = \"{}\"\nfloor = \"200MB\"\n",
        run.display(),
        data.display(),
        directory.path().join("secrets/superuser").display()
    )
}

#[test]
fn a_server_of_others_is_looked_after_and_left_as_it_is() {
    let directory = up(CONFIGURATION, 0);
    wait_until("it tells its pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
    let elsewhere = tempfile::tempdir().expect("a directory");
    let (file, socket) = (elsewhere.path().join("onecopy.toml"), elsewhere.path().join("below/memory.sock"));
    std::fs::write(&file, configuration(&directory)).expect("write");
    let (mut running, line) = start(&file, &socket);
    assert!(line.starts_with("The memory of shop is looked after"), "{line}");
    let option = format!("--socket={}", socket.display());
    let shop = || -> Value {
        let status = directory.run(&["memory", "status", "--json", &option]).ok();
        serde_json::from_str::<Value>(&status).expect("a JSON document")["instances"][0].clone()
    };
    wait_until("it tells its pool", || shop()["observation"]["pool_bytes"] == START_BYTES);
    assert_eq!(shop()["instance"], "shop");
    let complaint = directory.run(&["memory", "set", "shop", "180MB", &option]).refused(1);
    assert!(complaint.contains("its floor is 200MB"), "{complaint}");
    let told = directory.run(&["memory", "set", "shop", "220MB", "--wait", &option]).ok();
    assert_eq!(told, "shop has 220MB, it had 256MB.\n");

    let mut second = Command::new(env!("CARGO_BIN_EXE_onecopy"));
    second.args(["memory", "agent", "--config"]).arg(&file).arg("--socket").arg(&socket);
    let refused = second.output().expect("run onecopy");
    assert_eq!(refused.status.code(), Some(5), "{refused:?}");

    let (_, metrics) = line.trim().trim_end_matches('.').rsplit_once(" metrics are on ").expect("an address");
    let (_, body) = page_of(metrics, "/metrics");
    assert!(body.contains(&format!("onecopy_memory_pool_bytes{{instance=\"shop\"}} {}\n", 220 * MIB)), "{body}");
    assert!(page_of(metrics, "/healthz").0.ends_with("200 OK"));
    assert!(page_of(metrics, "/memory/auto").0.ends_with("404 Not Found"));

    send("TERM", running.0.id());
    assert_eq!(running.0.wait().expect("it ends").code(), Some(0));
    assert!(!socket.exists());
    directory.run(&["memory", "status", &option]).refused(3);
    let pool = "SELECT pool_bytes FROM onecopy_memory.onecopy_memory_status";
    assert_eq!(directory.superuser_sql("leader", pool), (220 * MIB).to_string());
}

#[test]
fn an_agent_without_servers_is_refused() {
    let elsewhere = tempfile::tempdir().expect("a directory");
    let file = elsewhere.path().join("onecopy.toml");
    std::fs::write(&file, "[memory]\nauto = true\n").expect("write");
    let mut command = Command::new(env!("CARGO_BIN_EXE_onecopy"));
    let ran = command.args(["memory", "agent", "--config"]).arg(&file).output().expect("run onecopy");
    assert_eq!(ran.status.code(), Some(4), "{ran:?}");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("[[memory.instance]]"), "{ran:?}");
}
