//! What must outlive the server of a guest's memory: a memory file of the kernel's, held by another process, too.
//!
//! ```text
//! head   4096  words: mark, version, pages, slots, identity, current epoch, released up to, mode,
//!              device and inode of the shadow
//! held         a bit a page: the shadow holds it
//! dropped      a bit a page: its content is in the page cache at most
//! slots        a word each: epoch (35 bits), whether it is zeros (1), page (28); 0 is a free one
//! frames       4096 bytes a slot
//! ```
//!
//! Each change is one word, stored after the bytes that it tells of. A server that dies between the two has not
//! answered the kernel yet, and the kernel sends that request to the next one again: what a half copied frame of the
//! open epoch holds is then written once more. So nothing here is ever repaired.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use crate::{CheckpointError, PAGE_BYTES};

const MARK: u64 = u64::from_le_bytes(*b"ONECOPYE");
const VERSION: u64 = 2;
const PAGE: u64 = PAGE_BYTES as u64;
/// Pages of a memory at most: their numbers have 28 bits.
pub(super) const PAGES_MAX: u64 = 1 << PAGE_BITS;
const PAGE_BITS: u32 = 28;
const ZERO_BIT: u64 = 1 << PAGE_BITS;
const EPOCH_SHIFT: u32 = PAGE_BITS + 1;
/// Bits of an epoch's number: at twenty cuts a second, enough for fifty years.
pub(super) const EPOCH_BITS: u32 = 64 - EPOCH_SHIFT;
/// More slots than this have no numbers.
const SLOTS_MAX: u64 = u32::MAX as u64;
/// The name in `/proc/PID/maps`.
const NAME: &str = "onecopy-memory";

/// The words of the head.
#[derive(Clone, Copy)]
enum Head {
    Mark,
    Version,
    Pages,
    Slots,
    Identity,
    Current,
    Released,
    Keeping,
    ShadowDevice,
    ShadowInode,
}

/// One of the two maps of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bits {
    /// The shadow holds the page.
    Held,
    /// The page's content is in the page cache at most.
    Dropped,
}

/// What a slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) epoch: u64,
    pub(super) page: u32,
    pub(super) is_zero: bool,
}

impl Slot {
    fn word(self) -> u64 {
        self.epoch << EPOCH_SHIFT | if self.is_zero { ZERO_BIT } else { 0 } | u64::from(self.page)
    }

    fn of(word: u64) -> Option<Slot> {
        let page = u32::try_from(word & (PAGES_MAX - 1)).expect("28 bits");
        (word != 0).then_some(Slot { epoch: word >> EPOCH_SHIFT, page, is_zero: word & ZERO_BIT != 0 })
    }
}

/// Where what is.
#[derive(Clone, Copy, Debug)]
struct Layout {
    pages: u64,
    slots: u64,
}

impl Layout {
    fn bits_bytes(self) -> u64 {
        self.pages.div_ceil(8).next_multiple_of(PAGE)
    }

    fn slots_at(self) -> u64 {
        PAGE + 2 * self.bits_bytes()
    }

    fn frames_at(self) -> u64 {
        self.slots_at() + (self.slots * 8).next_multiple_of(PAGE)
    }

    fn bytes(self) -> u64 {
        self.frames_at() + self.slots * PAGE
    }
}

/// The state, mapped.
pub(super) struct State {
    file: File,
    region: MmapRegion,
    layout: Layout,
}

impl State {
    /// A new state of a memory of so many pages, with room for that many records.
    pub(super) fn create(pages: u64, slots: u64) -> Result<State, CheckpointError> {
        if pages == 0 || pages > PAGES_MAX || slots <= pages || slots > SLOTS_MAX {
            return Err(CheckpointError::Size { size_bytes: pages.saturating_mul(PAGE) });
        }
        let layout = Layout { pages, slots };
        let failed = |error: io::Error| CheckpointError::io("make the state in", Path::new("a memory file"))(error);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create(NAME, flags).map_err(|error| failed(error.into()))?);
        file.set_len(layout.bytes()).map_err(failed)?;
        // All but the frames: a page of a mapping that cannot be had is SIGBUS, here it is an error.
        let all_but_frames = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, layout.frames_at());
        all_but_frames.map_err(|error| failed(error.into()))?;
        // A file that cannot be cut short never raises SIGBUS in who maps it.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(|error| failed(error.into()))?;
        let state = State::map(file, layout)?;
        // Identity, so that an epoch of an earlier state is not taken for one of this.
        let identity = u64::from(rand::random::<u32>()) & ((1 << (64 - EPOCH_BITS)) - 1);
        state.set(Head::Identity, identity);
        state.set(Head::Current, 1);
        for (word, value) in [(Head::Pages, pages), (Head::Slots, slots), (Head::Version, VERSION), (Head::Mark, MARK)]
        {
            state.set(word, value);
        }
        Ok(state)
    }

    /// A state that another process has kept.
    pub(super) fn open(descriptor: OwnedFd) -> Result<State, CheckpointError> {
        let wrong = |what: String| CheckpointError::State { what };
        let file = File::from(descriptor);
        let mut head = [0; 64];
        file.read_exact_at(&mut head, 0).map_err(|error| wrong(error.to_string()))?;
        let word = |word: Head| {
            let at = word as usize * 8;
            u64::from_ne_bytes(head[at..at + 8].try_into().expect("eight bytes"))
        };
        if (word(Head::Mark), word(Head::Version)) != (MARK, VERSION) {
            return Err(wrong(format!("mark {:#x}, version {}", word(Head::Mark), word(Head::Version))));
        }
        let layout = Layout { pages: word(Head::Pages), slots: word(Head::Slots) };
        if layout.pages == 0 || layout.pages > PAGES_MAX || layout.slots <= layout.pages || layout.slots > SLOTS_MAX {
            return Err(wrong(format!("{} pages and {} slots", layout.pages, layout.slots)));
        }
        let length = file.metadata().map_err(|error| wrong(error.to_string()))?.len();
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|error| wrong(error.to_string()))?;
        if length != layout.bytes() || !seals.contains(SealFlags::SHRINK) {
            return Err(wrong(format!("{length} bytes, sealed against {seals:?}")));
        }
        State::map(file, layout)
    }

    fn map(file: File, layout: Layout) -> Result<State, CheckpointError> {
        let unmapped = |what: String| CheckpointError::State { what };
        let bytes = usize::try_from(layout.bytes()).map_err(|error| unmapped(error.to_string()))?;
        let own = file.try_clone().map_err(|error| unmapped(error.to_string()))?;
        let region =
            MmapRegion::from_file(FileOffset::new(own, 0), bytes).map_err(|error| unmapped(error.to_string()))?;
        Ok(State { file, region, layout })
    }

    /// The descriptor, for who keeps it.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    pub(super) fn pages(&self) -> u64 {
        self.layout.pages
    }

    pub(super) fn slots(&self) -> u64 {
        self.layout.slots
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        let offset = usize::try_from(offset).expect("the region is mapped");
        self.region.get_atomic_ref::<AtomicU64>(offset).expect("the layout lies within the region")
    }

    fn get(&self, word: Head) -> u64 {
        self.word(word as u64 * 8).load(Ordering::Acquire)
    }

    fn set(&self, word: Head, value: u64) {
        self.word(word as u64 * 8).store(value, Ordering::Release);
    }

    pub(super) fn identity(&self) -> u64 {
        self.get(Head::Identity)
    }

    /// The open epoch's number.
    pub(super) fn current(&self) -> u64 {
        self.get(Head::Current)
    }

    pub(super) fn set_current(&self, epoch: u64) {
        self.set(Head::Current, epoch);
    }

    /// The last epoch that nobody asks for any more; what it has may still lie in slots.
    pub(super) fn released(&self) -> u64 {
        self.get(Head::Released)
    }

    pub(super) fn set_released(&self, epoch: u64) {
        self.set(Head::Released, epoch);
    }

    pub(super) fn is_keeping(&self) -> bool {
        self.get(Head::Keeping) != 0
    }

    pub(super) fn set_keeping(&self) {
        self.set(Head::Keeping, 1);
    }

    /// Device and inode of the shadow.
    pub(super) fn shadow(&self) -> (u64, u64) {
        (self.get(Head::ShadowDevice), self.get(Head::ShadowInode))
    }

    pub(super) fn set_shadow(&self, (device, inode): (u64, u64)) {
        self.set(Head::ShadowDevice, device);
        self.set(Head::ShadowInode, inode);
    }

    fn bits_at(&self, bits: Bits) -> u64 {
        match bits {
            Bits::Held => PAGE,
            Bits::Dropped => PAGE + self.layout.bits_bytes(),
        }
    }

    /// The bits of 64 pages.
    pub(super) fn bit_word(&self, bits: Bits, index: u64) -> u64 {
        self.word(self.bits_at(bits) + index * 8).load(Ordering::Acquire)
    }

    pub(super) fn bit(&self, bits: Bits, page: u32) -> bool {
        self.bit_word(bits, u64::from(page) / 64) >> (page % 64) & 1 == 1
    }

    /// Sets a bit; what it was.
    pub(super) fn set_bit(&self, bits: Bits, page: u32, value: bool) -> bool {
        let word = self.word(self.bits_at(bits) + u64::from(page) / 64 * 8);
        let mask = 1 << (page % 64);
        let before = match value {
            true => word.fetch_or(mask, Ordering::AcqRel),
            false => word.fetch_and(!mask, Ordering::AcqRel),
        };
        before & mask != 0
    }

    /// How many bits are set.
    pub(super) fn count(&self, bits: Bits) -> u64 {
        (0..self.layout.pages.div_ceil(64)).map(|index| u64::from(self.bit_word(bits, index).count_ones())).sum()
    }

    pub(super) fn slot(&self, slot: u32) -> Option<Slot> {
        Slot::of(self.word(self.layout.slots_at() + u64::from(slot) * 8).load(Ordering::Acquire))
    }

    pub(super) fn set_slot(&self, slot: u32, says: Option<Slot>) {
        let word = says.map_or(0, Slot::word);
        self.word(self.layout.slots_at() + u64::from(slot) * 8).store(word, Ordering::Release);
    }

    fn frame(&self, slot: u32) -> VolatileSlice<'_> {
        let at = usize::try_from(self.layout.frames_at() + u64::from(slot) * PAGE).expect("the region is mapped");
        self.region.get_slice(at, PAGE_BYTES).expect("the layout lies within the region")
    }

    pub(super) fn read_frame(&self, slot: u32, into: &mut [u8; PAGE_BYTES]) {
        self.frame(slot).copy_to(&mut into[..]);
    }

    /// By a call, which says so when there is no memory for it.
    pub(super) fn write_frame(&self, slot: u32, from: &[u8; PAGE_BYTES]) -> io::Result<()> {
        self.file.write_all_at(from, self.layout.frames_at() + u64::from(slot) * PAGE)?;
        // Touched, so that it is locked like all memory of a server.
        self.frame(slot).copy_to(&mut [0u8; 1]);
        Ok(())
    }

    /// No frame can be written any more, as where memory is short.
    #[cfg(test)]
    pub(super) fn exhaust(&mut self) {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.file));
        self.file = File::open(path).expect("it is open");
    }

    /// Gives the memory of frames back to the kernel. Only a hint: what keeps it is written over one day.
    pub(super) fn free_frames(&self, first: u32, count: u32) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let at = self.layout.frames_at() + u64::from(first) * PAGE;
        if let Err(error) = rustix::fs::fallocate(&self.file, flags, at, u64::from(count) * PAGE) {
            tracing::warn!(%error, "memory of released pages stays allocated");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_found_again_by_its_descriptor() {
        let state = State::create(1000, 1100).unwrap();
        let says = Slot { epoch: (1 << EPOCH_BITS) - 1, page: 999, is_zero: true };
        state.set_slot(1099, Some(says));
        state.write_frame(1099, &[7; PAGE_BYTES]).unwrap();
        assert!(!state.set_bit(Bits::Dropped, 999, true));
        state.set_current(5);
        let again = State::open(state.descriptor().unwrap()).unwrap();
        assert_eq!((again.pages(), again.slots(), again.identity()), (1000, 1100, state.identity()));
        assert_eq!((again.slot(1099), again.slot(0), again.current()), (Some(says), None, 5));
        assert_eq!((again.count(Bits::Dropped), again.count(Bits::Held)), (1, 0));
        let mut frame = [0; PAGE_BYTES];
        again.read_frame(1099, &mut frame);
        assert_eq!(frame, [7; PAGE_BYTES]);
        again.free_frames(1099, 1);
        state.read_frame(1099, &mut frame);
        assert_eq!(frame, [0; PAGE_BYTES]);
    }

    #[test]
    fn what_is_no_state_is_refused() {
        let memory_file = |flags, length: u64, head: &[u64]| {
            let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
            file.set_len(length).unwrap();
            let words: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
            file.write_all_at(&words, 0).unwrap();
            OwnedFd::from(file)
        };
        let sound = Layout { pages: 64, slots: 128 };
        let table: [(u64, &[u64]); 6] = [
            (0, &[]),
            (sound.bytes(), &[MARK, VERSION + 1, 64, 128]),
            (sound.bytes(), &[MARK, VERSION, 0, 128]),
            (sound.bytes(), &[MARK, VERSION, 64, 64]),
            (sound.bytes(), &[MARK, VERSION, u64::MAX, u64::MAX]),
            // Sound, but whoever has it could cut it short under its reader.
            (sound.bytes(), &[MARK, VERSION, 64, 128]),
        ];
        for (length, head) in table {
            let descriptor = memory_file(MemfdFlags::ALLOW_SEALING, length, head);
            assert!(matches!(State::open(descriptor), Err(CheckpointError::State { .. })), "{length} {head:?}");
        }
        for (pages, slots) in [(0, 10), (10, 10), (PAGES_MAX + 1, PAGES_MAX * 2)] {
            assert!(matches!(State::create(pages, slots), Err(CheckpointError::Size { .. })), "{pages} {slots}");
        }
    }
}
