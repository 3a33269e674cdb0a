//! The kernel's side of the file: one regular file as a whole mount, and the thread that answers the kernel.
//!
//! A mount over a file has that file as its root: no directories, no look-ups, nothing that a server would have to
//! remember of its kernel. So the next server needs nothing but the descriptor.

mod message;

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use super::store::{Store, split};
use crate::{CheckpointError, PAGE_BYTES};
pub(super) use message::Looks;
use message::{Answer, Operation, REQUEST_BYTES_MAX, Refusal, Request};

/// What people see in `/proc/mounts`.
const SOURCE: &str = "onecopy-memory";

/// Mounts the file over an empty one, which is made. The descriptor is the kernel's end: when the last one of it closes
/// the file is gone, and who has it mapped gets SIGBUS.
pub(super) fn mount(place: &Path, looks: Looks) -> Result<File, CheckpointError> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(false).mode(0o600);
    let options = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let empty = options.open(place).map_err(CheckpointError::io("make", place))?;
    // That file, whatever has its name by now.
    let opened = format!("/proc/self/fd/{}", empty.as_raw_fd());
    let device_path = Path::new("/dev/fuse");
    let device = OpenOptions::new().read(true).write(true).open(device_path);
    let device = device.map_err(CheckpointError::io("open", device_path))?;
    let options = format!(
        "fd={},rootmode={:o},user_id={},group_id={},allow_other,default_permissions",
        device.as_raw_fd(),
        libc::S_IFREG | 0o600,
        looks.user_id,
        looks.group_id
    );
    let options = CString::new(options).expect("numbers and words");
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount(SOURCE, opened, "fuse", flags, Some(&*options))
        .map_err(CheckpointError::io("mount", place))?;
    Ok(device)
}

/// Takes the mount away. Who has the file open or mapped keeps it.
pub(super) fn detach(place: &Path) -> Result<(), CheckpointError> {
    rustix::mount::unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .map_err(CheckpointError::io("unmount", place))
}

/// Takes the mount away, unless somebody has the file open or mapped: false then.
pub(super) fn unmount(place: &Path) -> Result<bool, CheckpointError> {
    match rustix::mount::unmount(place, UnmountFlags::NOFOLLOW) {
        Err(Errno::BUSY) => Ok(false),
        unmounted => unmounted.map(|()| true).map_err(CheckpointError::io("unmount", place)),
    }
}

/// Whether this file is a mount of ours, by the kernel's list: looking at the file would ask its server.
pub(super) fn is_mounted(place: &Path) -> Result<bool, CheckpointError> {
    let place = std::path::absolute(place).map_err(CheckpointError::io("resolve", place))?;
    let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else { return Ok(false) };
    // Where there is no directory nothing is mounted.
    let Ok(parent) = parent.canonicalize() else { return Ok(false) };
    let list = Path::new("/proc/self/mountinfo");
    let mounts = std::fs::read(list).map_err(CheckpointError::io("read", list))?;
    Ok(names_mount(&mounts, parent.join(name).as_os_str().as_bytes()))
}

/// Whether the text of `mountinfo` (proc_pid_mountinfo(5)) has a mount of ours at this place.
fn names_mount(mounts: &[u8], place: &[u8]) -> bool {
    let escaped: Vec<u8> = place
        .iter()
        .flat_map(|byte| match byte {
            b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
            other => vec![*other],
        })
        .collect();
    mounts.split(|byte| *byte == b'\n').any(|line| {
        let mut words = line.split(|byte| *byte == b' ');
        words.nth(4) == Some(&escaped) && words.any(|word| word == SOURCE.as_bytes())
    })
}

/// Lets as much of the file be dirty as of any other: FUSE begins with a hundredth of that, and would make the guest
/// wait for write-back that nobody needs (Documentation/ABI/testing/sysfs-class-bdi).
pub(super) fn allow_dirty_pages(place: &Path) -> Result<(), CheckpointError> {
    // Closed, such a descriptor writes nothing back.
    let looked = rustix::fs::open(place, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    let looked = looked.map_err(CheckpointError::io("open", place))?;
    check_mounted(place, &looked)?;
    let device = File::from(looked).metadata().map_err(CheckpointError::io("look at", place))?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    for (name, value) in [("strict_limit", "0"), ("max_ratio", "100")] {
        let path = Path::new("/sys/class/bdi").join(format!("{major}:{minor}")).join(name);
        std::fs::write(&path, value).map_err(CheckpointError::io("write", &path))?;
    }
    Ok(())
}

/// Tells the kernel the file's size. With a write-back cache it believes its own idea of a size, which of a mount's
/// root is nothing at first.
pub(super) fn set_size(place: &Path, size_bytes: u64) -> Result<(), CheckpointError> {
    let known = std::fs::metadata(place).map_err(CheckpointError::io("look at", place))?.len();
    if known == size_bytes {
        return Ok(());
    }
    opened(place)?.set_len(size_bytes).map_err(CheckpointError::io("resize", place))
}

/// Asks for what an earlier server has read and not answered.
pub(super) fn ask_again(mut device: &File) -> Result<(), CheckpointError> {
    let mut answer = Answer::default();
    answer.resend();
    device.write_all(answer.bytes()).map_err(CheckpointError::io("ask for requests again at", Path::new("/dev/fuse")))
}

/// Has the kernel read anew what it has read before. It may wait for pages that are being read: not for the thread that
/// answers.
pub(super) fn forget_read(mut device: &File) -> Result<(), CheckpointError> {
    let mut answer = Answer::default();
    answer.invalidate();
    device.write_all(answer.bytes()).map_err(CheckpointError::io("have the kernel forget", Path::new("/dev/fuse")))
}

/// Answers the kernel until the mount is gone, or nobody wants it to.
pub(super) fn serve(device: &File, store: &Store, looks: Looks) -> Result<(), CheckpointError> {
    let mut server = Server { store, looks, answer: Answer::with_room(), page: [0; PAGE_BYTES] };
    // All of it written to: where the kernel finds no page for a request, and this process is being killed, it answers
    // the request with EIO by itself, and what was to be written back is lost (fuse_dev_do_read() in fs/fuse/dev.c).
    let mut buffer = vec![1; REQUEST_BYTES_MAX];
    let failed = |action| CheckpointError::io(action, Path::new("/dev/fuse"));
    loop {
        let length = match { device }.read(&mut buffer) {
            Ok(length) => length,
            // ENOENT: the request was taken back before it was read.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ENOENT)) => continue,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(()),
            Err(error) => return Err(failed("read requests from")(error)),
        };
        let is_served = store.is_served.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_served {
            // For whoever comes next.
            return ask_again(device);
        }
        let answered = server.answer(&buffer[..length]);
        if matches!(answered, Ok(false)) {
            continue;
        }
        match { device }.write_all(server.answer.bytes()) {
            // ENOENT: who has asked was killed and waits no more.
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(failed("answer")(error)),
            _ => answered?,
        };
    }
}

/// One server thread's buffers.
struct Server<'a> {
    store: &'a Store,
    looks: Looks,
    answer: Answer,
    page: [u8; PAGE_BYTES],
}

impl Server<'_> {
    /// Makes the answer; false when none is expected. After an error, too, it is there.
    fn answer(&mut self, bytes: &[u8]) -> Result<bool, CheckpointError> {
        let Request { unique, operation } = match Request::parse(bytes) {
            Ok(request) => request,
            Err(Refusal::NoRequest) => return Ok(false),
            Err(Refusal::Invalid { unique }) => {
                self.answer.status(unique, libc::EINVAL);
                return Ok(true);
            }
        };
        let looks = self.looks;
        match operation {
            Operation::Silent => return Ok(false),
            Operation::Begin { major, minor, flags, readahead } => {
                if !message::is_served(major, minor, flags) {
                    self.answer.status(unique, libc::EPROTO);
                    return Err(CheckpointError::Protocol { major, minor });
                }
                self.answer.agreed(unique, flags, readahead);
            }
            // The memory's size is fixed; times and owners nobody asks for.
            Operation::SetAttributes { size_bytes: Some(other) } if other != looks.size_bytes => {
                self.answer.status(unique, libc::EPERM);
            }
            Operation::Attributes | Operation::SetAttributes { .. } => self.answer.attributes(unique, looks),
            Operation::Open => self.answer.opened(unique),
            // Who goes on without a state asks for these again as soon as it knows.
            Operation::Read { .. } | Operation::Allocate { .. }
                if !self.store.knows_resident.load(Ordering::Acquire) =>
            {
                return Ok(false);
            }
            Operation::Read { offset, length } => self.read(unique, offset, length),
            Operation::Write { offset, data } => match self.store.write(offset, data) {
                Ok(()) => self.answer.written(unique, data.len()),
                Err(errno) => self.answer.status(unique, errno),
            },
            Operation::Allocate { offset, length, mode } => {
                let done = self.allocate(offset, length, mode);
                self.answer.status(unique, done.err().unwrap_or(0));
            }
            Operation::Nothing | Operation::End => self.answer.status(unique, 0),
            Operation::FileSystem => self.answer.file_system(unique, looks),
            Operation::Unknown => self.answer.status(unique, libc::ENOSYS),
        }
        Ok(true)
    }

    /// All that was asked for, or an error: what a short answer leaves out the kernel takes for zeros.
    fn read(&mut self, unique: u64, offset: u64, length: u32) {
        let size_bytes = self.looks.size_bytes;
        let end = offset.saturating_add(u64::from(length)).min(size_bytes);
        let mut at = offset;
        self.answer.begin_data(unique);
        self.answer.data(&[]);
        while at < end {
            let (page, within) = split(at);
            if let Err(error) = self.store.read_now(page, &mut self.page) {
                if !matches!(error, CheckpointError::PageNotKept { .. }) {
                    tracing::error!(%error, "a page of the memory cannot be read");
                }
                return self.answer.status(unique, libc::EIO);
            }
            let wanted = usize::try_from(end - at).unwrap_or(PAGE_BYTES).min(PAGE_BYTES - within);
            self.answer.data(&self.page[within..within + wanted]);
            at += wanted as u64;
        }
    }

    fn allocate(&mut self, offset: u64, length: u64, mode: u32) -> Result<(), i32> {
        let mode = FallocateFlags::from_bits_retain(mode);
        let zeros = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if mode.intersects(zeros) {
            return self.store.zero(offset, length);
        }
        // All of the file is there: reserving changes nothing.
        match mode.difference(FallocateFlags::KEEP_SIZE).is_empty() {
            true if offset.checked_add(length).is_some_and(|end| end <= self.looks.size_bytes) => Ok(()),
            true => Err(libc::EFBIG),
            false => Err(libc::EOPNOTSUPP),
        }
    }
}

/// The file of a server that has the kernel's end, by any path to it: opened for one call, as a process that dies with
/// it open waits for its own write-back.
pub(super) fn opened(place: &Path) -> Result<File, CheckpointError> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(place);
    let opened = opened.map_err(|error: io::Error| CheckpointError::io("open", place)(error))?;
    check_mounted(place, &opened)?;
    Ok(opened)
}

/// Refuses what is no file of FUSE: where nothing is mounted, or not for this process, there is an empty file of the
/// host's, and whatever is done to that is done to no memory.
fn check_mounted(place: &Path, file: impl AsFd) -> Result<(), CheckpointError> {
    let found = rustix::fs::fstatfs(file).map_err(CheckpointError::io("look at", place))?;
    if found.f_type != libc::FUSE_SUPER_MAGIC {
        return Err(CheckpointError::NotMounted { path: place.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use onecopy_testing::TestDirectory;

    use super::super::shadow::Shadow;
    use super::*;

    /// A server of one page, and what stands for the kernel.
    fn served(directory: &TestDirectory) -> (Store, File, UnixStream) {
        let (device, kernel) = UnixStream::pair().unwrap();
        let store =
            Store::fresh(|size_bytes| Shadow::create(&directory.join("shadow"), size_bytes), PAGE_BYTES as u64, 0);
        let store = store.unwrap();
        (store, File::from(std::os::fd::OwnedFd::from(device)), kernel)
    }

    fn request(code: u32, words: &[u32]) -> Vec<u8> {
        let length = u32::try_from(message::REQUEST_HEAD + words.len() * 4).unwrap();
        let head = [length, code, 77, 0, 0, 0, 0, 0, 0, 0];
        head.iter().chain(words).flat_map(|word| word.to_ne_bytes()).collect()
    }

    const LOOKS: Looks = Looks { size_bytes: PAGE_BYTES as u64, user_id: 0, group_id: 0 };

    /// Spec: C5
    #[test]
    fn t7_a_kernel_that_is_too_old_is_told_so() {
        let directory = TestDirectory::new().unwrap();
        let (store, device, mut kernel) = served(&directory);
        kernel.write_all(&request(26, &[7, 39, 0, 0])).unwrap();
        let ended = serve(&device, &store, LOOKS);
        assert!(matches!(ended, Err(CheckpointError::Protocol { major: 7, minor: 39 })), "{ended:?}");
        let mut answer = [0; 16];
        kernel.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], [16i32, -libc::EPROTO].map(i32::to_ne_bytes).concat());
    }

    /// Spec: D6
    #[test]
    fn t5_a_server_that_is_not_wanted_any_more_hands_on_what_it_has_read() {
        let directory = TestDirectory::new().unwrap();
        let (store, device, mut kernel) = served(&directory);
        *store.is_served.lock().unwrap() = false;
        kernel.write_all(&request(3, &[0; 4])).unwrap();
        serve(&device, &store, LOOKS).unwrap();
        drop(device);
        let (mut answer, mut expected) = (Vec::new(), Answer::default());
        kernel.read_to_end(&mut answer).unwrap();
        expected.resend();
        assert_eq!(answer, expected.bytes());
    }

    #[test]
    fn a_mount_of_ours_is_found_by_its_place_whatever_the_place_is_called() {
        let line = |place: &str, source: &str| format!("36 25 0:32 / {place} rw,nosuid - fuse {source} rw,user_id=0\n");
        let mounts = [
            line("/m/web/memory", SOURCE),
            line("/m/other", "somebody"),
            line(r"/m/a\040b\134c", SOURCE),
            "36 25\n".to_owned(),
        ];
        let mounts = mounts.concat().into_bytes();
        let found = |place: &str| names_mount(&mounts, place.as_bytes());
        assert!(found("/m/web/memory") && found(r"/m/a b\c"));
        assert!(!found("/m/web") && !found("/m/web/memory2") && !found("/m/other") && !found(""));
    }
}
