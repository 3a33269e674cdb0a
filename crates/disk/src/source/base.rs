//! A disk's base, opened: perhaps a snapshot of another disk, which may have a base of its own.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::identity::Identity;
use super::local_copy::LOOK_AGAIN_INTERVAL;
use super::{
    BaseSpecification, LocalCopy, LocalCopyOptions, NbdClient, NbdClientOptions, RawFile, Remembered, Source,
    SourceError,
};
use crate::engine::Elsewhere;
use crate::format::header::Header;
use crate::format::recent::Boot;
use crate::format::{DATA, SnapshotRecord, load};
use crate::lease::SnapshotLock;
use crate::map::Roots;
use crate::storage::Folder;
use crate::{DiskError, Snapshot, View};

/// How often a disk is read again that its owner changes at the same time.
const READINGS_MAX: usize = 100;

/// Records in the disk's directory which raw image or snapshot becomes its base, so that another one in its place is
/// noticed. For an export there is nothing to record: its server says what it is. Called when a disk is made.
///
/// # Errors
/// The base is not there, or the record cannot be written.
pub fn pin(specification: &BaseSpecification, directory: &Path) -> Result<(), SourceError> {
    match specification {
        BaseSpecification::Raw { path } => Identity::of_image(&directory.join(path))?.record(directory),
        BaseSpecification::Disk { directory: other, snapshot } => {
            let other = directory.join(other);
            let (uuid, snapshot) = View::which(&other, snapshot).map_err(SourceError::file(&other))?;
            Identity::of_snapshot(&uuid, &snapshot).record(directory)
        }
        BaseSpecification::Nbd { .. } => Ok(()),
    }
}

/// Opens what a disk's header names as its base, for the holder of the disk. `directory` is the disk's; with `copy` the
/// source is copied there, on demand and, once its limit was set ([`Source::set_hydration_limit`]), in the background;
/// a copy that is whole already needs the source no more.
///
/// # Errors
/// The base is not there, is none, or is not the one that it was.
pub fn open(specification: &BaseSpecification, directory: &Path, copy: bool) -> Result<Arc<dyn Source>, SourceError> {
    if copy {
        let remote =
            |remembered: Option<&Remembered>| original(specification, directory, remembered, ReadPolicy::default());
        // The background begins when it is told its limit: before that it could be faster than it may.
        let held = LocalCopyOptions { limit_bytes_per_second: Some(0), ..LocalCopyOptions::default() };
        return Ok(Arc::new(LocalCopy::open(directory, remote, held)?));
    }
    original(specification, directory, None, ReadPolicy::default())
}

/// How the disk of somebody else is read.
#[derive(Debug, Clone, Copy, Default)]
struct ReadPolicy {
    /// A read waits so long for a base that is away; none is for ever.
    patience: Option<Duration>,
    /// No base is another server's export, or a device of this machine: its header may be another machine's.
    only_files: bool,
}

/// Opens the base of a disk that somebody else may hold: nothing is written, and what is not in the holder's copy, now
/// or later, comes from the source.
///
/// # Errors
/// As [`open`].
fn open_beside(
    specification: &BaseSpecification,
    directory: &Path,
    copy: bool,
    policy: ReadPolicy,
) -> Result<Arc<dyn Source>, SourceError> {
    if copy {
        let again = ReadPolicy { patience: Some(LOOK_AGAIN_INTERVAL), ..policy };
        let remote = |remembered: Option<&Remembered>| original(specification, directory, remembered, again);
        if let Some(begun) = LocalCopy::open_beside(directory, remote, policy.patience)? {
            return Ok(Arc::new(begun));
        }
    }
    original(specification, directory, None, policy)
}

/// The base itself. When a copy remembers it, a server that cannot be reached now is waited for later.
fn original(
    specification: &BaseSpecification,
    directory: &Path,
    remembered: Option<&Remembered>,
    policy: ReadPolicy,
) -> Result<Arc<dyn Source>, SourceError> {
    match specification {
        BaseSpecification::Raw { path } => {
            let path = directory.join(path);
            Identity::of_image(&path)?.check(&path.display().to_string(), directory)?;
            let file = RawFile::open(&path)?;
            if policy.only_files && !file.metadata().map_err(SourceError::file(&path))?.is_file() {
                return Err(SourceError::new(path.display().to_string(), "it is a device, and only files are read"));
            }
            Ok(Arc::new(file))
        }
        BaseSpecification::Disk { directory: other, snapshot } => {
            let other = directory.join(other);
            let (view, uuid, found) = View::open_known(&other, snapshot, policy).map_err(SourceError::file(&other))?;
            // Only now the snapshot stays: one that is looked at before could be replaced until it is opened.
            let place = format!("{}@{snapshot}", other.display());
            Identity::of_snapshot(&uuid, &found).check(&place, directory)?;
            Ok(Arc::new(view))
        }
        BaseSpecification::Nbd { url, .. } if policy.only_files => {
            Err(SourceError::new(url.clone(), "it is another server's export, and only files are read"))
        }
        BaseSpecification::Nbd { url, tls } => {
            let options =
                NbdClientOptions { tls: tls.clone(), source_timeout: policy.patience, ..NbdClientOptions::default() };
            let client = match remembered {
                Some(remembered) => NbdClient::resume(url, options, remembered)?,
                None => NbdClient::connect(url, options)?,
            };
            Ok(Arc::new(client))
        }
    }
}

impl View {
    /// Reads a snapshot of a disk that somebody else may have open. It cannot be deleted meanwhile.
    ///
    /// # Errors
    /// There is no such disk or snapshot, or its base cannot be opened.
    pub fn open(directory: &Path, snapshot: &str) -> Result<View, DiskError> {
        View::open_known(directory, snapshot, ReadPolicy::default()).map(|(view, _, _)| view)
    }

    /// The same of a disk that another machine has made: no base of it may be another server's export, or a device.
    ///
    /// # Errors
    /// As [`View::open`].
    pub fn open_of_files(directory: &Path, snapshot: &str) -> Result<View, DiskError> {
        let policy = ReadPolicy { only_files: true, ..ReadPolicy::default() };
        View::open_known(directory, snapshot, policy).map(|(view, _, _)| view)
    }

    /// The same, with the disk's uuid and what is known of the snapshot.
    fn open_known(directory: &Path, snapshot: &str, policy: ReadPolicy) -> Result<(View, String, Snapshot), DiskError> {
        let (header, folder) = (Header::read(directory)?, Folder::open(directory)?);
        let number = find(&folder, &header, snapshot)?.0.number;
        let lock = SnapshotLock::shared(directory, snapshot, number)?;
        // Only now nobody deletes it: it must still be there.
        let (found, roots) = find(&folder, &header, snapshot)?;
        if found.number != number {
            return Err(DiskError::SnapshotInUse { name: snapshot.to_owned() });
        }
        let open = |base| open_beside(base, directory, header.copy_base, policy);
        let base = header.base.as_ref().map(open).transpose()?;
        let view = View::elsewhere(Elsewhere {
            directory: directory.to_owned(),
            size_bytes: header.size_bytes,
            data: folder.open_file(DATA, false)?,
            base,
            roots,
            _lock: lock,
        });
        Ok((view, header.uuid, found.snapshot))
    }

    /// The disk's uuid and what is known of the snapshot, without opening it.
    pub(crate) fn which(directory: &Path, snapshot: &str) -> Result<(String, Snapshot), DiskError> {
        let (header, folder) = (Header::read(directory)?, Folder::open(directory)?);
        let (found, _) = find(&folder, &header, snapshot)?;
        Ok((header.uuid, found.snapshot))
    }
}

/// Whether it is nothing that an owner does meanwhile: what is there is no file of a disk.
fn is_refused(error: &DiskError) -> bool {
    use ErrorKind::{FileTooLarge, InvalidData};
    matches!(error, DiskError::Io { source, .. } if matches!(source.kind(), InvalidData | FileTooLarge))
}

/// A snapshot's record and map. Its owner may replace the files meanwhile: then they are read again.
fn find(folder: &Folder, header: &Header, name: &str) -> Result<(SnapshotRecord, Roots), DiskError> {
    let mut readings = 1..READINGS_MAX;
    let loaded = loop {
        match load::load(folder, header, Boot::default()) {
            Ok(loaded) => break loaded,
            Err(error) if is_refused(&error) || readings.next().is_none() => return Err(error),
            Err(_) => std::thread::yield_now(),
        }
    };
    let found = loaded.snapshots.into_iter().find(|(record, _)| record.snapshot.name == name);
    found.ok_or_else(|| DiskError::UnknownSnapshot { name: name.to_owned() })
}
