//! What becomes of a pool's size when servers crash, stop and start, and the worker dies.

use anyhow::{Context, ensure};
use onecopy_postgres::StopMode;
use onecopy_testing::try_until_async;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::deaths::Kind;
use onecopy_tests::memory::harness::{EXTENSION, Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::pool::Pool;
use onecopy_tests::memory::segment::Segment;
use onecopy_tests::servers::TestServer;
use rustix::process::{Pid, Signal};

const CEILING_BYTES: u64 = 192 * MIB;
const SETTING: &str = "128MB";
const SETTING_BYTES: u64 = 128 * MIB;
const ROWS: u64 = 180 * MIB / PAGE_BYTES;
/// What a segment has beside the pool's blocks, at this ceiling.
const BESIDE_BYTES_MAX: u64 = 24 * MIB;
const CHECKPOINTER: &str = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'";

async fn harness() -> anyhow::Result<Harness> {
    let plan = Plan::new(Version::Fifteen, CEILING_BYTES).set("onecopy.memory_target", SETTING);
    let harness = Harness::start(plan).await?;
    pages::make(harness.leader(), ROWS).await?;
    Ok(harness)
}

/// The pool has the size of the setting, whatever is asked of it.
async fn ensure_at_setting(server: &TestServer) -> anyhow::Result<()> {
    pages::read_all(server).await?;
    let status = Pool::of(server).await?.steady().await?;
    ensure!((status.pool_bytes, status.target_bytes) == (SETTING_BYTES, SETTING_BYTES), "{status:?}");
    let present = Segment::of(server)?.present_bytes()?;
    ensure!(present <= SETTING_BYTES + BESIDE_BYTES_MAX, "{present} bytes are there");
    Ok(())
}

/// Waits until there is another worker than this one: the server as it was may still let somebody in just after a
/// death.
async fn wait_restarted(server: &TestServer, worker: u32) -> anyhow::Result<()> {
    let look = async || match Pool::of(server).await {
        Ok(pool) => Ok(pool.status().await),
        Err(error) => Ok(Err(error)),
    };
    let what = format!("worker {worker} has a successor");
    let answer = try_until_async(&what, look, |answer| {
        answer.as_ref().is_ok_and(|status| ![0, worker].contains(&status.worker))
    });
    answer.await?.map(drop)
}

/// After a crash, any kind of stop, a reload, the setting holds; a worker that is ended goes on from where it was.
///
/// Spec: A3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m11_after_a_crash_the_setting_holds() -> anyhow::Result<()> {
    let harness = harness().await?;
    let leader = harness.leader();
    for (round, kind) in [Kind::BackEnd, Kind::Worker, Kind::Other].into_iter().enumerate() {
        let pool = harness.pool().await?;
        pool.resize(64 * MIB).await?;
        let (postmaster, worker) = (leader.server.process_id(), pool.status().await?.worker);
        // Each is one that does not end by itself just now.
        let victim = match kind {
            Kind::BackEnd => pool.session().run("SELECT pg_backend_pid()").await?.number()?,
            Kind::Worker => worker.into(),
            Kind::Other => pool.session().run(CHECKPOINTER).await?.number()?,
        };
        let victim = Pid::from_raw(victim.try_into()?).with_context(|| format!("there is no {kind:?}"))?;
        rustix::process::kill_process(victim, Signal::KILL)?;
        drop(pool);
        wait_restarted(leader, worker).await.with_context(|| format!("{kind:?}"))?;
        ensure_at_setting(leader).await?;
        assert_eq!(leader.server.process_id(), postmaster, "round {round}: an ordinary crash restart");
        // And it obeys again.
        assert_eq!(harness.pool().await?.resize(96 * MIB).await?, 96 * MIB);
    }
    Ok(())
}

/// Spec: A3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m11_however_a_server_stops_the_setting_holds_at_its_start() -> anyhow::Result<()> {
    let harness = harness().await?;
    let leader = harness.leader();
    for mode in [StopMode::Smart, StopMode::Fast, StopMode::Immediate] {
        // Half parked, half on its way.
        let pool = harness.pool().await?;
        pool.resize(96 * MIB).await?;
        pool.want("64MB", false).await?;
        drop(pool);
        leader.server.restart(mode).await?;
        ensure_at_setting(leader).await?;
    }
    leader.server.crash_stop().await?;
    leader.server.start().await?;
    ensure_at_setting(leader).await
}

/// Spec: A3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m11_a_worker_that_is_ended_goes_on_from_where_it_was() -> anyhow::Result<()> {
    let harness = harness().await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    pool.resize(CEILING_BYTES).await?;
    pages::read_all(leader).await?;
    for target in [64 * MIB, 160 * MIB, 96 * MIB] {
        let before = pool.status().await?.worker;
        pool.want(&format!("{target}B"), false).await?;
        // In the middle of it, or just before or after.
        // It is connected to no database: `pg_terminate_backend` does not know it.
        let process = Pid::from_raw(before.try_into()?).context("there is no worker")?;
        rustix::process::kill_process(process, Signal::TERM)?;
        let status = pool.steady().await?;
        assert_eq!(status.pool_bytes, target);
        wait_restarted(leader, before).await?;
    }
    // The connection has lived through all of it: nothing crashed.
    assert_eq!(pool.session().run("SELECT count(*) FROM pages").await?.number()?, i64::try_from(ROWS)?);
    Ok(())
}

/// Spec: A3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m11_a_changed_setting_holds_after_a_reload() -> anyhow::Result<()> {
    let harness = harness().await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    for (text, bytes) in [("64MB", 64 * MIB), ("100%", CEILING_BYTES), ("50%", 96 * MIB), ("160MB", 160 * MIB)] {
        let mut settings = leader.server.settings();
        settings.set("onecopy.memory_target", text);
        leader.server.set_settings(settings);
        leader.server.reload().await?;
        let what = format!("{text} is followed");
        try_until_async(&what, async || pool.status().await, |status| status.pool_bytes == bytes).await?;
        pool.steady().await?;
    }
    Ok(())
}

/// Spec: L4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m10_dropping_the_extension_leaves_the_pool_as_it_is() -> anyhow::Result<()> {
    let harness = harness().await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    pool.resize(64 * MIB).await?;
    let present = Segment::of(leader)?.present_bytes()?;
    pool.session().run(&format!("DROP EXTENSION {EXTENSION}")).await?;
    pages::read_all(leader).await?;
    ensure!(Segment::of(leader)?.present_bytes()? <= present + 4 * MIB, "the pool has grown");
    pool.session().run(&format!("CREATE EXTENSION {EXTENSION}")).await?;
    assert_eq!(pool.steady().await?.pool_bytes, 64 * MIB);
    assert_eq!(pool.resize(CEILING_BYTES).await?, CEILING_BYTES);
    // In a schema of one's own, and moved to another one.
    pool.session()
        .run_all(&[
            "DROP EXTENSION onecopy",
            "CREATE SCHEMA one",
            "CREATE SCHEMA two",
            "CREATE EXTENSION onecopy SCHEMA one",
            "ALTER EXTENSION onecopy SET SCHEMA two",
        ])
        .await?;
    let answer = pool.session().run("SELECT pool_bytes FROM two.onecopy_memory_status").await?;
    assert_eq!(answer.number()?, i64::try_from(CEILING_BYTES)?);
    Ok(())
}

/// A database in which the extension was made before the module became newer.
///
/// Functions that an earlier version of the extension made go on working under a newer module, and are brought to its
/// version by `ALTER EXTENSION`, which `up` does only where it has started every server of the cluster.
///
/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m31_functions_of_an_earlier_version_go_on_working() -> anyhow::Result<()> {
    let harness = harness().await?;
    let pool = harness.pool().await?;
    pool.session().run_all(&["DROP EXTENSION onecopy", "CREATE EXTENSION onecopy VERSION '1.0'"]).await?;
    assert_eq!(pool.resize(64 * MIB).await?, 64 * MIB);
    assert_eq!(pool.steady().await?.pool_bytes, 64 * MIB);
    pool.session().run("ALTER EXTENSION onecopy UPDATE").await?;
    assert_eq!(pool.steady().await?.pool_bytes, 64 * MIB);
    let question = "SELECT returned_huge_bytes FROM onecopy_memory_status";
    assert_eq!(pool.session().run(question).await?.number()?, 0);
    // Who may see it is as before.
    pool.session().run_all(&["SET ROLE pg_monitor", question, "SET ROLE pg_read_all_data"]).await?;
    let refusal = pool.session().run(question).await.expect_err("it is for pg_monitor");
    assert_eq!(refusal.code, "42501", "{refusal}");
    Ok(())
}

/// A server that did not load the extension says so; dropping the extension leaves the pool as it is; it can be made
/// again, in any schema.
///
/// Spec: L4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m10_a_server_that_did_not_load_it_says_so() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, 32 * MIB).without_extension()).await?;
    let session = harness.leader().connect("plain").await?;
    session.run(&format!("CREATE EXTENSION {EXTENSION}")).await?;
    for sql in [
        "SELECT onecopy_memory_target()",
        "SELECT onecopy_memory_target('64MB')",
        "SELECT * FROM onecopy_memory_status",
        "SELECT * FROM onecopy_memory_history",
        "SELECT onecopy_memory_hit_ratio()",
        "SELECT onecopy_memory_working_set()",
        "SELECT * FROM onecopy_memory_ghost_hits()",
    ] {
        let refusal = session.run(sql).await.expect_err(sql);
        ensure!(refusal.message.contains("shared_preload_libraries"), "{refusal}");
        assert_eq!(refusal.code, "55000", "{refusal}");
    }
    session.run("SELECT 1").await?;
    Ok(())
}
