//! The page map itself.

use std::ops::Range;

use crate::contents::{Contents, EXTENT_BLOCKS, Fingerprint};
use crate::hints::Hints;
use crate::index::Index;
use crate::statistics::{Counters, Statistics};
use crate::{ContentHash, PAGE_BYTES, PageMapError, content_hash};

/// Blocks that a number of 32 bits can name.
const DISK_BLOCKS_MAX: u64 = 1 << 32;

/// Blocks of which a page map remembers the content unless it is told otherwise: 256 GiB of disk, 1.25 GiB of memory
/// once all have passed.
const REMEMBERED_BLOCKS_DEFAULT: u64 = 1 << 26;

/// Guest memory for which there are hints unless it is told otherwise: 16 MiB of hints once all have been used.
const HINTED_BYTES_DEFAULT: u64 = 16 << 30;

/// How much a page map remembers at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Blocks whose content is remembered. Beyond it the extent of 4 MiB of disk is forgotten of which nothing has
    /// passed for longest.
    pub blocks_max: u64,
    /// Guest memory for which there are hints, in bytes. Beyond it pages share hints: the newer one stays, the index
    /// finds the other.
    pub guest_memory_bytes: u64,
}

impl Bounds {
    /// For a disk of this size: all of it up to 256 GiB, and guests up to 16 GiB.
    pub fn for_disk(size_bytes: u64) -> Bounds {
        let blocks = size_bytes.div_ceil(PAGE_BYTES as u64);
        Bounds { blocks_max: blocks.min(REMEMBERED_BLOCKS_DEFAULT), guest_memory_bytes: HINTED_BYTES_DEFAULT }
    }
}

/// What a page of memory equals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing but zeros.
    Zero,
    /// What this block held a moment ago.
    Block {
        /// The block's number.
        block: u64,
        /// Whether the guest's address told it, without a search.
        by_hint: bool,
    },
    /// No block that is known.
    Unknown,
}

/// Which page of memory equals which block. All calls may come from any number of threads.
pub struct PageMap {
    seed: u64,
    blocks: u64,
    zero: Fingerprint,
    pub(crate) contents: Contents,
    index: Index,
    hints: Hints,
    counters: Counters,
}

impl PageMap {
    /// An empty one for a disk of this size, whose contents are hashed with this seed.
    ///
    /// # Errors
    /// The disk is larger than 16 TiB.
    pub fn new(size_bytes: u64, seed: u64, bounds: Bounds) -> Result<PageMap, PageMapError> {
        let blocks = size_bytes.div_ceil(PAGE_BYTES as u64);
        if blocks > DISK_BLOCKS_MAX {
            return Err(PageMapError::TooLarge { blocks, max: DISK_BLOCKS_MAX });
        }
        Ok(PageMap {
            seed,
            blocks,
            zero: Fingerprint::of(content_hash(seed, &[0; PAGE_BYTES])),
            contents: Contents::new(bounds.blocks_max.min(blocks)),
            index: Index::new(bounds.blocks_max.min(blocks)),
            hints: Hints::new(bounds.guest_memory_bytes),
            counters: Counters::default(),
        })
    }

    /// Blocks of the disk.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The seed of [`content_hash`] for this disk.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// A block holds a content of this hash now; it was moved to or from the guest's page at this address, if it was
    /// one page.
    pub fn record(&self, block: u64, hash: ContentHash, guest_address: Option<u64>) {
        let Some(block) = self.number(block) else { return };
        Counters::count(&self.counters.recorded);
        self.enter(block, Fingerprint::of(hash));
        if let Some(address) = guest_address {
            self.hints.hint(address, block);
        }
    }

    /// A block that is known already was moved to or from the guest's page at this address.
    pub fn hint(&self, block: u64, guest_address: u64) {
        if let Some(block) = self.number(block) {
            self.hints.hint(guest_address, block);
        }
    }

    /// What these blocks hold is not known any more.
    pub fn forget(&self, blocks: Range<u64>) {
        self.contents.forget(blocks);
    }

    /// Whether a block's content is known.
    pub fn knows(&self, block: u64) -> bool {
        self.number(block).is_some_and(|block| self.contents.get(block).is_some())
    }

    /// Whether a block is known to hold a content of this hash (64 bits of it are compared).
    pub fn holds(&self, block: u64, hash: ContentHash) -> bool {
        self.number(block).is_some_and(|block| self.contents.get(block) == Some(Fingerprint::of(hash)))
    }

    /// The block that holds what this page of memory holds. The address of the page in the guest, if it is told, is
    /// tried first.
    pub fn find(&self, page: &[u8; PAGE_BYTES], guest_address: Option<u64>) -> Found {
        if is_zero(page) {
            Counters::count(&self.counters.lookups);
            Counters::count(&self.counters.found_zero);
            return Found::Zero;
        }
        self.find_hash(content_hash(self.seed, page), guest_address)
    }

    /// The same for a page whose hash ([`content_hash`]) is known already. A page of zeros is told as such, too.
    pub fn find_hash(&self, hash: ContentHash, guest_address: Option<u64>) -> Found {
        Counters::count(&self.counters.lookups);
        let fingerprint = Fingerprint::of(hash);
        if fingerprint == self.zero {
            Counters::count(&self.counters.found_zero);
            return Found::Zero;
        }
        let hinted = guest_address.and_then(|address| self.hints.get(address));
        if let Some(block) = hinted.filter(|block| self.contents.get(*block) == Some(fingerprint)) {
            Counters::count(&self.counters.found_by_hint);
            return Found::Block { block: block.into(), by_hint: true };
        }
        match self.index.find(fingerprint, &self.contents) {
            Some(block) => {
                Counters::count(&self.counters.found_by_index);
                Found::Block { block: block.into(), by_hint: false }
            }
            None => Found::Unknown,
        }
    }

    /// The same for many pages, each with its number and hash, one answer each; of several blocks the one that follows
    /// the block of the page before, so that answers come in runs. Blocks that `is_wanted` refuses are not told, nor
    /// are zeros.
    pub fn find_many(
        &self,
        pages: impl IntoIterator<Item = (u64, ContentHash)>,
        mut is_wanted: impl FnMut(u64) -> bool,
    ) -> Vec<Option<u64>> {
        let mut next = None;
        let mut find = |(page, hash): (u64, ContentHash)| {
            let follows = next.filter(|block| self.holds(*block, hash));
            let address = page.checked_mul(PAGE_BYTES as u64);
            let block = follows.or_else(|| match self.find_hash(hash, address) {
                Found::Block { block, .. } => Some(block),
                Found::Zero | Found::Unknown => None,
            });
            let block = block.filter(|block| is_wanted(*block));
            next = block.map(|block| block + 1);
            block
        };
        pages.into_iter().map(&mut find).collect()
    }

    /// What it has done and holds. Looks at all that is known: some milliseconds for each 100 GiB.
    pub fn statistics(&self) -> Statistics {
        let extent_bytes = u64::from(EXTENT_BLOCKS) * 8;
        let fixed_bytes = self.index.memory_bytes() + self.hints.memory_bytes();
        Statistics {
            known_blocks: self.contents.known(),
            memory_bytes: fixed_bytes + self.contents.extents() * extent_bytes,
            replaced_entries: self.index.replaced(),
            dropped_extents: self.contents.dropped_extents(),
            ..self.counters.statistics()
        }
    }

    /// Enters a block into both directions. Zeros have a name of their own, so they take no place of the index.
    pub(crate) fn enter(&self, block: u32, fingerprint: Fingerprint) {
        let held_it = self.contents.set(block, fingerprint);
        if !held_it && fingerprint != self.zero {
            self.index.insert(block, fingerprint, &self.contents);
        }
    }

    fn number(&self, block: u64) -> Option<u32> {
        if block < self.blocks { u32::try_from(block).ok() } else { None }
    }
}

/// Whether a page is all zeros. Most that are not differ early.
fn is_zero(page: &[u8; PAGE_BYTES]) -> bool {
    page.chunks_exact(64).all(|line| line.iter().fold(0, |any, byte| any | byte) == 0)
}
