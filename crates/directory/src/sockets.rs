//! The directory of a cluster's or a machine's Unix sockets, `run/`: it may be a link to a short directory elsewhere,
//! since the kernel bounds the path of a socket.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use onecopy_postgres::ServiceUser;

use crate::DirectoryError;

/// Longest path of a Unix socket. Source: unix(7), `sun_path` has 108 bytes, one of them the final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The longest name of a socket that comes into `run/`, with that of the lock file beside it.
const SOCKET_NAME_BYTES_MAX: usize = "/.s.PGSQL.65535.lock".len();

/// Sets a mode after creation: the one given there passes through the umask, which may keep the servers' account out.
///
/// # Errors
/// [`DirectoryError::File`].
pub fn set_mode(path: &Path, mode: u32) -> Result<(), DirectoryError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(DirectoryError::file("set the mode of", path))
}

/// Makes `run` in `root` for sockets. Returns the directory that they are in when it must lie elsewhere.
///
/// # Errors
/// [`DirectoryError::File`], [`DirectoryError::Postgres`], [`DirectoryError::SocketDirectoryForeign`].
pub fn make_run(root: &Path, user: &ServiceUser) -> Result<Option<PathBuf>, DirectoryError> {
    let run = root.join("run");
    let link = fs::read_link(&run).ok();
    if link.is_none() && run.as_os_str().len() + SOCKET_NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX {
        user.create_directory(&run)?;
        return Ok(None);
    }
    let short = link.clone().unwrap_or_else(|| short_directory(root));
    make_private(&short, user)?;
    if link.is_none() {
        symlink(&short, &run).map_err(DirectoryError::file("link", &run))?;
    }
    Ok(Some(short))
}

/// A directory for sockets that is short wherever the cluster lies; gone after a restart of the machine, and made
/// again.
pub fn short_directory(root: &Path) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    root.hash(&mut hasher);
    let base = if rustix::process::geteuid().is_root() { "/run" } else { "/tmp" };
    Path::new(base).join(format!("onecopy-{:016x}", hasher.finish()))
}

/// Removes an empty directory that root made and, killed in between, did not give to the servers' account.
///
/// # Errors
/// [`DirectoryError::File`].
pub fn remove_unowned(path: &Path, user: &ServiceUser) -> Result<(), DirectoryError> {
    let by_root = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == 0);
    if !by_root || user.user_id() == 0 || !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    match fs::remove_dir(path) {
        // Somebody's files are in it: whoever needs the directory says that it is not theirs.
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        other => other.map_err(DirectoryError::file("remove the empty", path)),
    }
}

/// Makes a directory where everybody may write, and refuses one that another account has put there.
fn make_private(path: &Path, user: &ServiceUser) -> Result<(), DirectoryError> {
    remove_unowned(path, user)?;
    user.create_directory(path)?;
    let metadata = fs::symlink_metadata(path).map_err(DirectoryError::file("look at", path))?;
    if !metadata.is_dir() || metadata.uid() != user.user_id() || metadata.mode() & 0o077 != 0 {
        return Err(DirectoryError::SocketDirectoryForeign { path: path.to_owned() });
    }
    Ok(())
}
