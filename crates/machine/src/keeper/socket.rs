//! The keeper's socket. It lies beside the keeper's lock, where only the keeper's account writes: in `run/` the account
//! of QEMU could put another one in its place, and would be asked and believed. The directory may be deeper than a
//! socket's name can say; it is reached through a descriptor of it (proc_pid_fd(5)).

use std::fs::remove_file;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags};
use tokio::net::{UnixListener, UnixStream};

use crate::MachineHome;

const NAME: &str = "keeper.sock";

/// The socket's name for the kernel, which is good as long as the descriptor is open.
fn short_name(home: &MachineHome) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(home.root(), flags, Mode::empty())?;
    let name = PathBuf::from(format!("/proc/self/fd/{}/{NAME}", directory.as_raw_fd()));
    Ok((directory, name))
}

/// Listens, in the place of a keeper that has died.
pub(super) fn listen(home: &MachineHome) -> io::Result<UnixListener> {
    remove(home)?;
    let (_directory, name) = short_name(home)?;
    UnixListener::bind(name)
}

/// Nobody can connect any more.
pub(super) fn remove(home: &MachineHome) -> io::Result<()> {
    match remove_file(home.keeper_socket()) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Connects to the keeper of a machine.
pub(crate) async fn connect(home: &MachineHome) -> io::Result<UnixStream> {
    let (_directory, name) = short_name(home)?;
    UnixStream::connect(name).await
}

/// Whether the caller may ask: root and the keeper's own account, whatever the socket's mode lets in.
pub(super) fn is_welcome(stream: &UnixStream) -> bool {
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
        drop(listen(&home).unwrap());
        // What a dead one has left is replaced.
        let listener = listen(&home).unwrap();
        assert_eq!(home.keeper_socket(), root.join(NAME));
        let (connected, accepted) = tokio::join!(connect(&home), listener.accept());
        assert!(is_welcome(&accepted.unwrap().0));
        drop(connected.unwrap());
        remove(&home).unwrap();
        remove(&home).unwrap();
        connect(&home).await.unwrap_err();
    }
}
