//! Who reads does not notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use onecopy_tests::client::Session;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::pool::Pool;
use onecopy_tests::servers::TestServer;
use tokio::task::JoinHandle;
use tokio::time::Instant;

const CEILING_BYTES: u64 = 192 * MIB;
const ROWS: u64 = 160 * MIB / PAGE_BYTES;
const RESIZES: u64 = 100;
/// Of each reader; on a busy machine they take longer than the resizes.
const READS_MIN: u64 = 10;
const READS_DEADLINE: Duration = Duration::from_secs(240);
const LEAST_BYTES: u64 = 64 * MIB;

/// One session that asks the same questions again and again, and must always hear the same.
async fn read(session: Session, stopping: Arc<AtomicBool>, rounds: Arc<AtomicU64>) -> anyhow::Result<()> {
    let questions = [
        "SELECT count(*), sum(id), sum(hashtext(body)::bigint) FROM pages",
        "SELECT md5(body) FROM pages WHERE id = 77",
    ];
    let mut expected = Vec::new();
    for question in questions {
        expected.push(session.run(question).await?);
    }
    while !stopping.load(Ordering::Relaxed) {
        for (question, expected) in questions.iter().zip(&expected) {
            let answer = session.run(question).await?;
            ensure!(answer == *expected, "{question}: {answer:?}, not {expected:?}");
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

async fn start(
    server: &TestServer,
    stopping: &Arc<AtomicBool>,
) -> anyhow::Result<(JoinHandle<anyhow::Result<()>>, Arc<AtomicU64>)> {
    let (session, rounds) = (server.connect("reader").await?, Arc::new(AtomicU64::new(0)));
    session.run("SET default_transaction_read_only = on").await?;
    Ok((tokio::spawn(read(session, stopping.clone(), rounds.clone())), rounds))
}

/// A session that reads goes on through a hundred resizes without an error and hears the same answers.
///
/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m5_reads_go_on_through_a_hundred_resizes_on_leader_and_standby() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES).with_standby()).await?;
    pages::make(harness.leader(), ROWS).await?;
    harness.wait_replayed().await?;
    let stopping = Arc::new(AtomicBool::new(false));
    let mut readers = Vec::new();
    for server in harness.all() {
        readers.push(start(server, &stopping).await?);
    }
    let pools = (Pool::of(harness.leader()).await?, Pool::of(harness.standby()?).await?);
    let sizes = (LEAST_BYTES / MIB..=CEILING_BYTES / MIB).step_by(2).collect::<Vec<_>>();
    let deadline = Instant::now() + READS_DEADLINE;
    for resize in 0.. {
        let have_read = readers.iter().all(|(_, rounds)| rounds.load(Ordering::Relaxed) >= READS_MIN);
        if resize >= RESIZES && (have_read || Instant::now() > deadline) {
            break;
        }
        // Up and down in turn, never twice the same.
        let step = usize::try_from(resize)? % (sizes.len() / 2);
        let size = if resize.is_multiple_of(2) { sizes[step] } else { sizes[sizes.len() - 1 - step] } * MIB;
        let (leader, standby) = tokio::join!(pools.0.resize(size), pools.1.resize(size));
        assert_eq!((leader?, standby?), (size, size), "resize {resize}");
    }
    stopping.store(true, Ordering::Relaxed);
    for (reader, rounds) in readers {
        reader.await??;
        ensure!(rounds.load(Ordering::Relaxed) >= READS_MIN, "only {rounds:?} rounds");
    }
    Ok(())
}
