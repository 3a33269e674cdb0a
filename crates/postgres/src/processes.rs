//! The processes of a server: those of its account that work in its data directory.
//!
//! Where a process works and what its program is called, any account chooses for its own processes; and what lies at a
//! path, whoever may write the directory above it. So root takes for a server's only what belongs to the same account
//! as the directory, which is opened once, and a signal goes to the very process that was looked at (pidfd_open(2),
//! Linux 5.3): its number may be another's the next moment.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Child;

use rustix::fs::fstat;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::ServiceUser;
use crate::beneath::Directory;
use crate::process::{process_ids, runs_as};

/// What the program of a server is called.
const PROGRAMS: [&[u8]; 2] = [b"postgres", b"postmaster"];

/// The kernel says so of a program that an upgrade has replaced. Source: proc_pid_exe(5).
const DELETED: &[u8] = b" (deleted)";

/// The processes of the server of one data directory, which is held open.
#[derive(Debug)]
pub struct ServerProcesses {
    directory: Directory,
    /// Device and inode of the directory.
    place: (u64, u64),
    /// Whose it is.
    user_id: u32,
}

impl ServerProcesses {
    /// Those of the account that this data directory belongs to.
    ///
    /// # Errors
    /// Those of [`Directory::open`].
    pub fn of(data_directory: &Path) -> io::Result<ServerProcesses> {
        let directory = Directory::open(data_directory)?;
        let found = fstat(&directory)?;
        Ok(ServerProcesses { directory, place: (found.st_dev, found.st_ino), user_id: found.st_uid })
    }

    /// Those of this account: the directory must be its own. For whoever ends processes.
    ///
    /// # Errors
    /// Those of [`Directory::open`]; a directory of another account.
    pub fn of_user(data_directory: &Path, user: &ServiceUser) -> io::Result<ServerProcesses> {
        let processes = ServerProcesses::of(data_directory)?;
        if processes.user_id == user.user_id() {
            return Ok(processes);
        }
        let reason = format!(
            "it belongs to the account number {}, not to {}: its server is left alone; stop it by hand",
            processes.user_id,
            user.name()
        );
        Err(io::Error::other(reason))
    }

    /// The open data directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The account of the directory and of all the processes.
    pub fn user_id(&self) -> u32 {
        self.user_id
    }

    /// Whether this is one of them: all of them work in the data directory. A zombie works nowhere.
    pub fn has(&self, process_id: u32) -> bool {
        let process = Path::new("/proc").join(process_id.to_string());
        // Somebody's shell may stand there, too.
        fs::metadata(process.join("cwd")).is_ok_and(|found| (found.dev(), found.ino()) == self.place)
            && runs_server(&process)
            && runs_as(process_id, self.user_id)
    }

    /// All of them, by their numbers.
    pub fn all(&self) -> Vec<u32> {
        process_ids().filter(|process_id| self.has(*process_id)).collect()
    }

    /// Sends a signal to a process if it is one of them; to one that is gone meanwhile it does not matter.
    pub(crate) fn signal(&self, process_id: u32, signal: Signal) {
        let Some(process) = i32::try_from(process_id).ok().and_then(Pid::from_raw) else { return };
        // Opened first: what is looked at is then this one, or this one has ended and gets nothing.
        let opened = match pidfd_open(process, PidfdFlags::empty()) {
            Ok(opened) if self.has(process_id) => opened,
            Ok(_) => return tracing::debug!(process_id, ?signal, "no process of this server: no signal sent"),
            Err(error) => return tracing::debug!(process_id, ?signal, %error, "signal not delivered"),
        };
        if let Err(error) = pidfd_send_signal(&opened, signal) {
            tracing::debug!(process_id, ?signal, %error, "signal not delivered");
        }
    }

    /// Kills all of them (SIGKILL) and does not wait; gives back those that were there.
    pub fn kill_all(&self) -> Vec<u32> {
        let found = self.all();
        found.iter().for_each(|process_id| self.signal(*process_id, Signal::KILL));
        found
    }
}

/// All processes of the server of this data directory, by their numbers; none where it cannot be opened.
pub fn processes_of(data_directory: &Path) -> Vec<u32> {
    ServerProcesses::of(data_directory).map(|processes| processes.all()).unwrap_or_default()
}

/// Kills all processes of the server of this data directory of this account, and does not wait; gives back those that
/// were there.
///
/// # Errors
/// Those of [`ServerProcesses::of_user`]; a directory that is not there has none.
pub fn kill_processes_of(data_directory: &Path, user: &ServiceUser) -> io::Result<Vec<u32>> {
    match ServerProcesses::of_user(data_directory, user) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        processes => Ok(processes?.kill_all()),
    }
}

/// Sends a signal to our own child: nobody else gets its number before we have asked how it ended.
pub(crate) fn signal_child(child: &Child, signal: Signal) {
    if let Err(error) = kill_process(Pid::from_child(child), signal) {
        tracing::debug!(process_id = child.id(), ?signal, %error, "signal not delivered");
    }
}

/// Whether it runs PostgreSQL's program.
fn runs_server(process: &Path) -> bool {
    let program = fs::read_link(process.join("exe")).unwrap_or_default();
    let name = program.file_name().unwrap_or_default().as_bytes();
    PROGRAMS.contains(&name.strip_suffix(DELETED).unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;
    use std::process::Command;
    use std::time::Duration;

    /// Debian's and Red Hat's `nobody`: neither root nor the account of servers.
    const ANOTHER_ACCOUNT: u32 = 65534;

    /// A directory that everybody may search, and in it a data directory of this account.
    fn harness(user: &ServiceUser) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("searchable");
        let data = directory.path().join("data");
        user.create_directory(&data).expect("made");
        (directory, data)
    }

    /// A process of a program with this name that works in this directory.
    struct Sleeper(Child);

    impl Sleeper {
        fn start(mut command: Command, data: &Path) -> Sleeper {
            let child = command.arg0("sleep").arg("600").current_dir(data).spawn().expect("started");
            // The kernel lets a parent go on a moment before the child's program can be seen.
            let program = PathBuf::from(command.get_program());
            while fs::read_link(format!("/proc/{}/exe", child.id())).expect("it lives") != program {
                std::thread::sleep(Duration::from_millis(1));
            }
            Sleeper(child)
        }

        fn lives(&mut self) -> bool {
            self.0.try_wait().expect("asked").is_none()
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A copy of `sleep` of this name, made by another process: no child of this one has it open for writing.
    fn program(directory: &Path, name: &str) -> PathBuf {
        let path = directory.canonicalize().expect("there").join(name);
        let copied = Command::new("cp").arg("-L").arg("/bin/sleep").arg(&path).status().expect("coreutils");
        assert!(copied.success());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        path
    }

    fn account() -> ServiceUser {
        ServiceUser::resolve(None).expect("the account of servers exists")
    }

    #[test]
    fn only_a_program_of_the_very_name_is_a_server() {
        let (directory, data) = harness(&account());
        for (name, expected) in
            [("postgres", true), ("postmaster", true), ("postgres_exporter", false), ("postgres-backup", false)]
        {
            let mut sleeper = Sleeper::start(account().command(program(directory.path(), name)), &data);
            let wanted = if expected { vec![sleeper.0.id()] } else { Vec::new() };
            assert_eq!(processes_of(&data), wanted, "{name}");
            assert_eq!(kill_processes_of(&data, &account()).expect("its own"), wanted, "{name}");
            if expected {
                sleeper.0.wait().expect("killed");
            } else {
                assert!(sleeper.lives(), "{name}");
            }
        }
    }

    #[test]
    fn a_program_that_was_replaced_is_a_server_still() {
        let (directory, data) = harness(&account());
        let path = program(directory.path(), "postgres");
        let sleeper = Sleeper::start(account().command(&path), &data);
        fs::remove_file(path).expect("removed");
        assert_eq!(processes_of(&data), [sleeper.0.id()]);
    }

    #[test]
    fn a_process_of_another_account_is_neither_found_nor_killed() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "a_process_of_another_account_is_neither_found_nor_killed",
                "only root has servers of another account",
            );
            return;
        }
        let (directory, data) = harness(&account());
        let path = program(directory.path(), "postgres");
        // Root's own, who stands in the directory.
        let mut sleeper = Sleeper::start(Command::new(&path), &data);
        assert_eq!(processes_of(&data), Vec::<u32>::new());
        assert_eq!(kill_processes_of(&data, &account()).expect("its own"), Vec::<u32>::new());
        ServerProcesses::of(&data).expect("opened").signal(sleeper.0.id(), Signal::KILL);
        std::thread::sleep(Duration::from_millis(50));
        assert!(sleeper.lives(), "root's process was killed");
    }

    #[test]
    fn a_server_of_another_account_is_left_alone_whatever_path_leads_to_it() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "a_server_of_another_account_is_left_alone_whatever_path_leads_to_it",
                "only root can give a file to another account",
            );
            return;
        }
        let (directory, data) = harness(&account());
        let theirs = directory.path().join("theirs");
        fs::create_dir(&theirs).expect("made");
        std::os::unix::fs::chown(&theirs, Some(ANOTHER_ACCOUNT), None).expect("given");
        let mut command = Command::new(program(directory.path(), "postgres"));
        command.uid(ANOTHER_ACCOUNT);
        let mut sleeper = Sleeper::start(command, &theirs);
        fs::remove_dir(&data).expect("removed");
        symlink(&theirs, &data).expect("laid");
        for path in [&data, &theirs] {
            let error = kill_processes_of(path, &account()).expect_err("refused").to_string();
            assert!(error.contains(account().name()), "{error}");
        }
        std::thread::sleep(Duration::from_millis(50));
        assert!(sleeper.lives(), "another account's process was killed");
    }

    #[test]
    fn a_directory_that_is_gone_has_no_processes() {
        let (_directory, data) = harness(&account());
        fs::remove_dir(&data).expect("removed");
        assert_eq!(processes_of(&data), Vec::<u32>::new());
        assert_eq!(kill_processes_of(&data, &account()).expect("none"), Vec::<u32>::new());
    }
}
