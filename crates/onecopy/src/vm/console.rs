//! `onecopy vm console`: what the guest writes to its console.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use onecopy_host::HostError;
use onecopy_machine::MachineError;

use super::MachineOption;

/// How often is looked whether the guest has written more.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Show what the guest has written to its console since its last start
#[derive(Debug, Args)]
pub struct Console {
    #[command(flatten)]
    machine: MachineOption,
    /// Go on until the machine ends, or until Ctrl-C
    #[arg(long)]
    follow: bool,
}

impl Console {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let name = self.machine.name()?;
        let machine = self.machine.machines()?.get(&name)?;
        let path = machine.home().console_log();
        let mut log = match machine.home().open_console_log() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(HostError::from(MachineError::DoesNotRun { name }).into());
            }
            opened => opened.with_context(|| format!("cannot open {}", path.display()))?,
        };
        loop {
            // Looked at before the log is read: what comes before its end is in the log by then.
            let runs = machine.process_id().is_some();
            copy(&mut log)?;
            if !self.follow || !runs {
                return Ok(());
            }
            std::thread::sleep(LOOK_INTERVAL);
            // Another start begins another log.
            if let (Ok(now), Ok(then)) = (std::fs::symlink_metadata(&path), log.metadata())
                && now.ino() != then.ino()
            {
                log = machine.home().open_console_log().with_context(|| format!("cannot open {}", path.display()))?;
            }
        }
    }
}

/// Copies what has come.
fn copy(log: &mut File) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    let mut buffer = [0; 16 << 10];
    loop {
        match log.read(&mut buffer).context("cannot read the console's log")? {
            0 => break,
            length => output.write_all(&buffer[..length])?,
        }
    }
    Ok(output.flush()?)
}
