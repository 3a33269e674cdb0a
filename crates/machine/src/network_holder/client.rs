//! Asking a machine's network holder.

use std::time::Duration;

use onecopy_control::Client;
use serde::de::DeserializeOwned;

use super::protocol::Request;
use crate::MachineHome;

/// How long an answer may take: nothing that is asked waits for anybody.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// A connection to a machine's network holder, for one question.
pub struct NetworkClient(Client);

impl NetworkClient {
    /// Connects to the network holder of a machine.
    ///
    /// # Errors
    /// Nobody listens there.
    pub async fn connect(home: &MachineHome) -> Result<NetworkClient, String> {
        let connected = Client::connect(&home.network_socket()).await;
        connected.map(NetworkClient).map_err(|error| format!("its network holder does not listen: {error}"))
    }

    /// Asks.
    ///
    /// # Errors
    /// The holder refuses, is gone, takes too long, or answers something else.
    pub async fn ask<T: DeserializeOwned>(mut self, request: Request) -> Result<T, String> {
        self.0.ask(&request, ANSWER_TIMEOUT).await.map_err(|error| error.to_string())
    }
}
