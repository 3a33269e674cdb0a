//! What a sector holds: which one it is, of which run, how often it has been written, and bytes that follow from these.

/// The unit of a block device's addresses.
pub(crate) const SECTOR_BYTES: usize = 512;
const SECTOR_WORDS: usize = SECTOR_BYTES / 8;
/// "onecopy!" in ASCII: tells a sector of ours from anything else.
const MARK: u64 = u64::from_le_bytes(*b"onecopy!");

/// Which content a sector has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) seed: u64,
    pub(crate) sector: u64,
    pub(crate) generation: u64,
}

/// What is found in a sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing but zeros.
    Zeros,
    /// All that belongs to that stamp.
    Whole(Stamp),
    /// The stamp, but not all that belongs to it.
    Damaged(Stamp),
    /// Nothing that was ever written.
    Foreign,
}

/// The next number of a sequence that looks random: splitmix64 (Steele, Lea, Flood 2014).
pub(crate) fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Writes the stamp's content.
pub(crate) fn fill(bytes: &mut [u8], stamp: Stamp) {
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words(stamp)) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
}

/// Reads what is there.
pub(crate) fn examine(bytes: &[u8]) -> Found {
    let word = |index: usize| bytes[index * 8..][..8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    if word(0) != MARK {
        return if bytes.iter().all(|&byte| byte == 0) { Found::Zeros } else { Found::Foreign };
    }
    let stamp = Stamp { seed: word(1), sector: word(2), generation: word(3) };
    let whole = words(stamp).enumerate().all(|(index, expected)| word(index) == expected);
    if whole { Found::Whole(stamp) } else { Found::Damaged(stamp) }
}

fn words(stamp: Stamp) -> impl Iterator<Item = u64> {
    let head = [MARK, stamp.seed, stamp.sector, stamp.generation];
    let mut state = stamp.seed ^ stamp.sector.rotate_left(24) ^ stamp.generation.rotate_left(48);
    head.into_iter().chain(std::iter::repeat_with(move || next_random(&mut state))).take(SECTOR_WORDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_is_recognized_and_each_changed_byte_is_seen() {
        let stamp = Stamp { seed: 7, sector: 123_456, generation: 3 };
        let mut bytes = [0; SECTOR_BYTES];
        assert_eq!(examine(&bytes), Found::Zeros);
        fill(&mut bytes, stamp);
        assert_eq!(examine(&bytes), Found::Whole(stamp));
        for index in 0..SECTOR_BYTES {
            bytes[index] ^= 1;
            assert_ne!(examine(&bytes), Found::Whole(stamp), "byte {index}");
            bytes[index] ^= 1;
        }
        bytes[511] ^= 1;
        assert_eq!(examine(&bytes), Found::Damaged(stamp));
        assert_eq!(examine(&[1; SECTOR_BYTES]), Found::Foreign);
    }
}
