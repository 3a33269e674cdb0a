//! The router's price and gain: pgbench directly to the leader, through PgBouncer and through Onecopy, interleaved.
//!
//! One round runs every workload over every proxy, neighbours in time next to each other, so that what the machine does
//! beside hits all of them; a ratio is always formed within one round.

pub mod measurement;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use measurement::{Gates, Measurement, WORKLOADS};

use crate::cluster::Cluster;
use crate::exposition::{self, Samples};
use crate::head::Head;
use crate::interruption::until_interrupted;
use crate::pgbench::{Protocol, Run, Script};
use crate::proxy::Proxy;
use crate::router_report::Report;

/// Followers behind the leader.
pub const FOLLOWERS: usize = 2;

/// How long each proxy is warmed up with reads and with updates before the first round, in seconds.
const WARM_UP_SECONDS: u32 = 1;

/// How often the age of the epoch is looked at: seldom enough not to show in the proxy's processor time.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Options of `onecopy-bench router`.
#[derive(Debug, Clone, clap::Args)]
pub struct RouterOptions {
    /// A short form of about two minutes; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Connections of pgbench
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=50))]
    clients: u16,
    /// Length of one run [default: 5, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: Option<u32>,
    /// Rounds [default: 5, quick: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pairs: Option<u32>,
    /// pgbench's scale: 100 000 accounts, 10 tellers and one branch each
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    scale: u32,
    /// Directory for router.md and router.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
    /// The program to measure [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    onecopy: Option<PathBuf>,
    /// Leave Onecopy out: how PgBouncer does on this machine
    #[arg(long, conflicts_with = "onecopy")]
    without_onecopy: bool,
}

impl RouterOptions {
    fn seconds(&self) -> u32 {
        self.seconds.unwrap_or(if self.quick { 1 } else { 5 })
    }

    fn pairs(&self) -> u32 {
        self.pairs.unwrap_or(if self.quick { 3 } else { 5 })
    }

    fn output(&self) -> Option<&Path> {
        self.output.as_deref().or((!self.quick).then_some(Path::new("docs/results")))
    }

    /// The command that makes the same figures.
    fn command(&self) -> String {
        format!(
            "cargo run --release -p onecopy-bench -- router --clients {} --seconds {} --pairs {} --scale {}{}",
            self.clients,
            self.seconds(),
            self.pairs(),
            self.scale,
            if self.without_onecopy { " --without-onecopy" } else { "" }
        )
    }

    fn run(&self, script: Script, protocol: Protocol) -> Run {
        Run { script, protocol, clients: usize::from(self.clients), seconds: self.seconds() }
    }
}

/// Runs the experiment and reports it.
///
/// # Errors
/// When servers or proxies cannot be started or the report not be written. Runs that fail are reported, left out of the
/// figures, and make the experiment fail at its end.
pub async fn run(options: RouterOptions) -> anyhow::Result<()> {
    // The account of the servers must be able to pass; each of them closes its own directory.
    let directory = tempfile::Builder::new()
        .prefix("onecopy-bench-")
        .permissions(Permissions::from_mode(0o711))
        .tempdir()
        .context("cannot make a directory for the servers")?;
    let mut head = Head::new("router", options.command(), Vec::new());
    let onecopy = if options.without_onecopy { None } else { Some(onecopy_program(options.onecopy.as_deref())?) };
    let mut cluster = Cluster::new(directory.path())?;
    let measuring = fill_and_measure(&options, onecopy.as_deref(), &mut cluster, directory.path(), &mut head);
    let outcome = until_interrupted(measuring).await;
    cluster.stop().await?;
    let measurements = outcome?;
    head.end();
    let report = Report {
        head,
        clients: options.clients,
        seconds: options.seconds(),
        pairs: options.pairs(),
        scale: options.scale,
        followers: FOLLOWERS,
        measurements,
    };
    if options.json {
        println!("{}", serde_json::to_string(&report.to_json())?);
    } else {
        println!("{}", report.to_text());
    }
    if let Some(output) = options.output() {
        report.write(output)?;
        say(format_args!("wrote {0}/router.md and {0}/router.png", output.display()));
    }
    if !report.head.failures.is_empty() {
        bail!("{} runs failed, first: {}", report.head.failures.len(), report.head.failures[0]);
    }
    Ok(())
}

async fn fill_and_measure(
    options: &RouterOptions,
    onecopy: Option<&Path>,
    cluster: &mut Cluster,
    directory: &Path,
    head: &mut Head,
) -> anyhow::Result<Vec<Measurement>> {
    say(format_args!("making a leader and {FOLLOWERS} followers, scale {}", options.scale));
    cluster.fill(options.scale, FOLLOWERS).await?;
    measure(options, onecopy, cluster, directory, head).await
}

async fn measure(
    options: &RouterOptions,
    onecopy: Option<&Path>,
    cluster: &Cluster,
    directory: &Path,
    head: &mut Head,
) -> anyhow::Result<Vec<Measurement>> {
    let clients = usize::from(options.clients);
    let mut proxies = vec![Proxy::direct(cluster), Proxy::pgbouncer(cluster, directory, clients).await?];
    if let Some(program) = onecopy {
        proxies.push(Proxy::onecopy(cluster, directory, program).await?);
    }
    let pgbench = cluster.binaries.program("pgbench");
    head.versions = proxies.iter().map(|proxy| proxy.version.clone()).collect();
    for proxy in &proxies {
        for script in [Script::SelectOnly, Script::TpcbLike] {
            let warm_up = Run { seconds: WARM_UP_SECONDS, ..options.run(script, Protocol::Simple) };
            let warmed_up = warm_up.against(&pgbench, proxy.port).await.map_err(|error| with_log(error, proxy));
            let _ = head.keep(&format!("{}, warming up", proxy.name), warmed_up);
        }
    }
    let mut measurements = Vec::new();
    for round in 1..=options.pairs() {
        for (script, protocol) in WORKLOADS {
            for proxy in proxies.iter().filter(|proxy| proxy.protocols.contains(&protocol)) {
                let measured = measure_once(options.run(script, protocol), proxy, cluster, &pgbench, round).await;
                let measured = measured.map_err(|error| with_log(error, proxy));
                if let Some(measurement) = head.keep(&format!("{}, round {round}", proxy.name), measured) {
                    say_measured(&measurement, options.pairs());
                    measurements.push(measurement);
                }
            }
        }
    }
    Ok(measurements)
}

async fn measure_once(
    run: Run,
    proxy: &Proxy,
    cluster: &Cluster,
    pgbench: &Path,
    round: u32,
) -> anyhow::Result<Measurement> {
    let metrics_before = metrics(proxy).await?;
    let (proxy_before, servers_before) = (proxy.processor_time()?, cluster.processor_time()?);
    let start = Instant::now();
    let mut epoch_ages_seconds = Vec::new();
    let counts = tokio::select! {
        counts = run.against(pgbench, proxy.port) => counts?,
        error = watch_epochs(proxy, &mut epoch_ages_seconds) => return Err(error),
    };
    let wall = start.elapsed();
    let (proxy_after, servers_after) = (proxy.processor_time()?, cluster.processor_time()?);
    let metrics_after = metrics(proxy).await?;
    if counts.transactions == 0 {
        bail!("not one transaction ended well");
    }
    let per_transaction = |time: Duration| time.as_secs_f64() * 1e6 / counts.transactions as f64;
    Ok(Measurement {
        script: run.script,
        protocol: run.protocol,
        proxy: proxy.name,
        round,
        counts,
        proxy_cpu_us: proxy_before
            .zip(proxy_after)
            .map(|(before, after)| per_transaction(after.saturating_sub(before))),
        servers_cpu_us: per_transaction(servers_after.saturating_sub(servers_before)),
        gates: metrics_before
            .zip(metrics_after)
            .map(|(before, after)| Gates::between(&before, &after, &epoch_ages_seconds, wall)),
    })
}

/// Looks at the age of the router's epoch again and again; ends only by an error.
async fn watch_epochs(proxy: &Proxy, ages_seconds: &mut Vec<f64>) -> anyhow::Error {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        match metrics(proxy).await {
            Ok(samples) => {
                ages_seconds.extend(samples.and_then(|samples| samples.largest("onecopy_epoch_age_seconds")))
            }
            Err(error) => return error,
        }
    }
}

async fn metrics(proxy: &Proxy) -> anyhow::Result<Option<Samples>> {
    match proxy.metrics {
        Some(address) => Ok(Some(exposition::fetch(address).await?)),
        None => Ok(None),
    }
}

/// The program to measure: the one that was asked for, or that beside this one.
///
/// # Errors
/// It is not there.
pub fn onecopy_program(asked_for: Option<&Path>) -> anyhow::Result<PathBuf> {
    let program = match asked_for {
        Some(program) => program.to_owned(),
        None => std::env::current_exe()?.with_file_name("onecopy"),
    };
    if !program.exists() {
        bail!("{} does not exist: run `cargo build --release -p onecopy`, or give --onecopy PATH", program.display());
    }
    Ok(program)
}

/// The error of a run, with the end of the proxy's log.
fn with_log(error: anyhow::Error, proxy: &Proxy) -> anyhow::Error {
    let words = proxy.last_words();
    if words.is_empty() { error } else { anyhow!("{error:#}; its log ends: {words}") }
}

/// Progress goes to standard error: standard output is the report's.
fn say(message: std::fmt::Arguments<'_>) {
    eprintln!("onecopy-bench: {message}");
}

fn say_measured(measurement: &Measurement, rounds: u32) {
    say(format_args!(
        "round {}/{rounds} {:<11} {:<8} {:<9} {:>9.0} tps{}",
        measurement.round,
        measurement.script.name(),
        measurement.protocol.name(),
        measurement.proxy,
        measurement.counts.transactions_per_second,
        measurement.proxy_cpu_us.map_or(String::new(), |cpu| format!(", proxy {cpu:.1} us")),
    ));
}
