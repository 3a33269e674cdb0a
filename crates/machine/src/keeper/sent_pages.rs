//! What pages of memory held when they were sent last, as far as there is room: a page that has changed since travels
//! as the difference from that.
//!
//! Kept here, because the memory's server keeps no earlier content than that of the epoch that travels. What is sent
//! again is kept in favour of what is not: of two generations the older one goes when the younger one is full.

use std::collections::HashMap;
use std::mem::take;
use std::sync::{Mutex, PoisonError};

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{Piece, Source};
use onecopy_checkpoint::take::Cause;

/// Content that is kept for a machine at most, all together; an eighth of its memory where that is less.
const BYTES_MAX: u64 = 256 << 20;

type Pages = HashMap<u64, Box<Piece>>;

/// Of one other side.
pub(super) struct SentPages(Mutex<Generations>);

struct Generations {
    /// All together.
    pages_max: usize,
    young: Pages,
    old: Pages,
    /// What pages of the epoch that is being sent held before it.
    before: Pages,
}

impl SentPages {
    /// Nothing was sent of a memory of this size.
    pub(super) fn new(memory_bytes: u64) -> SentPages {
        let pages_max = (memory_bytes / 8).min(BYTES_MAX) / PAGE_BYTES as u64;
        let (young, old, before) = (Pages::new(), Pages::new(), Pages::new());
        SentPages(Mutex::new(Generations { pages_max: pages_max as usize, young, old, before }))
    }

    /// All of it is sent anew: what was sent before is no base any more.
    pub(super) fn forget(&self) {
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (pages.young, pages.old, pages.before) = (Pages::new(), Pages::new(), Pages::new());
    }

    /// The other side holds all that was sent.
    pub(super) fn acknowledge(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).before = Pages::new();
    }

    /// A page is being sent.
    fn send(&self, number: u64, content: &Piece) {
        // Zeros need no difference.
        let is_zero = content.as_chunks::<16>().0.iter().all(|word| *word == [0; 16]);
        let now = (!is_zero).then(|| Box::new(*content));
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let older = pages.old.remove(&number);
        if let Some(before) = pages.young.remove(&number).or(older) {
            // The first one: one that is sent again in its epoch was not there as it was sent first.
            pages.before.entry(number).or_insert(before);
        }
        let Some(now) = now else { return };
        let mut dropped = Pages::new();
        if pages.young.len() >= pages.pages_max / 2 || pages.count() >= pages.pages_max {
            dropped = take(&mut pages.old);
            pages.old = take(&mut pages.young);
        }
        if pages.count() < pages.pages_max {
            pages.young.insert(number, now);
        }
        drop(pages);
        drop(dropped);
    }

    fn before(&self, number: u64, into: &mut Piece) -> bool {
        let pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pages.before.get(&number).map(|content| into.copy_from_slice(&**content)).is_some()
    }
}

impl Generations {
    fn count(&self) -> usize {
        self.young.len() + self.old.len() + self.before.len()
    }
}

/// The pages of an epoch, which are kept as they are read.
pub(super) struct Keeping<'a, S> {
    pub(super) source: &'a S,
    pub(super) sent: &'a SentPages,
}

impl<S: Source> Source for Keeping<'_, S> {
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
        self.source.read(number, into)?;
        self.sent.send(number, into);
        Ok(())
    }

    fn read_acknowledged(&self, number: u64, into: &mut Piece) -> Result<bool, Cause> {
        Ok(self.sent.before(number, into) || self.source.read_acknowledged(number, into)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A memory whose pages hold their number and that of the epoch.
    struct Numbered(u8);

    impl Source for Numbered {
        fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
            into.fill(self.0);
            into[0] = u8::try_from(number)?;
            Ok(())
        }

        fn read_acknowledged(&self, _: u64, _: &mut Piece) -> Result<bool, Cause> {
            Ok(false)
        }
    }

    fn send(sent: &SentPages, epoch: u8, pages: impl IntoIterator<Item = u64>) -> Vec<Option<(u8, u8)>> {
        let keeping = Keeping { source: &Numbered(epoch), sent };
        let mut before = Vec::new();
        for page in pages {
            let mut content = [0; PAGE_BYTES];
            keeping.read(page, &mut content).unwrap();
            let is_known = keeping.read_acknowledged(page, &mut content).unwrap();
            before.push(is_known.then_some((content[0], content[1])));
        }
        before
    }

    #[test]
    fn a_page_is_known_as_it_was_sent_in_the_last_epoch_that_has_it() {
        let sent = SentPages::new(8 * 2 * 4 * PAGE_BYTES as u64);
        assert_eq!(send(&sent, 1, 1..4), [None; 3]);
        sent.acknowledge();
        assert_eq!(send(&sent, 2, 2..5), [Some((2, 1)), Some((3, 1)), None]);
        // Again, because it was not there as it was sent.
        assert_eq!(send(&sent, 2, [2]), [Some((2, 1))]);
        sent.acknowledge();
        assert_eq!(send(&sent, 3, [1, 2]), [Some((1, 1)), Some((2, 2))]);
        sent.acknowledge();
        sent.forget();
        assert_eq!(send(&sent, 3, [1, 2]), [None; 2]);
        sent.acknowledge();
        // Of zeros nothing is kept, and not what was there before them.
        send(&sent, 0, [0]);
        sent.acknowledge();
        assert_eq!(send(&sent, 4, [0, 2]), [None, Some((2, 3))]);
    }

    #[test]
    fn what_is_sent_again_and_again_stays_and_no_more_than_there_is_room_for() {
        let sent = SentPages::new(8 * 2 * 4 * PAGE_BYTES as u64);
        for epoch in 1..100 {
            let before = send(&sent, epoch, [1, 2, u64::from(epoch) + 10]);
            assert_eq!(before[0].is_some(), epoch > 1);
            assert_eq!(before[2], None);
            assert!(sent.0.lock().unwrap().count() <= 8);
            sent.acknowledge();
            assert!(sent.0.lock().unwrap().before.is_empty());
        }
        // More than there is room for, in one epoch.
        send(&sent, 100, 0..200);
        assert!(sent.0.lock().unwrap().count() <= 8);
    }
}
