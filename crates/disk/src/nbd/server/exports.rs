//! What the server offers: names, and what is behind them.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::{At, Attachment, Disk, DiskError, Epoch, Snapshot, Source, View};

/// Snapshots of a disk are exported under this and their name.
const SNAPSHOT_PREFIX: &str = "snapshot/";

/// Ended epochs of an attached disk, which are not released, are exported under this and their number.
const EPOCH_PREFIX: &str = "epoch/";

/// What a client may know of an export before it opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInformation {
    /// Its size.
    pub size_bytes: u64,
    /// Whether it can be written to.
    pub is_read_only: bool,
    /// What it is. A text that changes when the content does lets a client see that it reads from the same thing as
    /// before.
    pub description: String,
}

/// What is read and written through an export.
#[derive(Clone)]
pub enum Content {
    /// A disk: read and written.
    Disk(Disk),
    /// Something that never changes: read.
    Source(Arc<dyn Source>),
}

/// An export in use by one connection.
pub struct Export {
    /// What is behind it.
    pub content: Content,
    /// Dropped when the connection has ended. Of one that was lost or cut off, reads and states that were begun may be
    /// in flight still: they have the content itself.
    pub hold: Option<Box<dyn Any + Send + Sync>>,
}

/// Says which exports there are. Asked by many connections at once.
pub trait Exports: Send + Sync {
    /// The names that a client is told.
    fn names(&self) -> Vec<String>;

    /// What an export is; none if there is no such export.
    fn information(&self, name: &str) -> Option<ExportInformation>;

    /// Opens an export for a connection.
    ///
    /// # Errors
    /// Why it cannot be had now; the client is told.
    fn open(&self, name: &str) -> Result<Export, DiskError>;
}

/// One disk as the export "", and, read only, its snapshots as "snapshot/NAME" and ends of epochs as "epoch/NUMBER",
/// which are not among the names that are told. The disk is attached while clients have it open.
pub struct DiskExports {
    attachment: Arc<Attachment>,
    /// Snapshots that clients read, by name: one view, and one connection to its base, for all of them. A view is not
    /// that of the attached disk, which may be given back while they read. It keeps its snapshot from being deleted, so
    /// the name means the same while it is there.
    views: Mutex<BTreeMap<String, Weak<View>>>,
}

impl DiskExports {
    /// Offers the disk of an attachment.
    pub fn new(attachment: Arc<Attachment>) -> DiskExports {
        DiskExports { attachment, views: Mutex::default() }
    }

    /// The disk at the end of an epoch, by its export's name without the prefix.
    fn epoch(&self, number: &str) -> Result<View, DiskError> {
        let epoch = number.parse().map_err(|_| DiskError::UnknownEpoch { epoch: 0 })?;
        let disk = self.attachment.current().ok_or(DiskError::UnknownEpoch { epoch })?;
        disk.view(&At::Epoch(Epoch(epoch)))
    }

    /// What is known of a snapshot.
    fn which(&self, name: &str) -> Result<Snapshot, DiskError> {
        match self.attachment.current() {
            Some(disk) => {
                let found = disk.snapshots().into_iter().find(|snapshot| snapshot.name == name);
                found.ok_or_else(|| DiskError::UnknownSnapshot { name: name.to_owned() })
            }
            None => View::which(self.attachment.directory(), name).map(|(_, snapshot)| snapshot),
        }
    }

    fn snapshot(&self, name: &str) -> Result<Arc<View>, DiskError> {
        // Held while the view is opened: whoever else wants it waits for this one.
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = views.get(name).and_then(Weak::upgrade) {
            return Ok(view);
        }
        views.retain(|_, view| view.strong_count() > 0);
        let view = Arc::new(View::open(self.attachment.directory(), name)?);
        views.insert(name.to_owned(), Arc::downgrade(&view));
        Ok(view)
    }
}

impl Exports for DiskExports {
    fn names(&self) -> Vec<String> {
        let snapshots = self.attachment.current().map(|disk| disk.snapshots()).unwrap_or_default();
        let snapshots = snapshots.into_iter().map(|snapshot| format!("{SNAPSHOT_PREFIX}{}", snapshot.name));
        std::iter::once(String::new()).chain(snapshots).collect()
    }

    fn information(&self, name: &str) -> Option<ExportInformation> {
        let geometry = self.attachment.geometry().ok()?;
        let size_bytes = geometry.size_bytes;
        if let Some(number) = name.strip_prefix(EPOCH_PREFIX) {
            self.epoch(number).ok()?;
            let description = format!("epoch {number} of disk {}", geometry.uuid);
            return Some(ExportInformation { size_bytes, is_read_only: true, description });
        }
        match name.strip_prefix(SNAPSHOT_PREFIX) {
            Some(name) => {
                let Snapshot { epoch, created_unix_ms, .. } = self.which(name).ok()?;
                // Another one of the same name has another epoch.
                let uuid = geometry.uuid;
                let description =
                    format!("snapshot {name} of disk {uuid}, epoch {}, taken at {created_unix_ms} ms", epoch.0);
                Some(ExportInformation { size_bytes, is_read_only: true, description })
            }
            None if name.is_empty() => {
                let description = format!("disk {}", geometry.uuid);
                Some(ExportInformation { size_bytes, is_read_only: false, description })
            }
            None => None,
        }
    }

    fn open(&self, name: &str) -> Result<Export, DiskError> {
        if let Some(number) = name.strip_prefix(EPOCH_PREFIX) {
            return Ok(Export { content: Content::Source(Arc::new(self.epoch(number)?)), hold: None });
        }
        match name.strip_prefix(SNAPSHOT_PREFIX) {
            Some(snapshot) => Ok(Export { content: Content::Source(self.snapshot(snapshot)?), hold: None }),
            None => {
                let disk = self.attachment.attach()?;
                let attached = Attached(Arc::clone(&self.attachment));
                Ok(Export { content: Content::Disk(disk), hold: Some(Box::new(attached)) })
            }
        }
    }
}

/// A connection's share in the attached disk.
struct Attached(Arc<Attachment>);

impl Drop for Attached {
    fn drop(&mut self) {
        if let Err(error) = self.0.detach() {
            tracing::error!(%error, "a disk was given back with a failure");
        }
    }
}

/// Sources by name, all read only.
#[derive(Default)]
pub struct SourceExports {
    sources: BTreeMap<String, Arc<dyn Source>>,
}

impl SourceExports {
    /// Offers these.
    pub fn new(sources: impl IntoIterator<Item = (String, Arc<dyn Source>)>) -> SourceExports {
        SourceExports { sources: sources.into_iter().collect() }
    }
}

impl Exports for SourceExports {
    fn names(&self) -> Vec<String> {
        self.sources.keys().cloned().collect()
    }

    fn information(&self, name: &str) -> Option<ExportInformation> {
        let source = self.sources.get(name)?;
        Some(ExportInformation { size_bytes: source.size_bytes(), is_read_only: true, description: source.describe() })
    }

    fn open(&self, name: &str) -> Result<Export, DiskError> {
        match self.sources.get(name) {
            Some(source) => Ok(Export { content: Content::Source(Arc::clone(source)), hold: None }),
            None => Err(DiskError::UnknownSnapshot { name: name.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateOptions, OpenOptions};

    /// Spec: C6
    #[test]
    fn b24_clients_of_a_snapshot_share_it_and_another_of_the_same_name_is_described_otherwise() {
        let home = tempfile::tempdir().unwrap();
        Disk::create(home.path(), &CreateOptions { size_bytes: 8192, base: None, copy_base: false }).unwrap();
        let attachment = Arc::new(Attachment::new(home.path(), OpenOptions::default));
        let exports = DiskExports::new(Arc::clone(&attachment));
        let taken = || {
            let disk = attachment.attach().unwrap();
            let _ = disk.delete_snapshot("one");
            disk.snapshot("one").unwrap();
            let while_attached = exports.information("snapshot/one").unwrap();
            attachment.detach().unwrap();
            let at_rest = exports.information("snapshot/one").unwrap();
            assert_eq!(while_attached, at_rest);
            at_rest.description
        };
        let first = taken();
        let views: Vec<Arc<dyn Source>> = (0..2)
            .map(|_| match exports.open("snapshot/one").unwrap().content {
                Content::Source(view) => view,
                Content::Disk(_) => panic!("a snapshot is read only"),
            })
            .collect();
        assert!(std::ptr::addr_eq(Arc::as_ptr(&views[0]), Arc::as_ptr(&views[1])));
        // Read by clients it stays; read by nobody it can be replaced.
        let disk = attachment.attach().unwrap();
        assert!(matches!(disk.delete_snapshot("one"), Err(DiskError::SnapshotInUse { .. })));
        attachment.detach().unwrap();
        drop(views);
        assert_ne!(taken(), first);
        assert!(exports.information("snapshot/other").is_none() && exports.open("snapshot/other").is_err());
    }

    /// Spec: C6
    #[test]
    fn an_ended_epoch_is_read_as_it_was_until_it_is_released() {
        let home = tempfile::tempdir().unwrap();
        Disk::create(home.path(), &CreateOptions { size_bytes: 8192, base: None, copy_base: false }).unwrap();
        let attachment = Arc::new(Attachment::new(home.path(), OpenOptions::default));
        let exports = DiskExports::new(Arc::clone(&attachment));
        assert!(exports.open("epoch/1").is_err(), "of a disk that nobody has no epoch is kept");
        let disk = attachment.attach().unwrap();
        disk.write(0, &[1; 4096], &[]).unwrap();
        let epoch = disk.cut().unwrap();
        disk.write(0, &[2; 4096], &[]).unwrap();
        let name = format!("epoch/{}", epoch.0);
        assert!(exports.information(&name).is_some_and(|export| export.is_read_only && export.size_bytes == 8192));
        assert!(!exports.names().contains(&name));
        let Content::Source(view) = exports.open(&name).unwrap().content else { panic!("it is read only") };
        let mut read = [0; 4096];
        view.read(0, &mut read).unwrap();
        assert_eq!(read, [1; 4096]);
        disk.release(epoch).unwrap();
        for unknown in [&*name, "epoch/", "epoch/one", "epoch/18446744073709551615"] {
            assert!(exports.information(unknown).is_none() && exports.open(unknown).is_err(), "{unknown}");
        }
        read.fill(0);
        view.read(0, &mut read).unwrap();
        assert_eq!(read, [1; 4096], "who reads it goes on reading it");
        drop((view, disk));
        attachment.detach().unwrap();
    }
}
