//! Reads.

use std::io::IoSliceMut;
use std::sync::atomic::Ordering;

use super::{Core, WaitPolicy, byte_of};
use crate::map::{self, Position, State};
use crate::{Attempt, BLOCK_BYTES, DiskError, GuestSegment};

/// A part of a read whose bytes come from one place.
#[derive(Clone, Copy)]
struct Part {
    /// First byte on the disk.
    offset: u64,
    /// First byte of the request's memory.
    from: u64,
    length: u64,
}

impl Core {
    /// Reads `length` bytes, the sum of the slices, and tells the observer.
    pub(crate) fn read(
        &self,
        offset: u64,
        into: &mut [IoSliceMut<'_>],
        segments: &[GuestSegment],
        wait_policy: WaitPolicy<'_>,
    ) -> Result<Attempt, DiskError> {
        let length: u64 = into.iter().map(|slice| slice.len() as u64).sum();
        self.check_range(offset, length)?;
        let before = self.begin_read(offset, length);
        if !self.read_runs(offset, length, into, wait_policy)? {
            return Ok(Attempt::WouldWait);
        }
        let counters = &self.stripes[Position::of(offset / BLOCK_BYTES).stripe].counters;
        counters.reads.fetch_add(1, Ordering::Relaxed);
        counters.read_bytes.fetch_add(length, Ordering::Relaxed);
        self.observe_read(offset, before.as_ref(), into, segments);
        Ok(Attempt::Done)
    }

    /// Reads bytes within the disk, of any alignment, without counting or telling it.
    pub(crate) fn read_unseen(
        &self,
        offset: u64,
        into: &mut [u8],
        wait_policy: WaitPolicy<'_>,
    ) -> Result<bool, DiskError> {
        let length = into.len() as u64;
        self.read_runs(offset, length, &mut [IoSliceMut::new(into)], wait_policy)
    }

    fn read_runs(
        &self,
        offset: u64,
        length: u64,
        into: &mut [IoSliceMut<'_>],
        wait_policy: WaitPolicy<'_>,
    ) -> Result<bool, DiskError> {
        let mut from = 0;
        while from < length {
            let done = self.read_run(offset + from, from, length, into, wait_policy)?;
            match done {
                Some(count) => from += count,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Reads the bytes at `offset` whose blocks lie in a row; gives how many, none where they do so no more, or nothing
    /// when it would wait.
    fn read_run(
        &self,
        offset: u64,
        from: u64,
        length: u64,
        into: &mut [IoSliceMut<'_>],
        wait_policy: WaitPolicy<'_>,
    ) -> Result<Option<u64>, DiskError> {
        let (block, within) = (offset / BLOCK_BYTES, offset % BLOCK_BYTES);
        let position = Position::of(block);
        let blocks = (within + length - from).div_ceil(BLOCK_BYTES) as usize;
        let inside = self.enter(position.stripe)?;
        let look = || {
            let map = self.stripes[position.stripe].map();
            map::run(map.tree.leaf(position.leaf).map(|leaf| &**leaf), position.index, blocks, |_| true)
        };
        let run = look();
        let count = (run.count as u64 * BLOCK_BYTES - within).min(length - from);
        let part = Part { offset, from, length: count };
        let done = match (run.state, &self.base) {
            (State::Data(place), _) => {
                let begin = byte_of(place) + within;
                self.read_place(begin, part, length, into, wait_policy)?
            }
            (State::Absent, Some(_)) => {
                // Nothing of ours is read, and the source may take its time.
                drop(inside);
                match self.read_base(part, into, wait_policy) {
                    // What was written meanwhile a base may have left out: that is read where it is now.
                    Err(error) => {
                        let now = look();
                        if now.state == State::Absent && now.count == run.count {
                            return Err(error);
                        }
                        return Ok(Some(0));
                    }
                    Ok(done) => done,
                }
            }
            _ => each_slice(into, part, |slice, _| {
                slice.fill(0);
                Ok(true)
            })?,
        };
        Ok(done.then_some(count))
    }

    fn read_place(
        &self,
        begin: u64,
        part: Part,
        length: u64,
        into: &mut [IoSliceMut<'_>],
        wait_policy: WaitPolicy<'_>,
    ) -> Result<bool, DiskError> {
        if part.length == length {
            return match wait_policy {
                WaitPolicy::NoWait => self.data.try_read_slices(begin, into),
                WaitPolicy::Wait(_) => self.data.read_slices(begin, into).map(|()| true),
            };
        }
        each_slice(into, part, |slice, offset| {
            let at = begin + offset - part.offset;
            match wait_policy {
                WaitPolicy::NoWait => self.data.try_read_slices(at, &mut [IoSliceMut::new(slice)]),
                WaitPolicy::Wait(_) => self.data.read_at(at, slice).map(|()| true),
            }
        })
    }

    fn read_base(
        &self,
        part: Part,
        into: &mut [IoSliceMut<'_>],
        wait_policy: WaitPolicy<'_>,
    ) -> Result<bool, DiskError> {
        let Some(base) = &self.base else { return Ok(true) };
        each_slice(into, part, |slice, offset| match wait_policy {
            WaitPolicy::NoWait => Ok(base.try_read(offset, slice)?),
            WaitPolicy::Wait(_) => base.read(offset, slice).map(|()| true).map_err(DiskError::from),
        })
    }
}

/// Calls `each` with the parts of slices that a part of the request covers, and with where on the disk each begins,
/// until it says no.
fn each_slice(
    into: &mut [IoSliceMut<'_>],
    part: Part,
    mut each: impl FnMut(&mut [u8], u64) -> Result<bool, DiskError>,
) -> Result<bool, DiskError> {
    let (mut begin, end) = (0, part.from + part.length);
    for slice in into {
        let slice_end = begin + slice.len() as u64;
        let (low, high) = (begin.max(part.from), slice_end.min(end));
        if low < high {
            let bytes = &mut slice[(low - begin) as usize..(high - begin) as usize];
            if !each(bytes, part.offset + low - part.from)? {
                return Ok(false);
            }
        }
        begin = slice_end;
        if begin >= end {
            break;
        }
    }
    Ok(true)
}
