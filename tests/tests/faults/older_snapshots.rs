//! Indexes and constraints that PostgreSQL believes once no snapshot of before is left on its own server: no follower's
//! transaction is answered by them that has such a snapshot.

use crate::harness::{bounded, code, on_leader, run, start_usual, try_until};
use crate::wire::Wire;

/// An index that is built CONCURRENTLY lacks what only older snapshots see. PostgreSQL waits for those of its own
/// server before anybody may use it; transactions on followers are refused before that, whether they began before the
/// index was there or while it was built.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f92_a_follower_never_reads_by_an_index_that_lacks_what_it_sees() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    let builder = cluster.updater("builder").await?;
    let holder = crate::harness::leader(&cluster).await?;
    let old = "SELECT count(*) FROM numbers WHERE value = 0";
    let begin = async |name: &str| {
        let reader = cluster.reader(name, "follower-1").await?;
        cluster.read_until_at_epoch(&reader, old).await?;
        run(&reader, "BEGIN READ ONLY").await??;
        run(&reader, "SET LOCAL enable_seqscan = off").await??;
        assert_eq!(run(&reader, old).await??.number()?, 10, "{name}");
        anyhow::Ok(reader)
    };
    for sql in ["CREATE INDEX CONCURRENTLY by_value ON numbers (value)", "REINDEX INDEX CONCURRENTLY by_value"] {
        run(&writer, "UPDATE numbers SET value = 0").await??;
        let before = begin("before").await?;
        holder.run("BEGIN").await?;
        holder.run("LOCK TABLE numbers IN ROW EXCLUSIVE MODE").await?;
        let building = builder.start(sql);
        try_until("the index waits for writers", || async {
            let sql = "SELECT count(*) FROM pg_stat_progress_create_index WHERE phase LIKE 'waiting for writers%'";
            Ok(on_leader(&cluster, sql).await?.number()? == 1)
        })
        .await?;
        let beside = begin("beside").await?;
        run(&writer, "UPDATE numbers SET value = 1 WHERE id <= 5").await??;
        holder.run("COMMIT").await?;
        bounded(sql, building).await???;
        // It has replayed the index by then.
        let later = cluster.reader("later", "follower-1").await?;
        cluster.read_until_at_epoch(&later, old).await?;
        for reader in [before, beside] {
            let refused = run(&reader, old).await?;
            assert_eq!(code(&refused), "40001", "{sql}: {refused:?}");
            run(&reader, "ROLLBACK").await??;
            assert_eq!(run(&reader, old).await??.number()?, 5, "{sql}");
        }
    }
    Ok(())
}

/// What plans rely on is not what an older snapshot sees: an index that lacks rows or says that they are unique, a
/// constraint that holds by now. Transactions on followers end when such a thing is committed; until then they go on.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f92_a_follower_never_plans_by_what_came_after_its_snapshot() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    let builder = cluster.updater("builder").await?;
    for sql in [
        "CREATE TABLE doubles (a int)",
        "ALTER TABLE numbers ADD CONSTRAINT is_small CHECK (value < 5) NOT VALID",
        "ALTER TABLE numbers ADD CONSTRAINT is_smaller CHECK (value < 4) NOT VALID",
        "CREATE INDEX by_id ON numbers (id)",
    ] {
        run(&builder, sql).await??;
    }
    // How many rows of `numbers` have a partner, if each has one at most.
    let partners = "SELECT count(*) FROM numbers LEFT JOIN doubles ON a = id";
    for sql in [
        "CREATE UNIQUE INDEX only_one ON doubles (a)",
        "DO 'BEGIN CREATE UNIQUE INDEX only_one ON doubles (a); END'",
        "CREATE INDEX by_value ON numbers (value)",
        "REINDEX INDEX by_value",
        "REINDEX TABLE numbers",
        "CLUSTER numbers USING by_id",
        "ALTER TABLE numbers VALIDATE CONSTRAINT is_small",
        "DO 'BEGIN ALTER TABLE numbers VALIDATE CONSTRAINT is_smaller; END'",
    ] {
        run(&writer, "TRUNCATE doubles").await??;
        run(&writer, "DROP INDEX IF EXISTS only_one").await??;
        run(&writer, "INSERT INTO doubles VALUES (1), (1)").await??;
        let reader = cluster.reader("reader", "follower-1").await?;
        cluster.read_until_at_epoch(&reader, partners).await?;
        run(&reader, "BEGIN READ ONLY").await??;
        assert_eq!(run(&reader, partners).await??.number()?, 11, "{sql}");
        run(&writer, "DELETE FROM doubles WHERE ctid = '(0,1)'").await??;
        run(&builder, "BEGIN").await??;
        run(&builder, sql).await??;
        assert_eq!(run(&reader, partners).await??.number()?, 11, "{sql}, before its commit");
        run(&builder, "COMMIT").await??;
        let refused = run(&reader, partners).await?;
        assert_eq!(code(&refused), "40001", "{sql}: {refused:?}");
        run(&reader, "ROLLBACK").await??;
        assert_eq!(run(&reader, partners).await??.number()?, 10, "{sql}");
    }
    let reader = cluster.reader("reader", "follower-1").await?;
    cluster.read_until_at_epoch(&reader, partners).await?;
    run(&reader, "BEGIN READ ONLY").await??;
    run(&reader, partners).await??;
    for sql in [
        "BEGIN",
        "CREATE TABLE later AS SELECT 1 AS a",
        "CREATE UNIQUE INDEX ON later (a)",
        "ANALYZE later",
        "COMMENT ON TABLE later IS 'of later'",
        "COMMIT",
        "ANALYZE numbers",
        "CREATE TEMP TABLE own (a int)",
        "CREATE INDEX ON own (a)",
        "CREATE INDEX IF NOT EXISTS by_id ON numbers (id)",
        "BEGIN",
        "DO 'BEGIN ANALYZE numbers; END'",
        "COMMENT ON TABLE numbers IS 'ten'",
        "COMMIT",
    ] {
        run(&builder, sql).await??;
        assert_eq!(run(&reader, partners).await??.number()?, 10, "{sql} is not about what others read");
    }
    Ok(())
}

/// Somebody ends the connections by which the router learns when an index that is built CONCURRENTLY may be used: no
/// epoch is read until it is ready, and none of before is believed then.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f93_an_index_whose_snapshots_are_lost_is_used_by_nobody_who_lacks_its_rows() -> anyhow::Result<()> {
    const HOLDERS: &str = "FROM pg_stat_activity WHERE application_name = 'onecopy index'";
    let cluster = start_usual(1).await?;
    let (writer, builder) = (cluster.updater("writer").await?, cluster.updater("builder").await?);
    let holder = crate::harness::leader(&cluster).await?;
    let old = "SELECT count(*) FROM numbers WHERE value = 0";
    let reader = cluster.reader("reader", "follower-1").await?;
    cluster.read_until_at_epoch(&reader, old).await?;
    run(&reader, "BEGIN READ ONLY").await??;
    run(&reader, "SET LOCAL enable_seqscan = off").await??;
    assert_eq!(run(&reader, old).await??.number()?, 10);
    holder.run("BEGIN").await?;
    holder.run("LOCK TABLE numbers IN ROW EXCLUSIVE MODE").await?;
    let building = builder.start("CREATE INDEX CONCURRENTLY by_value ON numbers (value)");
    let holding = format!("SELECT count(*) {HOLDERS}");
    let holders = || on_leader(&cluster, &holding);
    try_until("the snapshots are held", || async { Ok(holders().await?.number()? == 2) }).await?;
    try_until("the index waits for writers", || async {
        let sql = "SELECT count(*) FROM pg_stat_progress_create_index WHERE phase LIKE 'waiting for writers%'";
        Ok(on_leader(&cluster, sql).await?.number()? == 1)
    })
    .await?;
    run(&writer, "UPDATE numbers SET value = 1 WHERE id <= 5").await??;
    on_leader(&cluster, &format!("SELECT pg_terminate_backend(pid, 5000) {HOLDERS}")).await?;
    try_until("reads go to the leader", || async {
        writer.run("SELECT 1 FROM numbers").await?;
        let place = writer.run("SHOW onecopy.served_by").await?;
        Ok(place.rows[0][0].as_deref() == Some("leader"))
    })
    .await?;
    holder.run("COMMIT").await?;
    bounded("the index", building).await???;
    let refused = run(&reader, old).await?;
    assert_eq!(code(&refused), "40001", "{refused:?}");
    run(&reader, "ROLLBACK").await??;
    cluster.read_until_at_epoch(&reader, old).await?;
    assert_eq!(run(&reader, old).await??.number()?, 5);
    assert_eq!(holders().await?.number()?, 0);
    Ok(())
}

/// DO that has truncated and committed goes before an index that is built CONCURRENTLY in one batch, which PostgreSQL
/// refuses: what DO has done counts.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f94_what_has_committed_before_a_concurrent_index_in_its_batch_is_seen_whole() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query("CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)").await?;
    let count = "SELECT count(*) FROM filled";
    let reader = cluster.reader("reader", "follower-1").await?;
    cluster.read_until_at_epoch(&reader, count).await?;
    run(&reader, "BEGIN READ ONLY").await??;
    run(&reader, "SELECT count(*) FROM numbers").await??;
    let batch = [
        crate::wire::run_extended("DO 'BEGIN TRUNCATE filled; COMMIT; END'", &[]),
        crate::wire::run_extended("CREATE INDEX CONCURRENTLY by_a ON filled (a)", &[]),
        crate::wire::sync(),
    ];
    let answer = bounded("the batch", wire.ask(&batch.concat())).await??;
    assert_eq!(answer.code(), "25001", "{answer:?}");
    let refused = run(&reader, count).await?;
    assert_eq!(code(&refused), "40001", "{refused:?}");
    run(&reader, "ROLLBACK").await??;
    assert_eq!(run(&reader, count).await??.number()?, 0);
    Ok(())
}
