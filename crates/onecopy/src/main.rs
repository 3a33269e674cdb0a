//! The onecopy command line: one file a subcommand.

mod config;
mod detach;
mod directory;
mod down;
mod dsn;
mod exit;
mod logging;
mod progress;
mod psql;
mod router;
mod signals;
mod status;
mod up;

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
    Down(down::Down),
    Psql(psql::Psql),
    Dsn(dsn::Dsn),
    Router(router::Router),
    Config(config::Config),
}

fn main() -> ExitCode {
    let outcome = match CommandLine::parse().command {
        Command::Up(up) => up.run(),
        Command::Status(status) => status.run(),
        Command::Down(down) => down.run(),
        Command::Psql(psql) => psql.run(),
        Command::Dsn(dsn) => dsn.run(),
        Command::Router(router) => router.run(),
        Command::Config(config) => config.run(),
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
