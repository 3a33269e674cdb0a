//! `onecopy vm migrate`: a machine goes to another host, while it runs.

use std::net::{IpAddr, TcpStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use indicatif::HumanBytes;
use onecopy_clone::network::PORT_DEFAULT;
use onecopy_host::Progress;
use onecopy_host::machines::Migrated;
use onecopy_machine::keeper::{MigrationEvent, MigrationOrder, Prediction};
use onecopy_machine::migration::MigrationResult;

use super::MachineOption;
use crate::disk::amount;
use crate::output;
use crate::progress::Display;
use crate::signals::{HangUp, StopSignal};

/// How long a machine may stand, milliseconds.
const DOWNTIME_MS: u64 = 300;

/// How many seconds may pass until it stands.
pub(super) const TIMEOUT_S: u64 = 300;

/// Move a running machine to another host, with all that it has in memory
///
/// The other host runs `onecopy host --machines DIRECTORY`, and so does this one: the machine's disk comes from here
/// until all of it is there. Its memory is sent while it runs, and it stands only for what is left. Ctrl-C, and a death
/// of either side, leave it here, until it was given away; from then on it goes on there alone.
#[derive(Debug, Args)]
pub struct Migrate {
    #[command(flatten)]
    machine: MachineOption,
    /// The other host
    #[arg(long, value_name = "HOST[:PORT]", required_unless_present_any = ["cancel", "resume", "abandon", "status"])]
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
    /// How long it may stand, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = DOWNTIME_MS)]
    downtime_ms: u64,
    /// Bytes a second that are sent at most, as 64M
    #[arg(long, value_name = "SIZE", value_parser = amount::bytes)]
    bandwidth: Option<u64>,
    /// How many seconds may pass until it stands; twice as many where it is slowed down then
    #[arg(long, value_name = "SECONDS", default_value_t = TIMEOUT_S)]
    timeout_s: u64,
    /// What to do when it could not stand for so short a time by then
    #[arg(long, value_name = "WHAT", value_enum, default_value = "cancel")]
    on_timeout: OnTimeout,
    /// Only say what it would cost
    #[arg(long, requires = "to")]
    dry_run: bool,
    /// Let a migration that is under way come to nothing: the machine stays
    #[arg(long, conflicts_with_all = ["to", "resume", "abandon", "status"])]
    cancel: bool,
    /// Where it is not known whether it runs there: ask the other host again. On the other host, where this one is
    /// dead, with --force: let it go
    #[arg(long, conflicts_with_all = ["to", "abandon", "status"])]
    resume: bool,
    /// Take a machine back that was given away and does not run there; on the other host: give it up
    #[arg(long, conflicts_with_all = ["to", "status"])]
    abandon: bool,
    /// Also where the other host cannot be reached: it must be certain that it does not run there, and never will
    #[arg(long, conflicts_with_all = ["to", "cancel", "status"])]
    force: bool,
    /// What is known of its last migration, as JSON
    #[arg(long, conflicts_with = "to")]
    status: bool,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

/// What to do when the pause would be too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnTimeout {
    /// It stays here
    Cancel,
    /// It is slowed down, more and more, for as long again, and stays here if that does not do
    Throttle,
    /// It goes, and stands longer
    Go,
}

impl Migrate {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        if self.status {
            let mut known = serde_json::to_value(machines.migration(&name)?)?;
            for way in ["departure", "arrival"] {
                if let Some(record) = known.get_mut(way).and_then(serde_json::Value::as_object_mut) {
                    // Who has it may read the disk.
                    record.remove("token");
                }
            }
            output::say(known);
            return Ok(());
        }
        if self.cancel || self.resume || self.abandon {
            return crate::block_on(async {
                let said = match (self.cancel, self.resume) {
                    (true, _) => machines.cancel_migration(&name).await.map(|()| format!("{name} stays here"))?,
                    (_, true) => machines.resume_migration(&name, self.force).await?,
                    _ => machines.abandon_migration(&name, self.force).await?,
                };
                output::say(format_args!("{said}."));
                Ok(())
            });
        }
        let order = self.order()?;
        let display = Display::choose(self.json);
        let migrated = crate::block_on(async {
            let signal = StopSignal::listen(HangUp::Stops)?;
            let mut told = |event| self.tell(&display, &event);
            tokio::select! {
                migrated = machines.migrate(&name, &order, &mut told) => Ok(migrated?),
                // The keeper sees that nobody listens any more.
                () = signal.received() => bail!("{name} stays here, unless it was given away: --status tells"),
            }
        });
        display.finish();
        match (migrated?, self.json) {
            (Migrated::Gone(result), true) => say_gone(&display, name.as_str(), &order.to, &result),
            (Migrated::Gone(result), false) => {
                say_gone(&display, name.as_str(), &order.to, &result);
                if result.pause_us > self.downtime_ms.saturating_mul(1000) {
                    let wanted = self.downtime_ms;
                    let why = match self.on_timeout {
                        OnTimeout::Cancel => "a host was busy",
                        OnTimeout::Throttle => "a host was busy, or it changed more than before once it was let go",
                        OnTimeout::Go => "it changed too fast, or a host was busy",
                    };
                    output::note(format_args!("that is longer than the {wanted} ms that were asked for: {why}"));
                }
            }
            (Migrated::Predicted(predicted), true) => {
                output::say(serde_json::json!({ "event": "predicted", "prediction": predicted }));
            }
            (Migrated::Predicted(predicted), false) => say_prediction(&predicted),
        }
        Ok(())
    }

    fn order(&self) -> anyhow::Result<MigrationOrder> {
        let origin = if self.dry_run { Some("") } else { self.origin.as_deref() };
        Ok(MigrationOrder {
            downtime_ms: self.downtime_ms,
            bytes_per_second: self.bandwidth,
            timeout_s: self.timeout_s,
            goes_on_timeout: self.on_timeout == OnTimeout::Go,
            throttles: self.on_timeout == OnTimeout::Throttle,
            is_only_tried: self.dry_run,
            bridge: self.bridge.clone(),
            ..order(self.to.as_deref().unwrap_or_default(), self.keys.as_deref(), origin)?
        })
    }

    fn tell(&self, display: &Display, event: &MigrationEvent) {
        if self.on_timeout == OnTimeout::Throttle && matches!(event, MigrationEvent::Accepted { throttles: false, .. })
        {
            tracing::warn!("its keeper is of an earlier build, and does not slow it down; what started it anew would");
        }
        tell(display, event);
    }
}

/// The order by which a machine goes to another host, with what is usual.
pub(super) fn order(to: &str, keys: Option<&Path>, origin: Option<&str>) -> anyhow::Result<MigrationOrder> {
    let to = with_port(to);
    let keys = keys.context("give the directory of this host's keys with --keys")?;
    let origin = origin.map_or_else(|| own_address(&to), |origin| Ok(origin.to_owned()))?;
    Ok(MigrationOrder {
        keys: std::path::absolute(keys)?,
        to,
        origin,
        downtime_ms: DOWNTIME_MS,
        bytes_per_second: None,
        timeout_s: TIMEOUT_S,
        goes_on_timeout: false,
        throttles: false,
        is_only_tried: false,
        bridge: None,
    })
}

/// Shows how far a machine is on its way.
pub(super) fn tell(display: &Display, event: &MigrationEvent) {
    if matches!(display, Display::Json) {
        output::say(serde_json::to_value(event).unwrap_or_default());
        return;
    }
    display.step(match event {
        MigrationEvent::Accepted { shares_disk: false, .. } => "the other host takes it; its memory is sent".to_owned(),
        MigrationEvent::Accepted { shares_disk: true, .. } => {
            "the other host takes it, and reads its disk; the rest of its memory is sent".to_owned()
        }
        MigrationEvent::Waiting => "QEMU waits there".to_owned(),
        MigrationEvent::Round {
            round,
            zero_pages,
            known_pages,
            disk_pages,
            data_pages,
            bytes,
            took_ms,
            pages_per_second,
            expected_pause_ms,
            throttle_percent,
        } => {
            let expected = match (pages_per_second, expected_pause_ms) {
                (Some(pages), Some(pause)) => format!("; {pages} pages/s change, it would stand {pause} ms"),
                _ => String::new(),
            };
            let throttled = throttle_percent.map(|percent| format!("; it stood for {percent} % of the time"));
            let (bytes, throttled) = (HumanBytes(*bytes), throttled.unwrap_or_default());
            let left_out = zero_pages + known_pages;
            format!(
                "round {round}: {data_pages} pages, {disk_pages} on the disk, {left_out} known; {bytes} in \
                 {took_ms} ms{expected}{throttled}"
            )
        }
        MigrationEvent::Stopped => "it stands".to_owned(),
        MigrationEvent::Loaded => "it stands there".to_owned(),
        MigrationEvent::Given => "it is given away".to_owned(),
    });
}

/// Says that a machine has gone, and how.
pub(super) fn say_gone(display: &Display, name: &str, to: &str, result: &MigrationResult) {
    if matches!(display, Display::Json) {
        output::say(serde_json::json!({ "event": "migrated", "result": result }));
        return;
    }
    let MigrationResult { rounds, bytes, pause_us, total_ms, forwards, shares_disk, .. } = result;
    output::say(format_args!(
        "{name} runs at {to}. It stood {:.1} ms; {} in {rounds} rounds, {:.1} s.",
        *pause_us as f64 / 1000.0,
        HumanBytes(*bytes),
        *total_ms as f64 / 1000.0
    ));
    for forward in forwards {
        let (host, guest) = (forward.host_port, forward.guest_port);
        output::say(format_args!("Port {host} of 127.0.0.1 there leads to its port {guest}."));
    }
    let from = if *shares_disk { "on storage that both hosts have" } else { "here" };
    output::say(format_args!(
        "Its disk comes from what it has {from}, until it has all of it: keep `onecopy host` running."
    ));
}

fn say_prediction(prediction: &Prediction) {
    let Prediction { memory_bytes, pages_per_second, seconds, pause_ms } = prediction;
    let memory = HumanBytes(*memory_bytes);
    output::say(format_args!("{memory} of memory at most are sent once; {pages_per_second} pages change a second."));
    match (seconds, pause_ms) {
        (Some(seconds), Some(pause)) => {
            output::say(format_args!("At that rate this takes {seconds:.1} s, and it would stand {pause} ms."));
        }
        _ => output::say("How long that takes is told with --bandwidth."),
    }
}

/// Another host's address, with the port that is usual where there is none.
pub(super) fn with_port(host: &str) -> String {
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_port { host.to_owned() } else { format!("{host}:{PORT_DEFAULT}") }
}

/// This host's address on the way to the other one, with the port that is usual.
pub(super) fn own_address(to: &str) -> anyhow::Result<String> {
    let reached = TcpStream::connect(to).and_then(|stream| stream.local_addr());
    let own = reached.with_context(|| format!("cannot reach the host {to}"))?.ip();
    Ok(match own {
        IpAddr::V4(own) => format!("{own}:{PORT_DEFAULT}"),
        IpAddr::V6(own) => format!("[{own}]:{PORT_DEFAULT}"),
    })
}
