//! The file `header`: what a disk is. Written once, whole, when the disk is made.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::VERSION;
use crate::error::Found;
use crate::source::BaseSpecification;
use crate::{BLOCK_BYTES, DiskError, Geometry, storage};

/// The file's name.
pub(crate) const NAME: &str = "header";

/// The largest disk: places are numbers of 32 bits, and half of them are for what snapshots keep.
pub(crate) const SIZE_BYTES_MAX: u64 = 8 << 40;

/// Longest header that is read.
const HEADER_BYTES_MAX: u64 = 64 << 10;

/// What a disk is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    pub(crate) version: u32,
    /// 32 hexadecimal digits.
    pub(crate) uuid: String,
    pub(crate) size_bytes: u64,
    /// Seed of content hashes, 16 hexadecimal digits: TOML's integers have a sign.
    pub(crate) hash_seed: String,
    pub(crate) copy_base: bool,
    pub(crate) base: Option<BaseSpecification>,
}

impl Header {
    pub(crate) fn new(size_bytes: u64, base: Option<BaseSpecification>, copy_base: bool) -> Result<Header, DiskError> {
        if !is_size(size_bytes) {
            return Err(DiskError::Size { size_bytes });
        }
        Ok(Header {
            version: VERSION,
            uuid: format!("{:032x}", rand::random::<u128>()),
            size_bytes,
            hash_seed: format!("{:016x}", rand::random::<u64>()),
            copy_base,
            base,
        })
    }

    pub(crate) fn to_text(&self) -> String {
        toml::to_string(self).expect("a header has only numbers, texts and a flat table")
    }

    /// Reads and checks the header of a directory.
    pub(crate) fn read(directory: &Path) -> Result<Header, DiskError> {
        let path = directory.join(NAME);
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => no_disk(directory),
            _ => DiskError::io("read", &path, error),
        };
        let text = storage::read_whole(&path, HEADER_BYTES_MAX).map_err(failed)?;
        Header::parse(&text).map_err(|what| DiskError::format(&path, what))
    }

    pub(crate) fn parse(text: &[u8]) -> Result<Header, String> {
        /// Only the version: so that another one is told as such, whatever else changed.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let text = std::str::from_utf8(text).map_err(|error| error.to_string())?;
        let Versioned { version } = toml::from_str(text).map_err(|error| error.to_string())?;
        if version != VERSION {
            return Err(format!("format {version}; this program knows format {VERSION}"));
        }
        let header: Header = toml::from_str(text).map_err(|error| error.to_string())?;
        if !is_size(header.size_bytes) {
            return Err(DiskError::Size { size_bytes: header.size_bytes }.to_string());
        }
        hexadecimal(&header.uuid, 32)?;
        hexadecimal(&header.hash_seed, 16)?;
        Ok(header)
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.size_bytes / BLOCK_BYTES
    }

    pub(crate) fn seed(&self) -> u64 {
        u64::from_str_radix(&self.hash_seed, 16).expect("checked when the header was read or made")
    }

    /// The disk's identity as a seed: a file of another disk does not pass for one of this.
    pub(crate) fn identity(&self) -> u64 {
        xxhash_rust::xxh3::xxh3_64(self.uuid.as_bytes())
    }

    pub(crate) fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.size_bytes,
            uuid: self.uuid.clone(),
            format_version: self.version,
            base: self.base.clone(),
            copy_base: self.copy_base,
        }
    }
}

/// The error for a place without a header.
fn no_disk(directory: &Path) -> DiskError {
    let found = match std::fs::metadata(directory) {
        Ok(metadata) if metadata.is_dir() => Found::Directory,
        Ok(_) => Found::File,
        Err(_) => Found::Nothing,
    };
    DiskError::NoDisk { directory: directory.to_owned(), found }
}

fn is_size(size_bytes: u64) -> bool {
    size_bytes > 0 && size_bytes <= SIZE_BYTES_MAX && size_bytes.is_multiple_of(BLOCK_BYTES)
}

fn hexadecimal(text: &str, digits: usize) -> Result<(), String> {
    if text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    Err(format!("{text:?} is not {digits} hexadecimal digits"))
}

/// Refuses the size that a source tells of itself when no disk can have it: maps and buffers are made after it.
pub(crate) fn check_size(size_bytes: u64) -> Result<(), String> {
    if size_bytes <= SIZE_BYTES_MAX {
        return Ok(());
    }
    Err(format!("it has {size_bytes} bytes, and a disk has 8 TiB at most"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_header_comes_back_and_another_version_is_told() {
        let base = BaseSpecification::Disk { directory: "../base".into(), snapshot: "one".into() };
        let header = Header::new(1 << 30, Some(base), true).unwrap();
        assert_eq!(Header::parse(header.to_text().as_bytes()), Ok(header.clone()));
        let other = header.to_text().replace("version = 1", "version = 9\nunknown = true");
        assert_eq!(Header::parse(other.as_bytes()), Err("format 9; this program knows format 1".to_owned()));
        for size_bytes in [0, 4097, SIZE_BYTES_MAX + BLOCK_BYTES, u64::MAX] {
            assert!(Header::new(size_bytes, None, false).is_err());
            let text = header.to_text().replace("1073741824", &size_bytes.to_string());
            assert!(Header::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    proptest! {
        /// Spec: C6
        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Header::parse(&bytes);
        }
    }
}
