//! What becomes of the copy that a backup holds: void where its machine runs on alone, and where it has died its backup
//! goes on from it. Which of them is written down before anybody acts on it.

use std::time::{Duration, Instant};

use onecopy_hypervisor::{EndCause, Ending, Machine};
use onecopy_postgres::ServiceUser;

use super::conclude;
use super::link::ALONE_AFTER;
use super::migrate::words;
use super::protect::LOOK_INTERVAL;
use super::state::Keeper;
use crate::desired_state;
use crate::migration::{self, Departure, DepartureState, Gone, HostOrder};
use crate::network_holder::{NetworkClient, Request as NetworkRequest, is_to_hold};
use crate::{MachineError, MachineHome};

/// How long what copies a machine may take to see that it has ended.
const END_TIMEOUT: Duration = Duration::from_secs(30);

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

/// Makes void what is left of a protection that nobody looks after.
pub(super) async fn forget_left(home: &MachineHome, machine: &Machine) -> Result<(), String> {
    match left(home) {
        Some(left) => run_alone(home, machine, &left).await,
        None => Ok(()),
    }
}

/// Makes the copy void and lets go what was held. Where the machine has died that is for [`resolve_end`] to decide.
pub(super) async fn run_alone(home: &MachineHome, machine: &Machine, departure: &Departure) -> Result<(), String> {
    let may_be_fenced_until = Instant::now() + ALONE_AFTER;
    loop {
        if machine.monitor().status().await.is_err() {
            // It dies, or hangs: what it has sent waits until it answers again.
            if tokio::time::timeout(DEATH_LOOK, machine.wait_ended()).await.is_ok() {
                return Ok(());
            }
            continue;
        }
        if departure.is_whole && departure.fences && Instant::now() < may_be_fenced_until {
            let order = HostOrder::Discard(departure.which(home));
            let asked = migration::ask::<Gone>(&departure.to, &departure.keys, &order);
            match tokio::time::timeout_at(may_be_fenced_until.into(), asked).await {
                Ok(Ok(Gone::Lost(_))) => {}
                Ok(Ok(Gone::Running(_))) => {
                    let gone = Departure { state: DepartureState::Gone, ..departure.clone() };
                    let handed_over = departure.hand_over(home).and_then(|()| gone.conclude(home));
                    machine.kill();
                    handed_over.map_err(words)?;
                    return Err("it goes on at its backup, whose host has fenced this one".to_owned());
                }
                Err(_) => continue,
                Ok(Err(reason)) => {
                    tracing::warn!(%reason, "what the machine sends is held: its copy may go on");
                    tokio::time::sleep(DEATH_LOOK).await;
                    continue;
                }
            }
        }
        match departure.forget_copy(home) {
            Ok(()) => match hold_no_more(home).await {
                Ok(()) => return Ok(()),
                Err(error) => tracing::error!(error, "what the machine sends is held still"),
            },
            Err(error @ MachineError::Moved { .. }) => return Err(error.to_string()),
            Err(error) => tracing::error!(%error, "what the machine sends is held: its copy cannot be made void"),
        }
        tokio::time::sleep(DEATH_LOOK).await;
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
    let noted = if goes_on { departure.hand_over(home) } else { departure.forget_copy(home) };
    if let Err(error) = noted {
        return tracing::error!(%error, "it is not written down where the machine goes on");
    }
    if !goes_on {
        return;
    }
    tracing::warn!(to = departure.to, "the machine has died here, and goes on at its backup");
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
    let forget = || match desired_state::is_migrated(home) {
        true => departure.take_back(home, user),
        false => departure.forget_copy(home),
    };
    match migration::ask::<Gone>(&departure.to, &departure.keys, &order).await {
        Ok(Gone::Lost(_)) => forget(),
        Ok(Gone::Running(_)) => {
            if !desired_state::is_migrated(home) {
                departure.hand_over(home)?;
            }
            Departure { state: DepartureState::Gone, ..departure.clone() }.conclude(home)?;
            Err(MachineError::Moved { name: home.name().clone() })
        }
        Err(_) if force => forget(),
        Err(reason) => Err(not_known(home, departure, &reason.to_string())),
    }
}
