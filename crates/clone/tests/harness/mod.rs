//! What real clones are made of: a primary with data of several kinds; and the proof that a clone is one.

// Each test program uses a part of it.
#![allow(dead_code)]

#[path = "../../../postgres/tests/server/mod.rs"]
pub mod server;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use onecopy_clone::plan::{FillOptions, Plan, Recovery, SourceServer};
use onecopy_postgres::{InheritedDescriptor, Role, Server, Settings, StandbyOptions, StopMode};
use onecopy_testing::{
    Content, FileSystem, MountedDisk, TestDirectory, WAIT_MAX, create_with, until_async, wait_replayed,
};
use tokio_postgres::Client;

/// A second database, because a clone is of all of them.
pub const SECOND_DATABASE: &str = "archive";
/// The least that mkfs.xfs makes is 300 MB.
const XFS_BYTES: u64 = 1 << 30;
const CONTENT: Content<'static> = Content {
    databases: &[SECOND_DATABASE],
    scripts: &[
        (
            "postgres",
            "CREATE TABLE items (n int PRIMARY KEY, filler text);
             INSERT INTO items SELECT n, repeat('x', 200) FROM generate_series(1, 20000) AS n;
             CREATE UNLOGGED TABLE scratch (n int);
             INSERT INTO scratch SELECT generate_series(1, 1000)",
        ),
        (SECOND_DATABASE, "CREATE TABLE old AS SELECT n FROM generate_series(1, 3000) AS n"),
    ],
    pgbench: None,
};
/// In a place of each test's own.
const PLACED: &str = "CREATE TABLE placed (n int PRIMARY KEY, filler text) TABLESPACE elsewhere;
    INSERT INTO placed SELECT n, repeat('y', 100) FROM generate_series(1, 5000) AS n";

/// A file system that shares blocks, in this directory.
pub fn xfs(directory: &TestDirectory) -> MountedDisk {
    MountedDisk::new(FileSystem::Xfs, directory.path(), "xfs", XFS_BYTES).expect("root, xfsprogs and a loop device")
}

/// A running primary with two databases, a tablespace and an unlogged table, in `directory`.
pub async fn primary(directory: &Path, settings: &Settings) -> Server {
    let mut options = server::options(directory.join("source"), Role::Leader);
    options.settings.merge(settings);
    let elsewhere = directory.join("elsewhere");
    options.user.create_directory(&elsewhere).expect("made");
    let server = create_with(options, &CONTENT).await.expect("made");
    server.start().await.expect("starts");
    let client = server.connection().connect_as_client().await.expect("connected");
    let tablespace = format!("CREATE TABLESPACE elsewhere LOCATION '{}'", elsewhere.display());
    client.batch_execute(&tablespace).await.expect("made");
    client.batch_execute(PLACED).await.expect("made");
    server
}

pub fn source_of(server: &Server) -> SourceServer {
    SourceServer {
        connection: server.connection(),
        data_directory: server.data_directory().to_owned(),
        leader: None,
        replication: None,
    }
}

/// A plan for a clone `name` in `directory`.
pub fn plan_for(server: &Server, directory: &Path, name: &str, recovery: Recovery) -> Plan {
    Plan {
        source: source_of(server),
        target: directory.join(name).join("data"),
        tablespaces: directory.join(name).join("tablespaces"),
        user_name: server.options().user.name().to_owned(),
        slot: name.to_owned(),
        recovery,
        fill: FillOptions::default(),
        wal_keep_bytes_max: 1 << 30,
    }
}

/// Opens a clone as its source's standby; does not start it.
pub async fn open_clone(source: &Server, plan: &Plan, inherited: Vec<InheritedDescriptor>) -> Server {
    let mut options = server::options(plan.target.parent().expect("a home").to_owned(), Role::Follower);
    options.data_directory = Some(plan.target.clone());
    let clone = Server::open(options).await.expect("a data directory");
    let primary = source.connection().with_application_name(&plan.slot);
    clone.make_standby(&StandbyOptions { primary, slot: Some(plan.slot.clone()) }).expect("a standby");
    clone.set_inherited(inherited);
    clone
}

/// Writes until it is told to stop: inserts, updates that leave dead rows, tables that come and go, checkpoints.
pub struct Load {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU32>,
    writing: tokio::task::JoinHandle<()>,
}

impl Load {
    pub async fn begin(server: &Server) -> Load {
        let client = server.connection().connect_as_client().await.expect("connected");
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU32::new(0));
        let (seen, written) = (stop.clone(), rounds.clone());
        let writing = tokio::spawn(async move {
            let mut round = 0;
            while !seen.load(Ordering::Relaxed) {
                round += 1;
                write_round(&client, round).await;
                written.store(round, Ordering::Relaxed);
            }
        });
        Load { stop, rounds, writing }
    }

    /// Waits until so many more rounds were written: each makes a table, and removes the one of two rounds before.
    pub async fn go_on(&self, more: u32) {
        let enough = self.rounds.load(Ordering::Relaxed) + more;
        until_async("the load has gone on", async || {
            assert!(!self.writing.is_finished(), "the load has failed");
            self.rounds.load(Ordering::Relaxed) >= enough
        })
        .await;
    }

    /// At least one round was written.
    pub async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.writing.await.expect("writes");
        assert!(self.rounds.load(Ordering::Relaxed) > 0);
    }
}

async fn write_round(client: &Client, round: u32) {
    let numbers = format!("{} AND {}", round * 37 % 19_000, round * 37 % 19_000 + 200);
    let statements = [
        // Who updates the same rows in another order would be a deadlock.
        format!(
            "LOCK TABLE items IN SHARE ROW EXCLUSIVE MODE;
             UPDATE items SET filler = filler || {round} WHERE n BETWEEN {numbers}"
        ),
        format!("UPDATE placed SET filler = 'round {round}' WHERE n % 50 = {}", round % 50),
        // Another load may have been here before.
        "INSERT INTO items SELECT (SELECT max(n) FROM items) + n, 'new' FROM generate_series(1, 100) AS n".to_owned(),
        format!("CREATE TABLE IF NOT EXISTS passing_{round} AS SELECT n FROM generate_series(1, 500) AS n"),
        format!("DROP TABLE IF EXISTS passing_{}", round.saturating_sub(2)),
        "TRUNCATE scratch".to_owned(),
        (if round.is_multiple_of(10) { "CHECKPOINT" } else { "SELECT" }).to_owned(),
    ];
    for statement in &statements {
        client.batch_execute(statement).await.expect(statement);
    }
}

/// Proves that a running clone is its source: the same rows in the same places once it has replayed all, also after a
/// restart, whole pages, and a primary when it is told to be one. Stops it.
pub async fn prove(source: &Server, clone: &Server) {
    assert_same_rows(source, clone).await;
    clone.stop(StopMode::Fast).await.expect("stops");
    clone.set_inherited(Vec::new());
    check_pages(clone);
    clone.start().await.expect("starts again");
    assert_same_rows(source, clone).await;
    clone.promote(WAIT_MAX).await.expect("promoted");
    let client = clone.connection().connect_as_client().await.expect("connected");
    client
        .batch_execute("INSERT INTO items VALUES (-1, 'its own'); INSERT INTO scratch VALUES (1)")
        .await
        .expect("written");
    clone.stop(StopMode::Fast).await.expect("stops");
    check_pages(clone);
}

/// Waits until the clone has replayed what the source has written, and compares.
pub async fn assert_same_rows(source: &Server, clone: &Server) {
    let client = source.connection().connect_as_client().await.expect("connected");
    let standby = clone.connection().connect_as_client().await.expect("connected");
    wait_replayed(&client, &standby).await.expect("replayed");
    for database in ["postgres", SECOND_DATABASE] {
        let expected = fingerprints(source, database).await;
        assert!(!expected.is_empty());
        assert_eq!(fingerprints(clone, database).await, expected, "{database}");
    }
}

/// Each table with the number of its rows and a hash over all, places included.
async fn fingerprints(server: &Server, database: &str) -> Vec<(String, i64, Option<String>)> {
    let client = server.connection().with_database(database).connect_as_client().await.expect("connected");
    let tables = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relpersistence = 'p'
        AND relnamespace = 'public'::regnamespace ORDER BY 1";
    let tables = client.query(tables, &[]).await.expect("listed");
    let mut found = Vec::new();
    for table in tables.iter().map(|row| row.get::<_, String>(0)) {
        let query =
            format!("SELECT count(*), md5(string_agg(ctid::text || t::text, ',' ORDER BY ctid)) FROM {table} AS t");
        let row = client.query_one(&query, &[]).await.expect("read");
        found.push((table, row.get(0), row.get(1)));
    }
    found
}

/// PostgreSQL's own check of every page of a stopped server.
pub fn check_pages(server: &Server) {
    let program = server.options().binaries.program("pg_checksums");
    let output = server.options().user.command(program).arg("--check").arg(server.data_directory()).output();
    let output = output.expect("pg_checksums runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What somebody is told who starts a server in this directory by himself.
pub fn start_by_hand(server: &Server, data_directory: &Path) -> String {
    let program = server.options().binaries.program("postgres");
    let mut command = server.options().user.command(program);
    command.arg("-D").arg(data_directory).args(["-c", "port=1"]);
    let output = command.output().expect("postgres runs");
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The slots of a server.
pub async fn slots(server: &Server) -> Vec<String> {
    let client = server.connection().connect_as_client().await.expect("connected");
    let rows = client.query("SELECT slot_name::text FROM pg_replication_slots ORDER BY 1", &[]).await.expect("read");
    rows.iter().map(|row| row.get(0)).collect()
}

/// What lies below a directory that does not belong to its server, or that others may read.
pub fn badly_owned(server: &Server, directory: &Path) -> Vec<PathBuf> {
    let user_id = server.options().user.user_id().to_string();
    let mut command = Command::new("find");
    command.arg(directory).args(["(", "-not", "-uid", &user_id, "-o", "-not", "-type", "l", "-perm", "/077", ")"]);
    let output = command.output().expect("find runs");
    String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect()
}
