//! The engine of PostgreSQL with the extension.

use std::sync::Mutex;
use std::time::Duration;

use onecopy_memory::engine::{Engine, ExtensionEngine, Progress};
use onecopy_memory::{Level, MemoryError};
use onecopy_postgres::StopMode;
use onecopy_testing::{PASSWORD, TestDirectory, until_async};

use crate::servers::{self, CEILING, CHUNK, MIB, ROWS, client, connection, engine, fill, name};

#[tokio::test]
async fn a_pool_is_seen_shrunk_and_grown() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::server(&directory, "server").await;
    fill(&server).await;
    let engine = engine(&server, "server");
    let before = engine.observe().await.expect("an answer");
    assert_eq!((before.pool_bytes, before.target_bytes, before.ceiling_bytes), (CEILING, CEILING, CEILING));
    assert_eq!((before.floor_bytes, before.granule_bytes), (32 * MIB, CHUNK));
    let resident_before = before.resident_bytes.expect("it runs here");

    let change = engine.set_target(99 * MIB).await.expect("taken");
    assert_eq!((change.from_bytes, change.target_bytes), (CEILING, 100 * MIB));
    let seen: Mutex<Vec<Progress>> = Mutex::default();
    let report = |progress: &Progress| seen.lock().expect("no panic").push(progress.clone());
    let reached = engine.reach(change.target_bytes, &report).await.expect("reached");
    assert!(reached.reached());
    let seen = seen.into_inner().expect("no panic");
    assert!(seen.iter().all(|progress| progress.target_bytes == 100 * MIB), "{seen:?}");
    assert_eq!(seen.last().expect("reported").pool_bytes, 100 * MIB);
    let after = engine.observe().await.expect("an answer");
    assert_eq!((after.pool_bytes, after.target_bytes), (100 * MIB, 100 * MIB));
    let resident_after = after.resident_bytes.expect("it runs here");
    assert!(resident_after + 60 * MIB < resident_before, "{resident_before} then {resident_after}");

    engine.set_target(CEILING).await.expect("taken");
    engine.reach(CEILING, &|_| {}).await.expect("grown");
    let rows = client(&server).await.query_one("SELECT count(*), min(length(note)) FROM item", &[]).await;
    let rows = rows.expect("an answer");
    assert_eq!((rows.get::<_, i64>(0), rows.get::<_, i32>(1)), (ROWS, 1000));
}

#[tokio::test]
async fn sizes_out_of_range_are_refused_with_figures() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::server(&directory, "server").await;
    let engine = engine(&server, "server");
    let below = engine.set_target(32 * MIB - 1).await.expect_err("too small");
    assert!(matches!(below, MemoryError::BelowFloor { floor_bytes, .. } if floor_bytes == 32 * MIB), "{below}");
    let above = engine.set_target(CEILING + 1).await.expect_err("too large");
    assert!(matches!(above, MemoryError::AboveCeiling { ceiling_bytes: CEILING, .. }), "{above}");
    for hostile in [0, u64::MAX, i64::MAX as u64 + 1] {
        engine.set_target(hostile).await.expect_err("no size");
    }
    assert!(matches!(engine.take(MIB).await, Err(MemoryError::WrongLevel { .. })));
    let overtaken = engine.reach(64 * MIB, &|_| {}).await.expect_err("nobody has set it");
    assert!(overtaken.to_string().contains("meanwhile"), "{overtaken}");
    assert_eq!(engine.observe().await.expect("an answer").target_bytes, CEILING);
    assert!(ExtensionEngine::new(name("x"), Level::Own, &connection(&server), None).is_err());
    assert!(ExtensionEngine::new(name("x"), Level::Publish, &connection(&server), None).is_err());
}

#[tokio::test]
async fn who_may_not_is_told_so_in_the_servers_words() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::server(&directory, "server").await;
    let roles = format!(
        "CREATE ROLE watcher LOGIN PASSWORD '{PASSWORD}'; GRANT pg_monitor TO watcher; \
         GRANT USAGE ON SCHEMA \"Memory's\" TO watcher; CREATE ROLE stranger LOGIN PASSWORD '{PASSWORD}'; \
         CREATE DATABASE empty"
    );
    for statement in roles.split(';') {
        client(&server).await.batch_execute(statement).await.expect("made");
    }
    let mut parameters = server.connection();
    parameters.user = "watcher".to_owned();
    let watcher = ExtensionEngine::new(name("server"), Level::Request, &parameters, None).expect("a good level");
    let seen = watcher.observe().await.expect("it may look");
    assert_eq!((seen.pool_bytes, seen.resident_bytes), (CEILING, None));
    let error = watcher.set_target(64 * MIB).await.expect_err("it may not change").to_string();
    assert!(error.contains("permission denied") && error.contains("42501"), "{error}");

    parameters.user = "stranger".to_owned();
    let stranger = ExtensionEngine::new(name("server"), Level::Request, &parameters, None).expect("a good level");
    assert!(stranger.observe().await.expect_err("it may not look").to_string().contains("permission denied"));

    let elsewhere = connection(&server).with_database("empty");
    let elsewhere = ExtensionEngine::new(name("server"), Level::Request, &elsewhere, None).expect("a good level");
    let error = elsewhere.observe().await.expect_err("no extension").to_string();
    assert!(error.contains("CREATE EXTENSION onecopy"), "{error}");
}

#[tokio::test]
async fn a_server_that_goes_and_comes_is_found_again() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::server(&directory, "server").await;
    let engine = engine(&server, "server");
    engine.set_target(64 * MIB).await.expect("taken");
    engine.reach(64 * MIB, &|_| {}).await.expect("reached");
    server.stop(StopMode::Immediate).await.expect("stopped");
    for _ in 0..5 {
        engine.observe().await.expect_err("it does not run");
    }
    server.start().await.expect("started");
    let mut again = None;
    until_async("the server is found", async || {
        match engine.observe().await {
            Ok(observation) => again = Some(observation),
            Err(MemoryError::Unreachable { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        again.is_some()
    })
    .await;
    let again = again.expect("it is found");
    assert_eq!(again.target_bytes, CEILING, "what was asked for ended with the server; the agent asks again");
}

#[tokio::test]
async fn who_stops_waiting_does_not_spoil_the_next_answer() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::server(&directory, "server").await;
    let engine = engine(&server, "server");
    for microseconds in (0..60).map(|step| step * 200) {
        let _ = tokio::time::timeout(Duration::from_micros(microseconds), engine.observe()).await;
    }
    assert_eq!(engine.observe().await.expect("an answer").pool_bytes, CEILING);
    let ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'onecopy memory'";
    let left = async || client(&server).await.query_one(ours, &[]).await.expect("an answer").get::<_, i64>(0);
    until_async("no connection is left", async || left().await <= 1).await;
}
