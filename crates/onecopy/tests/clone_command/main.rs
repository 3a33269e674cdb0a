//! `onecopy clone` as a person runs it: what becomes of the replication slot.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use onecopy_clone::service::{Rendezvous, Service};
use onecopy_postgres::{Binaries, ConnectionParameters, Server};
use onecopy_testing::process::{kill_all, with_argument, working_in};
use onecopy_testing::{TestDirectory, create, server_options, until_async, wait_replayed};

const PROGRAM: &str = env!("CARGO_BIN_EXE_onecopy");

/// A primary that somebody else started, and clones beside it. All is ended and removed when this is dropped.
struct ClonedPrimary {
    server: Server,
    directory: TestDirectory,
}

impl ClonedPrimary {
    async fn start() -> ClonedPrimary {
        let directory = TestDirectory::new().expect("a directory");
        let binaries = Binaries::find(None).expect("PostgreSQL");
        let mut options = server_options(binaries, directory.join("primary")).expect("an account");
        options.password = "it's".to_owned();
        options.settings.set("full_page_writes", "on").set("max_wal_senders", "10").set("max_replication_slots", "10");
        let server = create(options).await.expect("a primary");
        let primary = ClonedPrimary { server, directory };
        primary.server.start().await.expect("started");
        primary.sql("CREATE TABLE item AS SELECT n, repeat('x', 500) AS filler FROM generate_series(1, 60000) n").await;
        primary
    }

    fn clone_directory(&self) -> PathBuf {
        self.directory.join("clone")
    }

    async fn sql(&self, statement: &str) -> Vec<tokio_postgres::Row> {
        let client = self.server.socket_connection().connect_as_client().await.expect("a connection");
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
        let (source, directory) = (self.server.socket_connection().to_dsn(), self.clone_directory());
        self.run(&[&[source.as_str(), directory.to_str().expect("UTF-8")], options].concat());
    }

    /// How the clone is reached.
    fn clone_connection(&self) -> ConnectionParameters {
        let text = std::fs::read_to_string(self.clone_directory().join("postmaster.pid")).expect("it runs");
        let port = text.lines().nth(3).and_then(|line| line.parse().ok()).expect("a port");
        ConnectionParameters { port, ..self.server.socket_connection() }
    }

    /// What is written now arrives at the clone, which follows through `slot`.
    async fn assert_follows(&self, slot: &str) {
        self.sql("UPDATE item SET filler = 'changed' WHERE n = 7").await;
        let clone = self.clone_connection().connect_as_client().await.expect("it answers");
        let primary = self.server.socket_connection().connect_as_client().await.expect("a connection");
        wait_replayed(&primary, &clone).await.expect("it follows");
        let changed = clone.query("SELECT 1 FROM item WHERE filler = 'changed'", &[]).await.expect("a result");
        assert_eq!(changed.len(), 1);
        let row = clone.query_one("SELECT current_setting('primary_slot_name')", &[]).await.expect("a result");
        assert_eq!(row.get::<_, String>(0), slot);
    }
}

impl Drop for ClonedPrimary {
    fn drop(&mut self) {
        let rendezvous = Rendezvous::of_source(self.server.data_directory());
        // The servers first: as long as a clone is filled, its service lives.
        kill_all(|| working_in(self.directory.path()));
        if let Ok(rendezvous) = rendezvous {
            kill_all(|| of_service(&rendezvous));
            let _ = std::fs::remove_dir_all(rendezvous.directory());
        }
    }
}

/// Keeper and hydrator: their command lines have its directory.
fn of_service(rendezvous: &Rendezvous) -> Vec<u32> {
    with_argument(&rendezvous.directory().to_string_lossy())
}

/// The slot of a clone that is whole and has caught up is dropped, watched or not, unless it is wanted; that of a
/// discarded one always.
///
/// Spec: A5
#[tokio::test(flavor = "multi_thread")]
async fn the_slot_of_a_whole_clone_is_dropped() {
    let primary = ClonedPrimary::start().await;
    primary.clone(&["--limit=0"]);
    assert_eq!(primary.slots().await, 0);
    primary.assert_follows("").await;
}

/// Spec: A5
#[tokio::test(flavor = "multi_thread")]
async fn the_slot_is_dropped_when_nobody_watches() {
    let primary = ClonedPrimary::start().await;
    // So slow that it is not whole yet when it answers, on a busy machine, too.
    primary.clone(&["--detach", "--limit=1"]);
    assert_eq!(primary.slots().await, 1, "it is not whole");
    let service = Service::reach(Path::new(PROGRAM), primary.server.data_directory()).await.expect("a service");
    service.set_limit(&primary.clone_directory(), None).await.expect("no limit");
    until_async("the slot is dropped", async || primary.slots().await == 0).await;
    primary.assert_follows("").await;
}

/// Spec: A5
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_wanted_stays() {
    let primary = ClonedPrimary::start().await;
    primary.clone(&["--limit=0", "--keep-slot"]);
    primary.run(&["--watch", primary.clone_directory().to_str().expect("UTF-8")]);
    assert_eq!(primary.slots().await, 1);
    primary.assert_follows("onecopy_clone").await;
}

/// Spec: A5
#[tokio::test(flavor = "multi_thread")]
async fn what_is_discarded_after_all_its_processes_died_leaves_no_slot() {
    let primary = ClonedPrimary::start().await;
    primary.clone(&["--detach", "--limit=1"]);
    let rendezvous = Rendezvous::of_source(primary.server.data_directory()).expect("a place");
    assert!(!of_service(&rendezvous).is_empty());
    kill_all(|| of_service(&rendezvous));
    kill_all(|| working_in(&primary.clone_directory()));
    assert_eq!(primary.slots().await, 1);
    let output = primary.run(&["--discard", primary.clone_directory().to_str().expect("UTF-8")]);
    assert_eq!(primary.slots().await, 0, "{output:?}");
    assert!(!primary.clone_directory().exists());
}
