//! Which page of a virtual machine's memory equals which block of its disk.
//!
//! Content decides. What passes through the disk is recorded, block by block ([`PageMap::record`]); whoever holds a
//! page of the guest's memory asks which block holds the same bytes ([`PageMap::find`]). No part of the guest helps, so
//! the page cache and every buffer pool are found alike. The guest's address that was seen at the time of the I/O is a
//! hint that makes the question cheaper.
//!
//! The answer is an index's answer: 64 bits of the content hash agree, and the block may be overwritten in the next
//! moment. Whoever relies on it compares the bytes, or a cryptographic hash of them, with what a version of the disk
//! that does not change holds.
//!
//! ```text
//!   block ──> contents: hash of what it holds          8 bytes a block, in extents of 4 MiB of disk
//!   hash  ──> index: blocks that may hold it          12 bytes a block, two buckets of eight a hash
//!   page  ──> hints: block last moved to or from it    4 bytes a page of guest memory
//! ```
//!
//! Together that is 5 MiB for each GiB of the disk that has passed, and 1 MiB for each GiB of guest memory. Pages of
//! memory that hold nothing yet are not touched. [`Bounds`] says how much of a disk is remembered at most, and what
//! happens then.

mod contents;
mod error;
mod file;
mod hints;
mod index;
mod map;
mod statistics;
mod zeroed;

pub use error::PageMapError;
pub use file::Identity;
pub use map::{Bounds, Found, PageMap};
pub use statistics::Statistics;

/// Bytes of a page of memory and of a block of a disk.
pub const PAGE_BYTES: usize = 4096;

/// A content, as [`content_hash`] tells it apart from others.
pub type ContentHash = u128;

/// The hash by which contents are told apart: XXH3 of 128 bits with the disk's own seed. The only place
/// that hashes contents: a disk that hashed by another function would tell of blocks that no page is ever found in. Who
/// changes it raises the version of the page map's file, which keeps what came of it.
pub fn content_hash(seed: u64, bytes: &[u8]) -> ContentHash {
    xxhash_rust::xxh3::xxh3_128_with_seed(bytes, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map that another function has filled finds nothing, and says nothing: its version must tell.
    #[test]
    fn another_content_hash_has_another_version() {
        let hash = content_hash(0x1234_5678_9abc_def0, &[0xa5; PAGE_BYTES]);
        assert_eq!((hash, file::VERSION), (0x8ac09428_ee441b6b_30742f9a_66e812eb, 1), "raise VERSION with it");
    }
}
