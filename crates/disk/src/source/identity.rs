//! What a base was when a disk was made over it. Another one in its place would show through in some places and not in
//! others.

use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{RawFile, Source, SourceError};
use crate::{Snapshot, storage};

/// The record, in the disk's directory.
const FILE: &str = "base.identity";

/// More than a record has.
const FILE_BYTES_MAX: u64 = 4096;

/// What can be seen of a base without reading it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub(super) enum Identity {
    /// A raw image.
    Image {
        size_bytes: u64,
        /// Seconds and nanoseconds since 1970; none for a block device, whose node tells nothing of its content.
        modified: Option<(i64, i64)>,
        /// The file's number in its file system; the device's own for a block device.
        inode: u64,
    },
    /// A snapshot of another disk.
    Snapshot {
        disk_uuid: String,
        /// The epoch that it ended: no two openings of a disk have one in common.
        epoch: u64,
        /// Tells apart what became of two copies of one directory, which have their uuid in common, and may have their
        /// epochs.
        created_unix_ms: u64,
    },
}

impl fmt::Display for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Identity::Image { size_bytes, modified: Some((seconds, nanoseconds)), inode } => {
                write!(formatter, "file {inode} of {size_bytes} bytes, written last at {seconds}.{nanoseconds:09}")
            }
            Identity::Image { size_bytes, modified: None, inode } => {
                write!(formatter, "device {inode} of {size_bytes} bytes")
            }
            Identity::Snapshot { disk_uuid, epoch, created_unix_ms } => {
                write!(formatter, "the snapshot of disk {disk_uuid} at epoch {epoch}, taken at {created_unix_ms} ms")
            }
        }
    }
}

impl Identity {
    /// What a raw image is now.
    pub(super) fn of_image(image: &Path) -> Result<Identity, SourceError> {
        let failed = SourceError::file(image);
        let image = RawFile::open(image)?;
        let (metadata, size_bytes) = (image.metadata().map_err(failed)?, image.size_bytes());
        if metadata.file_type().is_block_device() {
            return Ok(Identity::Image { size_bytes, modified: None, inode: metadata.rdev() });
        }
        let modified = Some((metadata.mtime(), metadata.mtime_nsec()));
        Ok(Identity::Image { size_bytes, modified, inode: metadata.ino() })
    }

    /// Which snapshot this is.
    pub(super) fn of_snapshot(disk_uuid: &str, snapshot: &Snapshot) -> Identity {
        let (epoch, created_unix_ms) = (snapshot.epoch.0, snapshot.created_unix_ms);
        Identity::Snapshot { disk_uuid: disk_uuid.to_owned(), epoch, created_unix_ms }
    }

    /// Keeps it in the directory of the disk that has this base.
    pub(super) fn record(&self, directory: &Path) -> Result<(), SourceError> {
        let path = directory.join(FILE);
        let failed = SourceError::file(&path);
        let text = toml::to_string(self).map_err(|error| failed(error.to_string()))?;
        let unfinished = directory.join(format!("{FILE}.unfinished"));
        let write = || -> std::io::Result<()> {
            let mut file = storage::create(&unfinished)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&unfinished, &path)?;
            File::open(directory)?.sync_all()
        };
        write().map_err(|error| failed(error.to_string()))
    }

    /// Checks that this, which the base at `place` is now, is what was recorded. A disk without a record has no
    /// opinion.
    pub(super) fn check(&self, place: &str, directory: &Path) -> Result<(), SourceError> {
        let path = directory.join(FILE);
        let text = match storage::read_whole(&path, FILE_BYTES_MAX) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(SourceError::new(path.display().to_string(), error)),
        };
        let recorded: Identity = toml::from_slice(&text).map_err(SourceError::file(&path))?;
        if *self == recorded {
            return Ok(());
        }
        let reason = format!(
            "the base changed since this disk was made over it: it was {recorded}, and is {self}; put the old one \
             back, or remove {} when you know that its content is the same",
            path.display()
        );
        Err(SourceError::new(place, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Epoch;

    fn record(image: &Path, directory: &Path) -> Result<(), SourceError> {
        Identity::of_image(image)?.record(directory)
    }

    fn check(image: &Path, directory: &Path) -> Result<(), SourceError> {
        Identity::of_image(image)?.check(&image.display().to_string(), directory)
    }

    /// A base that changed, is another one (also another snapshot of the same name), or can be written to is refused,
    /// with the remedy.
    ///
    /// Spec: C6
    #[test]
    fn b24_an_image_that_changed_is_refused_and_the_remedy_works() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        fs::write(&image, vec![1; 8192]).unwrap();
        check(&image, directory.path()).unwrap();
        record(&image, directory.path()).unwrap();
        check(&image, directory.path()).unwrap();

        // The same size and content, but written again: another moment.
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&image, vec![1; 8192]).unwrap();
        let error = check(&image, directory.path()).unwrap_err().to_string();
        assert!(error.contains("changed") && error.contains(FILE), "{error}");
        fs::remove_file(directory.path().join(FILE)).unwrap();
        check(&image, directory.path()).unwrap();

        // Another file in its place, as old as the first.
        record(&image, directory.path()).unwrap();
        let times = fs::metadata(&image).unwrap().modified().unwrap();
        let other = directory.path().join("other");
        fs::write(&other, vec![2; 8192]).unwrap();
        File::options().write(true).open(&other).unwrap().set_modified(times).unwrap();
        fs::rename(&other, &image).unwrap();
        assert!(check(&image, directory.path()).is_err());
    }

    #[test]
    fn a_record_comes_back_as_it_was_and_one_of_the_first_version_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let snapshot = |epoch, created_unix_ms| Snapshot { name: "one".into(), epoch: Epoch(epoch), created_unix_ms };
        let recorded = Identity::of_snapshot("0123456789abcdef", &snapshot(3 << 32 | 7, 1_795_000_000_000));
        recorded.record(directory.path()).unwrap();
        recorded.check("here", directory.path()).unwrap();
        for other in [
            Identity::of_snapshot("fedcba9876543210", &snapshot(3 << 32 | 7, 1_795_000_000_000)),
            Identity::of_snapshot("0123456789abcdef", &snapshot(4 << 32 | 7, 1_795_000_000_000)),
            Identity::of_snapshot("0123456789abcdef", &snapshot(3 << 32 | 7, 1_795_000_000_001)),
            Identity::Image { size_bytes: 1, modified: None, inode: 2 },
        ] {
            let error = other.check("here", directory.path()).unwrap_err().to_string();
            assert!(error.starts_with("here: the base changed") && error.contains(&other.to_string()), "{error}");
        }
        fs::write(directory.path().join(FILE), "size_bytes = 8192\nmodified = [17, 18]\ninode = 3\n").unwrap();
        let image = Identity::Image { size_bytes: 8192, modified: Some((17, 18)), inode: 3 };
        image.check("here", directory.path()).unwrap();
        fs::write(directory.path().join(FILE), "noise").unwrap();
        assert!(image.check("here", directory.path()).is_err());
    }
}
