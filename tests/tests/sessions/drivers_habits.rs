//! What drivers do without asking: data after a COPY that has failed, and cancel requests that come too late.

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

/// A message of the simple protocol ends what others have begun, as their Sync would; behind an error it is skipped.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_query_behind_messages_without_sync_ends_their_transaction() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    for (port, who) in
        [(cluster.servers.leader().port(), "one server"), (cluster.router().local_address().port(), "the router")]
    {
        let (mut wire, mut observer) = (Wire::connect_to(port).await?, Wire::connect_to(port).await?);
        observer.query("SET onecopy.freshness = 'strict'").await?;
        let change = |value: i32| {
            let sql = format!("UPDATE numbers SET value = {value} WHERE id = 1");
            [parse("", &sql), bind("", "", &[]), execute("", 0)].concat()
        };
        let value = "SELECT value FROM numbers WHERE id = 1";
        // At once, and when the first part has been run already.
        for (waits, due) in [(false, 101), (true, 102)] {
            let what = format!("{who}, waits {waits}");
            if waits {
                wire.send(&[change(due), flush()].concat()).await?;
                while wire.next().await?.tag != b'C' {}
                wire.send(&query(value)).await?;
            } else {
                wire.send(&[change(due), query(value)].concat()).await?;
            }
            let answer = wire.answer().await?;
            assert_eq!(answer.text_rows(), [due.to_string()], "{what}: {:?}", answer.errors());
            assert_eq!(answer.status()?, 'I', "{what}");
            assert_eq!(observer.query(value).await?.text_rows(), [due.to_string()], "{what}");
        }
        // Also one that begins a block, or several statements.
        wire.send(&[change(103), query("BEGIN")].concat()).await?;
        assert_eq!(wire.answer().await?.status()?, 'T', "{who}");
        assert_eq!(observer.query(value).await?.text_rows(), ["102"], "{who}");
        wire.query("COMMIT").await?;
        assert_eq!(observer.query(value).await?.text_rows(), ["103"], "{who}");
        wire.send(&[change(104), query("SELECT 1; UPDATE numbers SET value = value / 0; SELECT 2")].concat()).await?;
        let answer = wire.answer().await?;
        assert_eq!((answer.code().as_str(), answer.status()?), ("22012", 'I'), "{who}");
        assert_eq!(observer.query(value).await?.text_rows(), ["103"], "{who}: all or nothing");
        wire.send(&[parse("", "SELECT nothing"), query("SELECT 'skipped'"), sync()].concat()).await?;
        let answer = wire.answer().await?;
        assert_eq!((answer.tags(), answer.code()), ("EZ".to_owned(), "42703".to_owned()), "{who}");
        assert_eq!(wire.query("SELECT 'in step'").await?.text_rows(), ["in step"], "{who}");
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
