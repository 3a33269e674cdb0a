//! Followers that come and go while the router runs, and take a growing share of the reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use onecopy_postgres::{BaseBackup, FollowerMaker, Role, Server, StandbyOptions, recommended_settings};
use onecopy_router::config::RouterSettings;
use onecopy_router::{RouterError, ServerStatus};
use onecopy_tests::checker::{Level, Violation};
use onecopy_tests::client::Session;
use onecopy_tests::cluster::{TestCluster, router_configuration, server_configuration};
use onecopy_tests::fingerprint::{ensure_servers_equal, fingerprint};
use onecopy_tests::list_append::Workload;
use onecopy_tests::servers::{DATABASE, TestServer};
use onecopy_tests::verdict::{RoutedChecker, check};

use crate::harness::{try_until, wait_for_whole_epoch};

/// What has not become true by then never does.
const DEADLINE: Duration = Duration::from_secs(120);
const READ: &str = "SELECT v FROM counter";
/// Servers of a cluster with two followers.
const ALL: [&str; 3] = ["leader", "follower-1", "follower-2"];
/// A run that takes longer hangs.
const RUN_TIMEOUT: Duration = Duration::from_secs(400);
/// Reads that must reach a follower each time it is there.
const READS_MIN: u64 = 100;
/// A control runs until a violation shows; each run takes another seed.
const CONTROL_RUNS_MAX: u64 = 10;
/// The follower that comes and goes.
const NEW: &str = "late";

/// A follower of a running cluster, made by a base backup. It goes away with the cluster's directory.
async fn make_follower(cluster: &TestCluster) -> anyhow::Result<TestServer> {
    let leader = &cluster.servers.leader().server;
    let mut options = leader.options().clone();
    options.home = cluster.servers.directory().join(NEW);
    options.port = onecopy_testing::free_port();
    options.settings = recommended_settings(Role::Follower, NEW);
    options.settings.set("fsync", "off").set("shared_buffers", "32MB");
    options.user.create_directory(&options.home)?;
    let slot = Some(NEW.to_owned());
    let maker = BaseBackup { binaries: options.binaries.clone(), user: options.user.clone(), slot: NEW.to_owned() };
    maker.make(&leader.connection(), &options.data_directory(), &|_| {}).await?;
    let server = Server::open(options).await?;
    server.make_standby(&StandbyOptions { primary: leader.connection().with_application_name(NEW), slot })?;
    server.start().await?;
    Ok(TestServer { name: NEW.to_owned(), server })
}

/// A cluster with a table `counter` of one row.
async fn cluster_with_counter(
    followers: usize,
    change: impl FnOnce(&mut RouterSettings),
) -> anyhow::Result<(TestCluster, Session)> {
    let cluster = TestCluster::with_router(followers, change).await?;
    let session = cluster.updater("session").await?;
    session.run("CREATE TABLE counter (v int NOT NULL); INSERT INTO counter VALUES (0)").await?;
    Ok((cluster, session))
}

fn status_of(cluster: &TestCluster, name: &str) -> Option<ServerStatus> {
    cluster.router().status().servers.into_iter().find(|server| server.name == name)
}

fn reads_on(cluster: &TestCluster, name: &str) -> u64 {
    status_of(cluster, name).map_or(0, |server| server.reads)
}

fn is_in_epoch(cluster: &TestCluster, name: &str) -> bool {
    let databases = cluster.router().status().databases;
    databases.iter().any(|one| one.name == DATABASE && one.epoch_servers.iter().any(|server| server == name))
}

/// Reads through `session` until the epoch is open on `name`.
async fn wait_for_epoch_on(cluster: &TestCluster, session: &Session, name: &str) -> anyhow::Result<()> {
    try_until("the follower is in the epoch", || async {
        session.run("SELECT v FROM counter").await?;
        Ok(is_in_epoch(cluster, name))
    })
    .await
}

/// Connections of the router's to `server`.
async fn connections_of_router(server: &TestServer) -> anyhow::Result<i64> {
    let question = "SELECT count(*) FROM pg_stat_activity WHERE application_name IN ('onecopy probe', 'onecopy epoch', \
                    'onecopy reader', 'onecopy login', 'onecopy catalog')";
    server.connect("observer").await?.run(question).await?.number()
}

/// Whether status, metrics and console know `name`; none while some of them do: one epoch follows another meanwhile.
async fn is_shown(cluster: &TestCluster, name: &str) -> anyhow::Result<Option<bool>> {
    let mut config = cluster.client_config();
    config.dbname("onecopy");
    let mut shown = vec![status_of(cluster, name).is_some(), is_in_epoch(cluster, name)];
    shown.push(cluster.router().metrics().contains(&format!("server=\"{name}\"")));
    let console = Session::connect("console", &config).await?;
    for subject in ["SHOW SERVERS", "SHOW POOLS"] {
        let rows = console.run(subject).await?.rows;
        shown.push(rows.iter().flatten().flatten().any(|value| value == name));
    }
    Ok(shown.iter().all(|one| *one == shown[0]).then_some(shown[0]))
}

/// Takes the follower, has clients read there, gives it up, and takes it again, while `is_done` says that they go on.
async fn come_and_go(cluster: &TestCluster, is_done: &AtomicBool) -> anyhow::Result<TestServer> {
    let router = cluster.router();
    try_until("clients work", || async { Ok(router.status().reads > READS_MIN) }).await?;
    let follower = make_follower(cluster).await?;
    for round in 0..3 {
        router.add_follower(server_configuration(&follower))?;
        try_until("reads reach the new follower", || async { Ok(reads_on(cluster, NEW) > READS_MIN) }).await?;
        try_until("it is shown everywhere", || async { Ok(is_shown(cluster, NEW).await? == Some(true)) }).await?;
        if round < 2 {
            router.remove_follower(NEW).await?;
            // All of the router's is gone when it says so, so nobody would miss the server now.
            try_until("PostgreSQL has seen it", || async { Ok(connections_of_router(&follower).await? == 0) }).await?;
            // The epoch of before may still be the newest one.
            try_until("it is shown nowhere", || async { Ok(is_shown(cluster, NEW).await? == Some(false)) }).await?;
            if round == 0 {
                follower.server.restart(onecopy_postgres::StopMode::Fast).await?;
            }
        }
    }
    ensure!(!is_done.load(Ordering::Relaxed), "the run was too short for all that");
    Ok(follower)
}

/// Runs list-append while a follower comes and goes; no client may see an error.
async fn holds_while_followers_change(freshness: &str, level: Level) -> anyhow::Result<()> {
    let seed = onecopy_testing::seed();
    let freshness = freshness.parse()?;
    let cluster = TestCluster::with_router(1, |settings| settings.freshness = freshness).await?;
    let goes_on = Arc::new(AtomicBool::new(true));
    let workload =
        Workload { transactions: 6000, goes_on: goes_on.clone(), reads_anywhere: true, ..Workload::usual(seed) };
    let is_done = AtomicBool::new(false);
    let run = async {
        let history = tokio::time::timeout(RUN_TIMEOUT, workload.run(&cluster)).await;
        is_done.store(true, Ordering::Relaxed);
        history
    };
    let changes = async {
        let follower = come_and_go(&cluster, &is_done).await;
        goes_on.store(false, Ordering::Relaxed);
        follower
    };
    let (history, follower) = tokio::join!(run, changes);
    let (history, follower) = (history.context("the run hangs")??, follower?);
    println!("seed {seed}, {freshness}: {} committed; {:?}", history.committed_count(), cluster.router().status());
    let verdict = RoutedChecker::default().check(&history, level)?;
    assert!(verdict.is_valid(), "seed {seed}, {freshness}: {:?} {:?}", verdict.ours, verdict.adya);
    let leaders = ensure_servers_equal(&cluster.servers).await?;
    let session = follower.connect("auditor").await?;
    try_until("the new follower holds the same", || async { Ok(fingerprint(&session).await? == leaders) }).await
}

/// Followers that are made, taken, given up and taken again under load serve reads as serializable as promised, and no
/// client sees an error.
///
/// Spec: A4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r15_followers_come_and_go_under_load_at_strict_freshness() -> anyhow::Result<()> {
    holds_while_followers_change("strict", Level::StrictSerializable).await
}

/// Spec: A4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r15_followers_come_and_go_under_load_at_session_freshness() -> anyhow::Result<()> {
    holds_while_followers_change("session", Level::SessionSerializable).await
}

/// The same checkers must see what a follower shows that was taken without epochs.
///
/// Spec: A4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r15_without_epochs_reads_on_a_new_follower_are_wrong() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(0, |settings| settings.unsafe_without_epochs = true).await?;
    let follower = make_follower(&cluster).await?;
    cluster.router().add_follower(server_configuration(&follower))?;
    let seed = onecopy_testing::seed();
    for seed in (0..CONTROL_RUNS_MAX).map(|run| seed.wrapping_add(run)) {
        let workload = Workload { reads_anywhere: true, ..Workload::usual(seed) };
        match check(&workload.run(&cluster).await?, Level::Serializable)?.ours {
            Ok(()) => {}
            Err(Violation::Cycle { .. }) => {
                assert!(reads_on(&cluster, NEW) > READS_MIN);
                return Ok(());
            }
            Err(other) => panic!("seed {seed}: {other}"),
        }
    }
    panic!("no violation in {CONTROL_RUNS_MAX} runs: the workload does not provoke what it must");
}

/// No gate waits for a follower that still catches up; it serves reads once it has.
///
/// Spec: A4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r16_no_gate_waits_for_a_follower_that_still_catches_up() -> anyhow::Result<()> {
    const ROUNDS: u64 = 200;
    // Any gate that waited for it would last for a minute.
    let (cluster, session) = cluster_with_counter(1, |settings| settings.follower_timeout_ms = 60_000).await?;
    wait_for_epoch_on(&cluster, &session, "follower-1").await?;
    let follower = make_follower(&cluster).await?;
    let direct = follower.connect("direct").await?;
    direct.run("SELECT pg_wal_replay_pause()").await?;
    try_until("replay is paused", || async {
        Ok(direct.run("SELECT pg_get_wal_replay_pause_state()").await?.text()? == "paused")
    })
    .await?;
    session.run("UPDATE counter SET v = 1").await?;
    cluster.router().add_follower(server_configuration(&follower))?;
    try_until("it is probed", || async {
        Ok(status_of(&cluster, NEW).is_some_and(|server| server.replay_lag_bytes > 0))
    })
    .await?;

    session.run("SET onecopy.freshness = 'strict'").await?;
    session.run("SET onecopy.server = 'follower-1'").await?;
    let before = reads_on(&cluster, "follower-1");
    let rounds = async {
        for round in 1..=ROUNDS {
            session.run("UPDATE counter SET v = v + 1").await?;
            assert_eq!(session.run(READ).await?.number()?, 1 + i64::try_from(round)?);
            assert!(!is_in_epoch(&cluster, NEW));
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(DEADLINE, rounds).await.context("a gate waits for the follower")??;
    // Each of these had an epoch of its own. One for which none is made within a second, on a busy machine, goes to the
    // leader; if gates waited for the follower, all would.
    let there = reads_on(&cluster, "follower-1") - before;
    assert!(there > ROUNDS / 2 && there <= ROUNDS, "{there} of {ROUNDS}: {:?}", cluster.router().status());
    assert_eq!(reads_on(&cluster, NEW), 0);

    direct.run("SELECT pg_wal_replay_resume()").await?;
    wait_for_whole_epoch(&cluster, &session, READ, &["leader", "follower-1", NEW]).await?;
    session.run(&format!("SET onecopy.server = '{NEW}'")).await?;
    let before = reads_on(&cluster, NEW);
    assert_eq!(session.run(READ).await?.number()?, 1 + i64::try_from(ROUNDS)?);
    assert_eq!(reads_on(&cluster, NEW), before + 1);
    Ok(())
}

/// Reads that `clients` sessions have answered by each follower, of `reads` together.
async fn count_reads(cluster: &TestCluster, clients: usize, reads: usize) -> anyhow::Result<[u64; 2]> {
    let names = ["follower-1", "follower-2"];
    let before = names.map(|name| reads_on(cluster, name));
    let mut sessions = tokio::task::JoinSet::new();
    for _ in 0..clients {
        let session = cluster.updater("reader").await?;
        sessions.spawn(async move {
            for _ in 0..reads / clients {
                session.run_all(&["BEGIN READ ONLY", "SELECT v FROM counter", "COMMIT"]).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(result) = sessions.join_next().await {
        result??;
    }
    let after = names.map(|name| reads_on(cluster, name));
    Ok([after[0] - before[0], after[1] - before[1]])
}

/// A follower takes part in its share of the choices for a read, with share 0 in none unless the session asks for it;
/// the share is shown.
///
/// Spec: A4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r17_a_follower_takes_its_share_of_the_reads() -> anyhow::Result<()> {
    let (cluster, session) = cluster_with_counter(2, |_| {}).await?;
    let router = cluster.router();
    // Nobody writes while reads are counted: all servers stay in this epoch.
    wait_for_whole_epoch(&cluster, &session, READ, &ALL).await?;
    // The least busy one is chosen: of several clients a server has fewer that the processors leave waiting.
    for (clients, times) in [(1, 2), (6, 8)] {
        router.set_read_share("follower-2", 1.0)?;
        let is_shared = |[full, same]: [u64; 2]| same * times > full && full * times > same;
        let [full, same] = count_reads(&cluster, clients, 1200).await?;
        assert!(is_shared([full, same]), "{clients} clients, all shares 1: {full}, {same}");
        router.set_read_share("follower-2", 0.1)?;
        // It takes part in a tenth of the choices, and is chosen in some (nobody is busy) or all of them (it never is).
        let is_tenth = |[full, tenth]: [u64; 2]| tenth * 25 > full && tenth <= 330;
        let [full, tenth] = count_reads(&cluster, clients, 3000).await?;
        assert!(is_tenth([full, tenth]), "{clients} clients, share 0.1: {full}, {tenth} of 3000");
        router.set_read_share("follower-2", 0.0)?;
        let [full, none] = count_reads(&cluster, clients, 600).await?;
        assert!(full > 100 && none == 0, "{clients} clients, share 0: {full}, {none}");
    }
    // Whoever asks for it reads there all the same, at an epoch as fresh as any.
    session.run("SET onecopy.server = 'follower-2'").await?;
    session.run("SET onecopy.freshness = 'strict'").await?;
    let before = ["follower-1", "follower-2"].map(|name| reads_on(&cluster, name));
    for value in 1..=50 {
        session.run("UPDATE counter SET v = v + 1").await?;
        assert_eq!(session.run(READ).await?.number()?, value);
    }
    let other = reads_on(&cluster, "follower-1") - before[0];
    let there = reads_on(&cluster, "follower-2") - before[1];
    // The leader answers one for which no epoch is made within a second, on a busy machine; nobody else does.
    assert!(other == 0 && there > 25 && there <= 50, "{other} on another, {there} there");
    Ok(())
}

/// Spec: A4
#[tokio::test]
async fn r17_a_share_is_shown_and_what_is_none_is_refused() -> anyhow::Result<()> {
    let (cluster, _session) = cluster_with_counter(1, |_| {}).await?;
    let router = cluster.router();
    router.set_read_share("follower-1", 0.25)?;
    for wrong in [-0.5, 1.5, f64::NAN] {
        let refused = router.set_read_share("follower-1", wrong);
        assert!(
            matches!(&refused, Err(RouterError::ReadShare { server, .. }) if server == "follower-1"),
            "{refused:?}"
        );
    }
    for name in ["leader", "nobody"] {
        let refused = router.set_read_share(name, 0.5);
        assert!(matches!(&refused, Err(RouterError::UnknownFollower(unknown)) if unknown == name), "{refused:?}");
    }
    assert_eq!(status_of(&cluster, "follower-1").map(|server| server.read_share), Some(0.25));
    let metrics = router.metrics();
    assert!(metrics.contains("\nonecopy_server_read_share_ratio{server=\"leader\"} 1\n"), "{metrics}");
    assert!(metrics.contains("\nonecopy_server_read_share_ratio{server=\"follower-1\"} 0.25\n"), "{metrics}");
    let mut config = cluster.client_config();
    config.dbname("onecopy");
    let rows = Session::connect("console", &config).await?.run("SHOW SERVERS").await?.rows;
    assert!(rows[1].contains(&Some("0.25".to_owned())), "{rows:?}");
    Ok(())
}

/// Reads that outlast the removal of their follower by 5 s end with 57P01; names stay unique and free ones can be given
/// again; a reload makes the followers those of the file, or changes nothing when that is wrong.
///
/// Spec: A4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r18_what_outlasts_the_removal_of_its_follower_is_told() -> anyhow::Result<()> {
    let (cluster, session) = cluster_with_counter(2, |_| {}).await?;
    wait_for_whole_epoch(&cluster, &session, READ, &ALL).await?;
    let mut readers = Vec::new();
    for name in ["commits", "goes on", "is busy"] {
        let reader = cluster.reader(name, "follower-2").await?;
        let before = reads_on(&cluster, "follower-2");
        reader.run_all(&["BEGIN READ ONLY", READ]).await?;
        assert_eq!(reads_on(&cluster, "follower-2"), before + 1, "{name}");
        readers.push(reader);
    }
    let busy = readers[2].start("SELECT count(*) FROM generate_series(1, 1000000000)");
    cluster.router().remove_follower("follower-2").await?;
    assert_eq!(status_of(&cluster, "follower-2"), None);
    let code = |result: onecopy_tests::client::StatementResult| result.err().map(|error| error.code);
    assert_eq!(code(busy.await?).as_deref(), Some("57P01"));
    // What this one has read was right, and there is nothing to write.
    assert_eq!(code(readers[0].run("COMMIT").await), None);
    assert_eq!(code(readers[1].run("SELECT v FROM counter").await).as_deref(), Some("57P01"));
    assert_eq!(code(readers[1].run("SELECT v FROM counter").await).as_deref(), Some("25P02"));
    readers[1].run("ROLLBACK").await?;
    // The server that the sessions have named is not there; it is the same session when it comes back.
    assert_eq!(code(readers[0].run("SELECT v FROM counter").await).as_deref(), Some("57P03"));
    assert_eq!(readers[0].run("SHOW onecopy.server").await?.text()?, "follower-2");
    let unknown = readers[1].run("SET onecopy.server = 'follower-2'").await;
    assert_eq!(code(unknown).as_deref(), Some("22023"));
    cluster.router().add_follower(server_configuration(cluster.servers.server("follower-2")?))?;
    // A new epoch: that of before was open on the server that it was then.
    session.run("UPDATE counter SET v = v + 1").await?;
    wait_for_whole_epoch(&cluster, &session, READ, &ALL).await?;
    let before = reads_on(&cluster, "follower-2");
    assert_eq!(readers[0].run(READ).await?.number()?, 1);
    assert_eq!(reads_on(&cluster, "follower-2"), before + 1);
    Ok(())
}

/// Spec: A4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r18_names_stay_unique_and_a_reload_follows_the_file() -> anyhow::Result<()> {
    let (cluster, session) = cluster_with_counter(2, |_| {}).await?;
    let router = cluster.router();
    let names = || router.status().servers.into_iter().map(|server| server.name).collect::<Vec<_>>();
    let one = server_configuration(cluster.servers.server("follower-1")?);
    assert!(matches!(router.add_follower(one.clone()), Err(RouterError::DuplicateServer(name)) if name == one.name));
    for name in ["leader", "nobody"] {
        assert!(matches!(router.remove_follower(name).await, Err(RouterError::UnknownFollower(_))), "{name}");
    }
    assert_eq!(names(), ["leader", "follower-1", "follower-2"]);

    let whole = router_configuration(&cluster.servers, cluster.settings.clone());
    let mut without = whole.clone();
    without.followers.remove(0);
    without.leader.port += 1;
    router.reload(&without).await?;
    assert_eq!(names(), ["leader", "follower-2"], "the leader stays whatever the file says");
    session.run("UPDATE counter SET v = v + 1").await?;

    let mut twice = whole.clone();
    twice.followers.push(whole.followers[0].clone());
    let mut unreadable = whole.clone();
    unreadable.followers[0].password = None;
    unreadable.followers[0].password_file = Some(cluster.servers.directory().join("no such file"));
    let mut follower_for_leader = whole.clone();
    std::mem::swap(&mut follower_for_leader.leader.name, &mut follower_for_leader.followers[0].name);
    for wrong in [twice, unreadable, follower_for_leader] {
        assert!(router.reload(&wrong).await.is_err());
        assert_eq!(names(), ["leader", "follower-2"]);
    }
    let reads = reads_on(&cluster, "follower-2");
    router.reload(&whole).await?;
    assert_eq!(names(), ["leader", "follower-2", "follower-1"]);
    assert_eq!(reads_on(&cluster, "follower-2"), reads, "who stays in the file is left alone");
    wait_for_epoch_on(&cluster, &session, "follower-1").await?;

    // At another place it is another server.
    let mut elsewhere = whole.clone();
    elsewhere.followers[0].host = "localhost".to_owned();
    router.reload(&elsewhere).await?;
    assert_eq!(names(), ["leader", "follower-2", "follower-1"]);
    wait_for_epoch_on(&cluster, &session, "follower-1").await
}
