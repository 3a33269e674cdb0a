//! Files of ours, where nobody else can lay a link: written whole, given away, removed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use onecopy_directory::set_mode;
use onecopy_postgres::ServiceUser;

use super::MachineError;

/// Writes a file of our own, whole or not at all, durable when it returns but for its name.
pub(crate) fn write_own_file(path: &Path, content: &[u8], mode: u32) -> Result<(), MachineError> {
    let unfinished = path.with_extension("unfinished");
    absent_is_fine(fs::remove_file(&unfinished)).map_err(MachineError::file("remove", &unfinished))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&unfinished);
    let mut file = file.map_err(MachineError::file("create", &unfinished))?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(MachineError::file("write", &unfinished))?;
    fs::rename(&unfinished, path).map_err(MachineError::file("replace", path))
}

/// A directory of ours, of this mode whatever the mask is; one that is there gets it, too.
pub(crate) fn make_own_directory(path: &Path, mode: u32) -> Result<(), MachineError> {
    make_directory(path, mode)?;
    Ok(set_mode(path, mode)?)
}

/// A directory that may be there already.
pub(crate) fn make_directory(path: &Path, mode: u32) -> Result<(), MachineError> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(MachineError::file("create", path)(error)),
        _ => Ok(()),
    }
}

/// Gives a directory and all in it to the account that machines run as; the directory last, so that nobody changes what
/// is in it meanwhile.
pub(crate) fn give_all(path: &Path, user: &ServiceUser) -> Result<(), MachineError> {
    let metadata = fs::symlink_metadata(path).map_err(MachineError::file("look at", path))?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).map_err(MachineError::file("read", path))? {
            give_all(&entry.map_err(MachineError::file("read", path))?.path(), user)?;
        }
    }
    Ok(user.own(path)?)
}

/// Removes a directory, also where somebody who looks for what is in it makes a lock anew meanwhile: without what says
/// which machine it was nobody would remove the rest.
pub(crate) fn remove_whole(path: &Path) -> std::io::Result<()> {
    const TRIES: u32 = 100;
    for _ in 1..TRIES {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
            removed => return absent_is_fine(removed),
        }
    }
    absent_is_fine(fs::remove_dir_all(path))
}

/// Removes a file, a link, or a directory with all in it, which need not be there any more.
pub(crate) fn remove_any(path: &Path) -> Result<(), MachineError> {
    let is_directory = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir());
    let removed = if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    absent_is_fine(removed).map_err(MachineError::file("remove", path))
}

/// What was to be removed need not be there.
pub(crate) fn absent_is_fine(outcome: std::io::Result<()>) -> std::io::Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes the names in a directory durable.
pub(crate) fn synchronize(directory: &Path) -> Result<(), MachineError> {
    let synchronized = File::open(directory).and_then(|directory| directory.sync_all());
    synchronized.map_err(MachineError::file("synchronize", directory))
}
