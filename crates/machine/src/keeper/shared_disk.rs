//! The disk of a machine that goes to another host, as both sides use it to leave out what memory holds of it: the
//! source asks its page map, and the destination reads a snapshot on storage that both hosts have.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{BlockAt, Blocks, Known, Version, Wanted};
use onecopy_checkpoint::take::Cause;
use onecopy_disk::Source;
use onecopy_disk::source::{NbdClient, NbdClientOptions};
use onecopy_disk_server::DiskClient;
use onecopy_disk_server::protocol::{Request, WANTED_MAX, WantedContent};
use onecopy_postgres::ServiceUser;
use tokio::runtime::Handle;

use super::words;
use crate::migration::SharedDisk;
use crate::snapshot_server::ServedSnapshot;
use crate::{MachineHome, SnapshotServer};

/// How long a read of a snapshot may take: storage that hangs is not read any more, and what it holds travels.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a look into the page map may take: the machine may stand meanwhile, and without it nothing is wrong.
const FIND_TIMEOUT: Duration = Duration::from_secs(5);

/// What blocks are referred to as they are.
enum RefersTo {
    /// A snapshot that the other side reads, by its name.
    Snapshot(String),
    /// The last epoch of a disk that the other side has a copy of: its number, and that of the memory's with it.
    Epoch { disk: u64, memory: u64 },
    /// Nothing as yet.
    Nothing,
}

/// The page map of the running disk, as far as it tells of what the other side has.
pub(super) struct DiskPageMap {
    disk: PathBuf,
    refers_to: RefersTo,
    /// It has not answered once, and is not asked any more.
    is_lost: bool,
    /// By which contents are hashed.
    pub(super) seed: u64,
}

impl DiskPageMap {
    /// Of a disk that the other side is to have a copy of; none where it has no page map.
    ///
    /// # Errors
    /// The disk's server does not answer.
    pub(super) fn of_copied(home: &MachineHome) -> Result<Option<DiskPageMap>, Cause> {
        let disk = home.disk();
        let seed = DiskClient::connect(&disk)?.info()?.page_map.map(|map| map.seed);
        Ok(seed.map(|seed| DiskPageMap { disk, refers_to: RefersTo::Nothing, is_lost: false, seed }))
    }

    /// The other side holds this epoch of the disk, and of the memory.
    pub(super) fn set_epoch(&mut self, disk: u64, memory: u64) {
        self.refers_to = RefersTo::Epoch { disk, memory };
    }

    /// Makes the snapshot, durably. None where the disk has no page map.
    ///
    /// # Errors
    /// The disk's server does not answer, or makes none.
    pub(super) fn begin(home: &MachineHome, snapshot: &str) -> Result<Option<DiskPageMap>, Cause> {
        let disk = home.disk();
        let mut client = DiskClient::connect(&disk)?;
        let Some(map) = client.info()?.page_map else { return Ok(None) };
        client.snapshot(snapshot)?;
        let refers_to = RefersTo::Snapshot(snapshot.to_owned());
        Ok(Some(DiskPageMap { disk, refers_to, is_lost: false, seed: map.seed }))
    }

    /// Forgets the snapshot: nobody reads it.
    pub(super) fn forget(self) {
        let RefersTo::Snapshot(name) = self.refers_to else { return };
        let forgotten = DiskClient::connect(&self.disk)
            .and_then(|mut client| client.ask::<()>(&Request::DeleteSnapshot { name: name.clone() }));
        if let Err(error) = forgotten {
            tracing::warn!(%error, snapshot = name, "a snapshot of the disk is left");
        }
    }

    /// How references name it.
    pub(super) fn version(&self) -> Option<Version> {
        match &self.refers_to {
            RefersTo::Snapshot(name) => Some(Version::Snapshot(name.clone())),
            RefersTo::Epoch { memory, .. } => Some(Version::Epoch(*memory)),
            RefersTo::Nothing => None,
        }
    }

    fn ask(&self, wanted: &[Wanted]) -> Result<Vec<Option<u64>>, Cause> {
        // A new connection each time: its server may be another one, and lets go of who asks nothing for long.
        let mut client = DiskClient::connect(&self.disk)?;
        let mut found = Vec::with_capacity(wanted.len());
        for wanted in wanted.chunks(WANTED_MAX) {
            let contents = wanted.iter().map(|wanted| WantedContent::new(wanted.page, wanted.hash)).collect();
            let request = match &self.refers_to {
                RefersTo::Snapshot(name) => Request::Find { snapshot: name.clone(), wanted: contents },
                RefersTo::Epoch { disk, .. } => Request::FindSinceEpoch { epoch: *disk, wanted: contents },
                RefersTo::Nothing => {
                    found.extend(wanted.iter().map(|_| None));
                    continue;
                }
            };
            let blocks: Vec<Option<u64>> = client.ask_within(&request, FIND_TIMEOUT)?;
            if blocks.len() != wanted.len() {
                return Err(format!("{} answers for {} pages", blocks.len(), wanted.len()).into());
            }
            found.extend(blocks);
        }
        Ok(found)
    }
}

impl Known for DiskPageMap {
    fn find_many(&mut self, wanted: &[Wanted], found: &mut Vec<Option<BlockAt>>) -> Result<(), Cause> {
        let asked = if self.is_lost { Ok(vec![None; wanted.len()]) } else { self.ask(wanted) };
        let blocks = asked.unwrap_or_else(|error| {
            // It costs bytes only.
            tracing::warn!(%error, "what is on the disk is not known any more, and travels");
            self.is_lost = true;
            vec![None; wanted.len()]
        });
        found.extend(blocks.into_iter().map(|block| block.map(|block| BlockAt { version: 0, block })));
        Ok(())
    }
}

/// An export that is served on a socket; its name needs no encoding.
pub(super) fn nbd_url(export: &str, socket: &Path) -> String {
    // Percent-encoded (RFC 3986).
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/.-_".contains(byte);
    let bytes = socket.as_os_str().as_encoded_bytes().iter();
    let encoded: String =
        bytes.map(|byte| if is_plain(byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") }).collect();
    format!("nbd+unix:///{export}?socket={encoded}")
}

/// Has a disk read, at a socket of this name, by a process of the account that its files belong to; that process ends
/// when it is dropped. In a thread that blocks.
///
/// # Errors
/// In words: it is not to be had.
pub(super) fn serve(
    home: &MachineHome,
    user: &ServiceUser,
    socket: &str,
    disk: ServedSnapshot<'_>,
) -> Result<(NbdClient, SnapshotServer), String> {
    let socket = home.in_run(socket);
    let mut server = SnapshotServer::start(home, user, socket.clone(), disk).map_err(words)?;
    Handle::current().block_on(server.connect())?;
    let (account, source_timeout) = (Some(user.user_id()), Some(READ_TIMEOUT));
    let options = NbdClientOptions { account, source_timeout, ..NbdClientOptions::default() };
    let source = NbdClient::connect(&nbd_url("", &socket), options).map_err(words)?;
    Ok((source, server))
}

/// The snapshot of a disk that another host has, read on storage that this one has, too: by a process of the account
/// that the disk's files belong to.
pub(super) struct SharedSnapshot {
    pub(super) blocks: SnapshotBlocks,
    /// Killed when dropped.
    _server: SnapshotServer,
}

impl SharedSnapshot {
    /// Opens it: a snapshot of that name is on no other disk. In a thread that blocks.
    ///
    /// # Errors
    /// In words: it is not to be had here.
    pub(super) fn open(home: &MachineHome, user: &ServiceUser, disk: &SharedDisk) -> Result<SharedSnapshot, String> {
        let (source, server) = serve(home, user, "shared-snapshot.sock", disk.snapshot(&disk.begun))?;
        let blocks = SnapshotBlocks::new(Arc::new(source), disk.begun.clone());
        Ok(SharedSnapshot { blocks, _server: server })
    }
}

/// The blocks of one snapshot.
pub(super) struct SnapshotBlocks {
    source: Arc<dyn Source>,
    name: String,
    /// It could not be read once, and is not read any more.
    is_lost: AtomicBool,
}

impl SnapshotBlocks {
    fn new(source: Arc<dyn Source>, name: String) -> SnapshotBlocks {
        SnapshotBlocks { source, name, is_lost: AtomicBool::new(false) }
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        // Behind the disk's end are zeros.
        let there = self.source.size_bytes().saturating_sub(offset).min(into.len() as u64) as usize;
        let (there, behind) = into.split_at_mut(there);
        behind.fill(0);
        if !self.is_lost.load(Ordering::Relaxed)
            && let Err(error) = self.source.read(offset, there)
        {
            tracing::warn!(%error, "the disk on shared storage cannot be read; what it holds travels");
            self.is_lost.store(true, Ordering::Relaxed);
        }
        if self.is_lost.load(Ordering::Relaxed) {
            // Its digest tells, and it comes again as it is.
            there.fill(0);
        }
    }
}

impl Blocks for SnapshotBlocks {
    fn read_many(&self, version: &Version, blocks: &[u64], into: &mut [u8]) -> Result<(), Cause> {
        if *version != Version::Snapshot(self.name.clone()) {
            return Err(format!("a block of {version:?} is named").into());
        }
        let mut rest = into;
        for run in blocks.chunk_by(|one, next| one.checked_add(1) == Some(*next)) {
            let (read, left) = rest.split_at_mut(run.len() * PAGE_BYTES);
            self.read(run[0] * PAGE_BYTES as u64, read);
            rest = left;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use onecopy_disk::{CreateOptions, Disk, OpenOptions, View};

    use super::*;

    /// Spec: D6
    #[test]
    fn blocks_of_a_snapshot_are_what_they_were_and_no_other_version_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        Disk::create(&path, &CreateOptions { size_bytes: 1 << 20, base: None, copy_base: false }).unwrap();
        let disk = Disk::open(&path, OpenOptions::default()).unwrap();
        disk.write(3 << 12, &[[3; 4096], [4; 4096]].concat(), &[]).unwrap();
        disk.snapshot("begun").unwrap();
        disk.write(4 << 12, &[9; 4096], &[]).unwrap();
        let source = Arc::new(View::open(&path, "begun").unwrap());
        let shared = SnapshotBlocks::new(source, "begun".to_owned());
        let mut read = vec![7; 4 << 12];
        shared.read_many(&Version::Snapshot("begun".to_owned()), &[3, 4, 9, 300], &mut read).unwrap();
        assert_eq!(read, [[3; 4096], [4; 4096], [0; 4096], [0; 4096]].concat());
        for other in [Version::Snapshot("other".to_owned()), Version::Epoch(1)] {
            shared.read_many(&other, &[3], &mut [0; 4096]).unwrap_err();
        }
        drop(shared);
        disk.close().unwrap();
    }
}
