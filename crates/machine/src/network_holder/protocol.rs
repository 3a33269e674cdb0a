//! What a network holder is asked over its control socket, `network.sock`; it is answered by an
//! [`Answer`](onecopy_control::Answer).
//!
//! ```text
//! {"command":"hold","enabled":true}
//! {"ok":null}
//! {"command":"cut"}
//! {"ok":{"epoch":7}}
//! {"command":"release","epoch":7}
//! {"ok":null}
//! ```

use std::net::IpAddr;

use onecopy_network::Statistics;
use serde::{Deserialize, Serialize};

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Everything about the network: [`ServedNetwork`].
    Info,
    /// What the machine sends waits from now on until its epoch is released; or nothing waits any more.
    Hold {
        /// Whether it shall wait.
        enabled: bool,
    },
    /// Take all that the machine has sent, up to the end of a frame. It stands.
    Drain,
    /// End the open epoch: [`EndedEpoch`].
    Cut,
    /// Send the frames of all epochs up to this one, in their order.
    Release {
        /// The last of them, which has ended.
        epoch: u64,
    },
    /// Tell the network that these addresses are at this machine's card, past all that waits.
    Announce {
        /// The addresses.
        addresses: Vec<IpAddr>,
    },
}

/// A network that is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedNetwork {
    /// The holder's process.
    pub process_id: u32,
    /// The number of the interface in the holder's process: what the next keeper takes over.
    pub tap_descriptor: i32,
    /// The number of the memory file with the frames that are held.
    pub state_descriptor: i32,
    /// What has passed.
    #[serde(flatten)]
    pub statistics: Statistics,
}

/// An epoch that has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedEpoch {
    /// Its number.
    pub epoch: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_look_as_they_are_documented() {
        let cases = [
            (Request::Info, r#"{"command":"info"}"#),
            (Request::Hold { enabled: true }, r#"{"command":"hold","enabled":true}"#),
            (Request::Drain, r#"{"command":"drain"}"#),
            (Request::Cut, r#"{"command":"cut"}"#),
            (Request::Release { epoch: 7 }, r#"{"command":"release","epoch":7}"#),
            (
                Request::Announce { addresses: vec!["192.0.2.10".parse().unwrap()] },
                r#"{"command":"announce","addresses":["192.0.2.10"]}"#,
            ),
        ];
        for (request, text) in cases {
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        assert!(serde_json::from_str::<Request>(r#"{"command":"forget"}"#).is_err());
    }
}
