//! The end of filling: everything durable, then startable by anybody, then without a trace of us.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use onecopy_postgres::Directory;
use rustix::fs::{fstat, syncfs};

use super::{CloneLocation, Marker, TABLESPACES_DIRECTORY, VersionGuard};
use crate::CloneError;

/// Makes a filled clone an ordinary data directory; its server may run meanwhile. Interrupted, it can be called again.
/// May take as long as the disk needs for all that is not written yet on the clone's file systems.
///
/// # Errors
/// [`CloneError::File`] when something cannot be made durable: the clone is not whole then.
pub fn finish(location: &CloneLocation, major_version: u32) -> Result<(), CloneError> {
    let mut synced = HashSet::new();
    for directory in directories(location)? {
        sync_file_system(&directory, &mut synced)
            .map_err(CloneError::file("sync the file system of", &location.directory))?;
    }
    VersionGuard::new(location.clone(), major_version).lift()?;
    let marker = Marker::read(&location.directory).ok().flatten();
    Marker::remove(location)?;
    let synced = location.open().and_then(|open| open.sync().map_err(CloneError::file("sync", &location.directory)));
    if let (Err(_), Some(marker)) = (&synced, marker) {
        // Whether it is gone nobody knows. As long as that is so, who comes next must find a clone that is not whole.
        marker.write(location)?;
    }
    synced
}

/// The clone's file systems: each tablespace may have one of its own.
fn directories(location: &CloneLocation) -> Result<Vec<OwnedFd>, CloneError> {
    // As root, what PostgreSQL's account may have laid there is not opened: a FIFO would be waited for.
    let opened = |directory: &Path| {
        let opened = Directory::open_for(directory, &location.user);
        opened.and_then(|opened| opened.as_fd().try_clone_to_owned()).map_err(CloneError::file("open", directory))
    };
    let above = |directory: &Path| directory.parent().map(opened).transpose();
    let data_directory = location.open()?;
    let links = location.directory.join(TABLESPACES_DIRECTORY);
    let listed = data_directory.open_directory(Path::new(TABLESPACES_DIRECTORY)).and_then(|links| links.names());
    let names = listed.map_err(CloneError::file("read", &links))?;
    let copied = |directory: &dyn AsFd, path: &Path| {
        directory.as_fd().try_clone_to_owned().map_err(CloneError::file("open", path))
    };
    let mut found = vec![copied(&data_directory, &location.directory)?];
    found.extend(above(&location.directory)?);
    let mut has_tablespaces = false;
    for name in names {
        let path = Path::new(TABLESPACES_DIRECTORY).join(&name);
        // Others lie in the data directory itself.
        if data_directory.read_link(&path).is_err() {
            continue;
        }
        match data_directory.open_directory(&path) {
            Ok(tablespace) => found.push(copied(&tablespace, &links.join(&name))?),
            // That of a tablespace that was dropped just now, or nothing of PostgreSQL's.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
            Err(error) => return Err(CloneError::file("open", links.join(&name))(error)),
        }
        has_tablespaces = true;
    }
    if has_tablespaces {
        found.push(opened(&location.tablespaces)?);
        found.extend(above(&location.tablespaces)?);
    }
    Ok(found)
}

/// All of a file system at once, names too: a call for each file would flush the disk's cache as often, while the
/// source waits for the same disk. It tells of any write that failed since it was last asked, as fsync(2) does of a
/// file's (Linux 5.8, syncfs(2)).
fn sync_file_system(directory: &OwnedFd, synced: &mut HashSet<u64>) -> std::io::Result<()> {
    if synced.insert(fstat(directory)?.st_dev) {
        syncfs(directory)?;
    }
    Ok(())
}
