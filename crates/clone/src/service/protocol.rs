//! What is said over a service's socket: one JSON object a line, open files beside it.
//!
//! ```text
//! service                      client
//!    ── hello ──────────────────>       it lives and will answer
//!    <───────────────── request ──      one a connection
//!    ── event, event, .. ───────>       the last one is told by the request
//! ```

use std::path::PathBuf;

use onecopy_postgres::Lsn;
use serde::{Deserialize, Serialize};

use crate::network::RemoteHost;
use crate::plan::Plan;

/// A line is at most this long: plans and progress of thousands of clones.
pub const LINE_BYTES_MAX: usize = 4 << 20;
/// How often a watcher is told.
pub const WATCH_INTERVAL: std::time::Duration = std::time::Duration::from_millis(200);

/// What is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// Clones, all of one freeze: `preparing`, `frozen`, then `ready` or `failed` for each, `done`.
    Clone {
        /// What they shall be.
        plans: Vec<Plan>,
    },
    /// A clone of a source on another host: as `clone`.
    CloneFrom {
        /// The source's host.
        host: RemoteHost,
        /// What it shall be; its source is as that host sees it.
        plan: Box<Plan>,
    },
    /// How far a clone is: `progress` again and again until it is whole or discarded, `done`.
    Watch {
        /// Its directory.
        target: PathBuf,
    },
    /// How far all are: `clones`.
    List,
    /// A clone shall go: its server is killed, its directory and its slot removed. `done`.
    Discard {
        /// Its directory.
        target: PathBuf,
    },
    /// What its postmaster must inherit: `descriptors`.
    Descriptors {
        /// Its directory.
        target: PathBuf,
    },
    /// A prepared directory for the next clone is wanted, or no more: `done`.
    Spare {
        /// Where, and for whom; none: no more.
        wanted: Option<Box<SpareWanted>>,
    },
    /// Another limit for a clone's background: `done`.
    Limit {
        /// Its directory.
        target: PathBuf,
        /// Bytes a second; none: as fast as it goes.
        bytes_per_second: Option<u64>,
    },
    /// `done`; from there on the connection speaks the image protocol of [`crate::network`].
    Image,
}

/// A prepared directory that is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpareWanted {
    /// Its data directory; must not exist, and be on the file system of the targets to come.
    pub directory: PathBuf,
    /// The account that owns it.
    pub user_name: String,
    /// The source, by which its files are known.
    pub source: crate::plan::SourceServer,
}

/// What the service says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The first word.
    Hello {
        /// The process that answers.
        process_id: u32,
    },
    /// The clones are on their way.
    Preparing,
    /// The image is taken.
    Frozen {
        /// The source's accesses waited so long.
        pause_us: u64,
    },
    /// A clone can be started; its group and its version file come with this.
    Ready {
        /// Its directory.
        target: PathBuf,
        /// It answers queries from here on.
        consistent_at: Lsn,
        /// Its replication slot.
        slot: String,
    },
    /// A clone, or the whole request, has failed; what had been made of it is removed.
    Failed {
        /// Which clone; none: all.
        target: Option<PathBuf>,
        /// Why.
        reason: String,
    },
    /// How far a clone is.
    Progress(Progress),
    /// How far all are.
    Clones {
        /// Each.
        clones: Vec<Progress>,
    },
    /// A clone's group and its version file come with this.
    Descriptors,
    /// That was all.
    Done,
}

/// How far a clone is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Its directory.
    pub target: PathBuf,
    /// Its replication slot.
    pub slot: String,
    /// What is going on.
    pub state: CloneState,
    /// Bytes that it has when it is whole.
    pub total_bytes: u64,
    /// Bytes that it has, or does not need.
    pub filled_bytes: u64,
    /// How fast they came of late, in bytes a second.
    pub rate_bytes_per_second: u64,
    /// At this rate it is whole in so many seconds; none when nobody can say.
    pub seconds_left: Option<u64>,
    /// Accesses that had to wait for content, of the clone and of the source.
    pub demand_faults: u64,
    /// Files that are not whole yet.
    pub files_left: u64,
}

/// What a clone's service is doing with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum CloneState {
    /// Its directory is being made; it cannot be started yet.
    Preparing,
    /// It can run; content is missing.
    Filling,
    /// Everything is there and is made durable.
    Finishing,
    /// An ordinary directory; nothing of us is left in it.
    Whole,
    /// It is given up and removed.
    Discarded {
        /// Why.
        reason: String,
    },
}

impl CloneState {
    /// Whether nothing more comes.
    pub fn is_final(&self) -> bool {
        matches!(self, CloneState::Whole | CloneState::Discarded { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_as_written() {
        let request: Request =
            serde_json::from_str(r#"{"request":"limit","target":"/srv/a","bytes_per_second":null}"#).unwrap();
        assert_eq!(request, Request::Limit { target: "/srv/a".into(), bytes_per_second: None });
        let state = CloneState::Discarded { reason: "the disk is full".to_owned() };
        assert_eq!(serde_json::to_string(&state).unwrap(), r#"{"state":"discarded","reason":"the disk is full"}"#);
        let event = Event::Frozen { pause_us: 2100 };
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(text, r#"{"event":"frozen","pause_us":2100}"#);
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event);
        assert!(serde_json::from_str::<Request>(r#"{"request":"dance"}"#).is_err());
    }
}
