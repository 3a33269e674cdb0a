//! Discards and write-zeroes.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::write::part_length;
use super::{Core, WaitPolicy, Working};
use crate::map::{Entry, LEAF_BLOCKS, Leaf, Position, State};
use crate::{BLOCK_BYTES, DiskError, Requester};

/// Zeros that are written at a time where space must stay reserved.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

impl Core {
    /// Makes a range read as zeros. With `frees_space`, whole blocks lose their places; else they get ones.
    pub(crate) fn zero(&self, offset: u64, length: u64, frees_space: bool) -> Result<(), DiskError> {
        self.zero_step(offset, length, frees_space, 0..u64::MAX, None).map(|_| ())
    }

    /// The same for a part of the range: from its byte `step.start` on, at least up to `step.end`, and to where a leaf
    /// or a block ends. Gives the byte to go on with, the length in the end.
    pub(crate) fn zero_step(
        &self,
        offset: u64,
        length: u64,
        frees_space: bool,
        step: Range<u64>,
        requester: Option<&Requester>,
    ) -> Result<u64, DiskError> {
        self.check_range(offset, length)?;
        self.check_writable()?;
        let mut done = step.start;
        while done < length.min(step.end) {
            let at = offset + done;
            let part = part_length(at, usize::try_from(length - done).unwrap_or(usize::MAX)) as u64;
            if frees_space && part.is_multiple_of(BLOCK_BYTES) {
                self.forget_blocks(at / BLOCK_BYTES, (part / BLOCK_BYTES) as u32, requester)?;
            } else {
                self.write_zeros(at, part, requester)?;
            }
            done += part;
        }
        let counters = &self.stripes[Position::of(offset / BLOCK_BYTES).stripe].counters;
        if done >= length {
            counters.discards.fetch_add(1, Ordering::Relaxed);
        }
        counters.discarded_bytes.fetch_add(done - step.start, Ordering::Relaxed);
        self.relieve()?;
        Ok(done)
    }

    fn write_zeros(&self, offset: u64, length: u64, requester: Option<&Requester>) -> Result<(), DiskError> {
        let mut done = 0;
        while done < length {
            let count = (length - done).min(ZEROS.len() as u64) as usize;
            self.write(offset + done, &ZEROS[..count], &[], WaitPolicy::Wait(requester))?;
            done += count as u64;
        }
        Ok(())
    }

    /// Whole blocks of one leaf are zeros from now on, and have no places.
    fn forget_blocks(&self, block: u64, count: u32, requester: Option<&Requester>) -> Result<(), DiskError> {
        let position = Position::of(block);
        let stripe = &self.stripes[position.stripe];
        let _changer = self.enter_to_change(position.stripe, requester)?;
        let _working =
            if self.record_writes { Working::Alone(stripe.alone()) } else { Working::Together(stripe.together()) };
        let (mut replaced, mut is_changed) = (Vec::new(), false);
        let changing = self.begin_change(block, u64::from(count));
        {
            let mut map = stripe.map_mut();
            let empty = self.emptiness();
            let leaf = map.tree.leaf(position.leaf).map(|leaf| &**leaf);
            if !is_all(leaf, position.index, count as usize, empty) {
                self.tell_successor([(block as u32, count, empty)].into_iter())?;
                if u64::from(count) == LEAF_BLOCKS {
                    let old = leaf.map_or(Vec::new(), |leaf| leaf.0.to_vec());
                    replaced.extend(old.into_iter().filter(|entry| matches!(entry.state(), State::Data(_))));
                    let leaf = Arc::new(Leaf::of(Entry::new(empty, self.current_epoch())));
                    map.tree.replace_leaf(position.leaf, Some(leaf));
                } else {
                    self.set_entries(&mut map, block as u32, count, empty, &mut replaced);
                }
                let mut alike = self.alike.lock().unwrap_or_else(PoisonError::into_inner);
                map.tree.unite(position.leaf, &mut alike);
                drop(alike);
                self.note(&mut map, block as u32, count, empty);
                is_changed = true;
            }
        }
        if is_changed {
            self.retire(&replaced);
            if let Some(observer) = &self.observer {
                observer.invalidated(block..block + u64::from(count));
            }
        }
        changing.finish();
        Ok(())
    }
}

/// Whether blocks of a leaf are all in a state without a place.
fn is_all(leaf: Option<&Leaf>, index: usize, count: usize, state: State) -> bool {
    match leaf {
        None => state == State::Absent,
        Some(leaf) => leaf.0[index..index + count].iter().all(|entry| entry.state() == state),
    }
}
