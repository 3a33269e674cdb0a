//! What sends a machine to another host, in a thread that blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use onecopy_checkpoint::memory::synchronize;
use onecopy_hypervisor::Machine;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::state::Keeper;
use super::{KeeperReply, MigrationEvent, MigrationOrder, words};
use crate::machine::CHECKPOINT_TIMEOUT;
use crate::memory_server::{EndedEpoch, MemoryClient, Request};

/// The lowest bandwidth, bytes a second: a wait for the pace lasts as long as 4 KiB take.
pub(super) const RATE_MIN: u64 = 100_000;

/// One migration, in a thread that blocks.
pub(super) struct Work {
    pub(super) keeper: Arc<Keeper>,
    pub(super) machine: Machine,
    pub(super) order: MigrationOrder,
    pub(super) is_cancelled: Arc<AtomicBool>,
    /// Its guest's clock is late by that.
    pub(super) has_stood: AtomicBool,
    told: mpsc::Sender<KeeperReply>,
    pub(super) handle: Handle,
}

impl Work {
    /// Called where there is a runtime.
    pub(super) fn new(
        keeper: &Arc<Keeper>,
        machine: &Machine,
        order: MigrationOrder,
        is_cancelled: Arc<AtomicBool>,
        told: mpsc::Sender<KeeperReply>,
    ) -> Work {
        let (keeper, machine) = (Arc::clone(keeper), machine.clone());
        Work {
            keeper,
            machine,
            order,
            is_cancelled,
            has_stood: AtomicBool::new(false),
            told,
            handle: Handle::current(),
        }
    }

    pub(super) fn tell(&self, event: MigrationEvent) {
        // Nobody need listen.
        let _ = self.told.try_send(KeeperReply::Migration(event));
    }

    pub(super) fn check_wanted(&self) -> Result<(), String> {
        match self.is_cancelled.load(Ordering::Acquire) {
            true => Err("it was cancelled, and goes on here".to_owned()),
            false => Ok(()),
        }
    }

    /// Ends an epoch while the guest runs.
    pub(super) fn cut(&self) -> Result<EndedEpoch, String> {
        synchronize(&self.keeper.home().memory()).map_err(words)?;
        self.ask(Request::Cut)
    }

    pub(super) fn ask<T: serde::de::DeserializeOwned>(&self, request: Request) -> Result<T, String> {
        let home = self.keeper.home();
        self.handle.block_on(async {
            MemoryClient::connect(home).await?.ask_until(request, Instant::now() + CHECKPOINT_TIMEOUT).await
        })
    }
}
