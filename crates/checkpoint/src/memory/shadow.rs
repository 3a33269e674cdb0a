//! The shadow: a file with what a guest's memory held at the end of the last epoch that was released.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::{CheckpointError, PAGE_BYTES};

const PAGE: u64 = PAGE_BYTES as u64;

pub(super) struct Shadow {
    file: File,
    path: PathBuf,
}

fn opened(path: &Path, options: &mut OpenOptions) -> Result<File, CheckpointError> {
    // A FIFO in its place keeps nobody waiting.
    let options = options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options.open(path).map_err(CheckpointError::io("open", path))
}

impl Shadow {
    /// Opens it; where there is none, or an empty one, it is made. It follows no link.
    pub(super) fn create(path: &Path, size_bytes: u64) -> Result<Shadow, CheckpointError> {
        let mut options = OpenOptions::new();
        let file = opened(path, options.create(true).truncate(false).mode(0o600))?;
        if file.metadata().map_err(CheckpointError::io("measure", path))?.len() == 0 {
            file.set_len(size_bytes).map_err(CheckpointError::io("resize", path))?;
        }
        Shadow { file, path: path.to_owned() }.of(size_bytes)
    }

    /// Opens one that is there, and as long as the memory. It follows no link.
    pub(super) fn open(path: &Path, size_bytes: u64) -> Result<Shadow, CheckpointError> {
        let file = opened(path, &mut OpenOptions::new())?;
        Shadow { file, path: path.to_owned() }.of(size_bytes)
    }

    fn of(self, size_bytes: u64) -> Result<Shadow, CheckpointError> {
        let found = self.file.metadata().map_err(CheckpointError::io("measure", &self.path))?;
        match found.is_file() && found.len() == size_bytes {
            true => Ok(self),
            false => {
                let what = format!("it has {} bytes, and the memory has {size_bytes}", found.len());
                Err(CheckpointError::damaged(&self.path, what))
            }
        }
    }

    /// Device and inode.
    pub(super) fn identity(&self) -> Result<(u64, u64), CheckpointError> {
        let found = self.file.metadata().map_err(CheckpointError::io("measure", &self.path))?;
        Ok((found.dev(), found.ino()))
    }

    /// One that can only be read.
    #[cfg(test)]
    pub(super) fn broken(path: &Path, size_bytes: u64) -> Shadow {
        drop(Shadow::create(path, size_bytes).expect("a new file"));
        Shadow { file: File::open(path).expect("it was just made"), path: path.to_owned() }
    }

    /// The pages that it may hold, as the file system tells without reading any.
    pub(super) fn data(&self) -> Result<Vec<Range<u32>>, CheckpointError> {
        let failed = || CheckpointError::io("look for data in", &self.path);
        let mut ranges = Vec::new();
        let mut from = 0;
        loop {
            let begin = match rustix::fs::seek(&self.file, SeekFrom::Data(from)) {
                Ok(begin) => begin,
                Err(Errno::NXIO) => return Ok(ranges),
                Err(error) => return Err(failed()(error)),
            };
            from = rustix::fs::seek(&self.file, SeekFrom::Hole(begin)).map_err(|error| failed()(error))?;
            let page = |at: u64| u32::try_from(at).expect("no memory has so many pages");
            ranges.push(page(begin / PAGE)..page(from.div_ceil(PAGE)));
        }
    }

    pub(super) fn read(&self, page: u32, into: &mut [u8; PAGE_BYTES]) -> Result<(), CheckpointError> {
        let failed = CheckpointError::io("read", &self.path);
        self.file.read_exact_at(into, u64::from(page) * PAGE).map_err(failed)
    }

    /// Writes pages that follow each other.
    pub(super) fn write(&self, page: u32, from: &[u8]) -> Result<(), CheckpointError> {
        self.file.write_all_at(from, u64::from(page) * PAGE).map_err(CheckpointError::io("write", &self.path))
    }

    /// Makes a page zeros and frees its space.
    pub(super) fn punch(&self, page: u32) -> Result<(), CheckpointError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, u64::from(page) * PAGE, PAGE) {
            Err(Errno::OPNOTSUPP) => self.write(page, &[0; PAGE_BYTES]),
            other => other.map_err(CheckpointError::io("free a part of", &self.path)),
        }
    }
}
