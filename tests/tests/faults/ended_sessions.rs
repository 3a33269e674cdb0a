//! Sessions that somebody ends on purpose, by their number or by that of their server process.

use tokio::task::JoinSet;

use crate::harness::{bounded, leader, on_leader, start_usual, try_until};
use crate::wire::{Wire, expect, query, run_extended, sync};

/// What the client of a session knows it by.
fn number_of(wire: &Wire) -> u32 {
    u32::from_be_bytes(wire.cancel_key[..4].try_into().expect("four bytes"))
}

/// The number that a client gets at log-in names its session to `pg_terminate_backend` and `pg_cancel_backend`, as
/// text and as a value: the session ends, or what it runs is cancelled, if the server lets the caller do that.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_ended_and_cancelled_by_the_number_that_its_client_knows() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut killer = Wire::connect(&cluster).await?;
    let sleeps = || async {
        try_until("it sleeps", || async {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)'";
            Ok(on_leader(&cluster, sql).await?.number()? == 1)
        })
        .await
    };
    for before in [&["SELECT 1"][..], &["BEGIN", "UPDATE numbers SET value = 7 WHERE id = 1"]] {
        for running in [false, true] {
            for (own, by_value) in [(false, false), (false, true), (true, false)] {
                let what = format!("{before:?}, running {running}, by itself {own}, by value {by_value}");
                let mut victim = Wire::connect(&cluster).await?;
                for sql in before {
                    victim.query(sql).await?;
                }
                let number = number_of(&victim);
                let end = format!("SELECT pg_terminate_backend({number})");
                match (own, running) {
                    (true, true) => continue,
                    (true, false) => victim.send(&query(&end)).await?,
                    (false, _) => {
                        if running {
                            victim.send(&query("SELECT pg_sleep(600)")).await?;
                            sleeps().await?;
                        }
                        if by_value {
                            let sql = "SELECT pg_terminate_backend($1)";
                            let answer =
                                killer.ask(&[run_extended(sql, &[&number.to_string()]), sync()].concat()).await?;
                            assert_eq!(answer.text_rows(), ["t"], "{what}");
                        } else {
                            expect(&mut killer, &end, &["t"]).await?;
                        }
                    }
                }
                let answer = victim.until_closed().await?;
                let last = answer.errors().pop().unwrap_or_else(|| panic!("{what}: it ended without a word"));
                assert_eq!((last.code.as_str(), last.severity.as_str()), ("57P01", "FATAL"), "{what}: {answer:?}");
                assert_eq!(answer.text_rows(), [""; 0], "{what}");
            }
        }
    }
    let mut victim = Wire::connect(&cluster).await?;
    let number = number_of(&victim);
    victim.send(&query("SELECT pg_sleep(600)")).await?;
    sleeps().await?;
    expect(&mut killer, &format!("SELECT pg_cancel_backend({number})"), &["t"]).await?;
    assert_eq!(victim.answer().await?.code(), "57014");
    // Who may not end a server process of that role may not end its session.
    killer.query("CREATE ROLE nobody").await?;
    killer.query("SET ROLE nobody").await?;
    for function in ["pg_terminate_backend", "pg_cancel_backend"] {
        assert_eq!(killer.query(&format!("SELECT {function}({number})")).await?.code(), "42501");
    }
    expect(&mut victim, "SELECT count(*) FROM numbers WHERE value = 7", &["0"]).await
}

/// Each session that is named has a server process in its place, and many callers have sixteen at once.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_stand_in_for_sessions_take_sixteen_connections_at_most() -> anyhow::Result<()> {
    const CALLERS: usize = 10;
    const VICTIMS: usize = 8;
    const AT_ONCE: i64 = 16;
    let cluster = start_usual(1).await?;
    let mut victims = Vec::new();
    for _ in 0..VICTIMS {
        victims.push(Wire::connect(&cluster).await?);
    }
    let numbers = victims.iter().map(|wire| format!("({})", number_of(wire))).collect::<Vec<_>>().join(", ");
    let cancel = format!("SELECT count(*) FROM (VALUES {numbers}) AS named (pid) WHERE pg_cancel_backend(pid)");
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (mut wire, cancel) = (Wire::connect(&cluster).await?, cancel.clone());
        callers.spawn(async move { wire.query(&cancel).await });
    }
    let observer = leader(&cluster).await?;
    let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'onecopy stand-in'";
    let mut most = 0;
    while !callers.is_empty() {
        most = most.max(observer.run(count).await?.number()?);
        while let Some(answer) = callers.try_join_next() {
            assert_eq!(answer??.text_rows(), [VICTIMS.to_string()]);
        }
    }
    assert!((1..=AT_ONCE).contains(&most), "{most} at once");
    Ok(())
}

/// Whoever is ended by `pg_terminate_backend` through the router is told so and ends, in whatever state, and nobody
/// else.
///
/// A session whose server process is ended by `pg_terminate_backend` through the router gets 57P01 as FATAL and ends,
/// in whatever state, at once when it waits outside of a transaction; what ends on the server by itself is replaced
/// (F21).
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f68_a_session_that_is_ended_on_purpose_ends_as_on_one_server() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut killer, mut bystander) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    let update = "UPDATE numbers SET value = value + 1 WHERE id = 2";
    bystander.query(update).await?;
    let is_told = |answer: &crate::wire::Answer, what: &str| {
        let last = answer.errors().pop().unwrap_or_else(|| panic!("{what}: it ended without a word"));
        assert_eq!((last.code.as_str(), last.severity.as_str()), ("57P01", "FATAL"), "{what}: {answer:?}");
    };
    let before: [&[&str]; 5] = [
        &[],
        &["LISTEN news"],
        &["BEGIN"],
        &["BEGIN", "UPDATE numbers SET value = 1 WHERE id = 1"],
        &["BEGIN", "SELECT 1 / 0"],
    ];
    for statements in before {
        for (own, running) in [(true, false), (false, false), (false, true)] {
            let what = format!("{statements:?}, by itself {own}, running {running}");
            let mut victim = Wire::connect(&cluster).await?;
            for sql in statements {
                victim.query(sql).await?;
            }
            if statements.last().is_some_and(|sql| sql.contains('/')) {
                victim.query("ROLLBACK").await?;
            }
            let process = victim.query("SELECT pg_backend_pid()").await?.text_rows()[0].clone();
            let end = format!("SELECT pg_terminate_backend({process})");
            if own {
                victim.send(&query(&end)).await?;
            } else {
                if running {
                    victim.send(&query("SELECT pg_sleep(600)")).await?;
                    try_until("it sleeps", || async {
                        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
                        Ok(on_leader(&cluster, sql).await?.number()? == 1)
                    })
                    .await?;
                }
                expect(&mut killer, &end, &["t"]).await?;
                // Who waits outside of a transaction is told at once.
                if !running && statements.contains(&"BEGIN") && !statements.contains(&"SELECT 1 / 0") {
                    victim.send(&query("SELECT 'too late'")).await?;
                }
            }
            let answer = victim.until_closed().await?;
            is_told(&answer, &what);
            assert_eq!(answer.text_rows(), [""; 0], "{what}");
        }
    }
    assert_eq!(bystander.query(update).await?.commands(), ["UPDATE 1"]);
    expect(&mut killer, "SELECT count(*) FROM numbers WHERE value > 1", &["1"]).await
}

/// What has committed is told to a session that is ended meanwhile, and then its end.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_ended_hears_what_has_committed() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut killer = Wire::connect(&cluster).await?;
    const STUBBORN: &str =
        "BEGIN PERFORM pg_sleep(600); EXCEPTION WHEN query_canceled THEN INSERT INTO numbers VALUES (100, 1); END;";
    assert!(
        killer
            .query(&format!(
                "CREATE PROCEDURE stubborn() LANGUAGE plpgsql AS $$ BEGIN {STUBBORN} END $$;
                 CREATE FUNCTION stubborn_too() RETURNS int LANGUAGE plpgsql AS $$ BEGIN {STUBBORN} RETURN 1; END $$"
            ))
            .await?
            .errors()
            .is_empty()
    );
    for (begin, statement, tags, rows) in [
        ("SELECT", "CALL stubborn()", "CZE", 1),
        // Wrapped by the router, which commits nothing of an ended session.
        ("SELECT", "SELECT stubborn_too()", "E", 0),
        ("BEGIN", "CALL stubborn()", "E", 0),
    ] {
        let mut victim = Wire::connect(&cluster).await?;
        let number = u32::from_be_bytes(victim.cancel_key[..4].try_into().expect("four bytes"));
        victim.query(begin).await?;
        victim.send(&query(statement)).await?;
        try_until("it sleeps", async || {
            let sleepers = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
            Ok(on_leader(&cluster, sleepers).await?.number()? == 1)
        })
        .await?;
        assert_eq!(killer.query(&format!("SELECT pg_terminate_backend({number})")).await?.text_rows(), ["t"]);
        let answer = bounded("its end", victim.until_closed()).await??;
        assert_eq!((answer.tags().as_str(), answer.code().as_str()), (tags, "57P01"), "{begin}, {statement}");
        let inserted = "SELECT count(*) FROM numbers WHERE id = 100";
        try_until("what it left is known", async || Ok(on_leader(&cluster, inserted).await?.number()? == rows)).await?;
        on_leader(&cluster, "DELETE FROM numbers WHERE id = 100").await?;
    }
    Ok(())
}
