//! What this host knows of the disk of a machine whose copy comes: the disk that it had here before it went to the host
//! that it comes from, or else the image that it was made from.

use onecopy_disk::Source;
use onecopy_disk::source::RawFile;
use onecopy_postgres::ServiceUser;

use super::shared_disk::serve;
use super::words;
use crate::snapshot_server::ServedSnapshot;
use crate::{GuestImage, MachineHome, SnapshotServer};

/// Either of them.
pub(super) struct FormerDisk {
    pub(super) source: Box<dyn Source>,
    /// Killed when dropped.
    _server: Option<SnapshotServer>,
}

impl FormerDisk {
    /// None: nothing of it is to be had. In a thread that blocks.
    pub(super) fn of(home: &MachineHome, user: &ServiceUser) -> Option<FormerDisk> {
        if home.has_former_disk() {
            let disk = home.disk();
            // By a process of the account that its files belong to.
            match serve(home, user, "former-disk.sock", ServedSnapshot { disk: &disk, name: None, only_beneath: None })
            {
                Ok((source, server)) => return Some(FormerDisk { source: Box::new(source), _server: Some(server) }),
                Err(reason) => tracing::info!(reason, "the disk that the machine had here is not read"),
            }
        }
        let image = GuestImage::find(Some(&home.image())).map_err(words);
        let opened = image.and_then(|image| RawFile::open(&image.root()).map_err(words));
        let opened = opened.inspect_err(|reason| tracing::info!(reason, "the image is not read")).ok()?;
        Some(FormerDisk { source: Box::new(opened), _server: None })
    }
}
