//! The kernel's part: fanotify's pre-content events (fanotify(7), Linux 6.14 and later). A process that reads, writes
//! or truncates a marked file waits until whoever holds the [`Group`] answers; until then the file's content may be
//! brought in.
//!
//! What this relies on, each held by a test here:
//! - A descriptor is *armed* when a mark covered its file as it was opened, even an ignored one; it stays so for ever.
//!   One opened before raises nothing, whatever is marked later ([`Probe`] tells which is which).
//! - The descriptor of an event raises nothing in any group ([`NoNotifyOpener`] makes such ones of any file).
//! - An event is answered by the *number* that its descriptor had in the process that read it, by any process that has
//!   the group, also after the reader is dead ([`Journal`] remembers the numbers).
//! - When the last holder of a group is gone, the kernel allows all that waits. A [`PinnedGroup`] holds one, and
//!   nothing can be done by it.

mod descriptors;
mod event;
mod group;
mod heartbeat;
mod journal;
mod no_notify;
mod pinned;
mod probe;
mod processor_time;
mod shared_words;
mod system_call;

pub use descriptors::{DESCRIPTORS_RESERVED, check_descriptors, descriptors_max, raise_descriptors_max};
pub use event::{Access, Event, EventBuffer, Verdict};
pub use group::Group;
pub use heartbeat::Heartbeat;
pub use journal::{GroupNumber, HeartbeatSlot, Journal, JournalEntry, JournalSlot};
pub use no_notify::NoNotifyOpener;
pub use pinned::PinnedGroup;
pub use probe::Probe;
pub use processor_time::executed;
pub(crate) use shared_words::SharedWords;
pub use system_call::{AccessUnderWay, Doing, accesses_under_way, doing};

#[cfg(test)]
pub(crate) mod tests;
