//! `onecopy memory history`: what was decided lately, and why.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use onecopy_memory::agent::{Logged, Outcome};
use onecopy_memory::{InstanceName, size};

use super::daemon::DaemonOption;
use crate::output;

/// Show what was decided lately, and why; the newest last
#[derive(Debug, Args)]
pub struct History {
    /// One server [default: all]
    instance: Option<InstanceName>,
    #[command(flatten)]
    daemon: DaemonOption,
    /// One JSON object a line for each decision
    #[arg(long)]
    json: bool,
}

impl History {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let daemon = self.daemon.resolve()?;
        crate::block_on(async {
            let status = onecopy_host::memory::status(&daemon).await?;
            let wanted = |logged: &&Logged| self.instance.as_ref().is_none_or(|name| *name == logged.decision.instance);
            let decisions: Vec<&Logged> = status.agent.decisions.iter().filter(wanted).collect();
            if decisions.is_empty() && !self.json {
                output::say("Nothing was decided yet.");
            }
            let mut stdout = std::io::stdout().lock();
            for logged in decisions {
                match self.json {
                    true => writeln!(stdout, "{}", serde_json::to_string(logged)?)?,
                    false => writeln!(stdout, "{}", line(logged, SystemTime::now()))?,
                }
            }
            Ok(())
        })
    }
}

/// One decision for people: how long ago, what, why, and what came of it.
fn line(logged: &Logged, now: SystemTime) -> String {
    let at = UNIX_EPOCH + Duration::from_millis(logged.at_unix_ms);
    let ago = now.duration_since(at).unwrap_or_default().as_secs();
    let decision = &logged.decision;
    let (from, to) = (size::text(decision.from_bytes), size::text(decision.to_bytes));
    let what = if decision.is_change() { format!("{from} to {to}") } else { format!("stays at {to}") };
    let outcome = match &logged.outcome {
        Outcome::Told | Outcome::Noted => String::new(),
        Outcome::Postponed => "; waits for room".to_owned(),
        Outcome::Failed { reason } => format!("; failed: {reason}"),
    };
    let times = if logged.times > 1 { format!(" ({} times)", logged.times) } else { String::new() };
    format!("{ago:>7} s ago  {:<14} {what}: {}{outcome}{times}", decision.instance, logged.why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use onecopy_memory::arbiter::{Decision, Reason};

    #[test]
    fn a_decision_is_one_line() {
        let (from_bytes, to_bytes) = (1 << 30, 1 << 29);
        let reason = Reason::Pinned { target_bytes: to_bytes };
        let decision = Decision { instance: "leader".parse().unwrap(), from_bytes, to_bytes, reason };
        let why = decision.reason.to_string();
        let outcome = Outcome::Failed { reason: "it is in recovery".to_owned() };
        let logged = Logged { number: 1, at_unix_ms: 5_000, decision, why, outcome, times: 3 };
        assert_eq!(
            line(&logged, UNIX_EPOCH + Duration::from_secs(17)),
            "     12 s ago  leader         1GB to 512MB: set by hand to 512MB; failed: it is in recovery (3 times)"
        );
        assert!(line(&logged, UNIX_EPOCH).starts_with("      0 s ago"), "a clock that was set back is no panic");
    }
}
