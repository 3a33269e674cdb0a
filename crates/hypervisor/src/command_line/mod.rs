//! QEMU's arguments, made of a machine's configuration by a pure function.
//!
//! Devices come in a fixed order and have fixed names: both ends of a migration, and a copy of a machine, get the same
//! ones from the same configuration.

mod check;
mod devices;
mod option;

#[cfg(test)]
mod tests;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::configuration::{Accelerator, Boot, Generation, Incoming, MemoryBackend, MemoryLock, OnPanic};
use crate::{HypervisorError, MachineConfiguration, MachineDirectory, QemuVersion};
use option::OptionText;

/// The number under which QEMU finds KVM's device, where its account may not open it.
pub(crate) const KVM_DESCRIPTOR: i32 = 900;

/// TCG keeps this much translated code. QEMU's own choice goes up to 1 GiB, which the host would have to have beside
/// the guest's memory.
const TRANSLATED_CODE_MIB: u32 = 256;

/// What of the host a command line depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostTraits {
    /// QEMU's version.
    pub version: QemuVersion,
    /// [`crate::kvm_runs_guests`].
    pub kvm: bool,
}

/// The arguments of one QEMU process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    arguments: Vec<OsString>,
    opens_kvm: bool,
}

impl CommandLine {
    /// The arguments for a machine whose files are in `directory`.
    ///
    /// # Errors
    /// [`HypervisorError::Configuration`] when the configuration contradicts itself.
    pub fn new(
        configuration: &MachineConfiguration,
        directory: &MachineDirectory,
        host: HostTraits,
    ) -> Result<CommandLine, HypervisorError> {
        check::check(configuration, host.version)
            .map_err(|reason| HypervisorError::Configuration { name: configuration.name.clone(), reason })?;
        let mut line = CommandLine { arguments: Vec::new(), opens_kvm: false };
        line.identity(configuration);
        line.accelerator(configuration, host);
        line.board(configuration);
        line.boot(configuration);
        line.monitors(configuration, directory);
        devices::add(&mut line, configuration, directory, host.version);
        line.life(configuration, directory);
        line.arguments.extend(configuration.more_arguments.iter().map(OsString::from));
        Ok(line)
    }

    /// The arguments, without the program.
    pub fn arguments(&self) -> &[OsString] {
        &self.arguments
    }

    /// QEMU expects KVM's device as descriptor [`KVM_DESCRIPTOR`].
    pub(crate) fn opens_kvm(&self) -> bool {
        self.opens_kvm
    }

    fn add(&mut self, flag: &str, value: impl Into<OsString>) {
        self.arguments.push(OsString::from(flag));
        self.arguments.push(value.into());
    }

    fn add_flag(&mut self, flag: &str) {
        self.arguments.push(OsString::from(flag));
    }

    fn add_path(&mut self, flag: &str, path: &Path) {
        self.add(flag, path.as_os_str());
    }

    /// A character device that listens on a Unix socket and waits for nobody.
    fn add_socket(&mut self, id: &str, path: impl AsRef<OsStr>) {
        let socket = OptionText::new("socket").with("id", id).with_path("path", path);
        self.add("-chardev", socket.with_switch("server", true).with_switch("wait", false));
    }

    fn identity(&mut self, configuration: &MachineConfiguration) {
        for flag in ["-no-user-config", "-nodefaults"] {
            self.add_flag(flag);
        }
        self.add("-display", "none");
        self.add("-vga", "none");
        self.add("-name", OptionText::new("").with("guest", &configuration.name));
        if let Some(uuid) = &configuration.uuid {
            self.add("-uuid", uuid);
        }
    }

    fn accelerator(&mut self, configuration: &MachineConfiguration, host: HostTraits) {
        if uses_kvm(configuration.accelerator, host.kvm) {
            let mut kvm = OptionText::new("kvm");
            if host.version >= QemuVersion::KVM_DEVICE {
                self.add("-add-fd", OptionText::new("").with("fd", KVM_DESCRIPTOR).with("set", KVM_DESCRIPTOR));
                kvm = kvm.with("device", format!("/dev/fdset/{KVM_DESCRIPTOR}"));
                self.opens_kvm = true;
            }
            self.add("-accel", kvm);
        }
        if configuration.accelerator != Accelerator::Kvm {
            let mut tcg = OptionText::new("tcg").with("tb-size", TRANSLATED_CODE_MIB);
            if configuration.processors > 1 && host.version < QemuVersion::THREAD_PER_PROCESSOR {
                tcg = tcg.with("thread", "single");
            }
            self.add("-accel", tcg);
        }
    }

    fn board(&mut self, configuration: &MachineConfiguration) {
        let machine = match &configuration.board_version {
            None => OptionText::new("q35"),
            Some(version) => OptionText::new(format!("pc-q35-{version}")),
        };
        let machine = machine.with_switch("vmport", false);
        // Pages are not merged with those of others unless memory says so; a core dump of QEMU does not hold the guest.
        let machine = machine.with_switch("mem-merge", false).with_switch("dump-guest-core", false);
        self.add("-machine", machine.with("memory-backend", MEMORY));
        self.add("-cpu", &configuration.processor_model);
        self.add("-smp", configuration.processors.to_string());
        self.memory(configuration);
    }

    fn memory(&mut self, configuration: &MachineConfiguration) {
        let memory = &configuration.memory;
        self.add("-m", OptionText::new("").with("size", format!("{}M", memory.size_bytes >> 20)));
        let object = match &memory.backend {
            MemoryBackend::Anonymous { shared, huge_page_bytes } => {
                let object = OptionText::new("memory-backend-memfd").with_switch("share", *shared);
                let huge = huge_page_bytes.map(|bytes| format!("{}k", bytes >> 10));
                object.with_some("hugetlb", huge.is_some().then_some("on")).with_some("hugetlbsize", huge)
            }
            MemoryBackend::File { path, shared, read_only, offset_bytes } => {
                let object = OptionText::new("memory-backend-file").with_path("mem-path", path);
                let object = object.with_switch("share", *shared).with_switch("readonly", *read_only);
                // A read-only file under private memory: the guest's memory itself is no ROM.
                let object = object.with_some("rom", (*read_only && !*shared).then_some("off"));
                object.with_some("offset", (*offset_bytes > 0).then_some(offset_bytes))
            }
        };
        let object = object.with("id", MEMORY).with("size", memory.size_bytes);
        let object = object.with_switch("prealloc", memory.preallocated);
        let object = object.with_some("merge", memory.mergeable.then_some("on"));
        // Its name in a migration is then the one that memory without a back end has.
        self.add("-object", object.with_switch("x-use-canonical-path-for-ramblock-id", false));
    }

    fn boot(&mut self, configuration: &MachineConfiguration) {
        let Boot::Kernel { kernel, initrd, arguments } = &configuration.boot else { return };
        self.add_path("-kernel", kernel);
        if let Some(initrd) = initrd {
            self.add_path("-initrd", initrd);
        }
        self.add("-append", arguments);
    }

    fn monitors(&mut self, configuration: &MachineConfiguration, directory: &MachineDirectory) {
        let own = std::iter::once(directory.monitor());
        for (number, path) in own.chain(configuration.more_monitors.iter().cloned()).enumerate() {
            let id = format!("monitor{number}");
            self.add_socket(&id, path);
            self.add("-mon", OptionText::new("").with("chardev", id).with("mode", "control"));
        }
    }

    /// How it begins, ends and is held in.
    fn life(&mut self, configuration: &MachineConfiguration, directory: &MachineDirectory) {
        let panic = match configuration.on_panic {
            OnPanic::Pause => "pause",
            OnPanic::End => "shutdown",
        };
        let action = OptionText::new("").with("panic", panic).with("reboot", "reset").with("shutdown", "poweroff");
        self.add("-action", action);
        if configuration.security.sandboxed {
            let denied = ["elevateprivileges", "spawn", "resourcecontrol", "obsolete"];
            let sandbox = OptionText::new("on");
            self.add("-sandbox", denied.iter().fold(sandbox, |sandbox, right| sandbox.with(right, "deny")));
        }
        let lock = match configuration.security.memory_lock {
            MemoryLock::Off => None,
            MemoryLock::OnFault => Some("on-fault"),
            MemoryLock::On => Some("on"),
        };
        if let Some(lock) = lock {
            self.add("-overcommit", OptionText::new("").with("mem-lock", lock));
        }
        if let Some(incoming) = &configuration.incoming {
            self.add("-incoming", incoming_address(incoming));
        }
        // What boots is let go by the monitor: nothing that it does is missed.
        if configuration.starts_paused || configuration.incoming.is_none() {
            self.add_flag("-S");
        }
        self.add_path("-pidfile", &directory.process_id_file());
    }
}

fn uses_kvm(accelerator: Accelerator, kvm: bool) -> bool {
    match accelerator {
        Accelerator::Detected => kvm,
        Accelerator::Kvm => true,
        Accelerator::Tcg => false,
    }
}

/// The memory's name.
const MEMORY: &str = "pc.ram";

fn incoming_address(incoming: &Incoming) -> OsString {
    let path = |path: &Path| {
        let mut address = OsString::from("unix:");
        address.push(path);
        address
    };
    match incoming {
        Incoming::Deferred => OsString::from("defer"),
        Incoming::Unix(socket) => path(socket),
        Incoming::Descriptor(number) => OsString::from(format!("fd:{number}")),
        Incoming::Command(command) => OsString::from(format!("exec:{command}")),
    }
}

/// The generation's option.
fn generation(generation: &Generation) -> OptionText {
    let guid = match generation {
        Generation::New => "auto",
        Generation::Fixed(uuid) => uuid,
    };
    OptionText::new("vmgenid").with("id", "generation").with("guid", guid)
}
