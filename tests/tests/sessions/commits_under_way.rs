//! A leader or a router that goes while a commit is in flight.

use onecopy_router::Health;
use onecopy_tests::cluster::TestCluster;

use crate::harness::{
    bounded, code, make_commits_endless, on_leader, run, start_usual, try_until, wait_for_epoch_on, wait_for_health,
    wait_for_updates,
};

/// A row whose COMMIT waits for an advisory lock: the test decides when it is done.
pub const WAITING_COMMIT: &str = "CREATE TABLE slow (a int);
    CREATE FUNCTION wait_for_lock() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END';
    CREATE CONSTRAINT TRIGGER wait_at_commit AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION wait_for_lock();";

/// Waits until a statement waits for the lock.
pub async fn wait_for_waiting(cluster: &TestCluster) -> anyhow::Result<()> {
    try_until("the commit waits", || async {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
        Ok(on_leader(cluster, sql).await?.number()? == 1)
    })
    .await
}

/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_leader_died_in_a_commit_and_a_silence_other_sessions_read_on() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    wait_for_epoch_on(&cluster, 2).await?;
    let reader = cluster.updater("reader").await?;
    // From then on it can read on without the leader.
    cluster.read_until_at_epoch(&reader, "SELECT count(*) FROM numbers").await?;
    // An epoch that nobody reads lapses after a second, and no new one is made while a commit waits.
    let another = cluster.updater("another").await?;
    let reading = tokio::spawn(async move {
        loop {
            let _ = another.run("SELECT count(*) FROM numbers").await;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    });
    let writer = cluster.updater("writer").await?;
    make_commits_endless(&cluster).await?;
    let begin = async |number: u32| {
        let insert = format!("INSERT INTO numbers VALUES ({}, 0)", 10 + number);
        writer.run_all(&["BEGIN", &insert, "SET LOCAL synchronous_commit = on"]).await?;
        Ok(())
    };
    let waiting = "SELECT count(*) FROM pg_stat_activity \
         WHERE wait_event = 'SyncRep' AND application_name = 'onecopy session'";
    let waits = async || Ok(on_leader(&cluster, waiting).await?.number()? == 1);
    let (commit, number) = writer.commit_that_waits(begin, waits).await?;
    let number = 10 + i64::from(number);
    cluster.servers.leader().server.crash_stop().await?;
    let lost = bounded("the commit", commit).await??.expect_err("its leader died");
    assert_eq!(lost.code, "08007", "{lost}");
    wait_for_health(&cluster, "leader", Health::Down).await?;
    reading.abort();
    // Longer than epochs live while somebody reads.
    tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
    for round in 0..5 {
        let count = run(&reader, "SELECT count(*) FROM numbers").await??.number()?;
        assert!((10..=number).contains(&count), "round {round}: {count}");
        run(&reader, "BEGIN READ ONLY").await??;
        let count = run(&reader, "SELECT count(*) FROM numbers").await??.number()?;
        assert!((10..=number).contains(&count), "round {round}: {count}");
        run(&reader, "COMMIT").await??;
    }
    let refused = run(&reader, "UPDATE numbers SET value = 1 WHERE id = 1").await?;
    assert_eq!(code(&refused), "57P03", "{refused:?}");
    cluster.servers.leader().server.start().await?;
    wait_for_updates(&cluster).await?;
    assert_eq!(
        on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?,
        number,
        "committed where it stood"
    );
    Ok(())
}

/// The statement is no COMMIT, and it has read nothing before it waits.
///
/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_takes_over_makes_no_epoch_before_its_predecessors_statement_has_ended() -> anyhow::Result<()> {
    let mut cluster = start_usual(1).await?;
    let holder = cluster.servers.leader().connect("holder").await?;
    holder.run("SELECT pg_advisory_lock(42)").await?;
    let writer = cluster.updater("writer").await?;
    let update = writer.start("UPDATE numbers SET value = 77 WHERE id = 1 AND pg_advisory_xact_lock(42) IS NOT NULL");
    wait_for_waiting(&cluster).await?;
    cluster.stop_router().await;
    assert!(bounded("the statement", update).await??.is_err(), "its router is gone");
    cluster.start_router(|_| {}).await?;
    // It has ended before anybody is served: what readers see of the row does not change under them.
    let left = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    assert_eq!(on_leader(&cluster, left).await?.number()?, 0);
    let reader = cluster.reader("reader", "follower-1").await?;
    reader.run("SET onecopy.freshness = 'strict'").await?;
    assert_eq!(run(&reader, "SELECT value FROM numbers WHERE id = 1").await??.number()?, 0);
    holder.run("SELECT pg_advisory_unlock(42)").await?;
    assert_eq!(on_leader(&cluster, "SELECT value FROM numbers WHERE id = 1").await?.number()?, 0);
    Ok(())
}
