//! A machine is started, or taken over from an earlier process.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch as latest;

use super::state::{EndCause, Ending, State};
use super::{Inner, Machine, QEMU_LINES, Seen, TimeLimits, watch};
use crate::command_line::HostTraits;
use crate::configuration::Account;
use crate::process::{Process, Watch, running};
use crate::{
    CommandLine, Console, HypervisorError, InheritedDescriptor, MachineConfiguration, MachineDirectory, Monitor, Qemu,
    kvm_runs_guests, launch,
};

/// A QEMU that has closed its monitor ends within this.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Kills a process whose start fails or is given up.
struct KilledUnlessKept<'a>(Option<&'a Process>);

impl Drop for KilledUnlessKept<'_> {
    fn drop(&mut self) {
        if let Some(process) = self.0 {
            process.kill();
        }
    }
}

impl Machine {
    /// Starts QEMU and, unless it starts paused or waits for a state, lets the guest boot. QEMU's account gets the
    /// directory.
    ///
    /// A start that is given up (its future dropped) leaves no process.
    ///
    /// # Errors
    /// [`HypervisorError::Configuration`], [`HypervisorError::Running`], [`HypervisorError::File`],
    /// [`HypervisorError::Spawn`], [`HypervisorError::Ended`] with QEMU's own words, [`HypervisorError::NoMonitor`].
    pub async fn start(
        qemu: &Qemu,
        configuration: &MachineConfiguration,
        directory: &MachineDirectory,
        inherited: &[InheritedDescriptor],
        limits: TimeLimits,
    ) -> Result<Machine, HypervisorError> {
        let host = HostTraits { version: qemu.version(), kvm: kvm_runs_guests() };
        let line = CommandLine::new(configuration, directory, host)?;
        prepare(directory, configuration.security.account)?;
        let child = launch::launch(qemu, &line, directory, &configuration.security, inherited)?;
        let spawned = |source| HypervisorError::Spawn { program: qemu.program().to_owned(), source };
        let (process, mut watch) = Process::of_child(child).map_err(spawned)?;
        let mut guard = KilledUnlessKept(Some(&process));
        let monitor = first_monitor(&configuration.name, directory, &mut watch, limits).await?;
        guard.0 = None;
        drop(guard);
        let state = if configuration.incoming.is_some() { State::Incoming } else { State::Paused };
        let machine = Machine::watched(configuration.name.clone(), directory, limits, (process, watch), monitor, state);
        let lets_go = configuration.incoming.is_none() && !configuration.starts_paused;
        if lets_go && let Err(error) = machine.resume().await {
            machine.kill();
            return Err(error);
        }
        Ok(machine)
    }

    /// Takes over the machine that runs in `directory`; none when none runs.
    ///
    /// # Errors
    /// [`HypervisorError::File`], [`HypervisorError::NoMonitor`] when it does not answer: it hangs, or another process
    /// has its monitor.
    pub async fn adopt(directory: &MachineDirectory, limits: TimeLimits) -> Result<Option<Machine>, HypervisorError> {
        let Some(process) = Process::of_directory(directory)? else { return Ok(None) };
        let monitor = match Monitor::connect(directory.monitor(), limits.start).await {
            Ok(monitor) => monitor,
            // It has ended while we tried.
            Err(_) if running(directory)?.is_none() => return Ok(None),
            Err(error) => return Err(error),
        };
        let name = monitor.name().await?;
        let state = State::of(&monitor.status().await?.state);
        Ok(Some(Machine::watched(name, directory, limits, process, monitor, state)))
    }

    /// QEMU's process id of the machine that runs in `directory`, without asking it for anything; none when none runs.
    ///
    /// # Errors
    /// [`HypervisorError::File`].
    pub fn running_process(directory: &MachineDirectory) -> Result<Option<u32>, HypervisorError> {
        running(directory)
    }

    pub(super) fn watched(
        name: String,
        directory: &MachineDirectory,
        limits: TimeLimits,
        (process, watch): (Process, Watch),
        monitor: Monitor,
        state: State,
    ) -> Machine {
        let events = monitor.events();
        let seen = Arc::new(Seen {
            name,
            directory: directory.clone(),
            limits,
            process,
            state: latest::Sender::new(state),
            monitor: Mutex::new(monitor),
            killed: AtomicBool::new(false),
        });
        let watcher = tokio::spawn(watch::run(seen.clone(), watch, events));
        Machine { inner: Arc::new(Inner { seen, watcher }) }
    }
}

/// Makes the directory ready for a new process: it belongs to QEMU's account, and nothing in it is of an earlier one.
fn prepare(directory: &MachineDirectory, account: Option<Account>) -> Result<(), HypervisorError> {
    let path = directory.path();
    if let Some(process_id) = running(directory)? {
        return Err(HypervisorError::Running { directory: path.to_owned(), process_id });
    }
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(HypervisorError::file("create", path))?;
    if let Some(account) = account {
        std::os::unix::fs::chown(path, Some(account.user_id), Some(account.group_id))
            .map_err(HypervisorError::file("give to QEMU's account", path))?;
    }
    directory.remove_leftovers()?;
    for log in [directory.console_log(), directory.qemu_log()] {
        Console::new(log).put_aside()?;
    }
    Ok(())
}

/// Waits for QEMU's monitor, or for its end.
async fn first_monitor(
    name: &str,
    directory: &MachineDirectory,
    watch: &mut Watch,
    limits: TimeLimits,
) -> Result<Monitor, HypervisorError> {
    let status = tokio::select! {
        status = watch.ended() => status,
        monitor = Monitor::connect(directory.monitor(), limits.start) => match monitor {
            Ok(monitor) => return Ok(monitor),
            // A monitor that goes away is the first that is seen of an end.
            Err(error) => match tokio::time::timeout(END_TIMEOUT, watch.ended()).await {
                Ok(status) => status,
                Err(_) => return Err(error),
            },
        },
    };
    let cause = EndCause::of(None, status, false);
    let qemu = Console::new(directory.qemu_log()).tail(QEMU_LINES);
    let ending = Ending { cause, qemu, console: String::new() };
    Err(HypervisorError::Ended { name: name.to_owned(), ending: ending.to_string() })
}
