//! The machines of one test. They end with it, also when the test fails.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use onecopy_hypervisor::configuration::{AsynchronousIo, Boot, Disk, DiskBackend, FileFormat};
use onecopy_hypervisor::{HypervisorError, Machine, MachineConfiguration, MachineDirectory, Qemu, TimeLimits};
use onecopy_testing::{TestDirectory, WAIT_MAX, process};

/// Enough for firmware that finds nothing to boot.
pub const MEMORY_BYTES: u64 = 64 << 20;

pub struct Machines {
    pub qemu: Qemu,
    started: Vec<MachineDirectory>,
    directory: TestDirectory,
}

impl Machines {
    pub fn new() -> Machines {
        let qemu = Qemu::find().expect("make setup has installed QEMU");
        Machines { qemu, started: Vec::new(), directory: TestDirectory::new().expect("a directory") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Where the machine `name` runs.
    pub fn directory(&mut self, name: &str) -> MachineDirectory {
        let directory = MachineDirectory::new(self.path(name)).expect("short names");
        self.started.push(directory.clone());
        directory
    }

    /// A disk of 1 MiB of zeros.
    pub fn empty_disk(&self, id: &str) -> Disk {
        let path = self.path(&format!("{id}.raw"));
        let file = std::fs::File::create(&path).expect("made");
        file.set_len(1 << 20).expect("sized");
        // Also for QEMU's account.
        file.set_permissions(std::fs::Permissions::from_mode(0o666)).expect("opened");
        Disk::new(id, file_backend(path))
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
    TimeLimits { start: WAIT_MAX, quit: WAIT_MAX, kill: WAIT_MAX, pause: WAIT_MAX, ..TimeLimits::default() }
}

pub fn file_backend(path: PathBuf) -> DiskBackend {
    let asynchronous_io = AsynchronousIo::Threads;
    DiskBackend::File { path, format: FileFormat::Raw, read_only: false, direct: false, asynchronous_io }
}

impl Drop for Machines {
    fn drop(&mut self) {
        // They work in no directory of the test.
        for directory in &self.started {
            if let Ok(Some(process_id)) = Machine::running_process(directory) {
                process::kill(process_id);
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
