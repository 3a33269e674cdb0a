//! Prepared statements and portals, named and unnamed, whatever the router does between a client's messages.

use crate::harness::{start, start_usual};
use crate::wire::{ANSWER_TIMEOUT, Wire, bind, describe, execute, expect, flush, parse, query, run_extended, sync};

/// More than the router keeps prepared on one back end.
const STATEMENTS: usize = 300;

/// Bind and Execute in one batch.
const PIPELINED: usize = 20_000;

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_unnamed_statement_lives_until_the_next_parse() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut wire, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    other
        .query(
            "CREATE TABLE stamped (id int, at timestamptz);
             CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.at := now(); RETURN NEW; END';
             CREATE TRIGGER stamp BEFORE INSERT ON stamped FOR EACH ROW EXECUTE FUNCTION stamp();",
        )
        .await?;
    other.query("SET onecopy.freshness = 'strict'").await?;
    let run = [bind("", "", &[]), execute("", 0), sync()].concat();
    for round in 1..=10 {
        let prepare = [parse("", "SELECT id + 7 FROM numbers WHERE id = 1"), describe('S', ""), sync()].concat();
        assert_eq!(wire.ask(&prepare).await?.tags(), "1tTZ", "round {round}");
        // A commit and a strict read: the epoch that the statement was described in is old.
        other.query("UPDATE numbers SET value = value + 1 WHERE id = 2").await?;
        other.query("SELECT count(*) FROM numbers").await?;
        for _ in 0..3 {
            let answer = wire.ask(&run).await?;
            assert_eq!((answer.tags().as_str(), answer.text_rows()), ("2DCZ", vec!["8".to_owned()]), "round {round}");
        }
        let prepare = [parse("", "INSERT INTO stamped VALUES (1)"), describe('S', ""), sync()].concat();
        assert_eq!(wire.ask(&prepare).await?.tags(), "1tnZ", "round {round}");
        for _ in 0..2 {
            assert_eq!(wire.ask(&run).await?.commands(), ["INSERT 0 1"], "round {round}");
        }
    }
    assert_eq!(other.query("SELECT count(*), count(at) FROM stamped").await?.text_rows(), ["20|20"]);
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_whose_parse_failed_or_was_skipped_does_not_exist() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    for begin in ["SELECT", "BEGIN", "BEGIN READ ONLY"] {
        let mut wire = Wire::connect(&cluster).await?;
        for (round, (wrong, code)) in [
            ("SELECT * FROM not_yet", "42P01"),
            ("SELEC 1", "42601"),
            ("SELECT 'a'::int", "22P02"),
            ("INSERT INTO not_yet VALUES (1)", "42P01"),
        ]
        .into_iter()
        .enumerate()
        {
            let what = format!("{begin}: {wrong}");
            let (failed, skipped) = (format!("failed {round}"), format!("skipped {round}"));
            wire.query(begin).await?;
            let batch =
                [parse(&failed, wrong), bind("", &failed, &[]), execute("", 0), parse(&skipped, "SELECT 1"), sync()];
            let answer = wire.ask(&batch.concat()).await?;
            assert_eq!(answer.code(), code, "{what}: {:?}", answer.errors());
            wire.query("ROLLBACK").await?;
            assert_eq!(wire.ask(&[bind("", &skipped, &[]), sync()].concat()).await?.code(), "26000", "{what}");
            for (name, value) in [(&failed, "5"), (&skipped, "6")] {
                let sql = format!("SELECT {value}");
                let again = [parse(name, &sql), bind("", name, &[]), execute("", 0), sync()].concat();
                let answer = wire.ask(&again).await?;
                assert_eq!(answer.text_rows(), [value], "{what}: {:?}", answer.errors());
            }
        }
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cursor_opened_before_flush_gives_rows_in_parts_outside_a_transaction() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for sql in ["SELECT id FROM numbers ORDER BY id LIMIT 5", "UPDATE numbers SET value = 1 WHERE id <= 5 RETURNING id"]
    {
        wire.send(&[parse("", sql), bind("", "", &[]), describe('P', ""), flush()].concat()).await?;
        let mut tags = String::new();
        while tags.len() < 3 {
            tags.push(wire.next().await?.tag as char);
        }
        assert_eq!(tags, "12T", "{sql}");
        wire.send(&[execute("", 2), flush()].concat()).await?;
        let mut tags = String::new();
        while !tags.ends_with('s') {
            tags.push(wire.next().await?.tag as char);
        }
        assert_eq!(tags, "DDs", "{sql}");
        let answer = wire.ask(&[execute("", 2), execute("", 0), sync()].concat()).await?;
        assert_eq!(answer.tags(), "DDsDCZ", "{sql}: {:?}", answer.errors());
        assert_eq!(wire.query("SELECT 'next'").await?.text_rows(), ["next"], "{sql}");
    }
    assert_eq!(wire.query("SELECT sum(value) FROM numbers").await?.text_rows(), ["5"]);
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_prepared_statements_with_errors_between_them_stay_themselves() -> anyhow::Result<()> {
    let cluster = start(1, |settings| {
        settings.leader_backends_max = 2;
        settings.reader_backends_max = 2;
    })
    .await?;
    let mut wire = Wire::connect(&cluster).await?;
    for number in 0..STATEMENTS {
        let mut batch = parse(&format!("s{number}"), &format!("SELECT {number} + id FROM numbers WHERE id = $1"));
        if number % 7 == 0 {
            // An error after the Parse leaves the statement there.
            batch.extend([parse("", "SELECT 1 / $1::int"), bind("", "", &["0"]), execute("", 0)].concat());
        }
        let answer = wire.ask(&[batch, sync()].concat()).await?;
        let code = if number % 7 == 0 { "22012" } else { "00000" };
        assert_eq!(answer.code(), code, "statement {number}: {:?}", answer.errors());
    }
    for begin in ["SELECT", "BEGIN", "BEGIN READ ONLY"] {
        for number in (0..STATEMENTS).rev().chain(0..STATEMENTS) {
            if number % 50 == 0 {
                wire.query("ROLLBACK").await?;
                wire.query(begin).await?;
            }
            let run = [bind("", &format!("s{number}"), &["1"]), execute("", 0), sync()].concat();
            let answer = wire.ask(&run).await?;
            assert_eq!(answer.text_rows(), [(number + 1).to_string()], "{begin}, {number}: {:?}", answer.errors());
            if number % 60 == 59 {
                assert_eq!(wire.query("SELECT 1 / 0").await?.code(), "22012");
                wire.query("ROLLBACK").await?;
                wire.query(begin).await?;
            }
        }
        wire.query("ROLLBACK").await?;
    }
    Ok(())
}

/// The router must take answers while it sends, and the client is sent to while it sends.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_pipeline_with_large_answers_does_not_stand_still() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for begin in ["SELECT", "BEGIN"] {
        wire.query(begin).await?;
        let one = [bind("", "long", &[]), execute("", 0)].concat();
        let batch = [parse("long", "SELECT repeat('x', 3000)"), one.repeat(PIPELINED), sync()].concat();
        wire.channel.output.extend_from_slice(&batch);
        let (mut rows, mut commands) = (0, 0);
        loop {
            let frame = tokio::time::timeout(ANSWER_TIMEOUT, wire.channel.exchange()).await??;
            match frame.tag {
                b'D' => rows += 1,
                b'C' => commands += 1,
                b'Z' => break,
                b'E' => panic!("{:?}", String::from_utf8_lossy(&frame.body())),
                _ => {}
            }
        }
        assert_eq!((rows, commands), (PIPELINED, PIPELINED), "{begin}");
        assert_eq!(wire.ask(&query("COMMIT; DEALLOCATE ALL")).await?.code(), "00000");
    }
    Ok(())
}

/// An unnamed statement is parsed once, and leaves nothing on its back end.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unnamed_statement_is_parsed_once() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for begin in ["BEGIN", "BEGIN READ ONLY"] {
        wire.query(begin).await?;
        for text in ["SELECT 41 AS unnamed", "SELECT id AS unnamed FROM numbers"] {
            assert_eq!(wire.ask(&[run_extended(text, &[]), sync()].concat()).await?.code(), "00000", "{begin}: {text}");
            let alone = [bind("", "", &[]), execute("", 0), sync()].concat();
            assert_eq!(wire.ask(&alone).await?.code(), "00000", "{begin}: {text}, bound again");
        }
        let left = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%AS unnamed%'";
        expect(&mut wire, left, &["0"]).await?;
        wire.query("ROLLBACK").await?;
    }
    Ok(())
}

/// What gave way in a batch that fails is there still, also when the batch would have parsed it again.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_gave_way_in_a_batch_that_fails_is_there_still() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let run = |name: &str| [bind("", name, &[]), execute("", 0)].concat();
    wire.query("BEGIN").await?;
    // As many as one back end keeps, of which the first is used last.
    let mut all = parse("fails", "SELECT 1 / (id - id) FROM numbers");
    for number in 1..256 {
        all.extend(parse(&format!("s{number}"), &format!("SELECT id + {number} FROM numbers")));
    }
    assert_eq!(wire.ask(&[all, sync()].concat()).await?.code(), "00000");
    let new = parse("new", "SELECT id AS another FROM numbers");
    let batch = [run("fails"), new, run("new"), run("s1"), sync()].concat();
    assert_eq!(wire.ask(&batch).await?.code(), "22012");
    for end in ["ROLLBACK", "BEGIN"] {
        assert_eq!(wire.query(end).await?.code(), "00000");
    }
    for name in ["s1", "s2", "s255", "s1"] {
        assert_eq!(wire.ask(&[run(name), sync()].concat()).await?.code(), "00000", "{name}");
    }
    Ok(())
}
