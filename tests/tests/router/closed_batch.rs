//! The closed-batch invariant under load.

use onecopy_router::config::RouterSettings;
use onecopy_tests::closed_batch::{ClosedBatches, Findings};
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;

async fn findings(cluster: &TestCluster) -> anyhow::Result<Findings> {
    let findings = ClosedBatches::usual(1).run(cluster).await?;
    println!("{findings:?}");
    ensure_servers_equal(&cluster.servers).await?;
    assert!(findings.reports >= 2000 && findings.batches > 50 && findings.receipts > 50, "{findings:?}");
    Ok(findings)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_reports_on_plain_standbys_miss_receipts() -> anyhow::Result<()> {
    let findings = findings(&TestCluster::without_router(2).await?).await?;
    assert!(findings.wrong_count() > 0, "{findings:?}");
    assert_eq!(findings.wrong.get("leader"), None, "{findings:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r10_no_report_of_a_closed_batch_is_ever_wrong() -> anyhow::Result<()> {
    for freshness in ["session", "strict"] {
        let freshness = freshness.parse()?;
        let cluster = TestCluster::with_router(2, |settings| settings.freshness = freshness).await?;
        let findings = findings(&cluster).await?;
        println!("{:?}", cluster.router().status());
        assert_eq!(findings.wrong_count(), 0, "{freshness}: {findings:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r10_without_epochs_reports_are_wrong() -> anyhow::Result<()> {
    let change = |settings: &mut RouterSettings| settings.unsafe_without_epochs = true;
    let findings = findings(&TestCluster::with_router(2, change).await?).await?;
    assert!(findings.wrong_count() > 0, "{findings:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r10_without_the_tripwire_reports_are_wrong() -> anyhow::Result<()> {
    let change = |settings: &mut RouterSettings| settings.unsafe_without_tripwire = true;
    let findings = findings(&TestCluster::with_router(2, change).await?).await?;
    assert!(findings.wrong_count() > 0, "{findings:?}");
    Ok(())
}
