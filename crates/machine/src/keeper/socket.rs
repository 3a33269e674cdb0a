//! The keeper's socket, and that of the machine's memory server. They lie beside the keeper's lock, where
//! only the keeper's account writes: in `run/` the account of QEMU could put another one in its place, and would be
//! asked and believed. The directory may be deeper than a socket's name can say; it is reached through a descriptor of
//! it (proc_pid_fd(5)).

use std::ffi::OsStr;
use std::fs::remove_file;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use tokio::net::{UnixListener, UnixStream};

use crate::MachineHome;

/// The socket's name for the kernel, which is good as long as the descriptor is open.
fn short_name(home: &MachineHome, name: &OsStr) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(home.root(), flags, Mode::empty())?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name);
    Ok((directory, short))
}

/// Listens at `socket`, which lies in the machine's directory, in the place of a process that has died.
pub(crate) fn listen(home: &MachineHome, socket: &Path) -> io::Result<UnixListener> {
    remove(socket)?;
    let (_directory, name) = short_name(home, socket.file_name().unwrap_or_default())?;
    UnixListener::bind(name)
}

/// Nobody can connect any more.
pub(crate) fn remove(socket: &Path) -> io::Result<()> {
    match remove_file(socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Connects to the keeper of a machine.
pub(crate) async fn connect(home: &MachineHome) -> io::Result<UnixStream> {
    connect_to(home, &home.keeper_socket()).await
}

/// Connects to a socket in the machine's directory.
pub(crate) async fn connect_to(home: &MachineHome, socket: &Path) -> io::Result<UnixStream> {
    let (_directory, name) = short_name(home, socket.file_name().unwrap_or_default())?;
    UnixStream::connect(name).await
}

/// Whether the caller may ask: root and the keeper's own account, whatever the socket's mode lets in.
pub(crate) fn is_welcome(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_keeper_is_reached_however_deep_its_machine_lies() {
        let temporary = tempfile::tempdir().unwrap();
        let root = temporary.path().join("deep".repeat(50)).join("web");
        std::fs::create_dir_all(&root).unwrap();
        let home = MachineHome::at(&root).unwrap();
        connect(&home).await.unwrap_err();
        let socket = home.keeper_socket();
        drop(listen(&home, &socket).unwrap());
        // What a dead one has left is replaced.
        let listener = listen(&home, &socket).unwrap();
        assert_eq!(socket, root.join("keeper.sock"));
        let (connected, accepted) = tokio::join!(connect(&home), listener.accept());
        assert!(is_welcome(&accepted.unwrap().0));
        drop(connected.unwrap());
        remove(&socket).unwrap();
        remove(&socket).unwrap();
        connect(&home).await.unwrap_err();
    }
}
