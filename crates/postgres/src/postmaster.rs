//! The postmaster as a process: its signals, its lock file, whether it lives, its children.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// How to stop a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Wait until all clients have left (SIGTERM).
    Smart,
    /// Disconnect the clients, roll back what is open, shut down cleanly (SIGINT).
    Fast,
    /// Do not shut down cleanly; the next start recovers (SIGQUIT).
    Immediate,
}

impl StopMode {
    /// Source: PostgreSQL documentation, "Shutting Down the Server".
    pub(crate) fn signal(self) -> Signal {
        match self {
            StopMode::Smart => Signal::TERM,
            StopMode::Fast => Signal::INT,
            StopMode::Immediate => Signal::QUIT,
        }
    }
}

/// What `postmaster.pid` says.
///
/// Source of the layout: PostgreSQL, `src/include/utils/pidfile.h`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PidFile {
    /// The postmaster.
    pub process_id: u32,
    /// Its TCP port; none while it has just begun.
    pub port: Option<u16>,
    /// How far it is.
    pub status: Status,
}

/// The last line of `postmaster.pid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// Starting, recovering or not yet consistent.
    Starting,
    /// Shutting down.
    Stopping,
    /// Accepts connections.
    Ready,
    /// In recovery and does not accept connections (`hot_standby` is off).
    Standby,
}

impl PidFile {
    /// Understands the file; none when its first line is no process id. A file that is half written is one of a server that starts.
    fn parse(text: &str) -> Option<PidFile> {
        let mut lines = text.lines();
        let process_id = lines.next()?.trim().parse().ok().filter(|id| (1..=i32::MAX.unsigned_abs()).contains(id))?;
        let port = lines.nth(2).and_then(|line| line.trim().parse().ok());
        let status = match lines.nth(3).map(str::trim) {
            Some("ready") => Status::Ready,
            Some("standby") => Status::Standby,
            Some("stopping") => Status::Stopping,
            _ => Status::Starting,
        };
        Some(PidFile { process_id, port, status })
    }

    /// Reads the file of a postmaster that lives in this data directory; none when it is gone, also when its file is left.
    pub(crate) fn of_live_server(data_directory: &Path) -> Option<PidFile> {
        let file = PidFile::parse(&fs::read_to_string(data_directory.join("postmaster.pid")).ok()?)?;
        // The number may belong to somebody else by now.
        works_in(file.process_id, data_directory).then_some(file)
    }
}

/// Whether this is a process of the server of this data directory: all of them work in it. A zombie works nowhere.
fn works_in(process_id: u32, data_directory: &Path) -> bool {
    let process = Path::new("/proc").join(process_id.to_string());
    let same_directory = match (fs::metadata(process.join("cwd")), fs::metadata(data_directory)) {
        (Ok(found), Ok(wanted)) => (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()),
        _ => false,
    };
    // Somebody's shell may stand there, too. The name may have " (deleted)" behind it, after an upgrade.
    same_directory
        && fs::read_link(process.join("exe"))
            .is_ok_and(|program| program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("postgres")))
}

/// Whether this process still executes; a zombie does not. A dying process has left its directory a moment before it has ended.
pub(crate) fn lives(process_id: u32) -> bool {
    let Ok(text) = fs::read_to_string(Path::new("/proc").join(process_id.to_string()).join("stat")) else {
        return false;
    };
    // proc_pid_stat(5): the state follows the program's name, which is in parentheses and may hold some itself.
    let state = text.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z' | 'X' | 'x'))
}

/// All processes of the server of this data directory.
pub(crate) fn processes_of(data_directory: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers.filter(|process_id| works_in(*process_id, data_directory)).collect()
}

/// Sends a signal; to a process that is gone meanwhile it does not matter.
pub(crate) fn send(process_id: u32, signal: Signal) {
    if let Some(process) = i32::try_from(process_id).ok().and_then(Pid::from_raw)
        && let Err(error) = kill_process(process, signal)
    {
        tracing::debug!(process_id, ?signal, %error, "signal not delivered");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn files_of_all_ages_are_understood() {
        let whole = "4711\n/srv/data\n1700000000\n5433\n/srv/run\n127.0.0.1\n  5433001    32768\nready   \n";
        let expected = PidFile { process_id: 4711, port: Some(5433), status: Status::Ready };
        assert_eq!(PidFile::parse(whole), Some(expected));
        let young = PidFile { process_id: 4711, port: None, status: Status::Starting };
        assert_eq!(PidFile::parse("4711\n/srv/data\n"), Some(young));
        for none in ["", "\n", "0\n", "-1\n", "x\n", "4294967295\n"] {
            assert_eq!(PidFile::parse(none), None, "{none:?}");
        }
    }

    #[test]
    fn a_zombie_does_not_live() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleeps");
        assert!(lives(child.id()));
        send(child.id(), Signal::KILL);
        // Dead and not reaped: WNOWAIT leaves it a zombie.
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        let process = Pid::from_child(&child);
        waitid(WaitId::Pid(process), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).expect("it died");
        assert!(!lives(child.id()));
        child.wait().expect("reaped");
        assert!(!lives(child.id()));
    }

    #[test]
    fn a_process_of_another_program_is_no_server() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("postmaster.pid"), format!("{}\n", std::process::id())).expect("written");
        assert_eq!(PidFile::of_live_server(directory.path()), None);
        assert_eq!(processes_of(directory.path()), Vec::<u32>::new());
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = PidFile::parse(&text);
        }
    }
}
