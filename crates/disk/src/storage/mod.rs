//! The files of a disk's directory, and all that is ever done to them.
//!
//! Every change of a file goes through here, so that tests can record the changes and replay what a power cut leaves.

mod open;
#[cfg(test)]
pub(crate) mod record;

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::DiskError;
pub(crate) use open::{HOLES_BYTES_MAX, create, open, read_all, read_whole};
#[cfg(test)]
pub(crate) use open::{PLANTED, plant};

/// What the kernel takes in one vectored read (`IOV_MAX`).
const SLICES_MAX: usize = 1024;

/// What one system call writes, aligned. The page cache keeps the bytes of one call together (large folios), and ext4
/// goes through all blocks of such a piece at each later write into it: 4 KiB into pieces of 1 MiB cost four times what
/// they cost here (0011).
const WRITE_BYTES_MAX: u64 = 16 << 10;

/// A disk's directory.
pub(crate) struct Folder {
    path: PathBuf,
    handle: File,
    #[cfg(test)]
    recorder: Option<record::Recorder>,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> Result<Folder, DiskError> {
        let handle = OpenOptions::new().read(true).custom_flags(OFlags::DIRECTORY.bits().cast_signed()).open(path);
        let handle = handle.map_err(|error| DiskError::io("open", path, error))?;
        Ok(Folder {
            path: path.to_owned(),
            handle,
            #[cfg(test)]
            recorder: record::of(path),
        })
    }

    /// The folder in which a file or folder lies.
    pub(crate) fn around(path: &Path) -> Result<Folder, DiskError> {
        Folder::open(path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")))
    }

    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn stored(&self, name: &str, file: File) -> StoredFile {
        StoredFile {
            file,
            path: self.path_of(name),
            waits_always: AtomicBool::new(false),
            #[cfg(test)]
            recorder: self.recorder.clone().map(|recorder| (recorder, name.to_owned())),
        }
    }

    /// A new file, also when there was one of this name.
    pub(crate) fn create_file(&self, name: &str) -> Result<StoredFile, DiskError> {
        let path = self.path_of(name);
        let file = create(&path).map_err(|error| DiskError::io("create", &path, error))?;
        #[cfg(test)]
        self.record(record::Event::Create { name: name.to_owned() });
        Ok(self.stored(name, file))
    }

    pub(crate) fn open_file(&self, name: &str, writable: bool) -> Result<StoredFile, DiskError> {
        let path = self.path_of(name);
        let file = open(&path, OpenOptions::new().write(writable));
        Ok(self.stored(name, file.map_err(|error| DiskError::io("open", &path, error))?))
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), DiskError> {
        let path = self.path_of(from);
        std::fs::rename(&path, self.path_of(to)).map_err(|error| DiskError::io("rename", &path, error))?;
        #[cfg(test)]
        self.record(record::Event::Rename { from: from.to_owned(), to: to.to_owned() });
        Ok(())
    }

    /// Removes a file that may be gone already.
    pub(crate) fn remove(&self, name: &str) -> Result<(), DiskError> {
        let path = self.path_of(name);
        match std::fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(DiskError::io("remove", &path, error)),
        }
        #[cfg(test)]
        self.record(record::Event::Remove { name: name.to_owned() });
        Ok(())
    }

    /// Makes creations, renames and removals durable.
    pub(crate) fn synchronize(&self) -> Result<(), DiskError> {
        #[cfg(test)]
        if let Some(refusal) =
            self.recorder.as_ref().and_then(|recorder| recorder.refused_synchronization(record::FOLDER))
        {
            return Err(DiskError::io("synchronize", &self.path, refusal.error()));
        }
        #[cfg(test)]
        let begin = self.recorder.as_ref().map(record::Recorder::len);
        self.handle.sync_all().map_err(|error| DiskError::io("synchronize", &self.path, error))?;
        #[cfg(test)]
        if let Some(begin) = begin {
            self.record(record::Event::SynchronizeFolder { begin });
        }
        Ok(())
    }

    /// Writes a small file so that it is there whole or not at all, and durable.
    pub(crate) fn write_whole(&self, name: &str, bytes: &[u8]) -> Result<(), DiskError> {
        let new = format!("{name}.new");
        let file = self.create_file(&new)?;
        file.write_at(0, bytes)?;
        file.synchronize()?;
        self.rename(&new, name)?;
        self.synchronize()
    }

    /// All of a file, of which no more than `bytes_max` are there.
    pub(crate) fn read_whole(&self, name: &str, bytes_max: u64) -> Result<Vec<u8>, DiskError> {
        let path = self.path_of(name);
        read_whole(&path, bytes_max).map_err(|error| DiskError::io("read", &path, error))
    }

    /// The names of its files.
    pub(crate) fn names(&self) -> Result<Vec<String>, DiskError> {
        let failed = |error| DiskError::io("list", &self.path, error);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        Ok(names)
    }

    #[cfg(test)]
    fn record(&self, event: record::Event) {
        if let Some(recorder) = &self.recorder {
            recorder.push(event);
        }
    }
}

/// One file of a disk.
pub(crate) struct StoredFile {
    file: File,
    path: PathBuf,
    /// The file system cannot tell whether a read would wait.
    waits_always: AtomicBool,
    #[cfg(test)]
    recorder: Option<(record::Recorder, String)>,
}

/// Reads what the kernel has in memory of a file: whether that is all, or none where the file system cannot say.
pub(crate) fn try_read(file: &File, offset: u64, into: &mut [IoSliceMut<'_>]) -> io::Result<Option<bool>> {
    let length: usize = into.iter().map(|slice| slice.len()).sum();
    match rustix::io::preadv2(file, into, offset, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(Some(count == length)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Some(false)),
        Err(Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl StoredFile {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn len(&self) -> Result<u64, DiskError> {
        self.file.metadata().map(|metadata| metadata.len()).map_err(|error| self.failed("measure", error))
    }

    fn failed(&self, action: &'static str, error: io::Error) -> DiskError {
        DiskError::io(action, &self.path, error)
    }

    /// Reads; what lies behind the end is zeros.
    pub(crate) fn read_at(&self, mut offset: u64, mut into: &mut [u8]) -> Result<(), DiskError> {
        while !into.is_empty() {
            match self.file.read_at(into, offset) {
                Ok(0) => {
                    into.fill(0);
                    return Ok(());
                }
                Ok(count) => {
                    into = &mut into[count..];
                    offset += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed("read", error)),
            }
        }
        Ok(())
    }

    /// Reads into several places.
    pub(crate) fn read_slices(&self, mut offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<(), DiskError> {
        if into.len() <= SLICES_MAX {
            let length: usize = into.iter().map(|slice| slice.len()).sum();
            match rustix::io::preadv(&self.file, into, offset) {
                Ok(count) if count == length => return Ok(()),
                // Short, at the end or by a signal: the plain way handles it.
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(self.failed("read", error.into())),
            }
        }
        for slice in into {
            self.read_at(offset, slice)?;
            offset += slice.len() as u64;
        }
        Ok(())
    }

    /// Reads what the kernel has in memory: `false` when it would have to wait for any of it, or cannot say.
    pub(crate) fn try_read_cached(&self, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<bool, DiskError> {
        let is_read = try_read(&self.file, offset, into).map_err(|error| self.failed("read", error))?;
        Ok(is_read.unwrap_or(false))
    }

    /// The same, but where the file system cannot say it is waited for.
    pub(crate) fn try_read_slices(&self, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<bool, DiskError> {
        if into.len() > SLICES_MAX {
            return Ok(false);
        }
        if self.waits_always.load(Ordering::Relaxed) {
            return self.read_slices(offset, into).map(|()| true);
        }
        match try_read(&self.file, offset, into).map_err(|error| self.failed("read", error))? {
            Some(is_read) => Ok(is_read),
            None => {
                self.waits_always.store(true, Ordering::Relaxed);
                self.read_slices(offset, into).map(|()| true)
            }
        }
    }

    pub(crate) fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), DiskError> {
        #[cfg(test)]
        if let Some(refusal) = self.recorder.as_ref().and_then(|(recorder, name)| recorder.refused_write(name)) {
            let _ = self.file.write_all_at(&from[..refusal.written_bytes.min(from.len())], offset);
            return Err(self.failed("write", refusal.error()));
        }
        self.write_in_pieces(offset, from).map_err(|error| self.failed("write", error))?;
        #[cfg(test)]
        self.record(|name| record::Event::Write { name, offset, bytes: from.to_vec() });
        Ok(())
    }

    fn write_in_pieces(&self, mut offset: u64, mut from: &[u8]) -> std::io::Result<()> {
        while !from.is_empty() {
            let whole = WRITE_BYTES_MAX - offset % WRITE_BYTES_MAX;
            let (piece, rest) = from.split_at(from.len().min(whole as usize));
            self.file.write_all_at(piece, offset)?;
            (offset, from) = (offset + piece.len() as u64, rest);
        }
        Ok(())
    }

    /// Makes all writes that have returned durable.
    pub(crate) fn synchronize(&self) -> Result<(), DiskError> {
        #[cfg(test)]
        if let Some(refusal) =
            self.recorder.as_ref().and_then(|(recorder, name)| recorder.refused_synchronization(name))
        {
            return Err(self.failed("synchronize", refusal.error()));
        }
        #[cfg(test)]
        let begin = self.recorder.as_ref().map_or(0, |(recorder, _)| recorder.len());
        self.file.sync_data().map_err(|error| self.failed("synchronize", error))?;
        #[cfg(test)]
        self.record(|name| record::Event::Synchronize { name, begin });
        Ok(())
    }

    /// Lets the kernel forget what it has of the file in memory and takes for written: after a failed synchronization
    /// that is not what is stored. A hint: file systems in memory have nothing to forget.
    pub(crate) fn forget_cached(&self) {
        if let Err(error) = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed) {
            tracing::warn!(error = %io::Error::from(error), path = %self.path.display(), "a file's cached pages stay");
        }
    }

    /// Frees a range, which then reads as zeros. A file system without holes gets zeros only by later writes, so the
    /// range must not be read before it is written.
    pub(crate) fn punch(&self, offset: u64, length: u64) -> Result<(), DiskError> {
        #[cfg(test)]
        if let Some(refusal) = self.recorder.as_ref().and_then(|(recorder, name)| recorder.refused_write(name)) {
            return Err(self.failed("free a part of", refusal.error()));
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, offset, length) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => return Ok(()),
            Err(error) => return Err(self.failed("free a part of", error.into())),
        }
        #[cfg(test)]
        self.record(|name| record::Event::Write { name, offset, bytes: vec![0; length as usize] });
        Ok(())
    }

    /// Reserves space without changing content, where the file system can.
    pub(crate) fn reserve(&self, offset: u64, length: u64) -> Result<(), DiskError> {
        #[cfg(test)]
        if let Some(refusal) = self.recorder.as_ref().and_then(|(recorder, name)| recorder.refused_write(name)) {
            return Err(self.failed("reserve", refusal.error()));
        }
        #[cfg(test)]
        if self.recorder.as_ref().is_some_and(|(recorder, name)| recorder.refuses_to_reserve(name, length)) {
            return Err(self.failed("reserve", io::Error::from_raw_os_error(libc::ENOSPC)));
        }
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, length) {
            Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(self.failed("reserve", error.into())),
        }
    }

    pub(crate) fn set_len(&self, length: u64) -> Result<(), DiskError> {
        self.file.set_len(length).map_err(|error| self.failed("resize", error))?;
        #[cfg(test)]
        self.record(|name| record::Event::SetLength { name, length });
        Ok(())
    }

    #[cfg(test)]
    fn record(&self, event: impl FnOnce(String) -> record::Event) {
        if let Some((recorder, name)) = &self.recorder {
            recorder.push(event(name.clone()));
        }
    }
}
