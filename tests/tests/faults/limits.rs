//! Too many of anything: 53300, and nobody else notices.

use crate::harness::{bounded, start, try_until};
use crate::wire::{Wire, query, startup};
use onecopy_tests::servers::{DATABASE, PASSWORD, USER};

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_client_too_many_is_refused_and_a_place_that_gets_free_is_given() -> anyhow::Result<()> {
    let cluster = start(0, |settings| settings.clients_max = 3).await?;
    try_until("the setup's client has gone", || async { Ok(cluster.router().status().clients == 0) }).await?;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(Wire::connect(&cluster).await?);
    }
    for _ in 0..5 {
        let parameters = [("user", USER), ("database", DATABASE)];
        let refused = Wire::log_in(&cluster, &parameters, PASSWORD).await?.err().expect("too many");
        assert_eq!((refused.code.as_str(), refused.severity.as_str()), ("53300", "FATAL"));
    }
    for wire in &mut clients {
        assert_eq!(wire.query("SELECT count(*) FROM numbers").await?.text_rows(), ["10"]);
    }
    drop(clients.pop());
    try_until("a place is free", || async {
        let parameters = [("user", USER), ("database", DATABASE)];
        match Wire::log_in(&cluster, &parameters, PASSWORD).await? {
            // Its client is seen to go a moment later.
            Err(refused) => {
                assert_eq!(refused.code, "53300");
                Ok(false)
            }
            Ok(mut wire) => Ok(wire.query("SELECT count(*) FROM numbers").await?.text_rows() == ["10"]),
        }
    })
    .await
}

/// Whoever connects and says nothing has no place among `clients_max`, and where too many do, they make room.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_say_nothing_keep_nobody_out() -> anyhow::Result<()> {
    const SILENT: usize = 200;
    /// For fewer `clients_max` than that, so many may log in at once.
    const AT_ONCE: usize = 128;
    let cluster = start(0, |settings| settings.clients_max = 3).await?;
    let mut silent = Vec::new();
    for number in 0..SILENT {
        let mut wire = Wire::unauthenticated(&cluster).await?;
        // Some say who they would be, and then nothing more.
        if number % 2 == 0 {
            wire.send(&startup(&[("user", USER), ("database", DATABASE)])).await?;
        }
        silent.push(wire);
    }
    let mut wire = Wire::connect(&cluster).await?;
    assert_eq!(wire.query("SELECT count(*) FROM numbers").await?.text_rows(), ["10"]);
    try_until("those that were too many are sent away", || async {
        Ok(cluster.router().status().clients <= AT_ONCE + 1)
    })
    .await
}

/// A limit that is changed while the router runs holds for databases and sessions that are there.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_changes_the_limits_of_an_open_database() -> anyhow::Result<()> {
    let cluster = start(0, |settings| {
        settings.leader_backends_max = 1;
        settings.backend_wait_ms = 100;
    })
    .await?;
    let reload = |limit| cluster.reload(move |settings| settings.leader_backends_max = limit);
    let update = |id: usize| format!("UPDATE numbers SET value = 1 WHERE id = {id}");
    let mut wires = [Wire::connect(&cluster).await?, Wire::connect(&cluster).await?];
    wires[0].query("BEGIN").await?;
    assert_eq!(wires[0].query(&update(1)).await?.code(), "00000");
    assert_eq!(wires[1].query(&update(2)).await?.code(), "53300");
    reload(2).await?;
    wires[1].query("BEGIN").await?;
    assert_eq!(wires[1].query(&update(2)).await?.code(), "00000");
    reload(1).await?;
    // Who has one keeps it, and goes on.
    assert_eq!(wires[1].query("COMMIT").await?.commands(), ["COMMIT"]);
    assert_eq!(wires[1].query(&update(3)).await?.code(), "53300", "the other one has the only one");
    assert_eq!(wires[0].query("COMMIT").await?.commands(), ["COMMIT"]);
    assert_eq!(wires[1].query(&update(3)).await?.code(), "00000");
    Ok(())
}

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_waits_for_a_back_end_and_gets_53300_when_none_comes() -> anyhow::Result<()> {
    let cluster = start(1, |settings| {
        settings.leader_backends_max = 2;
        settings.backend_wait_ms = 6000;
        settings.epoch_age_max_ms = 600_000;
    })
    .await?;
    // The first epoch takes longer than a read waits for one, which would have no back end on the leader later; no
    // other one is needed.
    let first = cluster.updater("first").await?;
    cluster.read_until_at_epoch(&first, "SELECT count(*) FROM numbers").await?;
    let mut holders = Vec::new();
    for id in 1..=2 {
        let mut wire = Wire::connect(&cluster).await?;
        wire.query("BEGIN").await?;
        let update = format!("UPDATE numbers SET value = 1 WHERE id = {id}");
        assert_eq!(wire.query(&update).await?.code(), "00000");
        holders.push(wire);
    }
    let mut third = Wire::connect(&cluster).await?;
    for (begin, status) in [("SELECT", 'I'), ("BEGIN", 'E')] {
        third.query(begin).await?;
        let answer = third.query("UPDATE numbers SET value = 1 WHERE id = 3").await?;
        assert_eq!((answer.code().as_str(), answer.status()?), ("53300", status), "{begin}");
    }
    third.query("ROLLBACK").await?;
    // Reads need none.
    assert_eq!(third.query("SELECT sum(value) FROM numbers").await?.text_rows(), ["0"]);
    third.send(&query("UPDATE numbers SET value = 1 WHERE id = 3")).await?;
    assert_eq!(holders[0].query("COMMIT").await?.commands(), ["COMMIT"]);
    assert_eq!(third.answer().await?.commands(), ["UPDATE 1"]);
    assert_eq!(holders[1].query("COMMIT").await?.commands(), ["COMMIT"]);
    // A session that begins now sees what others have committed.
    let sum = Wire::connect(&cluster).await?.query("SELECT sum(value) FROM numbers").await?;
    assert_eq!(sum.text_rows(), ["3"]);
    Ok(())
}

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_readers_than_back_ends_all_read() -> anyhow::Result<()> {
    let cluster = start(1, |settings| settings.reader_backends_max = 2).await?;
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let session = cluster.updater("reader").await?;
        readers.spawn(async move {
            for _ in 0..20 {
                assert_eq!(session.run("SELECT count(*) FROM numbers").await?.number()?, 10);
            }
            anyhow::Ok(())
        });
    }
    while let Some(result) = bounded("readers", readers.join_next()).await? {
        result??;
    }
    for server in cluster.servers.all() {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'onecopy reader'";
        // One that was ended for another is seen for a moment more.
        try_until("no more back ends than may be", || async {
            Ok(server.connect("observer").await?.run(sql).await?.number()? <= 2)
        })
        .await?;
    }
    Ok(())
}
