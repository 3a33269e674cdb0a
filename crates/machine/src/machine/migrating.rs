//! A machine that goes to another host, or comes from one.

use std::io;

use onecopy_control::{JsonLines, socket};
use tokio::net::UnixStream;

use super::{ANSWER_TIMEOUT, CHECKPOINT_TIMEOUT, KEEPER_TIMEOUT, Machine, REPLY_BYTES_MAX};
use crate::MachineError;
use crate::keeper::{
    KeeperReply, KeeperRequest, MigrationEvent, MigrationOrder, Prediction, ProtectionOrder, backup_copy, protect,
};
use crate::migration::{Arrival, Departure, DepartureState, MigrationResult};

impl Machine {
    /// Sends it to another host; `told` hears what happens. Or only tells what that would cost, as the order says.
    ///
    /// # Errors
    /// [`MachineError::DoesNotRun`], [`MachineError::Keeper`] with why it stays, or why it is not known where it goes
    /// on.
    pub async fn migrate(
        &self,
        order: &MigrationOrder,
        told: &mut (dyn FnMut(MigrationEvent) + Send),
    ) -> Result<Result<MigrationResult, Prediction>, MachineError> {
        if self.process_id().is_none() {
            return Err(MachineError::DoesNotRun { name: self.home.name().clone() });
        }
        self.wait_answering(KEEPER_TIMEOUT).await?;
        let conversation = async {
            let stream = socket::connect(&self.home.keeper_socket()).await?;
            let mut lines = JsonLines::new(stream, REPLY_BYTES_MAX);
            lines.send(&KeeperRequest::Migrate(order.clone())).await?;
            loop {
                let reply = lines.receive().await?;
                match reply.ok_or_else(|| io::Error::other("it ended in the middle of its answer"))?? {
                    KeeperReply::Migration(event) => told(event),
                    last => return Ok::<_, io::Error>(last),
                }
            }
        };
        match conversation.await {
            Ok(KeeperReply::Migrated(result)) => Ok(Ok(result)),
            Ok(KeeperReply::Predicted(prediction)) => Ok(Err(prediction)),
            Ok(KeeperReply::Error { message, .. }) => Err(self.keeper_failed(message)),
            Ok(other) => Err(self.keeper_failed(format!("answered {other:?}"))),
            Err(reason) => match Departure::of(&self.home)? {
                // It has ended with its machine, and could say no more.
                Some(Departure { state: DepartureState::Gone, result: Some(result), .. }) => Ok(Ok(result)),
                _ => Err(self.keeper_failed(format!(
                    "is lost ({reason}); onecopy vm migrate {} --status tells where the machine goes on",
                    self.home.name()
                ))),
            },
        }
    }

    /// Lets a migration that is under way come to nothing.
    ///
    /// # Errors
    /// [`MachineError::Keeper`]: there is none.
    pub async fn cancel_migration(&self) -> Result<(), MachineError> {
        self.done(&KeeperRequest::CancelMigration {}, ANSWER_TIMEOUT).await
    }

    /// Says of a machine that has come by this migration, and stands, whether it goes on here. What comes of it,
    /// [`Arrival`] tells.
    ///
    /// # Errors
    /// [`MachineError::Keeper`], also while its keeper waits for nobody's word.
    pub async fn decide(&self, token: &str, goes: bool) -> Result<(), MachineError> {
        self.ensure_keeper().await?;
        self.done(&KeeperRequest::Decide { token: token.to_owned(), goes }, ANSWER_TIMEOUT).await
    }

    /// A machine that comes, and of which nothing runs, never runs here: written down. False: somebody looks after it.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: it is here; [`MachineError::Directory`].
    pub async fn discard_arrival(&self, token: &str) -> Result<bool, MachineError> {
        let Some(_lock) = self.take_keeper_lock().await? else { return Ok(false) };
        if self.process_id().is_some() {
            return Ok(false);
        }
        Arrival::discard(&self.home, token)?;
        Ok(true)
    }

    /// What has become of a migration or protection of a machine that does not run is written down, where nobody looks
    /// after it.
    ///
    /// # Errors
    /// [`MachineError::Directory`].
    pub async fn resolve_departure(&self) -> Result<(), MachineError> {
        match self.take_keeper_lock().await? {
            Some(lock) if self.home.find_process()?.is_none() => match backup_copy::undecided(&self.home)? {
                None => Departure::resolve_ended(&self.home),
                Some(_) => {
                    // Others are asked, and nobody waits for that.
                    drop(lock);
                    backup_copy::decide_undecided(&self.home).await
                }
            },
            _ => Ok(()),
        }
    }

    /// Nothing of it runs, nobody looks after it, and whether its copy elsewhere goes on was for etcd to decide, which
    /// has not, or the copy's host has not said what came of it.
    pub fn is_undecided(&self) -> bool {
        let is_undecided = || backup_copy::undecided(&self.home).is_ok_and(|known| known.is_some());
        !self.home.has_keeper() && self.process_id().is_none() && is_undecided()
    }

    /// Of a machine that does not run and was protected: asks the other host whether it goes on there, and writes that
    /// down. Nothing happens where somebody looks after it.
    ///
    /// # Errors
    /// [`MachineError::Protection`]: that is not known; [`MachineError::Directory`].
    pub async fn resolve_copy(&self) -> Result<(), MachineError> {
        let Some(_lock) = self.take_keeper_lock().await? else { return Ok(()) };
        if self.home.find_process()?.is_some() {
            return Ok(());
        }
        match backup_copy::check_start(&self.home, &self.user).await {
            Ok(()) | Err(MachineError::Moved { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Has it copied to another host, again and again; its status tells how far that is.
    ///
    /// # Errors
    /// [`MachineError::DoesNotRun`], [`MachineError::Keeper`] with why it cannot be.
    pub async fn protect(&self, order: &ProtectionOrder) -> Result<(), MachineError> {
        if self.process_id().is_none() {
            return Err(MachineError::DoesNotRun { name: self.home.name().clone() });
        }
        self.wait_answering(KEEPER_TIMEOUT).await?;
        self.done(&KeeperRequest::Protect(order.clone()), ANSWER_TIMEOUT).await
    }

    /// Protects it no more. Of one that does not run its backup is asked to forget it; with `force` one that is not
    /// reached is taken for one that never runs it, and etcd is not waited for.
    ///
    /// # Errors
    /// [`MachineError::Moved`], [`MachineError::Protection`], [`MachineError::Keeper`].
    pub async fn unprotect(&self, force: bool) -> Result<(), MachineError> {
        if self.process_id().is_some() {
            self.ensure_keeper().await?;
            return self.done(&KeeperRequest::Unprotect { force }, CHECKPOINT_TIMEOUT).await;
        }
        let lock = self.take_keeper_lock().await?;
        let _lock = lock.ok_or_else(|| self.keeper_failed("is beginning, or ending; try again".to_owned()))?;
        let known = Departure::of(&self.home)?.filter(|known| known.protects && known.state == DepartureState::Begun);
        if let Some(departure) = known {
            backup_copy::forget_backup(&self.home, &self.user, &departure, force).await?;
        }
        protect::forget_wanted(&self.home)
    }

    /// Has it go on at the host that protects it by this token; returns once it was given away.
    ///
    /// # Errors
    /// [`MachineError::Keeper`]: why it was not.
    pub async fn yield_to(&self, token: &str) -> Result<(), MachineError> {
        self.ensure_keeper().await?;
        self.done(&KeeperRequest::Yield { token: token.to_owned() }, KEEPER_TIMEOUT).await
    }

    /// Starts a keeper for a machine that comes; what is said over the connection to it is the source's.
    ///
    /// # Errors
    /// [`MachineError::Runs`], [`MachineError::Keeper`].
    pub async fn receive(&self) -> Result<UnixStream, MachineError> {
        let lock = self.take_keeper_lock().await?;
        let lock = lock.ok_or_else(|| MachineError::Runs { name: self.home.name().clone() })?;
        self.spawn_keeper(&lock, false)?;
        drop(lock);
        self.ensure_keeper().await?;
        let asking = async {
            let mut lines = JsonLines::new(socket::connect(&self.home.keeper_socket()).await?, REPLY_BYTES_MAX);
            lines.send(&KeeperRequest::Receive {}).await?;
            match lines.receive().await? {
                Some(Ok(KeeperReply::Done {})) => Ok(lines.into_stream()),
                other => Err(io::Error::other(format!("it answered {other:?}"))),
            }
        };
        let stream = asking.await.map_err(|error| self.keeper_failed(format!("does not listen: {error}")))?;
        stream.ok_or_else(|| self.keeper_failed("says more than it was asked".to_owned()))
    }
}
