//! `onecopy vm create`: a new machine.

use std::path::PathBuf;

use clap::Args;
use onecopy_host::machines::NewMachine;
use onecopy_machine::{Forward, MachineOverrides, NetworkChoice, Transport};

use super::MachineOption;
use crate::disk::amount::bytes;
use crate::output;
use crate::progress::Display;

/// Make a machine from a guest image; its disk takes only what is written
#[derive(Debug, Args)]
pub struct Create {
    #[command(flatten)]
    machine: MachineOption,
    /// Memory, as 1GB
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = "1GB")]
    memory: u64,
    /// Processors
    #[arg(long, value_name = "N", default_value_t = 1)]
    processors: u32,
    /// Size of the disk
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = "16GB")]
    disk: u64,
    /// Directory of the guest image [default: postgresql-17 in $ONECOPY_GUEST_DIRECTORY, else in
    /// /var/cache/onecopy/guest]
    #[arg(long, value_name = "DIRECTORY")]
    image: Option<PathBuf>,
    /// Let a port of 127.0.0.1 lead to one of the guest; HOST 0: any free one; may be given again
    #[arg(long, value_name = "HOST:GUEST")]
    forward: Vec<Forward>,
    // No comment for documentation, to which brackets are links.
    #[arg(
        long,
        value_name = "NETWORK",
        default_value = "user",
        help = "QEMU's own network (user), or a card on a bridge of this host: \
                bridge=NAME[,mac=..][,address=ADDRESS/BITS][,gateway=ADDRESS][,filter=on|off]"
    )]
    network: NetworkChoice,
    /// How its disk is attached: nbd, or vhost (the disk's process works in the guest's memory, without --checkpoints)
    #[arg(long, value_name = "TRANSPORT", default_value = "nbd")]
    transport: Transport,
    /// Run a PostgreSQL server in it: it is made at the first start, and reached through a forwarded
    /// port, or by its address on a bridge
    #[arg(long)]
    postgresql: bool,
    /// Keep its memory in a file of ours, which checkpoints are taken of, and lock what it uses of it; needs root
    #[arg(long)]
    checkpoints: bool,
    /// Start it, too
    #[arg(long)]
    start: bool,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Create {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let name = self.machine.name()?;
        let machines = self.machine.machines()?;
        let overrides = MachineOverrides {
            memory_bytes: Some(self.memory),
            processors: Some(self.processors),
            disk_bytes: Some(self.disk),
            image: self.image.clone(),
            checkpoints: Some(self.checkpoints),
        };
        let (forwards, postgresql, checkpoints) = (self.forward.clone(), self.postgresql, self.checkpoints);
        let (transport, network) = match &self.network {
            NetworkChoice::User => (self.transport, None),
            NetworkChoice::Bridged(network) => (self.transport, Some(network.clone())),
        };
        let new = NewMachine { name, overrides, forwards, postgresql, checkpoints, transport, network };
        crate::block_on(async {
            let display = Display::choose(self.json);
            machines.create(&new).await?;
            if self.start {
                return super::start::start(&machines, &new.name, &display).await;
            }
            display.finish();
            if !self.json {
                output::say(format_args!("The machine {} is made; start it with: onecopy vm start {0}", new.name));
            }
            Ok(())
        })
    }
}
