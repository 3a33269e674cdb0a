//! What must outlive a holder: a memory file of the kernel's, which its keeper has, too.
//!
//! ```text
//! head     4096  words: mark, version, whether output is held, the open epoch, the last one released,
//!                first frame, next frame, written otherwise, whether that goes on, not written,
//!                the card's address, whether the machine may send from that alone, counters
//! entries        32 bytes a frame, by its number modulo their count: epoch, offset and length, instant of its arrival
//! data           frames, each in one piece
//! ```
//!
//! Each change is one word, stored after the bytes that it tells of. So nothing here is ever repaired, but for one
//! question: was the frame that comes first written to the interface before the process died? The interface knows: it
//! counts what is written to it, and nobody else writes there. Its count is what was written otherwise, and all frames
//! before the first but those that it did not take; or one more.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use crate::frame::FRAME_BYTES_MAX;
use crate::{Filter, HardwareAddress, NetworkError};

const MARK: u64 = u64::from_le_bytes(*b"ONECOPYF");
const VERSION: u64 = 1;
const HEAD_BYTES: u64 = 4096;
const ENTRY_BYTES: u64 = 32;

/// Bytes of held frames. At the bound the machine's stream is read no more: the machine waits, as for a slow wire.
pub const HELD_BYTES_MAX: u64 = 64 << 20;

/// Held frames.
pub const HELD_FRAMES_MAX: u64 = 128 << 10;

/// Bytes a drain may take at once: of a socket that nobody has made larger, and of what was read of it.
pub(crate) const DRAIN_BYTES_MAX: usize = 1 << 20;

/// As many bytes and frames has a drain beyond the bounds: a machine that stands for a checkpoint waits for nobody.
const RESERVE_BYTES: u64 = DRAIN_BYTES_MAX as u64;
const RESERVE_FRAMES: u64 = 64 << 10;

const ENTRIES: u64 = HELD_FRAMES_MAX + RESERVE_FRAMES;
const DATA_AT: u64 = HEAD_BYTES + ENTRIES * ENTRY_BYTES;
// A frame lies in one piece: less than one is lost at the end.
const DATA_BYTES: u64 = HELD_BYTES_MAX + RESERVE_BYTES + FRAME_BYTES_MAX as u64;
const FILE_BYTES: u64 = DATA_AT + DATA_BYTES;

/// The name in `/proc/PID/maps`.
const NAME: &str = "onecopy-network";

/// The words of the head.
#[derive(Clone, Copy, Debug)]
enum Word {
    Mark,
    Version,
    Holding,
    Epoch,
    Released,
    First,
    Next,
    WrittenOtherwise,
    IsWritingOtherwise,
    NotWritten,
    Card,
    Filtered,
    Counters,
}

/// What is counted, also over the deaths of holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counter {
    /// Frames of the machine, and their bytes, that the interface took.
    SentFrames,
    SentBytes,
    /// Frames for the machine, and their bytes, that QEMU was given.
    ReceivedFrames,
    ReceivedBytes,
    /// Frames of the machine that went nowhere.
    Short,
    Long,
    ForeignSource,
    ForBridge,
    /// That the interface did not take.
    NotTaken,
    /// Frames for the machine that were with us when QEMU's connection ended.
    Lost,
    /// Streams that were none.
    Broken,
    /// Connections of QEMU.
    Connections,
    /// Frames that were held, how long all together and the one that was longest, nanoseconds.
    Held,
    HeldNs,
    HeldNsMax,
    /// How often the machine was made to wait.
    Waits,
    HolderRestarts,
}

/// A held frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) epoch: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) arrived_ns: u64,
}

/// There is no room for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

#[cfg(test)]
thread_local! {
    /// A step at which a test lets a holder die.
    pub(crate) static STEPS: std::cell::RefCell<Option<u64>> = const { std::cell::RefCell::new(None) };
}

/// Held frames and counters, mapped. One process at a time changes them.
pub struct State {
    file: File,
    region: MmapRegion,
    /// Of the frames held; known from the entries.
    held_bytes: u64,
}

impl State {
    /// A new state, which holds nothing, of a machine with this card. Where that `is_filtered`, it sends from that
    /// alone.
    ///
    /// # Errors
    /// [`NetworkError::Io`]: there is no memory.
    pub fn create(card: HardwareAddress, is_filtered: bool) -> Result<State, NetworkError> {
        let failed = |error: io::Error| NetworkError::io("make the state in", Path::new("a memory file"))(error);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create(NAME, flags).map_err(|error| failed(error.into()))?);
        file.set_len(FILE_BYTES).map_err(failed)?;
        // A page of a mapping that cannot be had is SIGBUS, here it is an error.
        let head = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, HEAD_BYTES);
        head.map_err(|error| failed(error.into()))?;
        // A file that cannot be cut short never raises SIGBUS in who maps it.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(|error| failed(error.into()))?;
        let state = State::map(file)?;
        let [a, b, c, d, e, f] = card.0;
        state.set(Word::Card, u64::from_be_bytes([0, 0, a, b, c, d, e, f]));
        state.set(Word::Filtered, u64::from(is_filtered));
        for (word, value) in [(Word::Epoch, 1), (Word::Version, VERSION), (Word::Mark, MARK)] {
            state.set(word, value);
        }
        Ok(state)
    }

    /// A state that another process has kept.
    ///
    /// # Errors
    /// [`NetworkError::State`].
    pub fn open(descriptor: OwnedFd) -> Result<State, NetworkError> {
        let wrong = |what: String| NetworkError::State { what };
        let file = File::from(descriptor);
        let length = file.metadata().map_err(|error| wrong(error.to_string()))?.len();
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|error| wrong(error.to_string()))?;
        if length != FILE_BYTES || !seals.contains(SealFlags::SHRINK) {
            return Err(wrong(format!("{length} bytes, sealed against {seals:?}")));
        }
        let mut state = State::map(file)?;
        if (state.get(Word::Mark), state.get(Word::Version)) != (MARK, VERSION) {
            return Err(wrong(format!("mark {:#x}, version {}", state.get(Word::Mark), state.get(Word::Version))));
        }
        let (first, next) = (state.get(Word::First), state.get(Word::Next));
        if next.checked_sub(first).is_none_or(|held| held > ENTRIES) {
            return Err(wrong(format!("frames {first} to {next}")));
        }
        for number in first..next {
            let entry = state.entry(number);
            if entry.bytes > FRAME_BYTES_MAX as u64 || entry.offset > DATA_BYTES - FRAME_BYTES_MAX as u64 {
                return Err(wrong(format!("frame {number}: {entry:?}")));
            }
            state.held_bytes += entry.bytes;
        }
        Ok(state)
    }

    fn map(file: File) -> Result<State, NetworkError> {
        let unmapped = |what: String| NetworkError::State { what };
        let bytes = usize::try_from(FILE_BYTES).map_err(|error| unmapped(error.to_string()))?;
        let own = file.try_clone().map_err(|error| unmapped(error.to_string()))?;
        let region =
            MmapRegion::from_file(FileOffset::new(own, 0), bytes).map_err(|error| unmapped(error.to_string()))?;
        Ok(State { file, region, held_bytes: 0 })
    }

    /// The descriptor, for who keeps it.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    /// The machine's card.
    pub(crate) fn card(&self) -> HardwareAddress {
        let [_, _, address @ ..] = self.get(Word::Card).to_be_bytes();
        HardwareAddress(address)
    }

    /// What it may send.
    pub(crate) fn filter(&self) -> Filter {
        Filter { source: (self.get(Word::Filtered) != 0).then(|| self.card()) }
    }

    /// Makes the memory sure that held frames need, and holds what comes from now on.
    ///
    /// # Errors
    /// [`NetworkError::Io`]: there is no memory; nothing is held then.
    pub fn hold(&self) -> Result<(), NetworkError> {
        let sure = rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, FILE_BYTES);
        sure.map_err(|error| NetworkError::io("get memory for frames to be held in", "a memory file")(error.into()))?;
        self.set(Word::Holding, 1);
        Ok(())
    }

    /// Holds nothing any more: what is held may go.
    pub(crate) fn hold_no_more(&self) {
        self.set(Word::Holding, 0);
    }

    /// Gives back the memory of frames, where there are none and none is to be held.
    pub(crate) fn give_back(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.file, flags, HEAD_BYTES, FILE_BYTES - HEAD_BYTES) {
            tracing::warn!(%error, "memory of frames that are held no more stays allocated");
        }
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        let offset = usize::try_from(offset).expect("the region is mapped");
        self.region.get_atomic_ref::<AtomicU64>(offset).expect("the layout lies within the region")
    }

    fn get(&self, word: Word) -> u64 {
        self.word(word as u64 * 8).load(Ordering::Acquire)
    }

    fn set(&self, word: Word, value: u64) {
        step();
        self.word(word as u64 * 8).store(value, Ordering::Release);
    }

    pub(crate) fn counter(&self, counter: Counter) -> u64 {
        self.word((Word::Counters as u64 + counter as u64) * 8).load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self, counter: Counter, more: u64) {
        let word = self.word((Word::Counters as u64 + counter as u64) * 8);
        word.store(word.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }

    fn count_max(&self, counter: Counter, value: u64) {
        let word = self.word((Word::Counters as u64 + counter as u64) * 8);
        word.store(word.load(Ordering::Relaxed).max(value), Ordering::Relaxed);
    }

    /// Whether what the machine sends waits until its epoch is released.
    pub fn is_holding(&self) -> bool {
        self.get(Word::Holding) != 0
    }

    /// The open epoch.
    pub(crate) fn epoch(&self) -> u64 {
        self.get(Word::Epoch)
    }

    /// Ends the open epoch; its number.
    pub(crate) fn cut(&self) -> u64 {
        let ended = self.epoch();
        self.set(Word::Epoch, ended + 1);
        ended
    }

    /// The last epoch whose frames may go.
    pub(crate) fn released(&self) -> u64 {
        self.get(Word::Released)
    }

    pub(crate) fn release(&self, epoch: u64) -> Result<(), NetworkError> {
        if epoch >= self.epoch() {
            return Err(NetworkError::OpenEpoch { epoch, open: self.epoch() });
        }
        if epoch > self.released() {
            self.set(Word::Released, epoch);
        }
        Ok(())
    }

    /// Frames that are held.
    pub(crate) fn held_frames(&self) -> u64 {
        self.get(Word::Next) - self.get(Word::First)
    }

    /// And their bytes.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    fn entry_at(number: u64) -> u64 {
        HEAD_BYTES + number % ENTRIES * ENTRY_BYTES
    }

    fn entry(&self, number: u64) -> Entry {
        let at = State::entry_at(number);
        let word = |index: u64| self.word(at + index * 8).load(Ordering::Acquire);
        let place = word(1);
        Entry { epoch: word(0), offset: place >> 32, bytes: place & u64::from(u32::MAX), arrived_ns: word(2) }
    }

    /// The first held frame.
    pub(crate) fn first(&self) -> Option<Entry> {
        (self.held_frames() > 0).then(|| self.entry(self.get(Word::First)))
    }

    /// Whether that may go.
    pub(crate) fn may_go(&self) -> bool {
        self.first().is_some_and(|entry| !self.is_holding() || entry.epoch <= self.released())
    }

    /// Where a frame of so many bytes has room.
    fn place(&self, bytes: u64) -> Option<u64> {
        let Some(first) = self.first() else { return Some(0) };
        let last = self.entry(self.get(Word::Next) - 1);
        let end = last.offset + last.bytes;
        if end <= first.offset {
            return (first.offset - end >= bytes).then_some(end);
        }
        let at_end = DATA_BYTES - FRAME_BYTES_MAX as u64;
        if end <= at_end {
            return Some(end);
        }
        (first.offset >= bytes).then_some(0)
    }

    /// Holds a frame of the open epoch, behind all others; for a drain also beyond the bounds.
    pub(crate) fn push(&mut self, frame: &[u8], now_ns: u64, is_drain: bool) -> Result<(), Full> {
        let (bytes, frames) = (frame.len() as u64, self.held_frames());
        let (bytes_max, frames_max) = match is_drain {
            true => (HELD_BYTES_MAX + RESERVE_BYTES, ENTRIES),
            false => (HELD_BYTES_MAX, HELD_FRAMES_MAX),
        };
        if frames >= frames_max || self.held_bytes + bytes > bytes_max {
            return Err(Full);
        }
        let offset = self.place(bytes).ok_or(Full)?;
        let data = self.slice(offset, frame.len());
        step();
        data.copy_from(frame);
        let number = self.get(Word::Next);
        let at = State::entry_at(number);
        for (index, value) in [(0, self.epoch()), (1, offset << 32 | bytes), (2, now_ns)] {
            step();
            self.word(at + index * 8).store(value, Ordering::Release);
        }
        self.set(Word::Next, number + 1);
        self.held_bytes += bytes;
        Ok(())
    }

    fn slice(&self, offset: u64, bytes: usize) -> vm_memory::VolatileSlice<'_> {
        let at = usize::try_from(DATA_AT + offset).expect("the region is mapped");
        self.region.get_slice(at, bytes).expect("the layout lies within the region")
    }

    /// Writes the first frame by `write`, once, and lets it go. One that is not taken goes, too, as on a wire without
    /// an end, but for `WouldBlock`: that one stays.
    pub(crate) fn pass_first(
        &mut self,
        now_ns: u64,
        write: impl FnOnce(&[u8]) -> io::Result<()>,
    ) -> Result<(), io::Error> {
        let Some(entry) = self.first() else { return Ok(()) };
        let mut frame = [0; FRAME_BYTES_MAX];
        let frame = &mut frame[..usize::try_from(entry.bytes).unwrap_or(0).min(FRAME_BYTES_MAX)];
        self.slice(entry.offset, frame.len()).copy_to(&mut *frame);
        step();
        match write(frame) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
            Err(_) => {
                self.set(Word::NotWritten, self.get(Word::NotWritten) + 1);
                self.count(Counter::NotTaken, 1);
            }
            Ok(()) => {
                self.count(Counter::SentFrames, 1);
                self.count(Counter::SentBytes, entry.bytes);
            }
        }
        self.let_go(entry, now_ns);
        Ok(())
    }

    fn let_go(&mut self, entry: Entry, now_ns: u64) {
        self.set(Word::First, self.get(Word::First) + 1);
        self.held_bytes -= entry.bytes;
        let waited = now_ns.saturating_sub(entry.arrived_ns);
        self.count(Counter::Held, 1);
        self.count(Counter::HeldNs, waited);
        self.count_max(Counter::HeldNsMax, waited);
    }

    /// Frames that were never held are about to be written.
    pub(crate) fn begin_writing(&self) {
        self.set(Word::IsWritingOtherwise, 1);
    }

    /// So many were.
    pub(crate) fn end_writing(&self, written: u64) {
        self.set(Word::WrittenOtherwise, self.get(Word::WrittenOtherwise).wrapping_add(written));
        self.set(Word::IsWritingOtherwise, 0);
    }

    /// For the successor of a process that may have died at any step: goes by what the interface has counted.
    pub(crate) fn adopt(&mut self, written: u64, now_ns: u64) {
        self.count(Counter::HolderRestarts, 1);
        // A frame that was not taken counts as such before it counts as gone: for a moment this is one less than none.
        let held = self.get(Word::First).wrapping_sub(self.get(Word::NotWritten));
        if self.get(Word::IsWritingOtherwise) != 0 {
            self.end_writing(written.wrapping_sub(held).wrapping_sub(self.get(Word::WrittenOtherwise)));
            return;
        }
        let known = self.get(Word::WrittenOtherwise).wrapping_add(held);
        match (written.wrapping_sub(known), self.first()) {
            (0, _) => {}
            (1, Some(entry)) => self.let_go(entry, now_ns),
            (more, _) => {
                tracing::warn!(written, known, "somebody else has written to the machine's interface");
                self.end_writing(more);
            }
        }
    }
}

/// Ends the process, for a test, at its step.
fn step() {
    #[cfg(test)]
    STEPS.with_borrow_mut(|left| match left {
        Some(0) => {
            *left = None;
            std::panic::resume_unwind(Box::new(Died));
        }
        Some(steps) => *steps -= 1,
        None => {}
    });
}

/// What a test's holder dies of.
#[cfg(test)]
pub(crate) struct Died;

#[cfg(test)]
mod tests;
