//! Asking a disk's server.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use onecopy_control::{AskError, Client};
use onecopy_disk::{Disk, Snapshot};
use serde::de::DeserializeOwned;
use tokio::runtime::Runtime;

use crate::protocol::{Request, ServedDisk};
use crate::{CONTROL_SOCKET, DiskServerError};

/// How long an answer may take: closing a disk writes all that is not on its files yet.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// A connection to a disk's server, for those who may block: not in a future.
pub struct DiskClient {
    directory: PathBuf,
    runtime: Runtime,
    client: Client,
}

impl DiskClient {
    /// Connects to the server of the disk in this directory, behind its usual control socket.
    ///
    /// # Errors
    /// [`DiskServerError::NotServed`] when nobody listens there; [`DiskServerError::Disk`] when there is no disk.
    pub fn connect(directory: &Path) -> Result<DiskClient, DiskServerError> {
        DiskClient::connect_to(directory, &directory.join(CONTROL_SOCKET)).or_else(|error| match error {
            // Of what is no disk it would be the wrong advice to serve it.
            DiskServerError::NotServed { .. } => {
                Disk::geometry(directory).map_err(DiskServerError::disk(directory))?;
                Err(error)
            }
            _ => Err(error),
        })
    }

    /// The same, behind another socket.
    ///
    /// # Errors
    /// [`DiskServerError::NotServed`] when nobody listens there.
    pub fn connect_to(directory: &Path, control: &Path) -> Result<DiskClient, DiskServerError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(DiskServerError::io("make a runtime for", control))?;
        let client = runtime.block_on(Client::connect(control)).map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::ConnectionRefused => {
                DiskServerError::NotServed { directory: directory.to_owned() }
            }
            _ => DiskServerError::io("connect to", control)(error),
        })?;
        Ok(DiskClient { directory: directory.to_owned(), runtime, client })
    }

    /// Everything about the disk and its server.
    ///
    /// # Errors
    /// As [`DiskClient::ask`].
    pub fn info(&mut self) -> Result<ServedDisk, DiskServerError> {
        self.ask(&Request::Info)
    }

    /// Makes a durable snapshot.
    ///
    /// # Errors
    /// As [`DiskClient::ask`].
    pub fn snapshot(&mut self, name: &str) -> Result<Snapshot, DiskServerError> {
        self.ask(&Request::Snapshot { name: name.to_owned() })
    }

    /// Closes the disk and ends the server; returns when it has let the disk go.
    ///
    /// # Errors
    /// As [`DiskClient::ask`].
    pub fn stop(&mut self) -> Result<(), DiskServerError> {
        self.ask(&Request::Stop)
    }

    /// Asks one thing.
    ///
    /// # Errors
    /// The server refuses, is gone, takes too long, or answers something else.
    pub fn ask<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T, DiskServerError> {
        self.ask_within(request, ANSWER_TIMEOUT)
    }

    /// The same, with the longest time that the answer may take.
    ///
    /// # Errors
    /// As [`DiskClient::ask`].
    pub fn ask_within<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        longest: Duration,
    ) -> Result<T, DiskServerError> {
        self.runtime.block_on(self.client.ask(request, longest)).map_err(|error| match error {
            AskError::Refused(reason) => DiskServerError::Refused(reason),
            AskError::Invalid(reason) => DiskServerError::InvalidReply { directory: self.directory.clone(), reason },
            AskError::Io(error) => DiskServerError::io("ask the server of", &self.directory)(error),
        })
    }
}
