//! A router that stops tells idle sessions so, and waits for those that commit.

use crate::commits_under_way::{WAITING_COMMIT, wait_for_waiting};
use crate::harness::{bounded, on_leader, start_usual};
use crate::wire::{Wire, query};

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_stops_tells_the_idle_and_answers_the_busy() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut idle = Wire::connect(&cluster).await?;
    let mut has_read = Wire::connect(&cluster).await?;
    let mut in_transaction = Wire::connect(&cluster).await?;
    idle.query(WAITING_COMMIT).await?;
    has_read.query("SELECT count(*) FROM numbers").await?;
    in_transaction.query("BEGIN; UPDATE numbers SET value = 1 WHERE id = 1").await?;
    let holder = cluster.servers.leader().connect("holder").await?;
    holder.run("SELECT pg_advisory_lock(42)").await?;
    let mut committing = Wire::connect(&cluster).await?;
    committing.query("BEGIN; INSERT INTO slow VALUES (1)").await?;
    committing.send(&query("COMMIT")).await?;
    wait_for_waiting(&cluster).await?;
    let clients = async {
        for (what, wire) in
            [("idle", &mut idle), ("has read", &mut has_read), ("in a transaction", &mut in_transaction)]
        {
            let answer = wire.until_closed().await?;
            assert_eq!((answer.tags().as_str(), answer.code().as_str()), ("E", "57P01"), "{what}");
            assert_eq!(answer.errors()[0].severity, "FATAL", "{what}");
        }
        // Only now may the commit end.
        holder.run("SELECT pg_advisory_unlock(42)").await?;
        let answer = committing.until_closed().await?;
        assert_eq!(answer.commands(), ["COMMIT"], "{answer:?}");
        anyhow::Ok(())
    };
    let (result, ()) = bounded("the stop", async { tokio::join!(clients, cluster.router().shutdown()) }).await?;
    result?;
    assert_eq!(on_leader(&cluster, "SELECT count(*) FROM slow").await?.number()?, 1);
    assert_eq!(on_leader(&cluster, "SELECT value FROM numbers WHERE id = 1").await?.number()?, 0);
    Ok(())
}
