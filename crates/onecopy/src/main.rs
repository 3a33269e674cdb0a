//! The onecopy command line: one file a subcommand.

// A reader that is gone must not end a daemon: see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod clone;
mod clone_hydrator;
mod clone_keeper;
mod cloning;
mod config;
mod detach;
mod directory;
mod disk;
#[cfg(test)]
mod documentation;
mod down;
mod dsn;
mod exit;
mod host;
mod logging;
mod machine_keeper;
mod machines;
mod memory;
mod memory_server;
mod network_holder;
mod output;
mod progress;
mod psql;
mod reinit;
mod router;
mod scale;
mod signals;
mod status;
mod up;
mod vm;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A group of ordinary PostgreSQL servers behaves as one serializable database.
#[derive(Debug, Parser)]
#[command(name = "onecopy", version, about, after_help = exit::HELP)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Up(up::Up),
    Status(status::Status),
    Clone(clone::Clone),
    Scale(scale::Scale),
    Reinit(reinit::Reinit),
    Memory(memory::Memory),
    Vm(vm::Vm),
    Disk(disk::Disk),
    Down(down::Down),
    Psql(psql::Psql),
    Dsn(dsn::Dsn),
    Router(router::Router),
    Host(host::Host),
    Config(config::Config),
    #[command(hide = true)]
    CloneKeeper(clone_keeper::CloneKeeper),
    #[command(hide = true)]
    CloneHydrator(clone_hydrator::CloneHydrator),
    #[command(hide = true)]
    MachineKeeper(machine_keeper::MachineKeeper),
    #[command(hide = true)]
    DiskServer(disk::DiskServer),
    #[command(hide = true)]
    SnapshotServer(disk::SnapshotServer),
    #[command(hide = true)]
    MemoryServer(memory_server::MemoryServer),
    #[command(hide = true)]
    NetworkHolder(network_holder::NetworkHolder),
}

fn main() -> ExitCode {
    let outcome = match CommandLine::parse().command {
        Command::Up(up) => up.run(),
        Command::Status(status) => status.run(),
        Command::Clone(clone) => clone.run(),
        Command::Scale(scale) => scale.run(),
        Command::Reinit(reinit) => reinit.run(),
        Command::Memory(memory) => memory.run(),
        Command::Vm(vm) => vm.run(),
        Command::Disk(disk) => disk.run(),
        Command::Down(down) => down.run(),
        Command::Psql(psql) => psql.run(),
        Command::Dsn(dsn) => dsn.run(),
        Command::Router(router) => router.run(),
        Command::Host(host) => host.run(),
        Command::Config(config) => config.run(),
        Command::CloneKeeper(keeper) => keeper.run(),
        Command::CloneHydrator(hydrator) => hydrator.run(),
        Command::MachineKeeper(keeper) => keeper.run(),
        Command::DiskServer(server) => server.run(),
        Command::SnapshotServer(server) => server.run(),
        Command::MemoryServer(server) => server.run(),
        Command::NetworkHolder(holder) => holder.run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            exit::tell(&error);
            exit::code(&error)
        }
    }
}

/// Runs one command's asynchronous part.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(work)
}
