//! One daemon a cluster: an advisory lock on a file of the directory, which the kernel gives back when its holder dies.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use onecopy_postgres::lives;

use crate::DirectoryError;

/// More than the digits of a process number; what else the file holds is not read.
const PROCESS_NUMBER_BYTES_MAX: u64 = 16;

/// How long what is left of a dead holder may keep the lock.
const DEATH_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked whether it has let go.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The lock, held until it is dropped.
#[derive(Debug)]
pub struct DirectoryLock {
    /// Open file description that carries the lock.
    file: File,
}

/// Who has the lock.
#[derive(Debug)]
pub enum LockState {
    /// Nobody had it; now the caller has.
    Taken(DirectoryLock),
    /// A living process has it; its number, if it has written it already.
    HeldBy(Option<u32>),
}

impl DirectoryLock {
    /// As [`DirectoryLock::take`], but from a dead holder it gets the lock as soon as that one's last thread has ended:
    /// one that is in the middle of a system call ends later than the process seems to.
    ///
    /// # Errors
    /// As [`DirectoryLock::take`].
    pub async fn take_after_death(path: &Path) -> Result<LockState, DirectoryError> {
        let begun = Instant::now();
        loop {
            match DirectoryLock::take(path)? {
                LockState::HeldBy(Some(holder)) if !lives(holder) && begun.elapsed() < DEATH_TIMEOUT => {
                    tokio::time::sleep(LOOK_INTERVAL).await;
                }
                state => return Ok(state),
            }
        }
    }

    /// Takes the lock of `path` when it is free and writes this process's number into it.
    ///
    /// # Errors
    /// [`DirectoryError::File`] when the file cannot be opened, locked or written.
    pub fn take(path: &Path) -> Result<LockState, DirectoryError> {
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o644)
                .open(path)
                .map_err(DirectoryError::file("open", path))?;
            crate::steps::done(path);
            match file.try_lock() {
                // Its holder has removed it with the directory that it was in: it is nobody's lock.
                Ok(()) if !is_same_file(&file, path) => {}
                Ok(()) => {
                    write_number(&mut file).map_err(DirectoryError::file("write", path))?;
                    crate::steps::done(path);
                    return Ok(LockState::Taken(DirectoryLock { file }));
                }
                Err(TryLockError::WouldBlock) => return Ok(LockState::HeldBy(holder(&mut file))),
                Err(TryLockError::Error(source)) => return Err(DirectoryError::file("lock", path)(source)),
            }
        }
    }

    /// What a process that is started gets as its standard input so that it holds the lock, too, from its first moment
    /// on: the lock is free when the last of both has let go.
    ///
    /// # Errors
    /// The kernel's, when there is no descriptor left.
    pub fn for_standard_input(&self) -> std::io::Result<File> {
        self.file.try_clone()
    }

    /// The lock that whoever started this process has given it as its standard input; none where that is another file.
    /// From now on it is this process's number that the file has.
    ///
    /// # Errors
    /// [`DirectoryError::File`] when the file cannot be written.
    pub fn inherited(path: &Path) -> Result<Option<DirectoryLock>, DirectoryError> {
        let copy = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 0);
        let mut file = File::from(copy.map_err(|error| DirectoryError::file("inherit", path)(error.into()))?);
        // Only where it is the same open file, and not one that somebody else has locked.
        if !is_same_file(&file, path) || file.try_lock().is_err() {
            return Ok(None);
        }
        write_number(&mut file).map_err(DirectoryError::file("write", path))?;
        Ok(Some(DirectoryLock { file }))
    }

    /// Whether somebody holds the lock. To look is to hold it for a moment: who takes it in this moment must try again.
    ///
    /// # Errors
    /// [`DirectoryError::File`] when the file cannot be opened or locked.
    pub fn is_held(path: &Path) -> Result<bool, DirectoryError> {
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            file => file.map_err(DirectoryError::file("open", path))?,
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(source)) => Err(DirectoryError::file("lock", path)(source)),
        }
    }
}

/// Whether this is what the path names now.
pub fn is_same_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(theirs)) => (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino()),
        _ => false,
    }
}

fn write_number(file: &mut File) -> std::io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

/// The number in the file; none while the holder has not written it.
fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(PROCESS_NUMBER_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_left_of_a_dead_holder_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let LockState::Taken(first) = DirectoryLock::take(&path).unwrap() else { panic!("a free lock was refused") };
        assert!(matches!(DirectoryLock::take_after_death(&path).await.unwrap(), LockState::HeldBy(_)), "it lives");
        // As when the number is that of a process whose last thread still has the file.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        std::fs::write(&path, format!("{}\n", child.id())).unwrap();
        let last_thread = tokio::spawn(async move {
            tokio::time::sleep(5 * LOOK_INTERVAL).await;
            drop(first);
        });
        assert!(matches!(DirectoryLock::take_after_death(&path).await.unwrap(), LockState::Taken(_)));
        last_thread.await.unwrap();
    }

    #[test]
    fn second_holder_is_told_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        std::fs::write(&path, "4194303 and more than a number\n").unwrap();
        let LockState::Taken(first) = DirectoryLock::take(&path).unwrap() else { panic!("a free lock was refused") };
        let LockState::HeldBy(holder) = DirectoryLock::take(&path).unwrap() else { panic!("the lock was given twice") };
        assert_eq!(holder, Some(std::process::id()));
        drop(first);
        assert!(matches!(DirectoryLock::take(&path).unwrap(), LockState::Taken(_)));
    }

    #[test]
    fn a_lock_that_is_handed_down_is_held_until_both_let_go() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        assert!(!DirectoryLock::is_held(&path).unwrap(), "it is not there");
        let LockState::Taken(lock) = DirectoryLock::take(&path).unwrap() else { panic!("a free lock was refused") };
        assert!(DirectoryLock::inherited(&path).unwrap().is_none(), "this process was given another standard input");
        let given = lock.for_standard_input().unwrap();
        // The command has its copy until it is dropped.
        let mut child = { std::process::Command::new("sleep").arg("60").stdin(given).spawn().unwrap() };
        drop(lock);
        assert!(DirectoryLock::is_held(&path).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!DirectoryLock::is_held(&path).unwrap());
    }

    /// Whoever removes a directory with the lock that it holds may do so just before somebody else has locked the file:
    /// that is no lock of the one that is made in its place.
    ///
    /// Spec: A3
    #[test]
    fn a_lock_on_a_file_that_has_gone_is_taken_anew() {
        use std::sync::atomic::{AtomicBool, Ordering};
        const NAME: &str = "goes-once";
        static HAS_GONE: AtomicBool = AtomicBool::new(false);
        crate::steps::observe_steps(|path| {
            if path.ends_with(NAME) && !HAS_GONE.swap(true, Ordering::Relaxed) {
                std::fs::remove_file(path).unwrap();
            }
        });
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(NAME);
        let LockState::Taken(_lock) = DirectoryLock::take(&path).unwrap() else { panic!("a free lock was refused") };
        assert!(HAS_GONE.load(Ordering::Relaxed) && DirectoryLock::is_held(&path).unwrap());
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = DirectoryLock::take(Path::new("/nonexistent/onecopy/lock")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/onecopy/lock"), "{error}");
    }
}
