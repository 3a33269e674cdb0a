//! `onecopy vm checkpoint`, `checkpoints`, `forget` and `restore`: a machine as it was.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{ArgGroup, Args};
use onecopy_machine::CheckpointTaken;
use onecopy_memory::size;
use tokio::time::MissedTickBehavior;

use super::MachineOption;
use crate::output;

/// Keep a machine as it is now, its memory, devices and disk, while it runs
#[derive(Debug, Args)]
pub struct Checkpoint {
    #[command(flatten)]
    machine: MachineOption,
    /// Keep so many of its checkpoints, and at most half as many more: the oldest are forgotten several at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep: Option<u64>,
    /// Take another one each time that this is over, until Ctrl-C: seconds, or a number with s, m or h
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    every: Option<u64>,
    /// The figures as one JSON object a line
    #[arg(long)]
    json: bool,
}

/// Show a machine's checkpoints, oldest first
#[derive(Debug, Args)]
pub struct Checkpoints {
    #[command(flatten)]
    machine: MachineOption,
    /// Everything, as one JSON document
    #[arg(long)]
    json: bool,
}

/// Forget checkpoints of a machine, whether it runs or not; what it can go on from is those that stay
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("which").required(true)))]
pub struct Forget {
    #[command(flatten)]
    machine: MachineOption,
    /// A checkpoint's number; more than once for several
    #[arg(long, value_name = "NUMBER", group = "which")]
    checkpoint: Vec<u64>,
    /// All but the newest N
    #[arg(long, value_name = "N", group = "which")]
    keep: Option<usize>,
    /// All of them
    #[arg(long, group = "which")]
    all: bool,
}

/// Let a machine that does not run go on from a checkpoint
#[derive(Debug, Args)]
pub struct Restore {
    #[command(flatten)]
    machine: MachineOption,
    /// The checkpoint's number [default: the last one]
    #[arg(long, value_name = "NUMBER")]
    checkpoint: Option<u64>,
}

impl Checkpoint {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        crate::block_on(async {
            let mut rest = tokio::time::interval(Duration::from_secs(self.every.unwrap_or(1)));
            rest.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut has_taken = false;
            loop {
                rest.tick().await;
                match machines.checkpoint(&name, self.keep).await {
                    Ok(taken) => self.tell(taken)?,
                    // The next one may be taken.
                    Err(error) if has_taken => output::note(error),
                    Err(error) => return Err(error.into()),
                }
                has_taken = true;
                if self.every.is_none() {
                    return Ok(());
                }
            }
        })
    }

    fn tell(&self, taken: CheckpointTaken) -> anyhow::Result<()> {
        if self.json {
            output::say(serde_json::to_string(&taken)?);
            return Ok(());
        }
        let (number, bytes) = (taken.number, size::text(taken.memory_bytes));
        let what = taken.since.map_or("of memory".to_owned(), |since| format!("of memory changed since {since}"));
        let (tenths, total_ms) = (taken.pause_us.div_ceil(100), taken.total_ms);
        output::say(format_args!(
            "checkpoint {number}: {bytes} {what}; stood for {}.{} ms, durable after {total_ms} ms",
            tenths / 10,
            tenths % 10
        ));
        Ok(())
    }
}

impl Checkpoints {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        let checkpoints = machines.checkpoints(&name)?;
        if self.json {
            let list = checkpoints.iter().map(|checkpoint| {
                serde_json::json!({
                    "number": checkpoint.number,
                    "since": checkpoint.parent,
                    "taken_unix_ms": checkpoint.taken_unix_ms,
                    "memory_bytes": checkpoint.memory_bytes(),
                })
            });
            output::say(serde_json::Value::from_iter(list));
            return Ok(());
        }
        if checkpoints.is_empty() {
            output::say(format_args!(
                "There are no checkpoints of {name}; take one with: onecopy vm checkpoint {name}"
            ));
            return Ok(());
        }
        output::say(format_args!("{:>10} {:>12} {:>8} {:>8}", "checkpoint", "age", "memory", "since"));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for checkpoint in &checkpoints {
            let age = now.saturating_sub(Duration::from_millis(checkpoint.taken_unix_ms)).as_secs();
            let memory = size::text(checkpoint.memory_bytes());
            let since = checkpoint.parent.map_or("whole".to_owned(), |parent| parent.to_string());
            output::say(format_args!("{:>10} {:>10} s {memory:>8} {since:>8}", checkpoint.number, age));
        }
        Ok(())
    }
}

/// A time as `10`, `10s`, `5m` or `1h`, of a day at most, in seconds.
fn seconds(text: &str) -> Result<u64, String> {
    let (number, unit) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(number) => (number, text.chars().next_back()),
        None => (text, None),
    };
    let factor = match unit {
        Some('m') => 60,
        Some('h') => 3600,
        _ => 1,
    };
    let found = number.parse().ok().and_then(|number: u64| number.checked_mul(factor));
    found
        .filter(|seconds| (1..=86_400).contains(seconds))
        .ok_or_else(|| "give 1 to 86400 seconds, as 10s, 5m or 1h".into())
}

impl Forget {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        let look = || -> anyhow::Result<Vec<u64>> {
            Ok(machines.checkpoints(&name)?.iter().map(|checkpoint| checkpoint.number).collect())
        };
        let there = look()?;
        let kept = if self.all { Some(0) } else { self.keep };
        let numbers = match kept {
            Some(kept) => &there[..there.len().saturating_sub(kept)],
            None => &self.checkpoint,
        };
        if !numbers.is_empty() {
            crate::block_on(async { Ok(machines.forget_checkpoints(&name, numbers).await?) })?;
        }
        let left = look()?.iter().map(u64::to_string).collect::<Vec<_>>();
        let left = if left.is_empty() { "none".to_owned() } else { left.join(", ") };
        output::say(format_args!("Checkpoints of {name} that are left: {left}."));
        Ok(())
    }
}

impl Restore {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        let number = crate::block_on(async { Ok(machines.restore(&name, self.checkpoint).await?) })?;
        output::say(format_args!("The machine {name} goes on from checkpoint {number}."));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::seconds;

    #[test]
    fn a_time_is_seconds_unless_it_says_otherwise() {
        let times = ["10", "10s", "5m", "24h"].map(seconds);
        assert_eq!(times, [Ok(10), Ok(10), Ok(300), Ok(86_400)]);
        for wrong in ["", "s", "0", "0m", "25h", "1d", "-1", "1.5m", "18446744073709551615h"] {
            assert!(seconds(wrong).is_err_and(|error| error.contains("5m")), "{wrong}");
        }
    }
}
