//! The router's memory: what a connection costs, what long messages and long loads take, and what is given back after
//! them; beside PgBouncer.
//!
//! Each proxy begins anew in each round and gets the same loads one after the other, so that what one leaves behind is
//! in what the next begins with.

mod measure;
mod report;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::cluster::Cluster;
use crate::head::Head;
use crate::interruption::until_interrupted;
use crate::proxy::Proxy;
use crate::router::{FOLLOWERS, onecopy_program};
use measure::{Measured, measure};
use report::Report;

/// Connections that are opened and left idle.
pub const CONNECTIONS: usize = 200;

/// Options of `onecopy-bench router-memory`.
#[derive(Debug, Clone, clap::Args)]
pub struct RouterMemoryOptions {
    /// A short form of a minute; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Rounds [default: 3, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Length of a load by COPY, in MiB [default: 10240, quick: 512]
    #[arg(long, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    copy_mib: Option<u32>,
    /// Directory for router-memory.md and router-memory.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
    /// The program to measure [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    onecopy: Option<PathBuf>,
}

/// Runs the experiment.
///
/// # Errors
/// Servers or proxies cannot be started, or nothing could be measured.
pub async fn run(options: &RouterMemoryOptions) -> anyhow::Result<()> {
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 });
    let copy_mib = options.copy_mib.unwrap_or(if options.quick { 512 } else { 10_240 });
    let command =
        format!("cargo run --release -p onecopy-bench -- router-memory --rounds {rounds} --copy-mib {copy_mib}");
    let mut report = Report::new(Head::new("router-memory", command, Vec::new()), copy_mib);
    let program = onecopy_program(options.onecopy.as_deref())?;
    // The account of the servers must be able to pass; each of them closes its own directory.
    let directory = tempfile::Builder::new()
        .prefix("onecopy-bench-")
        .permissions(Permissions::from_mode(0o711))
        .tempdir()
        .context("cannot make a directory for the servers")?;
    let mut cluster = Cluster::new(directory.path())?;
    let measuring = async {
        cluster.fill(1, FOLLOWERS).await?;
        measure::make_table(&cluster).await?;
        rounds_of(&mut report, rounds, &cluster, directory.path(), &program).await
    };
    let measured = until_interrupted(measuring).await;
    cluster.stop().await?;
    measured?;
    report.head.end();
    report.print(options.json)?;
    if let Some(directory) = options.output.as_deref().or((!options.quick).then_some(Path::new("docs/results"))) {
        report.write(directory)?;
    }
    ensure!(report.head.failures.is_empty(), "not all was measured: {:?}", report.head.failures);
    Ok(())
}

async fn rounds_of(
    report: &mut Report,
    rounds: u32,
    cluster: &Cluster,
    directory: &Path,
    program: &Path,
) -> anyhow::Result<()> {
    for round in 1..=rounds {
        for name in ["pgbouncer", "onecopy"] {
            let home = directory.join(format!("{name}-{round}"));
            cluster.user.create_directory(&home)?;
            let proxy = match name {
                "pgbouncer" => Proxy::pgbouncer(cluster, &home, CONNECTIONS).await?,
                _ => Proxy::onecopy(cluster, &home, program).await?,
            };
            if round == 1 {
                report.head.versions.push(proxy.version.clone());
            }
            let measured = measure(&proxy, cluster, report.copy_mib).await;
            if let Some(figures) = report.head.keep(&format!("{name}, round {round}"), measured) {
                eprintln!("onecopy-bench: round {round}, {name}: {figures:?}");
                report.measured.push(Measured { proxy: proxy.name, round, figures });
            }
        }
    }
    Ok(())
}
