//! Which processes serve a machine, whoever has started them: by their command lines.

use std::fs;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use onecopy_postgres::runs_as;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::role::Role;
use crate::MachineHome;

/// How long it may take to write back what its files have not got yet.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);

/// A killed process is gone within this.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long it may take until the machine can connect: it recovers first.
pub(super) const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is looked at.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The process that serves a machine's disk, or its memory, as far as can be seen.
pub(crate) fn server_of(role: Role, home: &MachineHome) -> Option<u32> {
    servers_of(role, home).ok()?.first().copied()
}

/// The processes that serve a machine's disk, or its memory, whoever has started them: one at most, where nothing is
/// wrong. All processes are looked at: a keeper can die before it has noted whom it started.
pub(crate) fn servers_of(role: Role, home: &MachineHome) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match has_words(number, role, home) {
            Ok(true) => found.push(number),
            Ok(false) => {}
            // Another account's, which may not be looked at.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Ends the servers of a machine that nobody looks after, first by `signal`. Blocks until they are gone, or cannot be
/// ended.
pub(crate) fn end_left_servers(home: &MachineHome, signal: Signal) {
    for role in Role::ALL {
        end_left_server(role, home, signal);
    }
}

pub(super) fn end_left_server(role: Role, home: &MachineHome, signal: Signal) {
    for (signal, patience) in [(signal, CLOSE_TIMEOUT), (Signal::KILL, KILL_TIMEOUT)] {
        let left = match servers_of(role, home) {
            Ok(left) if left.is_empty() => return,
            Ok(left) => left,
            Err(error) => {
                tracing::warn!(%error, "it is not known whether a {role} is left");
                return;
            }
        };
        for number in &left {
            signal_if_it_serves(*number, role, home, signal);
        }
        let begun = Instant::now();
        while left.iter().any(|number| serves(*number, role, home)) && begun.elapsed() < patience {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// Whether a process that had this disk, or memory, still lives. Where that cannot be seen it does: another one beside
/// it would be worse than a late one.
pub(super) fn serves(process_id: u32, role: Role, home: &MachineHome) -> bool {
    has_words(process_id, role, home).unwrap_or(true)
}

/// Whether a living process of the right account has this disk, or memory, on its command line: numbers are given
/// again, and anybody can write any command line.
fn has_words(process_id: u32, role: Role, home: &MachineHome) -> io::Result<bool> {
    // One that is dead, or whose first thread is, has no command line.
    let arguments = match fs::read(format!("/proc/{process_id}/cmdline")) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        // It ends while it is looked at.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => return Ok(false),
        arguments => arguments?,
    };
    let (command, what) = role.words(home);
    let arguments = String::from_utf8_lossy(&arguments);
    let mut arguments = arguments.split('\0');
    Ok(arguments.any(|argument| argument == command)
        && arguments.any(|argument| what.as_os_str() == argument)
        && role.account(home).is_some_and(|account| runs_as(process_id, account)))
}

/// Sends a signal to a process that serves this disk, or memory; to another one that has its number by now, nothing.
pub(super) fn signal_if_it_serves(process_id: u32, role: Role, home: &MachineHome, signal: Signal) {
    let Some(process) = process_of(process_id) else { return };
    // Opened first: what is looked at is then this one, or this one has ended and gets nothing.
    if let Ok(opened) = pidfd_open(process, PidfdFlags::empty())
        && has_words(process_id, role, home).is_ok_and(|has| has)
    {
        let _ = pidfd_send_signal(&opened, signal);
    }
}

pub(super) fn process_of(process_id: u32) -> Option<Pid> {
    i32::try_from(process_id).ok().and_then(Pid::from_raw)
}
