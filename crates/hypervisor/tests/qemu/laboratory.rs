//! A directory for one test's machines. They end with it, also when the test fails.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use onecopy_hypervisor::configuration::{AsynchronousIo, Boot, Disk, DiskDoor, FileFormat};
use onecopy_hypervisor::{HypervisorError, Machine, MachineConfiguration, MachineDirectory, Qemu, TimeLimits};
use tempfile::TempDir;

/// Enough for firmware that finds nothing to boot.
pub const MEMORY_BYTES: u64 = 64 << 20;

pub struct Laboratory {
    pub qemu: Qemu,
    directory: TempDir,
    machines: Vec<MachineDirectory>,
}

impl Laboratory {
    pub fn new() -> Laboratory {
        let directory = tempfile::tempdir().expect("a directory");
        // QEMU's account may be another one.
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).expect("opened");
        Laboratory { qemu: Qemu::find().expect("make setup has installed QEMU"), directory, machines: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Where the machine `name` runs.
    pub fn machine(&mut self, name: &str) -> MachineDirectory {
        let directory = MachineDirectory::new(self.path(name)).expect("short names");
        self.machines.push(directory.clone());
        directory
    }

    /// A disk of 1 MiB of zeros.
    pub fn empty_disk(&self, id: &str) -> Disk {
        let path = self.path(&format!("{id}.raw"));
        let file = std::fs::File::create(&path).expect("made");
        file.set_len(1 << 20).expect("sized");
        // Also for QEMU's account.
        file.set_permissions(std::fs::Permissions::from_mode(0o666)).expect("opened");
        Disk::new(id, file_door(path))
    }

    /// A machine that finds nothing to boot.
    pub fn configuration(&self) -> MachineConfiguration {
        let mut configuration = MachineConfiguration::new("nothing-to-boot", MEMORY_BYTES, Boot::FirstDisk);
        configuration.disks.push(self.empty_disk("empty"));
        configuration
    }

    pub async fn start(
        &self,
        configuration: &MachineConfiguration,
        directory: &MachineDirectory,
    ) -> Result<Machine, HypervisorError> {
        Machine::start(&self.qemu, configuration, directory, &[], patient()).await
    }
}

/// Limits that a machine which has more to do does not reach.
pub fn patient() -> TimeLimits {
    let long = Duration::from_secs(180);
    TimeLimits { start: long, quit: long, kill: long, pause: long, ..TimeLimits::default() }
}

pub fn file_door(path: PathBuf) -> DiskDoor {
    let asynchronous_io = AsynchronousIo::Threads;
    DiskDoor::File { path, format: FileFormat::Raw, read_only: false, direct: false, asynchronous_io }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        for machine in &self.machines {
            if let Ok(Some(process_id)) = Machine::running_process(machine) {
                let process_id = i32::try_from(process_id).ok().and_then(rustix::process::Pid::from_raw);
                let _gone = process_id.map(|id| rustix::process::kill_process(id, rustix::process::Signal::KILL));
            }
        }
    }
}

/// A field of `/proc/PID/status`.
pub fn process_status(process_id: u32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{process_id}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.expect("a field of the kernel's").trim().to_owned()
}
