//! File systems of a test's own, each in a file.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Signal;

use crate::process::{send, working_in};

/// How often processes are ended and unmounting is tried before the name alone is taken away.
const UNMOUNT_ROUNDS_MAX: u32 = 500;
const UNMOUNT_PAUSE: Duration = Duration::from_millis(20);

/// What a disk is formatted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// Does not share blocks between files.
    Ext4,
    /// Shares blocks between files; at least 300 MB.
    Xfs,
    /// Has subvolumes; at least 109 MiB.
    Btrfs,
}

/// A mounted file system. It is unmounted when this is dropped; the processes that work there are killed first.
#[derive(Debug)]
pub struct MountedDisk {
    place: PathBuf,
}

impl MountedDisk {
    /// Makes a file system of this size in a sparse file in `directory`, and mounts it there as `name`.
    ///
    /// # Errors
    ///
    /// The programs are missing, this is not root, or no loop device is left.
    pub fn new(kind: FileSystem, directory: &Path, name: &str, size_bytes: u64) -> anyhow::Result<MountedDisk> {
        let (image, place) = (directory.join(format!("{name}.image")), directory.join(name));
        std::fs::File::create(&image)?.set_len(size_bytes)?;
        std::fs::create_dir(&place)?;
        let mut format = match kind {
            FileSystem::Ext4 => Command::new("mkfs.ext4"),
            FileSystem::Xfs => Command::new("mkfs.xfs"),
            FileSystem::Btrfs => Command::new("mkfs.btrfs"),
        };
        run(format.arg("-q").arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).args([&image, &place]))?;
        let disk = MountedDisk { place };
        std::fs::set_permissions(disk.path(), std::fs::Permissions::from_mode(0o755))?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.place
    }
}

impl Drop for MountedDisk {
    fn drop(&mut self) {
        for _ in 0..UNMOUNT_ROUNDS_MAX {
            for process in working_in(&self.place) {
                send(process, Signal::KILL);
            }
            if run(Command::new("umount").arg(&self.place)).is_ok() {
                return;
            }
            std::thread::sleep(UNMOUNT_PAUSE);
        }
        // Whoever still has something open keeps the file system, but not the name.
        if let Err(error) = run(Command::new("umount").arg("--lazy").arg(&self.place)) {
            eprintln!("{} is left mounted: {error:#}", self.place.display());
        }
    }
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = Path::new(command.get_program()).to_owned();
    let output = command.output().with_context(|| format!("{} (make setup installs it)", program.display()))?;
    ensure!(output.status.success(), "{}: {}", program.display(), String::from_utf8_lossy(&output.stderr));
    Ok(())
}
