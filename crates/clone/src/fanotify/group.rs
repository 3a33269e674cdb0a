//! A fanotify group: marks, events, answers.

use std::ffi::CString;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::descriptors::descriptors_max;
use super::event::{Event, EventBuffer, Verdict, take_event};
use crate::CloneError;

/// `FAN_PRE_ACCESS` (linux/fanotify.h), unknown to older headers.
const PRE_ACCESS: u64 = 0x0010_0000;
const ADD: u32 = libc::FAN_MARK_ADD;
const REMOVE: u32 = libc::FAN_MARK_REMOVE;
/// Ignore events, also after the file was modified.
const IGNORE: u32 = libc::FAN_MARK_IGNORE_SURV;

/// Asks before marked files are accessed. Several processes may hold the same group; one of them reads and answers.
/// Whoever has it is as mighty as root: it marks every file, and gets it opened. Others can hold a
/// [`super::PinnedGroup`].
#[derive(Debug)]
pub struct Group {
    descriptor: OwnedFd,
}

impl Group {
    /// A new group without marks, with no bound on its queue: beyond one, the kernel lets accesses through unanswered.
    /// Its events' descriptors are for reading alone.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no right to (CAP_SYS_ADMIN), or the kernel is older than 6.14.
    pub fn new() -> Result<Group, CloneError> {
        let flags = libc::FAN_CLASS_PRE_CONTENT | libc::FAN_UNLIMITED_QUEUE | libc::FAN_UNLIMITED_MARKS;
        let descriptor =
            new_group(flags, libc::O_RDONLY).map_err(CloneError::kernel("ask before files are accessed"))?;
        Ok(Group { descriptor })
    }

    /// A group that another process made.
    pub fn from_descriptor(descriptor: OwnedFd) -> Group {
        Group { descriptor }
    }

    /// Asks before `file` is accessed, on whatever path, by descriptors that are opened from now on.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: the file system takes no such marks, or memory is short.
    pub fn mark_file(&self, file: impl AsFd) -> Result<(), CloneError> {
        mark(&self.descriptor, ADD, PRE_ACCESS, MarkTarget::File(file.as_fd()))
            .map_err(CloneError::kernel("mark a file"))
    }

    /// Takes [`Group::mark_file`] back, and what [`Group::ignore_file`] did; nothing happens to a file without a mark.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn unmark_file(&self, file: impl AsFd) -> Result<(), CloneError> {
        self.unignore_file(file.as_fd())?;
        absent_is_fine(mark(&self.descriptor, REMOVE, PRE_ACCESS, MarkTarget::File(file.as_fd())))
            .map_err(CloneError::kernel("unmark a file"))
    }

    /// No events of `file` any more, though its directory or itself is marked. Descriptors opened meanwhile are armed
    /// all the same.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn ignore_file(&self, file: impl AsFd) -> Result<(), CloneError> {
        mark(&self.descriptor, ADD | IGNORE, PRE_ACCESS, MarkTarget::File(file.as_fd()))
            .map_err(CloneError::kernel("ignore the accesses of a file"))
    }

    /// Takes [`Group::ignore_file`] back.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn unignore_file(&self, file: impl AsFd) -> Result<(), CloneError> {
        absent_is_fine(mark(
            &self.descriptor,
            REMOVE | libc::FAN_MARK_IGNORE,
            PRE_ACCESS,
            MarkTarget::File(file.as_fd()),
        ))
        .map_err(CloneError::kernel("watch a file again"))
    }

    /// Asks before any file right in `directory` is accessed, also one that is made later.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: it is no directory, or its file system takes no such marks.
    pub fn mark_directory(&self, directory: &Path) -> Result<(), CloneError> {
        self.directory(ADD, directory).map_err(CloneError::kernel("mark a directory"))
    }

    /// No events of the files in `directory`, but descriptors that are opened stay armed: [`Group::unignore_directory`]
    /// makes them live.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn ignore_directory(&self, directory: &Path) -> Result<(), CloneError> {
        self.directory(ADD | IGNORE, directory).map_err(CloneError::kernel("ignore the accesses of a directory"))
    }

    /// Takes [`Group::ignore_directory`] back.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn unignore_directory(&self, directory: &Path) -> Result<(), CloneError> {
        absent_is_fine(self.directory(REMOVE | libc::FAN_MARK_IGNORE, directory))
            .map_err(CloneError::kernel("watch a directory again"))
    }

    /// Removes all marks on files and directories.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn flush(&self) -> Result<(), CloneError> {
        mark(&self.descriptor, libc::FAN_MARK_FLUSH, 0, MarkTarget::Path(Path::new("/")))
            .map_err(CloneError::kernel("remove marks"))
    }

    /// The next accesses that wait, none after `timeout`.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]; EMFILE means that the kernel has just denied an access, see
    /// [`super::raise_descriptors_max`].
    pub fn read(&self, buffer: &mut EventBuffer, timeout: Duration) -> Result<Vec<Event>, CloneError> {
        if !wait_readable(&self.descriptor, timeout).map_err(CloneError::kernel("wait for accesses"))? {
            return Ok(Vec::new());
        }
        let length = match rustix::io::read(&self.descriptor, &mut buffer.bytes[..]) {
            Ok(length) => length,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(CloneError::kernel("tell of accesses")(error.into())),
        };
        let mut events = Vec::new();
        let mut rest = &buffer.bytes[..length];
        while let Some((raw, after)) = take_event(rest) {
            rest = after;
            if raw.number >= 0 && raw.mask & PRE_ACCESS != 0 {
                // SAFETY: the kernel made this descriptor for this event, and it stands in its answer once.
                events.push(unsafe { raw.into_event() });
            }
        }
        Ok(events)
    }

    /// Answers the access whose event had the descriptor `number` in the process that read it. False: nothing waits
    /// under this number.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn answer(&self, number: i32, verdict: Verdict) -> Result<bool, CloneError> {
        let mut response = [0; 8];
        response[..4].copy_from_slice(&number.to_ne_bytes());
        response[4..].copy_from_slice(&verdict.response().to_ne_bytes());
        match rustix::io::retry_on_intr(|| rustix::io::write(&self.descriptor, &response)) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(error) => Err(CloneError::kernel("take an answer")(error.into())),
        }
    }

    /// Answers every access that was read and not answered, by trying all numbers below `numbers_end`; gives those
    /// found. For a process that takes over from a dead one and has read nothing itself.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn sweep(&self, numbers_end: i32, verdict: Verdict) -> Result<Vec<i32>, CloneError> {
        self.sweep_range(0..numbers_end, verdict)
    }

    /// [`Group::sweep`] of some numbers only: a million of them take about a second, in which a heartbeat must go on.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn sweep_range(&self, numbers: Range<i32>, verdict: Verdict) -> Result<Vec<i32>, CloneError> {
        let mut found = Vec::new();
        for number in numbers {
            // Two dead processes may have left the same number.
            while self.answer(number, verdict)? {
                found.push(number);
            }
        }
        Ok(found)
    }

    /// Removes all marks and lets through whatever waits, read by a dead process or not read yet. Accesses that the
    /// kernel was about to ask for are answered until none came for `linger`. For a group whose files need nothing more
    /// and which others may keep open.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn let_go(&self, linger: Duration) -> Result<(), CloneError> {
        self.flush()?;
        // First: what is read here gets numbers of this process, which may be those of the dead one.
        self.sweep(i32::try_from(descriptors_max()).unwrap_or(i32::MAX), Verdict::Allow)?;
        let mut buffer = EventBuffer::default();
        loop {
            let events = self.read(&mut buffer, linger)?;
            if events.is_empty() {
                return Ok(());
            }
            for event in events {
                self.answer(event.number, Verdict::Allow)?;
            }
        }
    }

    fn directory(&self, action: u32, directory: &Path) -> io::Result<()> {
        let action = action | libc::FAN_MARK_ONLYDIR;
        mark(&self.descriptor, action, PRE_ACCESS | libc::FAN_EVENT_ON_CHILD, MarkTarget::Path(directory))
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl From<Group> for OwnedFd {
    fn from(group: Group) -> OwnedFd {
        group.descriptor
    }
}

/// What a mark is put on.
pub(super) enum MarkTarget<'a> {
    File(BorrowedFd<'a>),
    Path(&'a Path),
}

pub(super) fn new_group(flags: u32, event_mode: i32) -> io::Result<OwnedFd> {
    let flags = flags | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
    let event_flags = event_mode | libc::O_LARGEFILE | libc::O_CLOEXEC;
    // SAFETY: takes two numbers and touches no memory of ours.
    let number = unsafe { libc::fanotify_init(flags, event_flags as libc::c_uint) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

pub(super) fn mark(group: &OwnedFd, flags: u32, mask: u64, target: MarkTarget<'_>) -> io::Result<()> {
    let path = match target {
        MarkTarget::File(_) => None,
        MarkTarget::Path(path) => Some(CString::new(path.as_os_str().as_bytes())?),
    };
    let (directory, name) = match (&target, &path) {
        (MarkTarget::File(file), _) => (file.as_raw_fd(), std::ptr::null()),
        (MarkTarget::Path(_), Some(path)) => (libc::AT_FDCWD, path.as_ptr()),
        (MarkTarget::Path(_), None) => return Err(io::ErrorKind::InvalidInput.into()),
    };
    // SAFETY: `name` is null or a C string that `path` keeps alive; without a name the mark goes on `directory` itself.
    let result = unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, mask, directory, name) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn wait_readable(descriptor: &OwnedFd, timeout: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(timeout).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut descriptors = [PollFd::new(descriptor, PollFlags::IN)];
    match poll(&mut descriptors, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
