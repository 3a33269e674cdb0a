//! The papers' experiments, each one command: `onecopy-bench NAME`.

mod checkpoint;
mod clone;
mod cluster;
mod demo;
mod disk;
mod exposition;
mod fork;
mod guests;
mod head;
mod interruption;
mod load;
mod machine;
mod memory;
mod migration;
mod pgbench;
mod plot;
mod process_cpu;
mod process_memory;
mod protection;
mod proxy;
mod router;
mod router_memory;
mod router_report;
mod scale;
mod statistics;
mod two_hosts;
mod virtual_disk;

use std::process::ExitCode;

use clap::Parser;
use interruption::until_interrupted;

/// The experiments.
#[derive(Debug, Parser)]
#[command(name = "onecopy-bench", version, about = "Measures Onecopy against what people use today")]
enum Experiment {
    /// pgbench directly, through PgBouncer and through Onecopy's router, interleaved.
    Router(router::RouterOptions),
    /// The router's memory: connections, long messages and long loads, against PgBouncer.
    RouterMemory(router_memory::RouterMemoryOptions),
    /// Clones by every way: how soon they answer, are whole, are as fast as their source, and what that costs it.
    Clone(clone::CloneOptions),
    /// Memory given back and taken again: throughput under a squeeze, queries after it, and how long it takes.
    Memory(memory::MemoryOptions),
    /// Disks of virtual machines: our NBD server and vhost-user-blk back end against QEMU's own, without a guest and in
    /// one: requests a second, processor time.
    Disk(virtual_disk::DiskOptions),
    /// Checkpoints of a machine: how long it stands, and what they cost; how soon it goes on after a restore.
    Checkpoint(checkpoint::CheckpointOptions),
    /// Forks of a machine: how soon they answer, how fast they are, and what memory is their own.
    Fork(fork::ForkOptions),
    /// A cluster in machines that grows under load, by forks and by base backups: how soon, how fast, how much memory.
    Scale(scale::ScaleOptions),
    /// A machine that goes to another host: seconds, bytes and pause, against QEMU's own migration.
    Migration(migration::MigrationOptions),
    /// A machine that another host protects: what that costs, and how soon it goes on when it dies.
    Protection(protection::ProtectionOptions),
    #[command(hide = true)]
    DiskServer(virtual_disk::ServeOptions),
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
    if matches!(experiment, Experiment::Protection(_)) {
        // Before there are other threads: they are to be in it, too.
        protection::enter_network()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        match experiment {
            Experiment::Router(options) => router::run(options).await,
            Experiment::RouterMemory(options) => router_memory::run(&options).await,
            Experiment::Clone(options) => until_interrupted(clone::run(options)).await,
            Experiment::Memory(options) => until_interrupted(memory::run(options)).await,
            Experiment::Disk(options) => until_interrupted(virtual_disk::run(&options)).await,
            Experiment::Checkpoint(options) => until_interrupted(checkpoint::run(&options)).await,
            Experiment::Fork(options) => until_interrupted(fork::run(&options)).await,
            Experiment::Scale(options) => until_interrupted(scale::run(&options)).await,
            Experiment::Migration(options) => until_interrupted(migration::run(&options)).await,
            Experiment::Protection(options) => until_interrupted(protection::run(&options)).await,
            Experiment::DiskServer(options) => virtual_disk::serve(&options),
            Experiment::Demo(options) => demo::run(options).await,
        }
    })
}
