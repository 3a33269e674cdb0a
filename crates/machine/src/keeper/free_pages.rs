//! Pages of its memory that a guest has free: what they hold is nothing, and does not travel.
//!
//! A guest's kernel writes a free page before anybody reads it again, and such a write is seen as any other: the page
//! is of a later epoch then. So the guest is asked behind the cut of the epoch that it is asked for, and what it calls
//! free is for the other side what it has never heard of: zeros. A guest that lies loses its own pages.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::Piece;
use onecopy_checkpoint::take::Cause;
use onecopy_guest_agent::protocol::{Answer, Command, FreePages as Told};
use onecopy_hypervisor::memory_offset;

use super::state::Keeper;
use super::words;

/// How long the guest's agent may take, which looks at a word for each of its pages, twice.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// How often it is looked whether nobody wants to know any more.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Bytes of a witness: nobody guesses them.
const WITNESS_BYTES: usize = 32;

/// What a guest says that it has free now, unless that is given up.
///
/// # Errors
/// Its agent does not tell.
pub(super) async fn ask(keeper: &Keeper, is_cancelled: &AtomicBool) -> Result<Told, String> {
    let agent = keeper.agent().ok_or("its guest's agent does not answer")?;
    let given_up = async {
        while !is_cancelled.load(Ordering::Acquire) {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    };
    tokio::select! {
        answer = agent.request(Command::FreePages {}, ANSWER_TIMEOUT) => match answer.map_err(words)? {
            Answer::FreePages(told) => Ok(told),
            _ => Err("its guest's agent answers something else".to_owned()),
        },
        () = given_up => Err("nobody wants to know any more".to_owned()),
    }
}

/// Free pages, by their numbers in the memory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FreePages {
    /// The first and the one behind the last, of each run; rising.
    runs: Vec<(u64, u64)>,
}

impl FreePages {
    /// By what a guest of so much memory has told; `read` reads a page of the epoch that it was asked behind.
    ///
    /// # Errors
    /// Its memory does not lie where it should.
    pub(super) fn of(
        told: &Told,
        memory_bytes: u64,
        read: impl FnOnce(u64, &mut Piece) -> Result<(), Cause>,
    ) -> Result<FreePages, String> {
        let page_bytes = PAGE_BYTES as u64;
        let place = |page: u64| memory_offset(memory_bytes, page.checked_mul(page_bytes)?);
        let witness = place(told.witness_page).ok_or("it has a page where its memory has none")?;
        let mut content = [0; PAGE_BYTES];
        read(witness / page_bytes, &mut content).map_err(words)?;
        let content = &content[..WITNESS_BYTES];
        if told.witness.0 != content || content == [0; WITNESS_BYTES] {
            return Err("its pages do not lie where they should".to_owned());
        }
        let mut runs: Vec<(u64, u64)> = Vec::with_capacity(told.runs.len());
        for (first, count) in &told.runs {
            let Some(more) = count.checked_sub(1) else { continue };
            let (Some(begin), Some(end)) = (place(*first), first.checked_add(more).and_then(place)) else { continue };
            // Not across the hole, where one would be of both sides.
            if end.checked_sub(begin) != Some(more.saturating_mul(page_bytes)) {
                continue;
            }
            let run = (begin / page_bytes, end / page_bytes + 1);
            if runs.last().is_some_and(|(_, before)| *before > run.0) {
                return Err("it tells of free pages in no order".to_owned());
            }
            runs.push(run);
        }
        Ok(FreePages { runs })
    }

    /// How many there are.
    pub(super) fn count(&self) -> u64 {
        self.runs.iter().map(|(first, end)| end - first).sum()
    }

    /// These pages, which rise, without those that are free.
    pub(super) fn without(&self, pages: &[u64]) -> Vec<u64> {
        let mut runs = self.runs.iter().peekable();
        let mut is_used = |page: &u64| {
            while runs.next_if(|(_, end)| end <= page).is_some() {}
            runs.peek().is_none_or(|(first, _)| page < first)
        };
        pages.iter().copied().filter(|page| is_used(page)).collect()
    }
}

#[cfg(test)]
mod tests {
    use onecopy_guest_agent::protocol::Bytes;

    use super::*;

    const GIB: u64 = 1 << 30;
    const PAGES: u64 = GIB / PAGE_BYTES as u64;

    fn told(runs: &[(u64, u64)], witness_page: u64) -> Told {
        Told { runs: runs.to_vec(), witness_page, witness: Bytes(vec![7; WITNESS_BYTES]) }
    }

    /// Of a memory that holds the witness at this page alone.
    fn of(told: &Told, memory_bytes: u64, page: u64) -> Result<FreePages, String> {
        FreePages::of(told, memory_bytes, |number, into| {
            into.fill(if number == page { 7 } else { 9 });
            Ok(())
        })
    }

    #[test]
    fn what_is_free_is_left_out() {
        let free = of(&told(&[(16, 16), (32, 8), (100, 1)], 5), GIB, 5).unwrap();
        assert_eq!(free.count(), 25);
        assert_eq!(free.without(&[0, 15, 16, 31, 32, 39, 40, 99, 100, 101]), [0, 15, 40, 99, 101]);
        assert_eq!(free.without(&[]), [] as [u64; 0]);
        assert_eq!(FreePages::default().without(&[0, 1]), [0, 1]);
    }

    /// 8 GiB: 2 of them below the hole, and the rest from 4 GiB on.
    #[test]
    fn pages_above_the_hole_are_those_behind_the_ones_below_it() {
        let runs = [(0, 2 * PAGES), (2 * PAGES, 10), (4 * PAGES - 1, 4), (4 * PAGES, 1), (10 * PAGES - 1, 5)];
        let free = of(&told(&runs, 4 * PAGES + 3), 8 * GIB, 2 * PAGES + 3).unwrap();
        assert_eq!(free.runs, [(0, 2 * PAGES), (2 * PAGES, 2 * PAGES + 1)]);
        assert_eq!(free.without(&[0, 2 * PAGES - 1, 2 * PAGES, 2 * PAGES + 1]), [2 * PAGES + 1]);
    }

    #[test]
    fn nobody_is_believed_whose_pages_lie_elsewhere() {
        for (told, witness_page) in [
            (told(&[], 5), 6),
            (told(&[], u64::MAX), 5),
            (told(&[], PAGES), PAGES),
            (told(&[(32, 16), (16, 17)], 5), 5),
            (told(&[(16, 16), (20, 16)], 5), 5),
            (Told { witness: Bytes(vec![7; 4]), ..told(&[], 5) }, 5),
        ] {
            of(&told, GIB, witness_page).unwrap_err();
        }
        let zeros = Told { witness: Bytes(vec![0; WITNESS_BYTES]), ..told(&[], 5) };
        FreePages::of(&zeros, GIB, |_, _| Ok(())).unwrap_err();
        // Runs that are none are none.
        let strange = [(0, 0), (7, 0), (1, u64::MAX), (2, PAGES), (u64::MAX, 1), (u64::MAX, u64::MAX)];
        assert_eq!(of(&told(&strange, 5), GIB, 5).unwrap(), FreePages::default());
    }
}
