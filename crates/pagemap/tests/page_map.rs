//! A page map against a plain map, in a file, and under many threads.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::PathBuf;

use onecopy_pagemap::{Bounds, Found, Identity, PAGE_BYTES, PageMap, PageMapError, content_hash};
use proptest::collection::vec;
use proptest::prelude::*;

const SEED: u64 = 7;
const DISK_BYTES: u64 = 64 << 20;
const BLOCKS: u64 = DISK_BYTES / PAGE_BYTES as u64;
const IDENTITY: Identity = Identity { uuid: [3; 16], generation: 5 };

fn map() -> PageMap {
    PageMap::new(DISK_BYTES, SEED, Bounds::for_disk(DISK_BYTES)).expect("the disk is small")
}

/// One of few contents, so that blocks share them; the first is zeros.
fn page(content: u8) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    page[PAGE_BYTES - 1] = content;
    page
}

fn hash(content: u8) -> u128 {
    content_hash(SEED, &page(content))
}

#[derive(Debug, Clone)]
enum Step {
    Record { block: u64, content: u8, guest_page: Option<u64> },
    Forget { first: u64, count: u64 },
    Find { content: u8, guest_page: Option<u64> },
    Reload,
}

fn step() -> impl Strategy<Value = Step> {
    // Blocks at both ends of an extent, of the disk, and behind it.
    let block = || prop_oneof![0..6u64, 1020..1030u64, BLOCKS - 3..BLOCKS + 3];
    let guest_page = || proptest::option::of(0..8u64);
    prop_oneof![
        6 => (block(), 0..24u8, guest_page())
            .prop_map(|(block, content, guest_page)| Step::Record { block, content, guest_page }),
        2 => (block(), 0..1100u64).prop_map(|(first, count)| Step::Forget { first, count }),
        6 => (0..24u8, guest_page()).prop_map(|(content, guest_page)| Step::Find { content, guest_page }),
        1 => Just(Step::Reload),
    ]
}

/// What a page map must know, in the plainest form.
#[derive(Default)]
struct Model {
    contents: HashMap<u64, u8>,
    hints: HashMap<u64, u64>,
    /// Contents that more than two blocks have held at once: only two of them have entries, and those may be the ones
    /// that change.
    crowded: HashSet<u8>,
}

impl Model {
    fn record(&mut self, block: u64, content: u8) {
        self.contents.insert(block, content);
        if self.holders(content) > 2 {
            self.crowded.insert(content);
        }
    }

    fn holders(&self, content: u8) -> usize {
        self.contents.values().filter(|held| **held == content).count()
    }

    /// Whether an answer is right: any block that holds the content may be told, and the hinted one must be.
    fn accepts(&self, content: u8, guest_page: Option<u64>, found: Found) -> bool {
        let hinted = guest_page
            .and_then(|page| self.hints.get(&page))
            .filter(|block| self.contents.get(block) == Some(&content));
        match found {
            Found::Zero => content == 0,
            _ if content == 0 => false,
            Found::Block { block, by_hint } => {
                self.contents.get(&block) == Some(&content)
                    && by_hint == hinted.is_some()
                    && hinted.is_none_or(|hint| *hint == block)
            }
            Found::Unknown => hinted.is_none() && (self.holders(content) == 0 || self.crowded.contains(&content)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// A page is found if a block is known to hold its content, wherever the block is; none is told that is not known
    /// to hold it.
    ///
    /// Spec: A8
    #[test]
    fn n1_a_page_is_found_where_a_plain_map_finds_it(steps in vec(step(), 1..60)) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pages");
        let (mut map, mut model) = (map(), Model::default());
        for step in steps {
            match step {
                Step::Record { block, content, guest_page } => {
                    map.record(block, hash(content), guest_page.map(|page| page * PAGE_BYTES as u64));
                    if block < BLOCKS {
                        model.record(block, content);
                        model.hints.extend(guest_page.map(|page| (page, block)));
                    }
                }
                Step::Forget { first, count } => {
                    map.forget(first..first + count);
                    model.contents.retain(|block, _| !(first..first + count).contains(block));
                }
                Step::Find { content, guest_page } => {
                    let found = map.find(&page(content), guest_page.map(|page| page * PAGE_BYTES as u64));
                    prop_assert!(model.accepts(content, guest_page, found), "{content} at {guest_page:?}: {found:?}");
                }
                Step::Reload => {
                    map.save(&file, &IDENTITY).expect("the directory is there");
                    let bounds = Bounds::for_disk(DISK_BYTES);
                    map = PageMap::load(&file, DISK_BYTES, SEED, bounds, &IDENTITY).unwrap().unwrap();
                    prop_assert!(!file.exists());
                    model.hints.clear();
                }
            }
            for block in [0, 5, 1023, 1024, BLOCKS - 1, BLOCKS] {
                let held = model.contents.get(&block);
                prop_assert_eq!(map.knows(block), held.is_some());
                prop_assert!(held.is_none_or(|content| map.holds(block, hash(*content))));
            }
            prop_assert_eq!(map.statistics().known_blocks, model.contents.len() as u64);
        }
    }

    /// Spec: A8
    #[test]
    fn n4_a_damaged_file_is_refused_and_removed(place in 0..9000usize, bits in 1..=255u8, cut in any::<bool>()) {
        let directory = tempfile::tempdir().unwrap();
        let file = saved(directory.path().join("pages"));
        let mut bytes = fs::read(&file).unwrap();
        let place = place % bytes.len();
        if cut { bytes.truncate(place) } else { bytes[place] ^= bits }
        fs::write(&file, bytes).unwrap();
        let taken = PageMap::load(&file, DISK_BYTES, SEED, Bounds::for_disk(DISK_BYTES), &IDENTITY);
        let is_refused = matches!(taken, Err(PageMapError::Damaged { .. } | PageMapError::Foreign { .. }));
        prop_assert!(is_refused);
        prop_assert!(!file.exists());
    }
}

fn saved(file: PathBuf) -> PathBuf {
    let map = map();
    for block in 0..100 {
        map.record(block, hash(block as u8), None);
    }
    map.save(&file, &IDENTITY).expect("the directory is there");
    file
}

/// Spec: A8
#[test]
fn n1_each_of_many_contents_is_found() {
    let map = map();
    let page = |block: u64| {
        let mut page = [0xee; PAGE_BYTES];
        page[..8].copy_from_slice(&block.to_le_bytes());
        page
    };
    for block in 0..BLOCKS {
        map.record(block, content_hash(SEED, &page(block)), None);
    }
    let found =
        (0..BLOCKS).filter(|block| map.find(&page(*block), None) == Found::Block { block: *block, by_hint: false });
    assert_eq!(found.count() as u64 + map.statistics().replaced_entries, BLOCKS);
    assert!(map.statistics().replaced_entries <= BLOCKS / 1000);
}

/// A hint answers without a search, and only while it is right.
///
/// Spec: A8
#[test]
fn n2_the_hint_answers_without_a_search_and_only_while_it_is_right() {
    let map = map();
    map.record(10, hash(1), Some(0x5000));
    map.record(11, hash(1), None);
    assert_eq!(map.find(&page(1), Some(0x5000)), Found::Block { block: 10, by_hint: true });
    map.record(10, hash(2), None);
    assert_eq!(map.find(&page(1), Some(0x5000)), Found::Block { block: 11, by_hint: false });
    map.hint(11, 0x5000);
    assert_eq!(map.find(&page(1), Some(0x5000)), Found::Block { block: 11, by_hint: true });
    let statistics = map.statistics();
    assert_eq!((statistics.lookups, statistics.found_by_hint, statistics.found_by_index), (3, 2, 1));
}

/// At its bound it forgets what passed longest ago.
///
/// Spec: A8
#[test]
fn n3_at_the_bound_what_passed_longest_ago_is_forgotten() {
    // An extent in each of 64 shards is the least; shards take every 64th extent.
    let size_bytes = 64 * 3 * (4 << 20);
    let map = PageMap::new(size_bytes, SEED, Bounds { blocks_max: 1, guest_memory_bytes: 0 }).unwrap();
    let (first, second, third) = (0, 64 * 1024, 128 * 1024);
    map.record(first, hash(1), None);
    map.record(second, hash(2), None);
    assert!(!map.knows(first) && map.knows(second));
    assert_eq!(map.find(&page(1), None), Found::Unknown);
    map.record(third, hash(3), None);
    assert!(!map.knows(second) && map.knows(third));
    let statistics = map.statistics();
    assert_eq!((statistics.known_blocks, statistics.dropped_extents), (1, 2));
}

/// Spec: A8
#[test]
fn n4_a_file_of_another_disk_or_generation_is_refused_and_removed() {
    let directory = tempfile::tempdir().unwrap();
    let others = [
        (DISK_BYTES, SEED, Identity { uuid: [4; 16], ..IDENTITY }),
        (DISK_BYTES, SEED, Identity { generation: 6, ..IDENTITY }),
        (DISK_BYTES, SEED + 1, IDENTITY),
        (DISK_BYTES / 2, SEED, IDENTITY),
    ];
    for (size_bytes, seed, identity) in others {
        let file = saved(directory.path().join("pages"));
        let taken = PageMap::load(&file, size_bytes, seed, Bounds::for_disk(size_bytes), &identity);
        assert!(matches!(taken, Err(PageMapError::Foreign { .. })));
        assert!(!file.exists());
    }
    let missing =
        PageMap::load(&directory.path().join("pages"), DISK_BYTES, SEED, Bounds::for_disk(DISK_BYTES), &IDENTITY);
    assert!(missing.unwrap().is_none());
}

/// Spec: A8
#[test]
fn n5_many_threads_record_and_find_at_once() {
    let map = map();
    let threads = 8;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let map = &map;
            scope.spawn(move || {
                for round in 0..4u8 {
                    // Each thread has blocks of its own; all share extents and contents.
                    for block in (thread..4096u64).step_by(threads as usize) {
                        map.record(
                            block,
                            hash(round.wrapping_mul(31).wrapping_add(block as u8)),
                            Some(block * PAGE_BYTES as u64),
                        );
                        if let Found::Block { block: found, .. } = map.find(&page(block as u8), None) {
                            assert!(found < 4096);
                        }
                    }
                }
            });
        }
    });
    for block in 0..4096u64 {
        let content = 93u8.wrapping_add(block as u8);
        assert!(map.holds(block, hash(content)));
        if content != 0 {
            let found = map.find(&page(content), Some(block * PAGE_BYTES as u64));
            assert_eq!(found, Found::Block { block, by_hint: true });
        }
    }
}

#[test]
fn a_disk_with_more_blocks_than_numbers_is_refused() {
    let refused = PageMap::new((1 << 44) + 4096, SEED, Bounds { blocks_max: 1, guest_memory_bytes: 0 });
    assert!(matches!(refused, Err(PageMapError::TooLarge { .. })));
}
