//! Everything at once: the clone's accesses, the source's writes, the background, restarts. Each life ends in the
//! frozen content, changed by the clone's own writes and cuts only.

use std::os::fd::AsFd;

use super::*;

const FILES: u32 = 7;
const CHUNKS_MAX: u64 = 80;
const OPERATIONS: usize = 1500;
const LIVES: usize = 3;

/// xorshift64* (Vigna, 2014).
pub(super) struct Chance(pub(super) u64);

impl Chance {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }

    fn range(&mut self) -> ByteRange {
        let start = self.below(CHUNKS_MAX * CHUNK_BYTES);
        let length = if self.below(4) == 0 { self.below(60 * CHUNK_BYTES) } else { self.below(2 * CHUNK_BYTES) };
        ByteRange::new(start, length + 1)
    }

    fn file(&mut self) -> FileNumber {
        FileNumber(self.below(u64::from(FILES)) as u32)
    }
}

#[test]
fn whatever_happens_the_clone_gets_the_frozen_content() {
    let seed = onecopy_testing::seed::seed();
    for round in 0..6 {
        round_of(seed.wrapping_add(2 * round) | 1);
    }
}

fn round_of(seed: u64) {
    let mut chance = Chance(seed);
    let frozen = (0..FILES).map(|number| {
        let mut content = content(number as u8, chance.below(CHUNKS_MAX * CHUNK_BYTES) as usize);
        // Some of it is holes.
        let (start, end) = (content.len() / 3, content.len() / 2);
        content[start..end].fill(0);
        content
    });
    let harness = Harness::new(frozen.collect());
    harness.origin.now_every.store(1 + chance.below(3), Ordering::SeqCst);
    // What the clone's files hold when all is filled.
    let expected: Vec<_> = harness.frozen.iter().cloned().map(Mutex::new).collect();
    let mut bitmap = SharedBitmap::create(&harness.image).unwrap();
    for life in 0..LIVES {
        let filling = harness.filling_with(bitmap);
        let limiter = Arc::new(Limiter::new(Some(1 << 20)));
        let hot = vec![(chance.file(), chance.range())];
        let background = Background::start(Arc::clone(&filling), hot, Arc::clone(&limiter), |_| {}).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let (mut chance, filling, expected) = (Chance(chance.below(1 << 31) + 1), &filling, &expected);
                scope.spawn(move || (0..OPERATIONS / LIVES).for_each(|_| clone_access(&mut chance, filling, expected)));
            }
            for _ in 0..2 {
                let (mut chance, filling) = (Chance(chance.below(1 << 31) + 1), &filling);
                let origin = &harness.origin;
                scope.spawn(move || (0..OPERATIONS / LIVES).for_each(|_| source_write(&mut chance, filling, origin)));
            }
        });
        if life + 1 == LIVES {
            limiter.set_bytes_per_second(None);
            background.wait();
            assert!(filling.whole(), "{:?}", filling.failure());
        }
        bitmap = SharedBitmap::open(filling.bitmap().as_fd().try_clone_to_owned().unwrap()).unwrap();
    }
    for (number, expected) in expected.iter().enumerate() {
        let cloned = harness.cloned(FileNumber(number as u32));
        assert!(cloned == *expected.lock().unwrap(), "file {number} differs, seed {seed}");
    }
}

/// What PostgreSQL of the clone does after it was allowed to: reads, writes, cuts.
fn clone_access(chance: &mut Chance, filling: &Filling, expected: &[Mutex<Vec<u8>>]) {
    let (number, range) = (chance.file(), chance.range());
    let file = filling.file(number);
    // Accesses of one file by the clone one after another, so that it is known what they shall give.
    let mut expected = expected[number.0 as usize].lock().unwrap();
    let what = chance.below(20);
    if what == 0 {
        let size_bytes = range.start / 4096 * 4096;
        if size_bytes < expected.len() as u64 {
            filling.forget_from(number, size_bytes).unwrap();
            file.set_len(size_bytes).unwrap();
            expected.truncate(size_bytes as usize);
        }
        return;
    }
    if what.is_multiple_of(2) || !filling.try_ensure_now(number, range).unwrap() {
        filling.ensure(number, range).unwrap();
    }
    assert!(filling.is_filled(number, range));
    let (start, end) = (range.start as usize, range.end as usize);
    if what < 8 {
        let written = vec![chance.below(255) as u8 + 1; end - start];
        file.write_all_at(&written, range.start).unwrap();
        if expected.len() < end {
            expected.resize(end, 0);
        }
        expected[start..end].copy_from_slice(&written);
    } else if end <= expected.len() {
        let mut read = vec![0; end - start];
        file.read_exact_at(&mut read, range.start).unwrap();
        assert!(read == expected[start..end], "a read of {range:?} of {number:?}");
    }
}

/// What PostgreSQL of the source does after it was allowed to.
fn source_write(chance: &mut Chance, filling: &Filling, origin: &SourceFiles) {
    let (number, mut range) = (chance.file(), chance.range());
    range.end = range.end.min(filling.image().files[number.0 as usize].size_bytes);
    if range.start < range.end {
        filling.ensure(number, range).unwrap();
        let garbage = vec![0xEE; (range.end - range.start) as usize];
        origin.files[number.0 as usize].write_all_at(&garbage, range.start).unwrap();
    }
}
