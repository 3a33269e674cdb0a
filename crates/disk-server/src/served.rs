//! What the threads of a disk's server share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use onecopy_disk::{At, Attachment, Disk, DiskError};

use crate::observer::ObservedPages;
use crate::protocol::{ServedDisk, WantedContent};
use crate::transports::Transports;
use crate::{DiskServerError, ServeOptions, metrics, scan};

/// How often the server looks whether the disk has come or gone.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// The page map of the opening that is current, or of the last one.
pub(crate) type Pages = Arc<Mutex<Option<Arc<ObservedPages>>>>;

/// What the server's threads share.
pub struct Served {
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) transports: Transports,
    pages: Pages,
    /// The limit of the background copy, for each opening.
    limit: Arc<Mutex<Option<u64>>>,
    scan_bytes_per_second: u64,
    /// Whether the server itself has the disk, so that a transport for many clients need not open it for each.
    holds_disk: AtomicBool,
    ended: AtomicBool,
    end: (Mutex<bool>, Condvar),
}

impl Served {
    pub(crate) fn new(
        attachment: Arc<Attachment>,
        transports: Transports,
        pages: Pages,
        limit: Arc<Mutex<Option<u64>>>,
        options: &ServeOptions,
        holds_disk: bool,
    ) -> Served {
        Served {
            attachment,
            transports,
            pages,
            limit,
            scan_bytes_per_second: options.scan_bytes_per_second,
            holds_disk: AtomicBool::new(holds_disk),
            ended: AtomicBool::new(false),
            end: (Mutex::new(false), Condvar::new()),
        }
    }

    /// Everything about it.
    pub fn info(&self) -> ServedDisk {
        let disk = self.attachment.current();
        ServedDisk {
            process_id: std::process::id(),
            is_attached: disk.is_some(),
            disk: disk.as_ref().map(Disk::statistics),
            hydration: disk.as_ref().and_then(Disk::hydration),
            snapshots: disk.as_ref().map(Disk::snapshots),
            transports: self.transports.list(),
            page_map: disk.and_then(|_| self.pages()).and_then(|pages| pages.status()),
        }
    }

    /// Its figures in Prometheus' text form.
    pub fn metrics(&self) -> String {
        metrics::text(self.attachment.directory(), &self.info())
    }

    /// Blocks that hold these contents and did then.
    pub(crate) fn find(&self, disk: &Disk, at: &At, wanted: &[WantedContent]) -> Result<Vec<Option<u64>>, DiskError> {
        let pages = self.pages();
        let Some(map) = pages.as_ref().and_then(|pages| pages.map()) else { return Ok(vec![None; wanted.len()]) };
        let (then, now) = (disk.view(at)?, disk.view(&At::Current)?);
        let wanted = wanted.iter().map(|wanted| wanted.page_and_hash());
        Ok(map.find_many(wanted, |block| then.is_same(&now, block)))
    }

    pub(crate) fn set_limit(&self, bytes_per_second: Option<u64>) {
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner) = bytes_per_second;
        if let Some(disk) = self.attachment.current() {
            disk.set_hydration_limit(bytes_per_second);
        }
    }

    /// Closes transports and disk. Once: later calls have nothing to do.
    pub(crate) fn stop(&self) -> Result<(), DiskServerError> {
        self.ended.store(true, Ordering::Relaxed);
        self.transports.stop();
        let closed = match self.holds_disk.swap(false, Ordering::AcqRel) {
            true => self.attachment.detach().map_err(DiskServerError::disk(self.attachment.directory())),
            false => Ok(()),
        };
        if let Some(pages) = self.pages() {
            pages.save();
        }
        closed
    }

    /// Tells whoever waits that the end was asked for.
    pub(crate) fn ask_for_end(&self) {
        *self.end.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.end.1.notify_all();
    }

    /// Returns when the end was asked for, or `stopped` is set.
    pub(crate) fn wait(&self, stopped: &AtomicBool) {
        let (asked, changed) = &self.end;
        let mut asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
        while !*asked && !stopped.load(Ordering::Relaxed) {
            asked = changed.wait_timeout(asked, LOOK_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn close_disk(&self) {
        if let Err(error) = self.stop() {
            tracing::error!(%error, "the disk is not closed in order");
        }
    }

    pub(crate) fn pages(&self) -> Option<Arc<ObservedPages>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// For each opening of the disk: scans what its page map does not know.
    pub(crate) fn look(&self) {
        let mut scanned: Option<Arc<ObservedPages>> = None;
        while !self.ended.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK_INTERVAL);
            let (Some(disk), Some(pages)) = (self.attachment.current(), self.pages()) else { continue };
            if scanned.as_ref().is_some_and(|scanned| Arc::ptr_eq(scanned, &pages)) {
                continue;
            }
            // What comes from elsewhere need not come sooner for the map, and passes it when the guest asks.
            if disk.hydration().is_some_and(|hydration| !hydration.is_whole) {
                continue;
            }
            if self.scan_bytes_per_second > 0 && pages.scanned_bytes() < disk.size_bytes() {
                match scan::run(&disk, &pages, self.scan_bytes_per_second, &self.ended) {
                    Ok(()) | Err(DiskError::Closed) => {}
                    Err(error) => tracing::warn!(%error, "the page map's scan ended early"),
                }
            }
            scanned = Some(pages);
        }
    }
}
