//! Messages that are none, after a good log-in: 08P01 and the end of that connection, of no other.

use crate::harness::{leader, run, start_usual, try_until};
use crate::wire::{Wire, bind, execute, message, parse, query, sync};

/// Spec: C1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_messages_end_their_own_connection_with_08p01() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut bystander = Wire::connect(&cluster).await?;
    bystander.query("BEGIN").await?;
    bystander.query("UPDATE numbers SET value = 7 WHERE id = 1").await?;
    let cases: [(&str, Vec<u8>); 12] = [
        ("an unknown type", message(b'y', b"what")),
        ("a server's message", message(b'T', b"\0\0")),
        ("a length of 3", vec![b'Q', 0, 0, 0, 3]),
        ("a length of 2 GiB", vec![b'Q', 0x80, 0, 0, 0]),
        ("a length of 4 GiB", vec![b'P', 0xff, 0xff, 0xff, 0xff]),
        ("a query without an end", message(b'Q', b"SELECT 1")),
        ("an empty query message", message(b'Q', b"")),
        ("a parse cut short", [message(b'P', b"name\0SELECT 1"), sync()].concat()),
        ("a parse that claims 65535 types", [message(b'P', b"\0SELECT 1\0\xff\xff"), sync()].concat()),
        ("a bind cut short", [parse("", "SELECT 1"), message(b'B', b"\0\0\0\0\0\x05"), sync()].concat()),
        ("a describe of nothing", [message(b'D', b"x\0"), sync()].concat()),
        ("an execute without a count", [message(b'E', b"\0"), sync()].concat()),
    ];
    for (what, bytes) in cases {
        let mut wire = Wire::connect(&cluster).await?;
        wire.query("BEGIN").await?;
        wire.query("UPDATE numbers SET value = value + 1 WHERE id = 2").await?;
        wire.send(&bytes).await?;
        let answer = wire.until_closed().await?;
        let errors = answer.errors();
        let error = errors.last().unwrap_or_else(|| panic!("{what}: no error: {answer:?}"));
        assert_eq!((error.code.as_str(), error.severity.as_str()), ("08P01", "FATAL"), "{what}: {error:?}");
    }
    assert_eq!(bystander.query("COMMIT").await?.commands(), ["COMMIT"]);
    // What was open is rolled back, and holds no lock.
    let outside = leader(&cluster).await?;
    run(&outside, "SET lock_timeout = '100s'").await??;
    assert_eq!(run(&outside, "UPDATE numbers SET value = value WHERE id = 2").await??.count, 1);
    assert_eq!(run(&outside, "SELECT value FROM numbers ORDER BY id LIMIT 2").await??.rows.len(), 2);
    assert_eq!(run(&outside, "SELECT sum(value) FROM numbers").await??.number()?, 7);
    Ok(())
}

/// Spec: C1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_beyond_the_bound_is_refused_and_one_below_it_runs() -> anyhow::Result<()> {
    let cluster = crate::harness::start(0, |settings| settings.message_bytes_max = 100_000).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let long = format!("SELECT length('{}')", "x".repeat(90_000));
    assert_eq!(wire.query(&long).await?.text_rows(), ["90000"]);
    wire.send(&query(&format!("SELECT length('{}')", "x".repeat(100_000)))).await?;
    let errors = wire.until_closed().await?.errors();
    assert_eq!(errors.iter().map(|error| error.code.as_str()).collect::<Vec<_>>(), ["08P01"]);
    Ok(())
}

/// The leader's own words come through, the position of the error with them, and nobody else's read is disturbed.
///
/// Spec: C1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_that_cannot_be_parsed_get_postgresqls_answer_and_disturb_nobody() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut reader = Wire::connect(&cluster).await?;
    reader.query("BEGIN READ ONLY").await?;
    assert_eq!(reader.query("SELECT count(*) FROM numbers").await?.text_rows(), ["10"]);
    let mut wire = Wire::connect(&cluster).await?;
    let deep = format!("SELECT {}1{}", "(".repeat(20_000), ")".repeat(20_000));
    let cases = [
        ("SELEC 1", "42601"),
        ("SELECT 'unterminated", "42601"),
        ("SELECT 1; SELECT FROM WHERE", "42601"),
        ("SELECT 1 /* unterminated", "42601"),
        ("SELECT $tag$ unterminated", "42601"),
        (deep.as_str(), "42601"),
    ];
    for (sql, code) in cases {
        let shown = &sql[..sql.len().min(40)];
        let answer = wire.query(sql).await?;
        assert_eq!((answer.code().as_str(), answer.status()?, answer.rows().len()), (code, 'I', 0), "{shown}");
        let answer = wire.ask(&[parse("", sql), bind("", "", &[]), execute("", 0), sync()].concat()).await?;
        // The statement that cannot be read is refused when it is prepared; nothing of it runs.
        assert_eq!((answer.tags().as_str(), answer.status()?), ("EZ", 'I'), "{shown}");
    }
    let answer = wire.query("SELEC 1").await?;
    assert!(answer.fields(b'E')?.contains(&('P', "1".to_owned())), "{:?}", answer.fields(b'E')?);
    wire.query("BEGIN").await?;
    assert_eq!(wire.query("SELEC 1").await?.status()?, 'E');
    assert_eq!(wire.query("SELECT 1").await?.code(), "25P02");
    assert_eq!(wire.query("COMMIT").await?.commands(), ["ROLLBACK"]);
    let again = reader.query("SELECT count(*) FROM numbers").await?;
    assert_eq!((again.code().as_str(), again.text_rows()), ("00000", vec!["10".to_owned()]));
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn very_many_statements_in_one_message_run_or_are_refused_whole() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let many = "UPDATE numbers SET value = value + 1 WHERE id = 3;".repeat(100);
    let answer = wire.query(&many).await?;
    assert_eq!((answer.code().as_str(), answer.commands().len()), ("00000", 100));
    let reads = "SELECT 1;".repeat(500);
    assert_eq!(wire.query(&reads).await?.rows().len(), 500);
    let too_many = format!("INSERT INTO numbers VALUES (999, 1); {}", "SELECT 1;".repeat(20_000));
    let answer = wire.query(&too_many).await?;
    assert_eq!((answer.code().as_str(), answer.rows().len(), answer.status()?), ("54000", 0, 'I'));
    assert_eq!(wire.query("SELECT max(id), max(value) FROM numbers").await?.text_rows(), ["10|100"]);
    try_until("the router is at rest", || async { Ok(crate::harness::busy_back_ends(&cluster).await? == 0) }).await
}

/// A client that ends before it has begun, as drivers do when they are closed at once, is told nothing, as by one
/// server: it would take it for an error of its own.
///
/// Spec: C1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_start_up_packet_is_answered_by_silence() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::unauthenticated(&cluster).await?;
    wire.send(&message(b'X', b"")).await?;
    let answer = wire.until_closed().await?;
    assert!(answer.frames.is_empty(), "{answer:?}");
    Ok(())
}
