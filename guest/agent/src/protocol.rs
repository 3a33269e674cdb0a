//! The language between a guest's agent and its host: one JSON object a line over the virtio-serial port [`PORT`].
//!
//! ```text
//! host  -> guest  {"id":1,"command":{"hello":{"oldest":1,"newest":1}}}
//! guest -> host   {"id":1,"ok":{"hello":{"version":1,...}}}
//! host  -> guest  {"id":2,"command":{"postgres":{"base_backup":{...}}}}
//! guest -> host   {"id":2,"progress":{"message":"..."}}            any number of them, then one of
//! guest -> host   {"id":2,"ok":{"done":{}}}
//! guest -> host   {"id":2,"error":{"kind":"failed","message":"..."}}
//! ```
//!
//! Replies come in any order: the host chooses the ids. A line that is no request is answered by an error whose id is
//! null. A host that connects anew sends an empty line first (it ends what an earlier host had begun; empty lines are
//! not answered), then `hello` with an id of its own, and throws away what comes before that id's answer.
//! Unknown fields are ignored, so that one may be added without a new version; what changes a meaning gets one.

mod bytes;
mod command;
mod reply;

pub use bytes::Bytes;
pub use command::{BaseBackup, Command, Execute, Hello, Identity, Initialize, Postgres, Request, StopMode, WriteFile};
pub use reply::{
    Answer, Executed, Failure, FailureKind, FreePages, Greeting, Health, Outcome, PostgresState, PostgresStatus,
    Progress, Reply,
};

/// The name of the virtio-serial port; in the guest `/dev/virtio-ports/` followed by it.
pub const PORT: &str = "org.onecopy.agent.0";

/// The newest version of the language that this code speaks.
pub const VERSION_NEWEST: u32 = 1;

/// The oldest version that this code still understands.
pub const VERSION_OLDEST: u32 = 1;

/// The longest line of either direction, its end included. A longer one is answered by an error, and thrown away up to
/// its end; an answer is cut (see [`Executed::truncated`]) so that it stays below.
pub const LINE_BYTES_MAX: usize = 4 * 1024 * 1024;

/// As much of a command's standard output, and as much of its standard error, as is kept.
pub const OUTPUT_BYTES_MAX: usize = 1024 * 1024;

/// Free pages of the guest in a row that are worth telling of.
pub const FREE_RUN_PAGES_MIN: u64 = 16;

/// As many rows of them are told, so that they fit into a line.
pub const FREE_RUNS_MAX: usize = 1 << 16;

/// How many commands the agent works on at the same time; one more is refused with [`FailureKind::Busy`].
pub const COMMANDS_MAX: usize = 8;

/// And as many of those that are urgent ([`Command::is_urgent`]) besides.
pub const URGENT_COMMANDS_MAX: usize = 8;

#[cfg(test)]
mod tests;
