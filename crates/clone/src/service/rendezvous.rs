//! Where a service and those who want something of it meet: a directory below `/run`, which a new start of the machine
//! empties.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use crate::CloneError;

/// Above all rendezvous directories.
pub const RUN_DIRECTORY: &str = "/run/onecopy";

/// How the names of rendezvous directories begin.
const NAME_PREFIX: &str = "clone-";

/// Hexadecimal digits behind that.
const KEY_DIGITS: usize = 16;

/// What follows, behind a dot, in the name of one that is being removed.
const ENDED: &str = "ended-";

/// A service's directory: `lock`, `socket`, `log`, `targets`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    directory: PathBuf,
}

/// What whoever starts a service has made for it. The lock is held by everyone who has the file open.
#[derive(Debug)]
pub struct Beginning {
    /// The locked file.
    pub lock: OwnedFd,
    /// The listening socket.
    pub listener: OwnedFd,
    /// The log, for appending.
    pub log: File,
}

impl Rendezvous {
    /// That of a source's data directory, by whatever name it is reached.
    ///
    /// # Errors
    /// [`CloneError::File`] when there is no such directory.
    pub fn of_source(data_directory: &Path) -> Result<Rendezvous, CloneError> {
        let metadata = fs::metadata(data_directory).map_err(CloneError::file("look at", data_directory))?;
        let mut key = metadata.dev().to_le_bytes().to_vec();
        key.extend(metadata.ino().to_le_bytes());
        Ok(Rendezvous::of_key(&key))
    }

    /// That of one clone whose source is on another host.
    pub fn of_target(target: &Path) -> Rendezvous {
        Rendezvous::of_key(target.as_os_str().as_encoded_bytes())
    }

    fn of_key(key: &[u8]) -> Rendezvous {
        Rendezvous { directory: Path::new(RUN_DIRECTORY).join(format!("{NAME_PREFIX}{:016x}", xxh3_64(key))) }
    }

    /// The one that a marker names. The account of a clone's server may have written the marker: none where no service
    /// of ours can be, and that is anywhere but right below [`RUN_DIRECTORY`], which is root's.
    pub fn named_by_marker(directory: &Path) -> Option<Rendezvous> {
        let key = directory.file_name()?.to_str()?.strip_prefix(NAME_PREFIX)?;
        let is_key = key.len() == KEY_DIGITS && key.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        let place = Path::new(RUN_DIRECTORY).join(format!("{NAME_PREFIX}{key}"));
        (is_key && place == directory).then(|| Rendezvous::at(place))
    }

    /// The one in this directory, as a command line names it.
    pub fn at(directory: PathBuf) -> Rendezvous {
        Rendezvous { directory }
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// The log's path.
    pub fn log(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// The path of the list of clones that are not whole, for whoever comes after keeper and hydrator were killed.
    pub fn targets(&self) -> PathBuf {
        self.directory.join("targets")
    }

    fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }

    /// Makes what a service needs if nobody has: none when one runs, begins or ends there.
    ///
    /// # Errors
    /// [`CloneError::File`].
    pub fn begin(&self) -> Result<Option<Beginning>, CloneError> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&self.directory).map_err(CloneError::file("create", &self.directory))?;
        let path = self.lock();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let lock = match open_lock(&mut options, &path) {
            // An ending service has removed the directory meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            open => open.map_err(CloneError::file("open", &path))?,
        };
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(error)) => return Err(CloneError::file("lock", &path)(error)),
        }
        // The lock of a file that its last service has removed locks nobody out.
        if !is_same_file(&lock, &path) {
            return Ok(None);
        }
        self.clear_away_others();
        let socket = self.socket();
        let _ = fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).map_err(CloneError::file("listen at", &socket))?;
        fs::set_permissions(&socket, Permissions::from_mode(0o600)).map_err(CloneError::file("protect", &socket))?;
        let log = self.log();
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&log)
            .map_err(CloneError::file("open", log))?;
        Ok(Some(Beginning { lock: lock.into(), listener: listener.into(), log }))
    }

    /// Whether a service holds the lock.
    pub fn is_held(&self) -> bool {
        let lock = open_lock(OpenOptions::new().read(true), &self.lock());
        lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(fs::TryLockError::WouldBlock)))
    }

    /// Removes the directory; by who holds the lock, as its last deed. From then on a new service may begin.
    ///
    /// # Errors
    /// [`CloneError::File`].
    pub fn remove(&self) -> Result<(), CloneError> {
        // Out of the way at once: what a new service makes meanwhile must not be taken for what is left of this one.
        let aside = self.directory.with_extension(format!("{ENDED}{}", std::process::id()));
        let removed = fs::rename(&self.directory, &aside).and_then(|()| fs::remove_dir_all(&aside));
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(CloneError::file("remove", &self.directory)(error))
            }
            _ => Ok(()),
        }
    }

    /// Removes the directory if nobody serves there, nobody begins, and no clone is left to be cleaned up by the next
    /// service.
    pub fn clear_away(&self) {
        // Without anything in it: made by one that was killed before it had the lock.
        if fs::remove_dir(&self.directory).is_ok() {
            return;
        }
        let path = self.lock();
        let Ok(lock) = open_lock(OpenOptions::new().read(true), &path) else { return };
        if lock.try_lock().is_err() || !is_same_file(&lock, &path) || self.has_targets() {
            return;
        }
        if let Err(error) = self.remove() {
            tracing::debug!(%error, "what a service left stays");
        }
    }

    fn has_targets(&self) -> bool {
        match fs::read(self.targets()) {
            Ok(list) => list.trim_ascii() != b"[]",
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        }
    }

    /// What services of other sources left that were killed, or never were any.
    fn clear_away_others(&self) {
        let entries = self.directory.parent().and_then(|above| fs::read_dir(above).ok());
        for entry in entries.into_iter().flatten().flatten() {
            let is_service = entry.file_name().to_str().is_some_and(|name| name.starts_with(NAME_PREFIX));
            let path = entry.path();
            if is_service && is_ended(&path) {
                // Nobody meets there any more; who removes it at this moment does not mind.
                let _ = fs::remove_dir_all(&path);
            } else if is_service && path != self.directory {
                Rendezvous::at(path).clear_away();
            }
        }
    }
}

/// Whether a directory is one that a service has put out of the way to remove it.
fn is_ended(directory: &Path) -> bool {
    let extension = directory.extension().and_then(OsStr::to_str);
    extension.is_some_and(|extension| extension.starts_with(ENDED))
}

/// Opens a lock. Nothing else is one, above all no fifo, at which opening would wait for ever.
fn open_lock(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    let file = options.custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(std::io::Error::other("it is no regular file: remove it"))
}

fn is_same_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(theirs)) => (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::killed::{Step, at_every_step};

    #[test]
    fn one_begins_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let rendezvous = Rendezvous::at(directory.path().join("clone"));
        assert!(!rendezvous.is_held());
        let beginning = rendezvous.begin().unwrap().expect("nobody is there");
        assert!(rendezvous.begin().unwrap().is_none(), "the lock is held");
        assert!(rendezvous.is_held());
        std::os::unix::net::UnixStream::connect(rendezvous.socket()).unwrap();
        rendezvous.remove().unwrap();
        assert!(rendezvous.begin().unwrap().is_some(), "the old one is on its way out");
        drop(beginning);
        rendezvous.remove().unwrap();
        rendezvous.remove().unwrap();
    }

    #[test]
    fn who_comes_next_clears_away_what_others_left() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| Rendezvous::at(directory.path().join(name));
        let (left, bare, served, unfinished) =
            (at("clone-left"), at("clone-bare"), at("clone-served"), at("clone-unfinished"));
        drop(left.begin().unwrap().expect("nobody is there"));
        fs::write(left.targets(), "[]").unwrap();
        fs::create_dir(bare.directory()).unwrap();
        let serving = served.begin().unwrap().expect("nobody is there");
        drop(unfinished.begin().unwrap().expect("nobody is there"));
        fs::write(unfinished.targets(), r#"[{"target": "/clone"}]"#).unwrap();
        let foreign = directory.path().join("foreign");
        fs::create_dir(&foreign).unwrap();
        assert!(at("clone-next").begin().unwrap().is_some());
        assert!(!left.directory().exists() && !bare.directory().exists());
        assert!(served.directory().exists() && unfinished.directory().exists() && foreign.exists());
        drop(serving);
    }

    /// Killed before the lock, before the socket, before the log.
    #[test]
    fn a_place_that_is_half_made_is_made_by_who_comes_next_or_cleared_away() {
        let at = |directory: &TempDir, name: &str| Rendezvous::at(directory.path().join(name));
        for comes_again in [true, false] {
            let steps = at_every_step(
                Step::Any,
                || tempfile::tempdir().unwrap(),
                |directory| at(directory, "clone-killed").begin().map(drop),
                |directory, death| {
                    let killed = at(&directory, "clone-killed");
                    assert!(!killed.is_held(), "{death}");
                    let next = if comes_again { killed } else { at(&directory, "clone-next") };
                    let _beginning = next.begin().unwrap().expect("nobody is there");
                    std::os::unix::net::UnixStream::connect(next.socket()).unwrap();
                    assert_eq!(names(directory.path()), [next.directory().file_name().unwrap()], "{death}");
                    assert_eq!(names(next.directory()), ["lock", "log", "socket"], "{death}");
                },
            );
            assert!(steps > 4, "{steps}");
        }
    }

    #[test]
    fn a_place_that_is_half_removed_is_removed_by_who_comes_next() {
        let begin = || {
            let directory = tempfile::tempdir().unwrap();
            let ending = Rendezvous::at(directory.path().join("clone-ending"));
            let beginning = ending.begin().unwrap().expect("nobody is there");
            fs::write(ending.targets(), "[]").unwrap();
            (directory, ending, beginning)
        };
        let steps = at_every_step(
            Step::Any,
            begin,
            |(_, ending, _)| ending.remove(),
            |(directory, _, beginning), death| {
                drop(beginning);
                let next = Rendezvous::at(directory.path().join("clone-next"));
                let _beginning = next.begin().unwrap().expect("nobody is there");
                assert_eq!(names(directory.path()), ["clone-next"], "{death}");
            },
        );
        assert!(steps > 5, "{steps}");
    }

    /// What is in a directory, in order.
    fn names(directory: &Path) -> Vec<std::ffi::OsString> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_no_file_is_no_lock_and_nobody_waits_at_it() {
        let directory = tempfile::tempdir().unwrap();
        let rendezvous = Rendezvous::at(directory.path().join("clone-fifo"));
        fs::create_dir(rendezvous.directory()).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, rendezvous.lock(), rustix::fs::Mode::RWXU).unwrap();
        let (done, ended) = std::sync::mpsc::channel();
        let of_fifo = rendezvous.clone();
        std::thread::spawn(move || {
            of_fifo.clear_away();
            done.send((of_fifo.is_held(), of_fifo.begin().is_err()))
        });
        let outcome = ended.recv_timeout(std::time::Duration::from_secs(60)).expect("nobody waits");
        assert_eq!(outcome, (false, true));
        // Nor is a link one, though it leads to a lock that is held.
        let other = Rendezvous::at(directory.path().join("clone-held"));
        let held = other.begin().unwrap().expect("nobody is there");
        assert!(other.is_held());
        fs::create_dir_all(rendezvous.directory()).unwrap();
        let _ = fs::remove_file(rendezvous.lock());
        std::os::unix::fs::symlink(other.lock(), rendezvous.lock()).unwrap();
        assert!(!rendezvous.is_held());
        drop(held);
    }

    #[test]
    fn a_marker_is_believed_only_where_services_are() {
        let ours = Rendezvous::of_target(Path::new("/srv/clone"));
        assert_eq!(Rendezvous::named_by_marker(ours.directory()), Some(ours));
        for foreign in [
            "",
            "/",
            "relative",
            "clone-0123456789abcdef",
            "/tmp/clone-0123456789abcdef",
            "/tmp/run/onecopy/clone-0123456789abcdef",
            "/run/onecopy",
            "/run/onecopy/lock",
            "/run/onecopy/clone-",
            "/run/onecopy/clone-0123456789abcde",
            "/run/onecopy/clone-0123456789abcdeg",
            "/run/onecopy/clone-0123456789abcdef0",
            "/run/onecopy/clone-0123456789abcdef/deeper",
            "/run/onecopy/clone-0123456789abcdef/..",
            "/run/onecopy/../../tmp/clone-0123456789abcdef",
            "/run/onecopy/x/../clone-0123456789abcdef",
        ] {
            assert_eq!(Rendezvous::named_by_marker(Path::new(foreign)), None, "{foreign}");
        }
    }

    #[test]
    fn a_source_has_one_place_whatever_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path(), &link).unwrap();
        let place = Rendezvous::of_source(directory.path()).unwrap();
        assert_eq!(place, Rendezvous::of_source(&link).unwrap());
        assert_ne!(place, Rendezvous::of_target(directory.path()));
        let name = place.directory().to_str().unwrap().strip_prefix("/run/onecopy/clone-").unwrap();
        assert_eq!(name.len(), 16);
        assert!(Rendezvous::of_source(Path::new("/nonexistent")).is_err());
    }
}
