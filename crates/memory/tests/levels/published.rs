//! Level `publish`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use onecopy_memory::MemoryError;
use onecopy_memory::published::{Published, Step};
use onecopy_testing::{process, until_async};

use crate::load::Load;
use crate::segment::memory_bytes;
use crate::server::{CEILING_BYTES, PgbenchServer};

/// What the servers here keep published.
const RESERVE_BYTES: u64 = 64 << 20;
/// A chunk of 256 buffers.
const CHUNK_BYTES: u64 = 2 << 20;
/// Tells the taker of the tests below what to take from whom, and where to stop.
const DIRECTORY_VARIABLE: &str = "TAKER_DATA_DIRECTORY";
const STEP_VARIABLE: &str = "TAKER_STEP";

async fn target_bytes(server: &PgbenchServer) -> u64 {
    server.number("SELECT onecopy_memory_target()").await
}

/// Waits until this much is published, and gives it.
async fn until_published(published: &Published, bytes: u64) {
    until_async("the reserve is published", async || published.available_bytes().expect("seen") == bytes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_published_is_taken_and_the_server_lowers_its_target() {
    let server = PgbenchServer::publishing(RESERVE_BYTES).await;
    let content = server.content().await;
    let published = Published::open(server.data_directory()).expect("published");
    until_published(&published, RESERVE_BYTES).await;
    assert_eq!(target_bytes(&server).await, CEILING_BYTES, "the reserve belongs to the target");

    let memory_before = memory_bytes(server.data_directory());
    let taken = published.take(20 << 20).expect("taken");
    assert_eq!(taken.chunks, 10, "{taken:?}");
    // Pages that are shared with a neighbour are given back by the server.
    assert!(taken.bytes > (20 << 20) - (64 << 10) && taken.bytes <= 20 << 20, "{taken:?}");
    assert!(memory_before - memory_bytes(server.data_directory()) > 19 << 20);
    let lowered = CEILING_BYTES - (20 << 20);
    until_async("the target is lowered", async || target_bytes(&server).await == lowered).await;
    until_published(&published, RESERVE_BYTES).await;
    assert_eq!(target_bytes(&server).await, lowered, "it is lowered once");

    // Growth is asked for as at level request.
    server.number("SELECT onecopy_memory_target('100%')").await;
    assert_eq!(target_bytes(&server).await, CEILING_BYTES);
    assert_eq!(server.content().await, content);
    server.assert_no_crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takers_come_to_the_floor_while_clients_work_and_no_further() {
    let server = PgbenchServer::publishing(RESERVE_BYTES).await;
    let published = Published::open(server.data_directory()).expect("published");
    let floor = server.number("SELECT floor_bytes FROM onecopy_memory_status").await;
    let load = Load::start(&server, 10);
    let mut taken_chunks = 0;
    until_async("the floor is reached", async || {
        tokio::task::block_in_place(|| published.take(RESERVE_BYTES)).expect("taken");
        target_bytes(&server).await == floor
    })
    .await;
    for _ in 0..20 {
        taken_chunks += published.take(RESERVE_BYTES).expect("taken").chunks;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!((taken_chunks, target_bytes(&server).await), (0, floor), "nothing is left to take");
    load.finish().await;
    server.number("SELECT onecopy_memory_target('100%')").await;
    server.assert_balanced().await;
    server.assert_no_crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_is_one_agent_and_a_server_without_the_extension_has_none() {
    let server = PgbenchServer::publishing(RESERVE_BYTES).await;
    let first = Published::open(server.data_directory()).expect("published");
    let second = Published::open(server.data_directory()).expect_err("a second agent");
    assert!(second.to_string().contains("another agent"), "{second}");
    until_published(&first, RESERVE_BYTES).await;
    // A server that starts again has other memory, and publishes anew.
    server.crash_stop().await.expect("killed");
    let gone = first.take(CHUNK_BYTES).expect_err("no server");
    assert!(matches!(gone, MemoryError::NoServer { .. }), "{gone}");
    server.start().await.expect("recovered");
    until_published(&first, RESERVE_BYTES).await;
    assert_eq!(first.take(CHUNK_BYTES).expect("taken").chunks, 1);
    drop(first);
    Published::open(server.data_directory()).expect("the next agent");

    let stock = PgbenchServer::stock().await;
    let refused = Published::open(stock.data_directory()).expect_err("no extension");
    assert!(refused.to_string().contains("shared_preload_libraries"), "{refused}");
}

/// An agent that is killed or stopped while it takes memory costs nothing: the next one, or the server, finishes its
/// work, and what it holds stays out of use.
///
/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_taker_may_die_at_each_step() {
    let server = PgbenchServer::publishing(RESERVE_BYTES).await;
    let content = server.content().await;
    let mut expected = CEILING_BYTES;
    for step in ["Claimed", "GivenBack"] {
        // By the server, when no agent comes.
        let taker = Taker::start(server.data_directory(), step);
        drop(taker);
        expected -= CHUNK_BYTES;
        until_async("the server has finished it", async || target_bytes(&server).await == expected).await;
        // By the next agent, when there is one at once.
        let taker = Taker::start(server.data_directory(), step);
        drop(taker);
        let next = Published::open(server.data_directory()).expect("the next agent");
        assert_eq!(next.take(0).expect("nothing, but what was begun").chunks, 0);
        expected -= CHUNK_BYTES;
        until_async("the next agent has finished it", async || target_bytes(&server).await == expected).await;
        until_published(&next, RESERVE_BYTES).await;
    }
    server.number("SELECT onecopy_memory_target('100%')").await;
    assert_eq!(server.content().await, content);
    server.assert_no_crash();
}

/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_stopped_taker_holds_stays_out_of_the_pool() {
    let server = PgbenchServer::publishing(RESERVE_BYTES).await;
    let content = server.content().await;
    let taker = Taker::start(server.data_directory(), "Claimed");
    process::stop(taker.0.id());
    // Without a reserve all that is published is to be brought back.
    server.keep_reserve(0).await;
    let status = "SELECT pool_bytes FROM onecopy_memory_status";
    // The topmost chunk was taken first.
    until_async("all others are back", async || server.number(status).await == CEILING_BYTES - CHUNK_BYTES).await;
    for _ in 0..30 {
        server.number("SELECT onecopy_memory_target('100%', false)").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(server.number(status).await, CEILING_BYTES - CHUNK_BYTES, "it could still be punched");
    }
    assert_eq!(server.content().await, content, "the server works meanwhile");
    drop(taker);
    until_async("the chunk is back", async || {
        server.number("SELECT onecopy_memory_target('100%')").await;
        server.number(status).await == CEILING_BYTES
    })
    .await;
    assert_eq!(server.content().await, content);
    server.assert_no_crash();
}

/// Takers that are killed at any moment, while targets change and clients work.
///
/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takers_die_at_random_while_targets_change_and_clients_work() {
    let server = PgbenchServer::publishing(RESERVE_BYTES).await;
    let floor = server.number("SELECT floor_bytes FROM onecopy_memory_status").await;
    let load = Load::start(&server, 12);
    for round in 0_u64..12 {
        let mut taker = Taker::spawn(server.data_directory(), "Never");
        let target = floor + (CEILING_BYTES - floor) / 12 * ((round * 7) % 13).min(12);
        server.number(&format!("SELECT onecopy_memory_target('{target} B', false)")).await;
        tokio::time::sleep(Duration::from_millis(150 + 61 * round % 400)).await;
        taker.kill().and_then(|()| taker.wait()).expect("killed");
    }
    load.finish().await;
    server.keep_reserve(0).await;
    let status = "SELECT pool_bytes FROM onecopy_memory_status";
    until_async("the whole pool is back", async || {
        server.number("SELECT onecopy_memory_target('100%')").await;
        server.number(status).await == CEILING_BYTES
    })
    .await;
    server.assert_balanced().await;
    server.assert_no_crash();
}

/// Another process that takes chunks and waits at a step. Killed when dropped.
struct Taker(Child);

impl Taker {
    /// Starts it and waits until it is at that step.
    fn start(data_directory: &Path, step: &str) -> Taker {
        let mut child = Taker::spawn(data_directory, step);
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let there = lines.any(|line| line.is_ok_and(|line| line.contains("waiting at")));
        let taker = Taker(child);
        assert!(there, "it ended before {step}");
        taker
    }

    /// Starts it. It takes chunk after chunk and waits at the first such step.
    fn spawn(data_directory: &Path, step: &str) -> Child {
        let this = std::env::current_exe().expect("this test");
        let mut command = Command::new(this);
        command.args(["--exact", "published::the_taker", "--ignored", "--nocapture"]);
        command.env(DIRECTORY_VARIABLE, data_directory).env(STEP_VARIABLE, step);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("started")
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What [`Taker`] runs; alone it does nothing.
#[test]
#[ignore = "a part of the tests above, in another process"]
fn the_taker() {
    let (Some(directory), Ok(step)) = (std::env::var_os(DIRECTORY_VARIABLE), std::env::var(STEP_VARIABLE)) else {
        return;
    };
    let published = Published::open(&PathBuf::from(directory)).expect("published");
    let mut wait = |reached: Step| {
        if format!("{reached:?}") == step {
            println!("waiting at {step}");
            std::thread::sleep(Duration::from_secs(600));
        }
    };
    loop {
        published.take_watched(CHUNK_BYTES, &mut wait).expect("taken");
        std::thread::sleep(Duration::from_millis(5));
    }
}
