//! The engine of MariaDB with a real server: sizes, progress, refusals, a server that goes and comes.

mod mariadb_server;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mariadb_server::MariaDbServer;
use onecopy_memory::agent::{Agent, Rhythm};
use onecopy_memory::arbiter::Policy;
use onecopy_memory::engine::{Engine, MariaDbAccess, MariaDbEngine};
use onecopy_memory::pressure::Source;
use onecopy_memory::{HostPressure, Kind, MemoryError};
use onecopy_testing::until_async;

const MIB: u64 = 1 << 20;

fn engine(server: &MariaDbServer, ceiling_mib: u64) -> MariaDbEngine {
    let name = "maria".parse().expect("a name");
    MariaDbEngine::new(name, Kind::MariaDb, server.access(), ceiling_mib * MIB)
}

#[tokio::test]
async fn a_pool_full_of_changed_pages_gives_its_memory_back() {
    let server = MariaDbServer::start(384);
    let engine = engine(&server, 1024);
    server.sql(
        "CREATE DATABASE shop; CREATE TABLE shop.item (id int AUTO_INCREMENT PRIMARY KEY, note varchar(2000)) \
         ENGINE=InnoDB",
    );
    server.sql("INSERT INTO shop.item (note) SELECT repeat('x', 2000) FROM shop.seq_1_to_120000");
    let before = engine.observe().await.expect("an answer");
    assert_eq!((before.pool_bytes, before.target_bytes, before.ceiling_bytes), (384 * MIB, 384 * MIB, 1024 * MIB));
    let resident_before = before.resident_bytes.expect("it runs here");
    assert!(resident_before > 250 * MIB, "{resident_before}");

    let change = engine.set_target(96 * MIB).await.expect("taken");
    assert_eq!((change.from_bytes, change.target_bytes), (384 * MIB, 96 * MIB));
    let seen = Mutex::new(Vec::new());
    let report = |progress: &onecopy_memory::engine::Progress| seen.lock().expect("no panic").push(progress.pool_bytes);
    let reached = engine.reach(change.target_bytes, &report).await.expect("reached");
    assert!(reached.reached());
    assert_eq!(seen.lock().expect("no panic").last(), Some(&(96 * MIB)));
    let after = engine.observe().await.expect("an answer");
    let resident_after = after.resident_bytes.expect("it runs here");
    assert!(resident_after + 150 * MIB < resident_before, "{resident_before} then {resident_after}");

    let change = engine.set_target(200 * MIB).await.expect("taken");
    engine.reach(change.target_bytes, &|_| {}).await.expect("grown");
    assert_eq!(server.sql("SELECT count(*), min(length(note)) FROM shop.item"), "120000\t2000");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let grown = engine.observe().await.expect("an answer");
    let ratio = grown.hit_ratio.expect("rows were read");
    assert!((0.0..=1.0).contains(&ratio) && grown.reads_per_second > 0.0, "{grown:?}");
}

#[tokio::test]
async fn sizes_are_rounded_and_impossible_ones_refused() {
    let server = MariaDbServer::start(128);
    let engine = engine(&server, 512);
    let before = engine.observe().await.expect("an answer");
    let change = engine.set_target(100 * MIB + 1).await.expect("taken");
    assert_eq!(change.target_bytes, (100 * MIB + 1).next_multiple_of(before.granule_bytes));
    engine.reach(change.target_bytes, &|_| {}).await.expect("reached");
    let below = engine.set_target(MIB).await.expect_err("too small");
    assert!(matches!(below, MemoryError::BelowFloor { .. }), "{below}");
    let above = engine.set_target(513 * MIB).await.expect_err("too large");
    assert!(matches!(above, MemoryError::AboveCeiling { .. }), "{above}");
    for hostile in [0, u64::MAX, u64::MAX - 1] {
        engine.set_target(hostile).await.expect_err("no size");
    }
    assert!(matches!(engine.take(MIB).await, Err(MemoryError::WrongLevel { .. })));
    let overtaken = engine.reach(300 * MIB, &|_| {}).await.expect_err("nobody has set it");
    assert!(overtaken.to_string().contains("meanwhile"), "{overtaken}");
    assert_eq!(engine.observe().await.expect("an answer").target_bytes, change.target_bytes);
}

#[tokio::test]
async fn what_the_server_refuses_is_told_in_its_words() {
    let server = MariaDbServer::start(128);
    server.sql(
        "CREATE USER reader@localhost IDENTIFIED BY 'it''s a \"pass\" word'; GRANT PROCESS ON *.* TO reader@localhost",
    );
    let access = MariaDbAccess {
        defaults_file: Some(
            server.write("reader.cnf", "[client]\nuser=reader\npassword=\"it's a \\\"pass\\\" word\"\n"),
        ),
        user: None,
        ..server.access()
    };
    let engine = MariaDbEngine::new("reader".parse().expect("a name"), Kind::MariaDb, access.clone(), 512 * MIB);
    assert_eq!(engine.observe().await.expect("it may look").pool_bytes, 128 * MIB);
    // A server that is slow to refuse is asked how far it is meanwhile.
    let refused = match engine.set_target(256 * MIB).await {
        Ok(change) => engine.reach(change.target_bytes, &|_| {}).await,
        refused => refused,
    };
    let error = refused.expect_err("it may not change").to_string();
    assert!(error.contains("Access denied") && error.contains("SUPER"), "{error}");
    let observation = engine.observe().await.expect("an answer");
    assert!(observation.blocked_by.is_some_and(|why| why.contains("Access denied")));

    let wrong = MariaDbAccess {
        defaults_file: Some(server.write("wrong.cnf", "[client]\nuser=reader\npassword=no\n")),
        ..access
    };
    let engine = MariaDbEngine::new("reader".parse().expect("a name"), Kind::MariaDb, wrong, 512 * MIB);
    let error = engine.observe().await.expect_err("a wrong password").to_string();
    assert!(error.contains("Access denied for user 'reader'"), "{error}");
}

#[tokio::test]
async fn a_server_that_goes_and_comes_is_found_again() {
    let mut server = MariaDbServer::start(128);
    let engine = engine(&server, 512);
    engine.observe().await.expect("an answer");
    server.kill();
    for _ in 0..2 {
        let error = engine.observe().await.expect_err("it is dead").to_string();
        assert!(error.contains("ERROR 20"), "{error}");
    }
    assert!(engine.set_target(200 * MIB).await.is_err());
    server.start_again(256);
    assert_eq!(engine.observe().await.expect("an answer").pool_bytes, 256 * MIB);
}

/// A host that always has enough: this machine may be short of memory for other reasons.
struct Roomy;

impl Source for Roomy {
    fn pressure(&self) -> Result<HostPressure, MemoryError> {
        Ok(HostPressure { available_bytes: 64 << 30, total_bytes: 64 << 30, ..HostPressure::default() })
    }
}

/// Spec: A6
#[tokio::test]
async fn the_agent_brings_it_into_the_budget_and_sets_it_by_hand() {
    let server = MariaDbServer::start(256);
    let policy = Policy { budget_bytes: 160 * MIB, ..Policy::for_host(64 << 30) };
    // Each answer is a process of its own.
    let rhythm = Rhythm { answer_timeout: Duration::from_secs(60), ..Rhythm::default() };
    let agent = Agent::with_rhythm(policy, vec![Arc::new(engine(&server, 512))], Arc::new(Roomy), rhythm);
    let running = tokio::spawn({
        let agent = agent.clone();
        async move { agent.run().await }
    });
    let pool = || agent.status().instances[0].observation.as_ref().map(|observation| observation.pool_bytes);
    until_async("the pool is in the budget", async || pool() == Some(160 * MIB)).await;
    let name = "maria".parse().expect("a name");
    let told = agent.set(&name, 100 * MIB - 1).await.expect("taken");
    agent.reach(&name, told.target_bytes, &|_| {}).await.expect("reached");
    assert_eq!(server.sql("SELECT @@innodb_buffer_pool_size"), told.target_bytes.to_string());
    assert!(matches!(agent.set(&name, 161 * MIB).await, Err(MemoryError::OverBudget { .. })));
    agent.stop();
    running.await.expect("without a panic");
}

#[tokio::test]
async fn who_stops_waiting_does_not_spoil_the_next_answer() {
    let server = MariaDbServer::start(128);
    let engine = engine(&server, 512);
    for microseconds in (0..40).map(|step| step * 500) {
        let _ = tokio::time::timeout(Duration::from_micros(microseconds), engine.observe()).await;
    }
    assert_eq!(engine.observe().await.expect("an answer").pool_bytes, 128 * MIB);
}

#[tokio::test]
async fn a_missing_client_is_named() {
    let access =
        MariaDbAccess { program: Some("/nonexistent/mariadb".into()), defaults_file: None, socket: None, user: None };
    let engine = MariaDbEngine::new("maria".parse().expect("a name"), Kind::MariaDb, access, MIB);
    let error = engine.observe().await.expect_err("no client").to_string();
    assert!(error.contains("/nonexistent/mariadb") && error.contains("installed"), "{error}");
}
