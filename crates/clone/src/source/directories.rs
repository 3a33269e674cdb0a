//! The directories whose files are watched.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use onecopy_postgres::Directory;

use crate::CloneError;
use crate::fanotify::Group;
use crate::image::{FileIdentity, Image};

/// A marked directory.
#[derive(Debug)]
struct Marked {
    /// Open: the mark is on this one, whatever its path leads to by now.
    directory: Directory,
    identity: FileIdentity,
    /// Nobody has a file in it open since before it was marked.
    proven: bool,
}

/// Marked directories by their paths. A mark stays from when it is made until the group is gone: whatever is opened is
/// armed.
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
    /// Marks those directories of an image's files that are new, and forgets those that are gone. True: there were new
    /// ones.
    ///
    /// # Errors
    /// [`CloneError::Kernel`] when a file system takes no marks, [`CloneError::File`].
    pub(super) fn mark_new(
        &self,
        data_directory: &Directory,
        image: &Image,
        group: &Group,
    ) -> Result<bool, CloneError> {
        let mut marks = self.lock();
        let mut new = false;
        let mut by_path = HashMap::new();
        for path in directories_of(image) {
            let absolute = data_directory.path().join(path);
            let Some((directory, identity)) = open(data_directory, path)? else { continue };
            let known = marks.by_path.remove(&absolute).filter(|marked| marked.identity == identity);
            let marked = match known {
                Some(marked) => marked,
                None => {
                    new = true;
                    if marks.awake {
                        // It may have been ignored when its last file went, and was forgotten then; its marks stayed.
                        group.unignore_directory(&directory.by_descriptor())?;
                    } else {
                        // First, so that it is never live.
                        group.ignore_directory(&directory.by_descriptor())?;
                    }
                    group.mark_directory(&directory.by_descriptor())?;
                    Marked { directory, identity, proven: false }
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
    pub(super) fn check(&self, data_directory: &Directory, image: &Image) -> Result<(), CloneError> {
        let marks = self.lock();
        for path in directories_of(image) {
            let absolute = data_directory.path().join(path);
            let Some((_, identity)) = open(data_directory, path)? else { continue };
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
            for marked in marks.by_path.values() {
                group.unignore_directory(&marked.directory.by_descriptor())?;
            }
            marks.awake = true;
        }
        Ok(())
    }

    /// Files raise no events; descriptors stay armed. What cannot be ignored costs time and nothing else.
    pub(super) fn ignore(&self, group: &Group) {
        let mut marks = self.lock();
        for (path, marked) in &marks.by_path {
            if let Err(error) = group.ignore_directory(&marked.directory.by_descriptor()) {
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
fn open(data_directory: &Directory, path: &Path) -> Result<Option<(Directory, FileIdentity)>, CloneError> {
    let opened = data_directory.open_directory(path).and_then(|directory| {
        let identity = FileIdentity::of_descriptor(&directory)?;
        Ok((directory, identity))
    });
    match opened {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(CloneError::file("read", data_directory.path().join(path))),
    }
}
