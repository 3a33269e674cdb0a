//! A directory of one test.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;

use crate::process::{send, working_in};

/// How often a dropped directory is searched for processes and removed before it is left behind.
const REMOVE_ROUNDS_MAX: usize = 1000;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// A directory that goes away with the value, as do the processes that work in it. The servers' account may enter it.
#[derive(Debug)]
pub struct TestDirectory {
    directory: tempfile::TempDir,
}

impl TestDirectory {
    /// Makes one where temporary files are.
    ///
    /// # Errors
    ///
    /// The file system's.
    pub fn new() -> anyhow::Result<TestDirectory> {
        TestDirectory::within(&std::env::temp_dir())
    }

    /// Makes one in a directory that is there.
    ///
    /// # Errors
    ///
    /// The file system's.
    pub fn within(parent: &Path) -> anyhow::Result<TestDirectory> {
        let directory = tempfile::tempdir_in(parent).with_context(|| format!("a directory in {}", parent.display()))?;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        Ok(TestDirectory { directory })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The path of something in it.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path().join(name)
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        remove_with_processes(self.path());
    }
}

/// Kills all processes that work in `directory` and removes it.
pub fn remove_with_processes(directory: &Path) {
    // A postmaster and its children work in their data directory: this finds them whatever state they are in. On a busy
    // machine it takes a while until they are gone, and until then they may still make files.
    for _ in 0..REMOVE_ROUNDS_MAX {
        let processes = working_in(directory);
        for process in &processes {
            send(*process, Signal::KILL);
        }
        let is_removed = || std::fs::remove_dir_all(directory).is_ok() || !directory.exists();
        if processes.is_empty() && is_removed() {
            return;
        }
        std::thread::sleep(REMOVE_PAUSE);
    }
    eprintln!("{} is left behind", directory.display());
}
