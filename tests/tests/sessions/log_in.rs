//! The way in: nobody gets another's verifier, nobody makes the router misread SQL, and who vanishes on the way leaves
//! nothing behind.

use std::time::Duration;

use anyhow::Context;
use onecopy_router::config::RouterSettings;
use onecopy_testing::Frozen;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::{DATABASE, PASSWORD, USER};

use crate::harness::{leader, on_leader, start, start_usual, try_until};
use crate::wire::{Wire, startup};

/// Freezes the process that the router asks for verifiers.
async fn freeze_look_up(cluster: &TestCluster) -> anyhow::Result<(Frozen, u32)> {
    let sql = "SELECT max(pid) FROM pg_stat_activity WHERE application_name = 'onecopy login'";
    let process = u32::try_from(on_leader(cluster, sql).await?.number()?)?;
    Ok((Frozen::of([process]), process))
}

/// Whether something was sent to a process over TCP that it has not read: to one that stands still, a question of the
/// router's. Source: proc_pid_net(5), the queues are the fifth word and the socket's inode the tenth.
fn was_asked(process: u32) -> anyhow::Result<bool> {
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd"))?.flatten();
    let targets: Vec<_> = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect();
    let connections = std::fs::read_to_string("/proc/net/tcp")?;
    Ok(connections.lines().skip(1).any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (Some(queues), Some(inode)) = (words.get(4), words.get(9)) else { return false };
        let socket = format!("socket:[{inode}]");
        let is_unread = queues.split_once(':').is_some_and(|(_, received)| received.bytes().any(|digit| digit != b'0'));
        is_unread && targets.iter().any(|target| target.as_os_str() == socket.as_str())
    }))
}

async fn code(cluster: &TestCluster, user: &str, password: &str) -> anyhow::Result<String> {
    let answer = Wire::log_in(cluster, &[("user", user), ("database", DATABASE)], password).await?;
    Ok(answer.err().map_or_else(|| "00000".to_owned(), |error| error.code))
}

async fn every_password_opens_its_own_role_only(cluster: &TestCluster) -> anyhow::Result<()> {
    for round in 0..3 {
        for (user, password, expected) in [
            ("victim", "the attacker's", "28P01"),
            ("victim", "the victim's", "00000"),
            ("attacker", "the victim's", "28P01"),
            ("attacker", "the attacker's", "00000"),
            (USER, "the attacker's", "28P01"),
            (USER, PASSWORD, "00000"),
        ] {
            assert_eq!(code(cluster, user, password).await?, expected, "{user} with {password}, round {round}");
        }
    }
    Ok(())
}

async fn with_roles(change: impl FnOnce(&mut RouterSettings)) -> anyhow::Result<TestCluster> {
    let cluster = start(0, change).await?;
    let setup = cluster.updater("setup").await?;
    setup.run("CREATE ROLE attacker LOGIN PASSWORD 'the attacker''s'").await?;
    setup.run("CREATE ROLE victim LOGIN PASSWORD 'the victim''s'").await?;
    every_password_opens_its_own_role_only(&cluster).await?;
    Ok(cluster)
}

/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verifier_that_comes_late_is_not_taken_for_another_roles() -> anyhow::Result<()> {
    let cluster = with_roles(|_| {}).await?;
    let (frozen, process) = freeze_look_up(&cluster).await?;
    // Its look-up times out on the frozen process and is done on another.
    assert_eq!(code(&cluster, "attacker", "the attacker's").await?, "00000");
    assert!(was_asked(process)?, "the frozen process was not asked");
    drop(frozen);
    every_password_opens_its_own_role_only(&cluster).await
}

/// A look-up is given up after 5 s by itself.
const LOG_IN_TIMEOUT: Duration = Duration::from_secs(4);

/// The log-in itself is given up while its look-up is under way.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_in_given_up_in_its_look_up_leaves_no_answer_for_the_next() -> anyhow::Result<()> {
    let cluster = with_roles(|settings| settings.authentication_timeout_s = LOG_IN_TIMEOUT.as_secs()).await?;
    let (frozen, process) = freeze_look_up(&cluster).await?;
    let mut slow = Wire::unauthenticated(&cluster).await?;
    slow.send(&startup(&[("user", "attacker"), ("database", DATABASE)])).await?;
    // The look-up is under way when the question lies before the frozen process.
    try_until("the look-up is under way", async || was_asked(process)).await?;
    let answer = slow.until_closed().await?;
    // One whose look-up had ended would be asked for a password.
    assert!(answer.frames.is_empty(), "{answer:?}");
    drop(frozen);
    every_password_opens_its_own_role_only(&cluster).await
}

/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_with_which_sql_would_be_misread_are_refused() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let base = [("user", USER), ("database", DATABASE)];
    for (name, value) in [
        ("options", "-c standard_conforming_strings=off"),
        ("options", "--standard-conforming-strings=0"),
        ("options", "-cStandard_Conforming_Strings=false"),
        ("options", "-c client_encoding=SJIS"),
        ("standard_conforming_strings", "off"),
        ("client_encoding", "SJIS"),
        ("client_encoding", "shift_jis"),
        ("client_encoding", "Big5"),
        ("client_encoding", "GB18030"),
        ("client_encoding", "gbk"),
        ("client_encoding", "Windows-949"),
        ("client_encoding", "JOHAB"),
    ] {
        let refused = Wire::log_in(&cluster, &[base[0], base[1], (name, value)], PASSWORD).await?;
        let error = refused.err().unwrap_or_else(|| panic!("{name} = {value} was taken"));
        assert_eq!((error.code.as_str(), error.severity.as_str()), ("0A000", "FATAL"), "{name} = {value}");
    }
    let mut wire = Wire::connect(&cluster).await?;
    for sql in [
        "SET standard_conforming_strings = off",
        "SET standard_conforming_strings TO 'false'",
        "SET LOCAL standard_conforming_strings = off",
        "SET client_encoding = 'SJIS'",
        "SET NAMES 'big5'",
        "SET client_encoding TO gb18030",
    ] {
        for begin in ["SELECT", "BEGIN", "BEGIN READ ONLY"] {
            wire.query(begin).await?;
            assert_eq!(wire.query(sql).await?.code(), "0A000", "{begin}; {sql}");
            wire.query("ROLLBACK").await?;
        }
    }
    let settings = "SELECT current_setting('standard_conforming_strings'), current_setting('client_encoding')";
    assert_eq!(wire.query(settings).await?.text_rows(), ["on|UTF8"]);
    for setting in ["standard_conforming_strings = off", "client_encoding = 'SJIS'"] {
        let guest = format!("guest_{}", setting.len());
        wire.query(&format!("CREATE ROLE {guest} LOGIN PASSWORD 'guest'")).await?;
        assert_eq!(wire.query(&format!("ALTER ROLE {guest} SET {setting}")).await?.code(), "00000", "{setting}");
        cluster.servers.wait_replayed().await?;
        match Wire::log_in(&cluster, &[("user", &guest), ("database", DATABASE)], "guest").await? {
            Err(error) => assert_eq!(error.code, "0A000", "ALTER ROLE SET {setting}: {error:?}"),
            // As good: the role gets in, and the setting does not.
            Ok(mut guest) => {
                assert_eq!(guest.query(settings).await?.text_rows(), ["on|UTF8"], "ALTER ROLE SET {setting}");
                guest.query("BEGIN").await?;
                assert_eq!(guest.query(settings).await?.text_rows(), ["on|UTF8"], "ALTER ROLE SET {setting}");
            }
        }
    }
    Ok(())
}

/// The router asks each back end of the leader when its process was started. A server shows that to the role alone that
/// has logged in, and the operators of a query are found on the search path.
///
/// What the router asks servers for itself depends on no setting of a role and on no operator or function that somebody
/// else has made.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s72_what_the_router_asks_for_itself_depends_on_no_setting_of_a_role_and_no_operator() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE ROLE writer",
        "CREATE ROLE guest LOGIN PASSWORD 'guest' IN ROLE writer",
        "ALTER ROLE guest SET role = 'writer'",
        "GRANT ALL ON numbers TO writer",
        "CREATE FUNCTION public.deceive(numeric, int) RETURNS numeric LANGUAGE sql AS 'SELECT 0.0'",
        "CREATE OPERATOR public.* (LEFTARG = numeric, RIGHTARG = int, FUNCTION = public.deceive)",
        "CREATE FUNCTION public.deceive(oid, int) RETURNS boolean LANGUAGE sql AS 'SELECT false'",
        "CREATE OPERATOR public.>= (LEFTARG = oid, RIGHTARG = int, FUNCTION = public.deceive)",
        // Classified by the catalog, which the router reads with the operators that it finds.
        "CREATE FUNCTION stamp() RETURNS int LANGUAGE sql AS 'UPDATE numbers SET value = value + 1 RETURNING 1'",
    ] {
        assert_eq!(wire.query(sql).await?.code(), "00000", "{sql}");
    }
    cluster.servers.wait_replayed().await?;
    let parameters = [("user", "guest"), ("database", DATABASE)];
    let mut guest =
        Wire::log_in(&cluster, &parameters, "guest").await?.map_err(|error| anyhow::anyhow!("{error:?}"))?;
    guest.query("BEGIN").await?;
    assert_eq!(guest.query("UPDATE numbers SET value = 7 WHERE id = 1").await?.commands(), ["UPDATE 1"]);
    let roles = "SELECT current_user || '|' || session_user || '|' || current_setting('role')";
    assert_eq!(guest.query(roles).await?.text_rows(), ["writer|guest|writer"]);
    assert_eq!(guest.query("COMMIT").await?.commands(), ["COMMIT"]);
    assert_eq!(guest.query("SELECT stamp()").await?.text_rows(), ["1"]);
    assert_eq!(guest.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows(), ["8"]);
    Ok(())
}

/// However it is changed: the server reports it, and its back end serves nobody any more.
///
/// Nothing runs where SQL would be misread, however that was set (`set_config` with parameters, code of users): the
/// server reports it, the statement gets 0A000, its transaction is rolled back, its back end is closed.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s40_no_statement_runs_where_sql_would_be_misread_however_that_was_set() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut setup, mut wire) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    setup
        .query(
            "CREATE FUNCTION misread(name text, value text) RETURNS void LANGUAGE plpgsql AS \
         $$ BEGIN PERFORM set_config(name, value, false); END $$",
        )
        .await?;
    let settings = "SELECT current_setting('standard_conforming_strings'), current_setting('client_encoding')";
    for (name, value) in [("client_encoding", "SJIS"), ("standard_conforming_strings", "off")] {
        for begin in ["SELECT", "BEGIN"] {
            for call in
                ["SELECT set_config($1, $2, false)", "SELECT set_config($1, $2, true)", "SELECT misread($1, $2)"]
            {
                wire.query(begin).await?;
                // What stands behind it in its batch would be read by those rules.
                let insert = crate::wire::run_extended("INSERT INTO numbers VALUES (99, 0)", &[]);
                let batch = [crate::wire::run_extended(call, &[name, value]), insert, crate::wire::sync()].concat();
                let code = wire.ask(&batch).await?.code();
                assert_eq!(code, "0A000", "{begin}; {call}");
                wire.query("ROLLBACK").await?;
                assert_eq!(wire.query(settings).await?.text_rows(), ["on|UTF8"], "{begin}; {call}");
                assert_eq!(on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?, 10, "{begin}; {call}");
            }
        }
    }
    let harmless = "SELECT 'set_config', 'client_encoding'";
    assert_eq!(wire.query(harmless).await?.text_rows(), ["set_config|client_encoding"]);
    assert_eq!(wire.query("SELECT set_config('client_encoding', 'LATIN1', false)").await?.text_rows(), ["LATIN1"]);
    Ok(())
}

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_vanish_while_they_log_in_keep_no_database_from_being_dropped() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for round in 0..3 {
        assert_eq!(wire.query("CREATE DATABASE other").await?.code(), "00000", "round {round}");
        let parameters = [("user", USER), ("database", "other")];
        let mut other = Wire::log_in(&cluster, &parameters, PASSWORD).await?.expect("may log in");
        assert_eq!(other.query("SELECT 1").await?.text_rows(), ["1"]);
        drop(other);
        for _ in 0..10 {
            let mut vanishing = Wire::unauthenticated(&cluster).await?;
            vanishing.send(&startup(&parameters)).await?;
            drop(vanishing);
            // Its log-in goes on to the end while nobody is there to hear of it.
            let log_in = tokio::time::timeout(Duration::from_millis(5), Wire::log_in(&cluster, &parameters, PASSWORD));
            drop(log_in.await);
        }
        try_until("all clients but one are forgotten", || async {
            let status = cluster.router().status();
            let inside = status.databases.iter().find(|one| one.name == "other").map(|one| one.clients);
            Ok(status.clients == 1 && inside.unwrap_or(0) == 0)
        })
        .await
        .with_context(|| format!("round {round}"))?;
        let answer = wire.query("DROP DATABASE other").await?;
        assert_eq!(answer.code(), "00000", "round {round}: {:?}", answer.errors());
    }
    let left = leader(&cluster).await?.run("SELECT count(*) FROM pg_database WHERE datname = 'other'").await?;
    assert_eq!(left.number()?, 0);
    Ok(())
}

/// A role is its number, as for PostgreSQL: one that was made by the name of another, dropped or renamed, gets none of
/// the back ends that are logged in as that one.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_by_the_name_of_another_gets_none_of_its_back_ends() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let setup = cluster.updater("setup").await?;
    let make = "CREATE ROLE clerk LOGIN PASSWORD 'the clerk''s'";
    for leave in ["DROP ROLE clerk", "ALTER ROLE clerk RENAME TO manager", "DROP ROLE clerk"] {
        setup.run(make).await?;
        let parameters = [("user", "clerk"), ("database", DATABASE)];
        let mut clerk = Wire::log_in(&cluster, &parameters, "the clerk's").await?.expect("may log in");
        // A read of any server, and what only the leader does.
        for sql in ["SELECT current_user", "SELECT current_user FROM pg_catalog.txid_current()"] {
            assert_eq!(clerk.query(sql).await?.text_rows(), ["clerk"], "{sql}, before {leave}");
        }
        drop(clerk);
        try_until("the clerk is gone", || async { Ok(cluster.router().status().clients == 1) }).await?;
        setup.run(leave).await?;
    }
    Ok(())
}
