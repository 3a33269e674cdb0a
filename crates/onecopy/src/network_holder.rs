//! `onecopy network-holder`: the process that passes the frames of a machine on a bridge, below the machine's keeper,
//! with the machine's `network.log` as its standard error.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use onecopy_machine::network_holder::{self, Inherited};

/// Pass the frames of a machine on a bridge
#[derive(Debug, Args)]
pub struct NetworkHolder {
    /// The machine's directory
    directory: PathBuf,
    /// The number of the interface, in the keeper that has started this
    #[arg(long)]
    tap: i32,
    /// The number of the memory file with what is held, there
    #[arg(long)]
    state: i32,
}

impl NetworkHolder {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("info");
        crate::detach::leave_session()?;
        // Rights and namespace are a thread's: there is one until both are chosen.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot begin")?;
        let inherited = Inherited { tap: self.tap, state: self.state };
        let held = runtime.block_on(network_holder::run(&self.directory, inherited));
        runtime.shutdown_background();
        Ok(held?)
    }
}
