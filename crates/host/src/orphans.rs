//! Ending what a killed daemon had begun: tools of PostgreSQL that still write into an incomplete server.
//!
//! They are found by what they work on, since nobody is left who knows their numbers.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use onecopy_postgres::process_ids;
use rustix::process::{Pid, Signal, kill_process};

use crate::HostError;

/// Programs that make a server, as the kernel names them. initdb starts its servers through a shell.
const PROGRAMS: [&str; 4] = ["initdb", "postgres", "pg_basebackup", "sh"];

/// How long a killed process may take to go away.
const GONE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Kills every tool of the account `user_id` that works below `home` and returns when none is left.
///
/// # Errors
/// [`HostError::OrphanStays`] when one does not go away.
pub async fn end(home: &Path, user_id: u32) -> Result<(), HostError> {
    let mut waited = Duration::ZERO;
    loop {
        let orphans = find(home, user_id);
        let Some(first) = orphans.first() else { return Ok(()) };
        if waited >= GONE_TIMEOUT {
            return Err(HostError::OrphanStays { process_id: first.as_raw_nonzero().get(), home: home.to_owned() });
        }
        for orphan in orphans {
            tracing::warn!(process = orphan.as_raw_nonzero(), home = %home.display(), "ending what was left behind");
            // One that has ended by itself is what is wanted.
            let _ = kill_process(orphan, Signal::KILL);
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
        waited += LOOK_INTERVAL;
    }
}

fn find(home: &Path, user_id: u32) -> Vec<Pid> {
    let processes = process_ids().filter_map(|number| Pid::from_raw(number.cast_signed()));
    processes.filter(|process| works_below(*process, home, user_id).unwrap_or(false)).collect()
}

/// Whether a process is such a tool; none when it has ended meanwhile. Source: proc(5).
fn works_below(process: Pid, home: &Path, user_id: u32) -> Option<bool> {
    let directory = Path::new("/proc").join(process.as_raw_nonzero().to_string());
    if fs::metadata(&directory).ok()?.uid() != user_id {
        return Some(false);
    }
    let name = fs::read_to_string(directory.join("comm")).ok()?;
    if !PROGRAMS.contains(&name.trim_end()) {
        return Some(false);
    }
    // A dead one whose parent has not looked yet has neither.
    let arguments = fs::read(directory.join("cmdline")).ok()?;
    let named = String::from_utf8_lossy(&arguments).split('\0').any(|argument| Path::new(argument).starts_with(home));
    let stands_in = fs::read_link(directory.join("cwd")).is_ok_and(|working| working.starts_with(home));
    Some(named || stands_in || is_told_of(&directory, home))
}

/// Whether `PGDATA` names a directory below `home`: what initdb has only just started knows its directory by nothing
/// else, and goes on into it after initdb's death. Source: setup_pgdata() in initdb.c.
fn is_told_of(process: &Path, home: &Path) -> bool {
    let environment = fs::read(process.join("environ")).unwrap_or_default();
    let mut values = environment.split(|byte| *byte == 0).filter_map(|variable| variable.strip_prefix(b"PGDATA="));
    values.any(|value| Path::new(OsStr::from_bytes(value)).starts_with(home))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    /// A process with this name in `comm`, this argument and this `PGDATA`, that would live on.
    fn sleeper(name: &str, argument: &Path, data: &Path, directory: &Path) -> std::process::Child {
        let program = directory.join(name);
        if !program.exists() {
            fs::copy("/bin/sleep", &program).unwrap();
        }
        let mut command = Command::new(&program);
        // Its own argument is what it is found by; `sleep` sees only the seconds.
        let child = command.arg0(argument).arg("600").env("PGDATA", data).stdin(Stdio::null()).spawn().unwrap();
        // The kernel lets a parent go on a moment before the child's command line can be read.
        while !fs::read(format!("/proc/{}/cmdline", child.id())).unwrap().ends_with(b"\x00600\0") {
            std::thread::sleep(Duration::from_millis(1));
        }
        child
    }

    #[tokio::test]
    async fn only_tools_that_work_there_are_ended() {
        let directory = tempfile::tempdir().unwrap();
        let home = directory.path().join("leader");
        let user_id = rustix::process::geteuid().as_raw();
        let (data, elsewhere) = (home.join("data.new"), directory.path().join("leader-2/data"));
        let start = |name, argument, pgdata| sleeper(name, argument, pgdata, directory.path());
        let mut cases = [
            (start("initdb", &data, &elsewhere), true),
            (start("pg_basebackup", &data, &elsewhere), true),
            (start("postgres", Path::new("--boot"), &data), true),
            (start("sh", Path::new("-c"), &data), true),
            (start("sh", Path::new("-c"), &elsewhere), false),
            (start("postgres", &elsewhere, &elsewhere), false),
            (start("vi", &home.join("data/postgresql.conf"), &elsewhere), false),
        ];
        end(&home, user_id + 1).await.unwrap();
        let all_stayed = cases.iter_mut().all(|(child, _)| child.try_wait().unwrap().is_none());
        end(&home, user_id).await.unwrap();
        let ended: Vec<bool> = cases.iter_mut().map(|(child, _)| child.try_wait().unwrap().is_some()).collect();
        for (child, _) in &mut cases {
            let _ = child.kill();
            child.wait().unwrap();
        }
        assert!(all_stayed, "another account's tools are not ours to end");
        assert_eq!(ended, cases.map(|(_, expected)| expected));
    }
}
