//! Asking a machine's memory server.

use std::time::{Duration, Instant};

use onecopy_control::Client;
use serde::de::DeserializeOwned;

use super::protocol::Request;
use crate::MachineHome;

/// How long an answer may take that costs no more than a look.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// A connection to a machine's memory server, for one question: an answer that comes too late is read by nobody, and
/// who does something else for a while is not hung up on.
pub struct MemoryClient(Client);

impl MemoryClient {
    /// Connects to the memory server of a machine.
    ///
    /// # Errors
    /// Nobody listens there.
    pub async fn connect(home: &MachineHome) -> Result<MemoryClient, String> {
        Client::connect(&home.memory_socket()).await.map(MemoryClient).map_err(|error| error.to_string())
    }

    /// Asks what is answered soon.
    ///
    /// # Errors
    /// The server refuses, is gone, takes too long, or answers something else.
    pub async fn ask<T: DeserializeOwned>(self, request: Request) -> Result<T, String> {
        self.ask_until(request, Instant::now() + ANSWER_TIMEOUT).await
    }

    /// Asks what may take as long as its pages take.
    ///
    /// # Errors
    /// As [`MemoryClient::ask`]; too long is later than `deadline`.
    pub async fn ask_until<T: DeserializeOwned>(mut self, request: Request, deadline: Instant) -> Result<T, String> {
        let timeout = deadline.saturating_duration_since(Instant::now());
        self.0.ask(&request, timeout).await.map_err(|error| error.to_string())
    }
}
