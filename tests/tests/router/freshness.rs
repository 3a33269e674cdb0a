//! Where reads run, and what they must see.

use onecopy_tests::cluster::{AT_EPOCH, TestCluster};
use onecopy_tests::servers::LEADER;

use crate::harness::wait_for_whole_epoch;

const PLACES: [&str; 3] = [LEADER, "follower-1", "follower-2"];
const READ: &str = "SELECT v FROM counter";
/// Reads of which each server must answer some.
const SPREAD_READS: u64 = 30;
/// Writes after which each read must show the last one, at least.
const ROUNDS: i64 = 60;
/// Reads that each follower must answer meanwhile. How many rounds that takes depends on the machine: the leader
/// answers a read for which no epoch is made within a second.
const READS_EACH: u64 = 20;
/// So many rounds are enough for that on any machine.
const ROUNDS_MAX: i64 = 600;

/// Reads that each server has answered, in the order of [`PLACES`].
fn reads(cluster: &TestCluster) -> Vec<u64> {
    cluster.router().status().servers.iter().map(|server| server.reads).collect()
}

/// Whether there is to be another round: until [`ROUNDS`] are over, and each follower has answered [`READS_EACH`] since
/// they had answered `before`.
fn goes_on(cluster: &TestCluster, before: &[u64], round: i64) -> bool {
    let enough = reads(cluster).iter().zip(before).skip(1).all(|(now, before)| now - before >= READS_EACH);
    assert!(enough || round <= ROUNDS_MAX, "of {before:?}: {:?}", cluster.router().status());
    !enough || round <= ROUNDS
}

/// A read at an epoch runs on any server, the one asked for when the session says so; what does not say that it only
/// reads runs on the leader.
///
/// Spec: I2
#[tokio::test]
async fn r2_reads_run_where_they_are_sent_and_spread_over_all_servers_otherwise() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, |_| {}).await?;
    let session = cluster.updater("reader").await?;
    session.run("CREATE TABLE counter (v int NOT NULL); INSERT INTO counter VALUES (0)").await?;
    // Nobody writes from here on: all servers stay in this epoch.
    wait_for_whole_epoch(&cluster, &session, READ, &PLACES).await?;
    let before = reads(&cluster);
    for _ in 0..SPREAD_READS {
        session.run(READ).await?;
    }
    let spread: Vec<u64> = reads(&cluster).iter().zip(&before).map(|(now, before)| now - before).collect();
    assert!(spread.iter().all(|count| *count > 0), "{spread:?}");
    assert_eq!(spread.iter().sum::<u64>(), SPREAD_READS);

    for (index, place) in PLACES.into_iter().enumerate() {
        session.run(&format!("SET onecopy.server = '{place}'")).await?;
        let mut expected = reads(&cluster);
        session.run_all(&[READ, "BEGIN READ ONLY", READ, READ, "COMMIT"]).await?;
        expected[index] += 3;
        assert_eq!(reads(&cluster), expected, "{place}");
        // What does not say that it only reads runs on the leader, wherever reads go, and is no read at an epoch.
        session.run_all(&["BEGIN", READ, "COMMIT"]).await?;
        assert_eq!(session.run("SHOW onecopy.served_by").await?.text()?, LEADER, "{place}");
        assert_eq!(reads(&cluster)[1..], expected[1..], "{place}");
    }
    Ok(())
}

/// `SHOW onecopy.served_by` tells whether the leader certified a session's newest statement, or which epoch it read on
/// which server.
///
/// Spec: I2
#[tokio::test]
async fn r19_a_session_is_told_where_its_newest_statement_ran() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(1, |_| {}).await?;
    let session = cluster.updater("asker").await?;
    let place = async || {
        let answer = session.run("SHOW onecopy.served_by").await?;
        anyhow::Ok(answer.rows[0][0].clone().expect("a text"))
    };
    assert_eq!(place().await?, "");
    session.run("CREATE TABLE counter (v int NOT NULL); INSERT INTO counter VALUES (0)").await?;
    assert_eq!(place().await?, LEADER);
    for server in [LEADER, "follower-1"] {
        session.run(&format!("SET onecopy.server = '{server}'")).await?;
        cluster.read_until_at_epoch(&session, READ).await?;
        let at_epoch = format!("{server} at epoch ");
        assert!(place().await?.starts_with(&at_epoch), "{}", place().await?);
        session.run("UPDATE counter SET v = v + 1").await?;
        assert_eq!(place().await?, LEADER);
        wait_for_whole_epoch(&cluster, &session, READ, &[LEADER, "follower-1"]).await?;
        session.run_all(&["BEGIN READ ONLY", READ]).await?;
        assert!(place().await?.starts_with(&at_epoch), "{}", place().await?);
        session.run_all(&[READ, "COMMIT"]).await?;
        assert!(place().await?.starts_with(&at_epoch), "{}", place().await?);
        session.run_all(&["BEGIN", READ, "COMMIT"]).await?;
        assert_eq!(place().await?, LEADER);
    }
    for change in ["SET onecopy.served_by = 'x'", "RESET onecopy.served_by"] {
        assert_eq!(session.run(change).await.unwrap_err().code, "55P02", "{change}");
    }
    assert_eq!(place().await?, LEADER);
    Ok(())
}

/// Spec: I2
#[tokio::test]
async fn r4_a_session_reads_its_own_writes_on_every_server() -> anyhow::Result<()> {
    let cluster =
        TestCluster::with_router(2, |settings| settings.freshness = "session".parse().expect("a level")).await?;
    let session = cluster.updater("writer").await?;
    session.run("CREATE TABLE counter (v int NOT NULL); INSERT INTO counter VALUES (0)").await?;
    let before = reads(&cluster);
    for round in (1..).take_while(|round| goes_on(&cluster, &before, *round)) {
        if round % 2 == 0 {
            session.run_all(&["BEGIN", "UPDATE counter SET v = v + 1", "COMMIT"]).await?;
        } else {
            session.run("UPDATE counter SET v = v + 1").await?;
        }
        let place = PLACES[usize::try_from(round)? % PLACES.len()];
        session.run(&format!("SET onecopy.server = '{place}'")).await?;
        assert_eq!(session.run(READ).await?.number()?, round, "on {place}");
    }
    Ok(())
}

/// What a script's next psql relies on, and who gets a connection from a pool that cleans it.
///
/// Spec: I2
#[tokio::test]
async fn r4_a_session_sees_what_was_committed_before_it_began() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, |settings| {
        settings.freshness = "session".parse().expect("a level");
        // Nobody but a reader who needs one has an epoch made, and none lapses.
        settings.epoch_interval_ms = 60_000;
        settings.epoch_age_max_ms = 60_000;
    })
    .await?;
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE counter (v int NOT NULL); INSERT INTO counter VALUES (0)").await?;
    let old = cluster.updater("old").await?;
    cluster.read_until_at_epoch(&old, READ).await?;
    writer.run("UPDATE counter SET v = v + 1").await?;
    // The epoch from before may still be there: without the promise it is fresh enough for what follows, too.
    old.run("DISCARD ALL").await?;
    assert_eq!(old.run(READ).await?.number()?, 1, "after DISCARD ALL");
    for round in 2..=ROUNDS {
        writer.run("UPDATE counter SET v = v + 1").await?;
        let session = cluster.updater("new").await?;
        if round % 2 == 0 {
            assert_eq!(session.run(READ).await?.number()?, round);
        } else {
            let answers = session.run_all(&["BEGIN READ ONLY", READ, "COMMIT"]).await?;
            assert_eq!(answers[1].number()?, round, "in a transaction");
        }
    }
    Ok(())
}

/// Spec: I1
#[tokio::test]
async fn r3_a_strict_read_sees_what_anybody_was_told_is_committed() -> anyhow::Result<()> {
    let cluster =
        TestCluster::with_router(2, |settings| settings.freshness = "strict".parse().expect("a level")).await?;
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE counter (v int NOT NULL); INSERT INTO counter VALUES (0)").await?;
    let mut readers = Vec::new();
    for place in PLACES {
        readers.push(cluster.reader(place, place).await?);
    }
    let before = reads(&cluster);
    for round in (1..).take_while(|round| goes_on(&cluster, &before, *round)) {
        writer.run("UPDATE counter SET v = v + 1").await?;
        for reader in &readers {
            assert_eq!(reader.run(READ).await?.number()?, round, "on {}", reader.name());
            let answers = reader.run_all(&["BEGIN READ ONLY", READ, "COMMIT"]).await?;
            assert_eq!(answers[1].number()?, round, "in a transaction on {}", reader.name());
        }
    }
    Ok(())
}

/// Sixty seconds: no epoch need be made for the reader while the writer goes on.
///
/// Spec: I2
#[tokio::test]
async fn r5_a_bounded_read_may_be_old_but_a_transaction_reads_one_prefix() -> anyhow::Result<()> {
    let cluster =
        TestCluster::with_router(2, |settings| settings.freshness = "bounded:60000".parse().expect("a level")).await?;
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE counter (v int NOT NULL); INSERT INTO counter VALUES (0)").await?;
    let reader = cluster.updater("reader").await?;
    let (mut last, mut at_epochs, mut old, mut rounds) = (0, 0, 0, 0);
    // A read for which no epoch is found in time, on a busy machine, shows the last write.
    while rounds < ROUNDS || at_epochs < READS_EACH || old == 0 {
        assert!(rounds < ROUNDS_MAX, "{at_epochs} at an epoch, {old} of them old");
        reader.run("BEGIN READ ONLY").await?;
        let first = reader.run(READ).await?.number()?;
        if reader.run("SHOW onecopy.served_by").await?.text()?.contains(AT_EPOCH) {
            at_epochs += 1;
            old += u64::from(first < rounds);
        }
        rounds += 1;
        writer.run("UPDATE counter SET v = v + 1").await?;
        assert_eq!(reader.run(READ).await?.number()?, first);
        reader.run("COMMIT").await?;
        assert!(first >= last, "epochs of one database follow each other: {last}, then {first}");
        last = first;
    }
    reader.run("SET onecopy.freshness = 'strict'").await?;
    assert_eq!(reader.run(READ).await?.number()?, rounds);
    Ok(())
}
