//! The keeper's socket: one request a connection.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use onecopy_control::{JsonLines, server};
use onecopy_guest_agent::protocol::{Command, LINE_BYTES_MAX};
use onecopy_hypervisor::{HypervisorError, Machine};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use super::admission::check_runs;
use super::link::ALONE_AFTER;
use super::protection::Protecting;
use super::state::{Keeper, Stop};
use super::{
    CheckpointTaken, KeeperReply, KeeperRequest, MachineState, MigrationOrder, ProtectionOrder, backup_copy,
    checkpoint, guest, migrate, network, protect,
};
use crate::desired_state::{self, DesiredState};
use crate::migration::Departure;
use crate::{MachineError, hypervisor_failed};

/// How long a caller may take to say what it wants.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked how far the end of a protection is.
const PROTECTION_LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How long that may take: longer than a host may be fenced after its copy was lost.
const UNPROTECT_TIMEOUT: Duration = ALONE_AFTER.saturating_add(Duration::from_secs(10));

/// Progress that waits for a caller; one that reads more slowly misses some.
const PROGRESS_MAX: usize = 16;

impl Keeper {
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

    /// Sends the machine to another host. Who goes away cancels that, until it was given away.
    async fn migrate(
        self: &Arc<Keeper>,
        order: MigrationOrder,
        progress: &mpsc::Sender<KeeperReply>,
    ) -> Result<KeeperReply, MachineError> {
        let machine = self.running()?.clone();
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

    fn protect(self: &Arc<Keeper>, order: &ProtectionOrder) -> Result<(), MachineError> {
        let machine = self.running()?;
        protect::begin(self, machine, order)
    }

    /// Ends its protection; returns when nothing of it is left here.
    async fn unprotect(self: &Arc<Keeper>, force: bool) -> Result<(), MachineError> {
        let refused = |reason: String| {
            let (machine, to) = (self.home.name().to_string(), "its backup".to_owned());
            MachineError::Protection { machine, to, reason }
        };
        self.check_no_copy()?;
        // First: no later keeper begins again.
        protect::forget_wanted(&self.home)?;
        if force {
            self.gives_copy_up.store(true, Ordering::Release);
        }
        self.cancel_protection();
        let ended = async {
            // A keeper that just begins has not reached it yet.
            let machine = loop {
                match self.machine.get().filter(|_| !self.is_protected()) {
                    Some(machine) => break machine,
                    None => tokio::time::sleep(PROTECTION_LOOK_INTERVAL).await,
                }
            };
            let forgotten = backup_copy::forget_left(self, machine).await;
            if forgotten.is_err() {
                protect::if_given(self, machine);
            }
            forgotten
        };
        let ended = tokio::time::timeout(UNPROTECT_TIMEOUT, ended).await.unwrap_or_else(|_| {
            let reason = self.status().protection.as_ref().and_then(|status| status.reason.clone());
            Err(reason.unwrap_or_else(|| "its last copy has not come to an end".to_owned()))
        });
        if desired_state::is_migrated(&self.home) {
            return Err(MachineError::Moved { name: self.home.name().clone() });
        }
        ended.map_err(refused)
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

    /// Lets the machine go, where it may run.
    pub(super) async fn let_go(&self, machine: &Machine) -> Result<(), MachineError> {
        guest::let_go(&self.home, &self.user, machine).await
    }

    /// Makes the machine stand, or run again.
    async fn set_paused(self: &Arc<Keeper>, is_wanted: bool) -> Result<(), MachineError> {
        let machine = self.running()?;
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
        let machine = self.running()?.clone();
        let keeper = Arc::clone(self);
        let taking = tokio::spawn(async move {
            let _alone = keeper.alone()?;
            checkpoint::checkpoint(&keeper, &machine, keep, holds_server).await
        });
        taking.await.unwrap_or_else(|error| Err(MachineError::Task(format!("taking a checkpoint ended: {error}"))))
    }

    /// Forgets these checkpoints and that of a held server, and what no checkpoint names, also when who has asked has
    /// gone: no take, and no migration, begins before it is done.
    async fn forget_checkpoints(self: &Arc<Keeper>, numbers: Vec<u64>) -> Result<(), MachineError> {
        let machine = self.running()?.clone();
        let keeper = Arc::clone(self);
        let forgetting = tokio::spawn(async move {
            let _alone = keeper.alone()?;
            let home = keeper.home.clone();
            if desired_state::is_migrated(&home) {
                // Its disk's snapshots are the other host's to read.
                return Err(MachineError::Moved { name: home.name().clone() });
            }
            if !numbers.is_empty() {
                check_runs(&home, &machine)?;
            }
            let forgotten = tokio::task::spawn_blocking(move || {
                let failed = |reason| MachineError::Checkpoint { machine: home.name().to_string(), reason };
                checkpoint::forget_served(&home, &numbers).map_err(|error| failed(error.to_string()))
            });
            forgotten.await.unwrap_or_else(|error| Err(MachineError::Task(error.to_string())))
        });
        forgetting
            .await
            .unwrap_or_else(|error| Err(MachineError::Task(format!("forgetting checkpoints ended: {error}"))))
    }

    /// A fork that knows who it is, from now on: it is reached, and reaches others.
    async fn connect(&self) -> Result<(), MachineError> {
        let machine = self.running()?;
        network::connect(&self.home, machine).await
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
            KeeperRequest::Forget {} => done(self.forget_checkpoints(Vec::new()).await),
            KeeperRequest::ForgetCheckpoints { numbers } => done(self.forget_checkpoints(numbers).await),
            KeeperRequest::Connect {} => done(self.connect().await),
            KeeperRequest::Migrate(order) => match self.migrate(order, progress).await {
                Ok(reply) => reply,
                Err(error) => failed(error.to_string()),
            },
            KeeperRequest::CancelMigration {} => self.cancel_migration(),
            KeeperRequest::Protect(order) => done(self.protect(&order)),
            KeeperRequest::Unprotect { force } => done(self.unprotect(force).await),
            KeeperRequest::Yield { token } => done(self.yield_machine(&token).await),
            KeeperRequest::Decide { token, goes } => self.decide(&token, goes),
            // It was seen to before.
            KeeperRequest::Receive {} => failed("nobody comes over this connection".to_owned()),
            KeeperRequest::Stop { force, timeout_ms } => {
                if let Err(error) = self.check_is_here() {
                    return failed(error.to_string());
                }
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
