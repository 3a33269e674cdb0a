//! The built image's files, and disks for guests.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use onecopy_hypervisor::configuration::{AsynchronousIo, Boot, Disk, DiskBackend, FileFormat, KERNEL_ARGUMENTS};

/// The image that tests boot.
pub const IMAGE: &str = "postgresql-17";
/// Where images lie when `ONECOPY_GUEST_DIRECTORY` names no other place, as in `guest/build-image.sh`.
const IMAGES: &str = "/var/cache/onecopy/guest";
/// The root file system's name, in an image and in a guest's directory.
pub(super) const ROOT: &str = "root.img";

/// The built image's files.
#[derive(Debug, Clone)]
pub struct Image {
    directory: PathBuf,
}

impl Image {
    /// The image of that name, like [`IMAGE`]. It stays the same also when a newer one is built.
    ///
    /// # Errors
    ///
    /// When there is none; says how to get it.
    pub fn find(name: &str) -> anyhow::Result<Image> {
        let images = std::env::var_os("ONECOPY_GUEST_DIRECTORY").map_or_else(|| IMAGES.into(), PathBuf::from);
        let link = images.join(name);
        let directory = link.canonicalize().with_context(|| format!("no image {}: run make guest", link.display()))?;
        Ok(Image { directory })
    }

    /// The root file system, not to be written to: [`Image::root_in`] gives one that may be.
    pub fn root(&self) -> PathBuf {
        self.directory.join(ROOT)
    }

    /// The description.
    pub fn manifest(&self) -> PathBuf {
        self.directory.join("manifest.toml")
    }

    /// Where guests lie that were saved after they had booted it; they go with the image.
    pub(super) fn saved(&self) -> PathBuf {
        self.directory.join("saved")
    }

    /// How it is booted, with further words for the guest's kernel.
    pub fn boot(&self, arguments: &str) -> Boot {
        Boot::Kernel {
            kernel: self.directory.join("vmlinuz"),
            initrd: Some(self.directory.join("initrd")),
            arguments: format!("{KERNEL_ARGUMENTS} root=/dev/vda quiet {arguments}"),
        }
    }

    /// A copy of the root file system of its own, on a disk of that size; `directory` gets it as `root.img`.
    ///
    /// # Errors
    ///
    /// When it cannot be copied.
    pub fn root_in(&self, directory: &Path, size_bytes: u64) -> anyhow::Result<PathBuf> {
        let copy = copy_root(&self.root(), directory)?;
        let file = std::fs::OpenOptions::new().write(true).open(&copy)?;
        file.set_len(size_bytes.max(file.metadata()?.len()))?;
        Ok(copy)
    }
}

/// Copies a root disk as `root.img`; blocks are shared where the file system can.
pub(super) fn copy_root(root: &Path, directory: &Path) -> anyhow::Result<PathBuf> {
    let copy = directory.join(ROOT);
    let copied = Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(root).arg(&copy).output()?;
    ensure!(copied.status.success(), "cp: {}", String::from_utf8_lossy(&copied.stderr));
    Ok(copy)
}

/// A raw file as a guest's disk.
pub fn file_disk(id: &str, path: PathBuf) -> Disk {
    let format = FileFormat::Raw;
    Disk::new(
        id,
        DiskBackend::File { path, format, read_only: false, direct: false, asynchronous_io: AsynchronousIo::Threads },
    )
}
