//! The parts of a machine of which checkpoints are taken, as a keeper reaches them.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onecopy_checkpoint::memory::{Cut, Epoch, synchronize};
use onecopy_checkpoint::restore::DEVICES_BYTES_MAX;
use onecopy_checkpoint::take::{self, Cause, Parts, Taking};
use onecopy_disk_server::DiskClient;
use onecopy_disk_server::protocol::Request as DiskRequest;
use onecopy_guest_agent::protocol::{FailureKind, Postgres};
use onecopy_hypervisor::{HypervisorError, Machine, open_of_account};
use tokio::runtime::Handle;

use super::PauseParts;
use super::state::Keeper;
use crate::desired_state::{self, DesiredState};
use crate::memory_server::{EndedEpoch, MemoryClient, Request};
use crate::{MachineError, MachineHome};

/// How often it is tried to let a machine go that stands for a checkpoint.
pub(super) const GO_ON_INTERVAL: Duration = Duration::from_secs(1);

/// How long the guest's server may take until it is held, or goes on.
const HOLD_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is tried to let the guest's server go on.
const THAW_INTERVAL: Duration = Duration::from_millis(100);

/// Does a part's work; how long that takes is in `into`.
fn timed<T>(into: &mut u64, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = work();
    *into = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    done
}

/// A file that QEMU's account has written, of which no more is taken.
pub(super) fn read(path: &Path, bytes_max: usize) -> Result<Vec<u8>, MachineError> {
    let file = open_of_account(OpenOptions::new().read(true), path).map_err(MachineError::file("open", path))?;
    let mut bytes = Vec::new();
    let read = file.take(bytes_max as u64 + 1).read_to_end(&mut bytes);
    read.map_err(MachineError::file("read", path))?;
    Ok(bytes)
}

/// Lets a machine go that stands for a take that is void. The record is there: the next keeper does it, if this one
/// cannot.
pub(super) fn recover(parts: &mut Parts<'_>, machine: &Machine) {
    while let Err(error) = take::recover(parts)
        && machine.state().ending().is_none()
    {
        // One that runs and cannot be noted is noted by the next take, or taken over as it is.
        if parts.machine.is_running().is_ok_and(|runs| runs) {
            break;
        }
        tracing::error!(%error, "the machine may stand for a checkpoint that is void");
        std::thread::sleep(GO_ON_INTERVAL);
    }
}

pub(super) struct Processors<'a> {
    home: &'a MachineHome,
    machine: &'a Machine,
    handle: &'a Handle,
    /// Who reaches the guest's server, where that is held as long as they stand.
    server: Option<&'a Keeper>,
    pub(super) stopped: Option<Instant>,
    pub(super) pause: Duration,
    pub(super) parts: PauseParts,
}

impl<'a> Processors<'a> {
    pub(super) fn new(
        home: &'a MachineHome,
        machine: &'a Machine,
        handle: &'a Handle,
        server: Option<&'a Keeper>,
    ) -> Processors<'a> {
        let (stopped, pause, parts) = (None, Duration::ZERO, PauseParts::default());
        Processors { home, machine, handle, server, stopped, pause, parts }
    }
}

impl take::Machine for Processors<'_> {
    fn is_running(&mut self) -> Result<bool, Cause> {
        Ok(self.handle.block_on(self.machine.monitor().status())?.running)
    }

    fn stop(&mut self) -> Result<(), Cause> {
        self.stopped = Some(Instant::now());
        if let Some(keeper) = self.server {
            let agent = keeper.agent().ok_or("the guest's agent does not answer")?;
            self.handle.block_on(agent.postgres(Postgres::Freeze {}, HOLD_TIMEOUT, |_| {}))?;
        }
        Ok(timed(&mut self.parts.stop_us, || self.handle.block_on(self.machine.monitor().stop()))?)
    }

    fn save_devices(&mut self) -> Result<Vec<u8>, Cause> {
        let path: PathBuf = self.home.in_run("devices");
        timed(&mut self.parts.devices_us, || {
            let _ = fs::remove_file(&path);
            self.handle.block_on(self.machine.monitor().save_devices(&path, false))?;
            Ok(read(&path, DEVICES_BYTES_MAX)?)
        })
    }

    fn cont(&mut self) -> Result<(), Cause> {
        timed(&mut self.parts.cont_us, || self.handle.block_on(self.machine.monitor().cont()))?;
        if let Some(keeper) = self.server {
            self.handle.block_on(thaw(keeper, self.machine));
        }
        self.pause = self.stopped.take().map_or(Duration::ZERO, |stopped| stopped.elapsed());
        Ok(())
    }
}

/// Lets the guest's server go on, where it was held; tries until it does, or the machine has ended.
pub(super) async fn thaw(keeper: &Keeper, machine: &Machine) {
    while machine.state().ending().is_none() {
        if let Some(agent) = keeper.agent() {
            match agent.postgres(Postgres::Thaw {}, HOLD_TIMEOUT, |_| {}).await {
                Ok(()) => return,
                // An image of before this could be asked for; nobody has held its server either.
                Err(HypervisorError::Agent { failure, .. }) if failure.kind == FailureKind::Malformed => return,
                Err(error) => tracing::warn!(%error, "the guest's server may be held"),
            }
        }
        tokio::time::sleep(THAW_INTERVAL).await;
    }
}

pub(super) struct Memory<'a> {
    home: &'a MachineHome,
    handle: &'a Handle,
    /// Of the last time, which is in the pause.
    pub(super) synchronize_us: u64,
    pub(super) cut_us: u64,
}

impl<'a> Memory<'a> {
    pub(super) fn new(home: &'a MachineHome, handle: &'a Handle) -> Memory<'a> {
        Memory { home, handle, synchronize_us: 0, cut_us: 0 }
    }
}

impl take::Memory for Memory<'_> {
    fn synchronize(&mut self) -> Result<(), Cause> {
        Ok(timed(&mut self.synchronize_us, || synchronize(&self.home.memory()))?)
    }

    fn cut(&mut self) -> Result<Cut, Cause> {
        let cut = async { MemoryClient::connect(self.home).await?.ask::<EndedEpoch>(Request::Cut).await };
        let EndedEpoch { epoch, pages } = timed(&mut self.cut_us, || self.handle.block_on(cut))?;
        Ok(Cut { epoch: Epoch(epoch), pages })
    }
}

/// Asked over a connection for each question: who does something else between two is hung up on.
pub(super) struct Disk<'a> {
    home: &'a MachineHome,
    /// The snapshot that is cut.
    snapshot: String,
    pub(super) cut_us: u64,
}

impl<'a> Disk<'a> {
    pub(super) fn new(home: &'a MachineHome, snapshot: String) -> Disk<'a> {
        Disk { home, snapshot, cut_us: 0 }
    }
}

impl take::Disk for Disk<'_> {
    fn flush(&mut self) -> Result<(), Cause> {
        Ok(DiskClient::connect(&self.home.disk())?.ask::<()>(&DiskRequest::Flush)?)
    }

    fn cut(&mut self) -> Result<String, Cause> {
        timed(&mut self.cut_us, || Ok(DiskClient::connect(&self.home.disk())?.snapshot(&self.snapshot)?.name))
    }
}

pub(super) struct Record<'a> {
    pub(super) keeper: &'a Keeper,
}

impl take::Record for Record<'_> {
    fn read(&mut self) -> Result<Option<Taking>, Cause> {
        Ok(desired_state::is_taking(self.keeper.home())?.then_some(Taking { was_running: true }))
    }

    fn write(&mut self, taking: Option<Taking>) -> Result<(), Cause> {
        match taking {
            Some(Taking { was_running: true }) => Ok(self.keeper.note(DesiredState::Taking)?),
            // What stands goes on standing, and is written down so.
            Some(Taking { was_running: false }) => {
                Err(MachineError::Paused { name: self.keeper.home().name().clone() }.into())
            }
            None => Ok(self.keeper.note_taken()?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use onecopy_checkpoint::take::Record as _;
    use onecopy_postgres::ServiceUser;
    use tokio::sync::mpsc;

    use super::*;
    use crate::desired_state::Found;
    use crate::keeper::MachineState;

    /// A stop that comes while a checkpoint is taken goes on after it; where it did not wait, nothing was taken.
    ///
    /// Spec: D6
    #[tokio::test]
    async fn a_take_is_void_when_somebody_has_let_the_machine_go_meanwhile() {
        let (directory, user) = (tempfile::tempdir().unwrap(), ServiceUser::resolve(None).unwrap());
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        fs::create_dir(home.root()).unwrap();
        user.create_directory(&home.disk()).unwrap();
        desired_state::begin(&home, &user, Duration::ZERO).await.unwrap();
        let keeper = Keeper::new(home.clone(), user.clone(), mpsc::channel(1).0);
        let mut record = Record { keeper: &keeper };
        let found = || desired_state::find(&home, &user);
        let taking = Some(Taking { was_running: true });

        record.write(taking).unwrap();
        assert_eq!(found(), Found::Own(DesiredState::Taking));
        record.write(None).unwrap();
        assert_eq!(found(), Found::Own(DesiredState::Running));
        record.write(None).unwrap_err();
        record.write(Some(Taking { was_running: false })).unwrap_err();
        assert_eq!(found(), Found::Own(DesiredState::Running), "what stands is not taken, and stays so");

        record.write(taking).unwrap();
        keeper.note(DesiredState::Stopping).unwrap();
        let error = record.write(None).unwrap_err().to_string();
        assert!(error.contains("let go or ended while it was taken"), "{error}");
        assert_eq!((record.read().unwrap(), found()), (None, Found::Own(DesiredState::Stopping)));

        record.write(taking).unwrap();
        keeper.change(|status| status.state = MachineState::Stopping);
        record.write(None).unwrap();
        assert_eq!(found(), Found::Own(DesiredState::Stopping), "the stop has waited for the take");
        record.write(taking).unwrap_err();
        assert_eq!(found(), Found::Own(DesiredState::Stopping), "and none begins after it");
    }
}
