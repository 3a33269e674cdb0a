//! The control socket, also where its path is too long for the kernel.
//!
//! `sockaddr_un` holds 107 bytes (unix(7)). A directory may be deeper, so it is opened, and the socket is named through
//! `/proc/self/fd`.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Listens at `path`, for this account only, in the place of a socket whose process is gone. Whatever else lies there
/// stays, and is an error: the path is a person's word. The caller holds the lock that keeps others away.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let (directory, short) = shorten(path)?;
    let is_socket = std::fs::symlink_metadata(&short).is_ok_and(|there| there.file_type().is_socket());
    if is_socket && UnixStream::connect(&short).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
        std::fs::remove_file(&short)?;
    }
    let listener = UnixListener::bind(&short)?;
    std::fs::set_permissions(&short, Permissions::from_mode(0o600))?;
    drop(directory);
    Ok(listener)
}

/// Connects to the socket at `path`.
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let (directory, short) = shorten(path)?;
    let stream = UnixStream::connect(short);
    drop(directory);
    stream
}

/// A short path to the same place, good while the directory is open.
fn shorten(path: &Path) -> io::Result<(File, PathBuf)> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = File::from(rustix::fs::open(parent, flags, Mode::empty())?);
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    Ok((directory, short))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_too_long_for_the_kernel_is_reached() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("d".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        let path = deep.join("control.sock");
        let listener = listen(&path).unwrap();
        let _stream = connect(&path).unwrap();
        listener.accept().unwrap();
    }

    #[test]
    fn only_the_socket_of_a_process_that_is_gone_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let living = listen(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(living);
        listen(&path).unwrap();
        let file = directory.path().join("data");
        std::fs::write(&file, "precious").unwrap();
        assert_eq!(listen(&file).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(listen(&link).is_err() && link.is_symlink() && file.exists());
    }
}
