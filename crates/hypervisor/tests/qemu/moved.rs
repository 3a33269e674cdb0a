//! A machine's state goes to another one, over each way that we use.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use onecopy_hypervisor::configuration::Incoming;
use onecopy_hypervisor::monitor::{MigrationStatus, MigrationTarget};
use onecopy_hypervisor::{HypervisorError, InheritedDescriptor, Machine, MachineConfiguration, Monitor, State};
use onecopy_testing::{WAIT_MAX, until_async};
use serde_json::json;

use crate::bounds::confined;
use crate::machines::{Machines, patient};

async fn moved(from: &Monitor) -> MigrationStatus {
    let mut status = None;
    until_async("the migration has ended", async || {
        status = from.migration().await.expect("QEMU answers").status;
        status.is_some_and(MigrationStatus::is_final)
    })
    .await;
    status.expect("it has ended")
}

fn incoming(configuration: &MachineConfiguration, incoming: Incoming) -> MachineConfiguration {
    MachineConfiguration { incoming: Some(incoming), ..configuration.clone() }
}

/// Spec: A7
#[tokio::test]
async fn v6_a_machine_moves_over_a_socket() {
    let mut machines = Machines::new();
    let (here, there) = (machines.directory("here"), machines.directory("there"));
    let configuration = confined(machines.configuration());
    let source = machines.start(&configuration, &here).await.unwrap();
    let socket = there.path().join("state.sock");
    let arriving = incoming(&configuration, Incoming::Unix(socket.clone()));
    let destination = machines.start(&arriving, &there).await.unwrap();
    assert_eq!(destination.state(), State::Incoming);
    // The sockets belong to the accounts: the source must be able to pass the destination's directory, which is the
    // same account's.
    let monitor = source.monitor();
    monitor.set_migration_capabilities(&[("events", true), ("return-path", true)]).await.unwrap();
    let parameters = json!({ "max-bandwidth": 0, "downtime-limit": 300 });
    let parameters = parameters.as_object().expect("an object").clone();
    monitor.set_migration_parameters(parameters).await.unwrap();
    monitor.migrate(&MigrationTarget::Unix(socket)).await.unwrap();
    assert_eq!(moved(&monitor).await, MigrationStatus::Completed);
    destination.wait_for("running", |state| *state == State::Running, WAIT_MAX).await.unwrap();
    source.wait_for("paused", |state| *state == State::Paused, WAIT_MAX).await.unwrap();
    let migration = monitor.migration().await.unwrap();
    assert_eq!(migration.ram.expect("memory was sent").remaining_bytes, 0);
}

/// Spec: A7
#[tokio::test]
async fn v6_a_machine_moves_over_descriptors() {
    let mut machines = Machines::new();
    let (here, there) = (machines.directory("here"), machines.directory("there"));
    let configuration = machines.configuration();
    let source = machines.start(&configuration, &here).await.unwrap();
    let (sends, receives) = UnixStream::pair().unwrap();
    let descriptor: Arc<OwnedFd> = Arc::new(receives.into());
    let inherited = [InheritedDescriptor { descriptor, number: 510 }];
    let mut arriving = incoming(&configuration, Incoming::Descriptor(510));
    // It waits after its arrival.
    arriving.starts_paused = true;
    let destination = Machine::start(&machines.qemu, &arriving, &there, &inherited, patient()).await.unwrap();
    drop(inherited);
    let monitor = source.monitor();
    monitor.give_descriptor("state", sends.into()).await.unwrap();
    monitor.migrate(&MigrationTarget::Descriptor("state".to_owned())).await.unwrap();
    assert_eq!(moved(&monitor).await, MigrationStatus::Completed);
    destination.wait_for("paused", |state| *state == State::Paused, WAIT_MAX).await.unwrap();
    destination.resume().await.unwrap();
}

/// Spec: A7
#[tokio::test]
async fn v6_a_machines_state_goes_to_a_file_and_comes_from_it() {
    let mut machines = Machines::new();
    let (here, there) = (machines.directory("here"), machines.directory("there"));
    let configuration = machines.configuration();
    let source = machines.start(&configuration, &here).await.unwrap();
    source.pause().await.unwrap();
    let monitor = source.monitor();
    let devices = machines.path("devices");
    monitor.save_devices(&devices, false).await.unwrap();
    let head = std::fs::read(&devices).unwrap();
    assert_eq!(&head[..4], b"QEVM");
    let file = MigrationTarget::File { path: machines.path("state"), offset_bytes: 4096 };
    monitor.migrate(&file).await.unwrap();
    assert_eq!(moved(&monitor).await, MigrationStatus::Completed);
    source.quit().await.unwrap();
    let destination = machines.start(&incoming(&configuration, Incoming::Deferred), &there).await.unwrap();
    destination.monitor().migrate_incoming(&file).await.unwrap();
    // As it stood at the source, it stands here.
    destination.wait_for("paused", |state| *state == State::Paused, WAIT_MAX).await.unwrap();
}

/// Spec: A7
#[tokio::test]
async fn v6_a_refusal_has_qemus_own_words() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let machine = machines.start(&machines.configuration(), &directory).await.unwrap();
    let monitor = machine.monitor();
    let error = monitor.execute("no-such-command", json!({})).await.unwrap_err();
    let named = |class: &str| class == "CommandNotFound";
    assert!(matches!(&error, HypervisorError::Refused { class, .. } if named(class)), "{error}");
    // A migration begins first and fails then.
    monitor.migrate(&MigrationTarget::Unix(machines.path("nobody.sock"))).await.unwrap();
    assert_eq!(moved(&monitor).await, MigrationStatus::Failed);
    let reason = monitor.migration().await.unwrap().error_desc.expect("a reason");
    assert!(reason.contains("nobody.sock"), "{reason}");
    // The machine runs on.
    assert!(monitor.status().await.unwrap().running);
}
