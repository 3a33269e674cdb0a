//! An agent without a cluster, for servers that others have started.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onecopy_control::socket as sockets;
use tokio::net::{TcpListener, UnixListener};

use super::{MemoryConfiguration, MemoryService, ServersMemory, metrics, routes};
use crate::HostError;
use crate::http::{Observed, Page};

/// Looks after the servers of `[[memory.instance]]` until it is ended; they keep what they have.
pub struct MemoryAgent {
    service: Arc<MemoryService>,
    pages: Vec<Page>,
    socket: PathBuf,
}

impl MemoryAgent {
    /// Begins, and listens on `socket` for whoever may write there: the account that runs this and root.
    ///
    /// # Errors
    /// [`HostError::MemoryAgentRuns`], [`HostError::File`] for the socket, [`HostError::Memory`] and
    /// [`HostError::InstanceUnreachable`] for the servers.
    pub async fn start(configuration: MemoryConfiguration, socket: &Path) -> Result<MemoryAgent, HostError> {
        let listener = listen(socket).await?;
        let service = MemoryService::start(Arc::new(ServersMemory::of_others(configuration)?))?;
        let page =
            Page::serve_with(listener, Arc::new(Observation(Arc::clone(&service))), routes(Arc::clone(&service)));
        Ok(MemoryAgent { service, pages: vec![page], socket: socket.to_owned() })
    }

    /// Serves what is known of the servers, and nothing that changes them.
    pub fn serve_metrics(&mut self, listener: TcpListener) {
        self.pages.push(Page::serve(listener, Arc::new(Observation(Arc::clone(&self.service)))));
    }

    /// Ends it.
    pub async fn end(self) {
        let MemoryAgent { service, pages, socket } = self;
        drop(pages);
        let _ = fs::remove_file(socket);
        service.end().await;
    }
}

/// Takes the place of a socket that nobody serves any more.
async fn listen(socket: &Path) -> Result<UnixListener, HostError> {
    if sockets::connect(socket).await.is_ok() {
        return Err(HostError::MemoryAgentRuns { socket: socket.to_owned() });
    }
    if let Some(directory) = socket.parent().filter(|directory| !directory.exists()) {
        let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(directory);
        made.map_err(HostError::file("create", directory))?;
    }
    sockets::listen(socket).map_err(HostError::file("listen on", socket))
}

/// The pages of an agent without a cluster.
struct Observation(Arc<MemoryService>);

impl Observed for Observation {
    async fn metrics(&self) -> String {
        metrics(&self.0.status().agent)
    }

    async fn status(&self) -> serde_json::Value {
        serde_json::to_value(self.0.status()).expect("a status is strings, numbers and lists")
    }

    async fn health(&self) -> Result<(), String> {
        let status = self.0.status().agent;
        let unresponsive: Vec<&str> = status
            .instances
            .iter()
            .filter(|instance| instance.failure.is_some())
            .map(|instance| instance.instance.as_str())
            .collect();
        match unresponsive.is_empty() {
            true => Ok(()),
            false => Err(format!("no answer from {}", unresponsive.join(", "))),
        }
    }
}
