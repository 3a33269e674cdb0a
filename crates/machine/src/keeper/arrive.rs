//! The destination's side of a migration: a machine that comes while it runs elsewhere, and begins where it stood.
//!
//! ```text
//!  hello ──┬──> first round ──> memory.shadow ────────────────┬──> further rounds into the memory
//!          └──> memory, disk over what comes, QEMU that waits ─┘
//!   ──> last round, devices: it stands (arriving)
//!   ──> go, or the source's host says that it was given away ──> it runs
//! ```
//!
//! It runs only after the source has written down that it was given away; it is forgotten only after the source's host
//! has said that it goes on there, or where it cannot run any more. In between it stands, and the source's host is
//! asked again and again, by whichever keeper there is.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_checkpoint::delta::{Decoder, HeldEpoch, Sizes};
use onecopy_checkpoint::link::Receiving;
use onecopy_checkpoint::memory::GuestMemory;
use onecopy_checkpoint::restore::Prefix;
use onecopy_hypervisor::Machine;
use onecopy_postgres::ServiceUser;
use tokio::sync::watch;

use super::arriving::{Arriving, Coming, CopyLink, load, note_prefix, refuse};
use super::arriving_disk::{make_disk, serve_source};
use super::backup::{self, Copy};
use super::former_disk::FormerDisk;
use super::incoming_memory::{IncomingMemory, epoch, memory_of, said, wish_to_wait};
use super::launch::Launch;
use super::link::{Answered, DestinationLink, Said, TURN_TIMEOUT, Watch, directions, message};
use super::memory;
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

/// Hears who comes, makes memory and disk, and begins to take what comes; of a machine that is only protected here all
/// of it is sent once then.
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
    let mut incoming = None;
    let begun = receive(home, user, keeper, &record, (link, Arc::clone(&stream)), &mut incoming).await;
    if let Err(error) = &begun {
        refuse(failures, stream, error).await;
        if let Some(incoming) = incoming {
            incoming.end().await;
        }
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
    incoming: &mut Option<IncomingMemory>,
) -> Result<(Server, Arriving), MachineError> {
    let (own, account, expected) = (home.clone(), user.clone(), record.clone());
    let failures = link.failure_sender();
    let first = tokio::task::spawn_blocking(move || hear_first(&own, &account, link, &expected)).await;
    let first = first.map_err(|error| MachineError::Task(format!("receiving a machine ended: {error}")))?;
    let First { link, prefix, shared, disk, to } = first.map_err(|reason| failed(home, reason))?;
    let mut record = record.clone();
    let is_unread = shared.is_none() && record.shared_disk.take().is_some();
    if std::mem::take(&mut record.compares_disk) || is_unread {
        record.write(home)?;
    }
    let copy = match to {
        FirstTo::Memory(shadow) => {
            *incoming = Some(IncomingMemory::begin((link, Arc::clone(&stream)), shadow, shared));
            None
        }
        FirstTo::Copy(copy, decoder) => Some((copy, *decoder, link)),
    };
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
    let memory_open = Arc::clone(&keeper.memory_open).read_owned().await;
    let restored = Restored::waiting(home, disk)?;
    let has_snapshot = watch::channel(false).0;
    if !protects {
        serve_source(home, user, &record, has_snapshot.subscribe())?;
    }
    let coming = match (copy, incoming.take()) {
        (Some((first, decoder, link)), _) => {
            let over = memory_of(home).and_then(|memory| first.over(home, memory, Some(memory_open)));
            let copy = over.map_err(|error| failed(home, error))?;
            Coming::Copy(Box::new(CopyLink { link, decoder, copy }))
        }
        (None, Some(memory)) => Coming::Memory(memory, memory_open),
        (None, None) => return Err(failed(home, "nobody takes what comes")),
    };
    let keeper = Arc::clone(keeper);
    Ok((server, Arriving { coming, stream, failures, prefix, record, keeper, has_snapshot, restored }))
}

/// What has come before there is a memory.
struct First {
    link: DestinationLink,
    prefix: Vec<u8>,
    /// What references to the disk are read from.
    shared: Option<SharedSnapshot>,
    /// The number of the disk that it is to have.
    disk: u64,
    to: FirstTo,
}

/// Where what comes first is written.
enum FirstTo {
    /// The shadow of its memory.
    Memory(File),
    /// The copy of a machine that is only protected here, all of which was sent once.
    Copy(Copy, Box<Decoder>),
}

/// Hears what comes, and whether it could run here; of a machine that is only protected here also what it has.
fn hear_first(
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
        let shadow = home.memory_shadow();
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&shadow);
        let file = file.and_then(|file| file.set_len(memory_bytes).map(|()| file));
        let (number, file) = (home.next_disk(), file.map_err(|error| format!("{}: {error}", shadow.display()))?);
        if !record.protects {
            return Ok((number, FirstTo::Memory(file)));
        }
        let disk = backup::create_disk(home, user, number, disk_bytes).map_err(words)?;
        Ok((number, FirstTo::Copy(Copy::new(home, file, disk, true).map_err(words)?, Box::new(Decoder::new(sizes)))))
    })();
    let (disk, mut to) = checked?;
    let shared = record.shared_disk.as_ref().and_then(|disk| {
        let opened = SharedSnapshot::open(home, user, disk);
        opened.inspect_err(|error| tracing::info!(%error, "the machine's disk is not read here, and travels")).ok()
    });
    let (reads_disk, fences) = (shared.is_some(), record.fence.is_some());
    let accepted = Answered::Accepted { reads_disk, tells_disk: record.compares_disk, fences };
    link.say(&message(&accepted)).map_err(words)?;
    if let FirstTo::Copy(copy, decoder) = &mut to {
        if record.compares_disk {
            tell_disk(home, user, &mut link, (disk, copy))?;
        }
        epoch(&mut link, decoder, copy, copy)?;
        wish_to_wait(&mut link)?;
    }
    Ok(First { link, prefix, shared, disk, to })
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

impl Arriving {
    /// Takes what is left, gives it to a QEMU that waits, and lets it go when the source has given it away.
    pub(super) async fn finish(
        self,
        home: &MachineHome,
        user: &ServiceUser,
        machine: &Machine,
    ) -> Result<(), MachineError> {
        if matches!(self.coming, Coming::Copy(_)) {
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
        let Arriving { coming, stream, failures, has_snapshot, restored, .. } = self;
        let (loaded, left) = load_last(home, machine, coming, (&prefix, restored)).await;
        let mut link = match loaded {
            Ok(link) => {
                let _ = has_snapshot.send(true);
                link
            }
            Err(error) => {
                refuse(failures, stream, &error).await;
                if let Some(left) = left {
                    left.end().await;
                }
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
}

/// Takes what is left, and gives it to a QEMU that waits: the machine stands then. With what is to be ended where that
/// fails.
async fn load_last(
    home: &MachineHome,
    machine: &Machine,
    coming: Coming,
    (prefix, restored): (&[u8], Restored),
) -> (Result<DestinationLink, MachineError>, Option<IncomingMemory>) {
    match coming {
        Coming::Memory(mut memory, open) => {
            let loaded = async {
                let (link, decoder) = memory.rest(home, machine, open).await.map_err(|reason| failed(home, reason))?;
                load(home, machine, restored, (prefix, decoder.devices())).await.map(|()| link)
            };
            (loaded.await, Some(memory))
        }
        Coming::Copy(coming) => {
            let CopyLink { link, decoder, copy } = *coming;
            let synchronized = tokio::task::spawn_blocking(move || copy.synchronize().map(|()| copy).map_err(words));
            let loaded = async {
                let copy = synchronized.await.unwrap_or_else(|error| Err(format!("receiving ended: {error}")));
                let copy = copy.map_err(|reason| failed(home, reason))?;
                let loaded = load(home, machine, restored, (prefix, decoder.devices())).await;
                stand_by::close(Some(copy));
                loaded.map(|()| link)
            };
            (loaded.await, None)
        }
    }
}
