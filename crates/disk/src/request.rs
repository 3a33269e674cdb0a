//! A request to a disk, as a door hands it over.

use crate::DiskError;

/// One piece of a request's data in guest memory. It need not be a page, nor begin at one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Guest physical address of its first byte, when the door knows it.
    pub guest_address: Option<u64>,
    /// Its length in bytes.
    pub length: u32,
}

/// What a guest asks for. Offsets and lengths are in bytes, multiples of [`SECTOR_BYTES`](crate::SECTOR_BYTES).
#[derive(Debug)]
pub enum Request {
    /// Bytes of the disk.
    Read {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
        /// Where they go in guest memory: may be empty.
        pieces: Vec<Piece>,
    },
    /// New bytes: the door's own copy, which the guest cannot change any more.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        data: Vec<u8>,
        /// Where they came from in guest memory: may be empty.
        pieces: Vec<Piece>,
    },
    /// All writes completed before are durable when this one completes.
    Flush,
    /// The guest needs this range no more: it reads as zeros and its space is freed.
    Discard {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// The range reads as zeros.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
        /// Whether its space may be freed; else it stays reserved, so that later writes cannot run out of it.
        may_unmap: bool,
    },
}

/// Called once with a request's outcome: a read's bytes, nothing for others. From any thread; it must not block.
pub type Completion = Box<dyn FnOnce(Result<Vec<u8>, DiskError>) + Send>;

/// The outcome of a request that must not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// It is done.
    Done,
    /// It would wait, and nothing of it was done: hand it to [`Disk::submit`](crate::Disk::submit).
    WouldWait,
}
