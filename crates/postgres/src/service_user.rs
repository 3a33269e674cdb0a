//! The account that a server and its tools run as: PostgreSQL refuses to run as root.
//!
//! This is the only place that knows of it: commands are made here, and files and directories of a server beside
//! (`service_files`).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::unistd::User;

use crate::PostgresError;

/// The account that Debian's and Red Hat's packages make.
const DEFAULT_ACCOUNT: &str = "postgres";

/// Environment of this process that programs of a server get to see; all else, above all `PG*`, would change what they
/// do.
const KEPT_VARIABLES: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "TZ", "HOME"];

/// An account, and whether this process must change to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceUser {
    name: String,
    user_id: u32,
    group_id: u32,
    /// This process is root and starts programs as another account.
    switches: bool,
}

impl ServiceUser {
    /// As root: the account of this name or number, or `postgres`. Otherwise oneself, whatever `name` is.
    ///
    /// # Errors
    /// [`PostgresError::UnknownServiceUser`] when the account does not exist or is root itself.
    pub fn resolve(name: Option<&str>) -> Result<ServiceUser, PostgresError> {
        let name = name.unwrap_or(DEFAULT_ACCOUNT);
        let found = || match (User::from_name(name), name.parse::<u32>()) {
            (Ok(None), Ok(number)) => User::from_uid(number.into()),
            (found, _) => found,
        };
        oneself_unless_root().map_or_else(|| switch_to(name, found()), Ok)
    }

    /// As root: the account that owns `path`. Otherwise oneself, whoever that is.
    ///
    /// # Errors
    /// As [`ServiceUser::resolve`]; [`PostgresError::File`] when nobody can look at `path`.
    pub fn owner_of(path: &Path) -> Result<ServiceUser, PostgresError> {
        let owner = fs::metadata(path).map_err(PostgresError::file("look at", path))?.uid();
        oneself_unless_root().map_or_else(|| switch_to(&owner.to_string(), User::from_uid(owner.into())), Ok)
    }

    /// The account's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The account's user id.
    pub fn user_id(&self) -> u32 {
        self.user_id
    }

    /// The account's group id.
    pub fn group_id(&self) -> u32 {
        self.group_id
    }

    /// A command that runs as this account, in `/`, with a clean environment and English messages, without standard
    /// input, in a session of its own, and with nothing open but its standard output and error: what this process reads
    /// and has open, and its terminal, on which others could type (ioctl_tty(2), TIOCSTI), is not for this account.
    ///
    /// The standard library drops the supplementary groups when it changes the user. From then until the program begins
    /// nobody of that account can look into the process (PR_SET_DUMPABLE, prctl(2)), which still has what this one has
    /// open.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(program);
        command.stdin(Stdio::null());
        // SAFETY: between fork and exec only system calls are made that are async-signal-safe; no memory is allocated.
        unsafe { command.pre_exec(be_alone) };
        command.current_dir("/").env_clear().env("LC_ALL", "C");
        command.envs(KEPT_VARIABLES.iter().filter_map(|name| Some((*name, std::env::var_os(name)?))));
        if self.switches {
            command.uid(self.user_id).gid(self.group_id);
            // The home of root is not for this account: libpq would look for certificates there.
            command.env_remove("HOME");
        }
        command
    }

    /// Checks that this account can pass every directory above `path` and enter `path` itself, if that is a directory.
    ///
    /// # Errors
    /// [`PostgresError::NotReachable`] names the directory that stops it.
    pub fn check_reachable(&self, path: &Path) -> Result<(), PostgresError> {
        let absolute = std::path::absolute(path).map_err(PostgresError::file("resolve", path))?;
        let mut on_the_way: Vec<&Path> = absolute.ancestors().collect();
        on_the_way.reverse();
        for directory in on_the_way {
            let Ok(metadata) = fs::metadata(directory) else { break };
            if metadata.is_dir() && !self.mode_allows_search(&metadata) && !self.can_search(directory) {
                return Err(PostgresError::NotReachable {
                    path: absolute.clone(),
                    blocked_by: directory.to_owned(),
                    user: self.name.clone(),
                });
            }
        }
        Ok(())
    }

    /// Gives an open file or directory to this account.
    ///
    /// # Errors
    /// [`PostgresError::File`].
    pub fn own_file(&self, file: &File, path: &Path) -> Result<(), PostgresError> {
        if self.switches {
            fchown(file, Some(self.user_id), Some(self.group_id))
                .map_err(PostgresError::file("change the owner of", path))?;
        }
        Ok(())
    }

    /// Gives a file or directory to this account; a symbolic link is not followed. For paths that this account cannot
    /// change.
    ///
    /// # Errors
    /// [`PostgresError::File`].
    pub fn own(&self, path: &Path) -> Result<(), PostgresError> {
        if self.switches {
            std::os::unix::fs::lchown(path, Some(self.user_id), Some(self.group_id))
                .map_err(PostgresError::file("change the owner of", path))?;
        }
        Ok(())
    }

    fn mode_allows_search(&self, metadata: &fs::Metadata) -> bool {
        let bit = match () {
            () if metadata.uid() == self.user_id => 0o100,
            () if metadata.gid() == self.group_id => 0o010,
            () => 0o001,
        };
        metadata.mode() & bit != 0
    }

    /// Asks the kernel, as that account: an access list may allow what the mode does not say.
    fn can_search(&self, directory: &Path) -> bool {
        let mut command = self.command("test");
        let status = command.arg("-x").arg(directory).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    }
}

/// Between fork and exec: leaves the session, and lets nothing be inherited but what is handed down after this. A shell
/// has what it starts in the background ignore two signals, and a postmaster would until it has its own handlers.
fn be_alone() -> std::io::Result<()> {
    rustix::process::setsid()?;
    for signal in [libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: this process has one thread, and no handler is its own.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let after_standard_error: libc::c_uint = 3;
    // What is ours is closed at exec anyway; who started this process may have been careless. Linux before 5.11 cannot.
    // SAFETY: takes three numbers; nothing is closed before the program begins.
    unsafe {
        libc::syscall(libc::SYS_close_range, after_standard_error, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
    }
    Ok(())
}

/// Makes a rename or a new name in the directory above `path` durable.
pub(crate) fn sync_directory_of(path: &Path) -> Result<(), PostgresError> {
    let parent = path.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
    File::open(&parent).and_then(|directory| directory.sync_all()).map_err(PostgresError::file("sync", parent))
}

/// The account of this process, which another one cannot be changed to.
fn oneself_unless_root() -> Option<ServiceUser> {
    let own_id = rustix::process::geteuid();
    let own = || User::from_uid(own_id.as_raw().into()).ok().flatten();
    (!own_id.is_root()).then(|| ServiceUser {
        name: own().map_or_else(|| own_id.as_raw().to_string(), |own| own.name),
        user_id: own_id.as_raw(),
        group_id: rustix::process::getegid().as_raw(),
        switches: false,
    })
}

/// An account that this process, as root, changes to, as the system's databases of accounts tell it (nsswitch.conf(5)).
fn switch_to(name: &str, found: nix::Result<Option<User>>) -> Result<ServiceUser, PostgresError> {
    let unknown = |reason: String| PostgresError::UnknownServiceUser { name: name.to_owned(), reason };
    let account = found.map_err(|error| unknown(error.to_string()))?;
    let account = account.ok_or_else(|| unknown("there is no such account".to_owned()))?;
    if account.uid.is_root() {
        return Err(unknown("it is root".to_owned()));
    }
    Ok(ServiceUser {
        name: account.name,
        user_id: account.uid.as_raw(),
        group_id: account.gid.as_raw(),
        switches: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn oneself() -> ServiceUser {
        ServiceUser::resolve(None).expect("the account of servers exists")
    }

    #[test]
    fn a_server_never_runs_as_root() {
        assert_ne!(oneself().user_id(), 0);
        let output = oneself().command("id").arg("-u").output().expect("id runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), oneself().user_id().to_string());
    }

    /// What runs as PostgreSQL's account, a server or a tool, has neither terminal nor standard input nor any open file
    /// of who starts it but what it is given, and shows nobody of the account what is open before its program begins.
    ///
    /// Spec: C4
    #[test]
    fn k21_what_runs_as_the_account_has_nothing_of_ours() {
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        // A copy that is not closed at exec, as whoever started this process may have left one.
        let left = rustix::io::dup(&reader).expect("a copy");
        let number = std::os::fd::AsRawFd::as_raw_fd(&left);
        let script = format!(
            "read -r own name state parent group session terminal rest < /proc/self/stat
            echo $((own == session)) $terminal; readlink /proc/$$/fd/0; test -e /proc/$$/fd/{number} || echo none"
        );
        let mut command = oneself().command("sh");
        command.args(["-c", &script]).stdout(Stdio::piped());
        let output = command.spawn().and_then(|child| child.wait_with_output()).expect("sh runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1 0\n/dev/null\nnone\n");
    }

    /// Of a process in the background of a shell, which ignores signals that one sends to a terminal.
    ///
    /// Spec: A3
    #[test]
    fn what_runs_as_the_account_ignores_no_signal_that_its_starter_ignores() {
        // SAFETY: no handler is given, and each test is a process of its own.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
        let mut command = oneself().command("grep");
        let output = command.args(["SigIgn", "/proc/self/status"]).output().expect("grep runs");
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        let mask = String::from_utf8_lossy(&output.stdout).replace("SigIgn:", "");
        let ignored = u64::from_str_radix(mask.trim(), 16).expect("a mask");
        assert_eq!(ignored & (1 << (libc::SIGINT - 1)), 0, "{ignored:x}");
    }

    /// Spec: C4
    #[test]
    fn k21_nobody_of_the_account_looks_into_a_process_before_its_program_begins() {
        use std::io::{Read, Write};
        use std::os::unix::process::CommandExt;
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "k21_nobody_of_the_account_looks_into_a_process_before_its_program_begins",
                "only root has servers of another account",
            );
            return;
        }
        let (mut told, mut tell) = std::io::pipe().expect("a pipe");
        let (mut wait, mut go_on) = std::io::pipe().expect("a pipe");
        let mut command = oneself().command("sleep");
        command.arg("60");
        let before = move || {
            tell.write_all(&rustix::process::getpid().as_raw_nonzero().get().to_ne_bytes())?;
            wait.read_exact(&mut [0])
        };
        // SAFETY: pipes are written and read, which is async-signal-safe; no memory is allocated.
        unsafe { command.pre_exec(before) };
        let is_seen = |process: i32| {
            let listed = oneself().command("ls").arg(format!("/proc/{process}/fd")).output().expect("ls runs");
            listed.status.success()
        };
        std::thread::scope(|scope| {
            let started = scope.spawn(move || command.spawn());
            let mut number = [0; 4];
            told.read_exact(&mut number).expect("its number");
            let process = i32::from_ne_bytes(number);
            let before = is_seen(process);
            go_on.write_all(&[0]).expect("it goes on");
            let mut child = started.join().expect("no panic").expect("started");
            let after = is_seen(process);
            child.kill().and_then(|()| child.wait()).expect("killed");
            assert_eq!((before, after), (false, true));
        });
    }

    #[test]
    fn unknown_accounts_are_named() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip("unknown_accounts_are_named", "only root chooses the servers' account");
            return;
        }
        for name in ["no-such-account", "root"] {
            let error = ServiceUser::resolve(Some(name)).expect_err("refused").to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
