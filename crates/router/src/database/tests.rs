//! A database before model servers: what is asked of them when it is opened, and afterwards.

use std::task::Poll;

use bytes::Bytes;
use tokio::sync::watch;

use super::catalog::classify_with;
use super::loaded::fingerprint_of;
use super::*;
use crate::config::{RouterConfiguration, RouterSettings};
use crate::epoch::Demand;
use crate::epoch::model_server::ModelServers;
use crate::settings::Settings;
use crate::sql::{Catalog, ClassificationCache, Part};

/// Far beyond what anything here takes on a machine that has more to do.
const LONG: Duration = Duration::from_secs(120);

const LEADER: &str = "leader";

/// Part of what the leader is asked when its catalog is read.
const FUNCTIONS: &str = "FROM pg_catalog.pg_proc p";

async fn open(models: &ModelServers) -> Result<Arc<Database>, BackendError> {
    let settings = RouterSettings { gate_timeout_ms: 120_000, follower_timeout_ms: 120_000, ..Default::default() };
    let mut followers = models.configurations();
    let leader = followers.remove(0);
    let configuration = RouterConfiguration { router: settings.clone(), leader, followers };
    let servers = Arc::new(Servers::of(&configuration).unwrap());
    let settings = watch::Sender::new(Arc::new(settings)).subscribe();
    Database::open("database", servers, settings, SerializableTransactions::default()).await
}

/// Begins to read the catalog anew beside the sessions; the leader holds its answer back.
async fn refresh_held(models: &ModelServers, database: &Arc<Database>) -> JoinHandle<()> {
    models.hold(LEADER, FUNCTIONS);
    models.forget();
    let refreshing = tokio::spawn({
        let database = database.clone();
        async move { database.catalog.refresh().await }
    });
    models.hears(LEADER, FUNCTIONS, 1).await;
    refreshing
}

/// Only clients' transactions take places in PostgreSQL's pool of serializable transactions without asking for them;
/// the canary asks, and is counted.
///
/// Spec: I1
#[tokio::test]
async fn the_routers_own_connections_are_not_serializable() {
    let models = ModelServers::start(1).await;
    let database = open(&models).await.unwrap();
    database.commit_barrier.note_in_doubt(ServerProcess { id: 77, started_us: 0 });
    let epoch = database.epochs.take(Demand::Commits(0), &database.commit_barrier, LONG).await.unwrap();
    assert_eq!(epoch.id, 1);
    let credentials = Credentials::of_router(database.servers.leader());
    let session = database.leader.take(1, &credentials, LONG).await.unwrap();
    // Asked without a serializable transaction: its number alone could be another process' when it is ended.
    assert_eq!(session.process().started_us, 1_700_000_000_123_456);
    for pool in database.readers.all().iter() {
        pool.take(&credentials, &Settings::default(), LONG).await.unwrap();
    }
    let mut own: Vec<String> = Vec::new();
    for (application, level) in models.levels(LEADER) {
        assert_eq!(level == "serializable", application == "onecopy session", "{application}: {level}");
        own.push(application);
    }
    own.sort();
    own.dedup();
    let known = ["catalog", "epoch", "gate", "reader", "session"].map(|purpose| format!("onecopy {purpose}"));
    assert_eq!(own, known);
    assert!(models.levels("follower-1").iter().all(|(_, level)| level != "serializable"));
}

/// A database that is opened while its leader is gone gets its tripwire before the first canary all the same.
#[tokio::test]
async fn a_database_opened_without_its_leader_gets_its_tripwire_before_the_first_gate() {
    const MAKE: &str = "CREATE UNLOGGED TABLE IF NOT EXISTS onecopy_router.tripwire";
    let models = ModelServers::start(1).await;
    models.set_gone(LEADER, true);
    let database = open(&models).await.unwrap();
    assert_eq!(models.when(LEADER, MAKE), None);
    models.set_gone(LEADER, false);
    database.epochs.take(Demand::Commits(0), &database.commit_barrier, LONG).await.unwrap();
    let canary = models.when(LEADER, "SELECT 1 FROM onecopy_router.tripwire");
    assert!(models.when(LEADER, MAKE).is_some() && models.when(LEADER, MAKE) < canary);
}

/// What others have changed is read beside the sessions: nobody waits for it. What has not changed stays what it was.
///
/// Spec: I3
#[tokio::test]
async fn the_catalog_is_read_anew_beside_the_sessions() {
    let models = ModelServers::start(0).await;
    let database = open(&models).await.unwrap();
    let (before, version) = (database.catalog.up_to_date().await, database.catalog.version());
    let refreshing = refresh_held(&models, &database).await;
    assert!(Arc::ptr_eq(&database.catalog.up_to_date().await, &before), "who comes meanwhile does not wait");
    models.let_go(LEADER);
    refreshing.await.unwrap();
    assert!(Arc::ptr_eq(&database.catalog.up_to_date().await, &before) && database.catalog.version() == version);
    // The same after DDL that changes nothing of it, such as CREATE INDEX: what was classified stays classified.
    database.catalog.changed(true);
    assert!(Arc::ptr_eq(&database.catalog.up_to_date().await, &before));
    // And what differs is taken.
    lock(&database.catalog.known).fingerprint = None;
    let version = database.catalog.version();
    database.catalog.refresh().await;
    assert!(!Arc::ptr_eq(&database.catalog.up_to_date().await, &before) && database.catalog.version() == version + 1);
}

/// A session reads a catalog anew in which something was locked, and its client goes meanwhile.
#[tokio::test]
async fn a_client_that_goes_while_the_catalog_is_read_anew_keeps_nobody_from_reading_it() {
    let models = ModelServers::start(0).await;
    let database = open(&models).await.unwrap();
    let before = database.catalog.up_to_date().await;
    let refreshing = refresh_held(&models, &database).await;
    refreshing.abort();
    assert!(refreshing.await.unwrap_err().is_cancelled());
    models.let_go(LEADER);
    lock(&database.catalog.known).fingerprint = None;
    database.catalog.refresh().await;
    assert!(!Arc::ptr_eq(&database.catalog.up_to_date().await, &before));
}

/// After DDL nothing is believed that was known before: who asks waits, and what was being read beside is not enough.
///
/// Spec: I3
#[tokio::test]
async fn after_ddl_nobody_is_served_by_the_catalog_of_before() {
    let models = ModelServers::start(0).await;
    let database = open(&models).await.unwrap();
    let refreshing = refresh_held(&models, &database).await;
    database.catalog.changed(true);
    lock(&database.catalog.known).fingerprint = None;
    let mut asked = tokio::spawn({
        let database = database.clone();
        async move { database.catalog.up_to_date().await }
    });
    models.hears(LEADER, FUNCTIONS, 2).await;
    assert!(!asked.is_finished() && database.catalog.current().is_none());
    models.let_go(LEADER);
    refreshing.await.unwrap();
    (&mut asked).await.unwrap();
    assert_eq!(lock(&database.catalog.known).version, database.catalog.version());
}

/// While the catalog of after DDL is on its way, a COMMIT keeps no locks for it; what may call something waits.
#[tokio::test]
async fn what_no_catalog_has_a_say_in_waits_for_none() {
    let models = ModelServers::start(0).await;
    let database = open(&models).await.unwrap();
    models.hold(LEADER, FUNCTIONS);
    database.catalog.changed(true);
    for (sql, waits) in [
        ("BEGIN; SET LOCAL search_path = a", false),
        ("COMMIT", false),
        ("FETCH 1 FROM c", false),
        ("LISTEN news", false),
        ("SELECT 1", true),
        ("COMMIT; SELECT 1", true),
        ("CREATE TABLE t (id serial PRIMARY KEY, a text DEFAULT 'x', b int REFERENCES u ON DELETE CASCADE)", false),
        ("CREATE INDEX ON t (a)", false),
        ("CREATE INDEX ON t (f(a))", true),
        // It is read before that lock is taken: what depends on the table could not be read behind it.
        ("DROP TABLE t", true),
        ("LOCK TABLE t", true),
        ("BEGIN; ALTER TABLE t ADD a int", true),
        ("SELEC", true),
    ] {
        let sql = Bytes::from(sql);
        let mut classifying = std::pin::pin!(database.catalog.classify(&sql));
        let classified = std::future::poll_fn(|context| Poll::Ready(classifying.as_mut().poll(context))).await;
        assert_eq!(classified.is_pending(), waits, "{sql:?}");
        if let Poll::Ready(classified) = classified {
            // As by any catalog.
            assert_eq!(classified, classify_with(&ClassificationCache::new(), &sql, &Catalog::empty()));
        }
    }
    // Behind what may have made an event trigger, DDL waits to know.
    database.catalog.changed(false);
    for (sql, waits) in [("CREATE INDEX ON t (a)", true), ("COMMIT", false)] {
        let sql = Bytes::from(sql);
        let mut classifying = std::pin::pin!(database.catalog.classify(&sql));
        let classified = std::future::poll_fn(|context| Poll::Ready(classifying.as_mut().poll(context))).await;
        assert_eq!(classified.is_pending(), waits, "{sql:?}");
    }
    models.let_go(LEADER);
    assert!(database.catalog.classify(&Bytes::from("SELECT 1")).await.is_ok());
    assert!(!database.catalog.may_have_event_triggers());
}

/// Rows may come in any order, and each value counts.
#[test]
fn a_catalogs_fingerprint_is_that_of_its_rows() {
    let row = |values: [&str; 2]| values.map(|value| Some(value.to_owned()));
    let sum = |rows: &[[Option<String>; 2]]| {
        rows.iter().fold(0_u64, |sum, row| sum.wrapping_add(fingerprint_of(Part::Functions, row)))
    };
    let (one, two) = (row(["f", "t"]), row(["g", "f"]));
    assert_eq!(sum(&[one.clone(), two.clone()]), sum(&[two.clone(), one.clone()]));
    assert_ne!(sum(&[one.clone(), two]), sum(&[one.clone(), row(["g", "t"])]));
    assert_ne!(fingerprint_of(Part::Functions, &one), fingerprint_of(Part::Relations, &one));
}
