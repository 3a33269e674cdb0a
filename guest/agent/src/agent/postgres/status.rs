//! What the server does, told by the files it keeps: it need not answer for that.

use super::{DATA, LOG, programs};
use crate::protocol::{PostgresState, PostgresStatus};
use std::fs::{read_link, read_to_string};
use std::path::Path;

/// The line of `postmaster.pid` that tells the state (PostgreSQL: src/include/utils/pidfile.h,
/// LOCK_FILE_LINE_PM_STATUS).
const STATE_LINE: usize = 8;

/// The server's state.
pub(crate) fn status() -> PostgresStatus {
    let (state, pid) = examine(Path::new(DATA), runs_postgres);
    PostgresStatus {
        state,
        major: programs().map(|programs| programs.major),
        pid,
        data_directory: DATA.to_string(),
        log: LOG.to_string(),
    }
}

/// A dead server's file may name a process that is another program's now.
fn runs_postgres(pid: u32) -> bool {
    read_link(format!("/proc/{pid}/exe")).is_ok_and(|program| program.to_string_lossy().contains("/bin/postgres"))
}

fn examine(data: &Path, runs: impl Fn(u32) -> bool) -> (PostgresState, Option<u32>) {
    if !data.join("PG_VERSION").exists() {
        return (PostgresState::Absent, None);
    }
    let file = read_to_string(data.join("postmaster.pid")).unwrap_or_default();
    let mut lines = file.lines();
    // A stand-alone back end writes its process id with a minus.
    let Some(pid) = lines.next().and_then(|line| line.trim().parse::<u32>().ok()).filter(|&pid| runs(pid)) else {
        return (PostgresState::Stopped, None);
    };
    let state = match lines.nth(STATE_LINE - 2).map(str::trim) {
        Some("ready") if data.join("standby.signal").exists() => PostgresState::Standby,
        Some("ready") => PostgresState::Primary,
        Some("stopping") => PostgresState::Stopping,
        // "standby" is one that does not take connections; an unfinished file has no such line yet.
        _ => PostgresState::Starting,
    };
    (state, Some(pid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::write;

    #[test]
    fn the_state_is_what_the_files_and_the_process_say() {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path();
        let state = |alive| examine(data, |_| alive).0;
        assert_eq!(state(true), PostgresState::Absent);
        write(data.join("PG_VERSION"), "17\n").unwrap();
        assert_eq!(state(true), PostgresState::Stopped);
        let file = |state: &str| format!("42\n{}\n0\n5432\n/run\n*\n 1 2\n{state}\n", data.display());
        for (text, expected) in [
            (file("ready   "), PostgresState::Primary),
            (file("standby "), PostgresState::Starting),
            (file("starting"), PostgresState::Starting),
            (file("stopping"), PostgresState::Stopping),
            ("42\n".to_string(), PostgresState::Starting),
            ("-42\n".to_string(), PostgresState::Stopped),
            (String::new(), PostgresState::Stopped),
        ] {
            write(data.join("postmaster.pid"), text).unwrap();
            assert_eq!(state(true), expected);
            assert_eq!(state(false), PostgresState::Stopped);
        }
        write(data.join("postmaster.pid"), file("ready   ")).unwrap();
        write(data.join("standby.signal"), "").unwrap();
        assert_eq!(examine(data, |pid| pid == 42), (PostgresState::Standby, Some(42)));
    }
}
