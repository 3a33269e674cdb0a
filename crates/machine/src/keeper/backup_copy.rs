//! What becomes of the copy that a backup holds: void where its machine runs on alone, and where it has died its backup
//! goes on from it. Which of them is written down before anybody acts on it.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use onecopy_hypervisor::{EndCause, Ending, Machine};
use onecopy_postgres::ServiceUser;

use super::conclude;
use super::link::ALONE_AFTER;
use super::protection::LOOK_INTERVAL;
use super::protection::ProtectionState;
use super::state::Keeper;
use super::words;
use crate::desired_state::{self, DesiredState, Found};
use crate::migration::{self, Departure, DepartureState, Gone, HostOrder};
use crate::network_holder::{NetworkClient, Request as NetworkRequest, is_to_hold};
use crate::{Etcd, MachineError, MachineHome, Survivor, decision, hypervisor_failed};

/// How long what copies a machine may take to see that it has ended.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a copy's host may take to say what becomes of the copy before etcd decides that.
const COPY_ANSWER: Duration = Duration::from_secs(1);

/// How often it is looked whether a machine whose monitor does not answer has ended.
const DEATH_LOOK: Duration = Duration::from_secs(1);

/// A protection of which something is left: a copy that may go on, or output that is held.
pub(crate) fn left(home: &MachineHome) -> Option<Departure> {
    let known = Departure::of(home).unwrap_or_else(|error| {
        tracing::error!(%error, "whether a copy of the machine may go on is not known");
        None
    });
    let is_left = |known: &Departure| known.state == DepartureState::Begun || is_to_hold(home);
    known.filter(|known| known.protects && is_left(known) && !desired_state::is_migrated(home))
}

impl MachineHome {
    /// Whether it cannot run on without a keeper as it should: it stands for a migration or a take, what it sends is
    /// held, or it is to be protected.
    pub fn needs_keeper(&self) -> bool {
        let stands = self.is_arriving() || self.is_migrated() || self.is_taking();
        stands || self.protection_file().exists() || left(self).is_some()
    }
}

/// Makes void what is left of a protection that nobody looks after.
pub(super) async fn forget_left(keeper: &Arc<Keeper>, machine: &Machine) -> Result<(), String> {
    match left(keeper.home()) {
        Some(left) => run_alone(keeper, machine, &left).await,
        None => Ok(()),
    }
}

/// Makes the copy void and lets go what was held. Where the machine has died that is for [`resolve_end`] to decide. An
/// error: it goes on there; it may stand here, and [`super::protect::if_given`] sees to what is left of it then.
pub(super) async fn run_alone(keeper: &Arc<Keeper>, machine: &Machine, departure: &Departure) -> Result<(), String> {
    let home = keeper.home();
    let may_be_fenced_until = Instant::now() + ALONE_AFTER;
    let mut told = String::new();
    loop {
        if desired_state::is_migrated(home) {
            return Err("it was given away".to_owned());
        }
        if machine.monitor().status().await.is_err() {
            // It dies, or hangs: what it has sent waits until it answers again.
            if tokio::time::timeout(DEATH_LOOK, machine.wait_ended()).await.is_ok() {
                return Ok(());
            }
            continue;
        }
        let fate = match departure.etcd() {
            Some(etcd) => decided_fate(home, departure, &etcd).await,
            None if departure.is_whole && departure.fences && Instant::now() < may_be_fenced_until => {
                told_fate(home, departure, may_be_fenced_until).await
            }
            None => Fate::Void,
        };
        match fate {
            Fate::Void => {}
            Fate::Runs => {
                let gone = Departure { state: DepartureState::Gone, ..departure.clone() };
                let handed_over = departure.hand_over(home).and_then(|()| gone.conclude(home));
                machine.kill();
                handed_over.map_err(words)?;
                return Err("it goes on at its backup, whose host has lost this one".to_owned());
            }
            Fate::GoesOn => match give_away(keeper, machine, departure).await {
                Ok(()) => return Err("etcd has decided that it goes on at its backup".to_owned()),
                Err(error @ MachineError::Moved { .. }) => return Err(error.to_string()),
                Err(error) => {
                    tracing::error!(%error, "what the machine sends is held: it is to go on at its backup");
                    conclude::let_go_standing(keeper, machine).await;
                    tokio::time::sleep(DEATH_LOOK).await;
                    continue;
                }
            },
            // A fence may be under way all the same.
            Fate::NotKnown(reason) if !departure.fences && keeper.gives_copy_up.load(Ordering::Acquire) => {
                tracing::warn!(reason, "its copy is given up, for a person has said that it never goes on");
            }
            Fate::NotKnown(reason) => {
                if reason != told {
                    tracing::warn!(reason, "what the machine sends is held: its copy may go on");
                    keeper.change_protection(|status| {
                        let reason = format!("what it sends is held, for its copy may go on: {reason}");
                        (status.state, status.reason) = (ProtectionState::Unprotected, Some(reason));
                    });
                    told = reason;
                }
                tokio::time::sleep(DEATH_LOOK).await;
                continue;
            }
        }
        match departure.forget_copy(home) {
            Ok(()) => break,
            Err(error @ MachineError::Moved { .. }) => return Err(error.to_string()),
            Err(error) => tracing::error!(%error, "what the machine sends is held: its copy cannot be made void"),
        }
        tokio::time::sleep(DEATH_LOOK).await;
    }
    while let Err(error) = hold_no_more(home).await {
        tracing::error!(error, "what the machine sends is held still");
        if tokio::time::timeout(DEATH_LOOK, machine.wait_ended()).await.is_ok() {
            break;
        }
    }
    Ok(())
}

/// It stands, and goes on at its backup alone. Who is killed in between leaves it as after a take.
async fn give_away(keeper: &Keeper, machine: &Machine, departure: &Departure) -> Result<(), MachineError> {
    let _alone = keeper.no_take().await;
    // One that somebody has paused stays so, whatever comes of it.
    if desired_state::find(keeper.home(), keeper.user()) != Found::Own(DesiredState::Paused) {
        keeper.note(DesiredState::Taking)?;
    }
    machine.pause().await.map_err(|error| hypervisor_failed(keeper.home().name(), error))?;
    departure.hand_over(keeper.home())
}

/// What becomes of a copy that may be whole.
enum Fate {
    /// It never goes on.
    Void,
    /// It runs.
    Runs,
    /// It may run, and nobody but its host takes that back.
    GoesOn,
    NotKnown(String),
}

/// As its host says until then, which is asked to have it void.
async fn told_fate(home: &MachineHome, departure: &Departure, until: Instant) -> Fate {
    let order = HostOrder::Discard(departure.which(home));
    let asked = migration::ask::<Gone>(&departure.to, &departure.keys, &order);
    match tokio::time::timeout_at(until.into(), asked).await {
        Ok(Ok(Gone::Lost(_))) => Fate::Void,
        Ok(Ok(Gone::Running(_))) => Fate::Runs,
        Ok(Err(reason)) => Fate::NotKnown(reason.to_string()),
        Err(_) => Fate::NotKnown("its host does not answer".to_owned()),
    }
}

/// As its host says at once, or as etcd has decided: for the machine here, unless for the copy before.
async fn decided_fate(home: &MachineHome, departure: &Departure, etcd: &Etcd) -> Fate {
    let reason = match told_fate(home, departure, Instant::now() + COPY_ANSWER).await {
        Fate::NotKnown(reason) => reason,
        known => return known,
    };
    match etcd.decide(home.name(), &departure.token, Survivor::Source).await {
        Ok(Survivor::Source) => Fate::Void,
        Ok(Survivor::Copy) => Fate::GoesOn,
        Err(of_etcd) => Fate::NotKnown(format!(
            "{to}: {reason}; {of_etcd}; where it is certain that it never goes on there (by `onecopy vm migrate {name} \
             --abandon` at that host): onecopy vm unprotect {name} --force",
            to = departure.to,
            name = home.name()
        )),
    }
}

pub(super) async fn hold_no_more(home: &MachineHome) -> Result<(), String> {
    match is_to_hold(home) {
        true => NetworkClient::connect(home).await?.ask(NetworkRequest::Hold { enabled: false }).await,
        false => Ok(()),
    }
}

/// Decides where a machine that has ended goes on: where it has died, at its backup.
pub(super) async fn resolve_end(keeper: &Keeper, ending: &Ending, was_asked: bool) {
    resolve(keeper, ending, was_asked).await;
    // Who copies it reads its memory: that is not ended before.
    keeper.cancel_protection();
    let ended = async {
        while keeper.is_protected() {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    };
    if tokio::time::timeout(END_TIMEOUT, ended).await.is_err() {
        tracing::warn!("the machine's protection does not end");
    }
}

async fn resolve(keeper: &Keeper, ending: &Ending, was_asked: bool) {
    let home = keeper.home();
    let departure = match Departure::of_copy(home) {
        Ok(Some(departure)) => departure,
        Ok(None) => return,
        Err(error) => return tracing::error!(%error, "whether its copy may go on is not known"),
    };
    // Nothing more goes over the connection: the backup asks, if it is not told before.
    keeper.cancel_protection();
    let has_died = match ending.cause {
        EndCause::Killed { .. } | EndCause::Failed { .. } | EndCause::Terminated | EndCause::Unknown => !was_asked,
        EndCause::PoweredOff | EndCause::Quit | EndCause::Panicked => false,
    };
    let goes_on = has_died && departure.is_whole;
    if !goes_on && let Err(error) = desired_state::note(home, DesiredState::Stopping) {
        // Nobody takes it for one that has died, who looks while that is asked.
        return tracing::error!(%error, "it is not written down that the machine was switched off");
    }
    let noted = if goes_on { departure.hand_over(home).map(|()| None) } else { undo(home, &departure).await };
    match noted {
        Ok(None) => {}
        Ok(Some(reason)) => tracing::warn!(reason, "whether the machine's copy goes on is not known"),
        Err(error) => return tracing::error!(%error, "it is not written down where the machine goes on"),
    }
    if !desired_state::is_migrated(home) {
        return;
    }
    tracing::warn!(to = departure.to, "the machine has ended here, and goes on at its backup");
    match conclude::ask_to_go(home, &departure).await {
        Some(Ok(Gone::Running(_))) => {
            let gone = Departure { state: DepartureState::Gone, ..departure };
            if let Err(error) = gone.conclude(home) {
                tracing::error!(%error, "it is not written down that the machine has gone");
            }
        }
        Some(Ok(Gone::Lost(reason))) => {
            tracing::error!(reason, "its backup was lost, too: it begins here again, from its disk");
            if let Err(error) = departure.take_back(home, keeper.user()) {
                tracing::error!(%error, "it is not written down that the machine is here");
            }
        }
        Some(Err(reason)) => tracing::error!(reason, "whether it runs there is not known"),
        None => {}
    }
}

/// The copy of a machine that has ended never goes on, or the machine is handed over, where etcd has decided so before.
/// Where that is not known nothing is written down: the next start, or this host's daemon, asks again.
///
/// # Errors
/// Those of writing it down. Ok: why it is not known.
async fn undo(home: &MachineHome, departure: &Departure) -> Result<Option<String>, MachineError> {
    let mut known = departure.clone();
    loop {
        let fate = match known.etcd() {
            Some(etcd) => decided_fate(home, &known, &etcd).await,
            None => Fate::Void,
        };
        match fate {
            Fate::Void => match (known.forget_copy(home), Departure::of_copy(home)?) {
                // It has become whole meanwhile, and etcd is to be asked.
                (Err(_), Some(now)) if now.token == known.token && now.is_whole && !known.is_whole => known = now,
                (forgotten, _) => return forgotten.map(|()| None),
            },
            Fate::Runs => {
                known.hand_over(home)?;
                Departure { state: DepartureState::Gone, ..known }.conclude(home)?;
                return Ok(None);
            }
            Fate::GoesOn => return known.hand_over(home).map(|()| None),
            Fate::NotKnown(reason) => return Ok(Some(reason)),
        }
    }
}

/// The copy of a machine of which nothing runs, where it is not known whether it goes on: it was switched off and etcd
/// has not decided, or etcd has, and the copy's host has not said that it runs.
///
/// # Errors
/// As [`Departure::of`].
pub(crate) fn undecided(home: &MachineHome) -> Result<Option<Departure>, MachineError> {
    let departure = Departure::with_copy(home)?.filter(|departure| departure.etcd().is_some());
    let is_off = || desired_state::is_migrated(home) || !desired_state::was_to_go_on(home).unwrap_or(true);
    Ok(departure.filter(|_| is_off()))
}

/// Has that decided, and writes it down; nothing of it begins meanwhile, before it has asked, too.
///
/// # Errors
/// Those of writing it down.
pub(crate) async fn decide_undecided(home: &MachineHome) -> Result<(), MachineError> {
    let Some(departure) = undecided(home)? else { return Ok(()) };
    if !desired_state::is_migrated(home)
        && let Some(reason) = undo(home, &departure).await?
    {
        tracing::debug!(reason, "whether the copy of a machine that was switched off goes on is not known");
        return Ok(());
    }
    let order = HostOrder::Go(departure.which(home));
    let asking = migration::ask_soon::<Gone>(&departure.to, &departure.keys, &order, COPY_ANSWER);
    if desired_state::is_migrated(home)
        && let Ok(Gone::Running(_)) = asking.await
    {
        Departure { state: DepartureState::Gone, ..departure }.conclude(home)?;
    }
    Ok(())
}

/// Before a machine is started: nobody else goes on with it. One that has died goes on at its backup.
///
/// # Errors
/// [`MachineError::Moved`]: it runs there; [`MachineError::Protection`]: that is not known.
pub(crate) async fn check_start(home: &MachineHome, user: &ServiceUser) -> Result<(), MachineError> {
    let Some(departure) = Departure::with_copy(home)? else { return Ok(()) };
    // Handed over already it is when the other host has asked meanwhile, or when nobody has heard what it answered.
    if !desired_state::is_migrated(home) {
        if !desired_state::was_to_go_on(home)? {
            return forget_backup(home, user, &departure, false).await;
        }
        // It has died with its keeper: nothing that was answered is lost where the copy goes on.
        departure.hand_over(home)?;
    }
    match conclude::ask_to_go(home, &departure).await {
        Some(Ok(Gone::Running(_))) => {
            Departure { state: DepartureState::Gone, ..departure }.conclude(home)?;
            Err(MachineError::Moved { name: home.name().clone() })
        }
        Some(Ok(Gone::Lost(reason))) => {
            tracing::error!(reason, "its backup was lost, too: it begins here again, from its disk");
            departure.take_back(home, user)
        }
        Some(Err(reason)) => Err(not_known(home, &departure, &reason)),
        None => Ok(()),
    }
}

fn not_known(home: &MachineHome, departure: &Departure, reason: &str) -> MachineError {
    MachineError::Protection {
        machine: home.name().to_string(),
        to: departure.to.clone(),
        reason: format!(
            "it was protected there and may run there, and that host does not say ({reason}); where it is certain that \
             it does not, and never will: onecopy vm unprotect {} --force",
            home.name()
        ),
    }
}

/// Has the backup forget its copy of a machine that does not run here, or was given away to it.
///
/// # Errors
/// [`MachineError::Moved`]: it runs there; [`MachineError::Protection`]: that is not known. With `force` a backup that
/// does not answer is taken for one that never runs it.
pub(crate) async fn forget_backup(
    home: &MachineHome,
    user: &ServiceUser,
    departure: &Departure,
    force: bool,
) -> Result<(), MachineError> {
    let order = HostOrder::Discard(departure.which(home));
    // As it is now: what another one decides meanwhile is not undone.
    let is_migrated = desired_state::is_migrated(home);
    let forget = || match is_migrated {
        true => departure.take_back(home, user),
        false => departure.forget_copy(home),
    };
    let reason = match migration::ask::<Gone>(&departure.to, &departure.keys, &order).await {
        Ok(Gone::Lost(_)) => return forget(),
        Ok(Gone::Running(_)) => {
            if !is_migrated {
                departure.hand_over(home)?;
            }
            Departure { state: DepartureState::Gone, ..departure.clone() }.conclude(home)?;
            return Err(MachineError::Moved { name: home.name().clone() });
        }
        Err(reason) => reason,
    };
    let decided = match &departure.etcd() {
        None => Ok(None),
        // Handed over, it may have gone on there without etcd: that is for a person to say.
        Some(etcd) if is_migrated && !force => etcd.decided(home.name(), &departure.token).await,
        Some(etcd) => etcd.decide(home.name(), &departure.token, Survivor::Source).await.map(Some),
    };
    let of_etcd = match decided {
        Ok(Some(Survivor::Source)) if !is_migrated => return forget(),
        Ok(Some(Survivor::Copy)) => {
            if !is_migrated {
                departure.hand_over(home)?;
            }
            let (name, key) = (home.name(), decision(home.name(), &departure.token));
            return Err(MachineError::Protection {
                machine: name.to_string(),
                to: departure.to.clone(),
                reason: format!(
                    "{reason}; etcd has decided that it goes on there; where that host is gone for good: etcdctl del \
                     {key}, and then onecopy vm unprotect {name} --force"
                ),
            });
        }
        Ok(_) => String::new(),
        Err(of_etcd) => format!("; {of_etcd}"),
    };
    match force {
        true => forget(),
        false => Err(not_known(home, departure, &format!("{reason}{of_etcd}"))),
    }
}
