//! `onecopy-bench demo`: the main job on real input, for whoever sees Onecopy for the first time.
//!
//! It makes a cluster as a user does, opens a web shop on it, lets customers in, plays an anomaly without the router
//! and through it, and checks the shop's books. Every line that claims something is the result of a check, and the exit
//! code tells whether all of them held.

/// Prints a line. Who no longer reads does not stop the demonstration: its exit code still counts.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

mod anomaly;
mod claims;
mod cluster;
mod customer;
mod invariants;
mod load;
mod retry;
mod shop;

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, anyhow, bail};

use claims::{Claims, grouped};
use cluster::Cluster;
use load::Load;

use crate::interruption::Interruption;

/// Followers behind the leader.
const FOLLOWERS: usize = 2;

/// Options of `onecopy-bench demo`.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoOptions {
    /// How long customers come
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Customers at a time, each on a connection of its own
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=50))]
    clients: u16,
    /// Leave the cluster running, to try things on it
    #[arg(long)]
    keep: bool,
    /// The program to show [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    onecopy: Option<PathBuf>,
}

/// Runs the demonstration. Whatever happens, the cluster is stopped and its directory removed, unless it is to be kept.
///
/// # Errors
/// When something fails, a claim does not hold, or somebody interrupts it.
pub async fn run(options: DemoOptions) -> anyhow::Result<()> {
    let started_at = Instant::now();
    let mut interruption = Interruption::listen()?;
    let mut cluster = Cluster::new(options.onecopy.as_deref())?;
    let mut claims = Claims::default();
    tokio::select! {
        played = play(&options, &mut cluster, &mut claims) => played?,
        () = interruption.received() => {
            // Not `eprintln!`: after a hang-up nobody may be there to read it.
            let _ = writeln!(std::io::stderr(), "onecopy-bench: stopping the cluster");
            drop(cluster);
            return Err(anyhow!("interrupted"));
        }
    }
    conclude(options.keep, cluster, &claims).await?;
    say!("Done in {} s.", started_at.elapsed().as_secs());
    match claims.failed() {
        [] => Ok(()),
        failed => bail!("{} of {} checks failed: {}", failed.len(), claims.held() + failed.len(), failed.join("; ")),
    }
}

async fn play(options: &DemoOptions, cluster: &mut Cluster, claims: &mut Claims) -> anyhow::Result<()> {
    heading(1, "A leader, two followers and a router: what you would type");
    cluster.up(FOLLOWERS).await?;
    let servers: Vec<String> = cluster.status().await?.servers.into_iter().map(|server| server.name).collect();

    heading(2, "A web shop, loaded through the router like any PostgreSQL");
    cluster.connect("postgres").await?.batch_execute(&format!("CREATE DATABASE {}", shop::DATABASE)).await?;
    let filling_since = Instant::now();
    let rows = shop::fill(&cluster.connect(shop::DATABASE).await?).await.context("cannot fill the shop")?;
    let tables = shop::tables().collect::<Vec<_>>().join(", ");
    say!("  {} rows in {:.1} s: {tables}", grouped(rows), filling_since.elapsed().as_secs_f64());

    heading(3, &format!("{} customers for {} s, and on each server an auditor", options.clients, options.seconds));
    say!("  Updates run on the leader; reads run on all servers, each at an epoch that is the same on every server.");
    say!("  A retry is a transaction that SERIALIZABLE has refused (40001) and that was run again.\n");
    let load = Load { clients: options.clients, seconds: options.seconds };
    let placed = load::run(load, cluster, claims).await?;

    heading(4, "A closed batch must not change: plain standbys against Onecopy, same statements, same order");
    say!(
        "  Receipts are booked into the open batch; once a batch is closed and reported, its sum must stay as it is.\n"
    );
    anomaly::show(cluster, &servers, claims).await.context("cannot play the closed batch")?;

    heading(5, "The shop's books, read on every server");
    invariants::check(cluster, &servers, placed, claims).await.context("cannot check the shop")
}

/// Sums up, says what to try next, and ends or keeps the cluster.
async fn conclude(keep: bool, cluster: Cluster, claims: &Claims) -> anyhow::Result<()> {
    heading(6, "Summary");
    let checks = claims.held() + claims.failed().len();
    say!("  {} of {checks} checks held.", claims.held());
    if claims.failed().is_empty() {
        say!("  Clients used one port and saw one serializable database; three ordinary PostgreSQL servers answered.");
    }
    say!();
    if keep {
        say!("The cluster goes on. Use it, and stop it:");
        say!("  {}      then \\c {}", cluster.command_line("psql"), shop::DATABASE);
        say!("  {} --watch", cluster.command_line("status"));
        say!("  {} && rm -r {}", cluster.command_line("down"), cluster.directory().display());
        say!();
        cluster.keep();
    } else {
        say!("Try next:");
        say!("  make demo DEMO=--keep              the same, and the cluster stays for you to use");
        say!("  make demo DEMO='--clients 32'      more customers");
        say!("  onecopy up                         a cluster of your own; docs/guide says what it can do");
        say!();
        cluster.down().await?;
        say!("The cluster of this demonstration is stopped and its directory is removed.");
    }
    Ok(())
}

fn heading(number: u32, text: &str) {
    say!("\n{number}. {text}\n");
}
