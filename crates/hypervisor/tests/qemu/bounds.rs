//! What holds a machine's process in.

use std::path::{Path, PathBuf};

use onecopy_hypervisor::configuration::Account;
use onecopy_hypervisor::{Machine, MachineConfiguration};

use crate::laboratory::{Laboratory, MEMORY_BYTES, process_status};

/// `nobody`: an account that may do nothing.
const NOBODY: Account = Account { user_id: 65534, group_id: 65534 };

/// With an account of its own, where this process may choose one.
pub fn confined(mut configuration: MachineConfiguration) -> MachineConfiguration {
    if rustix::process::geteuid().is_root() {
        configuration.security.account = Some(NOBODY);
    }
    configuration
}

#[tokio::test]
async fn v5_qemu_is_sandboxed_and_has_no_rights() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let machine = laboratory.start(&confined(laboratory.configuration()), &directory).await.unwrap();
    let status = |field| process_status(machine.process_id(), field);
    // 2: a filter of system calls.
    assert_eq!(status("Seccomp"), "2");
    if rustix::process::geteuid().is_root() {
        assert_eq!(status("Uid"), "65534\t65534\t65534\t65534");
        assert_eq!(status("Gid"), "65534\t65534\t65534\t65534");
        assert_eq!(status("Groups"), "");
    }
    assert_eq!(status("CapEff"), "0000000000000000");
    // Its directory is its own, and closed to others.
    let metadata = std::fs::metadata(directory.path()).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&metadata) & 0o777, 0o700);
    machine.quit().await.unwrap();
}

#[tokio::test]
async fn v5_control_without_the_sandbox_there_is_no_filter() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let mut configuration = laboratory.configuration();
    configuration.security.sandboxed = false;
    let machine = laboratory.start(&configuration, &directory).await.unwrap();
    assert_eq!(process_status(machine.process_id(), "Seccomp"), "0");
}

#[tokio::test]
async fn v5_a_guests_memory_can_be_locked() {
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let mut configuration = laboratory.configuration();
    configuration.security.locks_memory = true;
    let machine = laboratory.start(&configuration, &directory).await.unwrap();
    assert_is_locked(&machine);
    machine.quit().await.unwrap();
    // An account without rights can if its limit could be raised, else QEMU says what it may not do.
    match laboratory.start(&confined(configuration), &directory).await {
        Ok(machine) => assert_is_locked(&machine),
        Err(error) => assert!(error.to_string().contains("lock"), "{error}"),
    }
}

/// All of the guest's memory is; how much of QEMU's own depends on the threads that it has at that moment.
fn assert_is_locked(machine: &Machine) {
    let locked = process_status(machine.process_id(), "VmLck");
    let kilobytes: u64 = locked.trim_end_matches(" kB").trim().parse().expect("a number");
    assert!(kilobytes >= MEMORY_BYTES >> 10, "{locked}");
}

/// A control group of this test's own, removed with the value.
struct ControlGroup(PathBuf);

impl ControlGroup {
    fn make() -> Option<ControlGroup> {
        let hierarchies = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup/freezer", "/sys/fs/cgroup"].map(Path::new);
        let hierarchy = hierarchies.into_iter().find(|path| path.join("cgroup.procs").exists())?;
        let path = hierarchy.join(format!("onecopy-hypervisor-{}", std::process::id()));
        std::fs::create_dir(&path).ok()?;
        Some(ControlGroup(path))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        for _ in 0..3000 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[tokio::test]
async fn v5_qemu_begins_in_its_control_group() {
    let Some(group) = ControlGroup::make() else {
        assert!(!rustix::process::geteuid().is_root(), "root can make a control group");
        return;
    };
    let mut laboratory = Laboratory::new();
    let directory = laboratory.machine("m");
    let mut configuration = confined(laboratory.configuration());
    configuration.security.control_groups = vec![group.0.clone()];
    let machine = laboratory.start(&configuration, &directory).await.unwrap();
    let members = std::fs::read_to_string(group.0.join("cgroup.procs")).unwrap();
    assert!(members.lines().any(|line| line == machine.process_id().to_string()), "{members}");
    machine.quit().await.unwrap();
    // A group that is not there is named.
    let missing = group.0.join("missing");
    configuration.security.control_groups = vec![missing.clone()];
    let error = laboratory.start(&configuration, &directory).await.unwrap_err();
    assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
}
