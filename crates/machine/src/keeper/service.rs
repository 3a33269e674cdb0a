//! The keeper's socket: one request a connection.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use onecopy_control::{JsonLines, server};
use onecopy_guest_agent::protocol::{Command, LINE_BYTES_MAX};
use onecopy_hypervisor::{Agent, HypervisorError, Machine, State};
use onecopy_postgres::ServiceUser;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use super::protect::Protecting;
use super::run::Stop;
use super::{
    CheckpointTaken, KeeperReply, KeeperRequest, KeeperStatus, MachineState, MigrationOrder, ProtectionOrder,
    ProtectionStatus, backup_copy, checkpoint, guest, migrate, network, protect,
};
use crate::desired_state::{self, DesiredState, Found};
use crate::migration::{Arrival, ArrivalState, Departure};
use crate::{MachineError, MachineHome, hypervisor_failed};

/// How long a caller may take to say what it wants.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked how far the end of a protection is.
const PROTECTION_LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Progress that waits for a caller; one that reads more slowly misses some.
const PROGRESS_MAX: usize = 16;

/// What a keeper knows of its machine.
pub(super) struct Keeper {
    home: MachineHome,
    user: ServiceUser,
    status: Mutex<KeeperStatus>,
    agent: Mutex<Option<Agent>>,
    machine: OnceLock<Machine>,
    stops: mpsc::Sender<Stop>,
    /// Held while it is written down what the machine shall do.
    noting: Mutex<()>,
    /// Held while the machine stands for a checkpoint, and while somebody else makes it stand or run, or ends it.
    taking: tokio::sync::Mutex<()>,
    /// Held while a checkpoint is made, until it is durable, and while the machine goes to another host.
    checkpointing: tokio::sync::Mutex<()>,
    /// Set by who wants that a migration that is under way comes to nothing.
    migration: Mutex<Option<Arc<AtomicBool>>>,
    /// The machine is protected, or copied to be that.
    protecting: Mutex<Option<Arc<Protecting>>>,
    /// A connection over which this machine comes.
    incoming: (mpsc::Sender<UnixStream>, tokio::sync::Mutex<mpsc::Receiver<UnixStream>>),
    /// Who waits for a word about the machine that has come by this migration, and stands.
    deciding: Mutex<Option<(String, oneshot::Sender<bool>)>>,
}

impl Keeper {
    /// A machine that is only beginning.
    pub(super) fn new(home: MachineHome, user: ServiceUser, stops: mpsc::Sender<Stop>) -> Keeper {
        let status = KeeperStatus {
            state: MachineState::Starting,
            unresponsive_since_unix_ms: None,
            process_id: None,
            disk_process_id: None,
            disk_restarts: 0,
            memory_process_id: None,
            memory_restarts: 0,
            network_process_id: None,
            network_restarts: 0,
            network_failure: None,
            in_doubt: false,
            protection: None,
            keeper_process_id: std::process::id(),
            kernel: None,
        };
        let (agent, machine, noting) = (Mutex::default(), OnceLock::new(), Mutex::default());
        let (incoming, coming) = mpsc::channel(1);
        Keeper {
            home,
            user,
            status: Mutex::new(status),
            agent,
            machine,
            stops,
            noting,
            taking: tokio::sync::Mutex::default(),
            checkpointing: tokio::sync::Mutex::default(),
            migration: Mutex::default(),
            protecting: Mutex::default(),
            incoming: (incoming, tokio::sync::Mutex::new(coming)),
            deciding: Mutex::default(),
        }
    }

    /// The connection over which this machine comes; waits for it.
    pub(super) async fn incoming(&self) -> Option<UnixStream> {
        self.incoming.1.lock().await.recv().await
    }

    /// What somebody says of this migration, as long as this waits for it.
    pub(super) async fn decided(&self, token: &str) -> bool {
        let (says, said) = oneshot::channel();
        *self.deciding.lock().unwrap_or_else(PoisonError::into_inner) = Some((token.to_owned(), says));
        match said.await {
            Ok(goes) => goes,
            Err(_) => std::future::pending().await,
        }
    }

    /// Nobody's word is kept for later: it may be wrong then.
    fn decide(&self, token: &str, goes: bool) -> KeeperReply {
        let mut deciding = self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = deciding.take_if(|(which, _)| which == token);
        match waiting.map(|(_, waiting)| waiting.send(goes)) {
            Some(Ok(())) => KeeperReply::Done {},
            Some(Err(_)) | None => {
                let message = "it does not stand by this migration, waiting to hear where it goes on".to_owned();
                KeeperReply::Error { kind: None, message }
            }
        }
    }

    /// Whose the machine's processes are.
    pub(super) fn user(&self) -> &ServiceUser {
        &self.user
    }

    /// Sends the machine to another host. Who goes away cancels that, until it was given away.
    async fn migrate(
        self: &Arc<Keeper>,
        order: MigrationOrder,
        progress: &mpsc::Sender<KeeperReply>,
    ) -> Result<KeeperReply, MachineError> {
        let machine = self.machine.get().cloned();
        let machine = machine.ok_or_else(|| MachineError::DoesNotRun { name: self.home.name().clone() })?;
        let (keeper, is_cancelled, told) = (Arc::clone(self), Arc::new(AtomicBool::new(false)), progress.clone());
        let _cancels = Cancels(Arc::clone(&is_cancelled));
        let migrating = tokio::spawn(async move {
            let _alone = keeper.alone()?;
            *keeper.migration.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&is_cancelled));
            let outcome = migrate::migrate(&keeper, &machine, order, is_cancelled, told).await;
            *keeper.migration.lock().unwrap_or_else(PoisonError::into_inner) = None;
            if matches!(outcome, Ok(KeeperReply::Migrated(_))) {
                // Beside the answer: with the machine this keeper ends.
                tokio::spawn(async move {
                    if let Err(error) = machine.quit().await {
                        tracing::error!(%error, "what is left of the machine does not end");
                    }
                });
            }
            outcome
        });
        migrating.await.unwrap_or_else(|error| Err(MachineError::Task(format!("a migration ended: {error}"))))
    }

    fn cancel_migration(&self) -> KeeperReply {
        match &*self.migration.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(is_cancelled) => {
                is_cancelled.store(true, Ordering::Release);
                KeeperReply::Done {}
            }
            None => KeeperReply::Error { kind: None, message: "it goes nowhere just now".to_owned() },
        }
    }

    /// For whoever protects the machine, until [`Keeper::end_protection`]. None: somebody does.
    pub(super) fn begin_protection(&self) -> Option<Arc<Protecting>> {
        let mut protecting = self.protecting.lock().unwrap_or_else(PoisonError::into_inner);
        protecting.is_none().then(|| Arc::clone(protecting.insert(Arc::default())))
    }

    /// Nobody does any more.
    pub(super) fn end_protection(&self) {
        *self.protecting.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Somebody has it end.
    pub(super) fn is_stopping(&self) -> bool {
        self.status().state == MachineState::Stopping
    }

    /// Whether it is, or becomes, a copy that protects a machine of another host.
    fn stands_by(&self) -> bool {
        let is_copy = |record: Arrival| record.protects && record.state == ArrivalState::Begun;
        Arrival::of(&self.home).is_ok_and(|record| record.is_some_and(is_copy))
    }

    /// Checkpoints that its backup has had.
    pub(super) fn epochs_protected(&self) -> u64 {
        self.status().protection.as_ref().map_or(0, |status| status.epochs)
    }

    /// Whether somebody protects it, or tries to.
    pub(super) fn is_protected(&self) -> bool {
        self.protecting().is_some()
    }

    fn protecting(&self) -> Option<Arc<Protecting>> {
        self.protecting.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It shall end, and its connection with it.
    pub(super) fn cancel_protection(&self) {
        if let Some(protecting) = self.protecting() {
            protecting.is_cancelled.store(true, Ordering::Release);
        }
    }

    /// Changes what is told of its protection.
    pub(super) fn change_protection(&self, change: impl FnOnce(&mut ProtectionStatus)) {
        if let Some(status) = &mut self.status().protection {
            change(status);
        }
    }

    fn protect(self: &Arc<Keeper>, order: &ProtectionOrder) -> Result<(), MachineError> {
        let machine = self.machine.get();
        let machine = machine.ok_or_else(|| MachineError::DoesNotRun { name: self.home.name().clone() })?;
        protect::begin(self, machine, order)
    }

    /// Ends its protection; returns when nothing of it is left here.
    async fn unprotect(&self) -> Result<(), MachineError> {
        // First: no later keeper begins again.
        protect::forget_wanted(&self.home)?;
        self.cancel_protection();
        while self.is_protected() {
            tokio::time::sleep(PROTECTION_LOOK_INTERVAL).await;
        }
        let Some(machine) = self.machine.get() else { return Ok(()) };
        backup_copy::forget_left(&self.home, machine).await.map_err(|reason| {
            let (machine, to) = (self.home.name().to_string(), "its backup".to_owned());
            MachineError::Protection { machine, to, reason }
        })
    }

    /// Lets the machine go on at the host that protects it by this token; returns when it was given away, or is not.
    async fn yield_machine(&self, token: &str) -> Result<(), MachineError> {
        let refused = |reason: &str| {
            let (machine, to) = (self.home.name().to_string(), "you".to_owned());
            MachineError::Protection { machine, to, reason: reason.to_owned() }
        };
        let is_by_it = |departure: &Departure| departure.token == token && departure.is_whole;
        let (Some(protecting), Some(_)) = (self.protecting(), Departure::protecting(&self.home)?.filter(is_by_it))
        else {
            return Err(refused("its copy there is of no use, or not whole yet"));
        };
        // It stands for a moment again and again; that is not meant.
        if self.told().state == MachineState::Paused {
            return Err(refused("its processors stand: onecopy vm resume lets them go"));
        }
        protecting.is_to_yield.store(true, Ordering::Release);
        // Nobody's wish is done later: where this is given up, it is nobody's any more.
        let _wished = Wished(&protecting);
        while !desired_state::is_migrated(&self.home) {
            if Departure::protecting(&self.home)?.filter(is_by_it).is_none() {
                return Err(refused("it could not be given away, and is copied anew"));
            }
            tokio::time::sleep(PROTECTION_LOOK_INTERVAL).await;
        }
        Ok(())
    }

    /// Changes what is told.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut KeeperStatus) -> T) -> T {
        change(&mut self.status())
    }

    /// The machine runs.
    pub(super) fn set_machine(&self, machine: Machine) {
        self.change(|status| status.process_id = Some(machine.process_id()));
        // There is only one in a keeper's life.
        let _ = self.machine.set(machine);
    }

    /// The guest's agent has come.
    pub(super) fn set_agent(&self, agent: Agent, kernel: String) {
        *self.agent.lock().unwrap_or_else(PoisonError::into_inner) = Some(agent);
        self.change(|status| status.kernel = Some(kernel));
        self.set_silent(None);
    }

    /// The connection to the guest's agent is lost.
    pub(super) fn forget_agent(&self, since_unix_ms: u64) {
        *self.agent.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.set_silent(Some(since_unix_ms));
    }

    /// The guest has been unresponsive since then, or answers.
    pub(super) fn set_silent(&self, since_unix_ms: Option<u64>) {
        let mut status = self.status();
        status.unresponsive_since_unix_ms = since_unix_ms;
        if status.state != MachineState::Stopping {
            status.state = if since_unix_ms.is_some() { MachineState::Unresponsive } else { MachineState::Running };
        }
    }

    /// What is told: that it stands is QEMU's word, and says more than what the guest does not say.
    fn told(&self) -> KeeperStatus {
        let mut status = self.status().clone();
        let standing = self.machine.get().and_then(|machine| match machine.state() {
            State::Paused => match desired_state::find(&self.home, &self.user) {
                Found::Moved => Some(MachineState::Migrated),
                // For a moment.
                Found::Own(DesiredState::Taking) => None,
                _ => Some(MachineState::Paused),
            },
            State::Panicked | State::Failed { .. } => Some(MachineState::Failed),
            State::Incoming | State::Running | State::Ended(_) => None,
        });
        if let Some(standing) = standing.filter(|_| status.state != MachineState::Stopping) {
            status.state = standing;
        }
        status.unresponsive_since_unix_ms =
            status.unresponsive_since_unix_ms.filter(|_| status.state == MachineState::Unresponsive);
        let waits = self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        let has_come = waits.as_ref().is_some_and(|(_, says)| !says.is_closed());
        // One that stands and whose record is broken waits for a person.
        let stands = self.machine.get().is_some() && desired_state::is_arriving(&self.home);
        status.in_doubt = has_come || stands || Departure::is_in_doubt(&self.home);
        status
    }

    /// Why its guest has not got its addresses.
    pub(super) fn network_failure(&self) -> Option<String> {
        self.status().network_failure.clone()
    }

    /// The guest's agent, while it answers.
    pub(super) fn agent(&self) -> Option<Agent> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn status(&self) -> MutexGuard<'_, KeeperStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down what the machine shall do now, before it does it.
    pub(super) fn note(&self, standing: DesiredState) -> Result<(), MachineError> {
        let _noting = self.noting.lock().unwrap_or_else(PoisonError::into_inner);
        if standing != DesiredState::Stopping && self.status().state == MachineState::Stopping {
            return Err(MachineError::DoesNotRun { name: self.home.name().clone() });
        }
        desired_state::note(&self.home, standing)
    }

    /// A take has let the machine go on: it is written down that it runs, or that the stop goes on that came meanwhile.
    ///
    /// # Errors
    /// [`MachineError::Checkpoint`]: somebody else has let it go or ended it, so what was cut is not of one instant.
    pub(super) fn note_taken(&self) -> Result<(), MachineError> {
        let _noting = self.noting.lock().unwrap_or_else(PoisonError::into_inner);
        if !desired_state::is_taking(&self.home)? {
            let reason = "it was let go or ended while it was taken".to_owned();
            return Err(MachineError::Checkpoint { machine: self.home.name().to_string(), reason });
        }
        let is_stopping = self.status().state == MachineState::Stopping;
        desired_state::note(&self.home, if is_stopping { DesiredState::Stopping } else { DesiredState::Running })
    }

    /// Whose machine it is.
    pub(super) fn home(&self) -> &MachineHome {
        &self.home
    }

    /// Waits until no take makes the machine stand; none does as long as what is returned is held.
    pub(super) async fn no_take(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.taking.lock().await
    }

    /// Lets the machine go, where it may run.
    pub(super) async fn let_go(&self, machine: &Machine) -> Result<(), MachineError> {
        guest::let_go(&self.home, &self.user, machine).await
    }

    /// Makes the machine stand, or run again.
    async fn set_paused(self: &Arc<Keeper>, is_wanted: bool) -> Result<(), MachineError> {
        let does_not_run = || MachineError::DoesNotRun { name: self.home.name().clone() };
        let machine = self.machine.get().ok_or_else(does_not_run)?;
        // A take would let go what is to stand.
        let _alone = self.no_take().await;
        if is_wanted {
            self.note(DesiredState::Paused)?;
            return machine.pause().await.map_err(|error| hypervisor_failed(self.home.name(), error));
        }
        self.let_go(machine).await?;
        // One that was taken back has perhaps run elsewhere.
        network::announce_often(&self.home);
        self.note(DesiredState::Running)?;
        // So is one that was to be protected.
        protect::resume(self, machine);
        Ok(())
    }

    /// Takes a checkpoint, also when who has asked has gone.
    async fn checkpoint(
        self: &Arc<Keeper>,
        keep: Option<u64>,
        holds_server: bool,
    ) -> Result<CheckpointTaken, MachineError> {
        let machine = self.machine.get().cloned();
        let machine = machine.ok_or_else(|| MachineError::DoesNotRun { name: self.home.name().clone() })?;
        let keeper = Arc::clone(self);
        let taking = tokio::spawn(async move {
            let _alone = keeper.alone()?;
            checkpoint::checkpoint(&keeper, &machine, keep, holds_server).await
        });
        taking.await.unwrap_or_else(|error| Err(MachineError::Task(format!("taking a checkpoint ended: {error}"))))
    }

    /// Forgets the checkpoint of a held server, and what no checkpoint names.
    async fn forget_checkpoint(self: &Arc<Keeper>) -> Result<(), MachineError> {
        let _alone = self.alone()?;
        let home = self.home.clone();
        let forgotten = tokio::task::spawn_blocking(move || {
            let failed = |reason| MachineError::Checkpoint { machine: home.name().to_string(), reason };
            checkpoint::forget_held(&home).map_err(|error| failed(error.to_string()))
        });
        forgotten
            .await
            .unwrap_or_else(|error| Err(MachineError::Task(format!("forgetting checkpoints ended: {error}"))))
    }

    /// A fork that knows who it is, from now on: it is reached, and reaches others.
    async fn connect(&self) -> Result<(), MachineError> {
        let machine = self.machine.get();
        let machine = machine.ok_or_else(|| MachineError::DoesNotRun { name: self.home.name().clone() })?;
        guest::connect(&self.home, machine).await
    }

    /// For whoever takes a checkpoint. Nobody waits for that: those whose callers have gone would all be taken.
    pub(super) fn alone(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, MachineError> {
        self.checkpointing.try_lock().map_err(|_| {
            let reason = match self.protecting() {
                Some(_) => format!("it is protected: onecopy vm unprotect {} ends that", self.home.name()),
                None => "another one is being taken".to_owned(),
            };
            MachineError::Checkpoint { machine: self.home.name().to_string(), reason }
        })
    }

    /// The same, for who must.
    pub(super) async fn alone_in_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.checkpointing.lock().await
    }

    async fn answer(self: &Arc<Keeper>, request: KeeperRequest, progress: &mpsc::Sender<KeeperReply>) -> KeeperReply {
        let failed = |message: String| KeeperReply::Error { kind: None, message };
        match request {
            KeeperRequest::Status {} => KeeperReply::Status(self.told()),
            KeeperRequest::Agent { command, timeout_ms } => self.ask_agent(command, timeout_ms, progress).await,
            KeeperRequest::Pause {} => done(self.set_paused(true).await),
            KeeperRequest::Resume {} => done(self.set_paused(false).await),
            KeeperRequest::Checkpoint { keep, holds_server } => match self.checkpoint(keep, holds_server).await {
                Ok(taken) => KeeperReply::Checkpoint(taken),
                Err(error) => failed(error.to_string()),
            },
            KeeperRequest::Forget {} => done(self.forget_checkpoint().await),
            KeeperRequest::Connect {} => done(self.connect().await),
            KeeperRequest::Migrate(order) => match self.migrate(order, progress).await {
                Ok(reply) => reply,
                Err(error) => failed(error.to_string()),
            },
            KeeperRequest::CancelMigration {} => self.cancel_migration(),
            KeeperRequest::Protect(order) => done(self.protect(&order)),
            KeeperRequest::Unprotect {} => done(self.unprotect().await),
            KeeperRequest::Yield { token } => done(self.yield_machine(&token).await),
            KeeperRequest::Decide { token, goes } => self.decide(&token, goes),
            // It was seen to before.
            KeeperRequest::Receive {} => failed("nobody comes over this connection".to_owned()),
            KeeperRequest::Stop { .. } if self.stands_by() => {
                let name = self.home.name();
                failed(format!(
                    "it is a copy that stands by for a machine elsewhere; to give it up: onecopy vm unprotect {name} \
                     at that machine's host, or here onecopy vm migrate {name} --abandon"
                ))
            }
            KeeperRequest::Stop { force, timeout_ms } => {
                let (done, ended) = oneshot::channel();
                let stop = Stop { force, timeout: Duration::from_millis(timeout_ms), done };
                if self.stops.send(stop).await.is_err() {
                    return failed("the machine has ended already".to_owned());
                }
                match ended.await {
                    Ok(()) => KeeperReply::Stopped {},
                    Err(_) => failed("the keeper ended before the machine did".to_owned()),
                }
            }
        }
    }

    async fn ask_agent(&self, command: Command, timeout_ms: u64, progress: &mpsc::Sender<KeeperReply>) -> KeeperReply {
        let Some(agent) = self.agent() else {
            let message = "the guest's agent does not answer; it may be booting".to_owned();
            return KeeperReply::Error { kind: None, message };
        };
        let told = |told| {
            let _ = progress.try_send(KeeperReply::Progress(told));
        };
        match agent.request_with_progress(command, Duration::from_millis(timeout_ms), told).await {
            Ok(answer) => KeeperReply::Agent(answer),
            Err(HypervisorError::Agent { failure, .. }) => {
                KeeperReply::Error { kind: Some(failure.kind), message: failure.message }
            }
            Err(error) => KeeperReply::Error { kind: None, message: error.to_string() },
        }
    }
}

/// Dropped, the machine is not to go on at its backup, unless it is on its way.
struct Wished<'a>(&'a Protecting);

impl Drop for Wished<'_> {
    fn drop(&mut self) {
        self.0.is_to_yield.store(false, Ordering::Release);
    }
}

/// Dropped, it wants what it is of to come to nothing.
struct Cancels(Arc<AtomicBool>);

impl Drop for Cancels {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn done(outcome: Result<(), MachineError>) -> KeeperReply {
    match outcome {
        Ok(()) => KeeperReply::Done {},
        Err(error) => KeeperReply::Error { kind: None, message: error.to_string() },
    }
}

/// Answers until it is dropped.
pub(super) async fn serve(listener: UnixListener, keeper: Arc<Keeper>) {
    server::accept(listener, |stream| {
        let keeper = Arc::clone(&keeper);
        async move {
            if let Err(error) = converse(stream, &keeper).await {
                tracing::debug!(%error, "a caller has gone");
            }
        }
    })
    .await;
}

async fn converse(stream: UnixStream, keeper: &Arc<Keeper>) -> io::Result<()> {
    // The longest request is a file to write, in base64, with its envelope.
    let mut lines = JsonLines::new(stream, LINE_BYTES_MAX);
    let request = match tokio::time::timeout(REQUEST_TIMEOUT, lines.receive::<KeeperRequest>()).await {
        Ok(Ok(Some(Ok(request)))) => request,
        Ok(Ok(Some(Err(error)))) => {
            let message = format!("that is no request: {error}");
            return lines.send(&KeeperReply::Error { kind: None, message }).await;
        }
        // Who only looks whether somebody listens says nothing.
        Ok(Ok(None)) | Err(_) => return Ok(()),
        Ok(Err(error)) => return Err(error),
    };
    if request == (KeeperRequest::Receive {}) {
        lines.send(&KeeperReply::Done {}).await?;
        if let Some(stream) = lines.into_stream() {
            // One machine comes over one connection: another one is hung up on.
            let _ = keeper.incoming.0.try_send(stream);
        }
        return Ok(());
    }
    let (sender, mut progress) = mpsc::channel(PROGRESS_MAX);
    let answer = keeper.answer(request, &sender);
    tokio::pin!(answer);
    let last = loop {
        tokio::select! {
            biased;
            Some(told) = progress.recv() => lines.send(&told).await?,
            last = &mut answer => break last,
            // Dropped, the question to the agent ends the program that it has begun. A stop that was asked for goes on.
            () = lines.wait_left() => return Ok(()),
        }
    };
    lines.send(&last).await
}

#[cfg(test)]
mod tests;
