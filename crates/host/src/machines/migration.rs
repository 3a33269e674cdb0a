//! Machines that go to other hosts, and come from them.

mod arriving;

use std::time::{Duration, Instant};

use onecopy_machine::keeper::{MigrationEvent, MigrationOrder, Prediction};
use onecopy_machine::migration::{
    self, Arrival, Departure, DepartureState, Gone, HostOrder, MigrationResult, Unanswered, Verdict, Which,
};
use onecopy_machine::{END_TIMEOUT, Machine, MachineError, MachineHome, MachineName, Survivor, decision};
use serde::Serialize;
use tokio::task::JoinSet;

use super::Machines;
use super::decision::{GO_TIMEOUT, LOOK_INTERVAL, decide, decide_by_etcd, of_token, unknown};
use crate::HostError;

/// How often it is looked whether a machine that stands for a migration has its keeper.
const CARE_INTERVAL: Duration = Duration::from_secs(5);

/// What came of asking for a migration.
#[derive(Debug, Clone, PartialEq)]
pub enum Migrated {
    /// It runs there.
    Gone(MigrationResult),
    /// It would cost this.
    Predicted(Prediction),
}

/// What is known of a machine's last migrations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MigrationStatus {
    /// To another host.
    pub departure: Option<Departure>,
    /// Whether the machine was given away.
    pub is_given: bool,
    /// From another host.
    pub arrival: Option<Arrival>,
}

impl Machines {
    /// Sends a machine to another host; `told` hears what happens. Dropped, it stays here, unless it was given away.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], and those of [`Machine::migrate`].
    pub async fn migrate(
        &self,
        name: &MachineName,
        order: &MigrationOrder,
        told: &mut (dyn FnMut(MigrationEvent) + Send),
    ) -> Result<Migrated, HostError> {
        let machine = self.get(name)?;
        self.refuse_clusters(name, "its supervisor would start another one here")?;
        let dependents = machine.home().dependents()?;
        if let Some(dependent) = dependents.first() {
            let machines = vec![dependent.machine.to_string()];
            return Err(MachineError::StoodOn { name: name.clone(), machines }.into());
        }
        match machine.migrate(order, told).await? {
            Ok(result) => Ok(Migrated::Gone(result)),
            Err(predicted) => Ok(Migrated::Predicted(predicted)),
        }
    }

    /// Lets a migration that is under way come to nothing.
    ///
    /// # Errors
    /// [`MachineError::Keeper`]: there is none.
    pub async fn cancel_migration(&self, name: &MachineName) -> Result<(), HostError> {
        let machine = self.get(name)?;
        machine.cancel_migration().await?;
        let (home, begun) = (machine.home(), Instant::now());
        let (machine, to) = (name.to_string(), "another host".to_owned());
        loop {
            let departure = Departure::of(home)?;
            let reason = match departure.map(|departure| departure.state) {
                _ if home.is_migrated() => "it was given away already; --status tells what has become of it",
                Some(DepartureState::Kept) => return Ok(()),
                _ if begun.elapsed() >= GO_TIMEOUT => "it is told to stay, and has not ended yet; --status tells",
                _ => {
                    tokio::time::sleep(LOOK_INTERVAL).await;
                    continue;
                }
            };
            return Err(MachineError::Migration { machine, to, reason: reason.to_owned() }.into());
        }
    }

    /// What is known of a machine's last migrations.
    ///
    /// # Errors
    /// [`MachineError::NotThere`], [`MachineError::File`].
    pub fn migration(&self, name: &MachineName) -> Result<MigrationStatus, HostError> {
        let home = self.get(name)?.home().clone();
        let departure = Departure::of(&home)?;
        Ok(MigrationStatus { departure, is_given: home.is_migrated(), arrival: Arrival::of(&home)? })
    }

    /// A machine of which it was not known where it goes on: of one that was given away the other host is told again;
    /// one that has come is let go where it was given away, or, with `force`, where the host that it comes from cannot
    /// be reached: that is for a person to say, who knows that it is dead for good.
    ///
    /// # Errors
    /// [`MachineError::Migration`]: why it is still not known.
    pub async fn resume_migration(&self, name: &MachineName, force: bool) -> Result<String, HostError> {
        let machine = self.get(name)?;
        let home = machine.home();
        if home.is_arriving() {
            return self.resume_arrival(&machine, force).await;
        }
        let departure = self.given(home)?;
        let failed =
            |reason: String| MachineError::Migration { machine: name.to_string(), to: departure.to.clone(), reason };
        let gone = migration::ask::<Gone>(&departure.to, &departure.keys, &HostOrder::Go(departure.which(home))).await;
        match gone.map_err(|error| failed(error.to_string()))? {
            Gone::Running(forwards) => {
                Departure { state: DepartureState::Gone, ..departure.clone() }.conclude(home)?;
                if machine.process_id().is_some() {
                    machine.stop(true, END_TIMEOUT).await?;
                }
                let ports: Vec<String> = forwards.iter().map(ToString::to_string).collect();
                Ok(format!("{name} runs at {}; ports there: {}", departure.to, ports.join(", ")))
            }
            Gone::Lost(reason) => {
                self.take_back(&machine, &departure).await?;
                Ok(format!("{name} never ran at {} ({reason}), and goes on here", departure.to))
            }
        }
    }

    async fn resume_arrival(&self, machine: &Machine, force: bool) -> Result<String, HostError> {
        let (home, name) = (machine.home(), machine.home().name());
        let record = arrival(home)?;
        let failed = |reason: String| {
            let to = format!("this host from {}", record.origin);
            MachineError::Migration { machine: name.to_string(), to, reason }
        };
        let order = HostOrder::Verdict(record.which(home));
        match migration::ask::<Verdict>(&record.origin, &record.keys, &order).await {
            Ok(Verdict::Given) => {}
            Ok(Verdict::Kept) => return Err(failed("it goes on where it was".to_owned()).into()),
            Ok(Verdict::Undecided | Verdict::Unknown) => {
                return Err(failed("it is not decided there yet".to_owned()).into());
            }
            Err(Unanswered::Unreachable(_)) if force => {
                if decide_by_etcd(machine, &record).await == Some(Survivor::Source) {
                    return Err(failed("etcd has decided that it goes on where it was".to_owned()).into());
                }
            }
            Err(Unanswered::Unreachable(reason)) => {
                let remedy = "where that host is dead, and the machine will never run there again: --force";
                return Err(failed(format!("{reason}; {remedy}")).into());
            }
            Err(Unanswered::Silent(reason) | Unanswered::Refused(reason)) => return Err(failed(reason).into()),
        }
        match decide(machine, &record, true).await? {
            Gone::Running(_) => {
                machine.wait_answering(GO_TIMEOUT).await?;
                Ok(format!("{name} runs here; never let it go on where it came from"))
            }
            Gone::Lost(reason) => Err(failed(reason).into()),
        }
    }

    /// Ends a migration of which nothing more is to come: one that has come never runs here; one that was given away
    /// goes on here, when the other host says that it never will run there, or, with `force`, cannot be reached.
    ///
    /// # Errors
    /// [`MachineError::Migration`]: it runs there, or that is not known.
    pub async fn abandon_migration(&self, name: &MachineName, force: bool) -> Result<String, HostError> {
        let machine = self.get(name)?;
        let home = machine.home();
        if home.is_arriving() {
            return match decide(&machine, &arrival(home)?, false).await? {
                Gone::Lost(_) => {
                    Ok(format!("{name} never runs here; what is left of it goes with: onecopy vm delete {name}"))
                }
                Gone::Running(_) => {
                    let (machine, to) = (name.to_string(), "this host".to_owned());
                    Err(MachineError::Migration { machine, to, reason: "it runs here".to_owned() }.into())
                }
            };
        }
        if let Some(departure) = Departure::of(home)?.filter(|known| known.state == DepartureState::Gone && force) {
            Departure { is_whole: true, ..departure }.write(home)?;
            return Ok(format!(
                "what {name} has left here can be deleted; its disk there may miss what was not copied"
            ));
        }
        let departure = self.given(home)?;
        let failed =
            |reason: String| MachineError::Migration { machine: name.to_string(), to: departure.to.clone(), reason };
        // Never that it go on there: it is asked to write down that it never will.
        let order = HostOrder::Discard(departure.which(home));
        match migration::ask::<Gone>(&departure.to, &departure.keys, &order).await {
            Ok(Gone::Running(_)) => Err(failed("it runs there".to_owned()).into()),
            Err(Unanswered::Silent(reason) | Unanswered::Refused(reason)) => Err(failed(reason).into()),
            Err(Unanswered::Unreachable(reason)) if !force => {
                let remedy = "where it is certain that it does not run there, and never will: --force";
                Err(failed(format!("{reason}; {remedy}")).into())
            }
            Err(Unanswered::Unreachable(reason)) if is_decided_for_copy(home, &departure).await => {
                let key = decision(home.name(), &departure.token);
                let remedy = "where that host is gone for good, remove that word first: etcdctl del";
                Err(failed(format!("{reason}; etcd has decided that it goes on there; {remedy} {key}")).into())
            }
            Ok(Gone::Lost(_)) | Err(Unanswered::Unreachable(_)) => {
                self.take_back(&machine, &departure).await?;
                Ok(format!("{name} goes on here"))
            }
        }
    }

    async fn take_back(&self, machine: &Machine, departure: &Departure) -> Result<(), HostError> {
        let home = machine.home();
        departure.take_back(home, &self.user)?;
        if machine.process_id().is_some() {
            machine.set_paused(false).await?;
        }
        Ok(())
    }

    fn given(&self, home: &MachineHome) -> Result<Departure, HostError> {
        let departure = Departure::of(home)?.filter(|departure| departure.state != DepartureState::Gone);
        let (machine, to) = (home.name().to_string(), "another host".to_owned());
        let reason = "it was given to none, or runs there".to_owned();
        departure.filter(|_| home.is_migrated()).ok_or_else(|| MachineError::Migration { machine, to, reason }.into())
    }

    /// Gives machines another keeper that need one and whose own has died, and removes what has come to nothing; until
    /// it is dropped.
    pub(crate) async fn look_after_migrations(&self) {
        // Those are asked about beside: other hosts and etcd may be silent for long.
        let mut undecided = JoinSet::new();
        loop {
            match MachineHome::names(&self.directory.machines()) {
                Ok(names) => {
                    let homes = || names.iter().map(|name| MachineHome::of(&self.directory.machines(), name));
                    for home in homes() {
                        self.give_keeper(home).await;
                    }
                    while let Some(decided) = undecided.try_join_next() {
                        if let Ok(Err(error)) = decided {
                            tracing::warn!(%error, "whether a machine's copy goes on is not written down");
                        }
                    }
                    if undecided.is_empty() {
                        let machines = homes().map(|home| Machine::new(home, self.user.clone()));
                        for machine in machines.filter(Machine::is_undecided) {
                            undecided.spawn(async move { machine.resolve_departure().await });
                        }
                    }
                    // Behind them: other hosts are asked, and may be silent for long.
                    for home in homes().filter(|home| Arrival::is_broken_off(home) && !home.has_keeper()) {
                        self.clear(&home, Duration::ZERO).await;
                    }
                }
                Err(error) => tracing::warn!(%error, "machines that stand for a migration are not looked after"),
            }
            tokio::time::sleep(CARE_INTERVAL).await;
        }
    }

    async fn give_keeper(&self, home: MachineHome) {
        if !home.needs_keeper() || home.process_id().is_none() || home.has_keeper() {
            return;
        }
        tracing::info!(machine = %home.name(), "its keeper has died: the next one begins");
        if let Err(error) = Machine::new(home, self.user.clone()).ensure_keeper().await {
            tracing::warn!(%error, "a machine is not looked after");
        }
    }

    /// A machine that has come was given away: it goes on here, or never will.
    pub(crate) async fn go(&self, which: &Which) -> Result<Gone, HostError> {
        let machine = self.get(&which.name)?;
        let home = machine.home();
        decide(&machine, &of_token(home, &which.token)?, true).await
    }

    /// A machine that has come never goes on here, unless it does already.
    pub(crate) async fn discard(&self, which: &Which) -> Result<Gone, HostError> {
        let machine = self.get(&which.name)?;
        let record = of_token(machine.home(), &which.token)?;
        decide(&machine, &record, false).await
    }

    /// Whether a machine of this host was given away.
    pub(crate) async fn verdict(&self, which: &Which) -> Result<Verdict, HostError> {
        let machine = self.get(&which.name)?;
        let home = machine.home();
        let verdict = Departure::verdict(home, &which.token);
        if verdict != Verdict::Undecided || home.has_keeper() {
            return Ok(verdict);
        }
        // Its keeper has died: the next one decides it. Without a machine nobody will give it away.
        match home.find_process()? {
            Some(_) => machine.ensure_keeper().await?,
            None => machine.resolve_departure().await?,
        }
        Ok(Departure::verdict(home, &which.token))
    }

    /// The disk's directory and the snapshot that the host to which a machine was given may read.
    pub(crate) fn given_snapshot(&self, which: &Which) -> Result<(MachineHome, Departure), HostError> {
        let home = self.get(&which.name)?.home().clone();
        let departure = Departure::of(&home)?;
        let departure = departure.filter(|departure| departure.token == which.token && home.is_migrated());
        let reason = "it was not given away by this migration".to_owned();
        let refused = MachineError::Migration { machine: which.name.to_string(), to: "you".to_owned(), reason };
        Ok((home, departure.ok_or(refused)?))
    }

    /// The account of the machines.
    pub(crate) fn user(&self) -> &onecopy_postgres::ServiceUser {
        &self.user
    }

    /// The other host has all of the disk.
    pub(crate) fn note_whole(&self, which: &Which) -> Result<(), HostError> {
        let (home, departure) = self.given_snapshot(which)?;
        Ok(Departure { is_whole: true, ..departure }.write(&home)?)
    }
}

fn arrival(home: &MachineHome) -> Result<Arrival, MachineError> {
    Arrival::of(home)?.ok_or_else(|| unknown(home))
}

/// Whether etcd has decided that a copy goes on; else it has now that it never does, where it answers.
async fn is_decided_for_copy(home: &MachineHome, departure: &Departure) -> bool {
    let Some(etcd) = departure.etcd() else { return false };
    etcd.decide(home.name(), &departure.token, Survivor::Source).await == Ok(Survivor::Copy)
}

#[cfg(test)]
mod tests;
