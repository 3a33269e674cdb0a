//! The server of one disk: transports, page map, control socket.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onecopy_disk::{Attachment, Disk, OpenOptions};

use crate::control::Control;
use crate::observer::ObservedPages;
use crate::protocol::ServedDisk;
use crate::served::{Pages, Served};
use crate::transports::Transports;
use crate::{CONTROL_SOCKET, DiskServerError, ServeOptions};
use onecopy_directory::{DirectoryLock, LockState};

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
        let served = Arc::new(Served::new(attachment, transports, pages, limit, options, keeps_disk));
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
        self.served.wait(stopped);
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
    use crate::protocol::{ChangedBlocks, Request, WantedContent};

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
