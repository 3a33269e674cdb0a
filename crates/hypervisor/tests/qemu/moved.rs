//! A machine's state goes to another one, over each way that we use.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use onecopy_hypervisor::configuration::Incoming;
use onecopy_hypervisor::monitor::{MigrationStatus, MigrationTarget};
use onecopy_hypervisor::{HypervisorError, InheritedDescriptor, Machine, MachineConfiguration, Monitor, State};
use serde_json::json;

use crate::bounds::confined;
use crate::laboratory::{Laboratory, patient};

/// How long a migration of a small machine may take before the test says that it hangs.
const PATIENCE: Duration = Duration::from_secs(180);

async fn moved(from: &Monitor) -> MigrationStatus {
    let waiting = async {
        loop {
            match from.migration().await.expect("QEMU answers").status {
                Some(status) if status.is_final() => return status,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("it does not hang")
}

fn incoming(configuration: &MachineConfiguration, incoming: Incoming) -> MachineConfiguration {
    MachineConfiguration { incoming: Some(incoming), ..configuration.clone() }
}

#[tokio::test]
async fn v6_a_machine_moves_over_a_socket() {
    let mut laboratory = Laboratory::new();
    let (here, there) = (laboratory.machine("here"), laboratory.machine("there"));
    let configuration = confined(laboratory.configuration());
    let source = laboratory.start(&configuration, &here).await.unwrap();
    let socket = there.path().join("state.sock");
    let arriving = incoming(&configuration, Incoming::Unix(socket.clone()));
    let destination = laboratory.start(&arriving, &there).await.unwrap();
    assert_eq!(destination.state(), State::Incoming);
    // The sockets belong to the accounts: the source must be able to pass the destination's directory, which is the same account's.
    let monitor = source.monitor();
    monitor.set_migration_capabilities(&[("events", true), ("return-path", true)]).await.unwrap();
    let parameters = json!({ "max-bandwidth": 0, "downtime-limit": 300 });
    let parameters = parameters.as_object().expect("an object").clone();
    monitor.set_migration_parameters(parameters).await.unwrap();
    monitor.migrate(&MigrationTarget::Unix(socket)).await.unwrap();
    assert_eq!(moved(&monitor).await, MigrationStatus::Completed);
    destination.wait_for("running", |state| *state == State::Running, PATIENCE).await.unwrap();
    source.wait_for("paused", |state| *state == State::Paused, PATIENCE).await.unwrap();
    let migration = monitor.migration().await.unwrap();
    assert_eq!(migration.ram.expect("memory was sent").remaining_bytes, 0);
}

#[tokio::test]
async fn v6_a_machine_moves_over_descriptors() {
    let mut laboratory = Laboratory::new();
    let (here, there) = (laboratory.machine("here"), laboratory.machine("there"));
    let configuration = laboratory.configuration();
    let source = laboratory.start(&configuration, &here).await.unwrap();
    let (sends, receives) = UnixStream::pair().unwrap();
    let descriptor: Arc<OwnedFd> = Arc::new(receives.into());
    let inherited = [InheritedDescriptor { descriptor, number: 510 }];
    let mut arriving = incoming(&configuration, Incoming::Descriptor(510));
    // It waits after its arrival.
    arriving.starts_paused = true;
    let destination = Machine::start(&laboratory.qemu, &arriving, &there, &inherited, patient()).await.unwrap();
    drop(inherited);
    let monitor = source.monitor();
    monitor.give_descriptor("state", sends.into()).await.unwrap();
    monitor.migrate(&MigrationTarget::Descriptor("state".to_owned())).await.unwrap();
    assert_eq!(moved(&monitor).await, MigrationStatus::Completed);
    destination.wait_for("paused", |state| *state == State::Paused, PATIENCE).await.unwrap();
    destination.resume().await.unwrap();
}

#[tokio::test]
async fn v6_a_machines_state_goes_to_a_file_and_comes_from_it() {
    let mut laboratory = Laboratory::new();
    let (here, there) = (laboratory.machine("here"), laboratory.machine("there"));
    let configuration = laboratory.configuration();
    let source = laboratory.start(&configuration, &here).await.unwrap();
    source.pause().await.unwrap();
    let monitor = source.monitor();
    let devices = laboratory.path("devices");
    monitor.save_devices(&devices, false).await.unwrap();
    let head = std::fs::read(&devices).unwrap();
    assert_eq!(&head[..4], b"QEVM");
    let file = MigrationTarget::File { path: laboratory.path("state"), offset_bytes: 4096 };
    monitor.migrate(&file).await.unwrap();
    assert_eq!(moved(&monitor).await, MigrationStatus::Completed);
    source.quit().await.unwrap();
    let destination = laboratory.start(&incoming(&configuration, Incoming::Deferred), &there).await.unwrap();
    destination.monitor().migrate_incoming(&file).await.unwrap();
    // As it stood at the source, it stands here.
    destination.wait_for("paused", |state| *state == State::Paused, PATIENCE).await.unwrap();
}

#[tokio::test]
async fn v6_a_refusal_has_qemus_own_words() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let machine = laboratory.start(&laboratory.configuration(), &directory).await.unwrap();
    let monitor = machine.monitor();
    let error = monitor.execute("no-such-command", json!({})).await.unwrap_err();
    let named = |class: &str| class == "CommandNotFound";
    assert!(matches!(&error, HypervisorError::Refused { class, .. } if named(class)), "{error}");
    // A migration begins first and fails then.
    monitor.migrate(&MigrationTarget::Unix(laboratory.path("nobody.sock"))).await.unwrap();
    assert_eq!(moved(&monitor).await, MigrationStatus::Failed);
    let reason = monitor.migration().await.unwrap().error_desc.expect("a reason");
    assert!(reason.contains("nobody.sock"), "{reason}");
    // The machine runs on.
    assert!(monitor.status().await.unwrap().running);
}
