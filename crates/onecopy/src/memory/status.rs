//! `onecopy memory status`: what each server has, may have and needs.

use std::fmt::Write as _;

use clap::Args;
use onecopy_host::memory::MemoryStatus;
use onecopy_memory::agent::{InstanceStatus, Mode, Outcome};
use onecopy_memory::size;

use super::daemon::DaemonOption;
use crate::watch::Watch;

/// Show what each server has, may have and needs, and why
#[derive(Debug, Args)]
pub struct Status {
    #[command(flatten)]
    daemon: DaemonOption,
    #[command(flatten)]
    watch: Watch,
}

impl Status {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let daemon = self.daemon.resolve()?;
        crate::block_on(self.watch.show(async || onecopy_host::memory::status(&daemon).await, table))
    }
}

/// The status for people.
fn table(status: &MemoryStatus) -> String {
    let agent = &status.agent;
    let (used, budget) = (size::text(agent.committed_bytes), size::text(agent.budget_bytes));
    let automatic = if agent.automatic { "automatic" } else { "set by hand" };
    let mut text = format!("{used} of {budget} for all pools, {automatic}\n");
    // Writing to a String cannot fail, here and below.
    if let Some(host) = &agent.pressure {
        let (available, total) = (size::text(host.available_bytes), size::text(host.total_bytes));
        let _ = write!(text, "the host has {available} of {total} available");
        if let Some(stalled) = host.psi_some_avg10 {
            let _ = write!(text, ", {stalled:.1} % of the last 10 s something waited for memory");
        }
        text.push('\n');
    }
    if let Some(notice) = &status.notice {
        let _ = writeln!(text, "{notice}");
    }
    let _ = writeln!(
        text,
        "\n{:<14} {:<10} {:<8} {:<9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>9} {:>8}",
        "instance", "kind", "level", "by", "pool", "target", "floor", "ceiling", "hits", "in use", "reads/s"
    );
    for instance in &agent.instances {
        instance_lines(instance, &mut text);
    }
    text
}

fn instance_lines(instance: &InstanceStatus, text: &mut String) {
    let by = match instance.mode {
        Mode::Automatic => "need",
        Mode::Watched => "nobody",
        Mode::Pinned { .. } => "hand",
    };
    let _ = write!(text, "{:<14} {:<10} {:<8} {by:<9}", instance.instance, instance.kind, instance.level);
    match &instance.observation {
        None => text.push_str(" no answer yet\n"),
        Some(seen) => {
            let _ = writeln!(
                text,
                " {:>9} {:>9} {:>9} {:>9} {:>7} {:>9} {:>8.0}",
                size::text(seen.pool_bytes),
                size::text(seen.target_bytes),
                size::text(seen.floor_bytes),
                size::text(seen.ceiling_bytes),
                seen.hit_ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0)),
                seen.working_set_bytes.map_or_else(|| "-".to_owned(), size::text),
                seen.reads_per_second,
            );
            let gain =
                seen.ghost.iter().filter(|step| step.hits_per_second >= 1.0).max_by_key(|step| step.larger_by_bytes);
            if let Some(gain) = gain {
                let (larger, hits) = (size::text(gain.larger_by_bytes), gain.hits_per_second);
                let _ = writeln!(text, "  with {larger} more it would read {hits:.0} pages a second less");
            }
            if seen.returned_huge_bytes > 0 {
                let huge = size::text(seen.returned_huge_bytes);
                let _ = writeln!(text, "  {huge} given back are huge pages, which the host has for nobody else");
            }
            for limit in &seen.limits {
                let (used, bound) = (size::text(limit.usage_bytes), size::text(limit.bound_bytes()));
                let cached = size::text(limit.reclaimable_bytes);
                let _ = writeln!(text, "  cgroup {} has {used} of {bound}, {cached} of it page cache", limit.cgroup);
            }
            if let Some(blocked) = seen.blocked_by.as_ref().filter(|_| seen.pool_bytes != seen.target_bytes) {
                let _ = writeln!(text, "  not there yet: {blocked}");
            }
        }
    }
    if let Some(failure) = &instance.failure {
        let _ = writeln!(text, "  {failure}");
    }
    if let Some(last) = &instance.decision {
        let (from, to) = (size::text(last.decision.from_bytes), size::text(last.decision.to_bytes));
        let outcome = match &last.outcome {
            Outcome::Told => format!("{from} to {to}"),
            Outcome::Noted => format!("stays at {from}"),
            Outcome::Postponed => format!("{from} to {to} when there is room"),
            Outcome::Failed { reason } => format!("{from} to {to} failed ({reason})"),
        };
        let _ = writeln!(text, "  last: {outcome}: {}", last.why);
    }
}
