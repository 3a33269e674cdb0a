//! `onecopy vm exec`: a program runs in the guest, through the guest's agent; no network and no login are needed.

use std::io::{IsTerminal, Read, Write};
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use super::MachineOption;
use crate::exit::GuestFailed;

/// As much input as one line to the agent takes, in base64 and with its envelope.
const INPUT_BYTES_MAX: u64 = 2 << 20;

/// What a shell gives as the status of a program that a signal has ended.
const SIGNAL_STATUS: i32 = 128;

/// Run a program in the guest; its output, its complaints and its exit code are this command's
#[derive(Debug, Args)]
pub struct Exec {
    #[command(flatten)]
    machine: MachineOption,
    /// The guest's user [default: root]
    #[arg(long)]
    user: Option<String>,
    /// How long it may take, in seconds; then it is killed
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 3600,
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    timeout: u64,
    /// The program and its arguments, after `--`; it reads this command's standard input where that is no terminal
    #[arg(last = true, required = true)]
    argv: Vec<String>,
}

impl Exec {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        machines.get(&name)?;
        let stdin = input()?;
        let timeout = Duration::from_secs(self.timeout);
        let executed = crate::block_on(async {
            Ok(machines.execute(&name, self.argv.clone(), self.user.clone(), stdin, timeout).await?)
        })?;
        std::io::stdout().write_all(&executed.stdout.0)?;
        std::io::stderr().write_all(&executed.stderr.0)?;
        if executed.truncated {
            crate::output::note("it wrote more than is passed on; let it write into a file");
        }
        let status = executed.status.unwrap_or_else(|| SIGNAL_STATUS + executed.signal.unwrap_or(0));
        match u8::try_from(status).unwrap_or(1) {
            0 => Ok(()),
            code => Err(GuestFailed { code }.into()),
        }
    }
}

/// What stands before the program; nothing from a terminal, where nobody knows that it is waited for.
fn input() -> anyhow::Result<Vec<u8>> {
    let stdin = std::io::stdin();
    let mut input = Vec::new();
    if stdin.is_terminal() {
        return Ok(input);
    }
    stdin.lock().take(INPUT_BYTES_MAX + 1).read_to_end(&mut input).context("cannot read the input")?;
    anyhow::ensure!(
        input.len() as u64 <= INPUT_BYTES_MAX,
        "the input is longer than {INPUT_BYTES_MAX} bytes; bring it in pieces"
    );
    Ok(input)
}
