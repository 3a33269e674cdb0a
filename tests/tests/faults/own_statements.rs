//! What the router runs on its own around a client's statement fails, or comes too late: the client is told what has
//! become of its statement, and of no other.

use onecopy_tests::cluster::TestCluster;

use crate::harness::{on_leader, start_usual};
use crate::wire::{Wire, query, run_extended, sync};

/// A table whose deferred trigger runs `body` at COMMIT.
async fn watched(wire: &mut Wire, body: &str) -> anyhow::Result<()> {
    for sql in [
        format!("CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NULL; END $$"),
        "CREATE TABLE watched (id int)".to_owned(),
        "CREATE CONSTRAINT TRIGGER watch AFTER INSERT ON watched DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION at_commit()"
            .to_owned(),
    ] {
        let answer = wire.query(&sql).await?;
        assert!(answer.errors().is_empty(), "{sql}: {answer:?}");
    }
    Ok(())
}

/// Past the router, to the leader.
async fn direct(cluster: &TestCluster) -> anyhow::Result<Wire> {
    Wire::connect_to(cluster.servers.leader().port()).await
}

/// A statement is complete when its transaction has committed: in the simple protocol nothing is told of it before.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_whose_commit_fails_is_not_told_to_be_complete() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut wire, mut direct) = (Wire::connect(&cluster).await?, direct(&cluster).await?);
    watched(&mut wire, "RAISE EXCEPTION 'refused at commit';").await?;
    let insert = "INSERT INTO watched VALUES (1)";
    let returning = format!("{insert} RETURNING id");
    for (statements, tags) in [
        (query(insert), "EZ"),
        (query(&returning), "TDEZ"),
        (query(&format!("{insert}; {returning}")), "CTDEZ"),
        (query(&format!("{insert}; SELECT 1")), "CTDEZ"),
        (query(&format!("BEGIN; {insert}; COMMIT")), "CCEZ"),
        // PostgreSQL completes the statement, and commits with Sync.
        ([run_extended(insert, &[]), sync()].concat(), "12nCEZ"),
    ] {
        assert_eq!(direct.ask(&statements).await?.tags(), tags, "PostgreSQL");
        assert_eq!(wire.ask(&statements).await?.tags(), tags);
    }
    assert_eq!(on_leader(&cluster, "SELECT count(*) FROM watched").await?.number()?, 0);
    Ok(())
}
