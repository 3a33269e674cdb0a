//! What the parts of a keeper share: what is known of its machine, whose turn it is, and what is told of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use onecopy_hypervisor::{Agent, Machine, State};
use onecopy_postgres::ServiceUser;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use super::memory_file::MemoryOpen;
use super::protection::Protecting;
use super::{KeeperStatus, MachineState, ProtectionStatus};
use crate::desired_state::{self, DesiredState, Found};
use crate::migration::Departure;
use crate::{MachineError, MachineHome};

/// What a keeper knows of its machine.
pub(super) struct Keeper {
    pub(super) home: MachineHome,
    pub(super) user: ServiceUser,
    pub(super) status: Mutex<KeeperStatus>,
    pub(super) agent: Mutex<Option<Agent>>,
    pub(super) machine: OnceLock<Machine>,
    pub(super) stops: mpsc::Sender<Stop>,
    /// Held while it is written down what the machine shall do.
    pub(super) noting: Mutex<()>,
    /// Held while the machine stands for a checkpoint, and while somebody else makes it stand or run, or ends it.
    pub(super) taking: tokio::sync::Mutex<()>,
    /// Held while a checkpoint is made, until it is durable, and while the machine goes to another host.
    pub(super) checkpointing: tokio::sync::Mutex<()>,
    /// Set by who wants that a migration that is under way comes to nothing.
    pub(super) migration: Mutex<Option<Arc<AtomicBool>>>,
    /// The machine is protected, or copied to be that.
    pub(super) protecting: Mutex<Option<Arc<Protecting>>>,
    /// A person has said that no copy of it ever goes on: that counts where nobody says otherwise.
    pub(super) gives_copy_up: AtomicBool,
    /// A connection over which this machine comes.
    pub(super) incoming: (mpsc::Sender<UnixStream>, tokio::sync::Mutex<mpsc::Receiver<UnixStream>>),
    /// Who waits for a word about the machine that has come by this migration, and stands.
    pub(super) deciding: Mutex<Option<(String, oneshot::Sender<bool>)>>,
    /// Who has the memory open of a machine that comes.
    pub(super) memory_open: MemoryOpen,
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
            gives_copy_up: AtomicBool::default(),
            incoming: (incoming, tokio::sync::Mutex::new(coming)),
            deciding: Mutex::default(),
            memory_open: MemoryOpen::default(),
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

    /// Whose the machine's processes are.
    pub(super) fn user(&self) -> &ServiceUser {
        &self.user
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

    /// Checkpoints that its backup has had.
    pub(super) fn epochs_protected(&self) -> u64 {
        self.status().protection.as_ref().map_or(0, |status| status.epochs)
    }

    /// Whether somebody protects it, or tries to.
    pub(super) fn is_protected(&self) -> bool {
        self.protecting().is_some()
    }

    pub(super) fn protecting(&self) -> Option<Arc<Protecting>> {
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
    pub(super) fn told(&self) -> KeeperStatus {
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

    pub(super) fn status(&self) -> MutexGuard<'_, KeeperStatus> {
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
}

/// A request that the machine ends.
pub(super) struct Stop {
    /// At once.
    pub force: bool,
    /// How long the guest may take.
    pub timeout: Duration,
    /// Told when nothing but the keeper runs any more.
    pub done: oneshot::Sender<()>,
}
