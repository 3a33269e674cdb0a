//! The server's control group held still: for the instant in which the guest is copied, and until the copy's server has
//! been told whom it follows, or is ended before it can do anything.

use super::control::GROUP;
use super::status;
use crate::agent::replies::{Result, failed, failure};
use crate::protocol::FailureKind;
use std::fs::{read_to_string, write};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the kernel may take until all of the group stands: who waits for a disk stands after that.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the killed may take to be gone.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How soon either is seen.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// Holds all of the server's processes; done when none runs any more. One that cannot be held goes on.
///
/// # Errors
/// Also where no server runs, or one that is not in the group: an empty one is held at once.
pub(super) fn freeze() -> Result<()> {
    hold(Path::new(GROUP), FREEZE_TIMEOUT, || status().pid)
}

fn hold(group: &Path, limit: Duration, server: impl FnOnce() -> Option<u32>) -> Result<()> {
    set(group, "1")?;
    let held = match wait(limit, || is_held(group)) {
        // From here on it neither ends nor starts another one in its place.
        true => check_is_in(group, server()),
        false => {
            let message = format!("the server's processes still run after {} ms", limit.as_millis());
            Err(failure(FailureKind::Timeout, message))
        }
    };
    if held.is_err() {
        set(group, "0")?;
    }
    held
}

fn check_is_in(group: &Path, server: Option<u32>) -> Result<()> {
    let server = server.ok_or_else(|| failure(FailureKind::Failed, "the server is stopped"))?.to_string();
    if processes(group).is_some_and(|processes| processes.lines().any(|process| process == server)) {
        return Ok(());
    }
    let message = format!(
        "the server, process {server}, is not in its control group: it was started by hand in the guest; stop it there \
         (pg_ctl stop), and it is started again as it should be"
    );
    Err(failure(FailureKind::Failed, message))
}

/// Lets them go on; nothing happens where they are not held.
pub(super) fn thaw() -> Result<()> {
    set(Path::new(GROUP), "0")
}

/// Ends those that are held where they stand, none of which does anything more: they can be killed so (Linux:
/// Documentation/admin-guide/cgroup-v2.rst, `cgroup.freeze`, `cgroup.kill`).
///
/// # Errors
/// Also where a server runs all the same.
pub(super) fn kill() -> Result<()> {
    let group = Path::new(GROUP);
    if !is_held(group) {
        return Err(failure(FailureKind::Failed, "the server is not held: it may have done anything"));
    }
    write(group.join("cgroup.kill"), "1").map_err(|error| failed("killing the server", error))?;
    if !wait(END_TIMEOUT, || is_empty(group)) {
        let message = format!("the server's processes are still there after {} ms", END_TIMEOUT.as_millis());
        return Err(failure(FailureKind::Timeout, message));
    }
    if let Some(server) = status().pid {
        let message = format!("a server, process {server}, runs beside those that were held");
        return Err(failure(FailureKind::Failed, message));
    }
    // The next server is to run.
    set(group, "0")
}

fn set(group: &Path, is_held: &str) -> Result<()> {
    write(group.join("cgroup.freeze"), is_held).map_err(|error| failed("writing cgroup.freeze", error))
}

fn is_held(group: &Path) -> bool {
    read_to_string(group.join("cgroup.events")).is_ok_and(|events| events.lines().any(|line| line == "frozen 1"))
}

fn is_empty(group: &Path) -> bool {
    processes(group).is_some_and(|processes| processes.trim().is_empty())
}

fn processes(group: &Path) -> Option<String> {
    read_to_string(group.join("cgroup.procs")).ok()
}

fn wait(limit: Duration, holds: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    loop {
        if holds() {
            return true;
        }
        if begin.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(LOOK_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_held_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let group = directory.path();
        let frozen = || read_to_string(group.join("cgroup.freeze")).unwrap();
        write(group.join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        write(group.join("cgroup.procs"), "41\n42\n").unwrap();
        let error = hold(group, Duration::ZERO, || Some(42)).unwrap_err();
        assert_eq!(error.kind, FailureKind::Timeout, "{error}");
        assert_eq!(frozen(), "0");
        write(group.join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
        hold(group, Duration::ZERO, || Some(42)).unwrap();
        assert_eq!(frozen(), "1");
    }

    /// The kernel tells an empty group to be frozen.
    #[test]
    fn a_server_that_is_not_in_the_group_is_not_held() {
        let directory = tempfile::tempdir().unwrap();
        let group = directory.path();
        write(group.join("cgroup.events"), "populated 0\nfrozen 1\n").unwrap();
        for (processes, server, expected) in
            [("", Some(42), "not in its control group"), ("421\n", Some(42), "process 42"), ("", None, "is stopped")]
        {
            write(group.join("cgroup.procs"), processes).unwrap();
            let error = hold(group, Duration::ZERO, || server).unwrap_err();
            assert!(error.message.contains(expected), "{error}");
            assert_eq!(read_to_string(group.join("cgroup.freeze")).unwrap(), "0");
        }
    }
}
