//! A memory as its server has it: pages, the shadow below them, and what is done when room is scarce.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

use super::pages::Pages;
use super::shadow::Shadow;
use super::state::{Bits, PAGES_MAX, State};
use crate::{CheckpointError, PAGE_BYTES};

/// Room for a page that is recorded while the last one of an epoch is.
pub(super) const SPARE_SLOTS: u64 = 64;
/// Pages that are looked at while the server waits.
const PRESENT_PAGES: usize = 1 << 14;

/// What a memory did since its server began, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStatistics {
    /// Pages written back.
    pub written_pages: u64,
    /// Pages read again.
    pub read_pages: u64,
    /// Pages that the guest gave back.
    pub zeroed_pages: u64,
    /// Pages asked for that the page cache alone had had: each was answered by an error.
    pub lost_pages: u64,
    /// Epochs that went before they were released, because their room was needed.
    pub forced_releases: u64,
    /// Pages changed since the last cut.
    pub pending_pages: u64,
    /// Pages whose content is in the page cache at most.
    pub dropped_pages: u64,
    /// Ended epochs that are not released.
    pub epochs: u64,
}

/// What server thread and owners share.
pub(super) struct Store {
    pub(super) pages: Mutex<Pages>,
    pub(super) shadow: Shadow,
    /// One at a time moves pages into the shadow.
    folding: Mutex<()>,
    /// With the lock of `pages`: some were moved, or nobody moves any.
    folded: Condvar,
    /// Whether it is known which pages the page cache has. As long as it is not, who reads or gives back waits.
    pub(super) knows_resident: AtomicBool,
    /// Held by the server while it answers: nothing of this changes when it is false and was seen to be.
    pub(super) is_served: Mutex<bool>,
    pub(super) size_bytes: u64,
    pub(super) counters: Mutex<MemoryStatistics>,
}

/// One moves pages into the shadow.
pub(super) struct Folding<'a>(&'a Store, Option<MutexGuard<'a, ()>>);

impl Drop for Folding<'_> {
    fn drop(&mut self) {
        self.1 = None;
        // Whoever found it taken waits by now, and looks again.
        drop(self.0.pages());
        self.0.folded.notify_all();
    }
}

/// The page of an offset, and where in it that is.
pub(super) fn split(offset: u64) -> (u32, usize) {
    let page = u32::try_from(offset / PAGE_BYTES as u64).expect("offsets are checked against the size");
    (page, usize::try_from(offset % PAGE_BYTES as u64).expect("less than a page"))
}

impl Store {
    /// One without epochs, of what the shadow holds.
    pub(super) fn fresh(
        shadow: impl FnOnce(u64) -> Result<Shadow, CheckpointError>,
        size_bytes: u64,
        epochs_bytes_max: u64,
    ) -> Result<Store, CheckpointError> {
        let page_bytes = PAGE_BYTES as u64;
        if size_bytes == 0 || !size_bytes.is_multiple_of(page_bytes) || size_bytes > PAGES_MAX * page_bytes {
            return Err(CheckpointError::Size { size_bytes });
        }
        let pages = size_bytes / page_bytes;
        let state = State::create(pages, pages + SPARE_SLOTS + epochs_bytes_max / page_bytes)?;
        let shadow = shadow(size_bytes)?;
        state.set_shadow(shadow.identity()?);
        let store = Store::new(state, shadow)?;
        store.look_into_shadow()?;
        Ok(store)
    }

    /// What the shadow holds the memory holds, where nothing was written since.
    pub(super) fn look_into_shadow(&self) -> Result<(), CheckpointError> {
        for page in self.shadow.data()?.into_iter().flatten() {
            self.pages().state.set_bit(Bits::Held, page, true);
        }
        Ok(())
    }

    /// What a state says, over its shadow.
    pub(super) fn kept(state: State, shadow: &Path) -> Result<Store, CheckpointError> {
        let found = Shadow::open(shadow, state.pages() * PAGE_BYTES as u64)?;
        if found.identity()? != state.shadow() {
            return Err(CheckpointError::damaged(shadow, "it is not the file that the memory began with"));
        }
        Store::new(state, found)
    }

    fn new(state: State, shadow: Shadow) -> Result<Store, CheckpointError> {
        let size_bytes = state.pages() * PAGE_BYTES as u64;
        let pages = Pages::new(state)?;
        Ok(Store {
            pages: Mutex::new(pages),
            shadow,
            folding: Mutex::default(),
            folded: Condvar::new(),
            knows_resident: AtomicBool::new(true),
            is_served: Mutex::new(true),
            size_bytes,
            counters: Mutex::default(),
        })
    }

    /// What it did, and what it holds.
    pub(super) fn statistics(&self) -> MemoryStatistics {
        let counters = *self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let pages = self.pages();
        let (pending_pages, dropped_pages, epochs) = (pages.pending(), pages.dropped(), pages.kept());
        MemoryStatistics { pending_pages, dropped_pages, epochs, ..counters }
    }

    /// The pages that changed in the epochs after `before`, up to and with `until`, rising.
    pub(super) fn changed_since(&self, before: u64, until: u64) -> Result<Vec<u32>, CheckpointError> {
        if before >= until {
            return Err(CheckpointError::UnknownEpoch { epoch: before });
        }
        let mut changed = Vec::new();
        for epoch in before + 1..=until {
            changed.extend(self.pages().changed(epoch)?);
        }
        changed.sort_unstable();
        changed.dedup();
        Ok(changed)
    }

    /// The pages that were not zeros at the end of an epoch, as far as that is known without reading them; rising. The
    /// server goes on meanwhile: what an ended epoch shows does not change.
    pub(super) fn present(&self, epoch: u64) -> Result<Vec<u32>, CheckpointError> {
        let end = u32::try_from(self.size_bytes / PAGE_BYTES as u64).expect("checked with the state");
        let mut found = Vec::new();
        for first in (0..end).step_by(PRESENT_PAGES) {
            let pages = first..end.min(first.saturating_add(u32::try_from(PRESENT_PAGES).expect("few")));
            self.pages().present(epoch, pages, &mut found)?;
        }
        Ok(found)
    }

    /// Lets all epochs up to this one go, and moves what they have into the shadow.
    pub(super) fn release(&self, epoch: u64) -> Result<(), CheckpointError> {
        let _folding = Folding(self, Some(self.folding.lock().unwrap_or_else(PoisonError::into_inner)));
        self.pages().release(epoch)?;
        while self.fold_some()? {}
        Ok(())
    }

    /// Lets all epochs go that have ended.
    pub(super) fn release_all(&self) -> Result<(), CheckpointError> {
        let _folding = Folding(self, Some(self.folding.lock().unwrap_or_else(PoisonError::into_inner)));
        {
            let mut pages = self.pages();
            if pages.kept() > 0 {
                let last = pages.state.current() - 1;
                pages.release(last)?;
            }
        }
        while self.fold_some()? {}
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn folding(&self) -> Folding<'_> {
        Folding(self, Some(self.folding.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        // Each change is one word, made last: who panicked has left nothing half done that counts.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, change: impl FnOnce(&mut MemoryStatistics)) {
        change(&mut self.counters.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn read_now(&self, page: u32, into: &mut [u8; PAGE_BYTES]) -> Result<(), CheckpointError> {
        let read = self.pages().read_now(&self.shadow, page, into);
        self.count(|counters| match &read {
            Ok(()) => counters.read_pages += 1,
            Err(_) => counters.lost_pages += 1,
        });
        read
    }

    /// What the kernel writes back. An errno, the first: then pages are in the page cache at most, and no epoch is cut
    /// before they have been copied out. The kernel takes none of them for dirty any more, whatever the errno, so each
    /// is seen to.
    pub(super) fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32> {
        let within = self.size_bytes.saturating_sub(offset).min(data.len() as u64);
        let (mut rest, behind) = data.split_at(usize::try_from(within).expect("at most as long as the data"));
        let (mut at, mut written, mut content) = (offset, Ok(()), [0; PAGE_BYTES]);
        while !rest.is_empty() {
            let (page, within) = split(at);
            let (piece, others) = rest.split_at(rest.len().min(PAGE_BYTES - within));
            written = written.and(self.write_piece(page, within, piece, &mut content));
            (at, rest) = (at + piece.len() as u64, others);
        }
        self.count(|counters| counters.written_pages += (data.len() / PAGE_BYTES) as u64);
        written.and(if behind.is_empty() { Ok(()) } else { Err(libc::EFBIG) })
    }

    fn write_piece(&self, page: u32, within: usize, piece: &[u8], content: &mut [u8; PAGE_BYTES]) -> Result<(), i32> {
        if piece.len() < PAGE_BYTES {
            // The page cache writes whole pages: somebody writes past it.
            self.read_now(page, content).map_err(|_| libc::EIO)?;
        }
        content[within..within + piece.len()].copy_from_slice(piece);
        self.store(page, content)
    }

    fn store(&self, page: u32, content: &[u8; PAGE_BYTES]) -> Result<(), i32> {
        let mut pages = self.pages();
        if !pages.state.is_keeping() {
            pages.set_dropped(page, true);
            return Ok(());
        }
        while !pages.has_room() {
            drop(pages);
            let made = self.make_room();
            pages = self.pages();
            if let Err(error) = made {
                tracing::error!(%error, page, "a page of the memory cannot be kept");
                pages.fail(page);
                return Err(libc::EIO);
            }
        }
        pages.put(page, content).map_err(|error| {
            tracing::error!(%error, page, "there is no memory for a page of the memory");
            pages.fail(page);
            libc::EIO
        })
    }

    /// Whole pages become zeros: the guest does not use them.
    pub(super) fn zero(&self, offset: u64, length: u64) -> Result<(), i32> {
        let end = offset.checked_add(length).filter(|end| *end <= self.size_bytes).ok_or(libc::EINVAL)?;
        let page_bytes = PAGE_BYTES as u64;
        if !offset.is_multiple_of(page_bytes) || !end.is_multiple_of(page_bytes) {
            // Who gives back memory gives back pages.
            return Err(libc::EOPNOTSUPP);
        }
        for number in offset / page_bytes..end / page_bytes {
            let page = u32::try_from(number).expect("checked against the size");
            self.zero_page(page)?;
        }
        self.count(|counters| counters.zeroed_pages += length / page_bytes);
        Ok(())
    }

    fn zero_page(&self, page: u32) -> Result<(), i32> {
        let not_zeros = |error: &CheckpointError| {
            tracing::error!(%error, page, "a page of the memory cannot be made zeros");
            libc::EIO
        };
        loop {
            let mut pages = self.pages();
            if !pages.state.is_keeping() && pages.state.bit(Bits::Held, page) {
                // No ended epoch needs it, and who goes on without the state finds nothing older.
                self.shadow.punch(page).map_err(|error| not_zeros(&error))?;
                pages.state.set_bit(Bits::Held, page, false);
            }
            if pages.has_room() {
                return pages.put(page, &[0; PAGE_BYTES]).map_err(|_| libc::EIO);
            }
            drop(pages);
            self.make_room().map_err(|error| not_zeros(&error))?;
        }
    }

    /// Moves some of the oldest epoch into the shadow, whether or not somebody still wants it. While another one moves
    /// pages, as for a long release, it waits for some of those alone.
    pub(super) fn make_room(&self) -> Result<(), CheckpointError> {
        let mut pages = self.pages();
        let folding = loop {
            if pages.has_room() {
                return Ok(());
            }
            match self.folding.try_lock() {
                Ok(folding) => break folding,
                Err(TryLockError::Poisoned(folding)) => break folding.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    pages = self.folded.wait(pages).unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        let _folding = Folding(self, Some(folding));
        drop(pages);
        if !self.fold_some()? && self.pages().release_oldest() {
            self.count(|counters| counters.forced_releases += 1);
            self.fold_some()?;
        }
        Ok(())
    }

    /// Moves some released pages into the shadow; false when there are none. The caller holds `folding`.
    pub(super) fn fold_some(&self) -> Result<bool, CheckpointError> {
        let Some(slots) = self.pages().next_fold() else { return Ok(false) };
        let mut run: (u32, Vec<u8>) = (0, Vec::with_capacity(slots.len() * PAGE_BYTES));
        let mut content = [0; PAGE_BYTES];
        for (slot, says) in &slots {
            if says.is_zero {
                if self.pages().state.bit(Bits::Held, says.page) {
                    self.shadow.punch(says.page)?;
                }
                continue;
            }
            let follows = u64::from(run.0) + (run.1.len() / PAGE_BYTES) as u64 == u64::from(says.page);
            if !follows || run.1.is_empty() {
                self.shadow.write(run.0, &run.1)?;
                run.1.clear();
                run.0 = says.page;
            }
            self.pages().state.read_frame(*slot, &mut content);
            run.1.extend_from_slice(&content);
        }
        self.shadow.write(run.0, &run.1)?;
        self.pages().folded(&slots);
        self.folded.notify_all();
        Ok(true)
    }

    /// Keeps a page as it was in the page cache after so many `failures`, unless it was written back since; whether it
    /// did.
    pub(super) fn copy_out(
        &self,
        page: u32,
        content: &[u8; PAGE_BYTES],
        failures: u64,
    ) -> Result<bool, CheckpointError> {
        loop {
            let mut pages = self.pages();
            // After another failure this may be older than what the page cache alone has: it is copied again.
            if !pages.is_dropped(page) || pages.failures() != failures {
                return Ok(false);
            }
            if pages.has_room() {
                let put = pages.put(page, content);
                return put.map(|()| true).map_err(CheckpointError::io("write", Path::new("a memory file")));
            }
            drop(pages);
            self.make_room()?;
        }
    }
}
