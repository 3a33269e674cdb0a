//! The directory of a machine while it runs: where its sockets, logs and its process id are.

use std::path::{Path, PathBuf};

use crate::HypervisorError;

/// `sockaddr_un.sun_path` holds this many bytes with the zero at its end (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The files of one running machine, all in one directory of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineDirectory {
    path: PathBuf,
}

impl MachineDirectory {
    /// The files in `path`, made absolute.
    ///
    /// # Errors
    /// [`HypervisorError::Configuration`] when sockets in it would have too long names; [`HypervisorError::File`] when
    /// there is no current directory.
    pub fn new(path: impl AsRef<Path>) -> Result<MachineDirectory, HypervisorError> {
        let path = std::path::absolute(&path).map_err(HypervisorError::file("resolve", &path))?;
        let directory = MachineDirectory { path };
        for socket in directory.sockets() {
            check_socket_path(&socket).map_err(|reason| HypervisorError::Configuration {
                name: directory.path.display().to_string(),
                reason,
            })?;
        }
        Ok(directory)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The monitor's socket.
    pub fn monitor(&self) -> PathBuf {
        self.path.join("qmp.sock")
    }

    /// The socket that leads to the guest's agent.
    pub fn agent(&self) -> PathBuf {
        self.path.join("agent.sock")
    }

    /// The socket of the guest's serial console, for a person.
    pub fn console_socket(&self) -> PathBuf {
        self.path.join("console.sock")
    }

    /// What the guest has written to its serial console.
    pub fn console_log(&self) -> PathBuf {
        self.path.join("console.log")
    }

    /// What QEMU itself has said.
    pub fn qemu_log(&self) -> PathBuf {
        self.path.join("qemu.log")
    }

    /// QEMU's process id. QEMU holds a lock on it while it lives, and removes it when it ends by itself.
    pub fn process_id_file(&self) -> PathBuf {
        self.path.join("qemu.pid")
    }

    fn sockets(&self) -> [PathBuf; 3] {
        [self.monitor(), self.agent(), self.console_socket()]
    }

    /// Removes what a machine that has ended left: sockets and process id. Logs stay.
    pub(crate) fn remove_leftovers(&self) -> Result<(), HypervisorError> {
        let [monitor, agent, console] = self.sockets();
        for path in [monitor, agent, console, self.process_id_file()] {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(HypervisorError::file("remove", path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// A Unix socket's path is short enough.
pub(crate) fn check_socket_path(path: &Path) -> Result<(), String> {
    match path.as_os_str().len() {
        0..=SOCKET_PATH_BYTES_MAX => Ok(()),
        length => Err(format!(
            "the socket {} has a name of {length} bytes, possible are {SOCKET_PATH_BYTES_MAX}; \
             choose a shorter directory",
            path.display()
        )),
    }
}
