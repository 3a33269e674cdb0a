//! `onecopy vm protect`, `unprotect` and `failover`: a machine that survives its host.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use indicatif::HumanBytes;
use onecopy_disk::BLOCK_BYTES;
use onecopy_host::Progress;
use onecopy_machine::Endpoint;
use onecopy_machine::keeper::{
    DETECTION_S_DEFAULT, Durability as OrderedDurability, PERIOD_MS_DEFAULT, ProtectionOrder, ProtectionRole,
    ProtectionState, ProtectionStatus, unix_ms,
};

use super::MachineOption;
use super::migrate::{own_address, with_port};
use crate::disk::amount;
use crate::output;
use crate::progress::Display;
use crate::signals::{HangUp, StopSignal};

/// Keep a copy of a running machine on another host, which goes on there when it dies here
///
/// The other host runs `onecopy host --machines DIRECTORY`, and so does this one. Memory and disk are copied once, and
/// from then on what has changed, ten times a second. When its QEMU dies it goes on there by itself; when its host
/// does, by `onecopy vm failover`, by what `onecopy host --fence` names there, or where etcd decides so (--etcd).
/// Returns once it is protected.
#[derive(Debug, Args)]
pub struct Protect {
    #[command(flatten)]
    machine: MachineOption,
    /// The other host
    #[arg(long, value_name = "HOST[:PORT]", required_unless_present = "status")]
    to: Option<String>,
    /// The directory of this host's keys, as `onecopy host keys` makes them
    #[arg(long, value_name = "DIRECTORY", required_unless_present = "status")]
    keys: Option<PathBuf>,
    /// This host's `onecopy host`, as the other one reaches it [default: the own address on the way there, port 6440]
    #[arg(long, value_name = "HOST:PORT", requires = "to")]
    origin: Option<String>,
    /// The other host's bridge for a machine on one [default: the one of the same name]
    #[arg(long, value_name = "NAME", requires = "to")]
    bridge: Option<String>,
    /// From one copy to the next, in milliseconds; less where what it sends waits for it, more where it would stand for
    /// more than a tenth of the time
    #[arg(long, value_name = "MILLISECONDS", default_value_t = PERIOD_MS_DEFAULT)]
    period_ms: u64,
    /// What others may see of it that the other host has not yet
    #[arg(long, value_name = "WHAT", value_enum, default_value = "output")]
    durability: Durability,
    /// Bytes a second that are sent at most, as 64M
    #[arg(long, value_name = "SIZE", value_parser = amount::bytes)]
    bandwidth: Option<u64>,
    /// How long either host may be silent before it is taken for lost, in seconds (2 to 15)
    #[arg(long, value_name = "SECONDS", default_value_t = DETECTION_S_DEFAULT)]
    detection: u64,
    /// A member of the etcd that decides where it goes on, once the hosts have lost each other, and that the other
    /// host's `onecopy host --etcd` names, too, as http://10.0.0.9:2379, or https:// with the keys of --keys; may be
    /// given again [default: it goes on here, and there when a person or its --fence says so]
    #[arg(long, value_name = "URL", requires = "to", value_delimiter = ',')]
    etcd: Vec<Endpoint>,
    /// Send what has changed as data, also where the other host has it elsewhere: for comparison
    #[arg(long, hide = true, requires = "to")]
    send_all: bool,
    /// How it is protected now, as JSON
    #[arg(long, conflicts_with = "to")]
    status: bool,
    /// One JSON object a line for each step
    #[arg(long)]
    json: bool,
}

/// What others may see of a machine that the other host has not yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Durability {
    /// Nothing: what it sends waits until the other host has what it is of
    Output,
    /// What it has sent since the last copy, which is lost when it dies: nothing waits
    Periodic,
}

impl Protect {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        if self.status {
            let machine = machines.get(&name)?;
            let status = crate::block_on(async { Ok(machine.status().await.ok().and_then(|told| told.protection)) })?;
            output::say(serde_json::to_value(status)?);
            return Ok(());
        }
        let order = self.order()?;
        let display = Display::choose(self.json);
        let protected = crate::block_on(async {
            let signal = StopSignal::listen(HangUp::Stops)?;
            let mut told = |status: &ProtectionStatus| match self.json {
                true => output::say(serde_json::to_value(status).unwrap_or_default()),
                false => display.step(format!("it is copied: {}", HumanBytes(status.bytes))),
            };
            tokio::select! {
                protected = machines.protect(&name, &order, &mut told) => Ok(protected?),
                () = signal.received() => {
                    machines.unprotect(&name, false).await?;
                    bail!("{name} is not protected")
                }
            }
        });
        display.finish();
        protected?;
        if !self.json {
            output::say(format_args!("{name} is protected by {}.", order.to));
        }
        Ok(())
    }

    fn order(&self) -> anyhow::Result<ProtectionOrder> {
        let to = with_port(self.to.as_deref().unwrap_or_default());
        let keys = self.keys.as_ref().context("give the directory of this host's keys with --keys")?;
        if self.period_ms == 0 {
            bail!("a period of 0 ms is none; give 1 at least with --period-ms");
        }
        Ok(ProtectionOrder {
            keys: std::path::absolute(keys)?,
            origin: self.origin.clone().map_or_else(|| own_address(&to), Ok)?,
            to,
            period_ms: self.period_ms,
            durability: match self.durability {
                Durability::Output => OrderedDurability::Output,
                Durability::Periodic => OrderedDurability::Periodic,
            },
            bytes_per_second: self.bandwidth,
            bridge: self.bridge.clone(),
            detection_s: (self.detection != DETECTION_S_DEFAULT).then_some(self.detection),
            etcd: self.etcd.clone(),
            sends_all: self.send_all,
        })
    }
}

/// Protect a machine no more: its copy on the other host is forgotten
#[derive(Debug, Args)]
pub struct Unprotect {
    #[command(flatten)]
    machine: MachineOption,
    /// Also where neither the other host nor etcd says what becomes of the copy, so that it does not start, or what it
    /// sends is held: it must be certain that it does not run there, and never will
    #[arg(long)]
    force: bool,
}

impl Unprotect {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        crate::block_on(async { Ok(machines.unprotect(&name, self.force).await?) })?;
        output::say(format_args!("{name} is not protected."));
        Ok(())
    }
}

/// Let a machine go on here that is protected here
///
/// Where it runs still, it is given away without a loss, as by a migration. Where its host does not answer, --force
/// says that it is dead: two machines would run else.
#[derive(Debug, Args)]
pub struct Failover {
    #[command(flatten)]
    machine: MachineOption,
    /// Also where its host cannot be reached: it must be certain that it does not run there, and never will
    #[arg(long)]
    force: bool,
}

impl Failover {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        let said = crate::block_on(async { Ok(machines.fail_over(&name, self.force).await?) })?;
        output::say(format_args!("{said}."));
        Ok(())
    }
}

/// How a machine is protected, for a line of a list.
pub fn line(status: &ProtectionStatus) -> String {
    let ProtectionStatus { host, epochs, .. } = status;
    let age = status.newest_unix_ms.map(|newest| unix_ms().saturating_sub(newest) as f64 / 1000.0);
    let age = age.map_or_else(String::new, |seconds| format!(", the newest {seconds:.1} s old"));
    let reason = status.reason.as_deref().unwrap_or("not known why");
    match (status.role, status.state) {
        (ProtectionRole::Primary, ProtectionState::Copying) => {
            let (sent, same) = (HumanBytes(status.bytes), HumanBytes(status.same_blocks * BLOCK_BYTES));
            let there = match status.same_blocks {
                0 => String::new(),
                _ => format!(", {same} of its disk were there"),
            };
            format!("it is copied to {host}, and not protected yet: {sent} sent{there}")
        }
        (ProtectionRole::Primary, ProtectionState::Protected) => format!(
            "protected by {host}: {epochs} checkpoints{age}, every {} ms, for which it stands {:.1} ms{}",
            status.period_ms,
            status.pause_us as f64 / 1000.0,
            match status.durability {
                Some(OrderedDurability::Periodic) => "; what it sends does not wait for them",
                Some(OrderedDurability::Output) | None => "",
            }
        ),
        (ProtectionRole::Primary, ProtectionState::Unprotected) => {
            format!("NOT protected by {host}, which is tried again: {reason}")
        }
        (ProtectionRole::Backup, ProtectionState::Copying) => format!("a copy of the machine at {host}, not whole yet"),
        (ProtectionRole::Backup, ProtectionState::Protected) => {
            format!("a copy of the machine at {host}: {epochs} checkpoints{age}")
        }
        (ProtectionRole::Backup, ProtectionState::Unprotected) => {
            format!("a copy of the machine at {host} that stands by: {reason}{age}; see: onecopy vm failover --help")
        }
    }
}
