//! A machine that is on its way here.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use onecopy_checkpoint::delta::Decoder;
use onecopy_checkpoint::link::FailureSender;
use onecopy_checkpoint::restore::{Prefix, stream};
use onecopy_hypervisor::Machine;
use tokio::sync::{OwnedRwLockReadGuard, watch};

use super::backup::Copy;
use super::incoming_memory::IncomingMemory;
use super::link::{self, DestinationLink};
use super::restore::Restored;
use super::state::Keeper;
use super::verdict::failed;
use super::{checkpoint, network};
use crate::hardware::Hardware;
use crate::migration::Arrival;
use crate::{MachineError, MachineHome};

/// A machine that is on its way.
pub(super) struct Arriving {
    pub(super) coming: Coming,
    /// What ends the connection.
    pub(super) stream: Arc<UnixStream>,
    /// Who tells the source why this side gives up.
    pub(super) failures: FailureSender<UnixStream>,
    pub(super) prefix: Vec<u8>,
    pub(super) record: Arrival,
    pub(super) keeper: Arc<Keeper>,
    /// Whether the source's snapshot is there.
    pub(super) has_snapshot: watch::Sender<bool>,
    /// What QEMU waits for.
    pub(super) restored: Restored,
}

/// What takes what comes.
pub(super) enum Coming {
    /// The memory of a machine that moves, and what is held as long as it is open.
    Memory(IncomingMemory, OwnedRwLockReadGuard<()>),
    /// The copy of one that is only protected here, all of which was sent once.
    Copy(Box<CopyLink>),
}

/// A copy, and where its epochs come from.
pub(super) struct CopyLink {
    pub(super) link: DestinationLink,
    pub(super) decoder: Decoder,
    pub(super) copy: Copy,
}

/// Says why it does not come: what the source hears is why it stays there. First of all, for nobody says any more that
/// this side lives, and to write something down can take long on a full disk; the source has given nothing away.
pub(super) async fn refuse(failures: FailureSender<UnixStream>, stream: Arc<UnixStream>, error: &MachineError) {
    let reason = error.to_string();
    let _ = tokio::task::spawn_blocking(move || link::refuse(&failures, &stream, &reason)).await;
}

/// Gives a QEMU that waits, and has the memory, the devices' state: the machine stands then.
pub(super) async fn load(
    home: &MachineHome,
    machine: &Machine,
    mut restored: Restored,
    (prefix, devices): (&[u8], &[u8]),
) -> Result<(), MachineError> {
    let parsed = Prefix::parse(prefix).map_err(|error| failed(home, error))?;
    restored.set_stream(stream(&parsed, devices).map_err(|error| failed(home, error))?);
    network::silence(home, machine).await?;
    restored.load(home, machine).await
}

/// What a machine stands on is that of its origin: so it can be checkpointed, and go on again, without standing for it.
pub(super) fn note_prefix(home: &MachineHome, machine: &Machine, prefix: &[u8]) {
    let known = Hardware::of_process(machine).and_then(|hardware| {
        let memory_bytes = home.configuration().map_err(|error| error.to_string())?.memory_bytes;
        let made = checkpoint::make(&home.checkpoints(), &hardware, memory_bytes, prefix);
        made.map_err(|error| error.to_string())
    });
    if let Err(error) = known {
        tracing::warn!(error, "the machine stands for a moment before its first checkpoint");
    }
}
