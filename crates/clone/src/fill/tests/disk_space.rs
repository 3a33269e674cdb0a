//! Clones on a disk of their source, which becomes full.

use std::path::Path;

use onecopy_testing::{FileSystem, MountedDisk};
use rustix::fs::{FallocateFlags, fallocate, statvfs};

use super::*;
use crate::free_space::SourceDisks;

/// What is written at once.
const RUN_BYTES: u64 = 256 << 10;

/// What is free of a disk, and what of it no clone takes; in bytes.
fn free(disk: &Path) -> (u64, u64) {
    let space = statvfs(disk).unwrap();
    (space.f_bavail * space.f_frsize, space.f_blocks / 50 * space.f_frsize)
}

/// A source on a disk that has room for a part of a clone only.
fn crowded(disk: &Path) -> Harness {
    let harness = Harness::at(tempfile::tempdir_in(disk).unwrap(), vec![content(1, 16 << 20)]);
    let (free_bytes, kept_bytes) = free(disk);
    let ballast = File::create(disk.join("ballast")).unwrap();
    fallocate(&ballast, FallocateFlags::empty(), 0, free_bytes - kept_bytes - (4 << 20)).unwrap();
    harness
}

/// Spec: L2
#[test]
fn k30_filling_ends_before_the_sources_disk_is_full() {
    if !rustix::process::geteuid().is_root() {
        onecopy_testing::skip("k30_filling_ends_before_the_sources_disk_is_full", "only root mounts a file system");
        return;
    }
    for leaves_room in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let disk = MountedDisk::new(FileSystem::Ext4, directory.path(), "disk", 96 << 20).unwrap();
        let harness = crowded(disk.path());
        let filling = Arc::into_inner(harness.filling()).unwrap();
        let disks = SourceDisks::of(&harness.directory.path().join("source")).unwrap();
        let filling = if leaves_room { filling.beside(disks) } else { filling };
        let reason = filling.ensure(FIRST, ByteRange::WHOLE).unwrap_err().to_string();
        assert!(filling.progress().filled_bytes > 0);
        let (free_bytes, kept_bytes) = free(disk.path());
        if leaves_room {
            assert!(reason.contains("less than a 50th"), "{reason}");
            // Blocks that tell where others are count, too.
            assert!(free_bytes + 2 * RUN_BYTES > kept_bytes, "{free_bytes} of {kept_bytes}");
        } else {
            assert!(reason.contains("No space left") && free_bytes < RUN_BYTES, "{reason}: {free_bytes}");
        }
    }
}
