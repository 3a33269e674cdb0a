//! The lock that says: there is an agent, it lives, and it is the only one.
//!
//! The kernel drops a flock(2) when the process is gone and its last system call has ended. So who gets it knows that
//! nobody is giving memory of this server back any more; and while an agent is only stopped, it keeps it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::MemoryError;

/// Its name in the data directory; the server makes it (`extension/src/publish.c`).
const FILE_NAME: &str = "onecopy_memory.lock";
/// How long is waited for it: the server itself holds it while it finishes the work of a dead agent.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// The lock of one server, held until this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    file: File,
    path: PathBuf,
}

impl Claim {
    /// Gets it.
    ///
    /// # Errors
    /// [`MemoryError::NotAllowed`]: another agent holds it, or the server has not loaded the extension.
    pub fn get(data_directory: &Path) -> Result<Claim, MemoryError> {
        let path = data_directory.join(FILE_NAME);
        let refuse = |reason: &str| MemoryError::NotAllowed {
            what: "to take published memory",
            reason: format!("{}: {reason}", path.display()),
        };
        // Never made here: the server's user could not open it.
        let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refuse("not there; the server has not loaded onecopy (shared_preload_libraries)"));
            }
            other => other.map_err(|error| refuse(&error.to_string()))?,
        };
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Claim { file, path }),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => sleep(PAUSE),
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(refuse("another agent works for this server")),
                Err(error) => return Err(refuse(&io::Error::from(error).to_string())),
            }
        }
    }

    /// Whether the server still looks at the same file: somebody may have removed it, and the server has made another.
    pub fn holds(&self) -> bool {
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let there = fs::symlink_metadata(&self.path).map(identity).ok();
        there.is_some() && there == self.file.metadata().map(identity).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_agent_a_server() {
        let directory = tempfile::tempdir().expect("a directory");
        let message = Claim::get(directory.path()).expect_err("no file").to_string();
        assert!(message.contains("not there"), "{message}");
        fs::write(directory.path().join(FILE_NAME), "").expect("made");
        let first = Claim::get(directory.path()).expect("free");
        let message = Claim::get(directory.path()).expect_err("taken").to_string();
        assert!(message.contains("another agent"), "{message}");
        assert!(first.holds());
        drop(first);
        let again = Claim::get(directory.path()).expect("free again");
        fs::remove_file(directory.path().join(FILE_NAME)).expect("removed");
        assert!(!again.holds(), "what the server looks at is gone");
        fs::write(directory.path().join(FILE_NAME), "").expect("made");
        assert!(!again.holds(), "another file");
    }

    #[test]
    fn a_link_is_not_followed() {
        let directory = tempfile::tempdir().expect("a directory");
        let elsewhere = directory.path().join("elsewhere");
        fs::write(&elsewhere, "").expect("made");
        std::os::unix::fs::symlink(&elsewhere, directory.path().join(FILE_NAME)).expect("linked");
        Claim::get(directory.path()).expect_err("a link");
    }
}
