//! `onecopy vm`: virtual machines of a directory.

mod checkpoint;
mod console;
mod create;
mod delete;
mod exec;
mod fork;
mod list;
mod migrate;
mod pause;
mod protect;
mod start;
mod stop;

use clap::{Args, Subcommand};
use onecopy_host::machines::Machines;
use onecopy_machine::MachineName;

use crate::directory::DirectoryOption;

/// Make virtual machines, start and stop them, and work in them
///
/// They lie in machines/ of the directory, beside those of its cluster, which `onecopy up --runtime vm` makes and looks
/// after.
#[derive(Debug, Args)]
pub struct Vm {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(create::Create),
    List(list::List),
    Start(start::Start),
    Pause(pause::Pause),
    Resume(pause::Resume),
    Checkpoint(checkpoint::Checkpoint),
    Checkpoints(checkpoint::Checkpoints),
    Forget(checkpoint::Forget),
    Restore(checkpoint::Restore),
    Fork(fork::Fork),
    Migrate(migrate::Migrate),
    Protect(protect::Protect),
    Unprotect(protect::Unprotect),
    Failover(protect::Failover),
    Stop(stop::Stop),
    Console(console::Console),
    Exec(exec::Exec),
    Delete(delete::Delete),
}

impl Vm {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        match &self.action {
            Action::Create(create) => create.run(),
            Action::List(list) => list.run(),
            Action::Start(start) => start.run(),
            Action::Pause(pause) => pause.run(),
            Action::Resume(resume) => resume.run(),
            Action::Checkpoint(checkpoint) => checkpoint.run(),
            Action::Checkpoints(checkpoints) => checkpoints.run(),
            Action::Forget(forget) => forget.run(),
            Action::Restore(restore) => restore.run(),
            Action::Fork(fork) => fork.run(),
            Action::Migrate(migrate) => migrate.run(),
            Action::Protect(protect) => protect.run(),
            Action::Unprotect(unprotect) => unprotect.run(),
            Action::Failover(failover) => failover.run(),
            Action::Stop(stop) => stop.run(),
            Action::Console(console) => console.run(),
            Action::Exec(exec) => exec.run(),
            Action::Delete(delete) => delete.run(),
        }
    }
}

/// Which machine is meant.
#[derive(Debug, Args)]
pub struct MachineOption {
    /// The machine's name
    name: String,
    #[command(flatten)]
    directory: DirectoryOption,
}

impl MachineOption {
    /// Its name.
    pub fn name(&self) -> anyhow::Result<MachineName> {
        Ok(self.name.parse()?)
    }

    /// The machines among which it is.
    pub fn machines(&self) -> anyhow::Result<Machines> {
        Ok(Machines::of(self.directory.resolve()?)?)
    }
}
