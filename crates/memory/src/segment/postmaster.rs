//! The postmaster of a data directory, as this process sees it: also when it runs in a container, where it has another
//! number.

use std::fs;
use std::path::{Path, PathBuf};

use onecopy_postgres::{ServerProcesses, innermost_number, process_ids, status_field};

use crate::{MemoryError, untrusted_file};

/// A living postmaster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Postmaster {
    /// Its number in our own namespace of processes.
    pub process_id: u32,
    /// Whom the data directory belongs to: the server runs as that user, and may only offer what is that user's.
    pub owner_id: u32,
}

impl Postmaster {
    /// Finds it by the first line of `postmaster.pid` and by the directory in which it works. Its number may be that of
    /// another namespace: the kernel tells both (`NSpid` in proc_pid_status(5)). Only a process of the directory's own
    /// account is believed.
    ///
    /// # Errors
    /// [`MemoryError::NoServer`]: none runs there, or it cannot be seen from here.
    pub fn find(data_directory: &Path) -> Result<Postmaster, MemoryError> {
        let nothing = |reason: &str| MemoryError::NoServer {
            data_directory: data_directory.to_owned(),
            reason: reason.to_owned(),
        };
        let server = ServerProcesses::of(data_directory).map_err(|error| nothing(&error.to_string()))?;
        let path = server.directory().by_descriptor().join("postmaster.pid");
        let text = untrusted_file::read(&path).map_err(|_| nothing("it has no readable postmaster.pid"))?;
        let number = text.lines().next().and_then(|line| line.trim().parse::<u32>().ok());
        let number = number.filter(|number| *number > 0).ok_or_else(|| nothing("its postmaster.pid has no number"))?;
        let is_it = |process_id: &u32| {
            server.has(*process_id) && innermost_number(*process_id) == Some(number) && !is_child(*process_id)
        };
        let process_id = Some(number).filter(is_it).or_else(|| process_ids().find(is_it));
        let process_id = process_id.ok_or_else(|| {
            nothing("no process of that number works there; one in a container is seen only from the host")
        })?;
        Ok(Postmaster { process_id, owner_id: server.user_id() })
    }

    /// A file of the kernel about it.
    pub fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.process_id))
    }
}

/// Whether its parent is a process of PostgreSQL: then it is no postmaster. Needed where two namespaces use the same
/// number.
fn is_child(process_id: u32) -> bool {
    let own = fs::read_link(format!("/proc/{process_id}/exe")).ok();
    let parent = status_field(process_id, "PPid:").and_then(|text| text.parse::<u32>().ok());
    parent.and_then(|parent| fs::read_link(format!("/proc/{parent}/exe")).ok()).is_some_and(|exe| Some(exe) == own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_only_works_there_is_no_server() {
        let directory = tempfile::tempdir().expect("a directory");
        let reason = |text: Option<String>| {
            if let Some(text) = text {
                fs::write(directory.path().join("postmaster.pid"), text).expect("written");
            }
            Postmaster::find(directory.path()).expect_err("no server").to_string()
        };
        assert!(reason(None).contains("no readable postmaster.pid"));
        for text in ["", "x\n", "-5\n", "0\n", "99999999999\n"] {
            assert!(reason(Some(text.to_owned())).contains("has no number"), "{text}");
        }
        let mut sleeper =
            std::process::Command::new("sleep").arg("600").current_dir(directory.path()).spawn().expect("started");
        let message = reason(Some(format!("{}\n", sleeper.id())));
        sleeper.kill().and_then(|()| sleeper.wait()).expect("stopped");
        assert!(message.contains("no process of that number works there"), "{message}");
    }

    #[test]
    fn a_process_of_another_account_than_the_directory_is_no_server() {
        use std::os::unix::process::CommandExt;
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "a_process_of_another_account_than_the_directory_is_no_server",
                "only root can give a file to another account",
            );
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let program = directory.path().join("postgres");
        let copied = std::process::Command::new("cp").arg("-L").arg("/bin/sleep").arg(&program).status();
        assert!(copied.expect("coreutils").success());
        let data = directory.path().join("data");
        fs::create_dir(&data).expect("made");
        let mut command = std::process::Command::new(&program);
        let mut sleeper = command.arg0("sleep").arg("600").current_dir(&data).spawn().expect("started");
        // The kernel lets a parent go on a moment before the child's program can be seen.
        let shown = format!("/proc/{}/exe", sleeper.id());
        while !fs::read_link(&shown).expect("it lives").ends_with("postgres") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        fs::write(data.join("postmaster.pid"), format!("{}\n", sleeper.id())).expect("written");
        let own = Postmaster::find(&data);
        std::os::unix::fs::chown(&data, Some(65534), None).expect("given");
        let theirs = Postmaster::find(&data);
        sleeper.kill().and_then(|()| sleeper.wait()).expect("stopped");
        assert_eq!(own.expect("of the same account").process_id, sleeper.id());
        let message = theirs.expect_err("no server").to_string();
        assert!(message.contains("no process of that number works there"), "{message}");
    }

    #[test]
    fn this_process_has_one_number_here() {
        assert_eq!(innermost_number(std::process::id()), Some(std::process::id()));
    }

    #[test]
    fn a_process_of_another_namespace_has_two_numbers() {
        // The first process of a namespace has the number 1 there. It ends with its parent.
        let arguments = ["--pid", "--fork", "--kill-child", "sleep", "600"];
        let mut parent = std::process::Command::new("unshare").args(arguments).spawn().expect("unshare is installed");
        let children = format!("/proc/{0}/task/{0}/children", parent.id());
        let inside = (0..6000).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            let child: u32 = fs::read_to_string(&children).ok()?.trim().parse().ok()?;
            innermost_number(child).filter(|number| *number != child)
        });
        parent.kill().and_then(|()| parent.wait()).expect("ended");
        assert_eq!(inside, Some(1));
    }
}
