//! `onecopy clone` as a person runs it: what becomes of the replication slot.

#[path = "../../../../tests/src/ports.rs"]
mod ports;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use onecopy_clone::service::{Rendezvous, Service};
use onecopy_postgres::{Binaries, ConnectionParameters, Server, ServerOptions, ServiceUser, processes_of};
use rustix::process::{Pid, Signal, kill_process};

const PROGRAM: &str = env!("CARGO_BIN_EXE_onecopy");
const WAIT_MAX: Duration = Duration::from_secs(240);

/// A primary that somebody else started, and clones beside it. All is ended and removed when this is dropped.
struct Laboratory {
    primary: Server,
    directory: tempfile::TempDir,
}

impl Laboratory {
    async fn start() -> Laboratory {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).expect("its mode");
        let (binaries, user) = (Binaries::find(None).expect("PostgreSQL"), ServiceUser::resolve(None).expect("a user"));
        let home = directory.path().join("primary");
        let mut options =
            ServerOptions::new(binaries, user, home, ports::free_port().expect("a free port"), "it's".to_owned());
        options.settings.set("fsync", "off").set("max_wal_senders", "10").set("max_replication_slots", "10");
        let primary = Server::create(options).await.expect("a primary");
        primary.start().await.expect("started");
        let laboratory = Laboratory { primary, directory };
        laboratory
            .sql("CREATE TABLE item AS SELECT n, repeat('x', 500) AS filler FROM generate_series(1, 60000) n")
            .await;
        laboratory
    }

    fn clone_directory(&self) -> PathBuf {
        self.directory.path().join("clone")
    }

    async fn sql(&self, statement: &str) -> Vec<tokio_postgres::Row> {
        let client = self.primary.socket_connection().connect().await.expect("a connection");
        client.query(statement, &[]).await.expect("a result")
    }

    async fn slots(&self) -> usize {
        self.sql("SELECT 1 FROM pg_replication_slots").await.len()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(PROGRAM);
        let output = command.arg("clone").args(arguments).stdin(Stdio::null()).output().expect("run onecopy");
        assert!(output.status.success(), "{output:?}");
        output
    }

    /// Makes the clone with these options.
    fn clone(&self, options: &[&str]) {
        let (source, directory) = (self.primary.socket_connection().to_dsn(), self.clone_directory());
        self.run(&[&[source.as_str(), directory.to_str().expect("UTF-8")], options].concat());
    }

    /// How the clone is reached.
    fn clone_connection(&self) -> ConnectionParameters {
        let text = std::fs::read_to_string(self.clone_directory().join("postmaster.pid")).expect("it runs");
        let port = text.lines().nth(3).and_then(|line| line.parse().ok()).expect("a port");
        ConnectionParameters { port, ..self.primary.socket_connection() }
    }

    /// What is written now arrives at the clone, which follows through `slot`.
    async fn assert_follows(&self, slot: &str) {
        self.sql("UPDATE item SET filler = 'changed' WHERE n = 7").await;
        let clone = self.clone_connection().connect().await.expect("it answers");
        let begun = Instant::now();
        while clone.query("SELECT 1 FROM item WHERE filler = 'changed'", &[]).await.expect("a result").is_empty() {
            assert!(begun.elapsed() < WAIT_MAX, "it does not follow");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let row = clone.query_one("SELECT current_setting('primary_slot_name')", &[]).await.expect("a result");
        assert_eq!(row.get::<_, String>(0), slot);
    }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        kill_all(|| processes_of(&self.clone_directory()));
        let Ok(rendezvous) = Rendezvous::of_source(self.primary.data_directory()) else { return };
        kill_all(|| processes_with(rendezvous.directory()));
        kill_all(|| processes_of(self.primary.data_directory()));
        let _ = std::fs::remove_dir_all(rendezvous.directory());
    }
}

fn kill_all(processes: impl Fn() -> Vec<u32>) {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        let found = processes();
        if found.is_empty() {
            return;
        }
        for process in found.iter().filter_map(|number| Pid::from_raw(number.cast_signed())) {
            let _ = kill_process(process, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Processes that have this path on their command line: keeper and hydrator.
fn processes_with(path: &Path) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let name = path.to_string_lossy().into_owned();
    let of_it = numbers.filter(|number| {
        let words = std::fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).split('\0').any(|word| word == name)
    });
    of_it.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_of_a_whole_clone_is_dropped() {
    let laboratory = Laboratory::start().await;
    laboratory.clone(&["--limit=0"]);
    assert_eq!(laboratory.slots().await, 0);
    laboratory.assert_follows("").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_is_dropped_when_nobody_watches() {
    let laboratory = Laboratory::start().await;
    // So slow that it is not whole yet when it answers, on a busy machine, too.
    laboratory.clone(&["--detach", "--limit=1"]);
    assert_eq!(laboratory.slots().await, 1, "it is not whole");
    let service = Service::reach(Path::new(PROGRAM), laboratory.primary.data_directory()).await.expect("a service");
    service.set_limit(&laboratory.clone_directory(), None).await.expect("no limit");
    let begun = Instant::now();
    while laboratory.slots().await > 0 {
        assert!(begun.elapsed() < WAIT_MAX, "the slot stays");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    laboratory.assert_follows("").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_wanted_stays() {
    let laboratory = Laboratory::start().await;
    laboratory.clone(&["--limit=0", "--keep-slot"]);
    laboratory.run(&["--watch", laboratory.clone_directory().to_str().expect("UTF-8")]);
    assert_eq!(laboratory.slots().await, 1);
    laboratory.assert_follows("onecopy_clone").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_discarded_after_all_its_processes_died_leaves_no_slot() {
    let laboratory = Laboratory::start().await;
    laboratory.clone(&["--detach", "--limit=1"]);
    let rendezvous = Rendezvous::of_source(laboratory.primary.data_directory()).expect("a place");
    assert!(!processes_with(rendezvous.directory()).is_empty());
    kill_all(|| processes_with(rendezvous.directory()));
    kill_all(|| processes_of(&laboratory.clone_directory()));
    assert_eq!(laboratory.slots().await, 1);
    let output = laboratory.run(&["--discard", laboratory.clone_directory().to_str().expect("UTF-8")]);
    assert_eq!(laboratory.slots().await, 0, "{output:?}");
    assert!(!laboratory.clone_directory().exists());
}
