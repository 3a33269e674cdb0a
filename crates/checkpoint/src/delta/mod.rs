//! How an epoch of a machine travels to another host that holds an earlier one already, or nothing.
//!
//! ```text
//!  this host                                                             the other host
//!  Source: pages and blocks of the epoch ─> Encoder ══ parts ══> Decoder ─> Destination: its memory and disk
//!  Known:  which block holds a content  ─┘     ^                    │ └───> Blocks: blocks of named versions
//!                                              └─ acknowledged, or what differs: sent again as it is
//! ```
//!
//! A *piece* is 4 KiB: a page of memory or a block of the disk. Each changed one travels as the first of these that
//! holds, which is the cheapest:
//!
//! | kind | what travels | needs |
//! |---|---|---|
//! | nothing | - | the other side holds the same bytes there |
//! | zero | a run | - |
//! | block | a run: a block of a named version of the disk | [`Known`] finds the content |
//! | held | a run: a page of the other side's memory as it is by now | its content was sent before |
//! | xor | the difference from what the other side has there, zstd | half of the words are equal, [`choice`] |
//! | zstd | the content, zstd, 32 pieces at a time | it can be made smaller, and the link is slower than that |
//! | literal | the content | - |
//!
//! **An index is no proof.** What a reference names is found by 64 bits of the content hash, and may be rewritten
//! before it is read. So each 32 pieces that are not zeros have their blake3, of what the sender read. An epoch counts
//! ([`Decoded::Whole`]) when all of them were right; else the other side names what differs, and gets it as it is
//! ([`Encoder::repair`]). One epoch is under way at a time: the next one is encoded against what was acknowledged.
//!
//! **Bounds.** The encoder's index of what the other side holds takes 20 bytes a page, of at most
//! [`HELD_PAGES_MAX`] pages: beyond it what was recorded longest ago is forgotten, and travels again. Buffers are some
//! 20 MiB here and 40 MiB there, whatever the epoch has.
//!
//! The bytes: `docs/link-format.md`. Why it is so: `docs/decisions/0029-what-an-epoch-travels-as.md`.

mod choice;
mod counts;
mod decoder;
mod encoder;
mod error;
mod fetch;
mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod known;
mod part;
#[cfg(test)]
mod tests;
mod threads;

use std::fmt;
use std::ops::Range;

pub use counts::Counts;
pub use decoder::Decoder;
pub use encoder::{Encoder, Options};
pub use error::DeltaError;
pub use known::{Known, Mapped, NothingKnown, Wanted};

use crate::PAGE_BYTES;
use crate::take::Cause;

/// The content of a piece.
pub type Piece = [u8; PAGE_BYTES];

/// Pages of which the encoder remembers what the other side holds, unless it is told otherwise: 16 GiB of memory, by
/// 80 MiB of index.
pub const HELD_PAGES_MAX: u64 = 1 << 22;

/// Versions of the disk that an epoch refers to.
pub const VERSIONS_MAX: usize = 16;

/// Where a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// The machine's memory: pieces are pages.
    Memory,
    /// The machine's disk: pieces are blocks.
    Disk,
}

/// A version of the disk that never changes and that both sides can read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// A snapshot, by its name of at most 255 bytes. It outlives the disk's server.
    Snapshot(String),
    /// An epoch that the other side holds, by the number that its sender gave it.
    Epoch(u64),
}

/// A block of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockAt {
    /// The place of the version in [`Epoch::versions`].
    pub version: u8,
    /// The block's number.
    pub block: u64,
}

/// An epoch that the other side holds: its number, and a digest of all that it came of, epoch by epoch. Two sides whose
/// `HeldEpoch` are equal hold the same machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HeldEpoch {
    /// The sender's number of it; 0 is none.
    pub epoch: u64,
    /// Blake3.
    pub digest: [u8; 32],
}

impl HeldEpoch {
    /// Nothing: memory and disk are zeros, or the disk is what both sides know it to be.
    pub const NOTHING: HeldEpoch = HeldEpoch { epoch: 0, digest: [0; 32] };
    /// As it travels.
    pub const BYTES: usize = 40;

    /// Its bytes: epoch, digest.
    pub fn to_bytes(self) -> [u8; HeldEpoch::BYTES] {
        let mut bytes = [0; HeldEpoch::BYTES];
        bytes[..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..].copy_from_slice(&self.digest);
        bytes
    }

    /// Of such bytes.
    pub fn from_bytes(bytes: &[u8; HeldEpoch::BYTES]) -> HeldEpoch {
        let (epoch, digest) = bytes.split_at(8);
        HeldEpoch {
            epoch: u64::from_le_bytes(epoch.try_into().expect("eight bytes")),
            digest: digest.try_into().expect("thirty-two bytes"),
        }
    }
}

impl fmt::Debug for HeldEpoch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = u32::from_be_bytes([self.digest[0], self.digest[1], self.digest[2], self.digest[3]]);
        write!(formatter, "epoch {} ({start:08x})", self.epoch)
    }
}

/// The sizes of a machine, which both sides know before anything travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Its memory, bytes: whole pages, at most 1 TiB.
    pub memory_bytes: u64,
    /// Its disk, bytes: at most 16 TiB. No reference leaves it.
    pub disk_bytes: u64,
    /// Whether writes to the disk travel. Not where both hosts have the disk, by storage or by a copy of its own.
    pub disk_travels: bool,
}

impl Sizes {
    /// Pieces of a space; a disk's last one may be cut short by its end.
    pub fn pieces(&self, space: Space) -> u64 {
        match space {
            Space::Memory => self.memory_bytes / PAGE_BYTES as u64,
            Space::Disk => self.disk_bytes.div_ceil(PAGE_BYTES as u64),
        }
    }
}

/// What the encoder reads of one space. Called by several threads at once.
pub trait Source: Sync {
    /// Reads what the piece holds at the end of the epoch that travels. It is the same each time until the epoch is
    /// acknowledged. Behind a disk's end are zeros.
    ///
    /// # Errors
    /// It cannot be read; the epoch does not travel.
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause>;

    /// Reads what the piece held at the end of the epoch that was acknowledged last; false when that is not kept: then
    /// it travels without.
    ///
    /// # Errors
    /// It cannot be read; the epoch does not travel.
    fn read_acknowledged(&self, number: u64, into: &mut Piece) -> Result<bool, Cause>;
}

/// The pieces of a space that an epoch has.
#[derive(Clone, Copy)]
pub struct Changed<'a> {
    /// Those that may have changed since the epoch that was acknowledged last; rising. Where nothing was: all that may
    /// be something else than what the other side begins with, zeros or what it has told of its disk.
    pub numbers: &'a [u64],
    /// Their content.
    pub source: &'a dyn Source,
}

/// An epoch that travels.
#[derive(Clone, Copy)]
pub struct Epoch<'a> {
    /// Its number, above that of the one before.
    pub number: u64,
    /// The versions that [`Known`] names, at most [`VERSIONS_MAX`].
    pub versions: &'a [Version],
    /// Pages.
    pub memory: Changed<'a>,
    /// Blocks, where they travel. Their content is looked for among the pages first.
    pub disk: Option<Changed<'a>>,
    /// The state of the devices; empty when it is of no use yet, in all but a migration's last epoch.
    pub devices: &'a [u8],
}

/// What was wrong of an epoch that has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Different {
    /// Pages, rising: all of each digest's that was wrong.
    pub pages: Vec<u64>,
    /// Blocks, rising.
    pub blocks: Vec<u64>,
    /// The devices.
    pub devices: bool,
}

impl Different {
    /// Whether nothing was.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.blocks.is_empty() && !self.devices
    }
}

/// What came of what has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// The epoch is there, and every piece is what the sender read.
    Whole(HeldEpoch),
    /// All has come, and this is not what the sender read: it is to be sent again, by [`Encoder::repair`].
    Different(Different),
}

/// The memory and disk that an epoch is written into. Numbers are within the machine's [`Sizes`].
///
/// What is written counts when [`Decoded::Whole`] says so, and the caller makes it count. A destination that can lose
/// its peer amid an epoch and go on without it (a backup) keeps what is written apart until then; one that is of no use
/// without its peer (of a migration) may write in place.
pub trait Destination: Sync {
    /// An epoch begins that has what changed since `since`: what was written since that is void. Since
    /// [`HeldEpoch::NOTHING`]: all memory is zeros.
    ///
    /// # Errors
    /// It is refused, as when a version is not there.
    fn begin(&self, epoch: u64, since: HeldEpoch, versions: &[Version]) -> Result<(), Cause>;

    /// Reads pieces that follow each other, as they are by what was written of this epoch so far.
    ///
    /// # Errors
    /// They cannot be read; the epoch ends.
    fn read(&self, space: Space, first: u64, into: &mut [u8]) -> Result<(), Cause>;

    /// Writes pieces that follow each other.
    ///
    /// # Errors
    /// They cannot be written; the epoch ends.
    fn write(&self, space: Space, first: u64, content: &[u8]) -> Result<(), Cause>;

    /// Makes pieces zeros.
    ///
    /// # Errors
    /// They cannot be; the epoch ends.
    fn zero(&self, space: Space, numbers: Range<u64>) -> Result<(), Cause>;
}

/// The blocks that references name.
pub trait Blocks: Sync {
    /// Reads blocks of one version, rising by number, each once, into as many times 4 KiB. Called ahead of need, by
    /// several threads at once. Behind the disk's end are zeros.
    ///
    /// # Errors
    /// They cannot be read; the epoch ends.
    fn read_many(&self, version: &Version, blocks: &[u64], into: &mut [u8]) -> Result<(), Cause>;
}

/// No block is ever named.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoBlocks;

impl Blocks for NoBlocks {
    fn read_many(&self, version: &Version, _: &[u64], _: &mut [u8]) -> Result<(), Cause> {
        Err(format!("there is no disk, and a block of {version:?} is named").into())
    }
}
