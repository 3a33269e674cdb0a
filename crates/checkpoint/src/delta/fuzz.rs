//! An epoch as a hostile peer may send it, played from bytes that a fuzzer chooses.
//!
//! The machine has 64 pages and a disk of 64 blocks, whose memory and disk say so when anybody leaves them. The bytes
//! are a stream of epochs; a first byte chooses whether the digest at an epoch's end is made right, so that what lies
//! behind it is reached, too.

use std::ops::Range;
use std::sync::Mutex;

use super::{Blocks, Decoded, Decoder, Destination, Held, Shape, Space, Version};
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
    fn begin(&self, _: u64, _: Held, _: &[Version]) -> Result<(), Cause> {
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

/// Decodes what there is, up to the first error.
pub fn play(input: &[u8]) {
    let shape = Shape {
        memory_bytes: (PIECES * PAGE_BYTES) as u64,
        disk_bytes: (PIECES * PAGE_BYTES) as u64,
        disk_travels: true,
    };
    let machine = Machine(Mutex::new([vec![0; PIECES * PAGE_BYTES], vec![0; PIECES * PAGE_BYTES]]));
    let mut decoder = Decoder::new(shape);
    let mut from = input;
    for _ in 0..EPOCHS_MAX {
        match decoder.decode(&mut from, &machine, &machine) {
            Ok(Decoded::Whole(held)) => assert_eq!(held, decoder.held()),
            Ok(Decoded::Different(different)) => assert!(!different.is_empty()),
            Err(_) => return,
        }
    }
}
