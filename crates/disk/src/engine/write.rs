//! Writes: in place where no frozen map needs the old content, else to a new place.

use std::io::IoSliceMut;
use std::sync::atomic::Ordering;

use super::observe::Addresses;
use super::{Core, Stripe, WaitPolicy, Working, byte_of};
use crate::map::{self, Entry, LEAF_BLOCKS, Position, State};
use crate::{Attempt, BLOCK_BYTES, DiskError, GuestSegment, Requester};

const BLOCK: usize = BLOCK_BYTES as usize;
const LEAF_BYTES: u64 = LEAF_BLOCKS * BLOCK_BYTES;

/// Places in a row.
#[derive(Clone, Copy)]
struct Places {
    first: u32,
    count: u32,
}

impl Core {
    /// Writes, and tells. Of a write that would wait some may be done: who does it again does no harm.
    pub(crate) fn write(
        &self,
        offset: u64,
        from: &[u8],
        segments: &[GuestSegment],
        wait_policy: WaitPolicy<'_>,
    ) -> Result<Attempt, DiskError> {
        self.check_range(offset, from.len() as u64)?;
        check_segments(from, segments)?;
        self.check_writable()?;
        let mut addresses = Addresses::new(segments);
        let mut done = 0;
        while done < from.len() {
            let at = offset + done as u64;
            let length = part_length(at, from.len() - done);
            let bytes = &from[done..done + length];
            if length.is_multiple_of(BLOCK) {
                self.write_blocks(at, bytes, done as u64, &mut addresses, wait_policy.requester())?;
            } else if self.write_sectors(at, bytes, done as u64, &mut addresses, wait_policy)? == Attempt::WouldWait {
                return Ok(Attempt::WouldWait);
            }
            done += length;
        }
        let counters = &self.stripes[Position::of(offset / BLOCK_BYTES).stripe].counters;
        counters.writes.fetch_add(1, Ordering::Relaxed);
        counters.written_bytes.fetch_add(from.len() as u64, Ordering::Relaxed);
        self.relieve()?;
        Ok(Attempt::Done)
    }

    /// Writes whole blocks of one leaf.
    fn write_blocks(
        &self,
        offset: u64,
        bytes: &[u8],
        from: u64,
        addresses: &mut Addresses<'_>,
        requester: Option<&Requester>,
    ) -> Result<(), DiskError> {
        let position = Position::of(offset / BLOCK_BYTES);
        let stripe = &self.stripes[position.stripe];
        let _changer = self.enter_to_change(position.stripe, requester)?;
        // Recorded writes are done one after another: the record must have the order of the data.
        let mut working =
            if self.record_writes { Working::Alone(stripe.alone()) } else { Working::Together(stripe.together()) };
        let (count, mut done) = (bytes.len() / BLOCK, 0);
        let changing = self.begin_change(offset / BLOCK_BYTES, count as u64);
        while done < count {
            let index = position.index + done;
            let (run, is_own) = {
                let map = stripe.map();
                let leaf = map.tree.leaf(position.leaf).map(|leaf| &**leaf);
                let is_own = leaf.is_some_and(|leaf| self.is_own(leaf.0[index]));
                (map::run(leaf, index, count - done, |entry| self.is_own(entry)), is_own)
            };
            let part = &bytes[done * BLOCK..(done + run.count) * BLOCK];
            match run.state {
                State::Data(place) if is_own => self.data.write_at(byte_of(place), part)?,
                _ => self.write_new(stripe, offset / BLOCK_BYTES + done as u64, part)?,
            }
            done += run.count;
        }
        self.mark_data_changed();
        self.observe_write(offset, bytes, from, addresses, &mut working);
        changing.finish();
        Ok(())
    }

    /// Writes blocks of one leaf to new places, and then lets the map name them.
    fn write_new(&self, stripe: &Stripe, block: u64, bytes: &[u8]) -> Result<(), DiskError> {
        let places = self.take_places(block, bytes.len() / BLOCK)?;
        let mut rest = bytes;
        for range in &places {
            let (part, later) = rest.split_at(range.count as usize * BLOCK);
            if let Err(error) = self.data.write_at(byte_of(range.first), part) {
                self.return_places(&places);
                return Err(error);
            }
            rest = later;
        }
        self.mark_data_changed();
        let mut block = block as u32;
        let mut replaced = Vec::new();
        {
            let mut map = stripe.map_mut();
            let mut next = block;
            let runs = places.iter().map(|range| {
                next += range.count;
                (next - range.count, range.count, State::Data(range.first))
            });
            if let Err(error) = self.tell_successor(runs) {
                drop(map);
                self.return_places(&places);
                return Err(error);
            }
            for range in &places {
                let state = State::Data(range.first);
                self.set_entries(&mut map, block, range.count, state, &mut replaced);
                self.note(&mut map, block, range.count, state);
                block += range.count;
            }
        }
        self.retire(&replaced);
        Ok(())
    }

    /// Gives blocks of one leaf new entries; what they had goes to `replaced`.
    pub(super) fn set_entries(
        &self,
        map: &mut super::Mapped,
        block: u32,
        count: u32,
        state: State,
        replaced: &mut Vec<Entry>,
    ) {
        let position = Position::of(u64::from(block));
        let leaf = map.tree.leaf_mut(position.leaf);
        let epoch = self.current_epoch();
        for (by, entry) in leaf.0[position.index..position.index + count as usize].iter_mut().enumerate() {
            let old = std::mem::replace(entry, Entry::new(state.advanced(by as u32), epoch));
            if matches!(old.state(), State::Data(_)) {
                replaced.push(old);
            }
        }
    }

    fn take_places(&self, block: u64, count: usize) -> Result<Vec<Places>, DiskError> {
        let mut places: Vec<Places> = Vec::with_capacity(1);
        for block in block..block + count as u64 {
            let Some(place) = self.space.take(block) else {
                self.return_places(&places);
                return Err(DiskError::Full);
            };
            match places.last_mut() {
                Some(last) if last.first + last.count == place => last.count += 1,
                _ => places.push(Places { first: place, count: 1 }),
            }
        }
        Ok(places)
    }

    /// Frees places that no map ever named.
    fn return_places(&self, places: &[Places]) {
        for range in places {
            let length = u64::from(range.count) * BLOCK_BYTES;
            if let Err(error) = self.data.punch(byte_of(range.first), length) {
                tracing::warn!(%error, "space of a failed write is not given back until it is used again");
            }
            (range.first..range.first + range.count).for_each(|place| self.space.free(place));
        }
    }

    /// Writes a part of one block.
    fn write_sectors(
        &self,
        offset: u64,
        bytes: &[u8],
        from: u64,
        addresses: &mut Addresses<'_>,
        wait_policy: WaitPolicy<'_>,
    ) -> Result<Attempt, DiskError> {
        let block = offset / BLOCK_BYTES;
        let position = Position::of(block);
        let stripe = &self.stripes[position.stripe];
        let mut base_block: Option<[u8; BLOCK]> = None;
        loop {
            // The base is read before anything is locked: it never changes, and may take its time.
            if base_block.is_none() && self.needs_base(stripe, position) {
                match self.base_block(block, wait_policy) {
                    Ok(Some(bytes)) => base_block = Some(bytes),
                    Ok(None) => return Ok(Attempt::WouldWait),
                    // It was written meanwhile, and a base may have left it out.
                    Err(_) if !self.needs_base(stripe, position) => {}
                    Err(error) => return Err(error),
                }
            }
            let _changer = self.enter_to_change(position.stripe, wait_policy.requester())?;
            let mut working = Working::Alone(stripe.alone());
            let entry = stripe.map().tree.leaf(position.leaf).map_or(Entry::ABSENT, |leaf| leaf.0[position.index]);
            let within = (offset % BLOCK_BYTES) as usize;
            let changing;
            if let State::Data(place) = entry.state()
                && self.is_own(entry)
            {
                changing = self.begin_change(block, 1);
                self.data.write_at(byte_of(place) + within as u64, bytes)?;
            } else {
                let mut merged = match (entry.state(), &self.base, base_block) {
                    (State::Absent, Some(_), None) => continue,
                    (State::Absent, Some(_), Some(bytes)) => bytes,
                    (State::Data(place), _, _) => match self.old_block(place, wait_policy)? {
                        Some(bytes) => bytes,
                        None => return Ok(Attempt::WouldWait),
                    },
                    _ => [0; BLOCK],
                };
                merged[within..within + bytes.len()].copy_from_slice(bytes);
                changing = self.begin_change(block, 1);
                self.write_new(stripe, block, &merged)?;
            }
            self.mark_data_changed();
            self.observe_write(offset, bytes, from, addresses, &mut working);
            changing.finish();
            return Ok(Attempt::Done);
        }
    }

    fn needs_base(&self, stripe: &Stripe, position: Position) -> bool {
        let map = stripe.map();
        let entry = map.tree.leaf(position.leaf).map_or(Entry::ABSENT, |leaf| leaf.0[position.index]);
        self.base.is_some() && entry.state() == State::Absent
    }

    fn base_block(&self, block: u64, wait_policy: WaitPolicy<'_>) -> Result<Option<[u8; BLOCK]>, DiskError> {
        let mut bytes = [0; BLOCK];
        let Some(base) = &self.base else { return Ok(Some(bytes)) };
        let is_there = match wait_policy {
            WaitPolicy::NoWait => base.try_read(block * BLOCK_BYTES, &mut bytes)?,
            WaitPolicy::Wait(_) => base.read(block * BLOCK_BYTES, &mut bytes).map(|()| true)?,
        };
        Ok(is_there.then_some(bytes))
    }

    fn old_block(&self, place: u32, wait_policy: WaitPolicy<'_>) -> Result<Option<[u8; BLOCK]>, DiskError> {
        let mut bytes = [0; BLOCK];
        let is_there = match wait_policy {
            WaitPolicy::NoWait => self.data.try_read_slices(byte_of(place), &mut [IoSliceMut::new(&mut bytes)])?,
            WaitPolicy::Wait(_) => self.data.read_at(byte_of(place), &mut bytes).map(|()| true)?,
        };
        Ok(is_there.then_some(bytes))
    }
}

/// How much of a request, from `at` on, is done in one step: a part of a block, or whole blocks of one leaf.
pub(super) fn part_length(at: u64, rest: usize) -> usize {
    let within = (at % BLOCK_BYTES) as usize;
    if within != 0 || rest < BLOCK {
        return rest.min(BLOCK - within);
    }
    let leaf_rest = (LEAF_BYTES - at % LEAF_BYTES) as usize;
    rest.min(leaf_rest) / BLOCK * BLOCK
}

fn check_segments(data: &[u8], segments: &[GuestSegment]) -> Result<(), DiskError> {
    let segments_bytes: u64 = segments.iter().map(|segment| u64::from(segment.length)).sum();
    if segments.is_empty() || segments_bytes == data.len() as u64 {
        return Ok(());
    }
    Err(DiskError::Segments { segments_bytes, data_bytes: data.len() as u64 })
}
