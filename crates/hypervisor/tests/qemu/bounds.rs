//! What holds a machine's process in.

use onecopy_hypervisor::configuration::{Account, MemoryLock};
use onecopy_hypervisor::{Machine, MachineConfiguration};
use onecopy_testing::{ControlGroup, skip};

use crate::machines::{MEMORY_BYTES, Machines, process_status};

/// `nobody`: an account that may do nothing.
const NOBODY: Account = Account { user_id: 65534, group_id: 65534 };

/// With an account of its own, where this process may choose one.
pub fn confined(mut configuration: MachineConfiguration) -> MachineConfiguration {
    if rustix::process::geteuid().is_root() {
        configuration.security.account = Some(NOBODY);
    }
    configuration
}

/// QEMU runs sandboxed, without rights, as the account and in the control groups that were chosen; its guest's memory
/// can be locked.
///
/// Spec: C5
#[tokio::test]
async fn v5_qemu_is_sandboxed_and_has_no_rights() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let machine = machines.start(&confined(machines.configuration()), &directory).await.unwrap();
    let status = |field| process_status(machine.process_id(), field);
    // 2: a filter of system calls.
    assert_eq!(status("Seccomp"), "2");
    assert_eq!(status("CapEff"), "0000000000000000");
    // Its directory is its own, and closed to others.
    let metadata = std::fs::metadata(directory.path()).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&metadata) & 0o777, 0o700);
    machine.quit().await.unwrap();
}

/// Spec: C5
#[tokio::test]
async fn v5_qemu_runs_as_the_account_that_it_is_given() {
    if !rustix::process::geteuid().is_root() {
        skip("v5_qemu_runs_as_the_account_that_it_is_given", "only root can choose an account");
        return;
    }
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let machine = machines.start(&confined(machines.configuration()), &directory).await.unwrap();
    let status = |field| process_status(machine.process_id(), field);
    assert_eq!(status("Uid"), "65534\t65534\t65534\t65534");
    assert_eq!(status("Gid"), "65534\t65534\t65534\t65534");
    assert_eq!(status("Groups"), "");
    machine.quit().await.unwrap();
}

/// Spec: C5
#[tokio::test]
async fn v5_control_without_the_sandbox_there_is_no_filter() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let mut configuration = machines.configuration();
    configuration.security.sandboxed = false;
    let machine = machines.start(&configuration, &directory).await.unwrap();
    assert_eq!(process_status(machine.process_id(), "Seccomp"), "0");
}

/// Spec: C5
#[tokio::test]
async fn v5_a_guests_memory_can_be_locked() {
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let mut configuration = machines.configuration();
    configuration.security.memory_lock = MemoryLock::OnFault;
    let machine = machines.start(&configuration, &directory).await.unwrap();
    let resident = |machine: &Machine| kilobytes(machine.process_id(), "VmRSS");
    assert!(kilobytes(machine.process_id(), "VmLck") >= MEMORY_BYTES >> 10);
    let touched = resident(&machine);
    machine.quit().await.unwrap();
    configuration.security.memory_lock = MemoryLock::On;
    let machine = machines.start(&configuration, &directory).await.unwrap();
    assert_is_locked(&machine);
    assert!(touched < resident(&machine), "all was taken at once");
    machine.quit().await.unwrap();
    // An account without rights can if its limit could be raised, else QEMU says what it may not do.
    match machines.start(&confined(configuration), &directory).await {
        Ok(machine) => assert_is_locked(&machine),
        Err(error) => assert!(error.to_string().contains("lock"), "{error}"),
    }
}

/// All of the guest's memory is; how much of QEMU's own depends on the threads that it has at that moment.
fn assert_is_locked(machine: &Machine) {
    let locked = kilobytes(machine.process_id(), "VmLck");
    assert!(locked >= MEMORY_BYTES >> 10, "{locked} kB");
}

fn kilobytes(process_id: u32, name: &str) -> u64 {
    process_status(process_id, name).trim_end_matches(" kB").trim().parse().expect("a number")
}

/// Spec: C5
#[tokio::test]
async fn v5_qemu_begins_in_its_control_group() {
    let group = match ControlGroup::make_unbounded() {
        Ok(group) => group,
        Err(error) => {
            skip("v5_qemu_begins_in_its_control_group", &format!("{error:#}"));
            return;
        }
    };
    let mut machines = Machines::new();
    let directory = machines.directory("m");
    let mut configuration = confined(machines.configuration());
    configuration.security.control_groups = vec![group.directory().to_owned()];
    let machine = machines.start(&configuration, &directory).await.unwrap();
    let members = std::fs::read_to_string(group.directory().join("cgroup.procs")).unwrap();
    assert!(members.lines().any(|line| line == machine.process_id().to_string()), "{members}");
    machine.quit().await.unwrap();
    // A group that is not there is named.
    let missing = group.directory().join("missing");
    configuration.security.control_groups = vec![missing.clone()];
    let error = machines.start(&configuration, &directory).await.unwrap_err();
    assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
}
