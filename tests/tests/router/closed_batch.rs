//! The closed-batch invariant under load.

use onecopy_router::config::RouterSettings;
use onecopy_tests::closed_batch::{ClosedBatches, Findings};
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;

/// A control runs until a wrong report shows; each run takes another seed.
const CONTROL_RUNS_MAX: u64 = 10;

async fn findings(cluster: &TestCluster, seed: u64) -> anyhow::Result<Findings> {
    let findings = ClosedBatches::usual(seed).run(cluster).await?;
    println!("{findings:?}");
    ensure_servers_equal(&cluster.servers).await?;
    assert!(findings.reports >= 2000 && findings.batches > 50 && findings.receipts > 50, "{findings:?}");
    Ok(findings)
}

/// Runs until a report is wrong, and gives back what that run found.
async fn must_be_wrong(cluster: &TestCluster) -> anyhow::Result<Findings> {
    let seed = onecopy_testing::seed();
    for seed in (0..CONTROL_RUNS_MAX).map(|run| seed.wrapping_add(run)) {
        let findings = findings(cluster, seed).await?;
        if findings.wrong_count() > 0 {
            return Ok(findings);
        }
        cluster.updater("control").await?.run("DROP TABLE cfg, control, receipts").await?;
    }
    panic!("no wrong report in {CONTROL_RUNS_MAX} runs: the load does not provoke what it must");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_reports_on_plain_standbys_miss_receipts() -> anyhow::Result<()> {
    let findings = must_be_wrong(&TestCluster::without_router(2).await?).await?;
    assert_eq!(findings.wrong.get("leader"), None, "{findings:?}");
    Ok(())
}

/// The sum of a batch that a report called closed never changes, under load, on any server.
///
/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r10_no_report_of_a_closed_batch_is_ever_wrong() -> anyhow::Result<()> {
    let seed = onecopy_testing::seed();
    for freshness in ["session", "strict"] {
        let freshness = freshness.parse()?;
        let cluster = TestCluster::with_router(2, |settings| settings.freshness = freshness).await?;
        let findings = findings(&cluster, seed).await?;
        println!("{:?}", cluster.router().status());
        assert_eq!(findings.wrong_count(), 0, "{freshness}: {findings:?}");
    }
    Ok(())
}

/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r10_without_epochs_reports_are_wrong() -> anyhow::Result<()> {
    let change = |settings: &mut RouterSettings| settings.unsafe_without_epochs = true;
    must_be_wrong(&TestCluster::with_router(2, change).await?).await.map(drop)
}

/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r10_without_the_tripwire_reports_are_wrong() -> anyhow::Result<()> {
    let change = |settings: &mut RouterSettings| settings.unsafe_without_tripwire = true;
    must_be_wrong(&TestCluster::with_router(2, change).await?).await.map(drop)
}
