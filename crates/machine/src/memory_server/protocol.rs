//! What a memory server is asked over its control socket, `memory.sock`; it is answered by an
//! [`Answer`](onecopy_control::Answer).
//!
//! ```text
//! {"command":"cut"}
//! {"ok":{"epoch":4611686018427387905,"pages":412}}
//! {"command":"append","epoch":7,"disk":"disk/checkpoint-1"}
//! {"error":"epoch 7 of the memory is not kept"}
//! {"command":"release"}
//! {"ok":null}
//! ```

use onecopy_checkpoint::memory::MemoryStatistics;
use serde::{Deserialize, Serialize};

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Everything about the memory: [`ServedMemory`].
    Info,
    /// Keeps from now on what is written back, and what the page cache has: [`KeptPages`]. Refused where there is no
    /// memory for that.
    Keep,
    /// Takes what the shadow holds by now for what the memory holds.
    RereadShadow,
    /// Ends the open epoch: [`EndedEpoch`].
    Cut,
    /// Writes a checkpoint of this epoch into the machine's checkpoints, what changed since the last one where that is
    /// known; its devices' state lies there: [`Appended`].
    Append {
        /// Its number.
        epoch: u64,
        /// The name of the disk's part of it.
        disk: String,
    },
    /// Tells over a descriptor of the process that asks, a stream socket, the pages that changed since another epoch,
    /// or all that are not known to be zeros, and what they held at the end of this one, for as long as that socket's
    /// other end is open. How many: a number.
    Pages {
        /// The epoch's number.
        epoch: u64,
        /// The one before.
        since: Option<u64>,
        /// The process that asks.
        process_id: u32,
        /// The number of the descriptor in that process.
        descriptor: i32,
    },
    /// Lets all epochs go that have ended: those of a checkpoint that is durable, and of takes that are void.
    Release,
}

/// A served memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedMemory {
    /// The server's process.
    pub process_id: u32,
    /// The number, in the server's process, of the kernel's end of the file: what the next keeper takes over.
    pub device_descriptor: i32,
    /// The number of the memory file with the pages that are in no shadow yet.
    pub state_descriptor: i32,
    /// Pages written back since this server began.
    pub written_pages: u64,
    /// Pages read again since then.
    pub read_pages: u64,
    /// Pages asked for that nobody has any more.
    pub lost_pages: u64,
    /// Pages whose content is in the page cache at most.
    pub dropped_pages: u64,
    /// Ended epochs that are not released.
    pub epochs: u64,
}

impl ServedMemory {
    pub(super) fn new((device, state): (i32, i32), statistics: MemoryStatistics) -> ServedMemory {
        ServedMemory {
            process_id: std::process::id(),
            device_descriptor: device,
            state_descriptor: state,
            written_pages: statistics.written_pages,
            read_pages: statistics.read_pages,
            lost_pages: statistics.lost_pages,
            dropped_pages: statistics.dropped_pages,
            epochs: statistics.epochs,
        }
    }
}

/// What a copy out of the page cache has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPages {
    /// The memory's size, bytes.
    pub size_bytes: u64,
    /// Pages copied.
    pub copied: u64,
    /// Pages that nobody has any more: no epoch can be cut.
    pub missing: u64,
}

/// A checkpoint that is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Appended {
    /// Its number.
    pub number: u64,
    /// The one that it holds the changes since; none: it is whole.
    pub since: Option<u64>,
    /// Pages that it tells of.
    pub pages: u64,
}

/// An epoch that has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedEpoch {
    /// Its number.
    pub epoch: u64,
    /// Pages changed in it.
    pub pages: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_look_as_they_are_documented() {
        let cases = [
            (Request::Info, r#"{"command":"info"}"#),
            (Request::Keep, r#"{"command":"keep"}"#),
            (Request::Cut, r#"{"command":"cut"}"#),
            (Request::Release, r#"{"command":"release"}"#),
        ];
        for (request, text) in cases {
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        assert!(serde_json::from_str::<Request>(r#"{"command":"forget"}"#).is_err());
    }
}
