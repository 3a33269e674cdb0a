//! Where a machine goes on that stands here and may run where it comes from: its host is asked, or fenced, or a person
//! says it, and what is known is written down before it runs.

use std::pin::pin;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_hypervisor::Machine;
use onecopy_postgres::ServiceUser;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Command;

use super::link::FENCE_WITHIN;
use super::state::Keeper;
use super::{guest, network, restore};
use crate::desired_state;
use crate::migration::{self, Arrival, ArrivalState, HostOrder, Unanswered, Verdict};
use crate::{MachineError, MachineHome};

/// How often the source's host is asked whether a machine was given away.
const VERDICT_INTERVAL: Duration = Duration::from_secs(1);

/// How long the source's host is not reached before it is fenced: its `onecopy host` may just be started anew.
const UNREACHED_MIN: Duration = Duration::from_secs(3);

pub(super) fn failed(home: &MachineHome, reason: impl ToString) -> MachineError {
    let (machine, to) = (home.name().to_string(), "this host".to_owned());
    MachineError::Migration { machine, to, reason: reason.to_string() }
}

/// It goes on where it was.
pub(super) fn discard(home: &MachineHome, record: &Arrival) {
    if let Err(error) = Arrival::discard(home, &record.token) {
        tracing::warn!(%error, "it is not written down that the machine never comes");
    }
}

/// The same of one that stands: it ends only once that is written down.
pub(super) fn keep_there(home: &MachineHome, record: &Arrival) -> MachineError {
    match Arrival::discard(home, &record.token) {
        Ok(()) => failed(home, "it goes on where it was"),
        Err(error) => error,
    }
}

/// It was given away, and goes on here.
pub(super) async fn go_on(
    home: &MachineHome,
    user: &ServiceUser,
    machine: &Machine,
    record: &Arrival,
) -> Result<(), MachineError> {
    if let Some(ending) = machine.state().ending().filter(|_| record.state != ArrivalState::Here) {
        // Not promised yet: it goes on where it was.
        tracing::warn!(%ending, "the machine has ended before it was let go");
        return Err(keep_there(home, record));
    }
    network::note_arriving(home, machine);
    promise(home, record)?;
    guest::run(home, user, machine).await?;
    network::announce_often(home);
    Ok(())
}

/// Before it runs: what has run here is never taken back where it was, also when it dies at once.
pub(crate) fn promise(home: &MachineHome, record: &Arrival) -> Result<(), MachineError> {
    // First: no start removes the disk of a machine that is said to be here.
    restore::commit(home)?;
    Arrival { state: ArrivalState::Here, ..record.clone() }.write(home)?;
    // From here on each keeper lets it go.
    desired_state::begin_arrived(home)
}

/// A machine that stands, and may run where it comes from: asks there, and does what a person says. An error: it goes
/// on there, or it has ended here.
pub(super) async fn decide(
    home: &MachineHome,
    user: &ServiceUser,
    machine: &Machine,
    keeper: &Arc<Keeper>,
    record: &Arrival,
    heard: Option<Instant>,
) -> Result<(), MachineError> {
    if record.state == ArrivalState::Here {
        // That was promised: nobody's word changes it.
        return go_on(home, user, machine, record).await;
    }
    match wait_verdict(home, machine, keeper, record, heard).await? {
        Verdict::Given => go_on(home, user, machine, record).await,
        Verdict::Kept | Verdict::Undecided | Verdict::Unknown => Err(keep_there(home, record)),
    }
}

/// What becomes of a machine that may run where it comes from: that is asked there, or a person says it. That host may
/// be fenced for a time after `heard`, until when it cannot have missed this side. An error: it has ended here.
pub(super) async fn wait_verdict(
    home: &MachineHome,
    machine: &Machine,
    keeper: &Arc<Keeper>,
    record: &Arrival,
    heard: Option<Instant>,
) -> Result<Verdict, MachineError> {
    let mut decided = pin!(keeper.decided(&record.token));
    let mut unreached = None;
    loop {
        let asked = tokio::select! {
            ending = machine.wait_ended() => Err(failed(home, format!("it has ended before it was let go: {ending}")))?,
            goes = &mut decided => return Ok(if goes { Verdict::Given } else { Verdict::Kept }),
            asked = ask_until_decided(home, record, heard, &mut unreached) => asked,
        };
        let (command, longest) = match asked {
            Asked::Verdict(verdict) => return Ok(verdict),
            Asked::MayFence(command, longest) => (command, longest),
        };
        tracing::warn!(origin = record.origin, "the source's host is not reached, and is fenced");
        // Begun, it is not given up for anybody's word: what it does may have been done by then. Where it has
        // succeeded whoever says later that the machine stays there hears that it runs here.
        match fence(home, record, command, longest).await {
            Ok(()) => return Ok(Verdict::Given),
            Err(reason) => tracing::error!(command, reason, "the source's host may not be fenced"),
        }
        tokio::time::sleep(VERDICT_INTERVAL).await;
    }
}

/// What has come of asking.
enum Asked<'a> {
    Verdict(Verdict),
    /// The source's host is not reached: with this command, which may take so long.
    MayFence(&'a str, Duration),
}

async fn ask_until_decided<'a>(
    home: &MachineHome,
    record: &'a Arrival,
    heard: Option<Instant>,
    unreached: &mut Option<Instant>,
) -> Asked<'a> {
    let order = HostOrder::Verdict(record.which(home));
    loop {
        let asked = Instant::now();
        let is_unreached = match migration::ask::<Verdict>(&record.origin, &record.keys, &order).await {
            Ok(Verdict::Undecided | Verdict::Unknown) => false,
            Ok(verdict) => return Asked::Verdict(verdict),
            Err(reason) => {
                tracing::info!(origin = record.origin, %reason, "whether the machine was given away is not known");
                matches!(reason, Unanswered::Unreachable(_))
            }
        };
        *unreached = is_unreached.then(|| unreached.unwrap_or(asked));
        let left = heard.map_or(Duration::ZERO, |heard| FENCE_WITHIN.saturating_sub(heard.elapsed()));
        if let (Some(command), Some(since)) = (&record.fence, *unreached)
            && since.elapsed() >= UNREACHED_MIN
            && !left.is_zero()
        {
            return Asked::MayFence(command, left);
        }
        tokio::time::sleep(VERDICT_INTERVAL).await;
    }
}

/// Fences the host that a protected machine comes from, within `longest`; it never runs there again when this returns.
///
/// # Errors
/// In words: that is not known.
async fn fence(home: &MachineHome, record: &Arrival, command: &str, longest: Duration) -> Result<(), String> {
    let mut fencing = Command::new("/bin/sh");
    fencing.arg("-c").arg(command).current_dir("/").stdin(Stdio::null()).kill_on_drop(true).process_group(0);
    fencing.env("ONECOPY_MACHINE", home.name().as_str()).env("ONECOPY_ORIGIN", &record.origin);
    let mut fencing = fencing.spawn().map_err(|error| format!("it cannot be run: {error}"))?;
    let group = fencing.id().and_then(|group| Pid::from_raw(group.cast_signed()));
    let Ok(ended) = tokio::time::timeout(longest, fencing.wait()).await else {
        // With all that it has begun: nothing of it fences anybody later.
        let _ = group.map(|group| kill_process_group(group, Signal::KILL));
        return Err(format!("it has not ended within {} s", longest.as_secs()));
    };
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("it has ended with {status}")),
        Err(error) => Err(format!("how it has ended is not known: {error}")),
    }
}
