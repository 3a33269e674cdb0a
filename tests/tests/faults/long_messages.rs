//! Very long messages: what the router need not read of them passes in parts, what it must read it holds
//! once, and others go on meanwhile.

use anyhow::Context;
use onecopy_router::wire::ErrorFields;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::DATABASE;

use crate::harness::{bounded, start_usual};
use crate::wire::{ANSWER_TIMEOUT, Wire, execute, message, parse, query, run_extended, sync};

const LONG_BYTES: usize = 100 << 20;
/// Longer than what is parsed as it is; a longer one takes a build for tests minutes to judge.
const TEXT_BYTES: usize = 32 << 20;
const PIECE: &[u8] = b"0123456789abcdef";
/// What the router may need for a message that passes in parts.
const PARTS_BYTES_MAX: usize = 16 << 20;
/// What it may need for an answer of which it holds back 16 MiB, in a buffer that grows by being copied.
const HELD_BACK_BYTES_MAX: usize = 64 << 20;
/// What it may need for a text, of which it has one copy.
const TEXT_BYTES_MAX: usize = TEXT_BYTES + (48 << 20);

/// Most memory that this process, in which the router is, has had so far.
fn peak_memory_bytes() -> anyhow::Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no peak")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? * 1024)
}

fn epochs(cluster: &TestCluster) -> u64 {
    let databases = cluster.router().status().databases;
    databases.iter().find(|one| one.name == DATABASE).map_or(0, |one| one.gates.epochs)
}

/// Another client commits, and reads what it has committed, until gates have closed meanwhile.
async fn others_go_on(cluster: &TestCluster, other: &mut Wire) -> anyhow::Result<()> {
    let before = epochs(cluster);
    let mut value = before;
    bounded("a gate", async {
        while epochs(cluster) < before + 2 {
            value += 1;
            let update = format!("UPDATE numbers SET value = {value} WHERE id = 1");
            assert_eq!(other.query(&update).await?.commands(), ["UPDATE 1"]);
            let read = "SELECT value FROM numbers WHERE id = 1";
            assert_eq!(other.query(read).await?.text_rows(), [value.to_string()]);
        }
        anyhow::Ok(())
    })
    .await?
}

/// Sends a message whose body is `before`, `content_bytes` and `after`; half way others do something.
async fn send_long(
    cluster: &TestCluster,
    wire: &mut Wire,
    other: &mut Wire,
    content_bytes: usize,
    (tag, before, after): (u8, &[u8], &[u8]),
) -> anyhow::Result<usize> {
    let length = u32::try_from(4 + before.len() + content_bytes + after.len())?;
    wire.send(&[&[tag][..], &length.to_be_bytes(), before].concat()).await?;
    let pieces = PIECE.repeat(4096);
    let mut held = 0;
    for sent in 0..content_bytes / pieces.len() {
        wire.send(&pieces).await?;
        if sent == content_bytes / pieces.len() / 2 {
            others_go_on(cluster, other).await?;
            held = cluster.router().status().buffered_bytes;
        }
    }
    wire.send(after).await?;
    Ok(held)
}

fn long_bind(statement: &str) -> Vec<u8> {
    let length = u32::try_from(LONG_BYTES).expect("it is far below 4 GiB");
    [b"\0", statement.as_bytes(), b"\0\0\0\0\x01", &length.to_be_bytes()[..]].concat()
}

/// Whether what was inserted is the digest of so many bytes.
fn is_digest_of(content_bytes: usize) -> String {
    let (piece, count) = (String::from_utf8_lossy(PIECE), content_bytes / PIECE.len());
    format!("SELECT digest = md5(repeat('{piece}', {count})) FROM digests")
}

async fn start() -> anyhow::Result<(TestCluster, Wire, Wire)> {
    let cluster = start_usual(1).await?;
    let (mut wire, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    wire.query("CREATE TABLE digests (digest text)").await?;
    other.query("SET onecopy.freshness = 'strict'").await?;
    Ok((cluster, wire, other))
}

/// Values of a statement, rows and data of COPY of a hundred megabytes pass in parts, in 16 MiB of the router's memory;
/// a long text is held once; others commit and read epochs meanwhile.
///
/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f86_a_long_parameter_passes_in_little_memory_while_others_go_on() -> anyhow::Result<()> {
    let (cluster, mut wire, mut other) = start().await?;
    let peak = peak_memory_bytes()?;
    let cases = [
        ("", "INSERT INTO digests VALUES (md5($1))", "INSERT 0 1"),
        ("BEGIN", "UPDATE digests SET digest = md5($1)", "UPDATE 1"),
        // It reads an epoch.
        ("BEGIN READ ONLY", "SELECT 1 FROM digests WHERE digest = md5($1)", "SELECT 1"),
    ];
    for (begin, sql, done) in cases {
        if !begin.is_empty() {
            wire.query(begin).await?;
        }
        wire.send(&parse("long", sql)).await?;
        let held = send_long(&cluster, &mut wire, &mut other, LONG_BYTES, (b'B', &long_bind("long"), b"\0\0")).await?;
        assert!(held < PARTS_BYTES_MAX, "{held} bytes are held");
        let answer = wire.ask(&[execute("", 0), sync()].concat()).await?;
        assert_eq!((answer.tags().replace('D', ""), answer.commands()), ("12CZ".to_owned(), vec![done.to_owned()]));
        if !begin.is_empty() {
            assert_eq!(wire.query("COMMIT").await?.commands(), ["COMMIT"]);
        }
        wire.query("DEALLOCATE ALL").await?;
    }
    // Nobody takes it: it is passed over.
    let held = send_long(&cluster, &mut wire, &mut other, LONG_BYTES, (b'B', &long_bind("unknown"), b"\0\0")).await?;
    assert!(held < PARTS_BYTES_MAX, "{held} bytes are held");
    assert_eq!(wire.ask(&sync()).await?.code(), "26000");
    // The server refuses it when it has had all of it.
    wire.send(&parse("", "SELECT $1::text, $2::text")).await?;
    send_long(&cluster, &mut wire, &mut other, LONG_BYTES, (b'B', &long_bind(""), b"\0\0")).await?;
    assert_eq!(wire.ask(&[execute("", 0), sync()].concat()).await?.code(), "08P01");
    let grown = peak_memory_bytes()? - peak;
    assert!(grown < PARTS_BYTES_MAX, "{grown} bytes");
    assert_eq!(wire.query(&is_digest_of(LONG_BYTES)).await?.text_rows(), ["t"]);
    assert_eq!(cluster.router().status().buffered_bytes, 0);
    Ok(())
}

/// What a client puts behind its COPY is no data of it. Else the server, which waits for data, would take for messages
/// of the router's whatever the values hold.
///
/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f86_values_behind_a_copy_never_reach_the_server_as_messages() -> anyhow::Result<()> {
    let (cluster, mut wire, mut other) = start().await?;
    wire.query("CREATE TABLE lines (line text)").await?;
    let smuggled = [message(b'c', b""), sync(), query("INSERT INTO lines VALUES ('smuggled')")].concat();
    let before = b"\0long\0\0\0\0\x01";
    let length = u32::try_from(8 << 20)?.to_be_bytes();
    let bind = message(b'B', &[&before[..], &length, &vec![b'x'; 8 << 20], b"\0\0"].concat());
    // So much of it the router reads before the rest passes in parts.
    let first_part = &bind[..64 << 10];
    let batch = [parse("long", "SELECT $1::text"), run_extended("COPY lines FROM STDIN", &[]), first_part.to_vec()];
    wire.send(&batch.concat()).await?;
    let mut answers = Vec::new();
    while let Ok(frame) = wire.next().await {
        if frame.tag == b'G' {
            // As far as it is read at all.
            let _ = wire.send(&smuggled).await;
        }
        answers.push(frame);
    }
    let last = answers.last().context("it is not told why its session ends")?;
    assert_eq!((last.tag, ErrorFields::parse(&last.body()).code.as_str()), (b'E', "08P01"));
    assert_eq!(other.query("SELECT count(*) FROM lines").await?.text_rows(), ["0"]);
    bounded("its back end", async {
        while cluster.router().status().buffered_bytes > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    })
    .await
}

/// A message at the bound of a batch, to the byte: where it is sent in parts, nothing else is sent before its end.
///
/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f86_values_about_as_long_as_a_batch_are_those_that_were_sent() -> anyhow::Result<()> {
    let (_cluster, mut wire, _other) = start().await?;
    wire.ask(&[parse("long", "SELECT length($1)::text"), sync()].concat()).await?;
    // As the router bounds a batch.
    const BATCH_BYTES: usize = 4 << 20;
    let ahead = [&b"\0long\0\0\0\0\x01"[..], &[0; 4]].concat();
    for message_bytes in [BATCH_BYTES - 1, BATCH_BYTES, BATCH_BYTES + 1] {
        let content = vec![b'x'; message_bytes - 5 - ahead.len() - 2];
        let length = u32::try_from(content.len())?.to_be_bytes();
        let bind = message(b'B', &[&ahead[..ahead.len() - 4], &length, &content, b"\0\0"].concat());
        assert_eq!(bind.len(), message_bytes);
        let answer = wire.ask(&[bind, execute("", 0), sync()].concat()).await?;
        assert_eq!(answer.text_rows(), [content.len().to_string()]);
    }
    Ok(())
}

/// Asks, and takes an answer with one long message of type `tag`, which has `ahead` bytes before its content and
/// `behind` after it.
async fn take_long(wire: &mut Wire, question: &[u8], (tag, ahead, behind): (u8, usize, usize)) -> anyhow::Result<()> {
    wire.send(question).await?;
    let (mut content, mut commands) = (Vec::new(), 0);
    loop {
        let frame = wire.next().await?;
        match frame.tag {
            b'E' => panic!("{:?}", onecopy_router::wire::ErrorFields::parse(&frame.body())),
            b'C' => commands += 1,
            b'Z' => break,
            of_type if of_type == tag => {
                let first = frame.body().slice(ahead..);
                let mut bytes = first.len();
                content.extend_from_slice(&first[..2 * PIECE.len()]);
                while wire.channel.rest() > 0 {
                    match wire.channel.buffered_part() {
                        Some(part) => bytes += part.len(),
                        None => tokio::time::timeout(ANSWER_TIMEOUT, wire.channel.exchange_some()).await??,
                    }
                }
                assert_eq!(bytes, LONG_BYTES + behind);
            }
            _ => {}
        }
    }
    assert_eq!((content, commands), (PIECE.repeat(2), 1));
    Ok(())
}

/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f86_a_long_row_and_a_long_line_of_copy_pass_in_little_memory() -> anyhow::Result<()> {
    let (cluster, mut wire, mut other) = start().await?;
    wire.channel.in_parts = &[(b'D', 1 << 20), (b'd', 1 << 20)];
    let peak = peak_memory_bytes()?;
    let row = format!("repeat('{}', {})", String::from_utf8_lossy(PIECE), LONG_BYTES / PIECE.len());
    let select = format!("SELECT {row}");
    take_long(&mut wire, &query(&select), (b'D', 6, 0)).await?;
    take_long(&mut wire, &[run_extended(&select, &[]), sync()].concat(), (b'D', 6, 0)).await?;
    take_long(&mut wire, &query(&format!("COPY ({select}) TO STDOUT")), (b'd', 0, 1)).await?;
    wire.query("CREATE TABLE lines (line varchar(10))").await?;
    let refused = [run_extended("COPY lines FROM STDIN", &[]), sync()].concat();
    let (done, done_extended) = (message(b'c', b""), [message(b'c', b""), sync()].concat());
    let cases = [(query("COPY digests FROM STDIN WHERE false"), done, "00000"), (refused, done_extended, "22001")];
    for (begin, end, code) in cases {
        wire.send(&begin).await?;
        while wire.next().await?.tag != b'G' {}
        let held = send_long(&cluster, &mut wire, &mut other, LONG_BYTES, (b'd', b"", b"\n")).await?;
        assert!(held < PARTS_BYTES_MAX, "{held} bytes are held");
        assert_eq!(wire.ask(&end).await?.code(), code);
        assert_eq!(wire.query("SELECT 1").await?.text_rows(), ["1"]);
    }
    let grown = peak_memory_bytes()? - peak;
    assert!(grown < PARTS_BYTES_MAX, "{grown} bytes");
    let insert = format!("INSERT INTO digests VALUES ('') RETURNING {row}");
    take_long(&mut wire, &query(&insert), (b'D', 6, 0)).await?;
    let grown = peak_memory_bytes()? - peak;
    assert!(grown < HELD_BACK_BYTES_MAX, "{grown} bytes");
    Ok(())
}

/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f86_a_long_text_is_held_once_and_others_go_on_while_it_is_judged() -> anyhow::Result<()> {
    let (cluster, mut wire, mut other) = start().await?;
    let peak = peak_memory_bytes()?;
    let parts = (b'Q', &b"INSERT INTO digests VALUES (md5('"[..], &b"'))\0"[..]);
    let held = send_long(&cluster, &mut wire, &mut other, TEXT_BYTES, parts).await?;
    assert!((TEXT_BYTES / 4..TEXT_BYTES_MAX).contains(&held), "{held} bytes are held");
    let answer = tokio::select! {
        answer = wire.answer() => answer?,
        failed = async {
            loop {
                if let Err(error) = others_go_on(&cluster, &mut other).await {
                    return error;
                }
            }
        } => return Err(failed),
    };
    assert_eq!(answer.commands(), ["INSERT 0 1"]);
    let grown = peak_memory_bytes()? - peak;
    assert!(grown < TEXT_BYTES_MAX, "{grown} bytes");
    assert_eq!(wire.query(&is_digest_of(TEXT_BYTES)).await?.text_rows(), ["t"]);
    Ok(())
}
