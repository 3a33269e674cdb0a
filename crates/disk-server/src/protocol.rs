//! What is asked of a disk's server over its control socket; it is answered by an [`Answer`](onecopy_control::Answer).

use onecopy_disk::vhost_user::CompletionHold;
use onecopy_disk::{Hydration, Snapshot, Statistics};
use onecopy_pagemap::ContentHash;
use serde::{Deserialize, Serialize};

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", rename_all_fields = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Everything about the disk and its server: [`ServedDisk`].
    Info,
    /// The counters in Prometheus' text form: a string.
    Metrics,
    /// Makes a durable snapshot: [`Snapshot`].
    Snapshot {
        /// Its name.
        name: String,
    },
    /// Deletes one.
    DeleteSnapshot {
        /// Its name.
        name: String,
    },
    /// Which blocks hold these contents, and have since a snapshot: a list with the number of a block or nothing for
    /// each, by the page map.
    Find {
        /// The snapshot's name.
        snapshot: String,
        /// What is looked for, at most [`WANTED_MAX`].
        wanted: Vec<WantedContent>,
    },
    /// The same since the end of an epoch.
    FindSinceEpoch {
        /// Its number.
        epoch: u64,
        /// What is looked for, at most [`WANTED_MAX`].
        wanted: Vec<WantedContent>,
    },
    /// Ends the current epoch, and keeps its end until it is released or the server ends; over NBD it is the export
    /// `epoch/NUMBER`: the number.
    Cut,
    /// Which blocks of 4 KiB have changed: [`ChangedBlocks`].
    Changed {
        /// Since the end of this epoch.
        from: u64,
        /// Up to the end of this one.
        to: u64,
        /// From this block on.
        first: u64,
    },
    /// Lets all ended epochs go up to this one: how many.
    ReleaseEpochs {
        /// The last one.
        through: u64,
    },
    /// Makes all that was written durable.
    Flush,
    /// Bounds the background copy of a remote base.
    SetLimit {
        /// Bytes a second; none is no bound.
        bytes_per_second: Option<u64>,
    },
    /// Keeps answers from the guest from now on, until their epoch is released.
    Hold {
        /// Which.
        what: HoldMode,
    },
    /// Lets go the answers of this epoch and all before it.
    Release {
        /// The epoch's number.
        epoch: u64,
    },
    /// Closes the disk and ends the server.
    Stop,
}

/// Ranges of blocks that one answer tells of at most.
pub const RANGES_MAX: usize = 1000;

/// Blocks that have changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedBlocks {
    /// The first block of each range and the one behind it, rising; at most [`RANGES_MAX`].
    pub ranges: Vec<(u64, u64)>,
    /// There may be more, from this block on.
    pub next: Option<u64>,
}

/// Contents that are looked for by one request: as many as fit into its line.
pub const WANTED_MAX: usize = 1000;

/// The content of a page of memory that is looked for on the disk: the page's number, and the high and the low half of
/// the content's hash by [`PageMapStatus::seed`]. Halves, because tagged JSON holds no number of 128 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedContent(u64, u64, u64);

impl WantedContent {
    /// Of a page.
    pub fn new(page: u64, hash: ContentHash) -> WantedContent {
        WantedContent(page, (hash >> 64) as u64, hash as u64)
    }

    /// The page's number, and the hash.
    pub fn page_and_hash(self) -> (u64, ContentHash) {
        (self.0, u128::from(self.1) << 64 | u128::from(self.2))
    }
}

/// Which answers are kept from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HoldMode {
    /// None, from now on.
    Nothing,
    /// Those of flushes.
    Flushes,
    /// Those of flushes and of all that changes the disk.
    Changes,
}

impl From<HoldMode> for CompletionHold {
    fn from(held: HoldMode) -> CompletionHold {
        match held {
            HoldMode::Nothing => CompletionHold::Nothing,
            HoldMode::Flushes => CompletionHold::Flushes,
            HoldMode::Changes => CompletionHold::Changes,
        }
    }
}

/// A served disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServedDisk {
    /// The server's process.
    pub process_id: u32,
    /// Whether this server has the disk now. With vhost-user-blk it has it while a machine's rings run.
    pub is_attached: bool,
    /// What the disk did since it was attached; none while it is not.
    pub disk: Option<Statistics>,
    /// How far the copy of a remote base is; none when there is nothing to copy.
    pub hydration: Option<Hydration>,
    /// Snapshots; none while the disk is not attached.
    pub snapshots: Option<Vec<Snapshot>>,
    /// The transports.
    pub transports: Vec<Transport>,
    /// Which page of memory equals which block; none while the disk is not attached, or without a page map.
    pub page_map: Option<PageMapStatus>,
}

/// A transport of a served disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Transport {
    /// `vhost-user-blk` or `nbd`.
    pub kind: String,
    /// Where it listens.
    pub address: String,
    /// Its counters, as the transport names them.
    pub counters: serde_json::Value,
}

/// A page map's figures.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PageMapStatus {
    /// How it began: `empty`, `loaded`, or why a file was not believed.
    pub origin: String,
    /// What it has done and holds.
    #[serde(flatten)]
    pub figures: onecopy_pagemap::Statistics,
    /// Bytes of the disk that the background scan has come past; its size once it is through.
    pub scanned_bytes: u64,
    /// By which contents are hashed.
    #[serde(default)]
    pub seed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_look_as_they_are_documented() {
        let cases = [
            (Request::Info, r#"{"command":"info"}"#),
            (Request::Snapshot { name: "a".to_owned() }, r#"{"command":"snapshot","name":"a"}"#),
            (Request::DeleteSnapshot { name: "a".to_owned() }, r#"{"command":"delete-snapshot","name":"a"}"#),
            (Request::SetLimit { bytes_per_second: Some(7) }, r#"{"command":"set-limit","bytes_per_second":7}"#),
            (
                Request::Find { snapshot: "a".to_owned(), wanted: vec![WantedContent::new(7, (1 << 64) + 2)] },
                r#"{"command":"find","snapshot":"a","wanted":[[7,1,2]]}"#,
            ),
            (
                Request::FindSinceEpoch { epoch: 3, wanted: vec![WantedContent::new(7, 2)] },
                r#"{"command":"find-since-epoch","epoch":3,"wanted":[[7,0,2]]}"#,
            ),
            (Request::Cut, r#"{"command":"cut"}"#),
            (Request::Changed { from: 1, to: 2, first: 3 }, r#"{"command":"changed","from":1,"to":2,"first":3}"#),
            (Request::ReleaseEpochs { through: 2 }, r#"{"command":"release-epochs","through":2}"#),
            (Request::Stop, r#"{"command":"stop"}"#),
        ];
        for (request, text) in cases {
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        assert!(serde_json::from_str::<Request>(r#"{"command":"format"}"#).is_err());
    }

    #[test]
    fn as_many_contents_as_are_asked_for_at_once_fit_into_a_line() {
        let wanted = vec![WantedContent::new(u64::MAX >> 12, u128::MAX); WANTED_MAX];
        assert_eq!(wanted[0].page_and_hash(), (u64::MAX >> 12, u128::MAX));
        let request = Request::Find { snapshot: "s".repeat(255), wanted };
        assert!(serde_json::to_string(&request).unwrap().len() < onecopy_control::server::REQUEST_BYTES_MAX);
    }

    #[test]
    fn a_page_maps_figures_stand_beside_its_origin() {
        let figures = onecopy_pagemap::Statistics { known_blocks: 3, ..Default::default() };
        let status = PageMapStatus { origin: "empty".to_owned(), figures, scanned_bytes: 4096, seed: 7 };
        let text = serde_json::to_value(&status).unwrap();
        assert_eq!(
            (&text["origin"], &text["known_blocks"], &text["scanned_bytes"]),
            (&"empty".into(), &3.into(), &4096.into())
        );
        assert_eq!(serde_json::from_value::<PageMapStatus>(text).unwrap(), status);
    }
}
