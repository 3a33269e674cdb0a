//! The block device (or, in tests, a file), past the page cache.

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, fallocate, fdatasync, fstat, open};
use rustix::ioctl::{Setter, ioctl};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// `BLKDISCARD`, `_IO(0x12, 119)` of linux/fs.h.
const DISCARD: u32 = 0x1277;
/// `BLKZEROOUT`, `_IO(0x12, 127)`.
const ZERO_OUT: u32 = 0x127f;

/// What is read and written.
pub(crate) struct Device {
    file: File,
    is_block_device: bool,
    pub(crate) size_bytes: u64,
}

impl Device {
    pub(crate) fn open(path: &Path) -> io::Result<Device> {
        let named = |error| io::Error::new(error, format!("{}: {error}", path.display()));
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        // A file system in memory has no page cache to go past.
        let descriptor = open(path, flags | OFlags::DIRECT, Mode::empty())
            .or_else(|_| open(path, flags, Mode::empty()))
            .map_err(|error| named(io::Error::from(error).kind()))?;
        let kind = FileType::from_raw_mode(fstat(&descriptor)?.st_mode);
        let mut file = File::from(descriptor);
        let size_bytes = io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
        Ok(Device { file, is_block_device: kind == FileType::BlockDevice, size_bytes })
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }

    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.file.write_all_at(from, offset)
    }

    /// What was written before is on the disk when this returns.
    pub(crate) fn flush(&self) -> io::Result<()> {
        Ok(fdatasync(&self.file)?)
    }

    /// The range is not needed any more; it reads as zeros.
    pub(crate) fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.clear::<DISCARD>(offset, length)
    }

    /// The range is zeros.
    pub(crate) fn zero(&self, offset: u64, length: u64) -> io::Result<()> {
        self.clear::<ZERO_OUT>(offset, length)
    }

    fn clear<const OPCODE: u32>(&self, offset: u64, length: u64) -> io::Result<()> {
        if !self.is_block_device {
            return Ok(fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length)?);
        }
        // SAFETY: both take a pointer to two 64-bit numbers, the begin and the length, which they only read.
        let request = unsafe { Setter::<OPCODE, [u64; 2]>::new([offset, length]) };
        // SAFETY: the descriptor is a block device's, to which these belong; it lives as long as `self`.
        unsafe { ioctl(&self.file, request) }?;
        Ok(())
    }
}
