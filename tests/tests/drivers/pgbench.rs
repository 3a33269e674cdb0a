//! pgbench in its three protocols, reading only and TPC-B-like.

use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;

use crate::program::{postgresql, run_well};

/// Transactions of each of 4 clients in one run.
const TRANSACTIONS: u32 = 100;

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pgbench_runs_in_every_protocol_and_its_sums_agree() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, |_| {}).await?;
    let mut init = postgresql("pgbench", &cluster)?;
    init.args(["-i", "-q", "-s", "1"]);
    run_well(init, "").await?;
    let session = cluster.updater("auditor").await?;
    session.run("SET onecopy.freshness = 'strict'").await?;
    let transactions = TRANSACTIONS.to_string();
    let mut updates = 0;
    for protocol in ["simple", "extended", "prepared"] {
        for script in ["select-only", "tpcb-like", "simple-update"] {
            let mut bench = postgresql("pgbench", &cluster)?;
            bench.args(["-n", "-M", protocol, "-b", script, "-c", "4", "-j", "1", "-t", &transactions]);
            bench.args(["--max-tries", "1000"]);
            let output = run_well(bench, "").await?;
            let done = format!("number of transactions actually processed: {0}/{0}", 4 * TRANSACTIONS);
            assert!(output.contains(&done), "{protocol} {script}: {output}");
            assert!(output.contains("number of failed transactions: 0 "), "{protocol} {script}: {output}");
            if script != "select-only" {
                updates += i64::from(4 * TRANSACTIONS);
            }
            assert_eq!(
                session.run("SELECT count(*) FROM pgbench_history").await?.number()?,
                updates,
                "{protocol} {script}"
            );
        }
    }
    let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history), \
         (SELECT sum(bbalance) FROM pgbench_branches) = (SELECT sum(tbalance) FROM pgbench_tellers)";
    let rows = session.run(sums).await?.rows;
    assert_eq!(rows, [[Some("t".to_owned()), Some("t".to_owned())]]);
    let status = cluster.router().status();
    assert!(status.servers.iter().all(|server| server.reads > 0), "{status:?}");
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}
