//! What became of an answer.

use bytes::{Bytes, BytesMut};

use crate::wire::{ChannelError, ErrorFields};

/// How an answer ended.
#[derive(Debug, Default)]
pub struct Relayed {
    /// What the server said of the transaction: `I`, `T`, `E`; 0 when no `ReadyForQuery` was due.
    pub status: u8,
    /// The client's statement failed with this; the message is in the client's output.
    pub error: Option<ErrorFields>,
    /// A statement of the router's own failed with this.
    pub own_error: Option<ErrorFields>,
    /// Bodies of the rows of the router's own queries.
    pub own_rows: Vec<Bytes>,
    /// Tag of the last command of the router's own.
    pub own_tag: Bytes,
}

impl Relayed {
    /// Whether no statement has failed.
    pub fn has_succeeded(&self) -> bool {
        self.error.is_none() && self.own_error.is_none()
    }
}

/// Why an answer did not end.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The server is lost.
    #[error("lost the connection to the server: {0}")]
    Server(ChannelError),
    /// The server does not answer.
    #[error("the server does not answer")]
    Unresponsive,
    /// The router has given the server up.
    #[error("the server was removed from the router")]
    Removed,
    /// The server reads SQL by other rules than the router from now on; what has set them there is not known.
    #[error("{name} = {value} is not supported: the router could misread SQL")]
    Unreadable {
        /// The setting that it reports.
        name: String,
        /// Its value.
        value: String,
    },
    /// The client is lost.
    #[error("lost the client: {0}")]
    Client(ChannelError),
}

/// What became of an answer.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub result: Result<Relayed, RelayError>,
    /// Something of it has reached the client, so it cannot be taken back.
    pub went_out: bool,
    /// Where the answer, or what of it has not gone out, begins in the client's output.
    pub start: usize,
    /// What the server said before the connection broke.
    pub final_error: Option<ErrorFields>,
    /// How many of the client's `Parse` messages have succeeded, of those that went to the server.
    pub parsed: usize,
    /// COPY has taken the client's `Sync`.
    pub took_sync: bool,
    /// The client was asked for the data of COPY.
    pub began_copy: bool,
    /// What the server told of notifications, for the client: not in its output, which may be taken back.
    pub notifications: BytesMut,
}

/// The first value of a `DataRow` body.
pub fn first_value(row: Option<&Bytes>) -> String {
    String::from_utf8_lossy(first_bytes(row)).into_owned()
}

/// The bytes of the first value of a `DataRow` body.
pub fn first_bytes(row: Option<&Bytes>) -> &[u8] {
    let value = row.and_then(|row| {
        let length = i32::from_be_bytes(row.get(2..6)?.try_into().ok()?);
        row.get(6..6 + usize::try_from(length).ok()?)
    });
    value.unwrap_or_default()
}
