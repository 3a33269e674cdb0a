//! PostgreSQL keeps what serializable transactions have read in a pool of bounded size; the router's own canaries take
//! places in it as clients' updates do.

use onecopy_postgres::Settings;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::{DATABASE, Servers};

use crate::harness::run;

/// Fewer than the pool of the server below holds, but together with one canary each, more.
const COMMITS: usize = 260;

/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn canaries_count_against_the_pool_of_serializable_transactions() -> anyhow::Result<()> {
    let mut settings = Settings::new();
    settings.set("max_connections", 30).set("max_worker_processes", 4).set("autovacuum_max_workers", 1);
    settings.set("max_wal_senders", 4);
    let mut cluster = TestCluster::before(Servers::start_with(0, &settings).await?).await?;
    cluster
        .start_router(|settings| {
            settings.leader_backends_max = 6;
            settings.reader_backends_max = 4;
            settings.gate_interval_min_ms = 1;
        })
        .await?;
    let first = cluster.updater("first").await?;
    first.run("CREATE TABLE pair (id int PRIMARY KEY, v int NOT NULL)").await?;
    first.run("INSERT INTO pair VALUES (1, 0), (2, 0)").await?;
    first.run("CREATE TABLE filler (id int)").await?;
    first.run_all(&["BEGIN", "SELECT v FROM pair WHERE id = 1"]).await?;
    let second = cluster.updater("second").await?;
    second
        .run_all(&["BEGIN", "SELECT v FROM pair WHERE id = 2", "UPDATE pair SET v = 1 WHERE id = 1", "COMMIT"])
        .await?;
    let gates = || {
        let status = cluster.router().status();
        status.databases.iter().find(|one| one.name == DATABASE).map_or(0, |one| one.gates.epochs)
    };
    let gates_before = gates();
    // Each read needs an epoch of its own, and so a canary.
    let filler = cluster.reader("filler", "leader").await?;
    filler.run("SET onecopy.freshness = 'strict'").await?;
    for number in 1..=COMMITS {
        run(&filler, &format!("INSERT INTO filler VALUES ({number})")).await??;
        let count = run(&filler, "SELECT count(*) FROM filler").await??.number()?;
        assert_eq!(count, i64::try_from(number)?);
    }
    assert!(gates() - gates_before > COMMITS as u64 / 2, "too few canaries to prove anything");
    let error = match first.run("UPDATE pair SET v = 1 WHERE id = 2").await {
        Ok(_) => first.run("COMMIT").await.expect_err("a write skew was committed"),
        Err(error) => error,
    };
    assert_eq!(error.code, "40001", "{error}");
    first.run("ROLLBACK").await?;
    first.run_all(&["BEGIN", "UPDATE pair SET v = 2 WHERE id = 2", "COMMIT"]).await?;
    Ok(())
}
