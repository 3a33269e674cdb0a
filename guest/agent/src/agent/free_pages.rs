//! Which pages of the guest's memory are free, by its kernel's own flags.
//!
//! Source: <https://docs.kernel.org/admin-guide/mm/pagemap.html>.

use super::replies::{Result, failed, failure};
use crate::protocol::{Bytes, FREE_RUN_PAGES_MIN, FREE_RUNS_MAX, FailureKind, FreePages};
use std::fs::{File, read_to_string};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

const PAGE_BYTES: usize = 4096;

/// In `/proc/kpageflags`, a word a page: it is of a free block. Since Linux 4.6 that is said of each page of a block.
const BUDDY: u64 = 1 << 10;

/// In `/proc/self/pagemap`, a word a page: it is in memory, and the number of its frame.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Bytes of flags that are read at once.
const CHUNK_BYTES: usize = 1 << 18;

/// A page whose begin nobody else knows: by it the host sees where pages lie.
static WITNESS: OnceLock<&'static [u8]> = OnceLock::new();

/// Makes what the host knows the guest's pages by. When the agent begins: what the host looks at is older than its
/// question.
pub(crate) fn prepare() {
    WITNESS.get_or_init(make_witness);
}

pub(crate) fn free_pages() -> Result<FreePages> {
    let command_line = read_to_string("/proc/cmdline").map_err(|error| failed("/proc/cmdline", error))?;
    if poisons(&command_line) {
        return Err(failure(FailureKind::Failed, "its kernel looks at what free pages hold (page_poison)"));
    }
    let witness = *WITNESS.get_or_init(make_witness);
    let witness_page = frame_of(witness).map_err(|error| failed("/proc/self/pagemap", error))?;
    let flags = || File::open("/proc/kpageflags").and_then(runs).map_err(|error| failed("/proc/kpageflags", error));
    // The kernel reads the flags without a lock: a page that is taken just then may look free, and not twice.
    let runs = of_both(&flags()?, &flags()?);
    Ok(FreePages { runs, witness_page, witness: Bytes(witness.to_vec()) })
}

/// Whether the kernel fills free pages and compares them when it takes one: it would find zeros.
/// Source: <https://docs.kernel.org/admin-guide/kernel-parameters.html>, `page_poison`.
fn poisons(command_line: &str) -> bool {
    let mut values = command_line.split_whitespace().filter_map(|word| word.strip_prefix("page_poison="));
    values.next_back().is_some_and(|value| !matches!(value, "0" | "off" | "n" | "no"))
}

/// Random bytes at the begin of a page that is never given back.
fn make_witness() -> &'static [u8] {
    let pages: &'static mut [u8] = Box::leak(vec![0; 2 * PAGE_BYTES].into_boxed_slice());
    let begin = pages.as_ptr().align_offset(PAGE_BYTES);
    let witness = &mut pages[begin..begin + 32];
    // Without it nobody is believed: it is zeros, which a free page may be as well.
    let _ = File::open("/dev/urandom").and_then(|mut random| random.read_exact(witness));
    witness
}

/// The number of the page in the guest's memory that this lies in.
fn frame_of(bytes: &[u8]) -> io::Result<u64> {
    let mut word = [0; 8];
    let place = (bytes.as_ptr().addr() / PAGE_BYTES * word.len()) as u64;
    File::open("/proc/self/pagemap")?.read_exact_at(&mut word, place)?;
    let word = u64::from_ne_bytes(word);
    match word & FRAME {
        frame if word & PRESENT != 0 && frame != 0 => Ok(frame),
        _ => Err(ErrorKind::NotFound.into()),
    }
}

/// Runs of free pages, out of a word of flags for each page.
fn runs(mut flags: impl Read) -> io::Result<Vec<(u64, u64)>> {
    let (mut runs, mut page, mut begun) = (Vec::new(), 0_u64, None);
    let mut end = |begun: &mut Option<u64>, page: u64| {
        if let Some(first) = begun.take()
            && page - first >= FREE_RUN_PAGES_MIN
        {
            runs.push((first, page - first));
        }
        runs.len() < FREE_RUNS_MAX
    };
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let length = read_full(&mut flags, &mut chunk)?;
        for word in chunk[..length].as_chunks::<8>().0 {
            match u64::from_ne_bytes(*word) & BUDDY != 0 {
                true => _ = begun.get_or_insert(page),
                false if end(&mut begun, page) => {}
                false => return Ok(runs),
            }
            page += 1;
        }
        if length < CHUNK_BYTES {
            end(&mut begun, page);
            return Ok(runs);
        }
    }
}

/// What lies in runs of both.
fn of_both(one: &[(u64, u64)], other: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let (mut one, mut other, mut both) = (one.iter().peekable(), other.iter().peekable(), Vec::new());
    while let (Some((first, pages)), Some((other_first, other_pages))) = (one.peek(), other.peek()) {
        let (begin, end) = (*first.max(other_first), (first + pages).min(other_first + other_pages));
        if end >= begin + FREE_RUN_PAGES_MIN {
            both.push((begin, end - begin));
        }
        if first + pages <= end {
            one.next();
        } else {
            other.next();
        }
    }
    both
}

/// As much as there is.
fn read_full(file: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < into.len() {
        match file.read(&mut into[length..]) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags of pages that come in pieces, as the kernel may give them.
    struct Pieces(Vec<u8>, usize);

    impl Read for Pieces {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let length = into.len().min(1000).min(self.0.len() - self.1);
            into[..length].copy_from_slice(&self.0[self.1..][..length]);
            self.1 += length;
            Ok(length)
        }
    }

    fn runs_of(pages: usize, is_free: impl Fn(usize) -> bool) -> Vec<(u64, u64)> {
        // Others flags are set as well.
        let word = |page| if is_free(page) { BUDDY | 1 } else { 1 << 9 | 1 << 11 };
        let flags = (0..pages).flat_map(|page| u64::to_ne_bytes(word(page))).collect();
        runs(Pieces(flags, 0)).unwrap()
    }

    #[test]
    fn runs_are_whole_and_short_ones_are_left_out() {
        let least = FREE_RUN_PAGES_MIN as usize;
        assert_eq!(runs_of(0, |_| true), []);
        assert_eq!(runs_of(100_000, |_| true), [(0, 100_000)]);
        assert_eq!(runs_of(100_000, |_| false), []);
        assert_eq!(runs_of(3 * least, |page| (least..2 * least).contains(&page)), [(least as u64, least as u64)]);
        assert_eq!(runs_of(3 * least, |page| (least..2 * least - 1).contains(&page)), []);
        // Across what is read at once.
        let at = CHUNK_BYTES / 8;
        assert_eq!(runs_of(2 * at, |page| page >= at - 10 && page < at + least), [(at as u64 - 10, least as u64 + 10)]);
    }

    #[test]
    fn what_looks_free_once_is_not_told() {
        let same = [(0, 100), (200, 16), (1000, 50)];
        assert_eq!(of_both(&same, &same), same);
        assert_eq!(of_both(&same, &[]), []);
        assert_eq!(of_both(&[(0, 1000)], &same), [(0, 100), (200, 16)]);
        assert_eq!(of_both(&same, &[(50, 155), (210, 900)]), [(50, 50), (1000, 50)]);
        assert_eq!(of_both(&[(0, 40)], &[(0, 16), (20, 20)]), [(0, 16), (20, 20)]);
    }

    #[test]
    fn a_kernel_that_compares_free_pages_is_known() {
        for (command_line, expected) in [
            ("root=/dev/vda quiet", false),
            ("page_poison=1 root=/dev/vda", true),
            ("quiet page_poison=on\n", true),
            ("page_poison=0", false),
            ("page_poison=1 page_poison=off", false),
        ] {
            assert_eq!(poisons(command_line), expected, "{command_line}");
        }
    }

    #[test]
    fn no_more_runs_are_told_than_a_line_has_room_for() {
        let (least, wanted) = (FREE_RUN_PAGES_MIN as usize, FREE_RUNS_MAX + 10);
        let found = runs_of(wanted * (least + 1), |page| page % (least + 1) != 0);
        assert_eq!(found.len(), FREE_RUNS_MAX);
        let pages = FreePages { runs: vec![(u64::MAX >> 20, u64::MAX >> 20); FREE_RUNS_MAX], ..FreePages::default() };
        let line = serde_json::to_vec(&pages).unwrap();
        assert!(line.len() < crate::protocol::LINE_BYTES_MAX - 4096, "{}", line.len());
    }

    #[test]
    fn where_a_page_lies_is_the_kernels_word() {
        // Only root is told.
        if rustix::process::geteuid().is_root() {
            let (one, other) = (make_witness(), make_witness());
            assert_ne!(one, other);
            assert_ne!(frame_of(one).unwrap(), frame_of(other).unwrap());
        }
    }
}
