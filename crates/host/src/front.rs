//! The router of a cluster: started in this process, before the servers.

use std::net::SocketAddr;

use onecopy_router::config::RouterConfiguration;
use onecopy_router::{Health, Router, RouterStatus};
use serde::{Deserialize, Serialize};

use crate::HostError;

/// A running router, as pages look at it.
pub struct Front(Router);

/// What the router tells about itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FrontStatus {
    /// Where clients connect.
    pub address: SocketAddr,
    /// What it does.
    #[serde(flatten)]
    pub router: RouterStatus,
}

impl Front {
    /// Starts the router.
    ///
    /// # Errors
    /// [`HostError::Router`] with the router's own reason.
    pub async fn start(configuration: RouterConfiguration) -> Result<Front, HostError> {
        let listen = configuration.router.listen;
        let router = Router::start(configuration).await;
        router.map(Front).map_err(|error| HostError::Router { listen, reason: error.to_string() })
    }

    /// Where clients connect.
    pub fn local_address(&self) -> SocketAddr {
        self.0.local_address()
    }

    /// What the router does now.
    pub async fn status(&self) -> FrontStatus {
        FrontStatus { address: self.0.local_address(), router: self.0.status() }
    }

    /// Its metrics in Prometheus' text form.
    pub async fn metrics(&self) -> String {
        self.0.metrics()
    }

    /// Takes a changed configuration over, as far as it can change while the router runs.
    ///
    /// # Errors
    /// None today; a changed address or server is left alone until the next start.
    pub async fn reload(&self, configuration: RouterConfiguration) -> Result<(), HostError> {
        self.0.reload(&configuration);
        Ok(())
    }

    /// Ends all sessions and stops listening.
    pub async fn shutdown(&self) {
        self.0.shutdown().await;
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
        match self.0.status().servers.first() {
            Some(leader) if leader.health != Health::Up => Err(format!("the leader {} does not answer", leader.name)),
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for Front {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Front").field("address", &self.0.local_address()).finish()
    }
}
