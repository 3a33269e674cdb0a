//! Asking a daemon: one HTTP request over the Unix socket that it serves.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use onecopy_control::{http, socket};
use serde::Serialize;
use tokio::net::UnixStream;

use crate::change::{ReinitRequest, ScaleRequest};
use crate::directory::Directory;
use crate::{ClusterStatus, Event, HostError, Progress};

/// Largest answer that is read.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// How long the daemon may take; it asks every server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// What the daemon of `directory` says about its cluster.
///
/// # Errors
/// [`HostError::NotACluster`], [`HostError::NotRunning`] when nobody listens, [`HostError::InvalidReply`] else.
pub async fn status(directory: &Directory) -> Result<ClusterStatus, HostError> {
    let daemon = Daemon::OfCluster(directory.clone());
    let body = daemon.get("/status").await?;
    serde_json::from_slice(&body).map_err(|error| daemon.invalid_reply(error.to_string()))
}

/// The daemon's metrics in Prometheus' text form.
///
/// # Errors
/// As [`status`].
pub async fn metrics(directory: &Directory) -> Result<String, HostError> {
    let daemon = Daemon::OfCluster(directory.clone());
    String::from_utf8(daemon.get("/metrics").await?).map_err(|error| daemon.invalid_reply(error.to_string()))
}

/// Lets the daemon of `directory` have so many followers; returns their names when the new ones answer (or, so asked
/// for, are whole). The change goes on when this is dropped.
///
/// # Errors
/// [`HostError::NotACluster`], [`HostError::NotRunning`]; [`HostError::Daemon`] with the daemon's words;
/// [`HostError::InvalidReply`].
pub async fn scale(
    directory: &Directory,
    request: &ScaleRequest,
    progress: &dyn Progress,
) -> Result<Vec<String>, HostError> {
    followers(Daemon::OfCluster(directory.clone()).change("/scale", request, progress).await?)
}

/// Lets the daemon of `directory` make a follower anew.
///
/// # Errors
/// As [`scale`].
pub async fn reinit(
    directory: &Directory,
    request: &ReinitRequest,
    progress: &dyn Progress,
) -> Result<Vec<String>, HostError> {
    followers(Daemon::OfCluster(directory.clone()).change("/reinit", request, progress).await?)
}

/// The followers that a change's last event names.
fn followers(last: Event) -> Result<Vec<String>, HostError> {
    match last {
        Event::Done { followers } => Ok(followers),
        other => Err(HostError::Daemon(format!("the daemon ended with {other:?}; is it of another version?"))),
    }
}

/// A daemon that serves a Unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Daemon {
    /// That of the cluster in a directory.
    OfCluster(Directory),
    /// One that looks after memory only; its socket.
    OfMemory(PathBuf),
}

impl Daemon {
    /// Asks for one page.
    pub(crate) async fn get(&self, path: &str) -> Result<Vec<u8>, HostError> {
        let stream = self.connect().await?;
        let exchange = async {
            let response = http::request(stream, ("GET", path), None).await?;
            Ok::<_, io::Error>((response.status, response.body(ANSWER_BYTES_MAX).await?))
        };
        let late = || self.invalid_reply(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()));
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await.map_err(|_| late())?;
        match answer.map_err(|error| self.invalid_reply(error.to_string()))? {
            (200, body) => Ok(body),
            (status, body) => {
                Err(self.invalid_reply(format!("status {status}: {}", String::from_utf8_lossy(&body).trim())))
            }
        }
    }

    /// Asks for work that tells events; returns the last one, which is no failure.
    pub(crate) async fn change(
        &self,
        path: &str,
        request: &impl Serialize,
        progress: &dyn Progress,
    ) -> Result<Event, HostError> {
        let stream = self.connect().await?;
        let invalid_reply = |reason: String| self.invalid_reply(reason);
        let body = serde_json::to_string(request).expect("requests are strings and numbers");
        let response = http::request(stream, ("POST", path), Some(&body)).await;
        let ended = || invalid_reply("it ended in the middle; the change may go on, see `onecopy status`".to_owned());
        let mut response = response.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ended(),
            _ => invalid_reply(error.to_string()),
        })?;
        if response.status != 200 {
            let message = response.body(ANSWER_BYTES_MAX).await.map_err(|error| invalid_reply(error.to_string()))?;
            return Err(HostError::Daemon(String::from_utf8_lossy(&message).trim().to_owned()));
        }
        loop {
            let line = response.line().await.map_err(|error| invalid_reply(error.to_string()))?;
            let line = line.ok_or_else(ended)?;
            let event = serde_json::from_slice(&line)
                .map_err(|error| invalid_reply(format!("{error} in {:?}", String::from_utf8_lossy(&line))))?;
            match event {
                Event::Failed { message } => return Err(HostError::Daemon(message)),
                event if event.is_last() => return Ok(event),
                event => progress.report(event),
            }
        }
    }

    async fn connect(&self) -> Result<UnixStream, HostError> {
        let (socket, nobody) = match self {
            Daemon::OfCluster(directory) => {
                directory.state()?;
                let nobody = HostError::NotRunning { directory: directory.root().to_owned() };
                (directory.daemon_socket(), nobody)
            }
            Daemon::OfMemory(socket) => (socket.clone(), HostError::NoMemoryAgent { socket: socket.clone() }),
        };
        socket::connect_to_own(&socket).await.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => HostError::StrangeDaemon { socket },
            _ => nobody,
        })
    }

    pub(crate) fn invalid_reply(&self, reason: String) -> HostError {
        match self {
            Daemon::OfCluster(directory) => HostError::InvalidReply { directory: directory.root().to_owned(), reason },
            Daemon::OfMemory(socket) => HostError::InvalidAgentReply { socket: socket.clone(), reason },
        }
    }
}

/// Whether the daemon of `directory` is ready, and believed.
///
/// # Errors
/// [`HostError::NotACluster`], [`HostError::NotRunning`], [`HostError::StrangeDaemon`].
pub async fn reach(directory: &Directory) -> Result<(), HostError> {
    Daemon::OfCluster(directory.clone()).connect().await.map(drop)
}
