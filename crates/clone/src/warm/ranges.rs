//! Runs of pages, put together and in order.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::image::FileNumber;
use crate::{ByteRange, CHUNK_BYTES};

/// PostgreSQL's page, the unit in which files are filled.
pub(super) const PAGE_BYTES: u64 = CHUNK_BYTES;

/// Two runs this near each other become one: reading what lies between costs less than a second read.
const GAP_BYTES_MAX: u64 = 64 << 10;

/// Bytes of one file that are used alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub file: FileNumber,
    pub start: u64,
    pub length_bytes: u64,
    /// How often they are used; more comes first.
    pub heat: u8,
}

/// Puts runs that are near each other together, hottest first; among equals in the order of the file. A page that lies
/// between two hotter ones comes with them, once.
pub(super) fn in_order(mut runs: Vec<Run>) -> Vec<(FileNumber, ByteRange)> {
    runs.sort_unstable_by_key(|run| (Reverse(run.heat), run.file, run.start));
    let mut merged: Vec<(u8, FileNumber, ByteRange)> = Vec::new();
    for run in runs {
        let end = run.start.saturating_add(run.length_bytes);
        match merged.last_mut() {
            Some((heat, file, range))
                if (*heat, *file) == (run.heat, run.file) && run.start <= range.end.saturating_add(GAP_BYTES_MAX) =>
            {
                range.end = range.end.max(end);
            }
            _ => merged.push((run.heat, run.file, ByteRange { start: run.start, end })),
        }
    }
    let mut ordered = Vec::with_capacity(merged.len());
    let mut taken = Taken::default();
    for (_, file, range) in merged {
        taken.add(file, range, &mut ordered);
    }
    ordered
}

/// What of `ranges` does not lie in `known`, in the same order.
pub(super) fn without(
    ranges: Vec<(FileNumber, ByteRange)>,
    known: &[(FileNumber, ByteRange)],
) -> Vec<(FileNumber, ByteRange)> {
    let mut taken = Taken::default();
    let mut ignored = Vec::new();
    for (file, range) in known {
        taken.add(*file, *range, &mut ignored);
    }
    let mut rest = Vec::new();
    for (file, range) in ranges {
        taken.add(file, range, &mut rest);
    }
    rest
}

/// What is in a list already: for each file, disjoint ranges by their start.
#[derive(Debug, Default)]
struct Taken(HashMap<FileNumber, std::collections::BTreeMap<u64, u64>>);

impl Taken {
    /// Adds a range; the parts of it that are new go to `list`.
    fn add(&mut self, file: FileNumber, range: ByteRange, list: &mut Vec<(FileNumber, ByteRange)>) {
        let taken = self.0.entry(file).or_default();
        let mut start = range.start;
        if let Some((_, end)) = taken.range(..=start).next_back() {
            start = start.max(*end);
        }
        while start < range.end {
            let next = taken.range(start..range.end).next().map(|(start, end)| (*start, *end));
            let end = next.map_or(range.end, |(next, _)| next);
            if start < end {
                list.push((file, ByteRange { start, end }));
                taken.insert(start, end);
            }
            start = next.map_or(range.end, |(_, end)| end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(file: u32, page: u64, heat: u8) -> Run {
        Run { file: FileNumber(file), start: page * PAGE_BYTES, length_bytes: PAGE_BYTES, heat }
    }

    fn pages(ranges: &[(FileNumber, ByteRange)]) -> Vec<(u32, u64, u64)> {
        ranges.iter().map(|(file, range)| (file.0, range.start / PAGE_BYTES, range.end / PAGE_BYTES)).collect()
    }

    #[test]
    fn the_hottest_come_first_and_nothing_twice() {
        let runs = vec![
            page(2, 0, 1),
            page(1, 1, 5),
            page(1, 0, 5),
            page(1, 100, 5),
            page(1, 50, 3),
            page(1, 2, 3),
            page(1, 6, 5),
        ];
        assert_eq!(pages(&in_order(runs)), [(1, 0, 7), (1, 100, 101), (1, 50, 51), (2, 0, 1)]);
    }

    #[test]
    fn what_is_known_is_left_out() {
        let range =
            |start: u64, end: u64| (FileNumber(1), ByteRange { start: start * PAGE_BYTES, end: end * PAGE_BYTES });
        let rest = without(vec![range(0, 10), range(20, 30)], &[range(2, 4), range(8, 22)]);
        assert_eq!(pages(&rest), [(1, 0, 2), (1, 4, 8), (1, 22, 30)]);
    }

    proptest! {
        #[test]
        fn every_page_comes_once(runs in proptest::collection::vec((0_u32..3, 0_u64..200, 0_u8..6), 0..100)) {
            let ranges = in_order(runs.iter().map(|(file, number, heat)| page(*file, *number, *heat)).collect());
            let mut covered = std::collections::BTreeSet::new();
            for (file, start, end) in pages(&ranges) {
                for number in start..end {
                    prop_assert!(covered.insert((file, number)), "{} {} twice", file, number);
                }
            }
            prop_assert!(runs.iter().all(|(file, number, _)| covered.contains(&(*file, *number))));
        }
    }
}
