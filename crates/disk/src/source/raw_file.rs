//! A raw image: a file or a block device of this machine.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, IoSliceMut, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, SeekFrom as Probe};

use super::{Extent, Source, SourceError};
use crate::format::header::check_size;
use crate::storage;

/// A raw image, read only.
#[derive(Debug)]
pub struct RawFile {
    file: File,
    path: PathBuf,
    size_bytes: u64,
}

impl RawFile {
    /// Opens the image for reading.
    ///
    /// # Errors
    /// It cannot be opened, or is larger than any disk.
    pub fn open(path: &Path) -> Result<RawFile, SourceError> {
        let failed = SourceError::file(path);
        // A disk's header names it, which may lie: nobody waits for a FIFO.
        let options = OFlags::NONBLOCK.bits().cast_signed();
        let mut file = OpenOptions::new().read(true).custom_flags(options).open(path).map_err(&failed)?;
        let kind = file.metadata().map_err(&failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(SourceError::new(path.display().to_string(), "it is neither a file nor a block device"));
        }
        // A block device has no size in its metadata, but it has an end.
        let size_bytes = file.seek(SeekFrom::End(0)).map_err(&failed)?;
        check_size(size_bytes).map_err(SourceError::file(path))?;
        Ok(RawFile { file, path: path.to_owned(), size_bytes })
    }

    pub(super) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }
}

impl Source for RawFile {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let there = self.size_bytes.saturating_sub(offset).min(into.len() as u64) as usize;
        let (bytes, past_end) = into.split_at_mut(there);
        past_end.fill(0);
        self.file.read_exact_at(bytes, offset).map_err(SourceError::file(&self.path))
    }

    fn try_read(&self, offset: u64, into: &mut [u8]) -> Result<bool, SourceError> {
        let there = self.size_bytes.saturating_sub(offset).min(into.len() as u64) as usize;
        let (bytes, past_end) = into.split_at_mut(there);
        past_end.fill(0);
        let is_read = storage::try_read(&self.file, offset, &mut [IoSliceMut::new(bytes)]);
        Ok(is_read.map_err(SourceError::file(&self.path))?.unwrap_or(false))
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
        extents(&self.file, self.size_bytes, range).map_err(SourceError::file(&self.path))
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
    }
}

/// The data and the holes of a sparse file within a range; what is past the end is a hole. A file system that knows no
/// holes calls all of it data (lseek(2), SEEK_HOLE).
pub(super) fn extents(file: &File, size_bytes: u64, range: Range<u64>) -> io::Result<Vec<Extent>> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let (end, is_zero) = if at >= size_bytes {
            (range.end, true)
        } else {
            match rustix::fs::seek(file, Probe::Data(at)) {
                // No data from here on.
                Err(rustix::io::Errno::NXIO) => (range.end, true),
                // Neither a hole nor data can be told: a device.
                Err(rustix::io::Errno::INVAL) => (size_bytes, false),
                Err(error) => return Err(error.into()),
                Ok(data) if data > at => (data, true),
                Ok(_) => match rustix::fs::seek(file, Probe::Hole(at)) {
                    Ok(hole) if hole > at => (hole, false),
                    Ok(_) | Err(rustix::io::Errno::INVAL) => (size_bytes, false),
                    Err(error) => return Err(error.into()),
                },
            }
        };
        let end = end.min(range.end);
        match extents.last_mut() {
            Some(last) if last.is_zero == is_zero => last.range.end = end,
            _ => extents.push(Extent { range: at..end, is_zero }),
        }
        at = end;
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::header::SIZE_BYTES_MAX;

    #[test]
    fn holes_are_told_and_the_end_reads_as_zeros() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7; 65536], 131072).unwrap();
        let image = RawFile::open(&path).unwrap();
        assert_eq!(image.size_bytes(), 1 << 20);
        let extent = |range, is_zero| Extent { range, is_zero };
        let expected = vec![extent(65536..131072, true), extent(131072..196608, false), extent(196608..2 << 20, true)];
        assert_eq!(image.extents(65536..2 << 20).unwrap(), expected);
        let mut bytes = [1; 1024];
        image.read((1 << 20) - 512, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 1024]);
        let mut bytes = [1; 1024];
        image.read(131072 - 512, &mut bytes).unwrap();
        assert_eq!((bytes[511], bytes[512]), (0, 7));
        // What was just written or read is in memory; behind the end nothing is needed.
        for (offset, expected) in [(131072 - 512, [0, 7]), ((1 << 20) - 512, [0, 0]), (2 << 20, [0, 0])] {
            let mut bytes = [1; 1024];
            assert!(image.try_read(offset, &mut bytes).unwrap());
            assert_eq!([bytes[511], bytes[512]], expected, "{offset}");
        }
        assert!(RawFile::open(directory.path()).is_err());
        let fifo = directory.path().join("fifo");
        crate::storage::plant("fifo", &fifo, directory.path());
        assert!(RawFile::open(&fifo).unwrap_err().reason.contains("neither a file nor"));
    }

    /// Spec: C5
    #[test]
    fn b28_an_image_larger_than_any_disk_is_refused() {
        // Where files can be so large: no block of it is there.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("image");
        let file = File::create(&path).unwrap();
        file.set_len(SIZE_BYTES_MAX).unwrap();
        assert_eq!(RawFile::open(&path).unwrap().size_bytes(), SIZE_BYTES_MAX);
        file.set_len(SIZE_BYTES_MAX + 1).unwrap();
        let error = RawFile::open(&path).unwrap_err().to_string();
        assert!(error.contains("8 TiB"), "{error}");
    }
}
