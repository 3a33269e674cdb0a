//! A disk that nobody serves, opened for one piece of work.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use onecopy_disk::{Disk, DiskError, OpenOptions};

use crate::{DiskClient, DiskServerError, ObservedPages};

/// How long to wait for another holder: a server that is about to end, or a command as short as this one.
const LEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// A command that is soon over begins no copy of a base.
const NO_COPY: u64 = 0;

/// The server of a disk, if it is served.
///
/// # Errors
/// The control socket is there and cannot be used.
pub fn served(directory: &Path) -> Result<Option<DiskClient>, DiskServerError> {
    match DiskClient::connect(directory) {
        Ok(client) => Ok(Some(client)),
        Err(DiskServerError::NotServed { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens a disk with its page map, so that opening it does not make the next server build that again. A base is copied
/// only as far as it is read, until [`Disk::set_hydration_limit`] says otherwise. Close it when done.
///
/// # Errors
/// There is no disk, or another process has it.
pub fn open_at_rest(directory: &Path) -> Result<Disk, DiskServerError> {
    let observer: Arc<dyn onecopy_disk::Observer> = Arc::new(ObservedPages::default());
    let options = OpenOptions {
        observer: Some(observer),
        lease_timeout: LEASE_TIMEOUT,
        hydration_limit: Some(NO_COPY),
        ..OpenOptions::default()
    };
    Disk::open(directory, options).map_err(DiskServerError::disk(directory))
}

/// Opens a disk, does something with it, and closes it.
///
/// # Errors
/// As [`open_at_rest`], and what the work meets.
pub fn at_rest<T>(directory: &Path, work: impl FnOnce(&Disk) -> Result<T, DiskError>) -> Result<T, DiskServerError> {
    let disk = open_at_rest(directory)?;
    let outcome = work(&disk);
    disk.close().map_err(DiskServerError::disk(directory))?;
    outcome.map_err(DiskServerError::disk(directory))
}
