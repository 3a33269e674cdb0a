//! Whether a machine that has come, or whose copy stands by, goes on here.

use std::time::{Duration, Instant};

use onecopy_machine::migration::{Arrival, Gone};
use onecopy_machine::{Machine, MachineError, MachineHome, Survivor};

use crate::HostError;

/// How long a machine may take to go on that was given away.
pub(super) const GO_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is looked whether it does.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Says of a machine that has come whether it goes on here, until that is written down; what is written down counts.
pub(super) async fn decide(machine: &Machine, record: &Arrival, goes: bool) -> Result<Gone, HostError> {
    let (home, begun) = (machine.home(), Instant::now());
    loop {
        if let Some(gone) = of_token(home, &record.token)?.outcome(home)? {
            return Ok(gone);
        }
        let said = if machine.process_id().is_none() && !home.has_keeper() {
            // Nothing of its memory is there any more: no later start of it begins.
            machine.discard_arrival(&record.token).await.map(|_| ())
        } else {
            machine.decide(&record.token, goes).await
        };
        if begun.elapsed() >= GO_TIMEOUT {
            said?;
            let (machine, to) = (home.name().to_string(), "this host".to_owned());
            let reason = "that is not decided yet; ask again".to_owned();
            return Err(MachineError::Migration { machine, to, reason }.into());
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Whether etcd lets it go on here, where there is a copy that could; none: that is not known, or etcd has no say.
pub(super) async fn decide_by_etcd(machine: &Machine, record: &Arrival) -> Option<Survivor> {
    let home = machine.home();
    let etcd = record.etcd().filter(|_| home.has_keeper() && home.process_id().is_some())?;
    let decided = etcd.decide(home.name(), &record.token, Survivor::Copy).await;
    decided.inspect_err(|reason| tracing::warn!(reason, "whether the machine goes on here is not known")).ok()
}

pub(super) fn unknown(home: &MachineHome) -> MachineError {
    let (machine, to) = (home.name().to_string(), "this host".to_owned());
    MachineError::Migration { machine, to, reason: "no such migration is known here".to_owned() }
}

pub(super) fn of_token(home: &MachineHome, token: &str) -> Result<Arrival, MachineError> {
    Arrival::of(home)?.filter(|record| record.token == token).ok_or_else(|| unknown(home))
}
