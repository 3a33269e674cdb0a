//! etcd decides on which of its two hosts a protected machine goes on, where they have lost each other: one key for
//! each copy, which whoever is first creates, and nobody changes. No clock has a part in it, and etcd is not asked
//! while the other host answers, but when a copy begins.
//!
//! The key is `onecopy/protected/<machine>/<token>`, its value `source` or `copy`. Requests are the JSON form of etcd's
//! API version 3, which etcd serves from 3.4 on beside gRPC, on the same port (etcd documentation, *gRPC gateway*).

mod http;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::body::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::task::{JoinError, JoinSet};

use crate::MachineName;

/// How long one member may take to answer: it agrees with the others, over a network, and writes to its disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// For how long a copy is known that was introduced: longer than its host takes to answer the order.
const INTRODUCTION_S: u64 = 120;

/// Where etcd listens for clients.
const PORT: u16 = 2379;

/// On which host a machine goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Survivor {
    /// Where it was: its copy never does.
    Source,
    /// Where its copy is: never again where it was.
    Copy,
}

impl Survivor {
    fn as_str(self) -> &'static str {
        match self {
            Survivor::Source => "source",
            Survivor::Copy => "copy",
        }
    }

    fn parse(text: &[u8]) -> Option<Survivor> {
        [Survivor::Source, Survivor::Copy].into_iter().find(|survivor| survivor.as_str().as_bytes() == text)
    }
}

/// A member of etcd: `http://HOST[:PORT]`, or `https://` with the host's own keys and their authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Endpoint {
    is_encrypted: bool,
    /// `HOST:PORT`.
    address: String,
}

impl std::str::FromStr for Endpoint {
    type Err = String;

    fn from_str(url: &str) -> Result<Endpoint, String> {
        let refused = || format!("{url:?} is no member of etcd: give http://HOST[:PORT] or https://HOST[:PORT]");
        let (is_encrypted, rest) = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(refused()),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
        if rest.is_empty() || !rest.bytes().all(is_word) {
            return Err(refused());
        }
        let has_port = rest.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
        let is_bare_ipv6 = rest.ends_with(']');
        let address = if has_port && !is_bare_ipv6 { rest.to_owned() } else { format!("{rest}:{PORT}") };
        let (host, port) = address.rsplit_once(':').ok_or_else(refused)?;
        let is_host = !host.is_empty() && (!host.contains(':') || host.starts_with('[') && host.ends_with(']'));
        match is_host && port.parse::<u16>().is_ok_and(|port| port != 0) {
            true => Ok(Endpoint { is_encrypted, address }),
            false => Err(refused()),
        }
    }
}

impl TryFrom<String> for Endpoint {
    type Error = String;

    fn try_from(url: String) -> Result<Endpoint, String> {
        url.parse()
    }
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> String {
        endpoint.to_string()
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}://{}", if self.is_encrypted { "https" } else { "http" }, self.address)
    }
}

#[derive(Debug, Deserialize)]
struct Lease {
    #[serde(rename = "ID")]
    id: String,
}

#[derive(Debug, Deserialize)]
struct Transaction {
    /// Left out where it is false.
    #[serde(default)]
    succeeded: bool,
    responses: Vec<Response>,
}

#[derive(Debug, Deserialize)]
struct Response {
    response_range: Option<Range>,
}

#[derive(Debug, Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<Pair>,
}

#[derive(Debug, Deserialize)]
struct Pair {
    value: String,
}

impl Pair {
    fn survivor(self) -> Result<Survivor, String> {
        let value = STANDARD.decode(self.value).ok();
        value.as_deref().and_then(Survivor::parse).ok_or_else(Pair::unknown)
    }

    fn unknown() -> String {
        "etcd answers what nobody of us has written".to_owned()
    }
}

/// A cluster of etcd, as one host reaches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Etcd {
    endpoints: Vec<Endpoint>,
    keys: PathBuf,
}

impl Etcd {
    /// By these members, of which one is enough that is connected to most others, and these keys of the host, as
    /// `onecopy host keys` makes them. None: no members.
    pub fn of(endpoints: &[Endpoint], keys: impl Into<PathBuf>) -> Option<Etcd> {
        (!endpoints.is_empty()).then(|| Etcd { endpoints: endpoints.to_owned(), keys: keys.into() })
    }

    /// Has it know a copy for a while, so that the copy's host sees that its etcd is the same one. The cluster's number
    /// does not tell that: clusters of one member that nobody configured have all the same.
    ///
    /// # Errors
    /// In words: no member answers, or they are not of one cluster.
    pub async fn introduce(&self, token: &str) -> Result<(), String> {
        let lease: Lease = self.ask("/v3/lease/grant", &json!({ "TTL": INTRODUCTION_S.to_string() })).await?;
        let (key, value) = (STANDARD.encode(introduction(token)), STANDARD.encode("copied"));
        let put = json!({ "key": key, "value": value, "lease": lease.id });
        let _: Value = self.ask("/v3/kv/put", &put).await?;
        match self.is_introduced(token).await? {
            true => Ok(()),
            false => Err("these members of etcd are not of one cluster".to_owned()),
        }
    }

    /// Whether each member that answers knows a copy that was introduced just now.
    ///
    /// # Errors
    /// In words: no member answers.
    pub async fn is_introduced(&self, token: &str) -> Result<bool, String> {
        let mut asked = self.begin("/v3/kv/range", &json!({ "key": STANDARD.encode(introduction(token)) }));
        let (mut known, mut reasons) = (Vec::new(), Vec::new());
        while let Some(answered) = asked.join_next().await {
            match understand::<Range>(answered) {
                Ok(range) => known.push(!range.kvs.is_empty()),
                Err(reason) => reasons.push(reason),
            }
        }
        if known.is_empty() { Err(unanswered(reasons)) } else { Ok(known.into_iter().all(|known| known)) }
    }

    /// Has this copy of this machine be decided so, unless it was decided before; how it is, from now on for ever.
    ///
    /// # Errors
    /// In words: that is not known. It may be decided so later.
    pub async fn decide(&self, machine: &MachineName, token: &str, survivor: Survivor) -> Result<Survivor, String> {
        let key = STANDARD.encode(decision(machine, token));
        let transaction = json!({
            "compare": [{ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0" }],
            "success": [{ "request_put": { "key": key, "value": STANDARD.encode(survivor.as_str()) } }],
            "failure": [{ "request_range": { "key": key } }],
        });
        let answer: Transaction = self.ask("/v3/kv/txn", &transaction).await?;
        if answer.succeeded {
            return Ok(survivor);
        }
        let range = answer.responses.into_iter().next().and_then(|response| response.response_range);
        range.and_then(|range| range.kvs.into_iter().next()).ok_or_else(Pair::unknown)?.survivor()
    }

    /// How it was decided of this copy; none: it was not, yet.
    ///
    /// # Errors
    /// In words: that is not known.
    pub async fn decided(&self, machine: &MachineName, token: &str) -> Result<Option<Survivor>, String> {
        let range: Range =
            self.ask("/v3/kv/range", &json!({ "key": STANDARD.encode(decision(machine, token)) })).await?;
        range.kvs.into_iter().next().map(Pair::survivor).transpose()
    }

    /// Asks all members at once, of which some may be lost; what the first one says that answers.
    async fn ask<T: DeserializeOwned>(&self, path: &'static str, body: &Value) -> Result<T, String> {
        let mut asked = self.begin(path, body);
        let mut reasons = Vec::new();
        while let Some(answered) = asked.join_next().await {
            match understand(answered) {
                Ok(answer) => return Ok(answer),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(unanswered(reasons))
    }

    fn begin(&self, path: &'static str, body: &Value) -> JoinSet<Result<Bytes, String>> {
        let mut asked = JoinSet::new();
        for endpoint in &self.endpoints {
            let (endpoint, keys, body) = (endpoint.clone(), self.keys.clone(), body.to_string());
            asked.spawn(async move {
                let asking = http::post(endpoint.is_encrypted.then_some(&*keys), &endpoint.address, path, body);
                let answer = tokio::time::timeout(ANSWER_TIMEOUT, asking).await;
                answer
                    .unwrap_or_else(|_| Err(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())))
                    .map_err(|reason| format!("{endpoint}: {reason}"))
            });
        }
        asked
    }
}

fn understand<T: DeserializeOwned>(answered: Result<Result<Bytes, String>, JoinError>) -> Result<T, String> {
    let answer = answered.map_err(|error| error.to_string())??;
    serde_json::from_slice(&answer).map_err(|error| format!("it answers what etcd does not: {error}"))
}

fn unanswered(mut reasons: Vec<String>) -> String {
    // Whichever failed first: who tells what has changed tells that once.
    reasons.sort();
    format!("etcd does not answer ({})", reasons.join("; "))
}

/// The key of what is decided of a copy.
pub fn decision(machine: &MachineName, token: &str) -> String {
    format!("onecopy/protected/{machine}/{token}")
}

/// The key by which a copy's host finds that both have the same etcd.
fn introduction(token: &str) -> String {
    format!("onecopy/introduced/{token}")
}
