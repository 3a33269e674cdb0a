//! More sessions than back ends: everybody is served as back ends become idle.

use crate::harness::{bounded, run, session_back_ends, start, try_until};
use tokio::task::JoinSet;

const READERS: usize = 150;
const READER_BACKENDS_MAX: usize = 4;
const LEADER_BACKENDS_MAX: usize = 4;

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_beyond_the_limit_are_served_as_back_ends_become_idle() -> anyhow::Result<()> {
    let cluster = start(1, |settings| {
        settings.reader_backends_max = READER_BACKENDS_MAX;
        // Who waits for a back end longer than an epoch lives reads again, by right.
        settings.epoch_age_max_ms = 600_000;
    })
    .await?;
    cluster.updater("setup").await?.run("SELECT count(*) FROM numbers").await?;
    let mut sessions = Vec::new();
    for _ in 0..READERS {
        sessions.push(cluster.updater("reader").await?);
    }
    let before = cluster.router().status();
    let mut readers = JoinSet::new();
    for session in sessions {
        readers.spawn(async move {
            for _ in 0..10 {
                assert_eq!(run(&session, "SELECT count(*) FROM numbers").await??.number()?, 10);
            }
            anyhow::Ok(session)
        });
    }
    while let Some(result) = bounded("readers", readers.join_next()).await? {
        result??;
    }
    let after = cluster.router().status();
    assert_eq!(after.reads - before.reads, READERS as u64 * 10);
    // A read that waited in vain would have been tried again elsewhere.
    assert_eq!(after.read_retries, before.read_retries);
    for server in cluster.servers.all() {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'onecopy reader'";
        // One that was ended for another is seen for a moment more.
        try_until("no more back ends than may be", || async {
            Ok(server.connect("observer").await?.run(sql).await?.number()? <= i64::try_from(READER_BACKENDS_MAX)?)
        })
        .await?;
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_wrote_through_a_trigger_give_their_back_ends_back() -> anyhow::Result<()> {
    let cluster = start(0, |settings| {
        settings.leader_backends_max = LEADER_BACKENDS_MAX;
        settings.backend_wait_ms = 30_000;
    })
    .await?;
    let setup = "CREATE TABLE stamped (id int PRIMARY KEY, value int NOT NULL, updated_at timestamptz);
        INSERT INTO stamped SELECT id, 0, NULL FROM generate_series(1, 40) id;
        CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.updated_at := now(); RETURN NEW; END';
        CREATE TRIGGER stamp BEFORE UPDATE ON stamped FOR EACH ROW EXECUTE FUNCTION stamp();";
    cluster.updater("setup").await?.run(setup).await?;
    let mut sessions = Vec::new();
    for number in 1..=40 {
        let session = cluster.updater("writer").await?;
        let update = format!("UPDATE stamped SET value = value + 1 WHERE id = {number}");
        assert_eq!(run(&session, &update).await??.count, 1, "session {number}");
        sessions.push(session);
    }
    for (number, session) in sessions.iter().enumerate() {
        let update = format!("UPDATE stamped SET value = value + 1 WHERE id = {}", number + 1);
        for sql in ["BEGIN", &update, "COMMIT"] {
            run(session, sql).await??;
        }
    }
    let sum = run(&sessions[0], "SELECT sum(value) FROM stamped WHERE updated_at IS NOT NULL").await??;
    assert_eq!(sum.number()?, 80);
    try_until("no more back ends than may be", || async {
        Ok(session_back_ends(&cluster).await? <= i64::try_from(LEADER_BACKENDS_MAX)?)
    })
    .await
}
