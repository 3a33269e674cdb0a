//! One certifier: whatever a client asks for, its updates are serializable, and PostgreSQL's own hole is closed.

use onecopy_postgres::Settings;
use onecopy_tests::client::Session;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::Servers;

const PAIR: &str = "CREATE TABLE pair (id int PRIMARY KEY, v int NOT NULL); INSERT INTO pair VALUES (1, 0), (2, 0)";
const READ_BOTH: &str = "SELECT sum(v) FROM pair";
/// Commits beside one open transaction that make a server with [`few_connections`] forget what others have read during
/// its life (`predicate.c`, `SummarizeOldestCommittedSxact`).
const FILLERS: usize = 900;

/// Write skew: both read the sum, each adds to another row, both commit. The SQLSTATE of the one that was refused.
async fn write_skew(cluster: &TestCluster, begin: &str) -> anyhow::Result<Option<String>> {
    let (first, second) = (cluster.updater("first").await?, cluster.updater("second").await?);
    for session in [&first, &second] {
        session.run_all(&[begin, READ_BOTH]).await?;
    }
    let mut refusal = None;
    for (session, sql) in [
        (&first, "UPDATE pair SET v = v + 1 WHERE id = 1"),
        (&second, "UPDATE pair SET v = v + 1 WHERE id = 2"),
        (&first, "COMMIT"),
        (&second, "COMMIT"),
    ] {
        if let Err(error) = session.run(sql).await {
            refusal = refusal.or(Some(error.code));
        }
    }
    Ok(refusal)
}

#[tokio::test]
async fn control_weaker_levels_commit_write_skew_on_one_server() -> anyhow::Result<()> {
    let cluster = TestCluster::without_router(0).await?;
    cluster.updater("setup").await?.run(PAIR).await?;
    for begin in ["BEGIN ISOLATION LEVEL READ COMMITTED", "BEGIN ISOLATION LEVEL REPEATABLE READ"] {
        assert_eq!(write_skew(&cluster, begin).await?, None, "{begin}");
    }
    Ok(())
}

/// Whatever isolation level a client asks for, its updates are serializable; write skew ends with 40001.
///
/// Spec: I1
#[tokio::test]
async fn r1_updates_are_serializable_whatever_level_is_asked_for() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(0, |_| {}).await?;
    cluster.updater("setup").await?.run(PAIR).await?;
    for begin in [
        "BEGIN",
        "BEGIN ISOLATION LEVEL READ UNCOMMITTED",
        "BEGIN ISOLATION LEVEL READ COMMITTED",
        "START TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "BEGIN; SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "SET default_transaction_isolation = 'read committed'; BEGIN",
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ; BEGIN",
    ] {
        assert_eq!(write_skew(&cluster, begin).await?.as_deref(), Some("40001"), "{begin}");
    }
    Ok(())
}

/// So few connections that the pool of serializable transactions (ten for each) overflows soon.
fn few_connections() -> Settings {
    let mut settings = Settings::new();
    settings.set("max_connections", 30).set("max_worker_processes", 4).set("autovacuum_max_workers", 1);
    settings.set("max_wal_senders", 4);
    settings
}

/// A write skew with very many commits between the second one's end and the first one's write.
async fn overflowing_write_skew(cluster: &TestCluster) -> anyhow::Result<(Session, Result<(), String>)> {
    let first = cluster.updater("first").await?;
    first.run(PAIR).await?;
    first.run("CREATE TABLE filler (id int)").await?;
    first.run_all(&["BEGIN ISOLATION LEVEL SERIALIZABLE", "SELECT v FROM pair WHERE id = 1"]).await?;
    let second = cluster.updater("second").await?;
    let read_and_write = ["SELECT v FROM pair WHERE id = 2", "UPDATE pair SET v = 1 WHERE id = 1"];
    second.run("BEGIN ISOLATION LEVEL SERIALIZABLE").await?;
    second.run_all(&read_and_write).await?;
    second.run("COMMIT").await?;
    let filler = cluster.updater("filler").await?;
    for number in 0..FILLERS {
        filler.run(&format!("INSERT INTO filler VALUES ({number})")).await?;
    }
    let last = match first.run_all(&["UPDATE pair SET v = 1 WHERE id = 2", "COMMIT"]).await {
        Ok(_) => Ok(()),
        Err(error) => Err(error.code),
    };
    Ok((first, last))
}

#[tokio::test]
async fn control_postgresql_forgets_reads_when_its_pool_overflows() -> anyhow::Result<()> {
    let cluster = TestCluster::before(Servers::start_with(0, &few_connections()).await?).await?;
    let (_, last) = overflowing_write_skew(&cluster).await?;
    assert_eq!(last, Ok(()), "PostgreSQL keeps what it has read: the guard against it is not needed any more");
    Ok(())
}

/// An update during whose life PostgreSQL may have forgotten what others read (its pool of serializable transactions
/// overflows) is refused with 40001.
///
/// Spec: I1
#[tokio::test]
async fn r13_a_transaction_that_postgresql_may_have_forgotten_is_refused() -> anyhow::Result<()> {
    let mut cluster = TestCluster::before(Servers::start_with(0, &few_connections()).await?).await?;
    cluster.start_router(|settings| settings.leader_backends_max = 10).await?;
    let (first, last) = overflowing_write_skew(&cluster).await?;
    assert_eq!(last, Err("40001".to_owned()));
    first.run("ROLLBACK").await?;
    let sql = ["BEGIN", "UPDATE pair SET v = 2 WHERE id = 2", "COMMIT"];
    first.run_all(&sql).await?;
    Ok(())
}
