//! `onecopy memory set`: a server's size, by hand.

use clap::Args;
use onecopy_host::Event;
use onecopy_host::memory::SetRequest;
use onecopy_memory::{InstanceName, Size, size};

use super::daemon::DaemonOption;
use crate::output;
use crate::progress::Display;

/// Give a server's pool a size, which it keeps until `onecopy memory auto on`
///
/// Returns when it was told. Ctrl-C ends the waiting only: the size holds.
#[derive(Debug, Args)]
pub struct Set {
    /// The server, as `onecopy memory status` names it
    instance: InstanceName,
    /// The size, as 512MB, 1.5GB, or 25% of its ceiling
    size: Size,
    #[command(flatten)]
    daemon: DaemonOption,
    /// Return when it has the size
    #[arg(long)]
    wait: bool,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Set {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let daemon = self.daemon.resolve()?;
        let request = SetRequest { instance: self.instance.clone(), size: self.size, wait: self.wait };
        crate::block_on(async {
            let display = Display::choose(self.json);
            let outcome = onecopy_host::memory::set(&daemon, &request, &display).await;
            display.finish();
            match (outcome?, &display) {
                (event, Display::Json) => display.show(event),
                (Event::Resized { instance, change }, _) => {
                    let (from, target) = (size::text(change.from_bytes), size::text(change.target_bytes));
                    match change.reached() {
                        true => output::say(format_args!("{instance} has {target}, it had {from}.")),
                        false => output::say(format_args!("{instance} goes from {from} to {target}.")),
                    }
                }
                _ => {}
            }
            Ok(())
        })
    }
}
