//! Epochs as a hostile peer may send them, played from bytes that a fuzzer chooses.
//!
//! The machine has 64 pages and a disk of 64 blocks, and panics when anybody leaves them. The bytes are parts: those of
//! an epoch that has begun as it should, and then whatever follows. The digest at an epoch's end is not looked at: a
//! liar can make it right, and a fuzzer cannot.

use std::ops::Range;
use std::sync::Mutex;

use super::format::{Begin, Kind, write_part};
use super::{Blocks, Decoded, Decoder, Destination, HeldEpoch, Sizes, Space, Version};
use crate::PAGE_BYTES;
use crate::take::Cause;

const PIECES: usize = 64;
/// Epochs of an input at most.
const EPOCHS_MAX: usize = 8;

struct Machine(Mutex<[Vec<u8>; 2]>);

impl Machine {
    fn with(&self, space: Space, first: u64, count: usize, with: impl FnOnce(&mut [u8])) {
        let first = usize::try_from(first).expect("it is within the machine");
        assert!(first + count <= PIECES, "{count} pieces at {first} of {space:?}");
        let mut spaces = self.0.lock().expect("nothing panics while it holds this");
        with(&mut spaces[usize::from(space == Space::Disk)][first * PAGE_BYTES..][..count * PAGE_BYTES]);
    }
}

impl Destination for Machine {
    fn begin(&self, _: u64, _: HeldEpoch, _: &[Version]) -> Result<(), Cause> {
        Ok(())
    }

    fn read(&self, space: Space, first: u64, into: &mut [u8]) -> Result<(), Cause> {
        assert!(into.len().is_multiple_of(PAGE_BYTES));
        self.with(space, first, into.len() / PAGE_BYTES, |content| into.copy_from_slice(content));
        Ok(())
    }

    fn write(&self, space: Space, first: u64, content: &[u8]) -> Result<(), Cause> {
        assert!(content.len().is_multiple_of(PAGE_BYTES));
        self.with(space, first, content.len() / PAGE_BYTES, |own| own.copy_from_slice(content));
        Ok(())
    }

    fn zero(&self, space: Space, numbers: Range<u64>) -> Result<(), Cause> {
        let count = usize::try_from(numbers.end - numbers.start).expect("it is within the machine");
        self.with(space, numbers.start, count, |own| own.fill(0));
        Ok(())
    }
}

impl Blocks for Machine {
    fn read_many(&self, _: &Version, blocks: &[u64], into: &mut [u8]) -> Result<(), Cause> {
        assert!(blocks.windows(2).all(|pair| pair[0] < pair[1]), "they rise");
        for (block, into) in blocks.iter().zip(into.chunks_mut(PAGE_BYTES)) {
            assert!(*block < PIECES as u64, "block {block}");
            into.fill(*block as u8);
        }
        Ok(())
    }
}

/// The machine.
pub(super) const SIZES: Sizes =
    Sizes { memory_bytes: (PIECES * PAGE_BYTES) as u64, disk_bytes: (PIECES * PAGE_BYTES) as u64, disk_travels: true };

/// Decodes what there is, up to the first error.
pub fn play(input: &[u8]) {
    let machine = Machine(Mutex::new([vec![0; PIECES * PAGE_BYTES], vec![0; PIECES * PAGE_BYTES]]));
    let mut decoder = Decoder::new(SIZES).believing_ends();
    let begin = Begin { epoch: 1, since: HeldEpoch::NOTHING, sizes: SIZES, versions: vec![Version::Epoch(1)] };
    let mut bytes = Vec::new();
    write_part(&mut bytes, Kind::Begin, &begin.to_bytes()).expect("memory takes all");
    bytes.extend_from_slice(input);
    let mut from = &bytes[..];
    for _ in 0..EPOCHS_MAX {
        match decoder.decode(&mut from, &machine, &machine) {
            Ok(Decoded::Whole(held)) => assert_eq!(held, decoder.held()),
            Ok(Decoded::Different(different)) => assert!(!different.is_empty()),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Inputs that reached something new in the code, each by another way: `make fuzz` finds and keeps them.
    ///
    /// Spec: C3
    #[test]
    fn what_a_fuzzer_found_worth_keeping_leaves_nothing_but_the_machine_touched() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/epoch");
        let files: Vec<_> = std::fs::read_dir(&corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 10, "{} inputs in {}", files.len(), corpus.display());
        for file in files {
            super::play(&std::fs::read(&file).unwrap());
        }
    }
}
