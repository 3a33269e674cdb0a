//! The pages of a memory: what each holds now, and what it held at the end of each epoch that is kept.
//!
//! ```text
//!  newest[page] ──> slot (open epoch) ──older──> slot (epoch 7) ──older──> slot (epoch 5) ──> the shadow, or zeros
//!  epochs: 5 ──> its slots     6 (none)     7 ──> its slots     8, open ──> its slots
//! ```
//!
//! A slot of an ended epoch never changes. When an epoch is released its slots go into the shadow, the oldest first.
//! Tables and lists are taken at the beginning. A write, with which the kernel makes room, needs memory for its frame
//! alone; when there is none the page is called dropped.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use super::shadow::Shadow;
use super::state::{Bits, EPOCH_BITS, Slot, State};
use crate::{CheckpointError, PAGE_BYTES};

/// Epochs kept at once. Each costs a step of the way to a page that it changed.
pub(super) const EPOCHS_MAX: usize = 64;
/// No slot, or the end of a list.
const NONE: u32 = u32::MAX;
/// Slots that go into the shadow at a time.
const FOLD_SLOTS: usize = 256;

/// An epoch's slots, a list through `next`.
#[derive(Clone, Copy)]
struct Changed {
    first: u32,
    pages: u64,
}

impl Changed {
    const EMPTY: Changed = Changed { first: NONE, pages: 0 };
}

/// What a page held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Zero,
    Frame(u32),
    Shadow,
}

pub(super) struct Pages {
    pub(super) state: State,
    newest: Vec<u32>,
    older: Vec<u32>,
    next: Vec<u32>,
    free: Vec<u32>,
    /// Of each epoch from `first_epoch` to the open one.
    epochs: VecDeque<Changed>,
    first_epoch: u64,
    dropped: u64,
    failures: u64,
}

impl Pages {
    /// Finds what the state says. What a server knew beside it, it knew from there.
    pub(super) fn new(state: State) -> Result<Pages, CheckpointError> {
        let wrong = |what: String| CheckpointError::State { what };
        let length = |count: u64| usize::try_from(count).map_err(|error| wrong(error.to_string()));
        let (pages, slots) = (length(state.pages())?, length(state.slots())?);
        let current = state.current();
        let mut used = Vec::new();
        let mut free = Vec::with_capacity(slots);
        // Low numbers are given out first.
        for slot in (0..u32::try_from(slots).expect("checked with the state")).rev() {
            match state.slot(slot) {
                None => free.push(slot),
                Some(says) if u64::from(says.page) < state.pages() && (1..=current).contains(&says.epoch) => {
                    used.push((says.epoch, says.page, slot));
                }
                Some(says) => return Err(wrong(format!("slot {slot} says {says:?}"))),
            }
        }
        used.sort_unstable();
        let first_epoch = used.first().map_or(u64::MAX, |(epoch, ..)| *epoch).min(state.released() + 1);
        let count =
            (current + 1).checked_sub(first_epoch).filter(|count| *count > 0 && *count <= EPOCHS_MAX as u64 + 1);
        let count = count.ok_or_else(|| wrong(format!("epochs {first_epoch} to {current}")))?;
        if used.windows(2).any(|pair| (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1)) {
            return Err(wrong("two slots of one page in one epoch".to_owned()));
        }
        let dropped = state.count(Bits::Dropped);
        let mut found = Pages {
            state,
            newest: vec![NONE; pages],
            older: vec![NONE; slots],
            next: vec![NONE; slots],
            free,
            epochs: vec![Changed::EMPTY; length(count)?].into(),
            first_epoch,
            dropped,
            failures: 0,
        };
        for (epoch, page, slot) in used {
            found.link(epoch, page, slot);
        }
        Ok(found)
    }

    fn link(&mut self, epoch: u64, page: u32, slot: u32) {
        let index = usize::try_from(epoch - self.first_epoch).expect("few epochs are kept");
        let changed = &mut self.epochs[index];
        (self.next[slot as usize], changed.first) = (changed.first, slot);
        changed.pages += 1;
        self.older[slot as usize] = std::mem::replace(&mut self.newest[page as usize], slot);
    }

    /// Whether a page can be recorded without making room first.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Pages changed since the last cut.
    pub(super) fn pending(&self) -> u64 {
        self.epochs.back().map_or(0, |changed| changed.pages)
    }

    /// Pages whose content is in the page cache at most.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(super) fn is_dropped(&self, page: u32) -> bool {
        self.dropped > 0 && self.state.bit(Bits::Dropped, page)
    }

    /// Stores that failed: what was read out of the page cache before the last one may be older than what that had.
    pub(super) fn failures(&self) -> u64 {
        self.failures
    }

    /// What was written back could not be kept.
    pub(super) fn fail(&mut self, page: u32) {
        self.failures += 1;
        self.set_dropped(page, true);
    }

    /// From now on the page's content is in the page cache at most, or not.
    pub(super) fn set_dropped(&mut self, page: u32, dropped: bool) {
        match (self.state.set_bit(Bits::Dropped, page, dropped), dropped) {
            (false, true) => self.dropped += 1,
            (true, false) => self.dropped -= 1,
            _ => {}
        }
    }

    /// Records what a page holds now. The caller has seen that there is room. After an error it is as it was, and may
    /// be half of it: its content is to be called dropped.
    pub(super) fn put(&mut self, page: u32, content: &[u8; PAGE_BYTES]) -> io::Result<()> {
        let is_zero = content.iter().all(|byte| *byte == 0);
        let epoch = self.state.current();
        let says = Slot { epoch, page, is_zero };
        let newest = self.newest[page as usize];
        let known = if newest == NONE { None } else { self.state.slot(newest) };
        match known.filter(|known| known.epoch == epoch) {
            Some(known) if is_zero => {
                self.state.set_slot(newest, Some(says));
                if !known.is_zero {
                    self.state.free_frames(newest, 1);
                }
            }
            Some(_) => {
                self.state.write_frame(newest, content)?;
                self.state.set_slot(newest, Some(says));
            }
            None => {
                let slot = *self.free.last().expect("the caller has made room");
                if !is_zero {
                    self.state.write_frame(slot, content)?;
                }
                self.free.pop();
                self.state.set_slot(slot, Some(says));
                self.link(epoch, page, slot);
            }
        }
        if self.dropped > 0 {
            self.set_dropped(page, false);
        }
        Ok(())
    }

    /// What a page held at the end of an epoch; of the open one: what it holds now.
    fn content(&self, page: u32, until: u64) -> Content {
        let mut slot = self.newest[page as usize];
        while slot != NONE {
            let says = self.state.slot(slot).expect("a linked slot says something");
            match says {
                Slot { epoch, is_zero: true, .. } if epoch <= until => return Content::Zero,
                Slot { epoch, .. } if epoch <= until => return Content::Frame(slot),
                _ => slot = self.older[slot as usize],
            }
        }
        if self.state.bit(Bits::Held, page) { Content::Shadow } else { Content::Zero }
    }

    /// Reads what a page holds now.
    pub(super) fn read_now(
        &self,
        shadow: &Shadow,
        page: u32,
        into: &mut [u8; PAGE_BYTES],
    ) -> Result<(), CheckpointError> {
        if self.is_dropped(page) {
            return Err(CheckpointError::PageNotKept { page });
        }
        self.copy(shadow, page, self.state.current(), into)
    }

    /// Reads what a page held at the end of an epoch that is kept.
    pub(super) fn read_at(
        &self,
        shadow: &Shadow,
        epoch: u64,
        page: u32,
        into: &mut [u8; PAGE_BYTES],
    ) -> Result<(), CheckpointError> {
        self.check_kept(epoch)?;
        self.copy(shadow, page, epoch, into)
    }

    fn copy(&self, shadow: &Shadow, page: u32, until: u64, into: &mut [u8; PAGE_BYTES]) -> Result<(), CheckpointError> {
        match self.content(page, until) {
            Content::Zero => into.fill(0),
            Content::Frame(slot) => self.state.read_frame(slot, into),
            Content::Shadow => return shadow.read(page, into),
        }
        Ok(())
    }

    fn check_kept(&self, epoch: u64) -> Result<(), CheckpointError> {
        if epoch > self.state.released() && epoch < self.state.current() {
            return Ok(());
        }
        Err(CheckpointError::UnknownEpoch { epoch })
    }

    /// Ends the open epoch; its number and how many pages it has.
    pub(super) fn cut(&mut self) -> Result<(u64, u64), CheckpointError> {
        if !self.state.is_keeping() || self.dropped > 0 {
            return Err(CheckpointError::NotKept { pages: self.dropped });
        }
        let epoch = self.state.current();
        if self.epochs.len() > EPOCHS_MAX || epoch + 1 >= 1 << EPOCH_BITS {
            return Err(CheckpointError::TooManyEpochs { kept: self.epochs.len() - 1 });
        }
        self.state.set_current(epoch + 1);
        let pages = self.pending();
        self.epochs.push_back(Changed::EMPTY);
        Ok((epoch, pages))
    }

    /// The pages that were changed in an epoch, in any order.
    pub(super) fn changed(&self, epoch: u64) -> Result<Vec<u32>, CheckpointError> {
        self.check_kept(epoch)?;
        let changed = self.epochs[usize::try_from(epoch - self.first_epoch).expect("few epochs are kept")];
        Ok(self.slots(changed).map(|(_, says)| says.page).collect())
    }

    /// Of these pages those that were not zeros at the end of an epoch, as far as that is known without reading them.
    pub(super) fn present(&self, epoch: u64, pages: Range<u32>, found: &mut Vec<u32>) -> Result<(), CheckpointError> {
        self.check_kept(epoch)?;
        found.extend(pages.filter(|page| self.content(*page, epoch) != Content::Zero));
        Ok(())
    }

    fn slots(&self, changed: Changed) -> impl Iterator<Item = (u32, Slot)> {
        let mut slot = changed.first;
        std::iter::from_fn(move || {
            let found = (slot != NONE).then_some(slot)?;
            slot = self.next[found as usize];
            Some((found, self.state.slot(found).expect("a linked slot says something")))
        })
    }

    /// The open epoch is none of them.
    pub(super) fn kept(&self) -> u64 {
        self.state.current() - self.state.released() - 1
    }

    /// Lets all epochs up to this one go; [`Pages::next_fold`] has what is left to do.
    pub(super) fn release(&mut self, epoch: u64) -> Result<(), CheckpointError> {
        self.check_kept(epoch)?;
        self.state.set_released(epoch);
        Ok(())
    }

    /// Lets the oldest epoch go that is kept; false when there is none.
    pub(super) fn release_oldest(&mut self) -> bool {
        let oldest = self.state.released() + 1;
        self.release(oldest).is_ok()
    }

    /// Some slots of the oldest released epoch, by page; they do not change until they are folded. None: all is done.
    pub(super) fn next_fold(&mut self) -> Option<Vec<(u32, Slot)>> {
        while self.first_epoch <= self.state.released() {
            let oldest = *self.epochs.front().expect("the open epoch is always there");
            if oldest.first != NONE {
                let mut slots: Vec<(u32, Slot)> = self.slots(oldest).take(FOLD_SLOTS).collect();
                slots.sort_unstable_by_key(|(_, says)| says.page);
                return Some(slots);
            }
            self.epochs.pop_front();
            self.first_epoch += 1;
        }
        None
    }

    /// The shadow holds what these slots say: they are free. They are the first ones of the oldest epoch.
    pub(super) fn folded(&mut self, slots: &[(u32, Slot)]) {
        let mut freed: Vec<u32> = slots.iter().map(|(slot, _)| *slot).collect();
        for (slot, says) in slots {
            self.state.set_bit(Bits::Held, says.page, !says.is_zero);
            self.unlink(*slot, says.page);
            self.state.set_slot(*slot, None);
            let oldest = self.epochs.front_mut().expect("the open epoch is always there");
            oldest.pages -= 1;
        }
        let oldest = self.epochs.front().expect("the open epoch is always there");
        let mut first = oldest.first;
        for _ in slots {
            first = self.next[first as usize];
        }
        self.epochs.front_mut().expect("the open epoch is always there").first = first;
        freed.sort_unstable();
        for run in freed.chunk_by(|one, other| one + 1 == *other) {
            self.state.free_frames(run[0], u32::try_from(run.len()).expect("few slots"));
        }
        self.free.extend(freed.iter().rev());
    }

    /// Takes the last slot, the one of the oldest epoch, out of its page's chain.
    fn unlink(&mut self, slot: u32, page: u32) {
        let mut at = self.newest[page as usize];
        if at == slot {
            self.newest[page as usize] = NONE;
            return;
        }
        while self.older[at as usize] != slot {
            at = self.older[at as usize];
        }
        self.older[at as usize] = NONE;
    }
}
