//! The engine of PostgreSQL without the extension.

use std::time::Duration;

use onecopy_memory::engine::{Engine, OwnEngine, PlainEngine};
use onecopy_memory::{Level, MemoryError};
use onecopy_testing::TestDirectory;

use crate::servers::{self, CEILING, MIB, ROWS, client, connection, fill, name};

#[tokio::test]
async fn a_stock_server_is_watched_and_its_pool_is_not_touched() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::stock(&directory).await;
    fill(&server).await;
    let data_directory = Some(server.data_directory().to_owned());
    let engine = PlainEngine::new(name("stock"), &connection(&server), data_directory);
    assert_eq!(engine.level(), Level::Request);
    let seen = engine.observe().await.expect("an answer");
    assert_eq!((seen.pool_bytes, seen.floor_bytes, seen.ceiling_bytes), (CEILING, CEILING, CEILING));
    let error = engine.set_target(100 * MIB).await.expect_err("impossible").to_string();
    assert!(error.contains("fixed size") && error.contains("install the extension"), "{error}");
    assert!(matches!(engine.reach(100 * MIB, &|_| {}).await, Err(MemoryError::Unable { .. })));
    assert!(matches!(engine.take(CEILING).await, Err(MemoryError::WrongLevel { level: Level::Request, .. })));
    let after = engine.observe().await.expect("an answer");
    assert!(after.resident_bytes.expect("it runs here") + 20 * MIB > seen.resident_bytes.expect("it runs here"));
}

#[tokio::test]
async fn at_level_own_pages_are_written_dropped_and_stay_dropped() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::stock(&directory).await;
    fill(&server).await;
    assert!(OwnEngine::new(name("stock"), &connection(&server), None).is_err(), "its pages are on this host");
    let data_directory = Some(server.data_directory().to_owned());
    let engine = OwnEngine::new(name("stock"), &connection(&server), data_directory).expect("a good level");
    assert_eq!(engine.level(), Level::Own);
    assert!(matches!(engine.set_target(63 * MIB).await, Err(MemoryError::BelowFloor { .. })));
    assert!(matches!(engine.set_target(CEILING + MIB).await, Err(MemoryError::AboveCeiling { .. })));
    let before = engine.observe().await.expect("an answer");
    assert_eq!((before.pool_bytes, before.target_bytes), (CEILING, CEILING));
    engine.set_target(80 * MIB).await.expect("taken");
    engine.reach(80 * MIB, &|_| {}).await.expect("reached");
    let query = "SELECT count(*), min(length(note)) FROM item";
    for _ in 0..3 {
        let rows = client(&server).await.query_one(query, &[]).await.expect("an answer");
        assert_eq!((rows.get::<_, i64>(0), rows.get::<_, i32>(1)), (ROWS, 1000));
        tokio::time::sleep(Duration::from_millis(100)).await;
        engine.reach(80 * MIB, &|_| {}).await.expect("dropped again");
    }
    engine.set_target(CEILING).await.expect("taken");
    assert_eq!(engine.observe().await.expect("an answer").pool_bytes, CEILING);
}
