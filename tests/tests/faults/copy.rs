//! COPY in both directions and both protocols, with ends of every kind.

use anyhow::Context;

use crate::harness::{busy_back_ends, kill_back_end, leader, start_usual, try_until, wait_for_updates};
use crate::wire::{Wire, bind, close, execute, flush, message, parse, query, run_extended, sync};

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
    try_until("no back end is busy", || async { Ok(busy_back_ends(&cluster).await? == 0) }).await
}

/// A client may send the data with the statement, in one packet or several, and the rest of a failed one is skipped.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_takes_data_that_comes_before_sync() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let copy = run_extended("COPY numbers FROM STDIN", &[]);
    let (good, bad) = (data("2000\t1\n"), data("not\ta number\n"));
    let done = message(DONE, b"");
    let insert = run_extended("INSERT INTO numbers VALUES (2001, 1)", &[]);
    let count = query("SELECT count(*) FROM numbers WHERE id >= 2000");
    let delete = query("DELETE FROM numbers WHERE id >= 2000");
    let cases: [&[&[u8]]; 6] = [
        &[&copy, &good, &done, &sync()],
        &[&insert, &copy, &good, &done, &sync()],
        &[&copy, &bad, &done, &sync()],
        &[&copy, &bad, &done, &insert, &sync()],
        &[&insert, &copy, &good, &message(FAIL, b"no more\0"), &sync()],
        // Data for nothing is skipped.
        &[&insert, &good, &done, &sync()],
    ];
    for case in cases {
        let mut told = Vec::new();
        for (is_routed, is_split) in [(false, false), (true, false), (true, true)] {
            let mut wire = match is_routed {
                true => Wire::connect(&cluster).await?,
                false => Wire::connect_to(cluster.servers.leader().port()).await?,
            };
            for part in case {
                wire.send(part).await?;
                if is_split {
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                }
            }
            let answer = wire.answer().await?;
            let rows = wire.ask(&count).await?.text_rows();
            wire.ask(&delete).await?;
            told.push((answer.code(), answer.commands(), answer.status()?, rows));
        }
        assert!(told.iter().all(|one| *one == told[0]), "{told:?}");
    }
    // Never done silently: what follows it, or goes before its data, is not run, and so is it not. Nobody waits for
    // data then.
    let (commit, close) = (run_extended("COMMIT", &[]), close('S', "nothing"));
    let cases: [&[&[u8]]; 7] = [
        &[&copy, &good, &done, &insert],
        &[&copy, &commit, &good, &done],
        &[&copy, &commit],
        &[&copy, &insert],
        &[&copy, &insert, &good, &done],
        &[&copy, &close, &good, &done],
        &[&copy, &bind("", "nothing", &[])],
    ];
    for case in cases {
        let mut wire = Wire::connect(&cluster).await?;
        wire.send(&[case.concat(), sync()].concat()).await?;
        assert_eq!(wire.until_closed().await?.code(), "08P01");
        assert_eq!(Wire::connect(&cluster).await?.ask(&count).await?.text_rows(), ["0"]);
    }
    Ok(())
}

/// A server that is lost behind CopyDone leaves the session in step: the `Sync` before the data had no answer.
///
/// Spec: A1, I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_lost_while_copy_ends_shifts_no_later_answer() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS \
                'BEGIN PERFORM pg_sleep(600); RETURN NULL; END'; \
                CREATE TRIGGER slow AFTER INSERT ON numbers EXECUTE FUNCTION slow()";
    let observer = leader(&cluster).await?;
    observer.run_all(&[slow]).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.send(&copy_in(true)).await?;
    until(&mut wire, b'G').await?;
    wire.send(&[data("3000\t1\n"), message(DONE, b""), sync()].concat()).await?;
    let sleeps = "SELECT coalesce(max(pid), 0) FROM pg_stat_activity \
                  WHERE wait_event = 'PgSleep' AND query LIKE 'COPY numbers%'";
    try_until("it sleeps", || async { Ok(observer.run(sleeps).await?.number()? > 0) }).await?;
    kill_back_end(&cluster, sleeps).await?;
    let answer = wire.answer().await?;
    assert_eq!((answer.code().as_str(), answer.status()?), ("57P01", 'I'), "{answer:?}");
    wait_for_updates(&cluster).await?;
    for number in 0..3 {
        let answer = wire.query(&format!("SELECT {number}")).await?;
        assert_eq!(answer.text_rows(), [number.to_string()], "{:?}", answer.errors());
    }
    assert_eq!(wire.query("SELECT count(*) FROM numbers WHERE id = 3000").await?.text_rows(), ["0"]);
    Ok(())
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
    try_until("the load is seen", || async {
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
