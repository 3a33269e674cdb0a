//! What travels arrives, by the way that is the cheapest.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use onecopy_testing::seed;
use rand::SeedableRng;

use super::*;

/// Spec: D6
#[test]
fn each_kind_of_page_travels_as_it_is_cheapest_and_arrives() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    let disk: Bytes = (0..BLOCKS).map(|_| noise(&mut random)).collect();
    // 600 blocks in two runs, 100 zeros, 30 texts, 20 of noise, and those 20 again.
    pair.memory.now[..300].copy_from_slice(&disk[100..400]);
    pair.memory.now[300..600].copy_from_slice(&disk[500..800]);
    pair.memory.now[700..730].fill_with(|| text(&mut random));
    pair.memory.now[800..820].fill_with(|| noise(&mut random));
    let again: Bytes = pair.memory.now[800..820].to_vec();
    pair.memory.now[900..920].copy_from_slice(&again);
    pair.snapshot(disk);
    pair.number = 1;
    let pages: Vec<u64> = (0..1000).collect();
    let (bytes, counts) = pair.encode_these(&pages, &[]);
    let decoded = pair.decode(&bytes).unwrap();
    pair.acknowledge(&decoded);
    pair.check();
    assert_eq!((counts.block, counts.held, counts.zstd, counts.literal), (600, 20, 30, 20));
    assert_eq!((counts.zero, counts.xor, counts.same), (330, 0, 0));
    assert!(counts.bytes < 20 * 4096 + 30 * 1500 + 5000, "{counts:?}");
    // Little is said of what one side has read of its disk: a digest of 32 pieces, some runs.
    pair.memory.now[700..820].iter_mut().for_each(|page| touch(page, &mut random));
    let counts = pair.send();
    assert_eq!((counts.xor, counts.pieces()), (50 + 70, 120), "zeros that are touched are not much else");
    assert!(counts.bytes < 120 * 200 + 4000, "{counts:?}");
    let runs = pair.theirs.calls.lock().unwrap().clone();
    assert!(runs.iter().sum::<usize>() == 600 && runs.len() <= 4, "{runs:?}");
}

/// Spec: D6
#[test]
fn the_same_content_never_travels_twice() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    let content = noise(&mut random);
    let others: Bytes = (0..40).map(|_| noise(&mut random)).collect();
    pair.memory.now[10..110].fill(content);
    pair.memory.now[500..540].copy_from_slice(&others);
    pair.disk.now[3..43].copy_from_slice(&others);
    pair.disk.now[50..60].fill(content);
    let counts = pair.send();
    assert_eq!((counts.literal, counts.held, counts.zstd + counts.xor), (41, 99 + 40 + 10, 0));
    // Nor in a later epoch, from where it is held when it is needed.
    pair.memory.now[200..240].copy_from_slice(&others);
    pair.disk.now[100..140].copy_from_slice(&others);
    pair.memory.now[500..540].fill([0; PAGE_BYTES]);
    let counts = pair.send();
    assert_eq!((counts.literal, counts.held, counts.zero), (0, 80, 40));
    assert!(counts.bytes < 1000, "{counts:?}");
}

/// The control of the above: without references all of it travels, and is right.
#[test]
fn without_references_the_same_content_travels_wherever_it_is() {
    let mut random = StdRng::seed_from_u64(seed());
    let others: Bytes = (0..40).map(|_| noise(&mut random)).collect();
    let mut disk_bytes = Vec::new();
    for refers in [true, false] {
        let mut pair = Pair::with(Options { refers, ..Options::new(SEED) });
        pair.memory.now[500..540].copy_from_slice(&others);
        pair.disk.now[3..43].copy_from_slice(&others);
        pair.disk.now[43..53].fill([0; PAGE_BYTES]);
        let counts = pair.send();
        let travels = if refers { 0 } else { 40 };
        assert_eq!((counts.data() - counts.disk_data, counts.disk_data), (40, travels), "{counts:?}");
        assert_eq!(counts.disk_known, 40 - travels, "{counts:?}");
        assert!(counts.disk_bytes < counts.bytes, "{counts:?}");
        disk_bytes.push(counts.disk_bytes);
    }
    assert!(disk_bytes[0] * 100 < disk_bytes[1], "{disk_bytes:?}");
}

#[test]
fn pages_that_move_by_one_are_taken_from_where_they_were() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    pair.memory.now[..600].fill_with(|| noise(&mut random));
    pair.send();
    // Downwards each page is there when it is needed; upwards the one before has been overwritten.
    let (first, moved) = (pair.memory.now[0], pair.memory.now[1..600].to_vec());
    pair.memory.now[..599].copy_from_slice(&moved);
    let counts = pair.send();
    assert_eq!((counts.held, counts.literal, counts.runs), (599, 0, 2));
    pair.memory.now[1..600].copy_from_slice(&moved);
    pair.memory.now[0] = first;
    pair.send();
}

#[test]
fn a_page_that_was_written_and_is_the_same_does_not_travel() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    pair.memory.now[..100].fill_with(|| text(&mut random));
    pair.disk.now[..100].fill_with(|| text(&mut random));
    pair.send();
    pair.number += 1;
    let numbers: Vec<u64> = (0..100).collect();
    let (bytes, counts) = pair.encode_these(&numbers, &numbers);
    assert_eq!((counts.same, counts.pieces()), (200, 0));
    let decoded = pair.decode(&bytes).unwrap();
    pair.acknowledge(&decoded);
    pair.check();
}

#[test]
fn blocks_that_the_epoch_changes_are_not_referred_to() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    let disk: Bytes = (0..BLOCKS).map(|_| noise(&mut random)).collect();
    pair.snapshot(disk);
    // The page map is of the running disk: it knows of a block that the other side does not have yet.
    let content = noise(&mut random);
    pair.map.record(9, content_hash(SEED, &content), None);
    (pair.disk.now[9], pair.memory.now[1]) = (content, content);
    let counts = pair.send();
    assert_eq!((counts.block, counts.literal, counts.held), (0, 1, 1));
}

#[test]
fn devices_travel_as_what_changed_in_them() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    pair.devices = noise(&mut random).repeat(50);
    for at in (0..pair.devices.len()).step_by(PAGE_BYTES) {
        random.fill_bytes(&mut pair.devices[at..at + 1000]);
    }
    let whole = pair.send();
    pair.devices[777] ^= 1;
    let changed = pair.send();
    assert!(whole.bytes > 50_000 && changed.bytes < 300, "{whole:?} {changed:?}");
    pair.devices.push(1);
    pair.send();
    pair.devices.clear();
    pair.send();
}

#[test]
fn what_does_not_fit_into_the_index_travels_again() {
    let mut random = StdRng::seed_from_u64(seed());
    let content: Bytes = (0..PAGES / 2).map(|_| noise(&mut random)).collect();
    let sent = |held_pages_max| {
        let mut pair = Pair::with(Options { held_pages_max, ..Options::new(SEED) });
        pair.memory.now[..content.len()].copy_from_slice(&content);
        pair.send();
        pair.memory.now[content.len()..].copy_from_slice(&content);
        pair.send().literal
    };
    assert_eq!(sent(PAGES), 0);
    assert!((1..=content.len() as u64).contains(&sent(1)), "the last few are found");
}

/// Spec: D6
#[test]
fn a_machine_that_changes_at_random_is_followed() {
    let mut random = StdRng::seed_from_u64(seed());
    for threads in [1, 2, 5] {
        let mut pair = Pair::with(Options { threads, ..Options::new(SEED) });
        pair.snapshot((0..BLOCKS).map(|_| text(&mut random)).collect());
        for _ in 0..12 {
            change(&mut pair, &mut random);
            pair.send();
        }
    }
}

/// Changes some runs of pages and blocks.
pub(super) fn change(pair: &mut Pair, random: &mut StdRng) {
    let snapshot = pair.versions.first().map(|version| pair.theirs.versions.lock().unwrap()[version].clone());
    for _ in 0..random.random_range(0..30) {
        let count = random.random_range(1..60);
        let at = random.random_range(0..BLOCKS as usize - count);
        let from = random.random_range(0..BLOCKS as usize - count);
        let held = pair.memory.now[from..from + count].to_vec();
        let own = if random.random() { &mut pair.memory.now } else { &mut pair.disk.now };
        match random.random_range(0..7) {
            0 => own[at..at + count].fill([0; PAGE_BYTES]),
            1 => own[at..at + count].fill(noise(random)),
            2 => own[at..at + count].fill_with(|| text(random)),
            3 => own[at..at + count].iter_mut().for_each(|piece| touch(piece, random)),
            4 => own[at..at + count].copy_from_slice(&held),
            5 => own.copy_within(from..from + count, at),
            _ => match &snapshot {
                Some(snapshot) => own[at..at + count].copy_from_slice(&snapshot[from..from + count]),
                None => own[at..at + count].fill_with(|| noise(random)),
            },
        }
    }
}

/// Pages that are counted as they are read.
struct Counted(AtomicU64);

impl Source for Counted {
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
        self.0.fetch_add(1, Relaxed);
        into.fill(u8::try_from(number % 251 + 1).expect("it fits"));
        Ok(())
    }

    fn read_acknowledged(&self, _: u64, _: &mut Piece) -> Result<bool, Cause> {
        Ok(false)
    }
}

/// A link that takes no page before more of them were read than are made at once.
struct Late<'a> {
    read: &'a Counted,
    awaited: u64,
}

impl Write for Late<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let until = Instant::now() + Duration::from_secs(60);
        while (1..self.awaited).contains(&self.read.0.load(Relaxed)) {
            assert!(Instant::now() < until, "nothing is read while the link takes nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Spec: D6
#[test]
fn pages_are_read_and_compressed_while_the_link_takes_the_ones_before() {
    let at_once = 2048;
    let sizes = Sizes { memory_bytes: 3 * at_once * PAGE_BYTES as u64, disk_bytes: 0, disk_travels: false };
    let memory = Counted(AtomicU64::new(0));
    let numbers: Vec<u64> = (0..3 * at_once).collect();
    let changed = Changed { numbers: &numbers, source: &memory };
    let epoch = Epoch { number: 1, versions: &[], memory: changed, disk: None, devices: &[] };
    let mut encoder = Encoder::new(sizes, Options::new(SEED)).unwrap();
    let mut link = Late { read: &memory, awaited: at_once + 1 };
    let counts = encoder.encode(&epoch, &mut NothingKnown, &mut link).unwrap();
    assert_eq!(counts.pieces(), 3 * at_once);
}
