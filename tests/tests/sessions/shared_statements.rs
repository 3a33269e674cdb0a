//! What a statement means depends on the settings under which it was parsed, and on the instant. Sessions that share
//! back ends and prepare the same text get what one server would have told each of them.

mod scripts;

use onecopy_tests::cluster::TestCluster;
use tokio::task::JoinSet;

use scripts::{AtOnce, Close, EPOCH, OBJECTS, Prepare, Query, Run, SCRIPTS, Script, Step, TOKYO, UTC};

use crate::harness::{bounded, start, wait_for_epoch_on, wait_for_whole_epoch};
use crate::wire::{Answer, Wire, bind, close, describe, execute, parse, run_extended, sync};

/// One back end for all readers; a place of its own on the leader for whoever needs one.
async fn one_reader() -> anyhow::Result<TestCluster> {
    let cluster = start(1, |settings| settings.reader_backends_max = 1).await?;
    let mut setup = Wire::connect(&cluster).await?;
    for sql in OBJECTS.split_inclusive("TO clerk;") {
        let answer = setup.query(sql).await?;
        assert_eq!(answer.code(), "00000", "{sql}: {:?}", answer.errors());
    }
    wait_for_epoch_on(&cluster, 2).await?;
    Ok(cluster)
}

async fn take(wire: &mut Wire, step: Step) -> anyhow::Result<Answer> {
    match step {
        Query(sql) => wire.query(sql).await,
        Prepare(name, sql) => wire.ask(&[parse(name, sql), describe('S', name), sync()].concat()).await,
        Run(name) => wire.ask(&[bind("", name, &[]), execute("", 0), sync()].concat()).await,
        AtOnce(sql) => wire.ask(&[run_extended(sql, &[]), sync()].concat()).await,
        Close(name) => wire.ask(&[close('S', name), sync()].concat()).await,
    }
}

fn said(answer: &Answer) -> String {
    format!("{} {} {:?}", answer.tags(), answer.code(), answer.text_rows())
}

/// What each step is answered by two sessions of the leader itself, or through the router, all on one back end.
async fn play(cluster: &TestCluster, script: &Script, routed: bool) -> anyhow::Result<Vec<String>> {
    let mut sessions = Vec::new();
    for _ in 0..2 {
        let mut wire = if routed {
            Wire::connect(cluster).await?
        } else {
            Wire::connect_to(cluster.servers.leader().port()).await?
        };
        let choice = wire.query("SET onecopy.server = 'follower-1'").await?;
        assert_eq!(choice.code(), "00000", "{:?}", choice.errors());
        sessions.push(wire);
    }
    let mut all = Vec::new();
    for (session, step) in script.steps {
        all.push(format!("{session} {step:?}: {}", said(&take(&mut sessions[*session], *step).await?)));
    }
    Ok(all)
}

/// Sessions with other settings get each their own answer to one text: TimeZone, DateStyle, IntervalStyle, search_path,
/// role and what else Parse or plans read, also when they change between Parse and Bind.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s34_sessions_with_other_settings_get_each_their_own_answer_to_one_text() -> anyhow::Result<()> {
    let cluster = one_reader().await?;
    let mut differences = Vec::new();
    for script in SCRIPTS {
        let expected = play(&cluster, script, false).await?;
        let found = play(&cluster, script, true).await?;
        let pairs = expected.iter().zip(&found).filter(|(expected, found)| expected != found);
        differences.extend(
            pairs.map(|(expected, found)| format!("{}\n  one server {expected}\n  router {found}", script.what)),
        );
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    Ok(())
}

const CLIENTS: usize = 8;
const ROUNDS: usize = 40;

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s35_clients_with_other_settings_that_run_the_same_text_at_once_get_each_their_own() -> anyhow::Result<()> {
    let cluster = start(1, |settings| settings.reader_backends_max = 3).await?;
    wait_for_epoch_on(&cluster, 2).await?;
    let zones =
        [("UTC", "1704067200.000000"), ("Asia/Tokyo", "1704034800.000000"), ("America/New_York", "1704085200.000000")];
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (zone, expected) = zones[client % zones.len()];
        let mut wire = Wire::connect(&cluster).await?;
        clients.spawn(async move {
            wire.query(&format!("SET TimeZone = '{zone}'")).await?;
            take(&mut wire, Prepare("a", EPOCH)).await?;
            for round in 0..ROUNDS {
                let step = [Run("a"), AtOnce(EPOCH), Query(EPOCH)][(round + client) % 3];
                let answer = take(&mut wire, step).await?;
                assert_eq!(answer.text_rows(), [expected], "{zone}, {step:?}: {:?}", answer.errors());
            }
            anyhow::Ok(())
        });
    }
    while let Some(client) = bounded("clients", clients.join_next()).await? {
        client??;
    }
    Ok(())
}

/// Texts whose Parse reads the clock.
const CLOCKS: [&str; 8] = [
    "SELECT 'now'::timestamptz",
    "SELECT timestamp with time zone ' NOW '",
    "SELECT CAST(E'\\156ow' AS timestamptz)",
    "SELECT CAST(U&'n\\006fw' AS timestamptz)",
    "SELECT 'no'\n'w'::timestamptz",
    "SELECT $$now$$::timestamptz",
    "SELECT lower('[now,infinity)'::tstzrange)",
    "SELECT ('{now}'::timestamptz[])[1]",
];

async fn instant(wire: &mut Wire, step: Step) -> anyhow::Result<String> {
    let answer = take(wire, step).await?;
    assert_eq!((answer.code().as_str(), answer.rows().len()), ("00000", 1), "{step:?}: {:?}", answer.errors());
    Ok(answer.text_rows().remove(0))
}

/// The instant in a text (`'now'`, in any spelling) is that of its own Parse for as long as the statement lives; *not
/// held* after RESET or RESET ALL outside a transaction.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s36_the_instant_in_a_text_is_that_of_its_own_parse_for_as_long_as_it_lives() -> anyhow::Result<()> {
    let cluster = one_reader().await?;
    for routed in [false, true] {
        for name in ["", "named"] {
            for sql in CLOCKS.into_iter().take(if name.is_empty() { 1 } else { CLOCKS.len() }) {
                let what = format!("{sql}, {name:?}, routed {routed}");
                let mut sessions = Vec::new();
                for _ in 0..2 {
                    let mut wire = if routed {
                        Wire::connect(&cluster).await?
                    } else {
                        Wire::connect_to(cluster.servers.leader().port()).await?
                    };
                    wire.query("SET onecopy.server = 'follower-1'").await?;
                    sessions.push(wire);
                }
                let (first, second) = sessions.split_at_mut(1);
                let (one, two) = (&mut first[0], &mut second[0]);
                take(one, Prepare(name, sql)).await?;
                let of_one = instant(one, Run(name)).await?;
                let between = instant(two, AtOnce("SELECT clock_timestamp()")).await?;
                take(two, Prepare(name, sql)).await?;
                let of_two = instant(two, Run(name)).await?;
                assert!(of_one < between && between < of_two, "{what}: {of_one} {between} {of_two}");
                take(one, AtOnce("UPDATE numbers SET value = value + 1 WHERE id = 1")).await?;
                if !name.is_empty() {
                    assert_eq!(instant(one, Run(name)).await?, of_one, "{what}: the same statement");
                    take(one, Prepare("again", sql)).await?;
                    assert!(instant(one, Run("again")).await? > of_two, "{what}: prepared anew");
                    // With its last statement of this kind a session is as free as it was.
                    take(one, Close("again")).await?;
                    take(one, Close(name)).await?;
                }
                assert_eq!(instant(two, Run(name)).await?, of_two, "{what}: the other session's");
                if routed {
                    // Where no epoch is made within a second the leader answers, by right.
                    let other = cluster.updater("other").await?;
                    let servers = ["leader", "follower-1"];
                    wait_for_whole_epoch(&cluster, &other, "SELECT 1 FROM numbers", &servers).await?;
                    take(one, AtOnce("SELECT 1 FROM numbers")).await?;
                    let place = one.query("SHOW onecopy.served_by").await?.text_rows();
                    assert!(place[0].starts_with("follower-1"), "{what}: {place:?}");
                }
            }
        }
        // A constant in a function's body is as old as the session's first call of it, and no older.
        let mut older = if routed {
            Wire::connect(&cluster).await?
        } else {
            Wire::connect_to(cluster.servers.leader().port()).await?
        };
        let of_older = instant(&mut older, Query("SELECT now_in_plpgsql()")).await?;
        let mut newer = if routed {
            Wire::connect(&cluster).await?
        } else {
            Wire::connect_to(cluster.servers.leader().port()).await?
        };
        let before = instant(&mut newer, Query("SELECT clock_timestamp()")).await?;
        let of_newer = instant(&mut newer, AtOnce("SELECT now_in_plpgsql()")).await?;
        assert!(of_older < before && before < of_newer, "routed {routed}: {of_older} {before} {of_newer}");
        assert_eq!(instant(&mut newer, Query("SELECT now_in_plpgsql()")).await?, of_newer, "routed {routed}");
        assert_eq!(instant(&mut older, Query("SELECT now_in_plpgsql()")).await?, of_older, "routed {routed}");
    }
    Ok(())
}

/// A statement that is one client's alone and whose back end was passed on is made again as it was, or is gone with
/// 26000, never another.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s39_a_statement_whose_back_end_was_passed_on_is_made_again_or_gone_and_never_another() -> anyhow::Result<()> {
    let cluster = start(0, |settings| settings.leader_backends_max = 1).await?;
    let (mut one, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    let pass_on = Query("UPDATE numbers SET value = value + 1 WHERE id = 1");
    for step in [UTC, Prepare("zone", EPOCH), TOKYO, Prepare("now", CLOCKS[0])] {
        assert_eq!(take(&mut one, step).await?.code(), "00000", "{step:?}");
    }
    let first = instant(&mut one, Run("now")).await?;
    for round in 0..2 {
        assert_eq!(instant(&mut one, Run("zone")).await?, "1704067200.000000", "round {round}");
        assert_eq!(instant(&mut one, AtOnce(EPOCH)).await?, "1704034800.000000", "round {round}");
        if round == 0 {
            assert_eq!(instant(&mut one, Run("now")).await?, first);
        }
        assert_eq!(take(&mut other, pass_on).await?.code(), "00000", "round {round}");
        assert_eq!(take(&mut one, Run("now")).await?.code(), "26000", "round {round}");
    }
    for step in [Close("now"), Prepare("now", CLOCKS[0])] {
        assert_eq!(take(&mut one, step).await?.code(), "00000", "{step:?}");
    }
    assert!(instant(&mut one, Run("now")).await? > first);
    Ok(())
}
