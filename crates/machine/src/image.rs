//! Guest images: what a machine boots, and what its disk begins with.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::MachineError;

/// The variable that names the directory of images.
pub const IMAGES_VARIABLE: &str = "ONECOPY_GUEST_DIRECTORY";

/// The directory of images when nobody names one.
const IMAGES_DEFAULT: &str = "/var/cache/onecopy/guest";

/// The image when nobody names one: the newest PostgreSQL that images are built with.
const IMAGE_DEFAULT: &str = "postgresql-17";

/// What an image consists of.
const FILES: [&str; 4] = ["vmlinuz", "initrd", "root.img", "manifest.toml"];

/// What is copied at a time.
const COPY_BYTES: usize = 1 << 20;

/// The longest manifest that is read.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// A guest image that is whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestImage {
    /// Its directory, absolute.
    pub directory: PathBuf,
    /// Major version of its PostgreSQL; none where it has none.
    pub postgresql_major: Option<u32>,
    /// Size of its root file system.
    pub root_bytes: u64,
}

/// What we read of `manifest.toml`; the rest of it is for people.
#[derive(Debug, Default, Deserialize)]
struct Manifest {
    #[serde(default)]
    postgresql: Option<toml::Value>,
}

impl GuestImage {
    /// The image in `directory`, or the default one.
    ///
    /// # Errors
    /// [`MachineError::NoImage`] with what is not there.
    pub fn find(directory: Option<&Path>) -> Result<GuestImage, MachineError> {
        let directory = directory.map_or_else(default_directory, Path::to_owned);
        // Names of images are links, to another one after each build.
        let directory =
            std::fs::canonicalize(&directory).or_else(|_| std::path::absolute(&directory)).unwrap_or(directory);
        let missing = |reason: String| MachineError::NoImage { directory: directory.clone(), reason };
        let size = |name: &str| match std::fs::metadata(directory.join(name)) {
            Ok(metadata) if metadata.is_file() => Ok(metadata.len()),
            Ok(_) => Err(missing(format!("{name} is no file"))),
            Err(error) => Err(missing(format!("{name}: {error}"))),
        };
        size("vmlinuz")?;
        size("initrd")?;
        let root_bytes = size("root.img")?;
        if size("manifest.toml")? > MANIFEST_BYTES_MAX {
            return Err(missing("manifest.toml is too long to be one".to_owned()));
        }
        let text = std::fs::read_to_string(directory.join("manifest.toml"))
            .map_err(|error| missing(format!("manifest.toml: {error}")))?;
        let manifest: Manifest = toml::from_str(&text).map_err(|error| missing(format!("manifest.toml: {error}")))?;
        let postgresql_major = manifest.postgresql.as_ref().and_then(major);
        Ok(GuestImage { directory, postgresql_major, root_bytes })
    }

    /// Links the image's files into `directory`, or copies them where that lies on another file system: images are
    /// replaced when they are built anew, and what a machine was made from must stay.
    ///
    /// # Errors
    /// [`MachineError::Directory`].
    pub fn bring_to(&self, directory: &Path) -> Result<(), MachineError> {
        for name in FILES {
            let (from, to) = (self.directory.join(name), directory.join(name));
            if std::fs::hard_link(&from, &to).is_err() {
                copy_sparsely(&from, &to).map_err(MachineError::file("copy the guest image to", &to))?;
            }
        }
        Ok(())
    }

    /// SHA-256 of kernel and first file system: what a machine boots with, whichever disk it has.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn boot_digest(&self) -> std::io::Result<String> {
        let mut digest = Sha256::new();
        for path in [self.kernel(), self.initrd()] {
            let content = std::fs::read(path)?;
            digest.update((content.len() as u64).to_le_bytes());
            digest.update(&content);
        }
        Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The image of this host whose machines boot with this.
    ///
    /// # Errors
    /// [`MachineError::NoImage`].
    pub fn with_boot_digest(wanted: &str) -> Result<GuestImage, MachineError> {
        let directory = default_directory();
        let images = directory.parent().unwrap_or(Path::new("/"));
        let entries = std::fs::read_dir(images).into_iter().flatten().flatten();
        let found = entries.filter_map(|entry| GuestImage::find(Some(&entry.path())).ok());
        let mut found = found.filter(|image| image.boot_digest().is_ok_and(|digest| digest == wanted));
        found.next().ok_or_else(|| MachineError::NoImage {
            directory: images.to_owned(),
            reason: format!("none of its images has the kernel of the machine ({wanted}); bring that image here"),
        })
    }

    /// The kernel.
    pub fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// The first file system, which finds the disk.
    pub fn initrd(&self) -> PathBuf {
        self.directory.join("initrd")
    }

    /// The root file system.
    pub fn root(&self) -> PathBuf {
        self.directory.join("root.img")
    }
}

/// Copies what a file has, and leaves its holes.
fn copy_sparsely(from: &Path, to: &Path) -> std::io::Result<()> {
    use rustix::fs::SeekFrom;
    let (source, target) = (File::open(from)?, File::create(to)?);
    let length = source.metadata()?.len();
    target.set_len(length)?;
    let mut buffer = vec![0; COPY_BYTES];
    let mut position = 0;
    while position < length {
        let begin = match rustix::fs::seek(&source, SeekFrom::Data(position)) {
            // Behind the last data.
            Err(rustix::io::Errno::NXIO) => break,
            begin => begin?,
        };
        let end = rustix::fs::seek(&source, SeekFrom::Hole(begin))?;
        position = begin;
        while position < end {
            let wanted = usize::try_from(end - position).unwrap_or(COPY_BYTES).min(COPY_BYTES);
            let read = source.read_at(&mut buffer[..wanted], position)?;
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            target.write_all_at(&buffer[..read], position)?;
            position += read as u64;
        }
    }
    target.sync_all()
}

fn default_directory() -> PathBuf {
    let named = std::env::var_os(IMAGES_VARIABLE).filter(|value| !value.is_empty());
    named.map_or_else(|| PathBuf::from(IMAGES_DEFAULT), PathBuf::from).join(IMAGE_DEFAULT)
}

/// A major version, written as a number or as text that begins with it.
fn major(value: &toml::Value) -> Option<u32> {
    match value {
        toml::Value::Integer(number) => u32::try_from(*number).ok(),
        toml::Value::String(text) => text.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_the_same_holes() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        for (at, text) in [(5 << 20, "one"), ((40 << 20) - 1, "two")] {
            file.write_all_at(text.as_bytes(), at).unwrap();
        }
        copy_sparsely(&from, &to).unwrap();
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        assert!(std::fs::metadata(&to).unwrap().blocks() * 512 < 8 << 20);
    }

    #[test]
    fn an_image_is_whole_or_what_it_lacks_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let mut lacking = Vec::new();
        for (name, content) in
            [("vmlinuz", "k"), ("initrd", "i"), ("root.img", "1234"), ("manifest.toml", "postgresql = \"17.6\"\n")]
        {
            let error = GuestImage::find(Some(directory.path())).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("build-image.sh"), "{error}");
            lacking.push(name);
            std::fs::write(directory.path().join(name), content).unwrap();
        }
        let image = GuestImage::find(Some(directory.path())).unwrap();
        assert_eq!((image.postgresql_major, image.root_bytes, lacking.len()), (Some(17), 4, 4));
        let copy = tempfile::tempdir().unwrap();
        image.bring_to(copy.path()).unwrap();
        assert_eq!(GuestImage::find(Some(copy.path())).unwrap().root_bytes, 4);
        std::fs::write(directory.path().join("manifest.toml"), "postgresql = [").unwrap();
        assert!(GuestImage::find(Some(directory.path())).is_err());
    }
}
