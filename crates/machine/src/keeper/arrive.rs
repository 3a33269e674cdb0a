//! The destination's side of a migration: a machine that comes while it runs elsewhere, and begins where it stood.
//!
//! ```text
//!  first round ──> memory.shadow ──> memory, disk over what comes, QEMU waits ──> further rounds into the memory
//!  ──> last round, devices: it stands (arriving) ──> go, or the source's host says that it was given away ──> it runs
//! ```
//!
//! It runs only after the source has written down that it was given away; it is forgotten only after the source's host
//! has said that it goes on there, or where it cannot run any more. In between it stands, and the source's host is
//! asked again and again, by whichever keeper there is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_checkpoint::delta::{Blocks, Decoder, Destination, HeldEpoch, NoBlocks, Sizes};
use onecopy_checkpoint::link::{Received, Receiving};
use onecopy_checkpoint::memory::GuestMemory;
use onecopy_checkpoint::restore::Prefix;
use onecopy_hypervisor::Machine;
use onecopy_postgres::ServiceUser;
use tokio::sync::watch;

use super::arriving::{Arriving, load, note_prefix, refuse};
use super::arriving_disk::{make_disk, serve_source};
use super::backup::{self, Copy};
use super::former_disk::FormerDisk;
use super::launch::Launch;
use super::link::{Answered, DestinationLink, Said, TURN_TIMEOUT, Watch, directions, message, understand};
use super::memory;
use super::memory_file::MemoryFile;
use super::restore::{self, Restored};
use super::server::Server;
use super::shared_disk::SharedSnapshot;
use super::stand_by;
use super::state::Keeper;
use super::verdict::{decide, discard, failed, go_on, keep_there};
use super::words;
use crate::migration::{Arrival, ArrivalState};
use crate::{MachineError, MachineHome};

/// How long a keeper that was started for a machine that comes waits for it.
const COME_TIMEOUT: Duration = Duration::from_secs(30);

/// What a machine has become that never comes.
pub(super) const BROKEN_OFF: &str =
    "its coming was broken off, and it goes on where it was; remove what is left of it with: onecopy vm delete";

/// The machine that is to come here, if this one is that.
pub(super) fn expected(home: &MachineHome) -> Result<Option<Arrival>, MachineError> {
    Ok(Arrival::of(home)?.filter(|arrival| arrival.state != ArrivalState::Here))
}

/// Takes what comes until all of the memory was sent once; makes memory and disk.
pub(super) async fn begin(
    home: &MachineHome,
    user: &ServiceUser,
    keeper: &Arc<Keeper>,
    record: Arrival,
) -> Result<(Server, Arriving), MachineError> {
    if record.state == ArrivalState::Discarded {
        return Err(failed(home, BROKEN_OFF));
    }
    let carried = tokio::time::timeout(COME_TIMEOUT, keeper.incoming()).await.ok().flatten();
    let Some(carried) = carried else {
        discard(home, &record);
        return Err(failed(home, BROKEN_OFF));
    };
    let accepted = match carried.into_std() {
        Ok(stream) => {
            let accepted = tokio::task::spawn_blocking(move || accept(stream));
            accepted.await.unwrap_or_else(|error| Err(words(error)))
        }
        Err(error) => Err(words(error)),
    };
    let (link, stream) = accepted.map_err(|reason| {
        discard(home, &record);
        failed(home, reason)
    })?;
    let failures = link.failure_sender();
    let begun = receive(home, user, keeper, &record, (link, Arc::clone(&stream))).await;
    if let Err(error) = &begun {
        refuse(failures, stream, error).await;
        discard(home, &record);
    }
    begun
}

/// Reads who begins; with what ends the connection.
fn accept(stream: UnixStream) -> Result<(DestinationLink, Arc<UnixStream>), String> {
    let ender = stream.try_clone().map_err(words)?;
    let (from, to) = directions(stream).map_err(words)?;
    Ok((Receiving::accept(from, to).map_err(words)?, Arc::new(ender)))
}

async fn receive(
    home: &MachineHome,
    user: &ServiceUser,
    keeper: &Arc<Keeper>,
    record: &Arrival,
    (link, stream): (DestinationLink, Arc<UnixStream>),
) -> Result<(Server, Arriving), MachineError> {
    let (own, account, expected) = (home.clone(), user.clone(), record.clone());
    let first = tokio::task::spawn_blocking(move || first_rounds(&own, &account, link, &expected)).await;
    let first = first.map_err(|error| MachineError::Task(format!("receiving a machine ended: {error}")))?;
    let First { link, decoder, prefix, shared, disk, mut copy } = first.map_err(|reason| failed(home, reason))?;
    let mut record = record.clone();
    let is_unread = shared.is_none() && record.shared_disk.take().is_some();
    if std::mem::take(&mut record.compares_disk) || is_unread {
        record.write(home)?;
    }
    let (own, account, protects) = (home.clone(), user.clone(), record.protects);
    let prepared = tokio::task::spawn_blocking(move || {
        let configuration = own.configuration()?;
        let mut options = memory::options(&configuration, &account);
        options.drops = false;
        let descriptors = GuestMemory::prepare(&own.memory(), &own.memory_shadow(), &options);
        let descriptors = descriptors.map_err(own.memory_failed())?;
        match protects {
            true => backup::make_disk(&own, &account, disk, configuration.disk_bytes)?,
            false => make_disk(&own, &account, disk, configuration.disk_bytes)?,
        }
        Ok::<_, MachineError>(descriptors)
    });
    let descriptors =
        prepared.await.map_err(|error| MachineError::Task(format!("making a memory ended: {error}")))??;
    let server = Server::start(home, Launch::Memory(descriptors)).await;
    let server = server.map_err(|reason| MachineError::Ended { machine: home.name().to_string(), reason })?;
    let server = server.once_closed(&keeper.memory_open);
    let mut memory_open = Some(Arc::clone(&keeper.memory_open).read_owned().await);
    let restored = Restored::waiting(home, disk)?;
    let has_snapshot = watch::channel(false).0;
    if let Some(first) = copy.take() {
        let over = memory_of(home).and_then(|memory| first.over(home, memory, memory_open.take()));
        copy = Some(over.map_err(|error| failed(home, error))?);
    } else {
        serve_source(home, user, &record, has_snapshot.subscribe())?;
    }
    let keeper = Arc::clone(keeper);
    Ok((
        server,
        Arriving { link, stream, decoder, prefix, shared, record, keeper, has_snapshot, copy, memory_open, restored },
    ))
}

/// What has come when all of the memory was sent once.
struct First {
    link: DestinationLink,
    decoder: Decoder,
    prefix: Vec<u8>,
    shared: Option<SharedSnapshot>,
    /// The number of the disk that it is to have.
    disk: u64,
    copy: Option<Copy>,
}

/// The memory that a QEMU which waits has.
fn memory_of(home: &MachineHome) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(home.memory())
}

/// Hears what comes, and whether it could run here, and writes its memory into the file that will be it.
fn first_rounds(
    home: &MachineHome,
    user: &ServiceUser,
    mut link: DestinationLink,
    record: &Arrival,
) -> Result<First, String> {
    link.welcome(HeldEpoch::NOTHING).map_err(words)?;
    let Said::Hello { token, hardware } = said(&mut link)? else {
        return Err("it does not say what it is".to_owned());
    };
    let prefix = link.hear().map_err(words)?;
    let sizes = link.sizes();
    let checked = (|| {
        let configuration = home.configuration().map_err(words)?;
        let (memory_bytes, disk_bytes) = (configuration.memory_bytes, configuration.disk_bytes);
        if token != record.token || sizes != (Sizes { memory_bytes, disk_bytes, disk_travels: record.protects }) {
            return Err("it is another machine than the one that was ordered".to_owned());
        }
        Prefix::parse(&prefix).map_err(words)?;
        let here = restore::hardware_here(home, user, &configuration).map_err(words)?;
        hardware.check(&here)?;
        memory::clear(home).and_then(|()| restore::forget(home)).map_err(words)?;
        // Those that are there are of the machine of before, and others may lie over them.
        let number = home.next_disk();
        let shadow = home.memory_shadow();
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&shadow);
        let file = file.and_then(|file| file.set_len(memory_bytes).map(|()| file));
        let file = file.map_err(|error| format!("{}: {error}", shadow.display()))?;
        if record.protects {
            let disk = backup::create_disk(home, user, number, disk_bytes).map_err(words)?;
            return Ok((number, FirstTo::Copy(Copy::new(home, file, disk, true).map_err(words)?)));
        }
        Ok((number, FirstTo::Memory(MemoryFile { file, is_new: true })))
    })();
    let (disk, to) = checked?;
    let shared = record.shared_disk.as_ref().and_then(|disk| {
        let opened = SharedSnapshot::open(home, user, disk);
        opened.inspect_err(|error| tracing::info!(%error, "the machine's disk is not read here, and travels")).ok()
    });
    let (reads_disk, fences) = (shared.is_some(), record.fence.is_some());
    let accepted = Answered::Accepted { reads_disk, tells_disk: record.compares_disk, fences };
    link.say(&message(&accepted)).map_err(words)?;
    if let FirstTo::Copy(copy) = &to
        && record.compares_disk
    {
        tell_disk(home, user, &mut link, (disk, copy))?;
    }
    let mut decoder = Decoder::new(sizes);
    let blocks: &dyn Blocks = match (&to, &shared) {
        (FirstTo::Copy(copy), _) => copy,
        (FirstTo::Memory(_), Some(snapshot)) => &snapshot.blocks,
        (FirstTo::Memory(_), None) => &NoBlocks,
    };
    epoch(&mut link, &mut decoder, to.destination(), blocks)?;
    match said(&mut link)? {
        Said::Wait {} => Ok(First { link, decoder, prefix, shared, disk, copy: to.into_copy() }),
        other => Err(format!("{other:?} came instead of the wish to wait")),
    }
}

pub(super) fn said(link: &mut DestinationLink) -> Result<Said, String> {
    link.hear().and_then(|said| understand(&said)).map_err(words)
}

/// Begins the copy of the disk with what is known of it here, and says what that is. The disk that it had here before
/// is not needed any more then.
fn tell_disk(
    home: &MachineHome,
    user: &ServiceUser,
    link: &mut DestinationLink,
    (number, copy): (u64, &Copy),
) -> Result<(), String> {
    let former = FormerDisk::of(home, user);
    let known = former.as_ref().map(|former| &*former.source);
    let disk_bytes = link.sizes().disk_bytes;
    let told = copy.begin_with(known, disk_bytes, link).map_err(words)?;
    drop(former);
    // Before anything comes: there may be no room for both.
    if let Err(error) = home.forget_disks_before(number) {
        tracing::warn!(%error, "the disk that the machine had here before is left until it is deleted");
    }
    told.end(link).map_err(words)
}

/// Writes an epoch into the memory as it comes.
fn epoch(
    link: &mut DestinationLink,
    decoder: &mut Decoder,
    to: &dyn Destination,
    blocks: &dyn Blocks,
) -> Result<(), String> {
    match link.receive(decoder, to, blocks).map_err(words)? {
        Received::Epoch(held) => link.acknowledge(held).map_err(words),
        Received::Message(_) => {
            Err("a message came where an epoch was due; run the same version of onecopy on both hosts".to_owned())
        }
    }
}

impl Arriving {
    /// Takes what is left, gives it to a QEMU that waits, and lets it go when the source has given it away.
    pub(super) async fn finish(
        self,
        home: &MachineHome,
        user: &ServiceUser,
        machine: &Machine,
    ) -> Result<(), MachineError> {
        if self.copy.is_some() {
            return self.stand_by(home, user, machine).await;
        }
        self.arrive(home, user, machine, Instant::now()).await
    }

    /// Takes the last epoch, which is to come now, or has; until `last_heard` the source cannot have missed this side.
    pub(super) async fn arrive(
        self,
        home: &MachineHome,
        user: &ServiceUser,
        machine: &Machine,
        last_heard: Instant,
    ) -> Result<(), MachineError> {
        let record = self.record.clone();
        let (prefix, keeper) = (self.prefix.clone(), Arc::clone(&self.keeper));
        // Before the source has heard that it stands here it goes on there, whatever happens.
        let (failures, stream) = (self.link.failure_sender(), Arc::clone(&self.stream));
        let mut link = match self.load(home, machine).await {
            Ok(link) => link,
            Err(error) => {
                refuse(failures, stream, &error).await;
                discard(home, &record);
                return Err(error);
            }
        };
        let watched = Watch::begin(&stream, &Arc::default(), Some(TURN_TIMEOUT));
        let mut heard = tokio::task::spawn_blocking(move || {
            let _watch = watched.map_err(words)?;
            link.say(&message(&Answered::Loaded {})).map_err(words)?;
            let said = said(&mut link)?;
            Ok::<_, String>((link, said))
        });
        // From here on it may have been given away: it stands until that is known.
        let (heard, word) = tokio::select! {
            heard = &mut heard => (heard, None),
            goes = keeper.decided(&record.token) => {
                // The source says it over another connection: this one is of no use.
                let _ = stream.shutdown(std::net::Shutdown::Both);
                (heard.await, Some(goes))
            }
        };
        let (link, said) = match heard.unwrap_or_else(|error| Err(words(error))) {
            Ok((link, said)) => (Some(link), Ok(said)),
            Err(reason) => (None, Err(reason)),
        };
        drop(failures);
        if !matches!(said, Ok(Said::Go {})) || word.is_some() {
            // Nothing more is said or heard here: the source hears that at once, and nobody waits to write.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        match (word, said) {
            (Some(false), _) => return Err(keep_there(home, &record)),
            (Some(true), _) | (None, Ok(Said::Go {})) => go_on(home, user, machine, &keeper, &record, false).await?,
            (None, other) => {
                tracing::warn!(?other, "the source is lost, and whether the machine runs there is not known");
                decide(home, user, machine, &keeper, &record, Some(last_heard)).await?;
            }
        }
        // It runs, whatever can be read.
        let forwards = home.configuration().map(|configuration| configuration.forwards).unwrap_or_default();
        if let Some(mut link) = link {
            let _ = tokio::task::spawn_blocking(move || link.say(&message(&Answered::Running { forwards }))).await;
        }
        note_prefix(home, machine, &prefix);
        Ok(())
    }

    /// Takes what is left, and gives it to a QEMU that waits: the machine stands then.
    async fn load(self, home: &MachineHome, machine: &Machine) -> Result<DestinationLink, MachineError> {
        let Arriving { mut link, mut decoder, prefix, shared, has_snapshot, copy, memory_open, restored, .. } = self;
        let own = home.clone();
        let received = tokio::task::spawn_blocking(move || {
            if let Some(copy) = copy {
                return copy.synchronize().map(|()| (link, decoder, Some(copy))).map_err(words);
            }
            // Dropped after the memory is closed.
            let _open = memory_open;
            let memory = MemoryFile { file: memory_of(&own).map_err(words)?, is_new: false };
            link.say(&message(&Answered::Waiting {})).map_err(words)?;
            // The last one has the state of its devices.
            let blocks: &dyn Blocks = shared.as_ref().map_or(&NoBlocks, |snapshot| &snapshot.blocks);
            while decoder.devices().is_empty() {
                epoch(&mut link, &mut decoder, &memory, blocks)?;
            }
            Ok::<_, String>((link, decoder, None))
        });
        let received = received.await.map_err(|error| MachineError::Task(format!("receiving ended: {error}")))?;
        let (link, decoder, copy) = received.map_err(|reason| failed(home, reason))?;
        let loaded = load(home, machine, restored, (&prefix, decoder.devices())).await;
        stand_by::close(copy);
        loaded?;
        let _ = has_snapshot.send(true);
        Ok(link)
    }
}

/// Where what comes first is written.
enum FirstTo {
    Memory(MemoryFile),
    Copy(Copy),
}

impl FirstTo {
    fn destination(&self) -> &dyn Destination {
        match self {
            FirstTo::Memory(memory) => memory,
            FirstTo::Copy(copy) => copy,
        }
    }

    fn into_copy(self) -> Option<Copy> {
        match self {
            FirstTo::Memory(_) => None,
            FirstTo::Copy(copy) => Some(copy),
        }
    }
}
