//! The closed-batch invariant under load.

use onecopy_tests::closed_batch::ClosedBatches;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_reports_on_plain_standbys_miss_receipts() -> anyhow::Result<()> {
    let cluster = TestCluster::without_router(2).await?;
    let findings = ClosedBatches::usual(1).run(&cluster).await?;
    println!("{findings:?}");
    assert!(findings.wrong_count() > 0, "{findings:?}");
    assert_eq!(findings.wrong.get("leader"), None, "{findings:?}");
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}
