//! Who learns what content passes through a disk: the page map.

use std::ops::Range;
use std::path::Path;

use onecopy_pagemap::ContentHash;

/// Which way a block passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the disk to the guest.
    Read,
    /// From the guest to the disk.
    Write,
}

/// The disk that was opened.
#[derive(Clone, Copy, Debug)]
pub struct Opened<'a> {
    /// Its directory.
    pub directory: &'a Path,
    /// Its identity, 32 hexadecimal digits.
    pub uuid: &'a str,
    /// The seed of its content hashes.
    pub seed: u64,
    /// Its size.
    pub size_bytes: u64,
    /// Grows by one with each opening by anybody: what was known at the close of the generation before still holds.
    pub generation: u64,
}

/// Learns the content of blocks. Called on the path of every request, by many threads at once: it must be quick, must
/// not block and must not call the disk.
pub trait Observer: Send + Sync {
    /// The disk was opened, by this process alone; nothing has passed yet.
    fn opened(&self, _disk: &Opened<'_>) {}

    /// A whole block passed. `hash` is the [`content_hash`](onecopy_pagemap::content_hash) of its 4096 bytes with the
    /// disk's seed. The guest's address is told
    /// only when the block lies within one guest page, at the page's beginning or not.
    fn transferred(&self, block: u64, hash: ContentHash, guest_address: Option<u64>, direction: Direction);

    /// These blocks changed to something unknown: partly written, discarded, zeroed.
    fn invalidated(&self, blocks: Range<u64>);

    /// Whether the block's content is known: then a read of it is not hashed again. Only a hint.
    fn knows(&self, block: u64) -> bool;

    /// A read of a block that [`knows`](Observer::knows) put it at this guest address.
    fn placed(&self, block: u64, guest_address: u64);

    /// The disk is drained and flushed, and is about to be given back in order: nothing passes any more in this
    /// generation of it. Not called when the disk's process dies.
    fn closing(&self) {}
}
