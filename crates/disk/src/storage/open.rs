//! How what lies in a disk's directory is opened.
//!
//! The directory may be another account's than this process's: root makes a disk over the snapshot of one, and looks at
//! disks. That account may put anything there.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, SeekFrom, seek};
use rustix::io::Errno;

/// Most bytes that are holes of a file that is read whole, more than the reserve behind a journal's records. All else
/// was written: so one reads no more than somebody has stored.
pub(crate) const HOLES_BYTES_MAX: u64 = 8 << 20;

/// Opens a file to read, and for what `options` say. No link is followed and no FIFO waited for; what is no regular
/// file is refused, and so is one with a second name, where it may be anybody's.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.read(true).custom_flags(flags.bits().cast_signed()).open(path);
    let file = file.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::LOOP) => refused("is a link, which a disk's file never is: put the file in its place"),
        Some(Errno::ISDIR | Errno::NXIO) => refused(NO_FILE),
        _ => error,
    })?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(refused(NO_FILE));
    }
    if found.nlink() > 1 {
        return Err(refused("has a second name (hard link): copy the disk's directory, and take the copy"));
    }
    Ok(file)
}

const NO_FILE: &str = "is no regular file: remove it, or put the disk's own in its place";

fn refused(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("it {what}"))
}

/// A new file to write. What is there of this name is removed, not opened.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => open(path, OpenOptions::new().write(true).create_new(true)),
    }
}

/// All of a file, of which no more than `bytes_max` are there.
pub(crate) fn read_whole(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    read_all(&open(path, &mut OpenOptions::new())?, bytes_max)
}

/// The same of an open file.
pub(crate) fn read_all(mut file: &File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    if length > bytes_max {
        let what = format!("its {length} bytes are too many: such a file has at most {bytes_max}");
        return Err(io::Error::new(ErrorKind::FileTooLarge, what));
    }
    if has_more_holes(file, length)? {
        return Err(refused("has more holes than what a disk writes"));
    }
    file.rewind()?;
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether more of a file than [`HOLES_BYTES_MAX`] are holes. A file system that knows none has none.
fn has_more_holes(file: &File, length: u64) -> io::Result<bool> {
    let (mut at, mut holes_bytes) = (0, 0);
    while at < length && holes_bytes <= HOLES_BYTES_MAX {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(length),
            Err(Errno::NXIO) => length,
            Err(Errno::INVAL) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        holes_bytes += data - at;
        at = if data == length { length } else { seek(file, SeekFrom::Hole(data))?.max(data + 1) };
    }
    Ok(holes_bytes > HOLES_BYTES_MAX)
}

/// What another account may put into a file's place, and what is told of it.
#[cfg(test)]
pub(crate) const PLANTED: [(&str, &str); 4] = [
    ("link", "is a link"),
    ("fifo", "is no regular file"),
    ("directory", "is no regular file"),
    ("second name", "has a second name"),
];

/// Puts it there; a link and a second name are those of `own`.
#[cfg(test)]
pub(crate) fn plant(what: &str, path: &Path, own: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    match what {
        "link" => std::os::unix::fs::symlink(own, path).unwrap(),
        "fifo" => mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap(),
        "directory" => std::fs::create_dir(path).unwrap(),
        "second name" => std::fs::hard_link(own, path).unwrap(),
        _ => unreachable!("{what}"),
    }
}
