//! psycopg 3: autocommit, transactions, nested ones, server-side cursors, pipelines, COPY, conflicts, cancel, notify.

use onecopy_tests::cluster::TestCluster;

use crate::program::{command, run_well, source};

/// The system's Python, for which the driver is packaged.
const PYTHON: &str = "/usr/bin/python3";

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn psycopg_gets_right_results_in_every_mode() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, |_| {}).await?;
    let mut python = command(PYTHON, &cluster);
    python.arg(source("psycopg_client.py"));
    assert_eq!(run_well(python, "").await?, "all right\n");
    Ok(())
}
