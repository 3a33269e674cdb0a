//! What the observer hears of: content hashes of reads and writes; and the log of writes.

use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::atomic::Ordering;

use onecopy_pagemap::content_hash;

use super::changes::{Before, Change};
use super::{Core, Working};
use crate::map::Position;
use crate::{BLOCK_BYTES, Direction, GuestSegment, Observer, SECTOR_BYTES, WriteRecord};

/// Most records of writes that are kept, of all epochs together: 48 MiB.
const RECORDS_MAX: usize = 1 << 20;

const BLOCK: usize = BLOCK_BYTES as usize;

/// Finds where parts of a request lie in guest memory. Parts are asked for in rising order.
pub(super) struct Addresses<'a> {
    segments: &'a [GuestSegment],
    /// Where the first of `segments` begins within the request.
    begin: u64,
}

impl<'a> Addresses<'a> {
    pub(super) fn new(segments: &'a [GuestSegment]) -> Addresses<'a> {
        Addresses { segments, begin: 0 }
    }

    /// The guest address of a part that lies within one segment.
    pub(super) fn of(&mut self, from: u64, length: u64) -> Option<u64> {
        while let Some((segment, rest)) = self.segments.split_first() {
            let end = self.begin + u64::from(segment.length);
            if from < end {
                let is_whole = from + length <= end;
                return segment.guest_address.filter(|_| is_whole)?.checked_add(from - self.begin);
            }
            (self.segments, self.begin) = (rest, end);
        }
        None
    }
}

/// A change of blocks. One that is not told before it goes has failed: nobody knows how much of it is there.
pub(super) struct Changing<'a> {
    observed: Option<(&'a dyn Observer, Change<'a>)>,
    blocks: Range<u64>,
    is_observed: bool,
}

impl Changing<'_> {
    /// The observer knows what the blocks hold now.
    pub(super) fn finish(mut self) {
        self.is_observed = true;
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if let Some((observer, _)) = &self.observed
            && !self.is_observed
        {
            observer.invalidated(self.blocks.clone());
        }
    }
}

/// The address when a whole block there is exactly one guest page.
fn page(address: Option<u64>) -> Option<u64> {
    address.filter(|address| address.is_multiple_of(BLOCK_BYTES))
}

impl Core {
    /// A change of blocks begins; what is returned is kept until the change is told.
    pub(super) fn begin_change(&self, block: u64, count: u64) -> Changing<'_> {
        let blocks = block..block + count;
        let observed = self.observer.as_deref().map(|observer| (observer, self.changes.begin(blocks.clone())));
        Changing { observed, blocks, is_observed: false }
    }

    /// A read begins whose bytes will be told; nothing when nobody wants to know.
    pub(super) fn begin_read(&self, offset: u64, length: u64) -> Option<Before> {
        let blocks = offset / BLOCK_BYTES..(offset + length).div_ceil(BLOCK_BYTES);
        self.observer.as_ref().map(|_| self.changes.before(blocks))
    }

    /// Reports a write that is in the data file; `from` is its first byte within the request.
    pub(super) fn observe_write(
        &self,
        offset: u64,
        bytes: &[u8],
        from: u64,
        addresses: &mut Addresses<'_>,
        working: &mut Working<'_>,
    ) {
        if self.observer.is_none() && !self.record_writes {
            return;
        }
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let length = (BLOCK - (at % BLOCK_BYTES) as usize).min(bytes.len() - done);
            let hash = content_hash(self.seed, &bytes[done..done + length]);
            let guest_address = addresses.of(from + done as u64, length as u64);
            if let Some(observer) = &self.observer {
                let block = at / BLOCK_BYTES;
                if length == BLOCK {
                    observer.transferred(block, hash, page(guest_address), Direction::Write);
                } else {
                    observer.invalidated(block..block + 1);
                }
            }
            if self.record_writes {
                let record = WriteRecord { sector: at / SECTOR_BYTES, guest_address, length: length as u32, hash };
                self.record(record, working);
            }
            done += length;
        }
    }

    fn record(&self, record: WriteRecord, working: &mut Working<'_>) {
        let Working::Alone(records) = working else {
            unreachable!("writes are done alone while they are recorded");
        };
        // What is beyond the bound is only counted: the log says that it overflowed.
        if self.recorded.fetch_add(1, Ordering::Relaxed) < RECORDS_MAX {
            records.push(record);
        } else {
            self.overflowed.store(true, Ordering::Relaxed);
            self.recorded.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Reports a read whose bytes are in memory: of blocks that did not change since before it was begun.
    pub(super) fn observe_read(
        &self,
        offset: u64,
        before: Option<&Before>,
        bytes: &[IoSliceMut<'_>],
        segments: &[GuestSegment],
    ) {
        let (Some(observer), Some(before)) = (&self.observer, before) else { return };
        let length: u64 = bytes.iter().map(|slice| slice.len() as u64).sum();
        // Once the disk is closed the observer's knowledge is kept for others: nothing is told any more.
        let Ok(_inside) = self.enter(Position::of(offset / BLOCK_BYTES).stripe) else { return };
        let mut addresses = Addresses::new(segments);
        let mut slices = Slices { slices: bytes, begin: 0 };
        let first = offset.next_multiple_of(BLOCK_BYTES);
        for at in (first..(offset + length)).step_by(BLOCK) {
            if at + BLOCK_BYTES > offset + length {
                break;
            }
            let (block, from) = (at / BLOCK_BYTES, at - offset);
            let guest_address = page(addresses.of(from, BLOCK_BYTES));
            if observer.knows(block) {
                if let Some(guest_address) = guest_address {
                    observer.placed(block, guest_address);
                }
                continue;
            }
            let hash = slices.with_block(from, |bytes| content_hash(self.seed, bytes));
            let report = || observer.transferred(block, hash, guest_address, Direction::Read);
            self.changes.if_unchanged(block, before, report);
        }
    }
}

/// Finds blocks in a request's memory. They are asked for in rising order.
struct Slices<'a, 'b> {
    slices: &'a [IoSliceMut<'b>],
    begin: u64,
}

impl Slices<'_, '_> {
    fn with_block<T>(&mut self, from: u64, then: impl FnOnce(&[u8]) -> T) -> T {
        while let Some((slice, rest)) = self.slices.split_first() {
            let end = self.begin + slice.len() as u64;
            if from < end {
                break;
            }
            (self.slices, self.begin) = (rest, end);
        }
        let within = (from - self.begin) as usize;
        if let Some(bytes) = self.slices.first().and_then(|slice| slice.get(within..within + BLOCK)) {
            return then(bytes);
        }
        let (mut block, mut done, mut skip) = ([0; BLOCK], 0, within);
        for slice in self.slices {
            let part = &slice[skip..];
            let count = part.len().min(BLOCK - done);
            block[done..done + count].copy_from_slice(&part[..count]);
            (done, skip) = (done + count, 0);
            if done == BLOCK {
                break;
            }
        }
        then(&block)
    }
}
