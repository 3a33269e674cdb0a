//! Who is let in is decided by what the leader has committed, and before anything is done for who is not.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use onecopy_router::Health;
use onecopy_tests::client::{Session, StatementResult};
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::{DATABASE, PASSWORD, USER};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::harness::{bounded, leader, on_leader, start, start_usual, try_until, wait_for_health, wait_for_updates};
use crate::wire::{Wire, message};

async fn code(cluster: &TestCluster, database: &str, password: &str) -> anyhow::Result<String> {
    let answer = Wire::log_in(cluster, &[("user", "guest"), ("database", database)], password).await?;
    Ok(answer.err().map_or_else(|| "00000".to_owned(), |error| error.code))
}

/// A follower that stands still knows an old password: it is not asked while the leader is there, whatever was before,
/// and not believed while it lacks what the leader has written.
///
/// Who may log in is what the leader has committed; while it is away, what a follower knows that has replayed all that
/// the leader was last known to have written (a look each 250 ms and at each log-in), with a warning; no such follower:
/// 57P03.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f60_an_old_password_opens_nothing_after_the_leader_was_away() -> anyhow::Result<()> {
    // The follower that stands still is to hold up no gate.
    let cluster = start(1, |settings| settings.follower_timeout_ms = 100).await?;
    leader(&cluster).await?.run("CREATE ROLE guest LOGIN PASSWORD 'old'").await?;
    cluster.servers.wait_replayed().await?;
    assert_eq!(code(&cluster, DATABASE, "old").await?, "00000");
    let away = async || {
        cluster.servers.leader().server.crash_stop().await?;
        wait_for_health(&cluster, "leader", Health::Down).await
    };
    let back = async || {
        cluster.servers.leader().server.start().await?;
        wait_for_updates(&cluster).await
    };
    // What the leader writes by itself just before it is lost may be known to nobody else; then it comes back first.
    try_until("the leader is lost when the follower has all that there is", || async {
        cluster.servers.wait_replayed().await?;
        away().await?;
        let old = code(&cluster, DATABASE, "old").await?;
        let new = code(&cluster, DATABASE, "new").await?;
        back().await?;
        match (old.as_str(), new.as_str()) {
            // It may have all of it only between the two.
            ("57P03", _) => Ok(false),
            ("00000", "28P01") => Ok(true),
            unexpected => anyhow::bail!("old and new: {unexpected:?}"),
        }
    })
    .await?;
    let follower = cluster.servers.followers()[0].connect("observer").await?;
    follower.run("SELECT pg_wal_replay_pause()").await?;
    try_until("it stands still", || async {
        Ok(follower.run("SELECT pg_get_wal_replay_pause_state()").await?.text()? == "paused")
    })
    .await?;
    leader(&cluster).await?.run("ALTER ROLE guest PASSWORD 'new'").await?;
    assert_eq!(code(&cluster, DATABASE, "old").await?, "28P01");
    assert_eq!(code(&cluster, DATABASE, "new").await?, "00000");
    // It has received all of it; that it shows less the router knows by what the last log-in was told, however long
    // ago a probe was.
    let written = on_leader(&cluster, "SELECT pg_current_wal_lsn()").await?.text()?.to_owned();
    let received =
        format!("SELECT pg_last_wal_receive_lsn() >= '{written}' AND pg_last_wal_replay_lsn() < '{written}'");
    try_until("it has received what it does not show", || async { Ok(follower.run(&received).await?.text()? == "t") })
        .await?;
    away().await?;
    for password in ["old", "new"] {
        assert_eq!(code(&cluster, DATABASE, password).await?, "57P03", "{password}: nobody knows");
    }
    follower.run("SELECT pg_wal_replay_resume()").await?;
    try_until("the follower knows", || async { Ok(code(&cluster, DATABASE, "new").await? == "00000") }).await?;
    assert_eq!(code(&cluster, DATABASE, "old").await?, "28P01");
    Ok(())
}

/// Log-ins ask the leader one after the other. When it stands still, those who wait for their turn are not let in after
/// its silence to each of them, which would take longer than a log-in may.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_ins_that_queue_for_a_leader_that_stands_still_are_let_in_together() -> anyhow::Result<()> {
    const LOG_INS: usize = 30;
    let cluster = Arc::new(start(1, |settings| settings.server_timeout_ms = 1000).await?);
    leader(&cluster).await?.run("CREATE ROLE guest LOGIN PASSWORD 'guest'").await?;
    cluster.servers.wait_replayed().await?;
    assert_eq!(code(&cluster, DATABASE, "guest").await?, "00000");
    let _frozen = cluster.servers.leader().freeze()?;
    let mut log_ins = JoinSet::new();
    for _ in 0..LOG_INS {
        let cluster = Arc::clone(&cluster);
        log_ins.spawn(async move { code(&cluster, DATABASE, "guest").await });
    }
    while let Some(code) = log_ins.join_next().await {
        assert_eq!(code??, "00000");
    }
    Ok(())
}

/// Whoever may enter many databases, one after the other, does not make the router hold connections to all of them.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_no_client_is_in_keeps_no_connections() -> anyhow::Result<()> {
    let cluster = start(1, |settings| settings.database_idle_s = 1).await?;
    leader(&cluster).await?.run("CREATE DATABASE store").await?;
    cluster.servers.wait_replayed().await?;
    let connections = async || {
        let mut all = Vec::new();
        for server in cluster.servers.all() {
            let sql = "SELECT count(*) FROM pg_stat_activity \
                 WHERE datname = 'store' AND application_name LIKE 'onecopy %'";
            all.push(server.connect("observer").await?.run(sql).await?.number()?);
        }
        anyhow::Ok(all)
    };
    // What somebody runs past the router is no router's before this one.
    let bystander = Session::connect("bystander", &cluster.servers.leader().config("store")).await?;
    let mut running = None;
    for round in 0..2 {
        let mut wire = match Wire::log_in(&cluster, &[("user", USER), ("database", "store")], PASSWORD).await? {
            Ok(wire) => wire,
            Err(error) => anyhow::bail!("{error:?}"),
        };
        for sql in [&format!("CREATE TABLE made_{round} ()"), "SELECT count(*) FROM pg_class WHERE relname = 'none'"] {
            assert_eq!(wire.query(sql).await?.code(), "00000", "{sql}");
        }
        // Longer than one without clients is kept.
        tokio::time::sleep(Duration::from_millis(2500)).await;
        let open = connections().await?;
        assert!(open.iter().all(|count| *count > 0), "its client is there: {open:?}");
        if let Some(running) = running.take() {
            let count: StatementResult = bounded("the bystander", running).await??;
            assert_eq!(count?.rows.len(), 1, "it was let alone");
        }
        drop(wire);
        try_until("nothing is kept", || async { Ok(connections().await?.iter().all(|count| *count == 0)) }).await?;
        running = Some(bystander.start("SELECT pg_sleep(2)"));
    }
    bounded("the bystander", running.context("it sleeps")?).await???;
    drop(bystander);
    try_until("it has gone", || async {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'store'";
        Ok(on_leader(&cluster, sql).await?.number()? == 0)
    })
    .await?;
    leader(&cluster).await?.run("DROP DATABASE store").await?;
    Ok(())
}

/// As on one server a session goes on whose role has got another password; what it needs of servers anew it gets as
/// soon as anybody has logged in with that one.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f91_a_session_goes_on_when_its_roles_password_is_changed() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let setup = leader(&cluster).await?;
    setup.run_all(&["CREATE ROLE guest LOGIN PASSWORD 'old'", "GRANT ALL ON numbers TO guest"]).await?;
    cluster.servers.wait_replayed().await?;
    let parameters = [("user", "guest"), ("database", DATABASE)];
    let log_in = async |password: &str| match Wire::log_in(&cluster, &parameters, password).await? {
        Ok(wire) => Ok(wire),
        Err(error) => anyhow::bail!("{error:?}"),
    };
    let mut session = log_in("old").await?;
    let update = "UPDATE numbers SET value = value + 1 WHERE id = 1";
    assert_eq!(session.query(update).await?.commands(), ["UPDATE 1"]);
    setup.run("ALTER ROLE guest PASSWORD 'new'").await?;
    assert_eq!(session.query(update).await?.commands(), ["UPDATE 1"], "its back end is there");
    let mut other = log_in("new").await?;
    // All that the servers have of the role goes; what both need then are connections that are made anew.
    let end = "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE usename = 'guest'";
    for server in cluster.servers.all() {
        server.connect("ender").await?.run(end).await?;
    }
    for wire in [&mut session, &mut other] {
        // That its back end was ended it may be told once.
        let told = wire.query(update).await?;
        assert!(matches!(told.code().as_str(), "00000" | "57P01" | "08006"), "{:?}", told.errors());
        let answer = wire.query(update).await?;
        assert_eq!(answer.commands(), ["UPDATE 1"], "{:?}", answer.errors());
        for sql in ["SELECT value > 0 FROM numbers WHERE id = 1", "BEGIN READ ONLY; SELECT current_user = 'guest'"] {
            let answer = wire.query(sql).await?;
            assert_eq!(answer.text_rows(), ["t"], "{sql}: {:?}", answer.errors());
        }
    }
    assert_eq!(code(&cluster, DATABASE, "old").await?, "28P01");
    Ok(())
}

/// The router's own role makes what it needs in a database only for who may enter, and the right counts at each log-in.
///
/// A role that may not CONNECT to a database is refused before the router makes or opens anything there, at each
/// log-in.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f61_nothing_is_made_in_a_database_for_who_may_not_enter_it() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let setup = cluster.updater("setup").await?;
    for sql in [
        "CREATE ROLE guest LOGIN PASSWORD 'guest'",
        "CREATE DATABASE closed",
        "REVOKE CONNECT ON DATABASE closed FROM PUBLIC",
    ] {
        setup.run(sql).await?;
    }
    let made = async || {
        let observer = Session::connect("observer", &cluster.servers.leader().config("closed")).await?;
        let answer = observer.run("SELECT count(*) FROM pg_namespace WHERE nspname = 'onecopy_router'").await?;
        answer.number()
    };
    assert_eq!(code(&cluster, "closed", "guest").await?, "42501");
    assert_eq!(made().await?, 0);
    assert_eq!(code(&cluster, "closed", "wrong").await?, "28P01");
    assert_eq!(code(&cluster, "nowhere", "guest").await?, "3D000");
    assert_eq!(code(&cluster, "template0", "guest").await?, "55000");
    setup.run("GRANT CONNECT ON DATABASE closed TO guest").await?;
    assert_eq!(code(&cluster, "closed", "guest").await?, "00000");
    assert_eq!(made().await?, 1);
    setup.run("REVOKE CONNECT ON DATABASE closed FROM guest").await?;
    assert_eq!(code(&cluster, "closed", "guest").await?, "42501", "its back ends of before are there still");
    Ok(())
}

/// Whoever made the tripwire, or its schema, before the router came could have its superuser run what he likes.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f90_a_tripwire_that_somebody_else_could_change_is_refused_and_runs_nothing() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let setup = leader(&cluster).await?;
    setup.run("CREATE ROLE guest LOGIN PASSWORD 'guest'").await?;
    setup.run("CREATE DATABASE store OWNER guest").await?;
    let superuser = Session::connect("superuser", &cluster.servers.leader().config("store")).await?;
    let mut config = cluster.servers.leader().config("store");
    let guest = Session::connect("guest", config.user("guest").password("guest")).await?;
    guest
        .run_all(&[
            "CREATE TABLE ran (who text)",
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS \
             'BEGIN INSERT INTO public.ran VALUES (current_user); RETURN NULL; END'",
            "CREATE FUNCTION noted() RETURNS bigint LANGUAGE sql AS \
             'INSERT INTO public.ran VALUES (current_user) RETURNING 1'",
        ])
        .await?;
    let is_refused = async |what: &str| -> anyhow::Result<()> {
        let answer = Wire::log_in(&cluster, &[("user", "guest"), ("database", "store")], "guest").await?;
        let refusal = answer.err().with_context(|| format!("let in although {what}"))?;
        anyhow::ensure!(refusal.code == "55000", "{refusal:?}");
        anyhow::ensure!(refusal.message.contains(what) && refusal.message.contains("DROP SCHEMA"), "{refusal:?}");
        Ok(())
    };
    let no_superuser = "belongs to guest, which is no superuser";
    guest.run("CREATE SCHEMA onecopy_router").await?;
    is_refused(no_superuser).await?;
    guest.run("CREATE VIEW onecopy_router.tripwire AS SELECT noted() AS t").await?;
    is_refused(no_superuser).await?;
    superuser.run("ALTER SCHEMA onecopy_router OWNER TO CURRENT_USER").await?;
    is_refused("tripwire belongs to guest").await?;
    superuser.run("ALTER VIEW onecopy_router.tripwire OWNER TO CURRENT_USER").await?;
    is_refused("no plain table").await?;
    superuser
        .run_all(&["DROP VIEW onecopy_router.tripwire", "CREATE TABLE onecopy_router.tripwire (t bigint)"])
        .await?;
    superuser.run("GRANT ALL ON onecopy_router.tripwire TO guest").await?;
    superuser.run("GRANT USAGE ON SCHEMA onecopy_router TO guest").await?;
    guest.run("CREATE TRIGGER notes AFTER TRUNCATE ON onecopy_router.tripwire EXECUTE FUNCTION public.note()").await?;
    is_refused("no plain table").await?;
    assert_eq!(superuser.run("SELECT count(*) FROM ran").await?.number()?, 0);
    superuser.run("DROP SCHEMA onecopy_router CASCADE").await?;
    assert_eq!(code(&cluster, "store", "guest").await?, "00000");
    Ok(())
}

/// `template1` has no connection when it is copied: by its only client, by one elsewhere, and past the router.
///
/// A template is copied although clients of the router are or were there, as far as one server copies it.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f62_a_template_is_copied_although_clients_of_the_router_were_there() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let template = [("user", USER), ("database", "template1")];
    let mut inside = Wire::log_in(&cluster, &template, PASSWORD).await?.expect("may log in");
    for name in ["one", "two"] {
        inside.query("SELECT count(*) FROM pg_class").await?;
        let answer = inside.query(&format!("CREATE DATABASE {name}")).await?;
        assert_eq!(answer.code(), "00000", "{name}: {:?}", answer.errors());
    }
    assert_eq!(inside.query("SELECT 'on'").await?.text_rows(), ["on"]);
    inside.send(&message(b'X', b"")).await?;
    inside.until_closed().await?;
    try_until("nobody is in the template", || async {
        let count =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = 'template1' AND backend_type = 'client backend'";
        Ok(on_leader(&cluster, count).await?.number()? == 0)
    })
    .await?;
    leader(&cluster).await?.run("CREATE DATABASE three").await?;
    let mut inside = Wire::log_in(&cluster, &template, PASSWORD).await?.expect("may log in");
    inside.query("SELECT 1").await?;
    let elsewhere = Mutex::new(Wire::connect(&cluster).await?);
    let create = async || anyhow::Ok(elsewhere.lock().await.query("CREATE DATABASE four").await?.code());
    assert_eq!(create().await?, "55006", "somebody is there, as on one server");
    drop(inside);
    try_until("the template is free", || async { Ok(create().await? == "00000") }).await
}
