//! How the content of a piece travels that nothing can be said about in few bytes.
//!
//! Smaller is better as long as making it so takes less time than sending what it saves. By processor and thread zstd's
//! first level takes some 0.4 GB/s, and of a difference that is mostly zeros more than 1 GB/s. So with T threads, where
//! a compressed piece is half as long and a difference a quarter, and R is the link's rate:
//!
//! - *literal* when R > T * 1.3 GB/s: nothing that can be done is as fast as the link;
//! - *xor* when the other side has the piece and half of its words are what they were;
//! - *literal* when R > T * 0.2 GB/s, or when a sample of the content looks like noise;
//! - *zstd* else.
//!
//! The bounds are measured by `onecopy-bench delta`, which prints both speeds.

use super::Piece;

/// What zstd saves in a second, by thread, of content and of differences.
const ZSTD_SAVES_BYTES_PER_SECOND: u64 = 200_000_000;
const XOR_SAVES_BYTES_PER_SECOND: u64 = 1_300_000_000;
/// Bytes that are looked at of a content: every eighth.
const SAMPLE_BYTES: usize = 512;
/// Of noise 511 of the sample's pairs are of equal bytes, give or take 23; of what zstd makes smaller, many more.
const NOISE_PAIRS_MAX: u32 = 700;

/// How it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Xor,
    Zstd,
    Literal,
}

/// What is worth its time on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Worth {
    xor: bool,
    zstd: bool,
}

impl Worth {
    pub(super) fn of(link_bytes_per_second: u64, threads: usize) -> Worth {
        let threads = threads as u64;
        Worth {
            xor: link_bytes_per_second <= threads * XOR_SAVES_BYTES_PER_SECOND,
            zstd: link_bytes_per_second <= threads * ZSTD_SAVES_BYTES_PER_SECOND,
        }
    }

    /// Whether it is of use to read what the other side has.
    pub(super) fn wants_held(self) -> bool {
        self.xor
    }

    pub(super) fn choose(self, now: &Piece, held: Option<&Piece>) -> Choice {
        match held {
            Some(held) if self.xor && is_alike(now, held) => Choice::Xor,
            _ if !self.zstd || is_noise(now) => Choice::Literal,
            _ => Choice::Zstd,
        }
    }
}

/// Whether half of the words of eight bytes are equal.
fn is_alike(now: &Piece, held: &Piece) -> bool {
    let (now, held) = (now.as_chunks::<8>().0, held.as_chunks::<8>().0);
    let equal = now.iter().zip(held).filter(|(now, held)| now == held).count();
    equal >= now.len() / 2
}

/// Whether bytes of a sample are equal as seldom as those of noise are.
fn is_noise(piece: &Piece) -> bool {
    let mut counts = [0_u16; 256];
    for byte in piece.iter().step_by(piece.len() / SAMPLE_BYTES) {
        counts[usize::from(*byte)] += 1;
    }
    let pairs: u32 =
        counts.iter().map(|count| u32::from(*count)).map(|count| count * count.saturating_sub(1) / 2).sum();
    pairs <= NOISE_PAIRS_MAX
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    #[test]
    fn a_slow_link_gets_what_is_smallest_and_a_fast_one_what_is_ready() {
        let noise = StdRng::seed_from_u64(1).random::<[u8; 4096]>();
        let text: Piece = std::array::from_fn(|at| b"a tuple of some letters "[at % 24]);
        let mut changed = noise;
        changed[..200].fill(7);
        let choose = |rate, now, held| Worth::of(rate, 2).choose(now, held);
        for (rate, of_noise, of_text, of_changed) in [
            (12_500_000, Choice::Literal, Choice::Zstd, Choice::Xor),
            (1_250_000_000, Choice::Literal, Choice::Literal, Choice::Xor),
            (5_000_000_000, Choice::Literal, Choice::Literal, Choice::Literal),
        ] {
            assert_eq!(choose(rate, &noise, None), of_noise, "{rate}");
            assert_eq!(choose(rate, &text, Some(&noise)), of_text, "{rate}");
            assert_eq!(choose(rate, &changed, Some(&noise)), of_changed, "{rate}");
        }
    }

    #[test]
    fn noise_is_told_from_what_is_none() {
        for seed in 0..200 {
            assert!(is_noise(&StdRng::seed_from_u64(seed).random()), "{seed}");
        }
        // Half of it noise: zstd saves the other half.
        let mut half: Piece = StdRng::seed_from_u64(1).random();
        half[2048..].fill(0);
        assert!(!is_noise(&half));
    }
}
