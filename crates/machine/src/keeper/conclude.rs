//! What becomes of a machine that stands for a migration whose end this keeper has not seen: it is asked for where it
//! goes on, and is ended here, or let go.

use std::sync::Arc;
use std::time::Duration;

use onecopy_hypervisor::Machine;

use super::state::Keeper;
use crate::migration::{self, Departure, DepartureState, Gone, HostOrder};
use crate::{MachineHome, desired_state};

/// How often a word that decides is said again before a person is asked to.
const GO_ATTEMPTS: u32 = 3;

/// Between two of them.
const GO_INTERVAL: Duration = Duration::from_secs(1);

/// How often it is looked whether a machine that was given away was taken back.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// How long a keeper waits that asks without end where its machine goes on.
const CONCLUDE_INTERVAL: Duration = Duration::from_secs(15);

/// Says it again over another connection: the machine was given away, and whether it runs is not known. None: somebody
/// has taken it back meanwhile.
pub(super) async fn ask_to_go(home: &MachineHome, departure: &Departure) -> Option<Result<Gone, String>> {
    let order = HostOrder::Go(departure.which(home));
    let asking = async {
        let mut why = String::new();
        for _ in 0..GO_ATTEMPTS {
            match migration::ask::<Gone>(&departure.to, &departure.keys, &order).await {
                Ok(gone) => return Ok(gone),
                Err(reason) => why = reason.to_string(),
            }
            tokio::time::sleep(GO_INTERVAL).await;
        }
        let name = home.name();
        Err(format!(
            "it was given away, and that host does not say whether it runs there ({why}): it stands here until it \
             does; ask again with: onecopy vm migrate {name} --resume"
        ))
    };
    tokio::select! {
        asked = asking => Some(asked),
        () = taken_back(home) => None,
    }
}

async fn taken_back(home: &MachineHome) {
    while desired_state::is_migrated(home) {
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// For a machine that was given away and stands, with its migration's keeper gone: it is asked for until it is known
/// to run there, and is ended here then, or is let go here again. Whether it goes on here.
pub(super) async fn conclude(keeper: &Keeper, machine: &Machine) -> bool {
    let home = keeper.home();
    loop {
        let departure = match Departure::of(home) {
            Ok(Some(departure)) if desired_state::is_migrated(home) => departure,
            Ok(_) => return false,
            Err(error) => {
                tracing::error!(%error, "it is not known where the machine goes on");
                return false;
            }
        };
        let ended = match departure.state {
            DepartureState::Gone => Ok(()),
            DepartureState::Begun | DepartureState::Kept => match ask_to_go(home, &departure).await {
                Some(Ok(Gone::Running(_))) => {
                    let gone = Departure { state: DepartureState::Gone, ..departure };
                    gone.conclude(home).map_err(|error| error.to_string())
                }
                Some(Ok(Gone::Lost(reason))) => {
                    tracing::warn!(reason, "the machine never ran there, and goes on here");
                    let alone = keeper.no_take().await;
                    let back = departure.take_back(home, keeper.user());
                    let back = match back {
                        Ok(()) => keeper.let_go(machine).await.and_then(|()| keeper.note_taken()),
                        Err(error) => Err(error),
                    };
                    drop(alone);
                    match back {
                        Ok(()) => return true,
                        Err(error) => Err(error.to_string()),
                    }
                }
                Some(Err(reason)) => Err(reason),
                // Who has taken it back lets it go.
                None => return false,
            },
        };
        match ended {
            Ok(()) => {
                tracing::info!("the machine runs on the other host, and what is left of it here is ended");
                if let Err(error) = machine.quit().await {
                    tracing::error!(%error, "what is left of the machine does not end");
                }
                return false;
            }
            Err(reason) => tracing::warn!(reason, "where the machine goes on is asked again"),
        }
        tokio::time::sleep(CONCLUDE_INTERVAL).await;
    }
}

/// A migration that has ended in its middle: what stands for it goes on.
pub(super) async fn let_go_standing(keeper: &Arc<Keeper>, machine: &Machine) {
    let _alone = keeper.no_take().await;
    let_go(keeper, machine).await;
}

/// The same, for one whose turn it is.
pub(super) async fn let_go(keeper: &Arc<Keeper>, machine: &Machine) {
    while machine.state().ending().is_none() {
        let gone = match desired_state::is_taking(keeper.home()) {
            Ok(false) => return,
            Ok(true) => keeper.let_go(machine).await.and_then(|()| keeper.note_taken()),
            Err(error) => Err(error),
        };
        match gone {
            Ok(()) => return,
            Err(error) => tracing::error!(%error, "the machine may stand for a migration that came to nothing"),
        }
        tokio::time::sleep(GO_INTERVAL).await;
    }
}
