//! The postmaster as a process: its signals, its lock file, whether it lives, its children.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

use crate::beneath::{Directory, open_plain};

/// A process that ends. Source: Linux, `include/linux/sched.h`, PF_EXITING.
const EXITING_FLAG: u64 = 4;

/// What a postmaster is told its data directory with: it is begun with this first.
pub(crate) const DIRECTORY_OPTION: &str = "-D";

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
        let read =
            Directory::open(data_directory).and_then(|opened| opened.read_to_string(Path::new("postmaster.pid")));
        let file = PidFile::parse(&read.ok()?)?;
        // The number may belong to somebody else by now.
        works_in(file.process_id, data_directory).then_some(file)
    }
}

/// The TCP port of the server that lives in this data directory, also in its Unix socket's name; none when none lives
/// there, or it has just begun.
pub fn port_of(data_directory: &Path) -> Option<u16> {
    PidFile::of_live_server(data_directory)?.port
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

/// The postmaster of this data directory that has been begun a moment ago: it has not come to write its lock file, from which the others
/// are known. One that ends, and has removed the file already, looks alike.
pub(crate) fn begun_in(data_directory: &Path) -> Option<u32> {
    // Its children's command lines say what they do.
    let is_postmaster = |process_id: &u32| {
        let command_line =
            fs::read(Path::new("/proc").join(process_id.to_string()).join("cmdline")).unwrap_or_default();
        command_line.split(|byte| *byte == 0).nth(1) == Some(DIRECTORY_OPTION.as_bytes())
    };
    processes_of(data_directory).into_iter().find(is_postmaster)
}

/// Whether this process still executes; a zombie does not. A dying process has left its directory a moment before it has ended.
pub(crate) fn lives(process_id: u32) -> bool {
    let state = stat_of(process_id).and_then(|fields| fields.chars().next());
    !matches!(state, None | Some('Z' | 'X' | 'x'))
}

/// Whether this process is still there and is one no more: it ends, or has ended and nobody has reaped it.
fn is_dying(process_id: u32) -> bool {
    let Some(fields) = stat_of(process_id) else { return false };
    let flags = fields.split(' ').nth(6).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or(0);
    fields.starts_with('Z') || flags & EXITING_FLAG != 0
}

/// What the kernel says of a process, its state first; none when there is no such process.
fn stat_of(process_id: u32) -> Option<String> {
    let text = fs::read_to_string(Path::new("/proc").join(process_id.to_string()).join("stat")).ok()?;
    // proc_pid_stat(5): this follows the program's name, which is in parentheses and may hold some itself.
    text.rsplit_once(')').map(|(_, rest)| rest.trim_start().to_owned())
}

/// Removes a lock file whose process is a zombie, or about to be one: PostgreSQL takes it for alive and does not start. That of a process
/// which is quite gone it removes itself. Who must reap an orphan may do so late, or never: the first process of a container often does not.
///
/// Source: PostgreSQL, `CreateLockFile`, which asks kill(2) whether the process is there.
pub(crate) fn remove_dead_lock(path: &Path) -> io::Result<()> {
    let text = match open_plain(path).and_then(io::read_to_string) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read?,
    };
    match PidFile::parse(&text) {
        Some(file) if is_dying(file.process_id) => fs::remove_file(path),
        _ => Ok(()),
    }
}

/// All processes of the server of this data directory, by their numbers.
pub fn processes_of(data_directory: &Path) -> Vec<u32> {
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
        assert!(!lives(child.id()) && is_dying(child.id()));
        child.wait().expect("reaped");
        assert!(!lives(child.id()) && !is_dying(child.id()));
        assert!(lives(std::process::id()) && !is_dying(std::process::id()));
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
