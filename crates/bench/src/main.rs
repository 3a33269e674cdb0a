//! The papers' experiments, each one command: `onecopy-bench NAME`.

mod cluster;
mod demo;
mod exposition;
mod machine;
mod pgbench;
mod plot;
mod process_cpu;
mod proxy;
mod router;
mod router_report;
mod statistics;

use std::process::ExitCode;

use clap::Parser;

/// The experiments.
#[derive(Debug, Parser)]
#[command(name = "onecopy-bench", version, about = "Measures Onecopy against what people use today")]
enum Experiment {
    /// pgbench directly, through PgBouncer and through Onecopy's router, interleaved.
    Router(router::RouterOptions),
    /// A cluster with two followers, a web shop's load, and an anomaly that does not happen.
    Demo(demo::DemoOptions),
}

fn main() -> ExitCode {
    let experiment = Experiment::parse();
    match run(experiment) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("onecopy-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(experiment: Experiment) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        match experiment {
            Experiment::Router(options) => router::run(options).await,
            Experiment::Demo(options) => demo::run(options).await,
        }
    })
}
