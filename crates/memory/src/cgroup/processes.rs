//! Moving processes from one cgroup to another.

use std::fs;
use std::io;
use std::path::Path;

use crate::MemoryError;
use crate::pressure::Host;

use super::write;

/// A process that was not moved yet may start others meanwhile: it is looked so often whether there are any.
const PASSES_MAX: usize = 20;
/// More processes of one server are not moved one by one.
const PROCESSES_MAX: usize = 65_536;

/// Moves a process and all below it; tells how many.
pub(super) fn move_family(host: &Host, group: &Path, pid: u32) -> Result<usize, MemoryError> {
    let mut moved = usize::from(move_one(host, group, pid)?);
    for _ in 0..PASSES_MAX {
        let mut moved_now = 0;
        for process in family(pid) {
            moved_now += usize::from(move_one(host, group, process)?);
        }
        moved += moved_now;
        if moved_now == 0 {
            break;
        }
    }
    Ok(moved)
}

/// Moves all processes of a cgroup to another.
pub(super) fn move_all(from: &Path, to: &Path) -> Result<(), MemoryError> {
    let list = fs::read_to_string(from.join("cgroup.procs")).unwrap_or_default();
    for pid in list.lines().filter_map(|line| line.parse().ok()) {
        put(to, pid)?;
    }
    Ok(())
}

/// Whether it was moved: it is there already, or it has ended, when not.
fn move_one(host: &Host, group: &Path, pid: u32) -> Result<bool, MemoryError> {
    match host.group_of(pid) {
        Ok(Some(present)) if present == group => Ok(false),
        Ok(_) => put(group, pid),
        // Children come and go.
        Err(MemoryError::Malformed { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn put(group: &Path, pid: u32) -> Result<bool, MemoryError> {
    let path = group.join("cgroup.procs");
    match write(&path, &pid.to_string()) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        Err(error) => Err(MemoryError::file("move a process by", &path)(with_pid(pid, error))),
    }
}

fn with_pid(pid: u32, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("process {pid}: {error}"))
}

/// All processes below one, by proc_tid_children(5): complete but for children that are born meanwhile.
fn family(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut open = vec![pid];
    while let Some(parent) = open.pop() {
        for thread in fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            let children = children.split_ascii_whitespace().filter_map(|child| child.parse::<u32>().ok());
            open.extend(children.take(PROCESSES_MAX.saturating_sub(found.len() + open.len())));
        }
        if parent != pid {
            found.push(parent);
        }
    }
    found
}
