//! The end of filling: everything durable, then startable by anybody, then without a trace of us.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::syncfs;

use super::{Marker, Place, TABLESPACES_DIRECTORY, VersionGuard};
use crate::CloneError;

/// Makes a filled clone an ordinary data directory; its server may run meanwhile. Interrupted, it can be called again. May take as long
/// as the disk needs for all that is not written yet on the clone's file systems.
///
/// # Errors
/// [`CloneError::File`] when something cannot be made durable: the clone is not whole then.
pub fn finish(place: &Place, major_version: u32) -> Result<(), CloneError> {
    let mut synced = HashSet::new();
    for directory in directories(place)? {
        sync_file_system(&directory, &mut synced)?;
    }
    VersionGuard::new(place.clone(), major_version).lift()?;
    Marker::remove(place)?;
    let directory = File::open(&place.directory).and_then(|directory| directory.sync_all());
    directory.map_err(CloneError::file("sync", &place.directory))
}

/// Where a clone's file systems can be reached: each tablespace may have one of its own.
fn directories(place: &Place) -> Result<Vec<PathBuf>, CloneError> {
    let mut found = vec![place.directory.clone()];
    found.extend(place.directory.parent().map(Path::to_owned));
    let links = place.directory.join(TABLESPACES_DIRECTORY);
    for entry in fs::read_dir(&links).map_err(CloneError::file("read", &links))? {
        let path = entry.map_err(CloneError::file("read", &links))?.path();
        // A link to nothing is that of a tablespace that was dropped just now.
        if path.is_symlink() && path.is_dir() {
            found.push(path);
            found.extend([place.tablespaces.clone()]);
            found.extend(place.tablespaces.parent().map(Path::to_owned));
        }
    }
    Ok(found)
}

/// All of a file system at once, names too: a call for each file would flush the disk's cache as often, while the source waits for the
/// same disk. It tells of any write that failed since it was last asked, as fsync(2) does of a file's (Linux 5.8, syncfs(2)).
fn sync_file_system(directory: &Path, synced: &mut HashSet<u64>) -> Result<(), CloneError> {
    let failed = || CloneError::file("sync the file system of", directory);
    let opened = File::open(directory).map_err(failed())?;
    if !synced.insert(opened.metadata().map_err(failed())?.dev()) {
        return Ok(());
    }
    syncfs(&opened).map_err(|error| failed()(error.into()))
}
