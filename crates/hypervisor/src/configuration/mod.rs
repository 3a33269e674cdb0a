//! A machine as data: all that its command line says, and what holds it in on the host.
//!
//! Nothing here looks at the host. [`crate::CommandLine`] makes arguments of it, [`crate::Machine`] runs them.

mod disk;
mod memory;
mod network;
mod security;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use disk::{AsynchronousIo, Disk, DiskBackend, FileFormat, NbdServer};
pub use memory::{Memory, MemoryBackend};
pub use network::{Forward, Network, NetworkEnd, Protocol, SocketRole};
pub use security::{Account, MemoryLock, Security};

/// What a guest's kernel needs to be told: where the console is, and not to distrust the timer, which
/// ticks unevenly while the host is busy (the kernel would panic at boot: "IO-APIC + timer doesn't work").
pub const KERNEL_ARGUMENTS: &str = "console=ttyS0 no_timer_check";

/// A whole machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfiguration {
    /// Shown in the process's arguments and in QEMU's messages.
    pub name: String,
    /// The machine's UUID in the firmware's tables; none: zeros.
    pub uuid: Option<String>,
    /// The version of the board, a PC with PCI Express (QEMU's q35), that both ends of a migration between different
    /// QEMUs agree on, such as `7.2`; none: the newest.
    pub board_version: Option<String>,
    /// What executes the guest's instructions.
    pub accelerator: Accelerator,
    /// QEMU's name of the processor model; `max` is all that the accelerator can do.
    pub processor_model: String,
    /// How many virtual processors.
    pub processors: u32,
    /// The guest's memory.
    pub memory: Memory,
    /// What is booted.
    pub boot: Boot,
    /// In the guest `/dev/vda`, `/dev/vdb`, ... in this order.
    pub disks: Vec<Disk>,
    /// In the guest the network cards in this order.
    pub networks: Vec<Network>,
    /// A port for the guest's agent.
    pub agent: bool,
    /// A source of random numbers, so that a guest does not wait for entropy.
    pub random_numbers: bool,
    /// A device by which the guest says that its kernel has panicked. Without it a panic looks like silence.
    pub panic_notice: bool,
    /// What happens when the guest says so.
    pub on_panic: OnPanic,
    /// A balloon: the host may ask the guest for memory.
    pub balloon: Option<Balloon>,
    /// Tells a guest that it is a copy, so that it makes new random numbers.
    pub generation: Option<Generation>,
    /// Empty PCI Express ports (`port0`, ...) for devices that are plugged in later.
    pub hot_plug_ports: u8,
    /// Where the machine's state comes from instead of a boot.
    pub incoming: Option<Incoming>,
    /// Stays paused until it is told to run.
    pub starts_paused: bool,
    /// Sockets of more monitors, for others than who runs the machine: a monitor serves one connection at a time.
    pub more_monitors: Vec<PathBuf>,
    /// What holds the process in.
    pub security: Security,
    /// More arguments of QEMU, behind all others, as they are.
    pub more_arguments: Vec<String>,
}

impl MachineConfiguration {
    /// A machine of one processor that boots `boot`: agent, random numbers and panic notice, no disk and no network.
    pub fn new(name: impl Into<String>, memory_bytes: u64, boot: Boot) -> MachineConfiguration {
        MachineConfiguration {
            name: name.into(),
            uuid: None,
            board_version: None,
            accelerator: Accelerator::Detected,
            processor_model: "max".to_owned(),
            processors: 1,
            memory: Memory::shared(memory_bytes),
            boot,
            disks: Vec::new(),
            networks: Vec::new(),
            agent: true,
            random_numbers: true,
            panic_notice: true,
            on_panic: OnPanic::Pause,
            balloon: None,
            generation: None,
            hot_plug_ports: 0,
            incoming: None,
            starts_paused: false,
            more_monitors: Vec::new(),
            security: Security::default(),
            more_arguments: Vec::new(),
        }
    }
}

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// KVM where [`crate::kvm_runs_guests`] says so, and if it then fails nevertheless, or elsewhere, TCG.
    Detected,
    /// KVM or nothing.
    Kvm,
    /// QEMU's own translator.
    Tcg,
}

/// What is booted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Boot {
    /// A kernel, without a boot loader.
    Kernel {
        /// `vmlinuz`.
        kernel: PathBuf,
        /// The initial file system.
        initrd: Option<PathBuf>,
        /// The kernel's arguments, [`KERNEL_ARGUMENTS`] among them.
        arguments: String,
    },
    /// The boot loader on the first disk.
    FirstDisk,
}

/// What happens when a guest's kernel panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnPanic {
    /// It stays as it is, to be looked at.
    Pause,
    /// QEMU ends.
    End,
}

/// How the balloon behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Balloon {
    /// The guest tells which pages it does not use, and the host gets them back without asking.
    pub free_page_reporting: bool,
}

/// The generation id of a machine:
/// <https://learn.microsoft.com/en-us/windows/win32/hyperv_v2/virtual-machine-generation-identifier>.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Generation {
    /// A new one with every start of QEMU.
    New,
    /// This UUID.
    Fixed(String),
}

/// Where a machine's state comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Incoming {
    /// [`crate::Monitor::migrate_incoming`] will say.
    Deferred,
    /// QEMU listens on this Unix socket.
    Unix(PathBuf),
    /// An inherited descriptor of this number.
    Descriptor(i32),
    /// What this command writes (`sh -c`); not with a sandbox.
    Command(String),
}
