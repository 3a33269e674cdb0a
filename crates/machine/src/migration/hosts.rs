//! What hosts ask each other about a machine that goes from one to the other.

use std::path::Path;
use std::time::Duration;

use onecopy_clone::CloneError;
use onecopy_clone::network::client::{Stream, connect};
use onecopy_clone::network::keys::HostKeys;
use onecopy_clone::network::protocol::words;
use onecopy_clone::network::request::{HostAnswer, HostRequest, read_line, write_line};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::SharedDisk;
use crate::{BridgedNetwork, Forward, MachineName};

/// How long another host may take to answer what it need not wait for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);

/// The same of one that is taken for dead else.
const SOON_TIMEOUT: Duration = Duration::from_secs(10);

/// What a host is asked about a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostOrder {
    /// Take a machine; from then on the two keepers speak.
    Receive(Box<ReceiveOrder>),
    /// The disk's snapshot of one that has gone, over NBD.
    Disk(Which),
    /// Let one go on that has come: it was given away. [`Gone`]
    Go(Which),
    /// Never let one go that has come, unless it was already. [`Gone`]
    Discard(Which),
    /// Is this one given away? [`Verdict`]
    Verdict(Which),
    /// All of its disk is here.
    Whole(Which),
    /// Let this one, which you protect with me, go on here. [`Verdict`]
    Yield(Which),
}

/// Which migration of which machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Which {
    /// The machine, by its name on both hosts.
    pub name: MachineName,
    /// [`Departure::token`](super::Departure::token).
    pub token: String,
}

impl Which {
    /// Whether its token is one that a source gives: parts of it are parts of names.
    pub fn has_token(&self) -> bool {
        self.token.len() == 32 && self.token.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

/// A machine that another host shall take. What is not here that one decides: directory, account, ports, image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiveOrder {
    /// Which.
    pub which: Which,
    /// `HOST:PORT` of the source's host, as the other one reaches it.
    pub origin: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its processors.
    pub processors: u32,
    /// Its disk.
    pub disk_bytes: u64,
    /// It has a PostgreSQL server.
    pub postgresql: bool,
    /// Its superuser's password.
    pub password: Option<String>,
    /// Ports of the guest that the source's host leads to.
    pub guest_ports: Vec<u16>,
    /// SHA-256 of kernel and first file system of its image, which the other host must have.
    pub image: String,
    /// As in the machine's file.
    pub silent_after_s: u64,
    /// As in the machine's file.
    pub end_when_silent: bool,
    /// Its card on a bridge, by the other host's name of that, and its addresses, which it keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<BridgedNetwork>,
    /// Its disk: on storage that both hosts have, it need not travel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_disk: Option<SharedDisk>,
    /// It stays, and is only to be protected.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protects: bool,
    /// As in [`ProtectionOrder`](crate::keeper::ProtectionOrder).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detection_s: Option<u64>,
    /// Of one that is to be protected: what the other host has of its disk is left out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compares_disk: bool,
    /// With `compares_disk`: the `secret` of the order by which it has come to the source's host, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub came_by: Option<String>,
    /// What nobody knows but the two hosts: by it the machine may come back to the disk that it leaves here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// etcd decides where it goes on, and has been told so: [`Etcd::introduce`](crate::Etcd::introduce).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub asks_etcd: bool,
}

/// What of an order nobody else may know.
#[derive(Debug, Clone, Copy, Default)]
pub struct ArrivalSecrets<'a> {
    /// [`ReceiveOrder::password`].
    pub password: Option<&'a str>,
    /// [`ReceiveOrder::came_by`].
    pub came_by: Option<&'a str>,
    /// [`ReceiveOrder::secret`].
    pub secret: Option<&'a str>,
}

impl ArrivalSecrets<'_> {
    /// Those of an order.
    pub fn of(order: &ReceiveOrder) -> ArrivalSecrets<'_> {
        ArrivalSecrets {
            password: order.password.as_deref(),
            came_by: order.came_by.as_deref(),
            secret: order.secret.as_deref(),
        }
    }
}

/// What the source's host says of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The machine was given away.
    Given,
    /// It goes on here.
    Kept,
    /// It is not decided yet, or not known.
    Undecided,
    /// No machine of that name here was ever to go.
    Unknown,
}

/// What became of a machine that has come. Where this is said it is durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gone {
    /// It runs; by these ports of 127.0.0.1 there.
    Running(Vec<Forward>),
    /// It will never run there.
    Lost(String),
}

/// Why a host has not answered what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unanswered {
    /// Nobody was reached: it has not heard the order.
    #[error("{0}")]
    Unreachable(String),
    /// It was reached, and may have heard it.
    #[error("{0}")]
    Silent(String),
    /// It has refused, or trusts nobody here.
    #[error("{0}")]
    Refused(String),
}

/// Asks a host for something that it carries on the same connection.
///
/// # Errors
/// Its own words, or why it cannot be asked.
pub async fn open(address: &str, keys: &Path, order: &HostOrder) -> Result<Box<dyn Stream>, String> {
    let (stream, answer) = exchange(address, keys, order).await.map_err(|error| error.to_string())?;
    match answer {
        HostAnswer::Ready => Ok(stream),
        HostAnswer::Refused { reason } => Err(words(&reason)),
        other => Err(format!("it answered {other:?}")),
    }
}

/// Asks a host for an answer.
///
/// # Errors
/// Its own words, or why it cannot be asked.
pub async fn ask<T: DeserializeOwned>(address: &str, keys: &Path, order: &HostOrder) -> Result<T, Unanswered> {
    answer_of(exchange(address, keys, order).await?.1)
}

/// Asks a host that may be dead: no connection within this time is none, and its answer is not waited for as long as
/// another one's.
///
/// # Errors
/// As [`ask`].
pub async fn ask_soon<T: DeserializeOwned>(
    address: &str,
    keys: &Path,
    order: &HostOrder,
    within: Duration,
) -> Result<T, Unanswered> {
    let nothing = |what: &str, within: Duration| format!("no {what} within {} s", within.as_secs());
    let stream = tokio::time::timeout(within, dial(address, keys)).await;
    let stream = stream.map_err(|_| Unanswered::Unreachable(nothing("connection", within)))??;
    let answered = tokio::time::timeout(SOON_TIMEOUT, exchange_over(stream, order)).await;
    answer_of(answered.map_err(|_| Unanswered::Silent(nothing("answer", SOON_TIMEOUT)))??.1)
}

fn answer_of<T: DeserializeOwned>(answer: HostAnswer) -> Result<T, Unanswered> {
    let answered = match answer {
        HostAnswer::Progress { event } => serde_json::from_value(event).map_err(|error| error.to_string()),
        HostAnswer::Refused { reason } => Err(words(&reason)),
        other => Err(format!("it answered {other:?}")),
    };
    answered.map_err(Unanswered::Refused)
}

async fn exchange(address: &str, keys: &Path, order: &HostOrder) -> Result<(Box<dyn Stream>, HostAnswer), Unanswered> {
    exchange_over(dial(address, keys).await?, order).await
}

async fn dial(address: &str, keys: &Path) -> Result<Box<dyn Stream>, Unanswered> {
    let refused = |error: CloneError| Unanswered::Refused(error.to_string());
    let keys = HostKeys::load(keys).map_err(refused)?;
    match connect(address, &keys).await {
        Ok(stream) => Ok(Box::new(stream)),
        Err(error @ CloneError::Network { .. }) => Err(Unanswered::Unreachable(error.to_string())),
        // That it cannot be asked says nothing of whether it lives.
        Err(other) => Err(refused(other)),
    }
}

async fn exchange_over(
    mut stream: Box<dyn Stream>,
    order: &HostOrder,
) -> Result<(Box<dyn Stream>, HostAnswer), Unanswered> {
    let order = serde_json::to_value(order).map_err(|error| Unanswered::Refused(error.to_string()))?;
    let asking = async {
        write_line(&mut stream, &HostRequest::Machine { order }).await?;
        read_line::<_, HostAnswer>(&mut stream).await
    };
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, asking).await;
    let answer = answer.map_err(|_| Unanswered::Silent("it does not answer".to_owned()))?;
    Ok((stream, answer.map_err(|error| Unanswered::Silent(error.to_string()))?))
}
