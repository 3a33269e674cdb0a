//! The postmaster of a data directory, as this process sees it: also when it runs in a container, where it has another number.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::{MemoryError, foreign};

/// A living postmaster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Postmaster {
    /// Its number in our own namespace of processes.
    pub process_id: u32,
    /// Whom the data directory belongs to: the server runs as that user, and may only offer what is that user's.
    pub owner_id: u32,
}

impl Postmaster {
    /// Finds it by the first line of `postmaster.pid` and by the directory in which it works. Its number may be that of another
    /// namespace: the kernel tells both (`NSpid` in proc_pid_status(5)).
    ///
    /// # Errors
    /// [`MemoryError::NoServer`]: none runs there, or it cannot be seen from here.
    pub fn find(data_directory: &Path) -> Result<Postmaster, MemoryError> {
        let nothing = |reason: &str| MemoryError::NoServer {
            data_directory: data_directory.to_owned(),
            reason: reason.to_owned(),
        };
        let directory = fs::metadata(data_directory).map_err(|error| nothing(&error.to_string()))?;
        let path = data_directory.join("postmaster.pid");
        let text = foreign::read(&path).map_err(|_| nothing("it has no readable postmaster.pid"))?;
        let number = text.lines().next().and_then(|line| line.trim().parse::<u32>().ok());
        let number = number.filter(|number| *number > 0).ok_or_else(|| nothing("its postmaster.pid has no number"))?;
        let is_it = |process_id: &u32| {
            works_in(*process_id, &directory) && number_inside(*process_id) == Some(number) && !is_child(*process_id)
        };
        let process_id = Some(number).filter(is_it).or_else(|| processes().find(is_it));
        let process_id = process_id.ok_or_else(|| {
            nothing("no process of that number works there; one in a container is seen only from the host")
        })?;
        Ok(Postmaster { process_id, owner_id: directory.uid() })
    }

    /// A file of the kernel about it.
    pub fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.process_id))
    }
}

/// All processes that we can see.
fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Whether this is a process of a PostgreSQL server whose data directory this is: all of them work in it.
fn works_in(process_id: u32, directory: &fs::Metadata) -> bool {
    let process = PathBuf::from(format!("/proc/{process_id}"));
    let there = fs::metadata(process.join("cwd"));
    there.is_ok_and(|there| (there.dev(), there.ino()) == (directory.dev(), directory.ino()))
        && fs::read_link(process.join("exe"))
            .is_ok_and(|program| program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("postgres")))
}

/// Its number in the innermost namespace that it lives in.
fn number_inside(process_id: u32) -> Option<u32> {
    field(process_id, "NSpid:")?.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Whether its parent is a process of PostgreSQL: then it is no postmaster. Needed where two namespaces use the same number.
fn is_child(process_id: u32) -> bool {
    let own = fs::read_link(format!("/proc/{process_id}/exe")).ok();
    let parent = field(process_id, "PPid:").and_then(|text| text.trim().parse::<u32>().ok());
    parent.and_then(|parent| fs::read_link(format!("/proc/{parent}/exe")).ok()).is_some_and(|exe| Some(exe) == own)
}

/// What stands behind `name` in a process' status.
fn field(process_id: u32, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process_id}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned)
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
    fn this_process_has_one_number_here() {
        assert_eq!(number_inside(std::process::id()), Some(std::process::id()));
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
            number_inside(child).filter(|number| *number != child)
        });
        parent.kill().and_then(|()| parent.wait()).expect("ended");
        assert_eq!(inside, Some(1));
    }
}
