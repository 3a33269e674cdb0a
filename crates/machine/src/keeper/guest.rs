//! The machine itself: taken over, let go, and its guest's agent.

use std::time::Duration;

use onecopy_hypervisor::{Agent, Machine, MachineDirectory, State, TimeLimits};
use onecopy_postgres::ServiceUser;

use super::network::CARD;
use super::restore;
use crate::desired_state::{self, DesiredState, Found, Takeover};
use crate::{MachineError, MachineHome, hypervisor_failed};

/// How long one attempt to reach the agent may take; the next one follows.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

/// The time between two attempts.
const GREETING_INTERVAL: Duration = Duration::from_millis(200);

/// Takes over the machine that runs; then it may be that a stop is to be gone on with. None: it has ended meanwhile.
pub(super) async fn adopt(home: &MachineHome, user: &ServiceUser) -> Result<Option<(Machine, Takeover)>, MachineError> {
    let failed = |error| hypervisor_failed(home.name(), error);
    let directory = MachineDirectory::new(home.run()).map_err(failed)?;
    let Some(machine) = Machine::adopt(&directory, TimeLimits::default()).await.map_err(failed)? else {
        return Ok(None);
    };
    let care = take_over(home, user, &machine).await?;
    if care == Takeover::End {
        end_unbegun(&machine).await;
        return Err(MachineError::Checkpoint {
            machine: home.name().to_string(),
            reason: "its restore was broken off when its keeper died; it keeps the disk that it had".to_owned(),
        });
    }
    Ok(Some((machine, care)))
}

/// A fork has its parent's addresses until it is told its own, and its parent's server: it must not be heard, nor hear,
/// before. Behind the loading of its state, which has the card's.
pub(super) async fn unplug_isolated(home: &MachineHome, machine: &Machine) -> Result<(), MachineError> {
    if !home.isolated_file().exists() {
        return Ok(());
    }
    machine.monitor().set_link(CARD, false).await.map_err(|error| hypervisor_failed(home.name(), error))
}

/// Ends a machine that was not to begin: one that is there would be taken over.
pub(super) async fn end_unbegun(machine: &Machine) {
    machine.kill();
    if let Err(error) = machine.wait_killed().await {
        tracing::error!(%error, "a machine that was not to begin does not end");
    }
}

/// Does with a machine that is there what was wanted of it before its keeper died.
async fn take_over(home: &MachineHome, user: &ServiceUser, machine: &Machine) -> Result<Takeover, MachineError> {
    let (found, state) = (desired_state::find(home, user), machine.state());
    let care = found.takeover(&state);
    tracing::info!(?found, %state, ?care, "the machine is there already");
    match (care, found) {
        (Takeover::Resume, _) => {
            unplug_isolated(home, machine).await?;
            run(home, user, machine).await?;
        }
        (Takeover::Pause, _) => machine.pause().await.map_err(|error| hypervisor_failed(home.name(), error))?,
        // It was let go, or not made to stand, and there was no time to write that down.
        (Takeover::Leave, Found::Own(DesiredState::Beginning | DesiredState::Taking | DesiredState::Paused))
            if state == State::Running =>
        {
            note_running(home);
        }
        (Takeover::Leave | Takeover::Stop | Takeover::End, _) => {}
    }
    Ok(care)
}

/// Lets a machine go, where it is known that its disk is as it left it: whoever lets one go does it here.
pub(super) async fn let_go(home: &MachineHome, user: &ServiceUser, machine: &Machine) -> Result<(), MachineError> {
    desired_state::check_may_run(home, user)?;
    restore::commit(home)?;
    machine.resume().await.map_err(|error| hypervisor_failed(home.name(), error))
}

/// Lets a machine go that shall run from now on.
pub(super) async fn run(home: &MachineHome, user: &ServiceUser, machine: &Machine) -> Result<(), MachineError> {
    let_go(home, user, machine).await?;
    note_running(home);
    Ok(())
}

/// It does, and whoever takes it over sees that: it is not given up because it cannot be written down.
fn note_running(home: &MachineHome) {
    if let Err(error) = desired_state::note(home, DesiredState::Running) {
        tracing::error!(%error, "it is not written down that the machine runs");
    }
}

/// Waits, as long as the machine runs, until its agent answers.
pub(super) async fn greet(machine: &Machine) -> Option<Agent> {
    loop {
        let socket = machine.directory().agent();
        tokio::select! {
            agent = Agent::connect(socket, GREETING_TIMEOUT) => match agent {
                Ok(agent) => return Some(agent),
                Err(error) => {
                    tracing::debug!(machine = machine.name(), %error, "the guest's agent does not answer yet")
                }
            },
            _ = machine.wait_ended() => return None,
        }
        tokio::time::sleep(GREETING_INTERVAL).await;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use onecopy_hypervisor::Qemu;
    use onecopy_hypervisor::configuration::{
        AsynchronousIo, Boot, Disk, DiskBackend, FileFormat, Incoming, MachineConfiguration as Configuration,
    };
    use onecopy_testing::process;

    use super::*;

    /// A machine's directory, whose QEMU finds nothing to boot and ends with the test.
    pub(in crate::keeper) struct Machines {
        pub(in crate::keeper) home: MachineHome,
        pub(in crate::keeper) user: ServiceUser,
        _directory: onecopy_testing::TestDirectory,
    }

    impl Machines {
        pub(in crate::keeper) fn new() -> Machines {
            let directory = onecopy_testing::TestDirectory::new().unwrap();
            let (home, user) = (MachineHome::at(&directory.join("web")).unwrap(), ServiceUser::resolve(None).unwrap());
            std::fs::create_dir(home.root()).unwrap();
            user.create_directory(&home.disk()).unwrap();
            home.make_run(&user).unwrap();
            Machines { home, user, _directory: directory }
        }

        /// One that stands, or waits for what another one sends.
        pub(in crate::keeper) async fn start(&self, incoming: Option<Incoming>) {
            let image = self.home.root().join("empty.raw");
            std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
            let mut configuration = Configuration::new("nothing-to-boot", 64 << 20, Boot::FirstDisk);
            let (format, asynchronous_io) = (FileFormat::Raw, AsynchronousIo::Threads);
            let backend = DiskBackend::File { path: image, format, read_only: false, direct: false, asynchronous_io };
            configuration.disks.push(Disk::new("empty", backend));
            configuration.starts_paused = true;
            configuration.incoming = incoming;
            let directory = MachineDirectory::new(self.home.run()).unwrap();
            let qemu = Qemu::find().unwrap();
            drop(Machine::start(&qemu, &configuration, &directory, &[], TimeLimits::default()).await.unwrap());
        }
    }

    impl Drop for Machines {
        fn drop(&mut self) {
            if let Some(process_id) = self.home.process_id() {
                process::kill(process_id);
            }
        }
    }

    /// As it is when its keeper is killed at any moment: whatever was written down, whether or not it was done.
    ///
    /// What a machine shall do is written down before it does it; from every state that a killed keeper may leave the
    /// next one lets go what was beginning, goes on with a stop, leaves what is paused, and lets nothing run whose disk
    /// has gone on without it; no run begins on a disk that somebody has.
    ///
    /// Spec: D5
    #[tokio::test]
    async fn v33_a_machine_is_taken_over_in_every_state_that_a_keeper_may_have_left() {
        let machines = Machines::new();
        let (home, user) = (&machines.home, &machines.user);
        desired_state::begin(home, user, Duration::ZERO).await.unwrap();
        machines.start(None).await;
        let (machine, care) = adopt(home, user).await.unwrap().unwrap();
        assert_eq!((care, machine.state()), (Takeover::Resume, State::Running), "its keeper had not let it go");
        assert_eq!(desired_state::find(home, user), Found::Own(DesiredState::Running));

        let (beginning, running, paused) = (DesiredState::Beginning, DesiredState::Running, DesiredState::Paused);
        // What was written down, whether the machine runs; whether it does then, and what is written down.
        let table = [
            (beginning, false, true, Found::Own(running)),
            (beginning, true, true, Found::Own(running)),
            (running, false, false, Found::Own(running)),
            (running, true, true, Found::Own(running)),
            (DesiredState::Taking, false, true, Found::Own(running)),
            (DesiredState::Taking, true, true, Found::Own(running)),
            (paused, false, false, Found::Own(paused)),
            (paused, true, true, Found::Own(running)),
            (DesiredState::Stopping, false, false, Found::Own(DesiredState::Stopping)),
            (DesiredState::Stopping, true, true, Found::Own(DesiredState::Stopping)),
            // The last one: that is for good.
            (DesiredState::Migrated, false, false, Found::Moved),
            (DesiredState::Migrated, true, false, Found::Moved),
        ];
        for (standing, ran, runs, found) in table {
            match ran {
                true => machine.resume().await.unwrap(),
                false => machine.pause().await.unwrap(),
            }
            if desired_state::find(home, user) != Found::Moved {
                desired_state::note(home, standing).unwrap();
            }
            let care = take_over(home, user, &machine).await.unwrap();
            assert_eq!(care == Takeover::Stop, standing == DesiredState::Stopping, "{standing:?} {ran}");
            let expected = if runs { State::Running } else { State::Paused };
            assert_eq!((machine.state(), desired_state::find(home, user)), (expected, found), "{standing:?} {ran}");
        }
        let error = let_go(home, user, &machine).await.unwrap_err().to_string();
        assert!(error.contains("disk has gone on without it"), "{error}");
        assert_eq!(machine.state(), State::Paused);
        machine.quit().await.unwrap();
        assert!(adopt(home, user).await.unwrap().is_none(), "whoever comes to take it over begins nothing");
        // Nor is it booted again.
        let error = desired_state::begin(home, user, Duration::ZERO).await.unwrap_err().to_string();
        assert!(error.contains("does not run here again"), "{error}");
    }

    /// Of a keeper that was killed before QEMU had what the checkpoint says.
    ///
    /// Spec: D6, A3
    #[tokio::test]
    async fn t18_a_restore_whose_keeper_has_died_is_given_up_with_its_disk() {
        let machines = Machines::new();
        let (home, user) = (&machines.home, &machines.user);
        restore::give_up(home, 1).unwrap();
        user.create_directory(&home.numbered_disk(1)).unwrap();
        desired_state::begin(home, user, Duration::ZERO).await.unwrap();
        machines.start(Some(Incoming::Deferred)).await;
        let error = adopt(home, user).await.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("its restore was broken off"), "{error}");
        assert_eq!(home.process_id(), None);
        restore::forget(home).unwrap();
        assert_eq!(home.disk(), home.root().join("disk"));
        assert!(!home.numbered_disk(1).exists() && !home.restoring_file().exists());
    }
}
