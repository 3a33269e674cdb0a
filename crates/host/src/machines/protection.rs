//! Machines that other hosts protect, and those that are protected here.

use std::time::Duration;

use onecopy_machine::keeper::{ProtectionOrder, ProtectionState, ProtectionStatus, unix_ms};
use onecopy_machine::migration::{self, Arrival, Departure, Gone, HostOrder, Unanswered, Verdict, Which};
use onecopy_machine::{MachineError, MachineName, Survivor};

use super::Machines;
use super::decision::{GO_TIMEOUT, decide, decide_by_etcd};
use crate::HostError;

/// How often it is looked how far a protection is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

impl Machines {
    /// Protects a machine by another host; `told` hears how far that is. Returns once it is protected.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], [`MachineError::Keeper`], [`MachineError::Protection`]: why it is not, and nobody
    /// tries again.
    pub async fn protect(
        &self,
        name: &MachineName,
        order: &ProtectionOrder,
        told: &mut (dyn FnMut(&ProtectionStatus) + Send),
    ) -> Result<(), HostError> {
        let machine = self.get(name)?;
        self.refuse_clusters(name, "its supervisor would start another one here")?;
        machine.protect(order).await?;
        loop {
            match machine.status().await?.protection {
                Some(status) if status.state == ProtectionState::Copying => told(&status),
                Some(status) if status.state == ProtectionState::Protected => return Ok(()),
                status => {
                    let reason = status.and_then(|status| status.reason).unwrap_or_else(|| "it ended".to_owned());
                    machine.unprotect(false).await?;
                    let (machine, to) = (name.to_string(), order.to.clone());
                    return Err(MachineError::Protection { machine, to, reason }.into());
                }
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Protects a machine no more. One that does not run, and whose backup may have gone on, needs the word of that
    /// host, or, with `force`, of a person who knows that it does not run there.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: it runs there; [`MachineError::Protection`]: that is not known.
    pub async fn unprotect(&self, name: &MachineName, force: bool) -> Result<(), HostError> {
        Ok(self.get(name)?.unprotect(force).await?)
    }

    /// Lets a machine go on here that is protected here: where it runs it is given away, with all that it has sent.
    /// Where its host cannot be reached that is for a person to say, by `force`, who knows that it never runs there
    /// again.
    ///
    /// # Errors
    /// [`MachineError::Protection`]: why it does not.
    pub async fn fail_over(&self, name: &MachineName, force: bool) -> Result<String, HostError> {
        let machine = self.get(name)?;
        let home = machine.home();
        let refused = |reason: String| {
            let (machine, to) = (name.to_string(), "this host".to_owned());
            MachineError::Protection { machine, to, reason }
        };
        let record = Arrival::of(home)?.filter(|record| record.protects && home.is_arriving());
        let record = record.ok_or_else(|| refused("no copy of it stands by here".to_owned()))?;
        // What it does not say is not taken for silence: epochs may come.
        let status = if home.has_keeper() { machine.status().await?.protection } else { None };
        // Epochs come: whatever its host's daemon says, it runs there.
        let is_followed = status.as_ref().is_some_and(|status| status.state == ProtectionState::Protected);
        let order = HostOrder::Yield(record.which(home));
        let answered = migration::ask::<Verdict>(&record.origin, &record.keys, &order).await;
        let of_etcd = match &answered {
            Err(Unanswered::Unreachable(_) | Unanswered::Silent(_)) if !is_followed => {
                decide_by_etcd(&machine, &record).await
            }
            Ok(Verdict::Unknown) if force && !is_followed => decide_by_etcd(&machine, &record).await,
            _ => None,
        };
        match answered {
            Ok(Verdict::Given) => {}
            Ok(Verdict::Kept) => return Err(refused("it goes on where it is".to_owned()).into()),
            _ if of_etcd == Some(Survivor::Copy) => {}
            _ if of_etcd == Some(Survivor::Source) => {
                return Err(refused("etcd has decided that it goes on where it is".to_owned()).into());
            }
            // One that answers may run it.
            Ok(Verdict::Unknown) | Err(Unanswered::Unreachable(_) | Unanswered::Silent(_)) if force && !is_followed => {
            }
            Ok(Verdict::Undecided) => {
                let remedy = "it may run there; where it hangs, kill its QEMU there, or switch that host off";
                return Err(refused(format!("its host has not let it go; {remedy}")).into());
            }
            Ok(Verdict::Unknown) => return Err(refused("its host knows nothing of it".to_owned()).into()),
            Err(Unanswered::Unreachable(reason) | Unanswered::Silent(reason)) if !is_followed => {
                let age = status.and_then(|status| status.newest_unix_ms).map_or_else(String::new, |newest| {
                    format!("; what is here of it is {:.1} s old", unix_ms().saturating_sub(newest) as f64 / 1e3)
                });
                let remedy = "where its host is dead, and it never runs there again: --force (where it has run on \
                              alone since it was last heard of, what it sent is lost)";
                return Err(refused(format!("{reason}{age}; {remedy}")).into());
            }
            Err(reason) => return Err(refused(reason.to_string()).into()),
        }
        match decide(&machine, &record, true).await? {
            Gone::Running(_) => {
                machine.wait_answering(GO_TIMEOUT).await?;
                Ok(format!("{name} runs here; never let it go on where it came from"))
            }
            Gone::Lost(reason) => Err(refused(reason).into()),
        }
    }

    /// A machine that another host protects goes on there, if that is possible.
    pub(crate) async fn yield_machine(&self, which: &Which) -> Result<Verdict, HostError> {
        let Ok(machine) = self.get(&which.name) else { return Ok(Verdict::Unknown) };
        let verdict = self.verdict(which).await?;
        if verdict != Verdict::Undecided || machine.process_id().is_none() {
            return Ok(verdict);
        }
        machine.yield_to(&which.token).await?;
        Ok(Departure::verdict(machine.home(), &which.token))
    }
}
