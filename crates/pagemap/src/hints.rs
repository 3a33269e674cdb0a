//! The block that was last moved to or from a page of guest memory.
//!
//! A hint is believed only when the page's content is that block's, so pages may share a place: with more guest memory
//! than places the older hint is lost, and the index answers instead.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::{PAGE_BYTES, zeroed};

/// Hints of a guest.
pub(crate) struct Hints {
    /// The block's number plus one; zero is none.
    places: Box<[AtomicU32]>,
}

impl Hints {
    /// Room for this much guest memory, at least one page.
    pub(crate) fn new(guest_memory_bytes: u64) -> Hints {
        let pages = usize::try_from(guest_memory_bytes / PAGE_BYTES as u64).unwrap_or(usize::MAX >> 3);
        Hints { places: zeroed::of_32_bits(pages.max(1)) }
    }

    /// Remembers that this block was moved to or from the page at this address.
    pub(crate) fn hint(&self, guest_address: u64, block: u32) {
        // The last number of 32 bits has no place; its page goes without a hint.
        self.place(guest_address).store(block.wrapping_add(1), Ordering::Relaxed);
    }

    /// The block that may be the page's.
    pub(crate) fn get(&self, guest_address: u64) -> Option<u32> {
        self.place(guest_address).load(Ordering::Relaxed).checked_sub(1)
    }

    /// What the places take when all are used, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        std::mem::size_of_val(&*self.places) as u64
    }

    fn place(&self, guest_address: u64) -> &AtomicU32 {
        let page = guest_address / PAGE_BYTES as u64;
        &self.places[(page % self.places.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_the_last_block_of_a_page_and_pages_beyond_the_room_share_places() {
        let hints = Hints::new(4 * PAGE_BYTES as u64);
        assert_eq!(hints.get(0x1000), None);
        hints.hint(0x1000, 7);
        hints.hint(0x1fff, 8);
        assert_eq!(hints.get(0x1000), Some(8));
        hints.hint(0x5000, 9);
        assert_eq!(hints.get(0x1000), Some(9));
        hints.hint(0x1000, u32::MAX);
        assert_eq!(hints.get(0x1000), None);
    }
}
