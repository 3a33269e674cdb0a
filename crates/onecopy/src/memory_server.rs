//! `onecopy memory-server`: the process that serves a machine's memory, below the machine's keeper, with the machine's
//! `memory.log` as its standard error.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use onecopy_machine::memory_server::{self, Inherited};

/// Serve the memory of a machine
#[derive(Debug, Args)]
pub struct MemoryServer {
    /// The machine's directory
    directory: PathBuf,
    /// The number of the kernel's end of the file, in the keeper that has started this
    #[arg(long)]
    device: i32,
    /// The number of the memory file with what is kept, there
    #[arg(long)]
    state: i32,
}

impl MemoryServer {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("info");
        crate::detach::leave_session()?;
        memory_server::prepare_process()?;
        // One thread of its own, which never touches the file: see the module there.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot begin")?;
        let inherited = Inherited { device: self.device, state: self.state };
        let served = runtime.block_on(memory_server::run(&self.directory, inherited));
        // What a client has asked for and nobody waits for does not keep it here.
        runtime.shutdown_background();
        Ok(served?)
    }
}
