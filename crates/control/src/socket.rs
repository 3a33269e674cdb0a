//! Unix sockets that nobody but their own account and root reaches, also where their path is too long for the kernel.
//!
//! `sockaddr_un` holds 107 bytes (unix(7)). A directory may be deeper, so it is opened, and the socket is named through
//! `/proc/self/fd` (proc_pid_fd(5)).

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};

/// Who connects while so many wait is told to try again; the kernel has a bound of its own (`net.core.somaxconn`).
const WAITING_MAX: i32 = 4096;

/// Listens at `path`, in the place of a socket whose process is gone. Whatever else lies there stays, and is an error:
/// the path may be a person's word. The caller holds the lock that keeps others away.
///
/// The socket has its mode before it has its name: the umask may let everybody in, and a mode that is set by the name
/// would be set on a link that others have put there. Source: Linux, `net/unix/af_unix.c`, `unix_bind_bsd`.
///
/// # Errors
/// Those of socket(2), bind(2) and listen(2); `AddrInUse` where something lies there.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let (_directory, short) = shorten(path)?;
    let is_socket = fs::symlink_metadata(&short).is_ok_and(|there| there.file_type().is_socket());
    let connected = || std::os::unix::net::UnixStream::connect(&short);
    if is_socket && connected().is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
        fs::remove_file(&short)?;
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(&short)?)?;
    rustix::net::listen(&socket, WAITING_MAX)?;
    UnixListener::from_std(socket.into())
}

/// Connects to the socket at `path`.
///
/// # Errors
/// Those of connect(2).
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (_directory, short) = shorten(path)?;
    UnixStream::connect(short).await
}

/// The same, where only a process of root or of this one's own account is believed: who owns the directory can listen
/// there, too.
///
/// # Errors
/// As [`connect`]; `PermissionDenied` where another account listens.
pub async fn connect_to_own(path: &Path) -> io::Result<UnixStream> {
    let stream = connect(path).await?;
    if is_own(&stream) { Ok(stream) } else { Err(ErrorKind::PermissionDenied.into()) }
}

/// Takes the socket away, where there is one: nobody can connect any more.
///
/// # Errors
/// Those of unlink(2).
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether the other end is of root or of this process's own account, whatever the socket's mode lets in.
pub fn is_own(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
}

/// A short path to the same place, good while the directory is open.
fn shorten(path: &Path) -> io::Result<(File, PathBuf)> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or(ErrorKind::InvalidInput)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = File::from(rustix::fs::open(parent, flags, Mode::empty())?);
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    Ok((directory, short))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::process::{Uid, umask};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    /// Spec: C2, C4
    #[tokio::test]
    async fn c36_nobody_else_reaches_a_process_whatever_the_umask_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let before = umask(Mode::empty());
        let listener = listen(&path);
        umask(before);
        let listener = listener.unwrap();
        assert_eq!(mode(&path), 0o600);
        let (connected, accepted) = tokio::join!(connect(&path), listener.accept());
        connected.unwrap();
        assert!(is_own(&accepted.unwrap().0));
    }

    /// Whoever owns a directory can put a socket of his own in the place of root's.
    ///
    /// Spec: C4
    #[tokio::test]
    async fn nobody_is_believed_who_listens_as_another_account() {
        let another = Uid::from_raw(65534);
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "nobody_is_believed_who_listens_as_another_account",
                "only root can become another account",
            );
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(directory.path(), Some(another.as_raw()), None).unwrap();
        let path = directory.path().join("control.sock");
        // This thread alone becomes another account.
        let listening = std::thread::spawn({
            let path = path.clone();
            move || {
                rustix::thread::set_thread_res_uid(another, another, another).unwrap();
                std::os::unix::net::UnixListener::bind(path).unwrap()
            }
        });
        let listener = listening.join().unwrap();
        connect(&path).await.unwrap();
        assert_eq!(connect_to_own(&path).await.unwrap_err().kind(), ErrorKind::PermissionDenied);
        drop(listener);
        fs::remove_file(&path).unwrap();
        let _own = listen(&path).unwrap();
        connect_to_own(&path).await.unwrap();
    }

    #[tokio::test]
    async fn a_path_too_long_for_the_kernel_is_reached() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("d".repeat(120));
        fs::create_dir(&deep).unwrap();
        let path = deep.join("control.sock");
        connect(&path).await.unwrap_err();
        let listener = listen(&path).unwrap();
        let (connected, accepted) = tokio::join!(connect(&path), listener.accept());
        drop((connected.unwrap(), accepted.unwrap()));
        remove(&path).unwrap();
        remove(&path).unwrap();
        connect(&path).await.unwrap_err();
    }

    #[tokio::test]
    async fn only_the_socket_of_a_process_that_is_gone_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let living = listen(&path).unwrap();
        assert_eq!(listen(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(living);
        listen(&path).unwrap();
        let file = directory.path().join("data");
        fs::write(&file, "precious").unwrap();
        assert_eq!(listen(&file).unwrap_err().kind(), ErrorKind::AddrInUse);
        assert_eq!(fs::read(&file).unwrap(), b"precious");
        let link = directory.path().join("link");
        symlink(&file, &link).unwrap();
        assert!(listen(&link).is_err() && link.is_symlink() && file.exists());
    }
}
