//! The directories whose files are watched.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::CloneError;
use crate::fanotify::Group;
use crate::image::{FileIdentity, Image};

/// A marked directory.
#[derive(Debug)]
struct Marked {
    identity: FileIdentity,
    /// Nobody has a file in it open since before it was marked.
    proven: bool,
}

/// Marked directories by their paths. A mark stays from when it is made until the group is gone: whatever is opened is armed.
#[derive(Debug, Default)]
pub(super) struct Directories {
    marked: Mutex<Marks>,
}

#[derive(Debug, Default)]
struct Marks {
    by_path: HashMap<PathBuf, Marked>,
    /// They raise events.
    awake: bool,
}

impl Directories {
    /// Marks those directories of an image's files that are new, and forgets those that are gone. True: there were new ones.
    ///
    /// # Errors
    /// [`CloneError::Kernel`] when a file system takes no marks, [`CloneError::File`].
    pub(super) fn mark_new(&self, data_directory: &Path, image: &Image, group: &Group) -> Result<bool, CloneError> {
        let mut marks = self.lock();
        let mut new = false;
        let mut by_path = HashMap::new();
        for path in directories_of(image) {
            let absolute = data_directory.join(path);
            let Some(identity) = identity_of(&absolute)? else { continue };
            let known = marks.by_path.remove(&absolute).filter(|marked| marked.identity == identity);
            let marked = match known {
                Some(marked) => marked,
                None => {
                    new = true;
                    if marks.awake {
                        // It may have been silent when its last file went, and was forgotten then; its marks stayed.
                        absent_is_fine(group.wake_directory(&absolute))?;
                    } else {
                        // First, so that it is never live.
                        absent_is_fine(group.silence_directory(&absolute))?;
                    }
                    absent_is_fine(group.mark_directory(&absolute))?;
                    Marked { identity, proven: false }
                }
            };
            by_path.insert(absolute, marked);
        }
        marks.by_path = by_path;
        Ok(new)
    }

    /// Whether all are proven.
    pub(super) fn are_proven(&self) -> bool {
        self.lock().by_path.values().all(|marked| marked.proven)
    }

    /// Those that are marked now, for [`Directories::prove`].
    pub(super) fn identities(&self) -> Vec<FileIdentity> {
        self.lock().by_path.values().map(|marked| marked.identity).collect()
    }

    /// Since these were marked, every descriptor of their files was found armed.
    pub(super) fn prove(&self, identities: &[FileIdentity]) {
        for marked in self.lock().by_path.values_mut() {
            marked.proven |= identities.contains(&marked.identity);
        }
    }

    /// Whether all files of an image lie in proven directories.
    ///
    /// # Errors
    /// [`CloneError::NewDirectory`] names one that does not; [`CloneError::File`].
    pub(super) fn check(&self, data_directory: &Path, image: &Image) -> Result<(), CloneError> {
        let marks = self.lock();
        for path in directories_of(image) {
            let absolute = data_directory.join(path);
            let Some(identity) = identity_of(&absolute)? else { continue };
            let known = marks.by_path.get(&absolute);
            if !known.is_some_and(|marked| marked.proven && marked.identity == identity) {
                return Err(CloneError::NewDirectory { path: absolute });
            }
        }
        Ok(())
    }

    /// Files raise events.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub(super) fn wake(&self, group: &Group) -> Result<(), CloneError> {
        let mut marks = self.lock();
        if !marks.awake {
            for path in marks.by_path.keys() {
                group.wake_directory(path)?;
            }
            marks.awake = true;
        }
        Ok(())
    }

    /// Files raise no events; descriptors stay armed. What cannot be silenced costs time and nothing else.
    pub(super) fn silence(&self, group: &Group) {
        let mut marks = self.lock();
        for path in marks.by_path.keys().filter(|path| path.exists()) {
            if let Err(error) = group.silence_directory(path) {
                tracing::warn!(path = %path.display(), %error, "a directory goes on to raise events");
            }
        }
        marks.awake = false;
    }

    /// They raise events already: marked by a process that is dead.
    pub(super) fn inherit_awake(&self) {
        self.lock().awake = true;
    }

    fn lock(&self) -> MutexGuard<'_, Marks> {
        self.marked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Directories that hold files which are filled on demand.
fn directories_of(image: &Image) -> Vec<&Path> {
    let mut directories: Vec<&Path> = image.files.iter().filter_map(|file| file.path.parent()).collect();
    directories.sort_unstable();
    directories.dedup();
    directories
}

/// None when it is gone: a database was dropped.
fn identity_of(directory: &Path) -> Result<Option<FileIdentity>, CloneError> {
    match fs::metadata(directory) {
        Ok(metadata) => Ok(Some(FileIdentity::of(&metadata))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CloneError::file("read", directory)(error)),
    }
}

fn absent_is_fine(result: Result<(), CloneError>) -> Result<(), CloneError> {
    match result {
        Err(CloneError::Kernel { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
