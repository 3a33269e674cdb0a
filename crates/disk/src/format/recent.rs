//! The files `recent.N`: what changed in the map since journal `N` was begun, for who comes after a killed process.
//!
//! A guest outlives the process that serves its disk. What that process acknowledged, flushed or not, must be there for
//! the next one, as it would be in a plain file's page cache. So each change is written here, and not synchronized,
//! before its write is acknowledged. After a power cut the file says nothing: it is believed only in the boot that
//! wrote it, as then the data that it names is in the page cache, too.
//!
//! ```text
//! head (64 bytes): "ONECOPYR" version u32, 0 u32, number u64, boot 16 bytes, checksum u64, zeros
//! slot (32 bytes): block u32, count u32, state u32, birth u32, index u32, slots u32, checksum u64 of all before
//! ```
//! Slots of one block are in their order. A change has as many `slots`, one behind the other from index 0 on, and all
//! of them are believed or none: one that was not finished is skipped, because its write was not acknowledged and its
//! places may have been given to others since.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Reader, VERSION, Writer};
use crate::map::State;

pub(crate) const HEAD_BYTES: usize = 64;
pub(crate) const SLOT_BYTES: usize = 32;
const MAGIC: &[u8; 8] = b"ONECOPYR";

/// A run of blocks that got new states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) block: u32,
    pub(crate) count: u32,
    pub(crate) state: State,
    pub(crate) birth: u32,
}

/// This boot of this machine.
pub(crate) type Boot = [u8; 16];

/// What the kernel calls this boot; zeros, which no file matches, when it does not say.
pub(crate) fn boot() -> Boot {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

pub(crate) fn head(identity: u64, number: u64, boot: Boot) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.bytes(MAGIC);
    writer.u32(VERSION);
    writer.u32(0);
    writer.u64(number);
    writer.bytes(&boot);
    let sum = xxh3_64_with_seed(&writer.0, identity);
    writer.u64(sum);
    writer.0.resize(HEAD_BYTES, 0);
    writer.0
}

/// One change: its slots are believed together.
pub(crate) fn encode(identity: u64, slots: &[Slot]) -> Vec<u8> {
    let mut writer = Writer(Vec::with_capacity(slots.len() * SLOT_BYTES));
    for (index, slot) in slots.iter().enumerate() {
        let begin = writer.0.len();
        writer.u32(slot.block);
        writer.u32(slot.count);
        writer.u32(slot.state.code());
        writer.u32(slot.birth);
        writer.u32(index as u32);
        writer.u32(slots.len() as u32);
        let sum = xxh3_64_with_seed(&writer.0[begin..], identity);
        writer.u64(sum);
    }
    writer.0
}

/// The slots of this boot; none when the file is of another one, or was not begun.
pub(crate) fn parse(identity: u64, number: u64, boot: Boot, bytes: &[u8]) -> Option<Vec<Slot>> {
    let (found, slots) = bytes.split_at_checked(HEAD_BYTES)?;
    if boot == Boot::default() || found != head(identity, number, boot) {
        return None;
    }
    let (mut whole, mut change, mut change_slots) = (Vec::new(), Vec::new(), 0);
    for bytes in slots.chunks_exact(SLOT_BYTES) {
        match decode(identity, bytes) {
            Some((slot, 0, slots)) => (change, change_slots) = (vec![slot], slots),
            Some((slot, index, slots)) if index as usize == change.len() && slots == change_slots => change.push(slot),
            _ => change.clear(),
        }
        if change.len() == change_slots as usize {
            whole.append(&mut change);
        }
    }
    Some(whole)
}

/// A slot, its index in its change, and how many that has; none when it is not whole.
fn decode(identity: u64, bytes: &[u8]) -> Option<(Slot, u32, u32)> {
    let (body, _) = bytes.split_at_checked(SLOT_BYTES - 8)?;
    let mut reader = Reader(bytes);
    let mut number = || reader.u32().ok();
    let (block, count, code, birth, index, slots) = (number()?, number()?, number()?, number()?, number()?, number()?);
    let is_whole = reader.u64().ok()? == xxh3_64_with_seed(body, identity);
    is_whole.then(|| (Slot { block, count, state: State::from_code(code), birth }, index, slots))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_come_back_in_the_boot_that_wrote_them_and_unfinished_ones_are_skipped() {
        let slots = slots();
        let mut bytes = head(1, 2, [3; 16]);
        slots.iter().for_each(|slot| bytes.extend(encode(1, &[*slot])));
        assert_eq!(parse(1, 2, [3; 16], &bytes), Some(slots.to_vec()));
        assert_eq!(parse(1, 2, [4; 16], &bytes), None);
        assert_eq!(parse(1, 3, [3; 16], &bytes), None);
        bytes[HEAD_BYTES + SLOT_BYTES] ^= 1;
        assert_eq!(parse(1, 2, [3; 16], &bytes[..bytes.len() - 9]), Some(vec![slots[0]]));
        assert_ne!(boot(), Boot::default());
    }

    #[test]
    fn a_change_of_several_slots_is_believed_whole_or_not_at_all() {
        let slots = slots();
        for lost in 0..4 {
            let mut bytes = [head(1, 2, [3; 16]), encode(1, &slots), encode(1, &slots[..1])].concat();
            if lost < 3 {
                bytes[HEAD_BYTES + lost * SLOT_BYTES..][..SLOT_BYTES].fill(0);
            }
            let expected = if lost < 3 { slots[..1].to_vec() } else { [&slots[..], &slots[..1]].concat() };
            assert_eq!(parse(1, 2, [3; 16], &bytes), Some(expected), "{lost}");
        }
    }

    fn slots() -> [Slot; 3] {
        [1, 2, 3].map(|block| Slot { block, count: 1, state: State::Data(block + 5), birth: 9 })
    }

    proptest! {
        #[test]
        fn any_bytes_are_slots_or_nothing(mut slots in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = head(1, 2, [3; 16]);
            bytes.append(&mut slots);
            let _ = parse(1, 2, [3; 16], &bytes);
        }
    }
}
