//! Asking a process for something: one JSON value a line each way.
//!
//! ```text
//! {"command":"snapshot","name":"monday"}
//! {"ok":{"name":"monday","epoch":4,"created_unix_ms":1795000000000}}
//! {"command":"delete-snapshot","name":"sunday"}
//! {"error":"there is no snapshot \"sunday\""}
//! ```

use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::net::UnixStream;

use crate::{JsonLines, socket};

/// Bytes of the longest answer: metrics and snapshots of a full disk are some hundred kilobytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// What is answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It is done; what was asked for.
    Ok(Value),
    /// It is not; why.
    Error(String),
}

impl Answer {
    /// That it is done; what was asked for.
    ///
    /// # Panics
    /// For a value that JSON cannot hold, such as a map whose keys are no strings.
    pub fn done(value: impl Serialize) -> Answer {
        Answer::Ok(serde_json::to_value(value).expect("answers are strings, numbers and lists"))
    }
}

impl<E: ToString> From<Result<Value, E>> for Answer {
    fn from(outcome: Result<Value, E>) -> Answer {
        outcome.map_or_else(|error| Answer::Error(error.to_string()), Answer::Ok)
    }
}

/// Why there is no answer, or no good one.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum AskError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Refused(String),
}

/// A connection to a process that answers. An answer that came too late is not read: ask by another one then.
#[derive(Debug)]
pub struct Client(JsonLines);

impl Client {
    /// Connects to the process that listens at `path`.
    ///
    /// # Errors
    /// Those of connect(2).
    pub async fn connect(path: &Path) -> io::Result<Client> {
        socket::connect(path).await.map(Client::new)
    }

    fn new(stream: UnixStream) -> Client {
        Client(JsonLines::new(stream, ANSWER_BYTES_MAX))
    }

    /// Asks, and waits for the answer so long at most, however slowly it comes.
    ///
    /// # Errors
    /// [`AskError`].
    pub async fn ask<T: DeserializeOwned>(
        &mut self,
        request: &impl Serialize,
        timeout: Duration,
    ) -> Result<T, AskError> {
        let exchange = async {
            self.0.send(request).await?;
            self.0.receive::<Answer>().await
        };
        let late = || io::Error::new(ErrorKind::TimedOut, format!("no answer within {} s", timeout.as_secs()));
        let answer = match tokio::time::timeout(timeout, exchange).await.map_err(|_| late())? {
            Err(error) if error.kind() == ErrorKind::InvalidData => return Err(AskError::Invalid(error.to_string())),
            answer => answer?.ok_or_else(|| AskError::Invalid("it ended before it answered".to_owned()))?,
        };
        let invalid = |error: serde_json::Error| AskError::Invalid(error.to_string());
        match answer.map_err(invalid)? {
            Answer::Ok(value) => serde_json::from_value(value).map_err(invalid),
            Answer::Error(reason) => Err(AskError::Refused(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    async fn asked(answer: &[u8]) -> Result<u32, AskError> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(answer).await.unwrap();
        Client::new(ours).ask(&"how many", SOON).await
    }

    #[tokio::test]
    async fn an_answer_is_a_value_or_a_reason() {
        assert_eq!(asked(b"{\"ok\":7}\n").await.unwrap(), 7);
        let refused = asked(b"{\"error\":\"none is left\"}\n").await.unwrap_err();
        assert!(matches!(&refused, AskError::Refused(why) if why == "none is left"), "{refused}");
        for answer in [&b"{\"ok\":-1}\n"[..], b"7\n", b"{}\n", b"\n"] {
            assert!(matches!(asked(answer).await, Err(AskError::Invalid(_))), "{answer:?}");
        }
    }

    #[tokio::test]
    async fn who_ends_without_an_answer_is_told_from_who_refuses() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ended = tokio::spawn(async move {
            let mut request = [0; 11];
            theirs.read_exact(&mut request).await.unwrap();
            assert_eq!(&request, b"\"how many\"\n");
            // In the middle of its answer.
            theirs.write_all(b"{\"ok\":").await.unwrap();
        });
        let error = Client::new(ours).ask::<u32>(&"how many", SOON).await.unwrap_err();
        assert!(matches!(&error, AskError::Invalid(why) if why.contains("ended")), "{error}");
        ended.await.unwrap();
    }

    /// Spec: A2
    #[tokio::test]
    async fn who_answers_one_byte_at_a_time_is_waited_for_no_longer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let slow = tokio::spawn(async move { while theirs.write_all(b"x").await.is_ok() {} });
        let error = Client::new(ours).ask::<u32>(&"how many", Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(&error, AskError::Io(late) if late.kind() == ErrorKind::TimedOut), "{error}");
        slow.await.unwrap();
        let (ours, _silent) = UnixStream::pair().unwrap();
        let error = Client::new(ours).ask::<u32>(&"how many", Duration::from_millis(5)).await.unwrap_err();
        assert!(matches!(&error, AskError::Io(late) if late.kind() == ErrorKind::TimedOut), "{error}");
    }
}
