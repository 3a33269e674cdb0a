//! What PostgreSQL keeps of each buffer: its header, the same in 15, 16, 17 and 18 as far as it is used here.
//!
//! Source: `src/include/storage/buf_internals.h` of each version. 19 makes the state a word of eight bytes and moves
//! its parts, so it is refused. All of these have headers of 64 bytes: five words of the page's identity, the buffer's
//! number, the state.

/// The versions whose headers are these.
pub(super) const MAJOR_VERSIONS: std::ops::RangeInclusive<u32> = 15..=18;
/// `BUFFERDESC_PAD_TO_SIZE`.
pub(super) const HEADER_BYTES: usize = 64;
/// `tag.spcOid`.
pub(super) const TABLESPACE_AT: usize = 0;
/// `tag.forkNum`.
pub(super) const FORK_AT: usize = 12;
/// `buf_id`.
pub(super) const NUMBER_AT: usize = 20;
/// `state`.
pub(super) const STATE_AT: usize = 24;
/// Forks of a relation: main, free space, visibility, initial.
pub(super) const FORK_MAX: u32 = 3;
/// `BM_MAX_USAGE_COUNT`.
pub(super) const USAGE_MAX: u32 = 5;

const REFERENCES: u32 = (1 << 18) - 1;
const USAGE_SHIFT: u32 = 18;
const LOCKED: u32 = 1 << 22;
const DIRTY: u32 = 1 << 23;
const VALID: u32 = 1 << 24;
const TAG_VALID: u32 = 1 << 25;
const IO_IN_PROGRESS: u32 = 1 << 26;
const IO_ERROR: u32 = 1 << 27;
const JUST_DIRTIED: u32 = 1 << 28;
const PIN_COUNT_WAITER: u32 = 1 << 29;
const CHECKPOINT_NEEDED: u32 = 1 << 30;

/// None of these may be set in a buffer whose page is dropped: its content is needed, or somebody is at work on it.
const IN_THE_WAY: u32 =
    LOCKED | DIRTY | IO_IN_PROGRESS | IO_ERROR | JUST_DIRTIED | PIN_COUNT_WAITER | CHECKPOINT_NEEDED;

/// The state of a buffer at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State(pub u32);

impl State {
    /// Whether its page can be dropped: nobody uses it, and what it holds is on disk or means nothing.
    pub fn is_droppable(self) -> bool {
        self.references() == 0 && self.0 & IN_THE_WAY == 0
    }

    /// Whether it holds a page.
    pub fn is_valid(self) -> bool {
        self.0 & VALID != 0
    }

    /// Whether its page must be written before it can be dropped.
    pub fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    /// Whether it belongs to a page, read or not.
    pub fn has_tag(self) -> bool {
        self.0 & TAG_VALID != 0
    }

    /// How many use it.
    pub fn references(self) -> u32 {
        self.0 & REFERENCES
    }

    /// How often it was used lately, 0 to 5.
    pub fn usage(self) -> u32 {
        self.0 >> USAGE_SHIFT & 0xf
    }

    /// Whether the parts fit together; a word that is no state most likely does not.
    pub fn makes_sense(self) -> bool {
        self.usage() <= USAGE_MAX && (self.has_tag() || self.0 & (VALID | DIRTY) == 0)
    }

    /// The same, locked: nobody else changes the header or begins to use the buffer (`LockBufHdr`).
    pub fn locked(self) -> State {
        State(self.0 | LOCKED)
    }

    /// What a buffer becomes whose memory was given back: the next who wants the page finds that it must be read
    /// (`BufferAlloc` treats it as one whose read has failed). Its usage count stays: PostgreSQL's own eviction works
    /// as ever.
    pub fn without_content(self) -> State {
        State(self.0 & !VALID & !LOCKED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_clean_page_that_nobody_uses_can_be_dropped() {
        let page = State(VALID | TAG_VALID | 1 << 31 | 5 << USAGE_SHIFT);
        assert!(page.is_droppable() && page.is_valid() && page.makes_sense() && page.usage() == 5);
        assert_eq!(page.without_content(), State(TAG_VALID | 1 << 31 | 5 << USAGE_SHIFT));
        assert!(State(0).is_droppable(), "a buffer that was never used holds nothing");
    }

    #[test]
    fn what_is_used_or_not_on_disk_cannot() {
        for flag in [LOCKED, DIRTY, IO_IN_PROGRESS, IO_ERROR, JUST_DIRTIED, PIN_COUNT_WAITER, CHECKPOINT_NEEDED, 1, 77]
        {
            assert!(!State(VALID | TAG_VALID | flag).is_droppable(), "{flag:#x}");
        }
    }

    proptest! {
        #[test]
        fn dropping_changes_one_flag(word: u32) {
            let state = State(word & !REFERENCES & !IN_THE_WAY);
            prop_assert!(state.is_droppable());
            prop_assert!(!state.locked().is_droppable());
            prop_assert_eq!(state.locked().without_content().0 | state.0 & VALID, state.0);
        }
    }
}
