//! A machine that is on its way here.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use onecopy_checkpoint::delta::Decoder;
use onecopy_checkpoint::link::FailureSender;
use onecopy_checkpoint::restore::{Prefix, stream};
use onecopy_hypervisor::Machine;
use tokio::sync::{OwnedRwLockReadGuard, watch};

use super::backup::Copy;
use super::link::{self, DestinationLink};
use super::restore::Restored;
use super::shared_disk::SharedSnapshot;
use super::state::Keeper;
use super::verdict::failed;
use super::{checkpoint, network};
use crate::hardware::Hardware;
use crate::migration::Arrival;
use crate::{MachineError, MachineHome};

/// A machine that is on its way, all of whose memory was sent once.
pub(super) struct Arriving {
    pub(super) link: DestinationLink,
    /// What ends the connection.
    pub(super) stream: Arc<UnixStream>,
    pub(super) decoder: Decoder,
    pub(super) prefix: Vec<u8>,
    /// What references to the disk are read from.
    pub(super) shared: Option<SharedSnapshot>,
    pub(super) record: Arrival,
    pub(super) keeper: Arc<Keeper>,
    /// Whether the source's snapshot is there.
    pub(super) has_snapshot: watch::Sender<bool>,
    /// Of a machine that is only protected here: what is written into.
    pub(super) copy: Option<Copy>,
    /// Of one that comes, from before its memory is opened until that is closed.
    pub(super) memory_open: Option<OwnedRwLockReadGuard<()>>,
    /// What QEMU waits for.
    pub(super) restored: Restored,
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
