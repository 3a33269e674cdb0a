//! The router of a cluster: started in this process, before the servers.

use std::net::SocketAddr;
use std::path::PathBuf;

use onecopy_router::config::RouterConfiguration;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, UnixStream};

use crate::HostError;

/// SEAM: stands in for the router until it exists; hands every connection to the leader.
#[derive(Debug)]
pub struct Front {
    address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

/// What the router tells about itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FrontStatus {
    /// Where clients connect.
    pub address: SocketAddr,
}

impl Front {
    pub async fn start(configuration: RouterConfiguration) -> Result<Front, HostError> {
        let listen = configuration.router.listen;
        let listener =
            TcpListener::bind(listen).await.map_err(|error| HostError::Router { listen, reason: error.to_string() })?;
        let address = listener.local_addr().map_err(HostError::file("look at", ""))?;
        let leader = PathBuf::from(&configuration.leader.host).join(format!(".s.PGSQL.{}", configuration.leader.port));
        let task = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let leader = leader.clone();
                tokio::spawn(async move {
                    if let Ok(mut server) = UnixStream::connect(leader).await {
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        Ok(Front { address, task })
    }

    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    pub async fn status(&self) -> FrontStatus {
        FrontStatus { address: self.address }
    }

    pub async fn metrics(&self) -> String {
        String::new()
    }

    pub async fn reload(&self, _configuration: RouterConfiguration) -> Result<(), HostError> {
        Ok(())
    }

    pub async fn shutdown(&self) {
        self.task.abort();
    }
}

impl crate::http::Observed for Front {
    async fn metrics(&self) -> String {
        Front::metrics(self).await
    }

    async fn status(&self) -> serde_json::Value {
        serde_json::to_value(Front::status(self).await).expect("a status is strings, numbers and lists")
    }

    async fn health(&self) -> Result<(), String> {
        Ok(())
    }
}
