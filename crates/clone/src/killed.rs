//! A process that is killed after each of its steps, for tests.
//!
//! Its work runs on a thread of its own. Every system call by which that thread, or one that it starts, would leave
//! something behind - a name, a content, an owner, a message - is put before the test first (seccomp(2),
//! `SECCOMP_RET_USER_NOTIF`), which counts it. From the step on at which the process dies all of them are refused and
//! change nothing: whatever the thread does then, nobody will ever see it. What other processes do that it starts is
//! theirs.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::channel;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// More steps than any work of a test has.
const STEPS_MAX: usize = 1000;
/// How often it is looked whether the work has ended.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// The flags of openat(2) are the low half of its third word (`struct seccomp_data`, on a little-endian machine).
const OPENAT_FLAGS_AT: u32 = 16 + 2 * 8;

/// They change what they are given by a descriptor.
const BY_DESCRIPTOR: [libc::c_long; 7] = [
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchown,
];
/// They change names, or reach other processes.
const OTHERS: [libc::c_long; 13] = [
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_sendmsg,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_kill,
    libc::SYS_pidfd_send_signal,
];
/// The same by their older numbers.
#[cfg(target_arch = "x86_64")]
const OLDER: [libc::c_long; 9] = [
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_rename,
    libc::SYS_unlink,
    libc::SYS_symlink,
    libc::SYS_link,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: [libc::c_long; 0] = [];

/// What counts as a step; all that is not one happens until the death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Each of them.
    Any,
    /// A message to another process.
    Message,
}

/// When a process died.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Death {
    /// The steps that it did.
    pub steps: usize,
    /// The system call that it did not come to; none: it came to its end.
    before: Option<libc::c_long>,
}

impl Death {
    /// Whether it did all that it wanted.
    pub fn is_end(&self) -> bool {
        self.before.is_none()
    }
}

impl fmt::Display for Death {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.before {
            Some(call) => write!(formatter, "killed after {} steps, before system call {call}", self.steps),
            None => write!(formatter, "ended after {} steps", self.steps),
        }
    }
}

/// Does `work` in a new harness again and again: killed before its first step, after its first, after its second,
/// until it comes to its end, where it must succeed. `judge` looks at what each has left. Returns how many steps `work`
/// has.
pub(crate) fn at_every_step<L: Sync, E: fmt::Debug + Send>(
    counted: Step,
    begin: impl Fn() -> L,
    work: impl Fn(&L) -> Result<(), E> + Sync,
    judge: impl Fn(L, Death),
) -> usize {
    for steps_max in 0..STEPS_MAX {
        let harness = begin();
        let (death, result) = live(counted, steps_max, || work(&harness));
        if let Some(result) = result {
            result.expect("nothing was refused");
        }
        judge(harness, death);
        if death.is_end() {
            return death.steps;
        }
    }
    panic!("the work does not come to its end");
}

/// Does `work` until it has done so many steps; what it gives when it comes to its end.
pub(crate) fn live<R: Send>(counted: Step, steps_max: usize, work: impl FnOnce() -> R + Send) -> (Death, Option<R>) {
    std::thread::scope(|scope| {
        let (tell, told) = channel();
        let worker = scope.spawn(move || {
            tell.send(put_before_the_test()).expect("it is waited for");
            work()
        });
        let listener = told.recv().expect("the kernel asks");
        let mut fate = Fate { listener, counted, steps_max, steps: 0, before: None };
        while !worker.is_finished() {
            fate.decide();
        }
        let death = Death { steps: fate.steps, before: fate.before };
        match worker.join() {
            Ok(result) if death.is_end() => (death, Some(result)),
            Err(panic) if death.is_end() => std::panic::resume_unwind(panic),
            // Nobody hears how a dead one fails.
            _ => (death, None),
        }
    })
}

/// Decides about the calls of one process.
struct Fate {
    listener: OwnedFd,
    counted: Step,
    steps_max: usize,
    steps: usize,
    before: Option<libc::c_long>,
}

impl Fate {
    /// About the next one, if one comes soon.
    fn decide(&mut self) {
        let mut ready = [PollFd::new(&self.listener, PollFlags::IN)];
        let polled = poll(&mut ready, Some(&LOOK_INTERVAL));
        assert!(matches!(polled, Ok(_) | Err(rustix::io::Errno::INTR)), "{polled:?}");
        if !ready[0].revents().contains(PollFlags::IN) {
            return;
        }
        // SAFETY: a structure of numbers, for which the kernel wants zeros.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one such structure.
        if unsafe { libc::ioctl(self.listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut asked) } != 0 {
            // Who asked is gone.
            return;
        }
        let (error, flags) = match self.may(&asked) {
            true => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            false => (-libc::EIO, 0),
        };
        let answer = libc::seccomp_notif_resp { id: asked.id, val: 0, error, flags };
        // SAFETY: the kernel reads one such structure. That nobody waits for it any more is no harm.
        unsafe { libc::ioctl(self.listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const answer) };
    }

    fn may(&mut self, asked: &libc::seccomp_notif) -> bool {
        let call = libc::c_long::from(asked.data.nr);
        if !is_own_thread(asked.pid) || !outlives(call, asked.data.args[0]) {
            return true;
        }
        let is_step = self.counted == Step::Any || call == libc::SYS_sendmsg;
        if self.before.is_some() || (is_step && self.steps == self.steps_max) {
            self.before.get_or_insert(call);
            return false;
        }
        self.steps += usize::from(is_step);
        true
    }
}

/// Whether it is a thread of the tests; else it is one of a program that they have started.
fn is_own_thread(thread: u32) -> bool {
    Path::new("/proc/self/task").join(thread.to_string()).exists()
}

/// Whether anything of it is left when the process is gone; `first` is the call's first word.
fn outlives(call: libc::c_long, first: u64) -> bool {
    // What goes through pipes, events and memory goes with the process, and to standard output and error write the
    // tests.
    let has_name = |found: std::fs::Metadata| found.is_dir() || (found.is_file() && found.nlink() > 0);
    !BY_DESCRIPTOR.contains(&call)
        || (first > 2 && std::fs::metadata(format!("/proc/self/fd/{first}")).is_ok_and(has_name))
}

/// From here on the calls of this thread, and of those that it starts, wait for whoever holds what this gives.
fn put_before_the_test() -> OwnedFd {
    let calls: Vec<libc::c_long> = BY_DESCRIPTOR.into_iter().chain(OTHERS).chain(OLDER).collect();
    let count = u8::try_from(calls.len()).expect("they fit into a jump");
    let statement = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let is_call = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let making = (libc::O_CREAT | libc::O_TRUNC) as u32;
    let mut filter = vec![
        // `struct seccomp_data`: the number of the call is its first word.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(is_call, libc::SYS_openat as u32, 0, 2),
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, OPENAT_FLAGS_AT, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, making, count + 1, count),
    ];
    filter.extend(calls.iter().zip(0..count).map(|(call, at)| statement(is_call, *call as u32, count - at, 0)));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF, 0, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let (filter_mode, listened) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    // SAFETY: the program outlives the calls, which bind this thread alone.
    let listener = unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        libc::syscall(libc::SYS_seccomp, filter_mode, listened, &raw const program)
    };
    assert!(listener >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(i32::try_from(listener).expect("a descriptor")) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Makes a file as a whole, by a thread of its own, beside what goes with the process and what another process
    /// does.
    fn replace(directory: &Path) -> io::Result<()> {
        std::process::Command::new("touch").arg(directory.join("of another process")).status()?;
        let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::io::write(&memory, b"gone")?;
        fs::create_dir(directory.join("made"))?;
        let (new, path) = (directory.join("made/file.new"), directory.join("made/file"));
        std::thread::scope(|scope| scope.spawn(|| fs::write(&new, "content")).join().expect("not ended"))?;
        fs::rename(new, path)
    }

    #[test]
    fn a_process_is_killed_after_each_step_and_does_nothing_more() {
        let left = |directory: &Path, name: &str| fs::read_to_string(directory.join("made").join(name)).ok();
        let begin = || tempfile::tempdir().expect("a directory");
        let steps = at_every_step(
            Step::Any,
            begin,
            |directory| replace(directory.path()),
            |directory, death| {
                let (new, file) = (left(directory.path(), "file.new"), left(directory.path(), "file"));
                let found = (directory.path().join("made").exists(), new.as_deref(), file.as_deref());
                let expected = [
                    (false, None, None),
                    (true, None, None),
                    (true, Some(""), None),
                    (true, Some("content"), None),
                    (true, None, Some("content")),
                ];
                assert_eq!(found, expected[death.steps], "{death}");
                assert!(directory.path().join("of another process").exists());
            },
        );
        assert_eq!(steps, 4);
    }

    #[test]
    fn of_messages_all_else_happens_until_the_next_one_and_nothing_after_it() {
        let steps = at_every_step(
            Step::Message,
            || (tempfile::tempdir().expect("a directory"), crate::keeper::Channel::pair().expect("a channel")),
            |(directory, (channel, _other))| {
                fs::write(directory.path().join("before"), "")?;
                channel.forget("something")?;
                fs::write(directory.path().join("behind"), "")
            },
            |(directory, (_channel, other)), death| {
                assert!(directory.path().join("before").exists(), "{death}");
                assert_eq!(directory.path().join("behind").exists(), death.is_end(), "{death}");
                let came = crate::keeper::Channel::over(other).expect("a channel").receive(false).is_ok();
                assert_eq!(came, death.is_end(), "{death}");
            },
        );
        assert_eq!(steps, 1);
    }
}
