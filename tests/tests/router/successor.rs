//! A router that takes over from another: what the first left running on the leader must not slip past the second's
//! epochs.

use std::time::Duration;

use anyhow::Context;
use onecopy_testing::try_until_async;
use onecopy_tests::client::Session;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;

/// A receipt whose COMMIT waits for an advisory lock: the test decides when it is done.
const TABLES: &str = "CREATE TABLE control (k text PRIMARY KEY, batch int NOT NULL);
    CREATE TABLE receipts (id int PRIMARY KEY, batch int NOT NULL, amount int NOT NULL);
    INSERT INTO control VALUES ('receipt', 1);
    CREATE FUNCTION wait_for_lock() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END';
    CREATE CONSTRAINT TRIGGER wait_at_commit AFTER INSERT ON receipts DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION wait_for_lock();";
const WAITING: &str = "SELECT coalesce(max(pid), 0) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";

/// A commit that an earlier router left on the leader cannot undo what a later router's epoch has shown.
///
/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r14_a_commit_left_by_an_earlier_router_cannot_undo_a_later_ones_epoch() -> anyhow::Result<()> {
    let mut cluster = TestCluster::with_router(1, |_| {}).await?;
    let setup = cluster.updater("setup").await?;
    setup.run(TABLES).await?;
    let holder = cluster.servers.leader().connect("holder").await?;
    holder.run("SELECT pg_advisory_lock(42)").await?;

    let receiver = cluster.updater("receiver").await?;
    let sql = ["BEGIN", "SELECT batch FROM control", "INSERT INTO receipts VALUES (1, 1, 100)"];
    receiver.run_all(&sql).await?;
    let commit = receiver.start("COMMIT");
    let waiting = async || holder.run(WAITING).await?.number();
    let process = try_until_async("the commit waits", waiting, |process| *process != 0).await?;
    setup.run_all(&["BEGIN", "SELECT batch FROM control", "UPDATE control SET batch = 2", "COMMIT"]).await?;

    cluster.stop_router().await;
    assert!(commit.await?.is_err(), "the first router is gone before the answer");
    cluster.start_router(|_| {}).await?;
    let reporter = cluster.reader("reporter", "follower-1").await?;
    reporter.run("SET onecopy.freshness = 'strict'").await?;
    let question = "SELECT batch, (SELECT coalesce(sum(amount), 0) FROM receipts WHERE batch = 1) FROM control";
    let report = reporter.run(question).await?;
    holder.run("SELECT pg_advisory_unlock(42)").await?;
    let lives = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {process}");
    let living = async || holder.run(&lives).await?.number();
    try_until_async("its back end has ended", living, |living| *living == 0).await?;

    // A strict read of the later router sees what the earlier one committed; the sum of batch 1 is final from then on.
    assert_eq!(report.rows[0][0].as_deref(), Some("2"));
    let last = holder.run(question).await?;
    assert_eq!(report, last, "a receipt came into a batch that was reported as closed");
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

/// What may still write is ended before the first epoch of a database, also when it has not begun to; what copies a
/// table out, or fetches in a transaction, goes on.
///
/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_what_runs_before_the_first_client_dumps_alone_go_on() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(1, |_| {}).await?;
    let leader = cluster.servers.leader();
    leader.connect("setup").await?.run("CREATE DATABASE store").await?;
    let connect = async |name: &str| {
        let mut config = leader.config("store");
        Session::connect(name, config.application_name(name)).await
    };
    connect("setup").await?.run("CREATE TABLE goods (id int)").await?;
    let cases: [(&[&str], &str, bool); 8] = [
        (&[], "COPY goods TO PROGRAM 'sleep 4 && cat'", true),
        (&["BEGIN", "DECLARE _pg_dump_cursor CURSOR FOR SELECT pg_sleep(4)"], "FETCH 100 FROM _pg_dump_cursor", true),
        (&["BEGIN", "DECLARE c CURSOR FOR SELECT pg_sleep(4)"], "FETCH 1 FROM c", false),
        (&[], "COPY goods FROM PROGRAM 'sleep 4 && echo 1'", false),
        (&[], "COPY (SELECT pg_sleep(4)) TO PROGRAM 'cat'", false),
        (&[], "COPY goods TO PROGRAM 'sleep 4 && cat'; SELECT pg_sleep(4)", false),
        (&[], "DECLARE c CURSOR WITH HOLD FOR SELECT pg_sleep(4)", false),
        (&[], "SELECT pg_sleep(4)", false),
    ];
    let mut running = Vec::new();
    for (number, (before, statement, goes_on)) in cases.into_iter().enumerate() {
        let session = connect(&format!("work-{number}")).await?;
        session.run_all(before).await?;
        running.push((statement, goes_on, session.start(statement), session));
    }
    let observer = leader.connect("observer").await?;
    let active = async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND application_name LIKE 'work-%'";
        observer.run(sql).await?.number()
    };
    try_until_async("all run", active, |count| *count == cases.len() as i64).await?;
    let mut config = cluster.client_config();
    let client = Session::connect("client", config.dbname("store")).await?;
    client.run("SELECT count(*) FROM goods").await?;
    for (statement, goes_on, ends, _session) in running {
        let ended = tokio::time::timeout(Duration::from_secs(30), ends).await.context(statement)??;
        assert_eq!(ended.is_ok(), goes_on, "{statement}: {ended:?}");
    }
    Ok(())
}
