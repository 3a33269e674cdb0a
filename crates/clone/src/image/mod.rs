//! What a data directory holds at the freeze: directories, files with their sizes, the content of small files,
//! tablespaces.

mod entry;
mod identity;
mod scan;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub(crate) use entry::{Treatment, is_needed, treatment};
pub(crate) use scan::check_whole;
pub use scan::{SMALL_FILES_BYTES_MAX, Scan};

/// A file of an [`Image`]: its place in [`Image::files`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileNumber(pub u32);

/// Which file it is, whatever its name: the same after a rename, another one after it was removed and made again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Device, as statx(2) gives it: major and minor in one number.
    pub device: u64,
    /// Inode.
    pub inode: u64,
    /// When it was made, in nanoseconds since 1970; 0 where the file system does not tell.
    pub born_nanoseconds: i64,
}

/// A file that is filled on demand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Its path from the data directory; that of a tablespace's file goes through `pg_tblspc/<oid>/`.
    pub path: PathBuf,
    /// Its size at the freeze.
    pub size_bytes: u64,
    /// Its permission bits.
    pub mode: u32,
    /// Which file it is on the source.
    pub identity: FileIdentity,
}

/// A file that is copied at the freeze: PostgreSQL replaces it as a whole, or it is tiny.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmallFile {
    /// Its path from the data directory.
    pub path: PathBuf,
    /// Its permission bits.
    pub mode: u32,
    /// All of it.
    pub content: Vec<u8>,
}

/// A file that is to be copied at the freeze, as it was listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SmallEntry {
    /// Its path from the data directory.
    pub path: PathBuf,
    /// Its permission bits.
    pub mode: u32,
    /// Its size when it was listed.
    pub size_bytes: u64,
}

/// A directory, without those above it left out: parents come first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDirectory {
    /// Its path from the data directory.
    pub path: PathBuf,
    /// Its permission bits.
    pub mode: u32,
}

/// A tablespace outside the data directory: `pg_tblspc/<oid>` is a link to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tablespace {
    /// Its object identifier, the link's name.
    pub oid: u32,
    /// Where it lies on the source.
    pub location: PathBuf,
}

/// What a data directory holds.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Image {
    /// Directories that a clone must have, parents first; `pg_tblspc/<oid>` of a tablespace elsewhere is not among
    /// them, those inside it are.
    pub directories: Vec<ImageDirectory>,
    /// Files that are filled on demand.
    pub files: Vec<ImageFile>,
    /// Tablespaces elsewhere.
    pub tablespaces: Vec<Tablespace>,
}
