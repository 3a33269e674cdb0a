//! COPY in both directions and both protocols, with ends of every kind.

use anyhow::Context;

use crate::harness::{busy_back_ends, start_usual, wait_until};
use crate::wire::{Wire, bind, execute, flush, message, parse, query, run_extended, sync};

fn data(text: &str) -> Vec<u8> {
    message(b'd', text.as_bytes())
}

const DONE: u8 = b'c';
const FAIL: u8 = b'f';

fn copy_in(extended: bool) -> Vec<u8> {
    let sql = "COPY numbers FROM STDIN";
    if extended { [parse("", sql), bind("", "", &[]), execute("", 0), sync()].concat() } else { query(sql) }
}

async fn until(wire: &mut Wire, tag: u8) -> anyhow::Result<()> {
    while wire.next().await?.tag != tag {}
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_in_ends_as_the_client_ends_it() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let mut id = 1000;
    for begin in ["SELECT", "BEGIN"] {
        // Behind Flush the Sync after the data is the first one.
        let flushed = [parse("", "COPY numbers FROM STDIN"), bind("", "", &[]), execute("", 0), flush()].concat();
        for (way, copy, end) in [
            ("simple", copy_in(false), Vec::new()),
            ("extended", copy_in(true), sync()),
            ("extended with Flush", flushed, sync()),
        ] {
            let what = format!("{begin}, {way}");
            wire.query(begin).await?;
            wire.send(&copy).await?;
            until(&mut wire, b'G').await?;
            wire.send(&data(&format!("{id}\t1\n{}\t", id + 1))).await?;
            wire.send(&[data("2\n"), message(DONE, b""), end.clone()].concat()).await?;
            let answer = wire.answer().await?;
            assert_eq!((answer.commands(), answer.code().as_str()), (vec!["COPY 2".to_owned()], "00000"), "{what}");
            wire.query("COMMIT").await?;
            for (bytes, code) in [
                (data("not\ta number\n"), "22P02"),
                (data(&format!("{id}\t1\n")), "23505"),
                (message(FAIL, b"no more\0"), "57014"),
            ] {
                wire.send(&copy).await?;
                until(&mut wire, b'G').await?;
                let done = if bytes[0] == b'd' { message(DONE, b"") } else { Vec::new() };
                wire.send(&[bytes, done, end.clone()].concat()).await?;
                let answer = wire.answer().await?;
                assert_eq!((answer.code().as_str(), answer.status()?), (code, 'I'), "{what}");
                // The session is in step: the next answer belongs to the next question.
                assert_eq!(wire.query("SELECT 'in step'").await?.text_rows(), ["in step"], "{what}, {code}");
            }
            id += 10;
        }
    }
    assert_eq!(wire.query("SELECT count(*) FROM numbers WHERE id >= 1000").await?.text_rows(), ["12"]);
    // The router may still be putting one in order for the next client.
    wait_until("no back end is busy", || async { Ok(busy_back_ends(&cluster).await? == 0) }).await
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_out_gives_all_rows_from_any_server() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for sql in ["COPY numbers TO STDOUT", "COPY (SELECT * FROM numbers ORDER BY id) TO STDOUT (FORMAT binary)"] {
        for begin in ["SELECT", "BEGIN", "BEGIN READ ONLY"] {
            wire.query(begin).await?;
            for bytes in [query(sql), [run_extended(sql, &[]), sync()].concat()] {
                let answer = wire.ask(&bytes).await?;
                assert_eq!(
                    (answer.code().as_str(), answer.commands()),
                    ("00000", vec!["COPY 10".to_owned()]),
                    "{begin}: {sql}"
                );
                let parts = answer.frames.iter().filter(|frame| frame.tag == b'd').count();
                assert!((10..=12).contains(&parts), "{parts}");
            }
            wire.query("ROLLBACK").await?;
        }
    }
    assert_eq!(wire.query("COPY numbers TO '/nowhere/at/all'").await?.code(), "58P01");
    Ok(())
}

/// A large load passes through in parts, and a gate does not wait for its client.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_client_pauses_in_copy_others_commit_and_read() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut loader = Wire::connect(&cluster).await?;
    loader.send(&copy_in(false)).await?;
    until(&mut loader, b'G').await?;
    let rows: String = (2000..12_000).map(|id| format!("{id}\t0\n")).collect();
    loader.send(&data(&rows)).await?;
    let mut other = Wire::connect(&cluster).await?;
    other.query("SET onecopy.freshness = 'strict'").await?;
    for value in 1..=5 {
        assert_eq!(
            other.query(&format!("UPDATE numbers SET value = {value} WHERE id = 1")).await?.commands(),
            ["UPDATE 1"]
        );
        let answer = other.query("SELECT value, (SELECT count(*) FROM numbers) FROM numbers WHERE id = 1").await?;
        assert_eq!(answer.text_rows(), [format!("{value}|10")]);
    }
    loader.send(&message(DONE, b"")).await?;
    assert_eq!(loader.answer().await?.commands(), ["COPY 10000"]);
    wait_until("the load is seen", || async {
        let mut reader = Wire::connect(&cluster).await?;
        Ok(reader.query("SELECT count(*) FROM numbers").await?.text_rows() == ["10010"])
    })
    .await
}

/// Most memory that this process, in which the router is, has had so far.
fn peak_memory_bytes() -> anyhow::Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no peak")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? * 1024)
}

/// COPY FROM STDIN passes in a bounded memory, however long it is.
///
/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f71_a_load_of_any_length_passes_in_little_memory() -> anyhow::Result<()> {
    const LOAD_BYTES: usize = 256 << 20;
    const MEMORY_BYTES_MAX: usize = 32 << 20;
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query("CREATE TABLE texts (text text)").await?;
    let rows = data(&format!("{}\n", "x".repeat(8000)).repeat(8));
    for extended in [false, true] {
        let sql = "COPY texts FROM STDIN WHERE false";
        let begin = if extended { [run_extended(sql, &[]), sync()].concat() } else { query(sql) };
        wire.send(&begin).await?;
        until(&mut wire, b'G').await?;
        let before = peak_memory_bytes()?;
        for _ in 0..LOAD_BYTES / rows.len() {
            wire.send(&rows).await?;
        }
        wire.send(&[message(DONE, b""), sync()].concat()).await?;
        until(&mut wire, b'C').await?;
        let grown = peak_memory_bytes()? - before;
        assert!(grown < MEMORY_BYTES_MAX, "{grown} bytes, extended {extended}");
        drop(wire);
        wire = Wire::connect(&cluster).await?;
    }
    assert_eq!(wire.query("SELECT count(*) FROM texts").await?.text_rows(), ["0"]);
    Ok(())
}
