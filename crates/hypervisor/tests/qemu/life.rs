//! A machine's states and ends.

use std::time::Duration;

use onecopy_hypervisor::machine::EndCause;
use onecopy_hypervisor::monitor::RunState;
use onecopy_hypervisor::{HypervisorError, Machine, State, TimeLimits};

use crate::laboratory::{Laboratory, patient};

#[tokio::test]
async fn v2_a_machine_starts_pauses_runs_and_quits() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let machine = laboratory.start(&laboratory.configuration(), &directory).await.unwrap();
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

#[tokio::test]
async fn v2_a_machine_waits_when_it_shall_start_paused() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let mut configuration = laboratory.configuration();
    configuration.starts_paused = true;
    let machine = laboratory.start(&configuration, &directory).await.unwrap();
    assert_eq!(machine.state(), State::Paused);
    assert_eq!(machine.monitor().status().await.unwrap().state, RunState::Prelaunch);
    machine.resume().await.unwrap();
    machine.quit().await.unwrap();
}

#[tokio::test]
async fn v3_a_killed_machine_is_told_apart_from_one_that_was_stopped() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let machine = laboratory.start(&laboratory.configuration(), &directory).await.unwrap();
    let process_id = rustix::process::Pid::from_raw(i32::try_from(machine.process_id()).unwrap()).unwrap();
    rustix::process::kill_process(process_id, rustix::process::Signal::KILL).unwrap();
    let ending = machine.wait_ended().await;
    assert_eq!(ending.cause, EndCause::Killed { signal: 9 });
    assert!(!ending.is_orderly());
    // Its directory is used again.
    let machine = laboratory.start(&laboratory.configuration(), &directory).await.unwrap();
    let process_id = rustix::process::Pid::from_raw(i32::try_from(machine.process_id()).unwrap()).unwrap();
    rustix::process::kill_process(process_id, rustix::process::Signal::TERM).unwrap();
    let ending = machine.wait_ended().await;
    assert_eq!(ending.cause, EndCause::Terminated);
    assert!(ending.is_orderly());
}

#[tokio::test]
async fn v2_a_guest_that_does_not_hear_the_button_is_stopped_nevertheless() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let limits = TimeLimits { power_down: Duration::from_millis(300), ..patient() };
    let configuration = laboratory.configuration();
    let machine = Machine::start(&laboratory.qemu, &configuration, &directory, &[], limits).await.unwrap();
    let error = machine.power_down().await.unwrap_err();
    assert!(matches!(error, HypervisorError::NotReached { wanted: "switched off", .. }), "{error}");
    assert_eq!(machine.stop().await.unwrap().cause, EndCause::Quit);
}

#[tokio::test]
async fn v3_a_hanging_qemu_is_killed() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let second = Duration::from_secs(1);
    let limits = TimeLimits { power_down: second, quit: second, ..patient() };
    let configuration = laboratory.configuration();
    let machine = Machine::start(&laboratory.qemu, &configuration, &directory, &[], limits).await.unwrap();
    let process_id = rustix::process::Pid::from_raw(i32::try_from(machine.process_id()).unwrap()).unwrap();
    rustix::process::kill_process(process_id, rustix::process::Signal::STOP).unwrap();
    assert_eq!(machine.stop().await.unwrap().cause, EndCause::Killed { signal: 9 });
}

#[tokio::test]
async fn v3_what_qemu_says_is_in_the_error_of_a_start_that_fails() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let mut configuration = laboratory.configuration();
    configuration.more_arguments = vec!["-device".to_owned(), "no-such-device".to_owned()];
    let error = laboratory.start(&configuration, &directory).await.unwrap_err();
    assert!(error.to_string().contains("'no-such-device' is not a valid device"), "{error}");
    assert_eq!(Machine::running_process(&directory).unwrap(), None);
}

#[tokio::test]
async fn v3_a_second_machine_in_the_same_directory_is_refused() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let machine = laboratory.start(&laboratory.configuration(), &directory).await.unwrap();
    let error = laboratory.start(&laboratory.configuration(), &directory).await.unwrap_err();
    let running = machine.process_id();
    assert!(matches!(error, HypervisorError::Running { process_id, .. } if process_id == running), "{error}");
    // The first one is not disturbed.
    assert!(machine.monitor().status().await.unwrap().running);
}

#[tokio::test]
async fn v3_a_start_that_is_given_up_leaves_no_process() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let limits = patient();
    let configuration = laboratory.configuration();
    let start = Machine::start(&laboratory.qemu, &configuration, &directory, &[], limits);
    // One look at it spawns the process; then it is dropped.
    assert!(tokio::time::timeout(Duration::ZERO, start).await.is_err());
    for _ in 0..6000 {
        if Machine::running_process(&directory).unwrap().is_none() && !mentions(directory.path()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("a process is left");
}

/// A living process names the path in its arguments.
fn mentions(path: &std::path::Path) -> bool {
    let name = path.to_str().expect("a name of text");
    let processes = std::fs::read_dir("/proc").expect("there is /proc").flatten();
    let mut arguments = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    arguments.any(|arguments| String::from_utf8_lossy(&arguments).contains(name))
}
