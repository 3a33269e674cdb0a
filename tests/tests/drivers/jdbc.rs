//! The PostgreSQL JDBC driver in each of its query modes.

use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::DATABASE;

use crate::program::{command, run_well, source};

/// Where Debian puts the driver.
const DRIVER: &str = "/usr/share/java/postgresql.jar";

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jdbc_gets_right_results_in_every_query_mode() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, |_| {}).await?;
    let directory = tempfile::tempdir()?;
    let mut compiler = command("javac", &cluster);
    compiler.arg("-d").arg(directory.path()).arg(source("Jdbc.java"));
    run_well(compiler, "").await?;
    let address = cluster.router().local_address();
    let mut java = command("java", &cluster);
    // The driver's manifest names what it needs itself.
    let path = format!("{}:{DRIVER}", directory.path().display());
    java.args(["-cp", &path, "-Xmx128m", "-XX:+UseSerialGC", "Jdbc"]);
    java.arg(format!("jdbc:postgresql://{}:{}/{DATABASE}", address.ip(), address.port()));
    assert_eq!(run_well(java, "").await?, "all right\n");
    Ok(())
}
