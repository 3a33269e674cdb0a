//! What is taken of what another host says an image holds.
//!
//! This host is root, the other one need not mean well. So a name must be one that a scan of a data directory here
//! would list: not of a file by which we know a clone, not one that decides whether and how a server starts, nothing
//! outside. Configuration comes empty: whoever starts the server writes it. What is inside relations is the source's to
//! say.

use std::collections::HashSet;
use std::fmt::Debug;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use onecopy_postgres::ControlFile;

use super::super::protocol::ProtocolError;
use super::Opening;
use crate::image::{Image, Treatment, is_needed, treatment};
use crate::recovery::{Mode, RecoveryPoint};
use crate::target::{DIRECTORIES_NEEDED, TABLESPACES_DIRECTORY};

/// Directories, files and tablespaces of a source, at most: as many files as 2 PB of relations have, each of 1 GiB.
pub(super) const ENTRIES_MAX: usize = 2_000_000;
/// The largest file: of ext4 with blocks of 4 KiB. PostgreSQL's are of 1 GiB.
const FILE_BYTES_MAX: u64 = 1 << 44;
/// All files together: a bitmap of their chunks has 2 GiB.
const IMAGE_BYTES_MAX: u64 = 1 << 47;
/// The longest path from the data directory; the kernel takes 4096 bytes (PATH_MAX) with what stands before it.
const PATH_BYTES_MAX: usize = 2048;
/// The longest name (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;
/// Object identifiers below are PostgreSQL's own (`FirstNormalObjectId`, `src/include/access/transam.h`).
const TABLESPACE_OID_MIN: u32 = 16_384;
/// `PG_CONTROL_FILE_SIZE`.
const CONTROL_BYTES: usize = 8192;
/// The longest history of a timeline: some ten thousand promotions.
const HISTORY_BYTES_MAX: usize = 1 << 20;
/// The longest `backup_label`: PostgreSQL's own is of ten lines.
const LABEL_BYTES_MAX: usize = 16 << 10;
/// Rights that an entry may have on its host; the bit beside them is that of directories whose entries get their group.
const FILE_RIGHTS: u32 = 0o777;
const DIRECTORY_RIGHTS: u32 = 0o2777;
/// Rights that an entry has here: those that PostgreSQL gives with group access, and at least those without.
const FILE_RIGHTS_KEPT: (u32, u32) = (0o600, 0o640);
const DIRECTORY_RIGHTS_KEPT: (u32, u32) = (0o700, 0o750);
/// Whose content is that of the server's host, not of its data.
const CONFIGURATION_FILES: [&str; 4] = ["postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf"];

/// Checks all of it, and takes from it what is not the other host's to say: rights that PostgreSQL would not give,
/// configuration.
///
/// # Errors
/// [`ProtocolError::NotTaken`] names the field.
pub(super) fn take(opening: &mut Opening) -> Result<(), ProtocolError> {
    let recovery = &opening.manifest.recovery;
    check_recovery(recovery)?;
    check_image(opening, &recovery.major_version.to_string())?;
    let keep = |mode: &mut u32, (least, most): (u32, u32)| *mode = *mode & most | least;
    let image = &mut opening.manifest.image;
    image.files.iter_mut().for_each(|file| keep(&mut file.mode, FILE_RIGHTS_KEPT));
    image.directories.iter_mut().for_each(|directory| keep(&mut directory.mode, DIRECTORY_RIGHTS_KEPT));
    for file in &mut opening.small_files {
        keep(&mut file.mode, FILE_RIGHTS_KEPT);
        if CONFIGURATION_FILES.iter().any(|name| file.path == Path::new(name)) {
            file.content = Vec::new();
        }
    }
    Ok(())
}

fn check_recovery(recovery: &RecoveryPoint) -> Result<(), ProtocolError> {
    if recovery.control.len() != CONTROL_BYTES {
        let length = recovery.control.len();
        return Err(ProtocolError::not_taken("pg_control", length, format!("it has {CONTROL_BYTES} bytes")));
    }
    let control = ControlFile::parse(&recovery.control)
        .map_err(|error| ProtocolError::not_taken("pg_control", "of the source", error.to_string()))?;
    if control.major_version != recovery.major_version {
        let reason = format!("its pg_control is of PostgreSQL {}", control.major_version);
        return Err(ProtocolError::not_taken("major_version", recovery.major_version, reason));
    }
    if recovery.timeline == 0 {
        return Err(ProtocolError::not_taken("timeline", 0, "the first one is 1"));
    }
    if let Some(history) = &recovery.history
        && (recovery.timeline == 1 || history.len() > HISTORY_BYTES_MAX)
    {
        let reason = format!("timeline {} has none of so many bytes", recovery.timeline);
        return Err(ProtocolError::not_taken("history", history.len(), reason));
    }
    match (&recovery.backup_label, recovery.mode) {
        (None, Mode::Crash) => Ok(()),
        (Some(label), Mode::Backup) if label.len() <= LABEL_BYTES_MAX && !label.contains('\0') => Ok(()),
        (label, mode) => {
            let reason = format!("an image by {mode:?} has another one, or none").to_lowercase();
            Err(ProtocolError::not_taken("backup_label", label.as_deref().unwrap_or_default(), reason))
        }
    }
}

fn check_image(opening: &Opening, major_version: &str) -> Result<(), ProtocolError> {
    let Image { directories, files, tablespaces } = &opening.manifest.image;
    let entries = directories.len() + files.len() + tablespaces.len() + opening.small_files.len();
    if entries > ENTRIES_MAX {
        return Err(ProtocolError::not_taken("count", entries, format!("at most {ENTRIES_MAX} entries are")));
    }
    // All names, and those of them that are directories: what lies above comes first.
    let mut known = Known::default();
    for tablespace in tablespaces {
        let oid = tablespace.oid;
        let is_new = known.add_directory(Path::new(TABLESPACES_DIRECTORY).join(oid.to_string()));
        if oid < TABLESPACE_OID_MIN || !is_new {
            return Err(ProtocolError::not_taken("tablespace", oid, "it is PostgreSQL's own, or there twice"));
        }
    }
    for directory in directories {
        let path = &directory.path;
        check_name("directory name", path, is_needed(path, major_version))?;
        if !known.is_reachable(path) || !known.add_directory(path.clone()) {
            return Err(ProtocolError::not_taken("directory name", path, NOT_THE_ONLY));
        }
        check_mode(directory.mode, DIRECTORY_RIGHTS)?;
    }
    let mut total_bytes = 0_u64;
    for file in files {
        check_file(&mut known, &file.path, treatment(&file.path, major_version) == Treatment::Fill)?;
        check_mode(file.mode, FILE_RIGHTS)?;
        if file.size_bytes > FILE_BYTES_MAX {
            return Err(ProtocolError::not_taken(
                "size",
                file.size_bytes,
                format!("at most {FILE_BYTES_MAX} bytes are"),
            ));
        }
        total_bytes += file.size_bytes;
        if total_bytes > IMAGE_BYTES_MAX {
            let reason = format!("all files together have at most {IMAGE_BYTES_MAX} bytes");
            return Err(ProtocolError::not_taken("size", total_bytes, reason));
        }
    }
    for file in &opening.small_files {
        check_file(&mut known, &file.path, treatment(&file.path, major_version) == Treatment::Copy)?;
        check_mode(file.mode, FILE_RIGHTS)?;
    }
    Ok(())
}

const NOT_THE_ONLY: &str = "it is there twice, or in what is no directory of the image";

/// Names that came.
#[derive(Default)]
struct Known {
    directories: HashSet<PathBuf>,
    files: HashSet<PathBuf>,
}

impl Known {
    /// False when the name is there already.
    fn add_directory(&mut self, path: PathBuf) -> bool {
        !self.files.contains(&path) && self.directories.insert(path)
    }

    fn add_file(&mut self, path: PathBuf) -> bool {
        !self.directories.contains(&path) && !is_made(&path) && self.files.insert(path)
    }

    /// Whether what lies above is a directory.
    fn is_reachable(&self, path: &Path) -> bool {
        path.parent()
            .is_some_and(|above| above.as_os_str().is_empty() || is_made(above) || self.directories.contains(above))
    }
}

/// Whether a clone has this directory whatever its image holds.
fn is_made(path: &Path) -> bool {
    DIRECTORIES_NEEDED.iter().any(|made| path == Path::new(made))
}

fn check_file(known: &mut Known, path: &Path, is_listed: bool) -> Result<(), ProtocolError> {
    check_name("file name", path, is_listed)?;
    if known.is_reachable(path) && known.add_file(path.to_owned()) {
        Ok(())
    } else {
        Err(ProtocolError::not_taken("file name", path, NOT_THE_ONLY))
    }
}

/// A name is written as the kernel reads it, one way only.
fn check_name(field: &'static str, path: &Path, is_listed: bool) -> Result<(), ProtocolError> {
    let bytes = path.as_os_str().as_bytes();
    let is_plain = |part: Component<'_>| matches!(part, Component::Normal(name) if name.len() <= NAME_BYTES_MAX);
    let is_inside = !bytes.is_empty() && path.components().all(is_plain);
    let plain: PathBuf = path.components().collect();
    if !is_inside || bytes.len() > PATH_BYTES_MAX || bytes.contains(&0) || plain.as_os_str() != path.as_os_str() {
        return Err(ProtocolError::not_taken(field, path, "it is no name below the data directory"));
    }
    match is_listed {
        true => Ok(()),
        false => Err(ProtocolError::not_taken(field, path, "an image has none of that name there")),
    }
}

fn check_mode(mode: u32, rights: u32) -> Result<(), ProtocolError> {
    struct Octal(u32);
    impl Debug for Octal {
        fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(formatter, "{:#o}", self.0)
        }
    }
    match mode & !rights {
        0 => Ok(()),
        _ => Err(ProtocolError::not_taken("mode", Octal(mode), "it has more than read, write and execute")),
    }
}
