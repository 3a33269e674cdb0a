//! What drivers do without asking: data after a COPY that has failed, and cancel requests that come too late.

use std::time::{Duration, Instant};

use onecopy_tests::cluster::TestCluster;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::harness::{start, start_usual};
use crate::wire::{ANSWER_TIMEOUT, Wire, bind, execute, flush, message, parse, query, sync, with_length};

const CANCEL: u32 = 80_877_102;

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_fails_at_once_shifts_no_later_answer() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query(
        "CREATE TABLE guarded (id int);
         CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END';
         CREATE TRIGGER refuse BEFORE INSERT ON guarded FOR EACH STATEMENT EXECUTE FUNCTION refuse();",
    )
    .await?;
    let data = [message(b'd', b"1\t1\n"), message(b'c', b"")].concat();
    let mut id = 1000;
    for (copy, code) in [
        ("COPY numbers FROM STDIN (FREEZE)", "55000"),
        ("COPY guarded FROM STDIN", "P0001"),
        ("COPY missing FROM STDIN", "42P01"),
    ] {
        for begin in ["SELECT", "BEGIN"] {
            for split in [true, false] {
                let what = format!("{begin}; {copy}, answer awaited {split}");
                wire.query(begin).await?;
                let copy = [parse("", copy), bind("", "", &[]), execute("", 0), sync()].concat();
                let mut tags = String::new();
                if split {
                    // A driver that waits for the word to send data, and gets the error instead or soon after.
                    wire.send(&copy).await?;
                    while !tags.ends_with(['E', 'G']) {
                        tags.push(wire.next().await?.tag as char);
                    }
                    wire.send(&[data.clone(), sync()].concat()).await?;
                } else {
                    wire.send(&[copy, data.clone(), sync()].concat()).await?;
                }
                wire.send(&query("SELECT 'in step'")).await?;
                loop {
                    let answer = wire.answer().await?;
                    tags.push_str(&answer.tags());
                    if answer.text_rows() == ["in step"] || answer.code() == "25P02" {
                        break;
                    }
                    assert!(["00000", code].contains(&answer.code().as_str()), "{what}: {:?}", answer.errors());
                }
                // A server that is in COPY already ignores the Sync that came with it.
                let known: &[&str] = match (begin, tags.contains('G')) {
                    ("BEGIN", false) => &["12EZZEZ", "1EZZEZ", "EZZEZ"],
                    ("BEGIN", true) => &["12GEZEZ", "12GEZZEZ"],
                    (_, false) => &["12EZZTDCZ", "1EZZTDCZ", "EZZTDCZ"],
                    (_, true) => &["12GEZTDCZ", "12GEZZTDCZ"],
                };
                assert!(known.contains(&tags.as_str()), "{what}: {tags}");
                wire.query("ROLLBACK").await?;
                for _ in 0..3 {
                    id += 1;
                    let answer = wire.query(&format!("INSERT INTO numbers VALUES ({id}, 0) RETURNING id")).await?;
                    assert_eq!(
                        (answer.tags(), answer.text_rows()),
                        ("TDCZ".to_owned(), vec![id.to_string()]),
                        "{what}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// What a client sees, and others meanwhile, when a message of the simple protocol comes where a Sync was due.
async fn queries_without_sync(port: u16) -> anyhow::Result<Vec<String>> {
    let (mut wire, mut observer) = (Wire::connect_to(port).await?, Wire::connect_to(port).await?);
    observer.query("SET onecopy.freshness = 'strict'").await?;
    let change = |value: i32| {
        let sql = format!("UPDATE numbers SET value = {value} WHERE id = 1");
        [parse("", &sql), bind("", "", &[]), execute("", 0)].concat()
    };
    let value = "SELECT value FROM numbers WHERE id = 1";
    let mut seen = Vec::new();
    // At once; when the first part has been run already; also one that begins a block, or several statements.
    for (number, waits, text) in [
        (101, false, value),
        (102, true, value),
        (103, false, "BEGIN"),
        (104, false, "SELECT 1; UPDATE numbers SET value = value / 0; SELECT 2"),
        (105, false, "SELECT 1; SELECT 2"),
    ] {
        if waits {
            wire.send(&[change(number), flush()].concat()).await?;
            while wire.next().await?.tag != b'C' {}
            wire.send(&query(text)).await?;
        } else {
            wire.send(&[change(number), query(text)].concat()).await?;
        }
        let answer = wire.answer().await?;
        seen.push(format!("{number}: {:?} {} {}", answer.text_rows(), answer.code(), answer.status()?));
        seen.push(format!("others: {:?}", observer.query(value).await?.text_rows()));
        let ended = wire.ask(&sync()).await?;
        seen.push(format!("Sync: {} {:?}", ended.status()?, observer.query(value).await?.text_rows()));
        let ended = wire.query("COMMIT").await?;
        seen.push(format!("COMMIT: {:?} {:?}", ended.commands(), observer.query(value).await?.text_rows()));
    }
    wire.send(&[parse("", "SELECT nothing"), query("SELECT 'skipped'"), sync()].concat()).await?;
    let answer = wire.answer().await?;
    seen.push(format!(
        "{} {}, then {:?}",
        answer.tags(),
        answer.code(),
        wire.query("SELECT 'in step'").await?.text_rows()
    ));
    Ok(seen)
}

/// What they are to see.
const WITHOUT_SYNC: &[&str] = &[
    r#"101: ["101"] 00000 I"#,
    r#"others: ["101"]"#,
    r#"Sync: I ["101"]"#,
    r#"COMMIT: ["COMMIT"] ["101"]"#,
    r#"102: ["102"] 00000 I"#,
    r#"others: ["102"]"#,
    r#"Sync: I ["102"]"#,
    r#"COMMIT: ["COMMIT"] ["102"]"#,
    r#"103: [] 00000 T"#,
    r#"others: ["102"]"#,
    r#"Sync: T ["102"]"#,
    r#"COMMIT: ["COMMIT"] ["103"]"#,
    r#"104: ["1"] 22012 I"#,
    r#"others: ["103"]"#,
    r#"Sync: I ["103"]"#,
    r#"COMMIT: ["COMMIT"] ["103"]"#,
    r#"105: ["1", "2"] 00000 I"#,
    r#"others: ["105"]"#,
    r#"Sync: I ["105"]"#,
    r#"COMMIT: ["COMMIT"] ["105"]"#,
    r#"EZ 42703, then ["in step"]"#,
];

/// A message of the simple protocol ends what others have begun, as their Sync would; behind an error it is skipped.
///
/// 18 itself (18.4) has no answer to that: it says that a transaction is open, ends it without a commit, and fails with
/// XX000, "StartTransactionCommand: unexpected state STARTED".
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_query_behind_messages_without_sync_ends_their_transaction() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    assert_eq!(queries_without_sync(cluster.router().local_address().port()).await?, WITHOUT_SYNC);
    let leader = cluster.servers.leader();
    if leader.server.options().binaries.major_version() < 18 {
        assert_eq!(queries_without_sync(leader.port()).await?, WITHOUT_SYNC);
    }
    Ok(())
}

async fn cancel(cluster: &TestCluster, key: &[u8]) -> anyhow::Result<()> {
    let mut stream = tokio::net::TcpStream::connect(cluster.router().local_address()).await?;
    stream.write_all(&with_length(&[&CANCEL.to_be_bytes(), key].concat())).await?;
    let mut answer = Vec::new();
    tokio::time::timeout(ANSWER_TIMEOUT, stream.read_to_end(&mut answer)).await??;
    assert_eq!(answer, b"");
    Ok(())
}

/// All sessions share one server process on each server, so a late cancel request would find somebody else's statement.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_request_that_comes_late_hits_nobody_else() -> anyhow::Result<()> {
    let cluster = start(1, |settings| {
        settings.leader_backends_max = 1;
        settings.reader_backends_max = 1;
    })
    .await?;
    let (mut one, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    let key = one.cancel_key.to_vec();
    let update = "UPDATE numbers SET value = value + 1 WHERE id = 2";
    for (round, sql) in [
        "UPDATE numbers SET value = value + 1 WHERE id = 1",
        "SELECT count(*) FROM numbers",
        "SELECT 1 FROM numbers FOR SHARE",
    ]
    .into_iter()
    .cycle()
    .take(120)
    .enumerate()
    {
        one.send(&query(sql)).await?;
        let (answer, sent) = tokio::join!(one.answer(), cancel(&cluster, &key));
        sent?;
        let code = answer?.code();
        assert!(["00000", "57014"].contains(&code.as_str()), "round {round}: {code}");
        for sql in [update, "SELECT count(*) FROM numbers"] {
            let answer = other.query(sql).await?;
            assert_eq!(answer.code(), "00000", "round {round}: {sql}: {:?}", answer.errors());
        }
    }
    assert_eq!(other.query("SELECT value FROM numbers WHERE id = 2").await?.text_rows(), ["120"]);
    Ok(())
}

/// Rows that come slowly are not held back to the end of their statement: who reads row by row has them. What is
/// asked at its end whether it was out of date is (COPY TO outside a transaction).
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_come_slowly_are_not_held_back() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let slow = "SELECT repeat('x', 9000) FROM generate_series(1, 3) UNION ALL SELECT pg_sleep(8)::text";
    let copy = format!("COPY ({slow}) TO STDOUT");
    for begin in ["SELECT 1", "BEGIN", "BEGIN READ ONLY"] {
        for sql in [slow, &copy].into_iter().filter(|sql| !(begin == "SELECT 1" && sql.starts_with("COPY"))) {
            let mut wire = Wire::connect(&cluster).await?;
            wire.query(begin).await?;
            let began = Instant::now();
            wire.send(&query(sql)).await?;
            let first = [wire.next().await?.tag, wire.next().await?.tag];
            assert!([*b"TD", *b"Hd"].contains(&first), "{sql}: {first:?}");
            let waited = began.elapsed();
            assert!(waited < Duration::from_secs(6), "{begin}; {sql}: the first row came after {waited:?}");
        }
    }
    Ok(())
}
