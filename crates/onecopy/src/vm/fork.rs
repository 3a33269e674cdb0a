//! `onecopy vm fork`: a machine that goes on from where another one is.

use std::path::PathBuf;

use anyhow::{bail, ensure};
use clap::Args;
use onecopy_host::machines::{Fork as NewFork, Machines, Migrated};
use onecopy_machine::keeper::MigrationOrder;
use onecopy_machine::{InterfaceAddress, MachineName};

use super::{MachineOption, migrate};
use crate::disk::amount;
use crate::output;
use crate::progress::Display;
use crate::signals::{HangUp, StopSignal};

/// Make a running machine of another one, as that is now, with all that it has in memory; the other one runs on
///
/// Its disk lies over a snapshot of the other one's, and takes only what is written. In memory it shares with other
/// forks of the same checkpoint what none of them has changed. With --to it goes to another host at once: it begins
/// here, with memory of its own, and is moved as by `onecopy vm migrate`.
#[derive(Debug, Args)]
pub struct Fork {
    #[command(flatten)]
    machine: MachineOption,
    /// The new machine's name
    #[arg(value_name = "NEW")]
    fork: String,
    /// Begin as the machine was at this checkpoint of it [default: a new one, or the last one of a machine at rest]
    #[arg(long, value_name = "NUMBER")]
    checkpoint: Option<u64>,
    /// Give it memory of its own, so that checkpoints and forks can be made of it, too, before its next start
    #[arg(long)]
    independent: bool,
    /// Its address on the bridge that its parent is on; it is unplugged until its guest has taken it
    #[arg(long, value_name = "ADDRESS/BITS")]
    address: Option<InterfaceAddress>,
    /// The other host, to which it goes
    #[arg(long, value_name = "HOST[:PORT]", requires = "keys")]
    to: Option<String>,
    /// The directory of this host's keys, as `onecopy host keys` makes them
    #[arg(long, value_name = "DIRECTORY", requires = "to")]
    keys: Option<PathBuf>,
    /// This host's `onecopy host`, as the other one reaches it [default: the own address on the way there, port 6440]
    #[arg(long, value_name = "HOST:PORT", requires = "to")]
    origin: Option<String>,
    /// The other host's bridge for a machine on one [default: the one of the same name]
    #[arg(long, value_name = "NAME", requires = "to")]
    bridge: Option<String>,
    /// Bytes a second that are sent at most, as 64M
    #[arg(long, value_name = "SIZE", value_parser = amount::bytes, requires = "to")]
    bandwidth: Option<u64>,
    /// How many seconds may pass until it stands there
    #[arg(long, value_name = "SECONDS", requires = "to", default_value_t = migrate::TIMEOUT_S)]
    timeout_s: u64,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Fork {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (parent, machines) = (self.machine.name()?, self.machine.machines()?);
        // First of all it is seen whether the other host can be reached.
        let order = self.order()?;
        let shares = !self.independent && order.is_none();
        let (checkpoint, address) = (self.checkpoint, self.address);
        let fork = NewFork { name: self.fork.parse()?, checkpoint, shares, address };
        let display = Display::choose(self.json);
        let forked = crate::block_on(async { Ok(machines.fork(&parent, &fork, &display).await) })?;
        display.finish();
        let number = forked?;
        let is_json = matches!(display, Display::Json);
        if !is_json {
            output::say(format_args!("The machine {} goes on from checkpoint {number} of {parent}.", fork.name));
        }
        match order {
            Some(order) => self.send(&machines, &fork.name, &order),
            None if is_json => Ok(()),
            None => super::start::tell(&machines, &fork.name),
        }
    }

    /// How it goes to another host, which can be reached.
    fn order(&self) -> anyhow::Result<Option<MigrationOrder>> {
        let Some(to) = &self.to else { return Ok(None) };
        let own = migrate::own_address(&migrate::with_port(to))?;
        let order = migrate::order(to, self.keys.as_deref(), Some(self.origin.as_ref().unwrap_or(&own)))?;
        ensure!(order.keys.is_dir(), "there are no keys in {}", order.keys.display());
        let (bridge, bytes_per_second, timeout_s) = (self.bridge.clone(), self.bandwidth, self.timeout_s);
        Ok(Some(MigrationOrder { bridge, bytes_per_second, timeout_s, ..order }))
    }

    /// Sends it to another host.
    fn send(&self, machines: &Machines, name: &MachineName, order: &MigrationOrder) -> anyhow::Result<()> {
        let display = Display::choose(self.json);
        let sent = crate::block_on(async {
            let signal = StopSignal::listen(HangUp::Stops)?;
            let mut told = |event| migrate::tell(&display, &event);
            tokio::select! {
                sent = machines.migrate(name, order, &mut told) => Ok(sent?),
                () = signal.received() => bail!("it was interrupted"),
            }
        });
        display.finish();
        match sent {
            Ok(Migrated::Gone(result)) => {
                migrate::say_gone(&display, name.as_str(), &order.to, &result);
                Ok(())
            }
            Ok(Migrated::Predicted(_)) => bail!("{name} was to go, and what that costs was told"),
            Err(error) => {
                let (to, keys, origin) = (&order.to, order.keys.display(), &order.origin);
                let bridge = order.bridge.as_ref().map_or_else(String::new, |bridge| format!(" --bridge {bridge}"));
                Err(error.context(format!(
                    "the fork stays here, unless it was given away, which `onecopy vm migrate {name} --status` tells: \
                     send it with `onecopy vm migrate {name} --to {to} --keys {keys} --origin {origin}{bridge}`, or \
                     remove it with `onecopy vm stop {name}` and `onecopy vm delete {name}`"
                )))
            }
        }
    }
}
