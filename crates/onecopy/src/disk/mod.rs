//! `onecopy disk`: disks of virtual machines, made, looked at and served.

pub mod amount;
mod check;
mod copying;
mod create;
mod export;
mod info;
mod limit;
mod page;
mod place;
mod serve;
mod server;
mod snapshot;
mod snapshot_server;
mod stop;

use clap::{Args, Subcommand};

pub use server::DiskServer;
pub use snapshot_server::SnapshotServer;

/// Make, look at and serve disks of virtual machines
///
/// A disk is a directory. It may lie over a base, whose blocks it shows where nothing was written, and keeps snapshots.
/// Each command works on a disk at rest and on one that is being served.
#[derive(Debug, Args)]
pub struct Disk {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(create::Create),
    Info(info::Info),
    Check(check::Check),
    Snapshot(snapshot::Snapshot),
    Export(export::Export),
    Serve(serve::Serve),
    Limit(limit::Limit),
    Stop(stop::Stop),
}

impl Disk {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        match &self.action {
            Action::Create(create) => create.run(),
            Action::Info(info) => info.run(),
            Action::Check(check) => check.run(),
            Action::Snapshot(snapshot) => snapshot.run(),
            Action::Export(export) => export.run(),
            Action::Serve(serve) => serve.run(),
            Action::Limit(limit) => limit.run(),
            Action::Stop(stop) => stop.run(),
        }
    }
}
