//! Sockets that nobody but their own account reaches.

use std::io;
use std::path::Path;

use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;

/// Who connects while so many wait is told to try again.
const WAITING_MAX: i32 = 128;

/// Listens at a path that is free.
///
/// The socket has its mode before it has its name: the umask may let everybody in, and a mode that is set by the name
/// would be set on a link that others have put there. Source: Linux, `net/unix/af_unix.c`, `unix_bind_bsd`.
///
/// # Errors
/// Those of socket(2), bind(2) and listen(2).
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, WAITING_MAX)?;
    UnixListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::process::umask;

    use super::*;

    /// Spec: C2, C4
    #[tokio::test]
    async fn c36_nobody_else_reaches_a_daemon_whatever_the_umask_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("onecopy.sock");
        let before = umask(Mode::empty());
        let listener = listen(&path);
        umask(before);
        let listener = listener.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let (connected, accepted) = tokio::join!(tokio::net::UnixStream::connect(&path), listener.accept());
        connected.unwrap();
        accepted.unwrap();
    }
}
