//! The server of one disk: transports, page map, control socket.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onecopy_disk::{At, Attachment, Disk, DiskError, OpenOptions};

use crate::control::Control;
use crate::observer::ObservedPages;
use crate::protocol::{ServedDisk, WantedContent};
use crate::transports::Transports;
use crate::{CONTROL_SOCKET, DiskServerError, ServeOptions, metrics, scan};
use onecopy_directory::{DirectoryLock, LockState};

/// How often the server looks whether the disk has come or gone.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// How long a server before this one may take to end after it has given its disk back.
const ENDING_TIMEOUT: Duration = Duration::from_secs(1);

/// How often its lock is tried meanwhile.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// A disk that is served until [`DiskServer::stop`], or until this is dropped.
pub struct DiskServer {
    served: Arc<Served>,
    control: Control,
    looking: Option<JoinHandle<()>>,
    _lock: DirectoryLock,
}

/// The page map of the opening that is current, or of the last one.
type Pages = Arc<Mutex<Option<Arc<ObservedPages>>>>;

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

impl DiskServer {
    /// Serves the disk in this directory.
    ///
    /// # Errors
    /// NBD clients would come in the clear from elsewhere, there is no disk, another server listens on the control
    /// socket, another process has the disk (only asked where a transport needs the disk from the start), or a
    /// transport cannot be opened.
    pub fn start(directory: &Path, options: &ServeOptions) -> Result<DiskServer, DiskServerError> {
        options.check()?;
        let control = options.control.clone().unwrap_or_else(|| directory.join(CONTROL_SOCKET));
        Disk::geometry(directory).map_err(DiskServerError::disk(directory))?;
        let lock = lock(directory, &control)?;
        let pages = Arc::new(Mutex::new(None));
        let limit = Arc::new(Mutex::new(options.limit_bytes_per_second));
        let attachment = Arc::new(attachment(directory, options, &pages, &limit));
        let keeps_disk = options.keeps_disk();
        if keeps_disk {
            attachment.attach().map_err(DiskServerError::disk(directory))?;
        }
        // From here on whatever fails gives the disk back.
        let transports = Transports::open(&attachment, options).inspect_err(|_| give_back(&attachment, keeps_disk))?;
        let served = Arc::new(Served {
            attachment,
            transports,
            pages,
            limit,
            scan_bytes_per_second: options.scan_bytes_per_second,
            holds_disk: AtomicBool::new(keeps_disk),
            ended: AtomicBool::new(false),
            end: (Mutex::new(false), Condvar::new()),
        });
        let control = Control::listen(&control, Arc::clone(&served)).inspect_err(|_| served.close_disk())?;
        let looking = {
            let served = Arc::clone(&served);
            let thread = std::thread::Builder::new().name("disk-look".to_owned());
            thread.spawn(move || served.look()).map_err(DiskServerError::io("start a thread for", directory))?
        };
        Ok(DiskServer { served, control, looking: Some(looking), _lock: lock })
    }

    /// Everything about it.
    pub fn info(&self) -> ServedDisk {
        self.served.info()
    }

    /// What can be asked of it from another thread, as long as it serves and after that.
    pub fn served(&self) -> Arc<Served> {
        Arc::clone(&self.served)
    }

    /// Its page map, while the disk is attached.
    pub fn pages(&self) -> Option<Arc<ObservedPages>> {
        self.served.pages()
    }

    /// Returns when somebody has asked for the end over the control socket, or `stopped` is set.
    pub fn wait(&self, stopped: &AtomicBool) {
        let (asked, changed) = &self.served.end;
        let mut asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
        while !*asked && !stopped.load(Ordering::Relaxed) {
            asked = changed.wait_timeout(asked, LOOK_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Closes the transports and the disk, in this order.
    pub fn stop(mut self) -> Result<(), DiskServerError> {
        let closed = self.served.stop();
        self.end_threads();
        closed
    }

    fn end_threads(&mut self) {
        self.control.stop();
        if self.looking.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that looks after the disk panicked");
        }
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        if let Err(error) = self.served.stop() {
            tracing::error!(%error, "the disk is not closed in order");
        }
        self.end_threads();
    }
}

impl Served {
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

    fn close_disk(&self) {
        if let Err(error) = self.stop() {
            tracing::error!(%error, "the disk is not closed in order");
        }
    }

    fn pages(&self) -> Option<Arc<ObservedPages>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// For each opening of the disk: scans what its page map does not know.
    fn look(&self) {
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

/// Takes the lock that says who listens on a control socket. A server that was told to stop has a moment to be gone.
fn lock(directory: &Path, control: &Path) -> Result<DirectoryLock, DiskServerError> {
    let path = PathBuf::from(format!("{}.lock", control.display()));
    let deadline = Instant::now() + ENDING_TIMEOUT;
    loop {
        match DirectoryLock::take(&path) {
            Ok(LockState::Taken(lock)) => return Ok(lock),
            Ok(LockState::HeldBy(_)) if Instant::now() < deadline => std::thread::sleep(LOCK_INTERVAL),
            Ok(LockState::HeldBy(process_id)) => {
                return Err(DiskServerError::Served { directory: directory.to_owned(), process_id });
            }
            Err(error) => return Err(DiskServerError::Lock { path, reason: error.to_string() }),
        }
    }
}

/// The disk, with a new page map for each opening.
fn attachment(directory: &Path, options: &ServeOptions, pages: &Pages, limit: &Arc<Mutex<Option<u64>>>) -> Attachment {
    let (pages, limit) = (Arc::clone(pages), Arc::clone(limit));
    let (has_map, lease_timeout) = (options.page_map, options.lease_timeout);
    Attachment::new(directory, move || {
        let mut pages = pages.lock().unwrap_or_else(PoisonError::into_inner);
        let observer = has_map.then(|| Arc::new(ObservedPages::kept(pages.take())));
        pages.clone_from(&observer);
        let observer = observer.map(|observer| observer as Arc<dyn onecopy_disk::Observer>);
        let hydration_limit = *limit.lock().unwrap_or_else(PoisonError::into_inner);
        OpenOptions { observer, lease_timeout, hydration_limit, ..OpenOptions::default() }
    })
}

fn give_back(attachment: &Attachment, was_taken: bool) {
    if was_taken && let Err(error) = attachment.detach() {
        tracing::error!(%error, "the disk is not closed in order");
    }
}

#[cfg(test)]
mod tests {
    use onecopy_disk::CreateOptions;
    use onecopy_pagemap::content_hash;

    use super::*;
    use crate::DiskClient;
    use crate::protocol::{ChangedBlocks, Request};

    /// Spec: A8
    #[test]
    fn what_a_snapshot_holds_is_found_and_nothing_that_was_written_since() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        Disk::create(&path, &CreateOptions { size_bytes: 1 << 20, base: None, copy_base: false }).unwrap();
        let server = DiskServer::start(&path, &ServeOptions::default()).unwrap();
        let disk = server.served.attachment.current().unwrap();
        let write = |block: u64, byte: u8| disk.write(block << 12, &[byte; 4096], &[]).unwrap();
        write(3, 3);
        write(4, 4);
        let mut client = DiskClient::connect(&path).unwrap();
        let seed = client.info().unwrap().page_map.unwrap().seed;
        let wanted = [3, 4, 9].map(|byte| WantedContent::new(byte, content_hash(seed, &[byte as u8; 4096])));
        let find = |client: &mut DiskClient, snapshot: &str| {
            client.ask::<Vec<Option<u64>>>(&Request::Find { snapshot: snapshot.to_owned(), wanted: wanted.to_vec() })
        };
        client.snapshot("begun").unwrap();
        assert_eq!(find(&mut client, "begun").unwrap(), [Some(3), Some(4), None]);
        let epoch: u64 = client.ask(&Request::Cut).unwrap();
        write(4, 4);
        write(9, 9);
        assert_eq!(find(&mut client, "begun").unwrap(), [Some(3), None, None]);
        let since_epoch = Request::FindSinceEpoch { epoch, wanted: wanted.to_vec() };
        assert_eq!(client.ask::<Vec<Option<u64>>>(&since_epoch).unwrap(), [Some(3), None, None]);
        let refused = find(&mut client, "other").unwrap_err();
        assert!(refused.to_string().contains("other"), "{refused}");
        drop(disk);
        server.stop().unwrap();
    }

    /// Spec: C6
    #[test]
    fn epochs_are_cut_compared_and_released_over_the_control_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        Disk::create(&path, &CreateOptions { size_bytes: 1 << 20, base: None, copy_base: false }).unwrap();
        let server = DiskServer::start(&path, &ServeOptions::default()).unwrap();
        let disk = server.served.attachment.current().unwrap();
        let mut client = DiskClient::connect(&path).unwrap();
        let cut = |client: &mut DiskClient| client.ask::<u64>(&Request::Cut).unwrap();
        let first = cut(&mut client);
        for block in [3, 4, 9] {
            disk.write(block << 12, &[1; 4096], &[]).unwrap();
        }
        let second = cut(&mut client);
        disk.write(20 << 12, &[1; 4096], &[]).unwrap();
        let changed = |client: &mut DiskClient, to, first_block| {
            client.ask::<ChangedBlocks>(&Request::Changed { from: first, to, first: first_block })
        };
        let told = |ranges: &[(u64, u64)]| ChangedBlocks { ranges: ranges.to_vec(), next: None };
        assert_eq!(changed(&mut client, second, 0).unwrap(), told(&[(3, 5), (9, 10)]));
        assert_eq!(changed(&mut client, second, 4).unwrap(), told(&[(4, 5), (9, 10)]));
        // A snapshot between them stays, whatever is released.
        client.snapshot("kept").unwrap();
        let third = cut(&mut client);
        assert_eq!(changed(&mut client, third, 10).unwrap(), told(&[(20, 21)]));
        assert_eq!(client.ask::<usize>(&Request::ReleaseEpochs { through: second }).unwrap(), 2);
        let refused = changed(&mut client, third, 0).unwrap_err().to_string();
        assert!(refused.contains(&first.to_string()), "{refused}");
        assert_eq!(client.ask::<usize>(&Request::ReleaseEpochs { through: u64::MAX }).unwrap(), 1);
        assert_eq!(client.info().unwrap().snapshots.unwrap().len(), 1);
        drop(disk);
        server.stop().unwrap();
    }
}
