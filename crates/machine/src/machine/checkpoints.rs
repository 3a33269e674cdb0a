//! Checkpoints of a machine, and beginning at one.

use std::fs;
use std::io::ErrorKind;
use std::time::Duration;

use onecopy_checkpoint::image::{Checkpoint, Image};

use super::{CHECKPOINT_TIMEOUT, KEEPER_TIMEOUT, Machine, RELEASE_TIMEOUT, WAY_TIMEOUT};
use crate::fork::StartPoint;
use crate::keeper::{self, CheckpointTaken, KeeperReply, KeeperRequest};
use crate::migration::Arrival;
use crate::{MachineError, MachineHome};

/// How long a machine may take to begin at a checkpoint: its memory is written first.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(600);

impl Machine {
    /// Takes a checkpoint while it runs, durable when this returns; the oldest are forgotten where more than `keep` are
    /// there then.
    ///
    /// # Errors
    /// [`MachineError::DoesNotRun`], [`MachineError::Keeper`] with what kept it from being taken.
    pub async fn checkpoint(&self, keep: Option<u64>) -> Result<CheckpointTaken, MachineError> {
        self.take_checkpoint(keep, false).await
    }

    /// The same, with the guest's server held for the instant: in what goes on from it the server does nothing before
    /// it is let go on, or is ended. It is to be forgotten with [`Machine::forget_checkpoint`]: until then no other one
    /// is taken while a fork is made of it, and the next one forgets it.
    ///
    /// # Errors
    /// As [`Machine::checkpoint`], also where the guest's agent cannot do that.
    pub async fn checkpoint_of_held_server(&self) -> Result<CheckpointTaken, MachineError> {
        self.take_checkpoint(None, true).await
    }

    /// Forgets its checkpoint of a held server, where it has one, and what no checkpoint names: memory that was frozen
    /// for forks, which those that run keep, and snapshots of its disk that no other disk lies over. One that does not
    /// run keeps all.
    ///
    /// # Errors
    /// [`MachineError::Keeper`].
    pub async fn forget_checkpoint(&self) -> Result<(), MachineError> {
        if self.process_id().is_none() {
            return Ok(());
        }
        self.done(&KeeperRequest::Forget {}, CHECKPOINT_TIMEOUT).await
    }

    /// Forgets these of its checkpoints: what others hold the changes since goes into those. Where it does not run the
    /// snapshots of its disk stay until it forgets some, or takes one, while it runs.
    ///
    /// # Errors
    /// [`MachineError::Checkpoint`], also where one of them is not there: then none is forgotten;
    /// [`MachineError::Keeper`].
    pub async fn forget_checkpoints(&self, numbers: &[u64]) -> Result<(), MachineError> {
        for number in numbers {
            self.find_checkpoint(Some(*number))?;
        }
        let (home, numbers) = (self.home.clone(), numbers.to_vec());
        if self.process_id().is_some() {
            self.wait_answering(KEEPER_TIMEOUT).await?;
            return self.done(&KeeperRequest::ForgetCheckpoints { numbers }, CHECKPOINT_TIMEOUT).await;
        }
        // One that is started meanwhile has what it begins at open already, or is told that it is not there.
        let forgotten = tokio::task::spawn_blocking(move || {
            let failed = |reason| MachineError::Checkpoint { machine: home.name().to_string(), reason };
            keeper::forget_at_rest(&home, &numbers).map_err(|error| failed(error.to_string()))
        });
        forgotten
            .await
            .unwrap_or_else(|error| Err(MachineError::Task(format!("forgetting checkpoints ended: {error}"))))
    }

    async fn take_checkpoint(&self, keep: Option<u64>, holds_server: bool) -> Result<CheckpointTaken, MachineError> {
        if self.process_id().is_none() {
            return Err(MachineError::DoesNotRun { name: self.home.name().clone() });
        }
        self.wait_answering(KEEPER_TIMEOUT).await?;
        match self
            .ask(
                &KeeperRequest::Checkpoint { keep, holds_server },
                CHECKPOINT_TIMEOUT + RELEASE_TIMEOUT * 3 + WAY_TIMEOUT,
                &|_| (),
            )
            .await?
        {
            KeeperReply::Checkpoint(taken) => Ok(taken),
            KeeperReply::Error { message, .. } => Err(self.keeper_failed(message)),
            other => Err(self.keeper_failed(format!("answered {other:?}"))),
        }
    }

    /// Its checkpoints, oldest first.
    ///
    /// # Errors
    /// [`MachineError::Memory`]: they cannot be read.
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>, MachineError> {
        let directory = self.home.checkpoints();
        if !directory.join("machine").exists() {
            return Ok(Vec::new());
        }
        Ok(Image::open(&directory).map_err(self.home.memory_failed())?.checkpoints())
    }

    /// Starts it as it was at a checkpoint, the last one where none is named, and waits until its guest answers. What
    /// it did since is lost to it; the checkpoints stay.
    ///
    /// # Errors
    /// [`MachineError::Runs`], [`MachineError::Checkpoint`], and as [`Machine::start`].
    pub async fn restore(&self, number: Option<u64>) -> Result<u64, MachineError> {
        self.check_disk_is_here()?;
        let number = self.find_checkpoint(number)?;
        self.begin_at(&StartPoint::own(&self.home, number)?).await?;
        Ok(number)
    }

    /// Refuses what would lie over a disk that still comes from another host: nobody would fetch the rest.
    ///
    /// # Errors
    /// [`MachineError::Checkpoint`].
    pub fn check_disk_is_here(&self) -> Result<(), MachineError> {
        match Arrival::of(&self.home)? {
            Some(Arrival { is_whole: false, .. }) => {
                let reason = "its disk is not all here yet; `onecopy disk info` shows how far it is".to_owned();
                Err(MachineError::Checkpoint { machine: self.home.name().to_string(), reason })
            }
            _ => Ok(()),
        }
    }

    /// The number of a checkpoint that is there, the last one where none is named.
    ///
    /// # Errors
    /// [`MachineError::Checkpoint`] with those that are there.
    pub fn find_checkpoint(&self, number: Option<u64>) -> Result<u64, MachineError> {
        let checkpoints = self.checkpoints()?;
        let found = match number {
            Some(number) => checkpoints.iter().find(|checkpoint| checkpoint.number == number),
            None => checkpoints.last(),
        };
        found.map(|checkpoint| checkpoint.number).ok_or_else(|| {
            let known: Vec<String> = checkpoints.iter().map(|known| known.number.to_string()).collect();
            let (machine, known) = (self.home.name().to_string(), known.join(", "));
            let reason = match number {
                Some(number) if !known.is_empty() => format!("there is no {number}; there are: {known}"),
                _ => format!("there are none; take one with: onecopy vm checkpoint {machine}"),
            };
            MachineError::Checkpoint { machine, reason }
        })
    }

    /// Starts a machine that was made as a fork of `parent`, as that was at this checkpoint. With `shares` its memory
    /// is a private view of a file that all forks of the checkpoint have in common. Waits until its guest answers.
    ///
    /// # Errors
    /// As [`Machine::restore`].
    pub async fn begin_as_fork(&self, parent: &MachineHome, number: u64, shares: bool) -> Result<(), MachineError> {
        self.begin_at(&StartPoint::of_fork(parent, number, shares)?).await
    }

    async fn begin_at(&self, start_point: &StartPoint) -> Result<(), MachineError> {
        // The keeper that has the lock next is the one that takes the start point, and no other one is started.
        let runs = || MachineError::Runs { name: self.home.name().clone() };
        let lock = self.take_keeper_lock().await?.ok_or_else(runs)?;
        if self.process_id().is_some() {
            return Err(runs());
        }
        start_point.write(&self.home)?;
        let begun = match self.spawn_keeper(&lock, false) {
            Ok(()) => {
                drop(lock);
                self.wait_running(RESTORE_TIMEOUT).await
            }
            Err(error) => Err(error),
        };
        // Where it was not taken, a later start does not begin there.
        let is_taken =
            matches!(fs::remove_file(self.home.restore_file()), Err(error) if error.kind() == ErrorKind::NotFound);
        begun?;
        match is_taken {
            true => Ok(()),
            false => Err(self.keeper_failed("has started it without looking at which checkpoint".to_owned())),
        }
    }
}
