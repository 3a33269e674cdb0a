//! QEMU, started: the guest boots, goes on from a checkpoint, or comes from another host.

use std::time::Duration;

use onecopy_hypervisor::configuration::{MemoryBackend, MemoryLock};
use onecopy_hypervisor::{Machine, MachineDirectory, Qemu, TimeLimits};
use onecopy_postgres::ServiceUser;

use super::arriving::{Arriving, Coming, refuse};
use super::guest::{end_unbegun, run, unplug_isolated};
use super::network;
use super::qemu_configuration::configuration;
use super::restore::{self, Restored};
use super::verdict::discard;
use crate::desired_state::{self, DesiredState};
use crate::migration::{Arrival, ArrivalState};
use crate::{MachineError, MachineHome, hypervisor_failed};

/// How long whoever has the disk may take to give it back: the process that served it for a QEMU that has just died.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Says whether the kernel merges pages: what its owner has to switch on.
/// Source: <https://docs.kernel.org/admin-guide/mm/ksm.html>.
const KSM_RUN: &str = "/sys/kernel/mm/ksm/run";

/// What a machine begins with that does not boot.
pub(super) enum Begun {
    /// A checkpoint.
    Restored(Restored),
    /// What comes from another host.
    Arriving(Box<Arriving>),
}

impl Begun {
    fn restored(&self) -> &Restored {
        match self {
            Begun::Restored(restored) => restored,
            Begun::Arriving(arriving) => &arriving.restored,
        }
    }

    /// What was to begin here does not, because of this: a machine that comes goes on where it was.
    pub(super) async fn refuse(self, home: &MachineHome, error: &MachineError) {
        if let Begun::Arriving(arriving) = self {
            let Arriving { coming, stream, failures, record, .. } = *arriving;
            refuse(failures, stream, error).await;
            if let Coming::Memory(memory, _open) = coming {
                memory.end().await;
            }
            discard(home, &record);
        }
    }
}

/// Starts a QEMU that boots, or waits for what it begins with, and lets no guest go.
async fn start_qemu(home: &MachineHome, user: &ServiceUser, begun: Option<&Begun>) -> Result<Machine, MachineError> {
    let failed = |error| hypervisor_failed(home.name(), error);
    // Where the link leads: QEMU's paths of sockets are short there.
    let directory = MachineDirectory::new(home.run()).map_err(failed)?;
    let limits = TimeLimits::default();
    let mut configuration = configuration(home, &home.configuration()?, user)?;
    // It is let go by us, once that is known to be right.
    configuration.starts_paused = true;
    let restored = begun.map(Begun::restored);
    let (incoming, inherited) = restored.map(Restored::incoming).unzip();
    configuration.incoming = incoming;
    let is_arriving = matches!(begun, Some(Begun::Arriving(_)));
    if is_arriving {
        // The first sector is on the other host still.
        let bytes = home.configuration()?.disk_bytes;
        configuration.disks.iter_mut().for_each(|disk| disk.geometry_of_bytes = Some(bytes));
    }
    if let Some(frozen) = restored.and_then(|restored| restored.frozen.clone()) {
        let backend = MemoryBackend::File { path: frozen, shared: false, read_only: true, offset_bytes: 0 };
        configuration.memory.backend = backend;
        configuration.security.memory_lock = MemoryLock::Off;
        configuration.memory.mergeable = home.configuration()?.merge_equal_pages;
        if configuration.memory.mergeable && !merges_pages() {
            tracing::warn!("equal pages are to be merged, and the kernel does not: {KSM_RUN} has to be 1");
        }
    }
    let qemu = Qemu::find().map_err(failed)?;
    desired_state::begin(home, user, LEASE_TIMEOUT).await?;
    if is_arriving {
        // Before QEMU has anything: nobody lets it go who does not know that it was given away.
        desired_state::note(home, DesiredState::Arriving)?;
    }
    Machine::start(&qemu, &configuration, &directory, inherited.as_slice(), limits).await.map_err(failed)
}

/// Starts the machine, of which nothing runs.
pub(super) async fn start(
    home: &MachineHome,
    user: &ServiceUser,
    begun: Option<Begun>,
) -> Result<Machine, MachineError> {
    let machine = match start_qemu(home, user, begun.as_ref()).await {
        Ok(machine) => machine,
        Err(error) => {
            if let Some(begun) = begun {
                begun.refuse(home, &error).await;
            }
            return Err(error);
        }
    };
    let made = begun.as_ref().map(|begun| begun.restored().disk);
    let is_arriving = matches!(begun, Some(Begun::Arriving(_)));
    let let_go = async {
        let fork = match begun {
            Some(Begun::Arriving(arriving)) => return arriving.finish(home, user, &machine).await,
            Some(Begun::Restored(mut restored)) => {
                let kept = restored.kept.take();
                if kept.is_some() {
                    network::silence(home, &machine).await?;
                }
                restored.load(home, &machine).await?;
                kept
            }
            None => None,
        };
        // Held until it runs: a fork's checkpoint stays as long.
        let _fork = fork;
        unplug_isolated(home, &machine).await?;
        run(home, user, &machine).await
    };
    if let Err(error) = let_go.await {
        end_unbegun(&machine).await;
        // One that was promised has its disk, whatever has become of it, and so has one of which that is not known.
        let is_promised = || {
            !matches!(Arrival::of(home), Ok(Some(Arrival { state: ArrivalState::Begun | ArrivalState::Discarded, .. })))
        };
        if let Some(disk) = made.filter(|_| !is_arriving || !is_promised()) {
            restore::give_up(home, disk)?;
        }
        return Err(error);
    }
    Ok(machine)
}

fn merges_pages() -> bool {
    std::fs::read_to_string(KSM_RUN).is_ok_and(|run| run.trim() == "1")
}
