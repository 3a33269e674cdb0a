//! What can be done with a pin: nothing but to close it. Each attack succeeds on an instance that is none.

use std::mem::size_of;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::*;
use crate::fanotify::tests::{FILE_BYTES, MarkFixture, Process, is_waiting, mark_fixture};

// Source: Linux, `include/uapi/linux/io_uring.h`.
const UNREGISTER_FILES: u32 = 3;
const REGISTER_FILES_UPDATE: u32 = 6;
/// IORING_REGISTER_MEM_REGION, the last one that every kernel with pre-content events has.
const REGISTER_LAST: u32 = 34;
const OP_READ: u8 = 22;
const OP_WRITE: u8 = 23;
const OP_MSG_RING: u8 = 40;
const OP_FIXED_FD_INSTALL: u8 = 54;
const FLAG_FIXED_FILE: u8 = 1;
const MSG_SEND_FD: u64 = 1;
const ENTER_GETEVENTS: u32 = 1;
const OFFSET_SQES: u64 = 0x1000_0000;
/// Both rings, and the entries, of an instance of one entry.
const MAPPED_BYTES: usize = 4096;
/// The places of `sq_off` and `cq_off` in [`Parameters::rest`].
const SQ_TAIL: usize = 8;
const SQ_ARRAY: usize = 13;
const CQ_HEAD: usize = 17;
const CQ_TAIL: usize = 18;
const CQ_MASK: usize = 19;
const CQES: usize = 22;

/// `struct io_uring_sqe`.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Entry {
    opcode: u8,
    flags: u8,
    priority: u16,
    file: i32,
    offset: u64,
    address: u64,
    length: u32,
    operation_flags: u32,
    user_data: u64,
    buffer: u16,
    personality: u16,
    file_index: u32,
    address_3: u64,
    rest: u64,
}

/// An instance with its memory, as whoever holds it may use it.
struct Ring {
    descriptor: OwnedFd,
    rings: *mut u8,
    entries: *mut u8,
    offsets: [u32; 27],
}

impl Ring {
    /// One that nothing is kept from, with these files.
    fn plain(files: &[&dyn AsFd]) -> Ring {
        let (descriptor, _) = setup(0).unwrap();
        let numbers: Vec<i32> = files.iter().map(|file| file.as_fd().as_raw_fd()).collect();
        register(descriptor.as_fd(), REGISTER_FILES, &numbers).unwrap();
        Ring::over(descriptor)
    }

    fn over(descriptor: OwnedFd) -> Ring {
        // All instances of this size are laid out alike.
        let (_, Parameters { rest: offsets, .. }) = setup(0).unwrap();
        let map = |offset| {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a mapping at an address that the kernel chooses touches nothing that is there.
            let mapped =
                unsafe { mmap(std::ptr::null_mut(), MAPPED_BYTES, protection, MapFlags::SHARED, &descriptor, offset) };
            mapped.unwrap().cast::<u8>()
        };
        let (rings, entries) = (map(0), map(OFFSET_SQES));
        Ring { descriptor, rings, entries, offsets }
    }

    fn word(&self, at: u32) -> &AtomicU32 {
        // SAFETY: the kernel has put an aligned word there, which both sides change atomically.
        unsafe { AtomicU32::from_ptr(self.rings.add(at as usize).cast()) }
    }

    /// What the kernel answers to an entry: the error of the call, or the result of the operation.
    fn submit(&self, entry: Entry) -> Result<i32, i32> {
        assert_eq!(size_of::<Entry>(), 64);
        // SAFETY: the first entry of the mapping, which the kernel reads only when it is told to, below.
        unsafe { self.entries.cast::<Entry>().write(entry) };
        self.word(self.offsets[SQ_ARRAY]).store(0, Ordering::Relaxed);
        self.word(self.offsets[SQ_TAIL]).fetch_add(1, Ordering::Release);
        let (number, nothing) = (self.descriptor.as_raw_fd(), std::ptr::null::<u8>());
        // SAFETY: takes numbers, and reads what was mapped.
        let entered =
            unsafe { libc::syscall(libc::SYS_io_uring_enter, number, 1, 1, ENTER_GETEVENTS, nothing, 0_usize) };
        if entered < 0 {
            self.word(self.offsets[SQ_TAIL]).fetch_sub(1, Ordering::Release);
            return Err(io::Error::last_os_error().raw_os_error().unwrap());
        }
        let head = self.word(self.offsets[CQ_HEAD]);
        assert_ne!(self.word(self.offsets[CQ_TAIL]).load(Ordering::Acquire), head.load(Ordering::Relaxed));
        let place = head.load(Ordering::Relaxed) & self.word(self.offsets[CQ_MASK]).load(Ordering::Relaxed);
        // `struct io_uring_cqe`: eight bytes of the caller's, the result, flags.
        let result = self.word(self.offsets[CQES] + 16 * place + 8).load(Ordering::Relaxed).cast_signed();
        head.fetch_add(1, Ordering::Release);
        Ok(result)
    }

    /// Puts the first of this one's files in the place of the first of `target`'s.
    fn send_file(&self, target: &Ring) -> Result<i32, i32> {
        let file = target.descriptor.as_raw_fd();
        self.submit(Entry { opcode: OP_MSG_RING, file, address: MSG_SEND_FD, file_index: 1, ..Entry::default() })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for mapped in [self.rings, self.entries] {
            // SAFETY: mapped once, of this size, and used by nobody any more.
            unsafe { munmap(mapped.cast(), MAPPED_BYTES) }.unwrap();
        }
    }
}

/// Takes the first registered file out.
fn install() -> Entry {
    Entry { opcode: OP_FIXED_FD_INSTALL, flags: FLAG_FIXED_FILE, ..Entry::default() }
}

/// Reads or writes the first registered file.
fn transfer(opcode: u8, bytes: &mut [u8]) -> Entry {
    let (address, length) = (bytes.as_mut_ptr() as u64, bytes.len() as u32);
    Entry { opcode, flags: FLAG_FIXED_FILE, address, length, ..Entry::default() }
}

/// A group, and a process that waits for an answer, or is about to: nobody has read it yet.
fn waiting() -> (MarkFixture, Process) {
    let place = mark_fixture();
    place.group.mark_file(std::fs::File::open(&place.path).unwrap()).unwrap();
    let reader = Process::start("cat", &[], &place.path);
    (place, reader)
}

/// Spec: C4
#[test]
fn k20_an_access_waits_for_as_long_as_its_group_is_pinned() {
    let (MarkFixture { directory: _directory, group, .. }, reader) = waiting();
    let pinned = PinnedGroup::new(&group).unwrap();
    let copy = OwnedFd::from(PinnedGroup { ring: pinned.ring.try_clone().unwrap() });
    drop(group);
    assert!(is_waiting(&reader));
    drop(pinned);
    assert!(is_waiting(&reader));
    drop(copy);
    assert_eq!(reader.output(), [7; FILE_BYTES]);
}

/// Spec: C4
#[test]
fn k20_nothing_is_taken_out_of_a_pinned_group_nor_put_into_its_place() {
    let (MarkFixture { directory: _directory, group, .. }, reader) = waiting();
    let null = std::fs::File::open("/dev/null").unwrap();
    // An answer to an access that nobody waits for, for a group that takes it.
    let mut answer = [i32::MAX.to_ne_bytes(), libc::FAN_ALLOW.to_ne_bytes()].concat();
    let mut room = [0; 4096];

    // So it would be.
    let (open, other) = (Ring::plain(&[&group]), Ring::plain(&[&null]));
    let taken = open.submit(install()).unwrap();
    assert!(taken > 0, "{taken}");
    // SAFETY: the kernel has just made this descriptor for us.
    drop(Group::from_descriptor(unsafe { OwnedFd::from_raw_fd(taken) }));
    assert!(open.submit(transfer(OP_READ, &mut room)).unwrap() > 0, "the access that waits");
    assert_eq!(open.submit(transfer(OP_WRITE, &mut answer)), Ok(-libc::ENOENT));
    assert_eq!(other.send_file(&open), Ok(0));
    assert_eq!(open.submit(transfer(OP_READ, &mut room)), Ok(0), "the other file is there now");

    let foreign = Ring::over(PinnedGroup::new(&group).unwrap().into());
    // Even to its own thread it is closed, were there one.
    let own = Ring::over(pin(&group).unwrap());
    drop((open, group));
    for (ring, submitted, registered) in
        [(&foreign, Err(libc::EEXIST), libc::EEXIST), (&own, Ok(-libc::EACCES), libc::EACCES)]
    {
        for entry in [install(), transfer(OP_READ, &mut room), transfer(OP_WRITE, &mut answer)] {
            assert_eq!(ring.submit(entry), submitted, "operation {}", entry.opcode);
        }
        for operation in (0..=REGISTER_LAST).filter(|operation| *operation != REGISTER_RESTRICTIONS) {
            let refused = register::<i32>(ring.descriptor.as_fd(), operation, &[null.as_fd().as_raw_fd()]).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(registered), "operation {operation}");
        }
        let allow_all: [Restriction; 0] = [];
        register(ring.descriptor.as_fd(), REGISTER_RESTRICTIONS, &allow_all).unwrap_err();
        for operation in [UNREGISTER_FILES, REGISTER_FILES_UPDATE] {
            register::<i32>(ring.descriptor.as_fd(), operation, &[]).unwrap_err();
        }
        let (sender, _receiver) = std::os::unix::net::UnixStream::pair().unwrap();
        crate::keeper::send(&sender, b"x", &[ring.descriptor.as_fd()]).unwrap_err();
        std::fs::File::open(format!("/proc/self/fd/{}", ring.descriptor.as_raw_fd())).unwrap_err();
    }
    assert_eq!(other.send_file(&foreign), Ok(-libc::EOWNERDEAD));
    drop(own);
    assert!(is_waiting(&reader));
    drop(foreign);
    assert_eq!(reader.output(), [7; FILE_BYTES]);
}
