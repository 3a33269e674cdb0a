//! Random list-append histories, judged by two checkers that do not know of each other.

use onecopy_tests::checker::Level;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;
use onecopy_tests::list_append::Workload;
use onecopy_tests::verdict::judge;

/// Runs until a violation shows; each takes another seed.
const CONTROL_RUNS_MAX: u64 = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_reads_on_plain_standbys_are_not_serializable() -> anyhow::Result<()> {
    let cluster = TestCluster::without_router(2).await?;
    for seed in 1..=CONTROL_RUNS_MAX {
        let history = Workload::usual(seed).run(&cluster).await?;
        let verdict = judge(&history, Level::Serializable)?;
        println!(
            "seed {seed}: {} of {} committed, {:?}, {:?}",
            history.committed_count(),
            history.transactions.len(),
            verdict.adya.anomaly_types,
            verdict.ours
        );
        if !verdict.is_valid() {
            ensure_servers_equal(&cluster.servers).await?;
            return Ok(());
        }
    }
    panic!("no violation in {CONTROL_RUNS_MAX} runs: the workload does not provoke what it must");
}
