//! Small files of a cluster that are there whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::DirectoryError;

/// Replaces the file as a whole: a reader, and whoever comes after a kill, sees the old or the new one. One that is new
/// has this mode.
///
/// # Errors
/// [`DirectoryError::File`] when it cannot be written.
pub fn write(path: &Path, mode: u32, content: &[u8]) -> Result<(), DirectoryError> {
    let unfinished = path.with_extension("unfinished");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&unfinished)
        .map_err(DirectoryError::file("create", &unfinished))?;
    crate::steps::done(&unfinished);
    file.write_all(content).map_err(DirectoryError::file("write", &unfinished))?;
    crate::steps::done(&unfinished);
    // Before it gets its name: a role with a password that nobody knows any more would be worse than a slow first
    // start.
    file.sync_all().map_err(DirectoryError::file("sync", &unfinished))?;
    fs::rename(&unfinished, path).map_err(DirectoryError::file("rename to", path))?;
    crate::steps::done(path);
    // The name, too: after a power cut a leader that was made would be taken for one that was not, and made anew.
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory).and_then(|opened| opened.sync_all()).map_err(DirectoryError::file("sync", directory))
}
