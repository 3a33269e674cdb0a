//! Processes that tests look at, stop and kill.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::wait::{WAIT_MAX, until};

/// All processes of the machine.
///
/// # Panics
///
/// When there is no `/proc`.
pub fn all() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").expect("the list of processes").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The processes whose working directory lies in `directory`: servers with all their children.
pub fn working_in(directory: &Path) -> Vec<u32> {
    let works_there = |process: &u32| {
        std::fs::read_link(format!("/proc/{process}/cwd")).is_ok_and(|place| place.starts_with(directory))
    };
    all().filter(works_there).collect()
}

/// The processes with this word in their command lines.
pub fn with_argument(word: &str) -> Vec<u32> {
    all().filter(|process| arguments(*process).iter().any(|argument| argument == word)).collect()
}

/// The processes that work in `directory` or have a path in it in their command lines, but this one.
pub fn of_directory(directory: &Path) -> Vec<u32> {
    let name = directory.to_string_lossy();
    let mut found = working_in(directory);
    found.extend(all().filter(|process| arguments(*process).iter().any(|word| word.contains(&*name))));
    found.retain(|process| *process != std::process::id());
    found
}

/// The words of a process's command line, its program the first; none once it has ended.
pub fn arguments(process: u32) -> Vec<String> {
    let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).split_terminator('\0').map(str::to_owned).collect()
}

/// The processes that `parent` has started and that are there.
pub fn children_of(parent: u32) -> Vec<u32> {
    all().filter(|process| parent_of(*process) == Some(parent)).collect()
}

/// Who has started a process; none when it is gone.
pub fn parent_of(process: u32) -> Option<u32> {
    after_name(process)?.split(' ').nth(1)?.parse().ok()
}

/// The state of a process as a letter, and what follows. Source: proc_pid_stat(5); the name is in brackets.
fn after_name(process: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ").map(|(_, rest)| rest.to_owned())
}

/// Whether a process lives: also a zombie does while it has threads, which hold its files, sockets and locks.
pub fn lives(process: u32) -> bool {
    let is_zombie = after_name(process).is_some_and(|rest| rest.starts_with('Z'));
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count);
    threads > usize::from(is_zombie)
}

/// Sends a signal; false when there is no such process.
///
/// # Panics
///
/// When the process is another account's and this is not root.
#[track_caller]
pub fn send(process: u32, signal: Signal) -> bool {
    let id = Pid::from_raw(process.cast_signed()).expect("a process has a number");
    match kill_process(id, signal) {
        Ok(()) => true,
        Err(Errno::SRCH) => false,
        Err(error) => panic!("signal to process {process}: {error}"),
    }
}

/// Waits for the end of a process, whoever its parent is.
///
/// # Panics
///
/// After [`WAIT_MAX`].
#[track_caller]
pub fn wait_ended(process: u32) {
    let id = Pid::from_raw(process.cast_signed()).expect("a process has a number");
    // None: it is gone already.
    let Ok(handle) = pidfd_open(id, PidfdFlags::empty()) else { return };
    let begun = Instant::now();
    loop {
        let left = WAIT_MAX.saturating_sub(begun.elapsed());
        assert!(!left.is_zero(), "process {process} does not end");
        let left = Timespec::try_from(left).expect("a few minutes");
        match poll(&mut [PollFd::new(&handle.as_fd(), PollFlags::IN)], Some(&left)) {
            // Readable once all threads have ended. Source: pidfd_open(2).
            Ok(1..) => return,
            Ok(0) | Err(Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }
}

/// Kills a process and waits until it is gone.
///
/// # Panics
///
/// When it is another account's and this is not root, or does not end.
#[track_caller]
pub fn kill(process: u32) {
    if send(process, Signal::KILL) {
        wait_ended(process);
    }
}

/// Kills what is found until nothing is: what dies may have started another process a moment before.
///
/// # Panics
///
/// When there is always one left, or one is another account's and this is not root.
#[track_caller]
pub fn kill_all(find: impl Fn() -> Vec<u32>) {
    until("all are gone", || {
        let found = find();
        for process in &found {
            send(*process, Signal::KILL);
        }
        found.is_empty()
    });
}

/// Stops a process and waits until it stands still: it comes back first from what it has asked the kernel for.
///
/// # Panics
///
/// When it does not stop.
#[track_caller]
pub fn stop(process: u32) {
    send(process, Signal::STOP);
    until("the process stands still", || after_name(process).is_none_or(|rest| rest.starts_with(['T', 't', 'Z', 'X'])));
}

/// Processes that stand still; they go on when this is dropped, so that a failing test can end what it has started.
#[derive(Debug)]
pub struct Frozen(Vec<u32>);

impl Frozen {
    /// Stops these processes.
    ///
    /// # Panics
    ///
    /// When one does not stop.
    #[track_caller]
    pub fn of(processes: impl IntoIterator<Item = u32>) -> Frozen {
        // Made first: what is stopped already goes on when a later one fails.
        let mut frozen = Frozen(Vec::new());
        for process in processes {
            frozen.0.push(process);
            stop(process);
        }
        frozen
    }

    /// Stops all processes of a server: when this returns, none of them does anything.
    ///
    /// # Panics
    ///
    /// When one does not stop.
    #[track_caller]
    pub fn server(postmaster: u32) -> Frozen {
        // The postmaster first: once it stands still, it starts no more children.
        let mut frozen = Frozen::of([postmaster]);
        for child in children_of(postmaster) {
            frozen.0.push(child);
            stop(child);
        }
        frozen
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        for process in self.0.iter().rev() {
            // One that has ended meanwhile is no reason to leave the others standing.
            if let Some(id) = Pid::from_raw(process.cast_signed()) {
                let _ = kill_process(id, Signal::CONT);
            }
        }
    }
}
