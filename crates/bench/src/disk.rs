//! A disk of an experiment's own: an XFS in a file, as slow as one likes, that goes away with the value.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

const READS_LIMIT: &str = "/sys/fs/cgroup/blkio/blkio.throttle.read_iops_device";
const WRITES_LIMIT: &str = "/sys/fs/cgroup/blkio/blkio.throttle.write_iops_device";
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";

/// A mounted file system.
#[derive(Debug)]
pub struct Mount(PathBuf);

impl Mount {
    /// Makes an XFS of this size in a file of `directory` (sparse: only what is written takes room) and mounts it
    /// there.
    ///
    /// # Errors
    /// Not root, no room, or no program for it.
    pub fn make(directory: &Path, size_bytes: u64) -> anyhow::Result<Mount> {
        let (image, place) = (directory.join("image"), directory.join("mounted"));
        std::fs::File::create(&image)?.set_len(size_bytes)?;
        std::fs::create_dir(&place)?;
        run(Command::new("mkfs.xfs").arg("-q").arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).args([&image, &place]))?;
        Ok(Mount(place))
    }

    /// Where it is mounted.
    pub fn place(&self) -> &Path {
        &self.0
    }

    /// The device below it, as `major:minor`.
    ///
    /// # Errors
    /// It is not there any more.
    pub fn device(&self) -> anyhow::Result<String> {
        let number = std::fs::metadata(&self.0)?.dev();
        Ok(format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.0).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("onecopy-bench: {} stays mounted", self.0.display());
        }
    }
}

/// A disk that reads, and perhaps writes, slowly until this is dropped (control groups, version 1, `blkio.throttle`).
#[derive(Debug)]
pub struct SlowDisk {
    device: String,
    limits: &'static [&'static str],
}

impl SlowDisk {
    /// One that does so many reads a second, as a volume in a cloud does.
    ///
    /// # Errors
    /// Not root, or no such control group.
    pub fn reads(device: String, reads_per_second: u32) -> anyhow::Result<SlowDisk> {
        SlowDisk::begin(device, &[READS_LIMIT], reads_per_second)
    }

    /// One that does so many reads and as many writes a second.
    ///
    /// # Errors
    /// As [`SlowDisk::reads`].
    pub fn reads_and_writes(device: String, per_second: u32) -> anyhow::Result<SlowDisk> {
        SlowDisk::begin(device, &[READS_LIMIT, WRITES_LIMIT], per_second)
    }

    fn begin(device: String, limits: &'static [&'static str], per_second: u32) -> anyhow::Result<SlowDisk> {
        let disk = SlowDisk { device, limits };
        for limit in limits {
            std::fs::write(limit, format!("{} {per_second}", disk.device))
                .with_context(|| format!("{limit}: the disk cannot be made slow here"))?;
        }
        Ok(disk)
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        for limit in self.limits {
            // Zero takes the limit away.
            if let Err(error) = std::fs::write(limit, format!("{} 0", self.device)) {
                eprintln!("onecopy-bench: the device {} stays slow: {error}", self.device);
            }
        }
    }
}

/// Empties the page cache.
///
/// # Errors
/// Not root.
pub fn drop_caches() -> anyhow::Result<()> {
    rustix::fs::sync();
    std::fs::write(DROP_CACHES, "3").with_context(|| format!("{DROP_CACHES}: needs root"))
}

/// Runs a program that must succeed.
///
/// # Errors
/// It is not there, or what it said.
pub fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {name}: run `make setup`"))?;
    if !output.status.success() {
        bail!("{name} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
