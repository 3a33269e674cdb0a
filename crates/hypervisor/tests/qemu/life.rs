//! A machine's states and ends.

use std::time::Duration;

use onecopy_hypervisor::machine::EndCause;
use onecopy_hypervisor::monitor::RunState;
use onecopy_hypervisor::{HypervisorError, Machine, State, TimeLimits};
use onecopy_testing::{process, until_async};
use rustix::process::Signal;

use crate::machines::{Machines, patient};

/// A machine starts, stands, runs and stops as it is told; a guest that does not hear the button is ended nevertheless.
///
/// Spec: A7
#[tokio::test]
async fn v2_a_machine_starts_pauses_runs_and_quits() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let machine = machines.start(&machines.configuration(), &directory).await.unwrap();
    assert_eq!(machine.state(), State::Running);
    assert_eq!(machine.name(), "nothing-to-boot");
    let status = machine.monitor().status().await.unwrap();
    assert!(status.running && status.state == RunState::Running, "{status:?}");
    machine.pause().await.unwrap();
    assert_eq!(machine.state(), State::Paused);
    assert_eq!(machine.monitor().status().await.unwrap().state, RunState::Paused);
    machine.resume().await.unwrap();
    assert_eq!(machine.state(), State::Running);
    let processors = machine.monitor().processors().await.unwrap();
    assert_eq!(processors.len(), 1, "{processors:?}");
    let ending = machine.quit().await.unwrap();
    assert_eq!(ending.cause, EndCause::Quit, "{ending}");
    assert_eq!(Machine::running_process(&directory).unwrap(), None);
    assert!(matches!(machine.monitor().status().await, Err(HypervisorError::MonitorLost { .. })));
}

/// Spec: A7
#[tokio::test]
async fn v2_a_machine_waits_when_it_shall_start_paused() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let mut configuration = machines.configuration();
    configuration.starts_paused = true;
    let machine = machines.start(&configuration, &directory).await.unwrap();
    assert_eq!(machine.state(), State::Paused);
    assert_eq!(machine.monitor().status().await.unwrap().state, RunState::Prelaunch);
    machine.resume().await.unwrap();
    machine.quit().await.unwrap();
}

/// An end that nobody wanted is told apart from one that was wanted, with the last words of QEMU and of the guest; a
/// panic is seen; a hanging QEMU is killed; a start that fails or is given up leaves no process.
///
/// Spec: A7
#[tokio::test]
async fn v3_a_killed_machine_is_told_apart_from_one_that_was_stopped() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let machine = machines.start(&machines.configuration(), &directory).await.unwrap();
    assert!(process::send(machine.process_id(), Signal::KILL));
    let ending = machine.wait_ended().await;
    assert_eq!(ending.cause, EndCause::Killed { signal: 9 });
    assert!(!ending.is_orderly());
    // Its directory is used again.
    let machine = machines.start(&machines.configuration(), &directory).await.unwrap();
    assert!(process::send(machine.process_id(), Signal::TERM));
    let ending = machine.wait_ended().await;
    assert_eq!(ending.cause, EndCause::Terminated);
    assert!(ending.is_orderly());
}

/// Spec: A7
#[tokio::test]
async fn v2_a_guest_that_does_not_hear_the_button_is_stopped_nevertheless() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let limits = TimeLimits { power_down: Duration::from_millis(300), ..patient() };
    let configuration = machines.configuration();
    let machine = Machine::start(&machines.qemu, &configuration, &directory, &[], limits).await.unwrap();
    let error = machine.power_down().await.unwrap_err();
    assert!(matches!(error, HypervisorError::NotReached { wanted: "switched off", .. }), "{error}");
    assert_eq!(machine.stop().await.unwrap().cause, EndCause::Quit);
}

/// Spec: A7
#[tokio::test]
async fn v3_a_hanging_qemu_is_killed() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let second = Duration::from_secs(1);
    let limits = TimeLimits { power_down: second, quit: second, ..patient() };
    let configuration = machines.configuration();
    let machine = Machine::start(&machines.qemu, &configuration, &directory, &[], limits).await.unwrap();
    process::stop(machine.process_id());
    assert_eq!(machine.stop().await.unwrap().cause, EndCause::Killed { signal: 9 });
}

/// Spec: A7
#[tokio::test]
async fn v3_what_qemu_says_is_in_the_error_of_a_start_that_fails() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let mut configuration = machines.configuration();
    configuration.more_arguments = vec!["-device".to_owned(), "no-such-device".to_owned()];
    let error = machines.start(&configuration, &directory).await.unwrap_err();
    assert!(error.to_string().contains("'no-such-device' is not a valid device"), "{error}");
    assert_eq!(Machine::running_process(&directory).unwrap(), None);
}

/// Spec: A7
#[tokio::test]
async fn v3_a_second_machine_in_the_same_directory_is_refused() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let machine = machines.start(&machines.configuration(), &directory).await.unwrap();
    let error = machines.start(&machines.configuration(), &directory).await.unwrap_err();
    let running = machine.process_id();
    assert!(matches!(error, HypervisorError::Running { process_id, .. } if process_id == running), "{error}");
    // The first one is not disturbed.
    assert!(machine.monitor().status().await.unwrap().running);
}

/// Spec: A7
#[tokio::test]
async fn v3_a_start_that_is_given_up_leaves_no_process() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let limits = patient();
    let configuration = machines.configuration();
    let start = Machine::start(&machines.qemu, &configuration, &directory, &[], limits);
    // One look at it spawns the process; then it is dropped.
    assert!(tokio::time::timeout(Duration::ZERO, start).await.is_err());
    until_async("no process is left", async || {
        Machine::running_process(&directory).unwrap().is_none() && !mentions(directory.path())
    })
    .await;
}

/// A living process names the path in its arguments.
fn mentions(path: &std::path::Path) -> bool {
    let name = path.to_str().expect("a name of text");
    let mut arguments = process::all().filter_map(|process| std::fs::read(format!("/proc/{process}/cmdline")).ok());
    arguments.any(|arguments| String::from_utf8_lossy(&arguments).contains(name))
}
