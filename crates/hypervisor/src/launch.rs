//! QEMU's process is made here: its descriptors, control groups, limits and account are set between fork and exec.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use rustix::process::{Resource, Rlimit};
use tokio::process::{Child, Command};

use crate::accelerator::KVM_DEVICE;
use crate::command_line::KVM_DESCRIPTOR;
use crate::configuration::{Account, MemoryLock, Security};
use crate::console;
use crate::{CommandLine, HypervisorError, MachineDirectory, Qemu};

/// An open descriptor that QEMU finds under a number that its configuration names.
#[derive(Debug, Clone)]
pub struct InheritedDescriptor {
    /// What is inherited.
    pub descriptor: Arc<OwnedFd>,
    /// Its number in QEMU, above those that QEMU opens itself: 500 to 899.
    pub number: i32,
}

/// All that the new process does before it becomes QEMU.
struct Prepared {
    /// Raised above all numbers, so that none lies where another one shall go.
    descriptors: Vec<(OwnedFd, i32)>,
    /// `cgroup.procs`, open: the kernel asks for the rights of who has opened it.
    control_groups: Vec<File>,
    locks_memory: bool,
    account: Option<Account>,
}

/// Starts QEMU. It runs on when this process ends; what it says goes to its log.
pub(crate) fn launch(
    qemu: &Qemu,
    line: &CommandLine,
    directory: &MachineDirectory,
    security: &Security,
    inherited: &[InheritedDescriptor],
) -> Result<Child, HypervisorError> {
    let prepared = prepare(line, security, inherited)?;
    let log = open_qemu_log(directory)?;
    let second = log.try_clone().map_err(HypervisorError::file("open", directory.qemu_log()))?;
    let mut command = Command::new(qemu.program());
    command.args(line.arguments()).env_clear().current_dir("/");
    // A group of its own: Ctrl-C in a terminal does not reach it.
    command.stdin(Stdio::null()).stdout(log).stderr(second).process_group(0).kill_on_drop(false);
    // SAFETY: between fork and exec only system calls are made, by async-signal-safe functions; no memory is allocated.
    unsafe { command.pre_exec(move || prepared.apply()) };
    command.spawn().map_err(|source| HypervisorError::Spawn { program: qemu.program().to_owned(), source })
}

/// QEMU's log, appended to so that it can be cut while QEMU writes.
fn open_qemu_log(directory: &MachineDirectory) -> Result<File, HypervisorError> {
    let path = directory.qemu_log();
    console::open_of_account(OpenOptions::new().create(true).append(true), &path)
        .map_err(HypervisorError::file("open", path))
}

fn prepare(
    line: &CommandLine,
    security: &Security,
    inherited: &[InheritedDescriptor],
) -> Result<Prepared, HypervisorError> {
    let mut descriptors = Vec::new();
    for one in inherited {
        descriptors.push((raise(&one.descriptor)?, one.number));
    }
    if line.opens_kvm() {
        let kvm = OpenOptions::new().read(true).write(true).open(KVM_DEVICE);
        let kvm = OwnedFd::from(kvm.map_err(HypervisorError::file("open", KVM_DEVICE))?);
        descriptors.push((raise(&kvm)?, KVM_DESCRIPTOR));
    }
    let mut control_groups = Vec::new();
    for group in &security.control_groups {
        let path = group.join("cgroup.procs");
        control_groups.push(OpenOptions::new().write(true).open(&path).map_err(HypervisorError::file("open", path))?);
    }
    let locks_memory = security.memory_lock != MemoryLock::Off;
    Ok(Prepared { descriptors, control_groups, locks_memory, account: security.account })
}

/// A copy above every number that is given out.
fn raise(descriptor: &OwnedFd) -> Result<OwnedFd, HypervisorError> {
    rustix::io::fcntl_dupfd_cloexec(descriptor, KVM_DESCRIPTOR + 1)
        .map_err(|error| HypervisorError::file("hand down", PathBuf::from("a descriptor"))(error.into()))
}

impl Prepared {
    /// In the new process. The account comes last: it takes the rights to do the rest.
    fn apply(&self) -> io::Result<()> {
        for (copy, number) in &self.descriptors {
            // SAFETY: the process is about to become another program: nothing in it uses what lies under this number,
            // nor closes it, since it is not dropped.
            let mut target = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(*number) });
            // The copy that dup2 makes is not closed at exec.
            rustix::io::dup2(copy, &mut target)?;
        }
        for group in &self.control_groups {
            rustix::io::write(group, b"0")?;
        }
        if self.locks_memory {
            let unlimited = Rlimit { current: None, maximum: None };
            // Where even this process may not raise the limit, QEMU is the one to say whether it needs to.
            let _limited = rustix::process::setrlimit(Resource::Memlock, unlimited);
        }
        self.account.map_or(Ok(()), become_account)
    }
}

/// Takes the account's rights for good. The C library's wrappers would signal threads that this process does not have:
/// the system calls themselves are made.
fn become_account(account: Account) -> io::Result<()> {
    let done = |result: libc::c_long| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    let (user, group) = (libc::c_long::from(account.user_id), libc::c_long::from(account.group_id));
    // SAFETY: no memory is given to the kernel: an empty list of groups is a null pointer.
    done(unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) })?;
    // SAFETY: numbers only.
    done(unsafe { libc::syscall(libc::SYS_setresgid, group, group, group) })?;
    // SAFETY: numbers only.
    done(unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) })
}
