//! The disk of a machine that comes from another host: a copy of the snapshot of its last instant there.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_clone::network::client::Stream;
use onecopy_disk::source::LocalCopy;
use onecopy_disk::{BaseSpecification, CreateOptions, Disk};
use onecopy_disk_server::DiskClient;
use onecopy_postgres::ServiceUser;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use tokio::io::copy_bidirectional;
use tokio::net::UnixListener;
use tokio::sync::{Mutex, Semaphore, watch};

use super::restore;
use super::shared_disk::nbd_url;
use super::words;
use crate::files::give_all;
use crate::migration::{self, Arrival, HostOrder, SharedDisk};
use crate::{MachineError, MachineHome, SnapshotServer};

/// Connections of a disk's server at once.
const CONNECTIONS_MAX: usize = 32;

/// A disk on shared storage that was not served is not tried again so soon: it comes over there meanwhile.
const TRY_AGAIN_INTERVAL: Duration = Duration::from_secs(30);

/// How often it is looked how much of the disk is here.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// After a failed accept (no descriptors left) the next try waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Makes the disk of this number over a snapshot that will be there.
pub(super) fn make_disk(
    home: &MachineHome,
    user: &ServiceUser,
    number: u64,
    size_bytes: u64,
) -> Result<(), MachineError> {
    restore::give_up(home, number)?;
    let base = BaseSpecification::Nbd { url: nbd_url("", &home.source_socket()), tls: None };
    let (new, options) = (restore::new_disk(home), CreateOptions { size_bytes, base: Some(base), copy_base: true });
    let _ = fs::remove_dir_all(&new);
    Disk::create(&new, &options).map_err(home.disk_failed())?;
    LocalCopy::begin(&new, size_bytes).map_err(|error| MachineError::Migration {
        machine: home.name().to_string(),
        to: "this host".to_owned(),
        reason: error.to_string(),
    })?;
    give_all(&new, user)?;
    fs::rename(&new, home.numbered_disk(number)).map_err(MachineError::file("rename", &new))
}

/// Leads the disk's server to the snapshot of the machine's last instant where it comes from, as soon as that is there.
pub(super) fn serve_source(
    home: &MachineHome,
    user: &ServiceUser,
    record: &Arrival,
    has_snapshot: watch::Receiver<bool>,
) -> Result<(), MachineError> {
    let path = home.source_socket();
    onecopy_control::socket::remove(&path).map_err(MachineError::file("remove", &path))?;
    let listener = UnixListener::bind(&path).map_err(MachineError::file("listen on", &path))?;
    // Only the disk's server connects. What an account may have put in its place is not followed.
    let (owner, group) = (Uid::from_raw(user.user_id()), Gid::from_raw(user.group_id()));
    give_socket(&path, owner, group).map_err(MachineError::file("give away", &path))?;
    let account = user.user_id();
    let source = Arc::new(DiskSource::new(home, user, record));
    tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let place = Arc::clone(&places).acquire_owned().await;
            let mut near = match listener.accept().await {
                Ok((near, _)) if near.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == account) => near,
                Ok(_) => continue,
                Err(error) => {
                    tracing::warn!(%error, "the disk's server is not let in");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (source, mut has_snapshot) = (Arc::clone(&source), has_snapshot.clone());
            tokio::spawn(async move {
                let _place = place;
                // A client of NBD waits to be greeted: one that is heard has gone.
                let there = tokio::select! {
                    there = has_snapshot.wait_for(|there| *there) => there.is_ok(),
                    _ = near.readable() => false,
                };
                if !there {
                    return;
                }
                match source.open().await {
                    Ok(mut far) => {
                        let _ = copy_bidirectional(&mut near, &mut far).await;
                    }
                    // It comes again.
                    Err(reason) => tracing::info!(reason, "the disk's source is away"),
                }
            });
        }
    });
    Ok(())
}

/// Where the disk of a machine that has come is read from.
struct DiskSource {
    home: MachineHome,
    user: ServiceUser,
    record: Arrival,
    /// What serves it here, where its storage is here, too.
    here: Mutex<ServedHere>,
}

#[derive(Default)]
struct ServedHere {
    server: Option<SnapshotServer>,
    failed_at: Option<Instant>,
}

impl DiskSource {
    fn new(home: &MachineHome, user: &ServiceUser, record: &Arrival) -> DiskSource {
        let here = Mutex::default();
        DiskSource { home: home.clone(), user: user.clone(), record: record.clone(), here }
    }

    /// A connection to what serves the snapshot of its last instant where it comes from: here, or else there.
    async fn open(&self) -> Result<Box<dyn Stream>, String> {
        let record = &self.record;
        if let Some(disk) = &record.shared_disk {
            match self.open_here(disk).await {
                Ok(stream) => return Ok(Box::new(stream)),
                Err(reason) => tracing::warn!(reason, "the disk on shared storage is not served, and comes over there"),
            }
        }
        let opened = migration::open(&record.origin, &record.keys, &HostOrder::Disk(record.which(&self.home))).await;
        opened.map_err(|reason| format!("{}: {reason}", record.origin))
    }

    async fn open_here(&self, disk: &SharedDisk) -> Result<tokio::net::UnixStream, String> {
        let mut here = self.here.lock().await;
        if here.failed_at.is_some_and(|failed| failed.elapsed() < TRY_AGAIN_INTERVAL) {
            return Err("it was not served a moment ago".to_owned());
        }
        if !here.server.as_mut().is_some_and(SnapshotServer::is_alive) {
            // Dropped, the one of before is killed.
            drop(here.server.take());
            let socket = self.home.snapshot_socket(&self.record.token);
            let started = SnapshotServer::start(&self.home, &self.user, socket, disk.snapshot(&disk.last));
            here.server = Some(started.map_err(words)?);
        }
        let connected = here.server.as_mut().ok_or("it is not served")?.connect().await;
        if connected.is_err() {
            (here.server, here.failed_at) = (None, Some(Instant::now()));
        }
        connected
    }
}

/// Gives a socket that root has just made to the account: that socket, and nothing that the account has laid there.
fn give_socket(path: &Path, owner: Uid, group: Gid) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let socket = rustix::fs::open(path, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&socket)?;
    let is_ours = found.st_uid == rustix::process::geteuid().as_raw() && found.st_nlink == 1;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket || !is_ours {
        return Err(io::Error::other("something else has taken its name"));
    }
    Ok(rustix::fs::chownat(&socket, c"", Some(owner), Some(group), AtFlags::EMPTY_PATH)?)
}

/// For a machine that has come: leads its disk to where it comes from until all of it is here, and says so there.
pub(super) async fn look_after_disk(home: MachineHome, record: Arrival) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        let disk = home.disk();
        let looked = tokio::task::spawn_blocking(move || DiskClient::connect(&disk)?.info()).await;
        if looked.is_ok_and(|info| info.is_ok_and(|info| info.hydration.is_some_and(|state| state.is_whole))) {
            break;
        }
    }
    tracing::info!(origin = record.origin, "all of the disk is here");
    let order = HostOrder::Whole(record.which(&home));
    while let Err(reason) = migration::ask::<()>(&record.origin, &record.keys, &order).await {
        tracing::info!(origin = record.origin, %reason, "the source does not know yet that its disk is needed no more");
        tokio::time::sleep(LOOK_INTERVAL * 15).await;
    }
    if let Err(error) = (Arrival { is_whole: true, ..record }).write(&home) {
        tracing::warn!(%error, "it is not written down that all of the disk is here");
    }
}
