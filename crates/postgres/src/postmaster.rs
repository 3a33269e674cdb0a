//! The postmaster as a process: its signals, its lock file, whether it lives.

use std::fs;
use std::io;
use std::path::Path;

use rustix::process::Signal;

use crate::process::stat_of;
use crate::processes::ServerProcesses;
use crate::{Directory, ServiceUser};

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
    /// Understands the file; none when its first line is no process id. A file that is half written is one of a server
    /// that starts.
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

    /// Reads the file of a postmaster that lives in this data directory; none when it is gone, also when its file is
    /// left.
    pub(crate) fn of_live_server(data_directory: &Path) -> Option<PidFile> {
        let server = ServerProcesses::of(data_directory).ok()?;
        let file = PidFile::parse(&server.directory().read_to_string(Path::new("postmaster.pid")).ok()?)?;
        // The number may belong to somebody else by now.
        server.has(file.process_id).then_some(file)
    }
}

/// The TCP port of the server that lives in this data directory, also in its Unix socket's name; none when none lives
/// there, or it has just begun.
pub fn port_of(data_directory: &Path) -> Option<u16> {
    PidFile::of_live_server(data_directory)?.port
}

/// The postmaster of this data directory that has been begun a moment ago: it has not come to write its lock file, from
/// which the others are known. One that ends, and has removed the file already, looks alike.
pub(crate) fn begun_in(data_directory: &Path, user: &ServiceUser) -> Option<u32> {
    // Its children's command lines say what they do.
    let is_postmaster = |process_id: &u32| {
        let command_line =
            fs::read(Path::new("/proc").join(process_id.to_string()).join("cmdline")).unwrap_or_default();
        command_line.split(|byte| *byte == 0).nth(1) == Some(DIRECTORY_OPTION.as_bytes())
    };
    ServerProcesses::of_user(data_directory, user).ok()?.all().into_iter().find(is_postmaster)
}

/// Whether this process is still there and is one no more: it ends, or has ended and nobody has reaped it.
fn is_dying(process_id: u32) -> bool {
    let Some(fields) = stat_of(process_id) else { return false };
    let flags = fields.split(' ').nth(6).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or(0);
    fields.starts_with('Z') || flags & EXITING_FLAG != 0
}

/// Removes a lock file whose process is a zombie, or about to be one: PostgreSQL takes it for alive and does not start.
/// That of a process which is quite gone it removes itself. Who must reap an orphan may do so late, or never: the first
/// process of a container often does not.
///
/// Source: PostgreSQL, `CreateLockFile`, which asks kill(2) whether the process is there.
pub(crate) fn remove_dead_lock(path: &Path, user: &ServiceUser) -> io::Result<()> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().map(Path::new)) else { return Ok(()) };
    let read = || -> io::Result<(Directory, String)> {
        let directory = Directory::open_for(directory, user)?;
        let text = directory.read_to_string(name)?;
        Ok((directory, text))
    };
    let (directory, text) = match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read?,
    };
    match PidFile::parse(&text) {
        Some(file) if is_dying(file.process_id) => directory.remove_file(name),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::lives;
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
        child.kill().expect("killed");
        // Dead and not reaped: WNOWAIT leaves it a zombie.
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        let process = Pid::from_child(&child);
        waitid(WaitId::Pid(process), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).expect("it died");
        assert!(!lives(child.id()) && is_dying(child.id()));
        child.wait().expect("reaped");
        assert!(!lives(child.id()) && !is_dying(child.id()));
        assert!(lives(std::process::id()) && !is_dying(std::process::id()));
    }

    /// Spec: C4
    #[test]
    fn a_dead_lock_is_removed_in_its_own_directory_and_read_with_a_bound() {
        let mut child = std::process::Command::new("true").spawn().expect("started");
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        waitid(WaitId::Pid(Pid::from_child(&child)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).expect("it died");
        let user = ServiceUser::resolve(None).expect("an account");
        let directory = tempfile::tempdir().expect("a directory");
        let place = |name: &str| directory.path().join(name);
        fs::create_dir(place("data")).expect("made");
        user.own(&place("data")).expect("given");
        let lock = place("data").join("postmaster.pid");
        remove_dead_lock(&lock, &user).expect("there is none");
        let write = |number: u32| {
            fs::write(&lock, format!("{number}\n")).expect("written");
            user.own(&lock).expect("given");
        };
        write(std::process::id());
        remove_dead_lock(&lock, &user).expect("of who lives");
        assert!(lock.exists());
        write(child.id());
        // Nobody lets root remove it elsewhere.
        std::os::unix::fs::symlink(&lock, place("data").join("link")).expect("linked");
        remove_dead_lock(&place("data").join("link"), &user).expect_err("a link");
        assert!(lock.exists());
        remove_dead_lock(&lock, &user).expect("of a zombie");
        assert!(!lock.exists());
        child.wait().expect("reaped");
        write(child.id());
        fs::File::options().write(true).open(&lock).expect("open").set_len(1 << 30).expect("longer");
        remove_dead_lock(&lock, &user).expect_err("longer than any");
    }

    #[test]
    fn a_process_of_another_program_is_no_server() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("postmaster.pid"), format!("{}\n", std::process::id())).expect("written");
        assert_eq!(PidFile::of_live_server(directory.path()), None);
        assert_eq!(crate::processes_of(directory.path()), Vec::<u32>::new());
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = PidFile::parse(&text);
        }
    }
}
