//! Which file it is, whatever its name.

use std::fs::Metadata;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use rustix::fs::{AtFlags, Statx, StatxFlags, makedev, statx};

use super::FileIdentity;

const NANOSECONDS_PER_SECOND: i64 = 1_000_000_000;

impl FileIdentity {
    /// Of what was looked at.
    pub fn of(metadata: &Metadata) -> FileIdentity {
        let born = metadata.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
            born_nanoseconds: born.and_then(|born| born.as_nanos().try_into().ok()).unwrap_or(0),
        }
    }

    /// Of an open file.
    ///
    /// # Errors
    /// Those of statx(2).
    pub fn of_descriptor(descriptor: impl AsFd) -> io::Result<FileIdentity> {
        Ok(FileIdentity::told(&statx(descriptor, c"", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::BTIME)?))
    }

    /// Of what statx(2) was asked about, birth included.
    pub(crate) fn told(found: &Statx) -> FileIdentity {
        let told = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
        let born = found.stx_btime.tv_sec.saturating_mul(NANOSECONDS_PER_SECOND);
        FileIdentity {
            device: makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            born_nanoseconds: if told { born.saturating_add(i64::from(found.stx_btime.tv_nsec)) } else { 0 },
        }
    }

    /// Device and inode: what an event's file is looked up by. The third part must then be compared.
    pub(crate) fn device_and_inode(self) -> (u64, u64) {
        (self.device, self.inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_give_the_same_and_a_new_file_is_another() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        let make = || {
            let file = std::fs::File::create(&path).expect("made");
            let identity = FileIdentity::of_descriptor(&file).expect("looked at");
            assert_eq!(identity, FileIdentity::of(&std::fs::metadata(&path).expect("there")));
            identity
        };
        let first = make();
        assert_eq!(make(), first, "truncated, not made anew");
        std::fs::remove_file(&path).expect("removed");
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_ne!(make(), first, "the inode may be the same, the birth is not");
    }
}
