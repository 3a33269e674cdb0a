//! `onecopy memory auto`: whether targets follow need and pressure.

use clap::Args;
use onecopy_host::Event;
use onecopy_host::memory::AutoRequest;
use onecopy_memory::InstanceName;

use super::daemon::DaemonOption;
use crate::output;
use crate::progress::Display;
use crate::up::Switch;

/// Let servers get what they need of the budget by themselves, or leave them at what they have
///
/// `on` also takes back a size that was set by hand.
#[derive(Debug, Args)]
pub struct Auto {
    /// Whether targets follow need and pressure
    #[arg(value_enum)]
    automatic: Switch,
    /// One server [default: all, and those to come]
    instance: Option<InstanceName>,
    #[command(flatten)]
    daemon: DaemonOption,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Auto {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let daemon = self.daemon.resolve()?;
        let request = AutoRequest { automatic: self.automatic == Switch::On, instance: self.instance.clone() };
        crate::block_on(async {
            let display = Display::choose(self.json);
            let outcome = onecopy_host::memory::set_auto(&daemon, &request, &display).await;
            display.finish();
            match (outcome?, &display) {
                (event, Display::Json) => display.show(event),
                (Event::Switched { instance, automatic }, _) => {
                    let who = instance.unwrap_or_else(|| "Every server".to_owned());
                    match automatic {
                        true => output::say(format_args!("{who} gets what it needs from now on.")),
                        false => output::say(format_args!("{who} keeps what it has from now on.")),
                    }
                }
                _ => {}
            }
            Ok(())
        })
    }
}
