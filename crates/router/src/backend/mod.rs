//! A connection of the router to a server: made, logged in, asked, cancelled.

mod connect;
mod prepared;
mod process;
mod purpose;

use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};

pub(crate) use connect::parameter_status;
pub use connect::{Credentials, NOTICE_INTERVAL};
pub use prepared::PreparedStatements;
pub use process::ServerProcess;
pub use purpose::Purpose;

use crate::pool::Slot;
use crate::servers::{Connection, Server};
use crate::settings::Settings;
use crate::timeline::{SYSTEM_TIMELINE, SystemTimeline, Unfit};
use crate::wire::{Address, Channel, ChannelError, ErrorFields, Frame, Reply, Socket, SqlError, sqlstate};

/// Why a server did not do what the router asked.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// No connection.
    #[error("cannot connect to {server} at {address}: {source}")]
    Connect {
        /// The server's name.
        server: String,
        /// Where it should listen.
        address: Address,
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// The connection ended or broke.
    #[error("lost the connection to {server}: {source}")]
    Lost {
        /// The server's name.
        server: String,
        /// Why.
        source: ChannelError,
    },
    /// The server answered with an error.
    #[error("{server} answered {}: {} (SQLSTATE {})", fields.severity, fields.message, fields.code)]
    Sql {
        /// The server's name.
        server: String,
        /// What it said.
        fields: ErrorFields,
    },
    /// The log-in cannot go on.
    #[error("cannot log in to {server}: {reason}")]
    Login {
        /// The server's name.
        server: String,
        /// Why.
        reason: String,
    },
    /// The router was told to use it no more.
    #[error("{server} was removed from the router")]
    Removed {
        /// The server's name.
        server: String,
    },
    /// An earlier router's transactions may run there still.
    #[error("{server} is not used yet: what an earlier router has left running there must end first")]
    HeldBack {
        /// The server's name.
        server: String,
    },
    /// It is not what it was named as.
    #[error("{server} takes no part: {reason}")]
    Unfit {
        /// The server's name.
        server: String,
        /// Why.
        reason: Unfit,
    },
    /// No answer in time.
    #[error("{server} did not answer within {milliseconds} ms")]
    TimedOut {
        /// The server's name.
        server: String,
        /// How long was waited.
        milliseconds: u128,
    },
}

impl BackendError {
    /// What a client is told of it.
    pub fn to_sql(&self) -> SqlError {
        match self {
            BackendError::Sql { fields, .. } => SqlError::from(fields.clone()),
            BackendError::Connect { .. }
            | BackendError::TimedOut { .. }
            | BackendError::Removed { .. }
            | BackendError::HeldBack { .. }
            | BackendError::Unfit { .. } => SqlError::error(sqlstate::CANNOT_CONNECT_NOW, self.to_string())
                .hint("Try again; the router connects as soon as the server is back."),
            BackendError::Login { .. } => SqlError::error(sqlstate::INVALID_AUTHORIZATION, self.to_string()),
            BackendError::Lost { .. } => SqlError::error(sqlstate::ADMIN_SHUTDOWN, self.to_string()),
        }
    }
}

/// One row of text values.
pub type Row = Vec<Option<String>>;

/// A logged-in connection. Dropping it closes it; the server then rolls back what was open.
#[derive(Debug)]
pub struct Backend {
    /// The wire.
    pub channel: Channel,
    /// The server at its other end.
    pub server: Arc<Server>,
    /// [`Credentials::role`] of whose log-in it is.
    pub role: u32,
    /// The server process.
    pub process_id: u32,
    /// When that was started, microseconds since 1970 by the server's clock; asked of those that commit, 0 of others.
    started_us: i64,
    cancel_key: Arc<CancelKey>,
    /// What the server has reported of its settings, the newest value of each.
    pub parameters: Vec<(String, String)>,
    /// The session settings in force there.
    pub settings: Arc<Settings>,
    /// What it has planned under settings that are not these any more; it forgets that before its next use.
    pub stale_plans: bool,
    /// Statements prepared there.
    pub prepared: PreparedStatements,
    /// The epoch whose snapshot its open transaction has.
    pub epoch: Option<u64>,
    /// A transaction is open, or failed and not yet rolled back.
    pub in_transaction: bool,
    /// When it was last given back.
    pub idle_since: Instant,
    /// [`Server::endings`] when it was last known to be there.
    pub endings: u64,
    /// For whose session it was noted last.
    pub session: u32,
    /// Counts it against its pool's bound until it is dropped.
    pub slot: Option<Slot>,
    /// Counts it as one of the server's until it is dropped.
    _connection: Connection,
}

impl Backend {
    /// Whether the connection is still there and idle; reads nothing that a statement is answered with.
    pub fn is_alive(&mut self) -> bool {
        self.channel.peek().is_ok() && !self.channel.has_input()
    }

    /// The server reports the value of a setting.
    pub fn note_parameter(&mut self, name: String, value: String) {
        match self.parameters.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => self.parameters.push((name, value)),
        }
    }

    fn lost(&self, source: impl Into<ChannelError>) -> BackendError {
        BackendError::Lost { server: self.server.name.clone(), source: source.into() }
    }

    /// Runs `statements`, one simple query each, all sent at once; gives the rows of each.
    pub async fn pipeline(&mut self, statements: &[&str]) -> Result<Vec<Vec<Row>>, BackendError> {
        for statement in statements {
            self.channel.output.query(statement);
        }
        self.prepared.unnamed = None;
        self.channel.flush().await.map_err(|error| self.lost(error))?;
        let mut results = Vec::with_capacity(statements.len());
        let mut failure = None;
        for _ in statements {
            match self.answer().await? {
                Ok(rows) => results.push(rows),
                Err(fields) => {
                    failure.get_or_insert(fields);
                }
            }
        }
        match failure {
            Some(fields) => Err(BackendError::Sql { server: self.server.name.clone(), fields }),
            None => Ok(results),
        }
    }

    /// Asks the server for its system and timeline.
    ///
    /// # Errors
    /// [`BackendError::Unfit`] when its state is not that of its role.
    pub async fn system_timeline(&mut self) -> Result<SystemTimeline, BackendError> {
        let answer = self.rows(SYSTEM_TIMELINE).await?.pop().and_then(|mut row| row.pop()?);
        SystemTimeline::read(answer, self.server.role)
            .map_err(|reason| BackendError::Unfit { server: self.server.name.clone(), reason })
    }

    /// Runs one simple query and gives its rows.
    pub async fn rows(&mut self, statement: &str) -> Result<Vec<Row>, BackendError> {
        Ok(self.pipeline(&[statement]).await?.pop().unwrap_or_default())
    }

    /// Begins a simple query that takes long; returns when the server has said a first word of it.
    pub async fn begin_to_wait(&mut self, statement: &str) -> Result<(), BackendError> {
        self.channel.output.query(statement);
        self.channel.flush().await.map_err(|error| self.lost(error))?;
        loop {
            let frame = self.channel.frame().await.map_err(|error| self.lost(error))?;
            match frame.tag {
                b'N' => return Ok(()),
                b'E' => {
                    let fields = ErrorFields::parse(&frame.body());
                    return Err(BackendError::Sql { server: self.server.name.clone(), fields });
                }
                _ => {}
            }
        }
    }

    /// Reads one answer up to `ReadyForQuery`.
    async fn answer(&mut self) -> Result<Result<Vec<Row>, ErrorFields>, BackendError> {
        let mut rows = Vec::new();
        let mut failure = None;
        loop {
            let frame = match self.channel.frame().await {
                Ok(frame) => frame,
                Err(error) => return Err(self.lost(error)),
            };
            match frame.tag {
                b'D' => rows.push(text_row(&frame.body())),
                b'E' => failure = Some(ErrorFields::parse(&frame.body())),
                b'S' => {
                    if let Some((name, value)) = parameter_status(&frame) {
                        self.note_parameter(name, value);
                    }
                }
                b'Z' => {
                    self.in_transaction = frame.bytes.get(5) != Some(&b'I');
                    return Ok(match failure {
                        Some(fields) => Err(fields),
                        None => Ok(rows),
                    });
                }
                _ => {}
            }
        }
    }

    /// A `NotificationResponse` as a client is told it: from the session that it knows, not from that one's server
    /// process. Other messages stay as they are.
    pub fn told(&self, frame: Frame) -> Frame {
        let process_id = frame.bytes.get(5..9).filter(|_| frame.tag == b'A');
        let process_id = process_id.and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
        let Some(session) = process_id.and_then(|process_id| self.server.session_of(process_id)) else { return frame };
        let mut bytes = BytesMut::from(&*frame.bytes);
        bytes[5..9].copy_from_slice(&session.to_be_bytes());
        Frame { bytes: bytes.freeze(), ..frame }
    }

    /// The server process, for making sure that it has ended.
    pub fn process(&self) -> ServerProcess {
        ServerProcess { id: self.process_id, started_us: self.started_us }
    }

    /// What is needed to cancel its running statement from elsewhere.
    pub fn cancel_key(&self) -> Arc<CancelKey> {
        self.cancel_key.clone()
    }
}

/// Values of a `DataRow`; a row cut short ends early.
fn text_row(body: &Bytes) -> Row {
    let mut row = Vec::new();
    let mut rest: &[u8] = body.get(2..).unwrap_or_default();
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        match usize::try_from(i32::from_be_bytes(*length)) {
            Err(_) => {
                row.push(None);
                rest = after;
            }
            Ok(length) => {
                let Some(value) = after.get(..length) else { break };
                row.push(Some(String::from_utf8_lossy(value).into_owned()));
                rest = &after[length..];
            }
        }
    }
    row
}

/// Cancels a statement of one back end.
#[derive(Debug)]
pub struct CancelKey {
    address: Address,
    process_id: u32,
    secret: Bytes,
}

impl CancelKey {
    /// Sends the request, and waits until the server closes the connection: then it has passed the request on, and what
    /// the back end begins later is not hit. Whether it hits is never said (PostgreSQL's protocol).
    pub async fn send(&self) -> std::io::Result<()> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        const CANCEL_REQUEST: u32 = 80_877_102;
        let mut socket = Socket::connect(&self.address).await?;
        let mut packet = Vec::with_capacity(12 + self.secret.len());
        packet.extend_from_slice(&(12 + self.secret.len() as u32).to_be_bytes());
        packet.extend_from_slice(&CANCEL_REQUEST.to_be_bytes());
        packet.extend_from_slice(&self.process_id.to_be_bytes());
        packet.extend_from_slice(&self.secret);
        socket.write_all(&packet).await?;
        socket.shutdown().await?;
        // Nothing but the end comes.
        while socket.read(&mut [0; 64]).await? > 0 {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_was_cut_short_ends_early() {
        let row = text_row(&Bytes::from_static(b"\0\x03\0\0\0\x02ab\xff\xff\xff\xff\0\0\0\x09x"));
        assert_eq!(row, vec![Some("ab".to_owned()), None]);
    }
}
