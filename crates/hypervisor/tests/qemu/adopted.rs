//! A machine outlives who has started it.

use std::time::Duration;

use onecopy_hypervisor::machine::EndCause;
use onecopy_hypervisor::monitor::EventKind;
use onecopy_hypervisor::{HypervisorError, Machine, Monitor, State};
use onecopy_testing::WAIT_MAX;

use crate::machines::{Machines, patient};

/// A machine outlives who has started it and is taken over; a process id that is only written down is not believed.
///
/// Spec: A3
#[tokio::test]
async fn v4_a_machine_is_taken_over_by_its_directory() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    assert!(Machine::adopt(&directory, patient()).await.unwrap().is_none());
    let started = machines.start(&machines.configuration(), &directory).await.unwrap();
    started.pause().await.unwrap();
    let process_id = started.process_id();
    drop(started);
    let adopted = Machine::adopt(&directory, patient()).await.unwrap().expect("it runs");
    assert_eq!((adopted.name(), adopted.process_id()), ("nothing-to-boot", process_id));
    assert_eq!(adopted.state(), State::Paused);
    adopted.resume().await.unwrap();
    let ending = adopted.quit().await.unwrap();
    assert_eq!(ending.cause, EndCause::Quit, "{ending}");
    assert!(Machine::adopt(&directory, patient()).await.unwrap().is_none());
}

/// Spec: A3
#[tokio::test]
async fn v4_the_end_of_a_machine_that_was_taken_over_is_noticed() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    drop(machines.start(&machines.configuration(), &directory).await.unwrap());
    let adopted = Machine::adopt(&directory, patient()).await.unwrap().expect("it runs");
    adopted.kill();
    assert_eq!(adopted.wait_killed().await.unwrap().cause, EndCause::Killed { signal: 9 });
}

/// Spec: A3
#[tokio::test]
async fn v4_a_process_id_that_is_only_written_down_is_not_believed() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    std::fs::create_dir(directory.path()).unwrap();
    // This process lives, but it does not hold the lock.
    std::fs::write(directory.process_id_file(), format!("{}\n", std::process::id())).unwrap();
    assert_eq!(Machine::running_process(&directory).unwrap(), None);
    assert!(Machine::adopt(&directory, patient()).await.unwrap().is_none());
    let machine = machines.start(&machines.configuration(), &directory).await.unwrap();
    assert_eq!(Machine::running_process(&directory).unwrap(), Some(machine.process_id()));
}

/// Spec: A3
#[tokio::test]
async fn v4_a_monitor_serves_one_at_a_time_and_others_have_their_own() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let mut configuration = machines.configuration();
    let second = machines.path("second.sock");
    configuration.more_monitors.push(second.clone());
    let machine = machines.start(&configuration, &directory).await.unwrap();
    let error = Monitor::connect(directory.monitor(), Duration::from_millis(500)).await.unwrap_err();
    assert!(matches!(error, HypervisorError::NoMonitor { .. }), "{error}");
    let other = Monitor::connect(&second, WAIT_MAX).await.unwrap();
    let mut events = other.events();
    machine.pause().await.unwrap();
    assert_eq!(events.recv().await.unwrap().kind, EventKind::Stop);
    other.cont().await.unwrap();
    machine.wait_for("running", |state| *state == State::Running, WAIT_MAX).await.unwrap();
}
