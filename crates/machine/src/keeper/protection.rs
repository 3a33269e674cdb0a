//! What is asked and told of a machine that is protected.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Endpoint;

/// How often it is looked whether something else is wanted.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How often a machine is copied, unless it is told otherwise.
pub const PERIOD_MS_DEFAULT: u64 = 100;

/// How long either side of a protection may be silent before it is taken for lost where nothing else is said, seconds.
/// Each says something every second.
pub const DETECTION_S_DEFAULT: u64 = 5;
/// What may be said: hosts that are merely slow are not lost, and a fence has its time after that.
pub const DETECTION_S_RANGE: std::ops::RangeInclusive<u64> = 2..=15;

/// A machine shall be protected: the file `protection.json`, as long as that is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProtectionOrder {
    /// `HOST:PORT` of the other host.
    pub to: String,
    /// This host's keys.
    pub keys: PathBuf,
    /// `HOST:PORT` of this host's `onecopy host`, as the other one reaches it.
    pub origin: String,
    /// From one checkpoint to the next, milliseconds; less where what it sends waits for it, more where it would stand
    /// for too much of the time.
    pub period_ms: u64,
    /// What a client may see that the other host has not yet.
    pub durability: Durability,
    /// Bytes a second that are sent at most.
    pub bytes_per_second: Option<u64>,
    /// The other host's bridge for its card; none: the one of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// How long either side may be silent, seconds: within [`DETECTION_S_RANGE`]. None: [`DETECTION_S_DEFAULT`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detection_s: Option<u64>,
    /// Members of the etcd that decides where it goes on, where the hosts have lost each other. None: a person or a
    /// fence does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub etcd: Vec<Endpoint>,
    /// What has changed travels as data, also where the other host has it elsewhere: for comparison.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sends_all: bool,
}

/// Whether either side of a protection may be silent for so long.
///
/// # Errors
/// In words, with what it may be.
pub fn check_detection(seconds: Option<u64>) -> Result<(), String> {
    match seconds {
        Some(seconds) if !DETECTION_S_RANGE.contains(&seconds) => {
            let (least, most) = (DETECTION_S_RANGE.start(), DETECTION_S_RANGE.end());
            Err(format!("a detection time of {seconds} s cannot be: give {least} to {most}"))
        }
        _ => Ok(()),
    }
}

/// What a client may see that the other host has not yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Nothing: what the machine sends waits until the other host has what it is of.
    Output,
    /// What was sent since the last checkpoint: it is lost when the machine goes on there.
    Periodic,
}

/// On which side of a protection a machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProtectionRole {
    /// It runs here.
    Primary,
    /// It goes on here when it cannot there any more.
    Backup,
}

/// How far a protection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProtectionState {
    /// All of it is copied for the first time: until then it is not protected.
    Copying,
    /// The backup could go on.
    Protected,
    /// The machine runs alone: of a backup, the other host is lost, and it is not known what has become of it.
    Unprotected,
}

impl ProtectionState {
    /// The word for it, as in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            ProtectionState::Copying => "copying",
            ProtectionState::Protected => "protected",
            ProtectionState::Unprotected => "unprotected",
        }
    }
}

/// A machine's protection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectionStatus {
    /// On which side this one is.
    pub role: ProtectionRole,
    /// How far it is.
    pub state: ProtectionState,
    /// `HOST:PORT` of the other host.
    pub host: String,
    /// On the machine's host: what a client may see that the other host has not yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durability: Option<Durability>,
    /// Why the machine runs alone.
    pub reason: Option<String>,
    /// Checkpoints that the backup has had.
    pub epochs: u64,
    /// Of when the newest of them is, by this host's clock: milliseconds since 1970.
    pub newest_unix_ms: Option<u64>,
    /// Bytes that went over the connections, or came.
    pub bytes: u64,
    /// From the last checkpoint but one to the last one, milliseconds.
    pub period_ms: u64,
    /// How long it stood for the last checkpoint, microseconds.
    pub pause_us: u64,
    /// The longest of these.
    pub pause_max_us: u64,
    /// From the stop for the last checkpoint until what had been sent was let go, microseconds.
    pub held_us: u64,
    /// How long it stood in all because it changed faster than its checkpoints travelled, microseconds.
    #[serde(default)]
    pub braked_us: u64,
    /// Of the bytes, those for blocks of the disk.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Pages of memory that travelled as data: as they are, compressed, or as a difference.
    #[serde(default)]
    pub data_pages: u64,
    /// Pages of memory whose content the backup had, in memory or on disk.
    #[serde(default)]
    pub known_pages: u64,
    /// Blocks of the disk that travelled as data.
    #[serde(default)]
    pub data_blocks: u64,
    /// Blocks of the disk whose content the backup had, in memory.
    #[serde(default)]
    pub known_blocks: u64,
    /// Blocks of the disk that the backup had before it was copied, in the image or of an earlier time.
    #[serde(default)]
    pub same_blocks: u64,
}

impl ProtectionStatus {
    /// One that only begins.
    pub(super) fn new(role: ProtectionRole, host: String) -> ProtectionStatus {
        ProtectionStatus {
            role,
            state: ProtectionState::Copying,
            host,
            durability: None,
            reason: None,
            epochs: 0,
            newest_unix_ms: None,
            bytes: 0,
            period_ms: 0,
            pause_us: 0,
            pause_max_us: 0,
            held_us: 0,
            braked_us: 0,
            disk_bytes: 0,
            data_pages: 0,
            known_pages: 0,
            data_blocks: 0,
            known_blocks: 0,
            same_blocks: 0,
        }
    }
}

/// What is wanted of a protection that is under way.
#[derive(Debug, Default)]
pub(super) struct Protecting {
    /// It shall end: its connection, too.
    pub(super) is_cancelled: Arc<AtomicBool>,
    /// The machine shall go on at the backup.
    pub(super) is_to_yield: AtomicBool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_detection_time_that_cannot_be_kept_is_refused() {
        for seconds in [None, Some(2), Some(DETECTION_S_DEFAULT), Some(15)] {
            check_detection(seconds).unwrap();
        }
        for seconds in [0, 1, 16, u64::MAX] {
            let reason = check_detection(Some(seconds)).unwrap_err();
            assert!(reason.contains("give 2 to 15"), "{reason}");
        }
    }
}
