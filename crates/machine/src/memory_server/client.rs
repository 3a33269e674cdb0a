//! Asking a machine's memory server.

use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::protocol::{Answer, LINE_BYTES_MAX, Request};
use crate::MachineHome;
use crate::keeper::connect_to;

/// How long an answer may take that costs no more than a look.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// A connection to a machine's memory server, for one question: an answer that comes too late is read by nobody, and
/// who does something else for a while is not hung up on.
pub struct MemoryClient(BufReader<UnixStream>);

impl MemoryClient {
    /// Connects to the memory server of a machine.
    ///
    /// # Errors
    /// Nobody listens there.
    pub async fn connect(home: &MachineHome) -> Result<MemoryClient, String> {
        let stream = connect_to(home, &home.memory_socket()).await;
        stream.map(|stream| MemoryClient(BufReader::new(stream))).map_err(|error| error.to_string())
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
        let mut line = serde_json::to_vec(&request).expect("requests are words and numbers");
        line.push(b'\n');
        let mut answer = Vec::new();
        let begun = Instant::now();
        let asked = async {
            self.0.write_all(&line).await?;
            (&mut self.0).take(LINE_BYTES_MAX).read_until(b'\n', &mut answer).await
        };
        match tokio::time::timeout_at(deadline.into(), asked).await {
            Ok(answered) => answered.map_err(|error| error.to_string())?,
            Err(_) => return Err(format!("it has not answered within {} s", begun.elapsed().as_secs())),
        };
        if answer.is_empty() {
            return Err("the memory server has died before it answered".to_owned());
        }
        match serde_json::from_slice(&answer).map_err(|error| format!("{error} in its answer"))? {
            Answer::Ok(value) => serde_json::from_value(value).map_err(|error| format!("{error} in its answer")),
            Answer::Error(reason) => Err(reason),
        }
    }
}
