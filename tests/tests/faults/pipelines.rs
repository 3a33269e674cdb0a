//! The extended protocol: batches, several at once, errors in their middle, statements and portals by name.

use crate::harness::start_usual;
use crate::wire::{
    ANSWER_TIMEOUT, Answer, Wire, bind, close, describe, execute, flush, parse, query, run_extended, sync,
};

const ADD: &str = "UPDATE numbers SET value = value + $1::int WHERE id = $2::int";

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_batches_sent_at_once_are_answered_in_order_each_in_its_transaction() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let batches = [
        [run_extended("SELECT value FROM numbers WHERE id = 1", &[]), sync()].concat(),
        [run_extended(ADD, &["5", "1"]), run_extended("SELECT value FROM numbers WHERE id = 1", &[]), sync()].concat(),
        [run_extended(ADD, &["1", "1"]), run_extended("SELECT 1 / 0", &[]), run_extended(ADD, &["100", "1"]), sync()]
            .concat(),
        query("SELECT 'simple'"),
        [run_extended("SELECT value FROM numbers WHERE id = 1", &[]), sync(), sync()].concat(),
    ];
    wire.send(&batches.concat()).await?;
    let first = wire.answer().await?;
    assert_eq!((first.tags().as_str(), first.text_rows()), ("12TDCZ", vec!["0".to_owned()]));
    let second = wire.answer().await?;
    assert_eq!((second.tags().as_str(), second.text_rows()), ("12nC12TDCZ", vec!["5".to_owned()]));
    let third = wire.answer().await?;
    assert_eq!((third.code().as_str(), third.status()?), ("22012", 'I'));
    assert!(third.tags().ends_with("EZ") && third.commands() == ["UPDATE 1"], "{}", third.tags());
    assert_eq!(wire.answer().await?.text_rows(), ["simple"]);
    let fifth = wire.answer().await?;
    assert_eq!(fifth.text_rows(), ["5"], "an error takes back its whole batch");
    assert_eq!(wire.answer().await?.tags(), "Z");
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_inside_batches_begin_and_end_where_they_say() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let batch = [
        run_extended("BEGIN", &[]),
        run_extended(ADD, &["3", "2"]),
        run_extended("COMMIT", &[]),
        run_extended("BEGIN", &[]),
        run_extended(ADD, &["4", "2"]),
        sync(),
    ];
    let answer = wire.ask(&batch.concat()).await?;
    assert_eq!(
        (answer.commands().join(","), answer.status()?),
        ("BEGIN,UPDATE 1,COMMIT,BEGIN,UPDATE 1".to_owned(), 'T')
    );
    let batch = [run_extended("ROLLBACK", &[]), run_extended("SELECT value FROM numbers WHERE id = 2", &[]), sync()];
    let answer = wire.ask(&batch.concat()).await?;
    assert_eq!((answer.text_rows(), answer.status()?), (vec!["3".to_owned()], 'I'));
    let batch = [run_extended("BEGIN", &[]), run_extended("SELECT 1 / 0", &[]), run_extended("COMMIT", &[]), sync()];
    let answer = wire.ask(&batch.concat()).await?;
    assert_eq!((answer.code().as_str(), answer.status()?), ("22012", 'E'));
    let answer = wire.ask(&[run_extended("SELECT 1", &[]), sync()].concat()).await?;
    assert_eq!((answer.code().as_str(), answer.status()?), ("25P02", 'E'));
    let answer = wire.ask(&[run_extended("COMMIT", &[]), sync()].concat()).await?;
    assert_eq!((answer.commands(), answer.status()?), (vec!["ROLLBACK".to_owned()], 'I'));
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_brings_answers_and_the_transaction_stays_open_until_sync() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let mut other = Wire::connect(&cluster).await?;
    wire.send(&[run_extended(ADD, &["9", "4"]), flush()].concat()).await?;
    let mut tags = String::new();
    while !tags.ends_with('C') {
        tags.push(wire.next().await?.tag as char);
    }
    assert_eq!(tags, "12nC");
    assert_eq!(other.query("SELECT value FROM numbers WHERE id = 4").await?.text_rows(), ["0"]);
    wire.send(&[run_extended("SELECT value FROM numbers WHERE id = 4", &[]), flush()].concat()).await?;
    let mut rows = 0;
    loop {
        match wire.next().await?.tag {
            b'D' => rows += 1,
            b'C' => break,
            _ => {}
        }
    }
    assert_eq!(rows, 1);
    assert_eq!(wire.ask(&sync()).await?.tags(), "Z");
    let answer = wire.query("SELECT value FROM numbers WHERE id = 4").await?;
    assert_eq!(answer.text_rows(), ["9"]);
    // The same, with an error at the end: all of it is taken back.
    wire.send(&[run_extended(ADD, &["1", "4"]), flush(), run_extended("SELECT 1 / 0", &[]), flush()].concat()).await?;
    wire.send(&[run_extended(ADD, &["1", "4"]), sync()].concat()).await?;
    let answer = wire.answer().await?;
    assert_eq!(
        (answer.code().as_str(), answer.commands(), answer.status()?),
        ("22012", vec!["UPDATE 1".to_owned()], 'I')
    );
    assert_eq!(wire.query("SELECT value FROM numbers WHERE id = 4").await?.text_rows(), ["9"]);
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn named_statements_live_until_closed_wherever_they_run() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let prepare = [parse("read", "SELECT value FROM numbers WHERE id = $1"), parse("add", ADD), describe('S', "add")];
    let answer = wire.ask(&[prepare.concat(), describe('S', "read"), sync()].concat()).await?;
    assert_eq!(answer.tags(), "11tntTZ");
    for round in 1..=30 {
        let add = [bind("", "add", &["1", "5"]), execute("", 0), sync()].concat();
        assert_eq!(wire.ask(&add).await?.commands(), ["UPDATE 1"]);
        let read = [bind("", "read", &["5"]), describe('P', ""), execute("", 0), sync()].concat();
        let answer = wire.ask(&read).await?;
        assert_eq!((answer.tags().as_str(), answer.text_rows()), ("2TDCZ", vec![round.to_string()]));
    }
    let cases = [
        (parse("read", "SELECT 1"), "42P05"),
        (bind("", "missing", &[]), "26000"),
        (describe('S', "missing"), "26000"),
        (describe('P', "missing"), "34000"),
        (execute("missing", 0), "34000"),
        (bind("", "read", &["1", "2"]), "08P01"),
        (bind("", "read", &["no number"]), "22P02"),
        (parse("two", "SELECT 1; SELECT 2"), "42601"),
    ];
    for (bytes, code) in cases {
        let answer = wire.ask(&[bytes, bind("", "read", &["5"]), execute("", 0), sync()].concat()).await?;
        assert_eq!((answer.code().as_str(), answer.tags().as_str()), (code, "EZ"));
    }
    let closing = [close('S', "read"), close('S', "missing"), close('P', "missing"), sync()].concat();
    assert_eq!(wire.ask(&closing).await?.tags(), "333Z");
    assert_eq!(wire.ask(&[bind("", "read", &["5"]), sync()].concat()).await?.code(), "26000");
    let again = [parse("read", "SELECT -value FROM numbers WHERE id = $1"), bind("", "read", &["5"]), execute("", 0)];
    assert_eq!(wire.ask(&[again.concat(), sync()].concat()).await?.text_rows(), ["-30"]);
    assert_eq!(
        wire.ask(&[parse("", ""), bind("", "", &[]), describe('P', ""), execute("", 0), sync()].concat()).await?.tags(),
        "12nIZ"
    );
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn portals_give_rows_in_parts_inside_and_outside_transactions() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let open =
        [parse("", "SELECT id FROM numbers ORDER BY id"), bind("cursor", "", &[]), execute("cursor", 4)].concat();
    let parts = [open.clone(), execute("cursor", 4), execute("cursor", 0), sync()].concat();
    let answer = wire.ask(&parts).await?;
    assert_eq!((answer.tags().as_str(), answer.rows().len()), ("12DDDDsDDDDsDDCZ", 10));
    assert_eq!(wire.ask(&[execute("cursor", 4), sync()].concat()).await?.code(), "34000", "Sync ended it");
    for begin in ["BEGIN", "BEGIN READ ONLY"] {
        wire.query(begin).await?;
        let answer = wire.ask(&[open.clone(), sync()].concat()).await?;
        assert_eq!((answer.tags().as_str(), answer.status()?), ("12DDDDsZ", 'T'), "{begin}");
        let answer = wire.ask(&[describe('P', "cursor"), execute("cursor", 4), sync()].concat()).await?;
        assert_eq!((answer.tags().as_str(), answer.text_rows()[0].as_str()), ("TDDDDsZ", "5"), "{begin}");
        assert_eq!(wire.ask(&[close('P', "cursor"), execute("cursor", 1), sync()].concat()).await?.code(), "34000");
        assert_eq!(wire.query("COMMIT").await?.commands(), ["ROLLBACK"], "{begin}");
    }
    Ok(())
}

/// The server must be read while it is written to, or both wait for each other.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_of_megabytes_with_answers_of_megabytes_does_not_hang() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    for begin in ["SELECT 1", "BEGIN", "BEGIN READ ONLY"] {
        let mut wire = Wire::connect(&cluster).await?;
        wire.query(begin).await?;
        // More than all socket buffers hold, in both directions, and the answer comes first.
        let value = "y".repeat(12_000_000);
        let batch = [
            parse("", "SELECT repeat($1, 10000000)"),
            bind("", "", &["x"]),
            execute("", 0),
            bind("", "", &["z"]),
            execute("", 0),
            parse("", "SELECT length($1::text)"),
            bind("", "", &[&value]),
            execute("", 0),
            sync(),
        ]
        .concat();
        let answer = both_ways(&mut wire, &batch).await?;
        let lengths: Vec<usize> =
            answer.frames.iter().filter(|frame| frame.tag == b'D').map(|frame| frame.bytes.len()).collect();
        assert_eq!(lengths, [10_000_011, 10_000_011, 19], "{begin}");
        assert_eq!(answer.text_rows()[2], "12000000", "{begin}");
    }
    Ok(())
}

/// Sends and reads at the same time, as a client of large batches must.
async fn both_ways(wire: &mut Wire, batch: &[u8]) -> anyhow::Result<Answer> {
    wire.channel.output.extend_from_slice(batch);
    let mut frames = Vec::new();
    loop {
        let frame = tokio::time::timeout(ANSWER_TIMEOUT, wire.channel.exchange()).await??;
        let ends = frame.tag == b'Z';
        frames.push(frame);
        if ends {
            return Ok(Answer { frames });
        }
    }
}

/// A client may wait for the error of what it has sent before it has said Sync or Flush, as libpq's pipelines do: one
/// server runs each message when it comes.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_is_told_before_the_client_has_ended_its_batch() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let begun = [run_extended(ADD, &["7", "1"]), run_extended("SELECT 1 / 0", &[]), run_extended(ADD, &["7", "1"])];
    wire.send(&begun.concat()).await?;
    while wire.next().await?.tag != b'E' {}
    let answer = wire.ask(&[run_extended(ADD, &["7", "1"]), sync()].concat()).await?;
    assert_eq!((answer.tags().as_str(), answer.status()?), ("Z", 'I'), "all of the batch is taken back");
    assert_eq!(wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows(), ["0"]);
    // What was right goes on with what follows.
    wire.send(&run_extended(ADD, &["2", "1"])).await?;
    while wire.next().await?.tag != b'C' {}
    let answer = wire.ask(&[run_extended(ADD, &["3", "1"]), sync()].concat()).await?;
    assert_eq!(answer.commands(), ["UPDATE 1"]);
    assert_eq!(wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows(), ["5"]);
    Ok(())
}
