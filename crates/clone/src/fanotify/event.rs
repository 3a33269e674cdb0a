//! What the kernel tells of an access, and how its bytes are read.

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd};

use crate::ByteRange;

/// Bytes of one reading of a group: some eighty events, each of which costs a descriptor until it is answered.
const EVENTS_BYTES: usize = 4096;
/// `struct fanotify_event_metadata` (linux/fanotify.h).
const METADATA_BYTES: usize = 24;
/// `struct fanotify_event_info_range` (linux/fanotify.h).
const RANGE_BYTES: usize = 24;
/// `FAN_EVENT_INFO_TYPE_RANGE` (linux/fanotify.h), unknown to older headers.
const INFO_TYPE_RANGE: u8 = 6;
/// `FAN_DENY_ERRNO(EIO)` (linux/fanotify.h): the error is in the top byte.
const DENY_IO: u32 = libc::FAN_DENY | ((libc::EIO as u32) << 24);

/// What a process wants to do. Reads and writes look alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read or write this range, in whole 4 KiB pages; may lie beyond the file's end. `ByteRange::WHOLE` where the
    /// kernel does not say. A truncation to a size that is no multiple of 4 KiB looks like an access of the page in
    /// which the new end lies; PostgreSQL does none.
    Range(ByteRange),
    /// Truncate or extend to this size, a multiple of 4 KiB. A read or write of no bytes looks the same:
    /// [`Event::truncates`] tells.
    Truncation {
        /// The new size.
        size_bytes: u64,
    },
}

/// What the kernel is to do with an access that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Allow,
    /// Fail with EIO.
    DenyIo,
}

impl Verdict {
    pub(super) fn response(self) -> u32 {
        match self {
            Verdict::Allow => libc::FAN_ALLOW,
            Verdict::DenyIo => DENY_IO,
        }
    }
}

/// An access that waits for its answer. Answer before the descriptor is closed: the number may be another event's
/// afterwards.
#[derive(Debug)]
pub struct Event {
    /// The file, opened for reading; reads through it raise nothing in any group.
    pub descriptor: OwnedFd,
    /// The descriptor's number, which names the event in the answer.
    pub number: i32,
    /// Who waits: the process, not the thread; 0 if it lives in a process namespace that this one cannot see.
    pub process_id: u32,
    /// What it wants.
    pub access: Access,
}

impl Event {
    /// Whether the access of no bytes by `process_id`, which must still wait, is a truncation: asked of its present
    /// system call (`/proc/<process>/syscall`, proc_pid_syscall(5)). None: the system call is neither a truncation nor
    /// a plain read or write, or the process is gone; then whoever decides must be right both ways.
    pub fn truncates(process_id: u32) -> Option<bool> {
        let line = fs::read_to_string(format!("/proc/{process_id}/syscall")).ok()?;
        let call: i64 = line.split(' ').next()?.parse().ok()?;
        if call == libc::SYS_truncate || call == libc::SYS_ftruncate {
            return Some(true);
        }
        let plain = [
            libc::SYS_read,
            libc::SYS_pread64,
            libc::SYS_readv,
            libc::SYS_preadv,
            libc::SYS_preadv2,
            libc::SYS_write,
            libc::SYS_pwrite64,
            libc::SYS_writev,
            libc::SYS_pwritev,
            libc::SYS_pwritev2,
        ];
        plain.contains(&call).then_some(false)
    }
}

/// Room for one reading of a group.
#[derive(Debug)]
pub struct EventBuffer {
    pub(super) bytes: Vec<u8>,
}

impl Default for EventBuffer {
    fn default() -> EventBuffer {
        EventBuffer { bytes: vec![0; EVENTS_BYTES] }
    }
}

/// One event as it stands in the kernel's answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RawEvent {
    pub mask: u64,
    pub number: i32,
    pub process_id: u32,
    pub access: Access,
}

impl RawEvent {
    /// # Safety
    /// `number` must be a descriptor that the kernel has just made for this event, and nobody else's.
    pub unsafe fn into_event(self) -> Event {
        // SAFETY: the caller has it so.
        let descriptor = unsafe { OwnedFd::from_raw_fd(self.number) };
        Event { descriptor, number: self.number, process_id: self.process_id, access: self.access }
    }
}

/// The first event in `bytes` and what follows it; none at the end or where the bytes make no sense.
pub(super) fn take_event(bytes: &[u8]) -> Option<(RawEvent, &[u8])> {
    let length = u32::from_ne_bytes(field(bytes, 0)?) as usize;
    let version = *bytes.get(4)?;
    let metadata_length = u16::from_ne_bytes(field(bytes, 6)?) as usize;
    if version != libc::FANOTIFY_METADATA_VERSION || metadata_length < METADATA_BYTES || length < metadata_length {
        return None;
    }
    let (event, rest) = bytes.split_at_checked(length)?;
    let raw = RawEvent {
        mask: u64::from_ne_bytes(field(event, 8)?),
        number: i32::from_ne_bytes(field(event, 16)?),
        process_id: u32::try_from(i32::from_ne_bytes(field(event, 20)?)).unwrap_or(0),
        access: access_of(event.get(metadata_length..)?),
    };
    Some((raw, rest))
}

/// The range among an event's information records; without one, the whole file.
fn access_of(mut records: &[u8]) -> Access {
    while let (Some(&kind), Some(length)) = (records.first(), field(records, 2)) {
        let length = usize::from(u16::from_ne_bytes(length));
        if kind == INFO_TYPE_RANGE
            && length >= RANGE_BYTES
            && let (Some(offset), Some(count)) = (field(records, 8), field(records, 16))
        {
            let (offset, count) = (u64::from_ne_bytes(offset), u64::from_ne_bytes(count));
            return match count {
                0 => Access::Truncation { size_bytes: offset },
                _ => Access::Range(ByteRange::new(offset, count)),
            };
        }
        match records.get(length..) {
            Some(rest) if length > 0 => records = rest,
            _ => break,
        }
    }
    Access::Range(ByteRange::WHOLE)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An event as the kernel writes it, with one information record.
    fn event(number: i32, kind: u8, offset: u64, count: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(48_u32.to_ne_bytes());
        bytes.extend([libc::FANOTIFY_METADATA_VERSION, 0]);
        bytes.extend(24_u16.to_ne_bytes());
        bytes.extend(0x0010_0000_u64.to_ne_bytes());
        bytes.extend(number.to_ne_bytes());
        bytes.extend(4321_i32.to_ne_bytes());
        bytes.extend([kind, 0]);
        bytes.extend(24_u16.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(offset.to_ne_bytes());
        bytes.extend(count.to_ne_bytes());
        bytes
    }

    #[test]
    fn events_are_read_one_after_another() {
        let mut bytes = event(7, INFO_TYPE_RANGE, 4096, 8192);
        bytes.extend(event(8, INFO_TYPE_RANGE, 8192, 0));
        bytes.extend(event(9, 1, 8192, 0));
        let (first, rest) = take_event(&bytes).unwrap();
        let (second, rest) = take_event(rest).unwrap();
        let (third, rest) = take_event(rest).unwrap();
        assert_eq!((first.number, first.process_id), (7, 4321));
        assert_eq!(first.access, Access::Range(ByteRange { start: 4096, end: 12_288 }));
        assert_eq!(second.access, Access::Truncation { size_bytes: 8192 });
        assert_eq!(third.access, Access::Range(ByteRange::WHOLE), "a record of another kind says nothing of the range");
        assert_eq!(take_event(rest), None);
    }

    #[test]
    fn an_event_that_is_cut_short_is_none() {
        let bytes = event(7, INFO_TYPE_RANGE, 4096, 8192);
        for length in 0..bytes.len() {
            assert_eq!(take_event(&bytes[..length]), None, "{length}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(mut bytes in prop::collection::vec(any::<u8>(), 0..200), length in 0_u32..120) {
            if bytes.len() > 8 {
                bytes[..4].copy_from_slice(&length.to_ne_bytes());
                bytes[4] = libc::FANOTIFY_METADATA_VERSION;
                bytes[6..8].copy_from_slice(&24_u16.to_ne_bytes());
            }
            let mut rest = &bytes[..];
            while let Some((_, after)) = take_event(rest) {
                prop_assert!(after.len() < rest.len());
                rest = after;
            }
        }
    }
}
