//! `onecopy memory`: the memory of this host's servers, looked at and shared out.

mod agent;
mod auto;
mod daemon;
mod history;
mod set;
mod status;

use clap::{Args, Subcommand};

/// Look at the memory of this host's database servers, and share it out
///
/// A server's pool is what it may use of its ceiling (shared_buffers, innodb_buffer_pool_size) now. By itself the agent
/// gives each server what it needs of the budget, and gives memory back when the host wants it. `onecopy up` runs the
/// agent for its servers.
#[derive(Debug, Args)]
pub struct Memory {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Status(status::Status),
    Set(set::Set),
    Auto(auto::Auto),
    History(history::History),
    Agent(agent::Agent),
}

impl Memory {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        match &self.action {
            Action::Status(status) => status.run(),
            Action::Set(set) => set.run(),
            Action::Auto(auto) => auto.run(),
            Action::History(history) => history.run(),
            Action::Agent(agent) => agent.run(),
        }
    }
}
