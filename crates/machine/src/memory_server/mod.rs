//! The process that serves a machine's memory, below the machine's keeper: `onecopy memory-server`.
//!
//! ```text
//!  keeper ── mounts the file, holds both descriptors ──> memory server ── takes them, answers the kernel
//!     ^                                                       │ memory.sock
//!     └──────────── a new keeper takes them back <────────────┘
//! ```
//!
//! Both hold the kernel's end of the file and the memory file with what is not kept elsewhere, and each gives them to
//! the other's successor: the machine's memory outlives the death of either. When both die at once the file is gone:
//! the machine runs on until it touches a page that the host's memory has not, and ends then. A keeper that has the
//! file open itself, for a machine that comes or is copied here, has not the kernel's end meanwhile: only the server
//! has.
//!
//! The first thread of the process never touches the file: a thread that does so waits for the server, also when it is
//! killed, and the keeper must see that the server is dead ([`keeper`](crate::keeper)).

mod client;
mod headroom;
mod pages;
mod protocol;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onecopy_checkpoint::image::{Checkpoint, Image};
use onecopy_checkpoint::memory::{Descriptors, Epoch, GuestMemory, become_memory_server};
use onecopy_checkpoint::{CheckpointError, PAGE_BYTES};
use onecopy_control::{Answer, server, socket};
use onecopy_postgres::ServiceUser;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::keeper::{Role, servers_of, unix_ms};
use crate::{MachineError, MachineHome};
pub(crate) use client::ANSWER_TIMEOUT;
pub use client::MemoryClient;
pub use headroom::available_memory_bytes;
pub(crate) use pages::EpochPages;
pub use protocol::{Appended, EndedEpoch, KeptPages, Request, ServedMemory};

/// What such files begin with.
pub(crate) const DEVICES: &str = "devices-";

/// Where a keeper lays down the devices' state of the checkpoint that is being written: for each epoch another file, so
/// that who was late is not given that of the next one.
pub(crate) fn devices_file(home: &MachineHome, epoch: u64) -> PathBuf {
    home.checkpoints().join(format!("{DEVICES}{epoch}"))
}

/// A checkpoint stands on so many others at most; the next one is whole. Whoever reads it opens all of them.
const DEPTH_MAX: usize = 32;

/// How often it is looked whether the file is gone.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What a memory server takes over, by its numbers in the process that has started it.
#[derive(Debug, Clone, Copy)]
pub struct Inherited {
    /// The kernel's end of the file.
    pub device: i32,
    /// The memory file with what is kept.
    pub state: i32,
}

/// A descriptor of another process, here (pidfd_getfd(2)).
pub(crate) fn descriptor_of(process_id: u32, number: i32) -> io::Result<OwnedFd> {
    let process = i32::try_from(process_id).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    let process = rustix::process::pidfd_open(process, PidfdFlags::empty())?;
    Ok(rustix::process::pidfd_getfd(process, number, PidfdGetfdFlags::empty())?)
}

/// Makes this process one that serves memory; before any of its threads is started.
///
/// # Errors
/// [`CheckpointError`]: the memory of this process cannot be locked.
pub fn prepare_process() -> Result<(), CheckpointError> {
    match become_memory_server() {
        // Root of a container often has no CAP_SYS_RESOURCE. It matters where memory is scarce.
        Err(CheckpointError::Io { action: "change the role of", source, .. })
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            tracing::warn!(%source, "the kernel may make this process wait for memory");
            Ok(())
        }
        other => other,
    }
}

/// Serves the memory of the machine in `directory`, whose file the process that has started this one has mounted, until
/// nobody has it any more. After SIGTERM it takes the file away as soon as no machine has it mapped: whoever ends all
/// processes of a host at once ends no memory under a machine.
///
/// # Errors
/// [`MachineError::Memory`], [`MachineError::File`].
pub async fn run(directory: &Path, inherited: Inherited) -> Result<(), MachineError> {
    let home = MachineHome::at(directory)?;
    let user = ServiceUser::resolve(None)?;
    let mut terminated =
        signal(SignalKind::terminate()).map_err(MachineError::file("listen for signals of", home.root()))?;
    let adopted = home.clone();
    let memory = Arc::new(blocking(move || adopt(&adopted, &user, inherited)).await??);
    let descriptors = memory.descriptors().map_err(home.memory_failed())?;
    let numbers = (descriptors.device.as_raw_fd(), descriptors.state.as_raw_fd());
    let socket = home.memory_socket();
    // Whoever served this memory before is gone, which was looked at.
    let listener = socket::remove(&socket).and_then(|()| socket::listen(&socket));
    let listener = listener.map_err(MachineError::file("listen on", &socket))?;
    tracing::info!("the memory is served");
    let served = Served { home: home.clone(), numbers, last: Mutex::default() };
    let answered = Arc::downgrade(&memory);
    let respond = move |request| match answered.upgrade() {
        Some(memory) => served.respond(&memory, request),
        None => Answer::Error("the memory is served no more".to_owned()),
    };
    tokio::spawn(server::serve(listener, respond, std::future::pending()));
    let mut look = tokio::time::interval(LOOK_INTERVAL);
    let mut shall_end = false;
    loop {
        tokio::select! {
            _ = terminated.recv() => {
                tracing::info!("the memory is served until no machine has it mapped");
                shall_end = true;
            }
            _ = look.tick() => {
                if shall_end && !memory.has_ended() {
                    shall_end = !unmount(&memory).await?;
                }
                if memory.has_ended() {
                    return ended(memory, &home);
                }
            }
        }
    }
}

/// Whether the file is not mounted any more.
async fn unmount(memory: &Arc<GuestMemory>) -> Result<bool, MachineError> {
    let served = Arc::clone(memory);
    match blocking(move || served.unmount()).await? {
        Ok(is_gone) => Ok(is_gone),
        Err(error) => {
            // Somebody else has taken it away; the kernel tells when nobody has it mapped.
            tracing::warn!(%error, "the memory's file is not taken away");
            Ok(true)
        }
    }
}

/// Why it has ended, where that is not because the file is gone.
fn ended(memory: Arc<GuestMemory>, home: &MachineHome) -> Result<(), MachineError> {
    // While a client is being answered nobody can tell; the thread has logged it.
    Arc::into_inner(memory).map_or(Ok(()), GuestMemory::ended).map_err(home.memory_failed())
}

fn adopt(home: &MachineHome, user: &ServiceUser, inherited: Inherited) -> Result<GuestMemory, MachineError> {
    let path = home.memory();
    let servers = servers_of(Role::Memory, home).map_err(MachineError::file("look for who serves", &path))?;
    // Two would each write the state of the other.
    if servers.iter().any(|server| *server != std::process::id()) {
        return Err(home.memory_failed()(CheckpointError::Held { path }));
    }
    let keeper = rustix::process::getppid().map_or(0, |process| process.as_raw_nonzero().get().unsigned_abs());
    let taken = |number| {
        descriptor_of(keeper, number).map_err(MachineError::file("take over descriptors of the keeper of", home.root()))
    };
    let descriptors = Descriptors { device: taken(inherited.device)?, state: taken(inherited.state)? };
    let owner = (user.user_id(), user.group_id());
    GuestMemory::adopt(&home.memory(), &home.memory_shadow(), descriptors, owner).map_err(home.memory_failed())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, MachineError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| MachineError::Task(format!("serving a memory ended: {error}")))
}

/// What a memory server knows beside its memory.
struct Served {
    home: MachineHome,
    /// Those of its descriptors.
    numbers: (i32, i32),
    /// The last checkpoint that it has made durable, and the memory's epoch of that.
    last: Mutex<Option<(Checkpoint, Epoch)>>,
}

impl Served {
    fn respond(&self, memory: &Arc<GuestMemory>, request: Request) -> Answer {
        let outcome = match request {
            Request::Info => Ok(value(ServedMemory::new(self.numbers, memory.statistics()))),
            Request::Keep => {
                if let Err(reason) = headroom::check(memory.statistics().dropped_pages) {
                    return Answer::Error(reason);
                }
                memory.keep().map(|kept| {
                    let (size_bytes, copied, missing) = (memory.size_bytes(), kept.copied, kept.missing);
                    value(KeptPages { size_bytes, copied, missing })
                })
            }
            Request::Cut => memory.cut().map(|cut| value(EndedEpoch { epoch: cut.epoch.0, pages: cut.pages })),
            Request::Append { epoch, disk } => self.append(memory, Epoch(epoch), &disk).map(value),
            Request::Pages { epoch, since, process_id, descriptor } => {
                serve_pages(memory, (epoch, since), (process_id, descriptor)).map(value)
            }
            Request::RereadShadow => memory.reread_shadow().map(value),
            Request::Release => memory.release_all().map(value),
        };
        Answer::from(outcome)
    }

    /// Writes a checkpoint: the pages of an epoch, and what the keeper has laid down of the devices.
    fn append(&self, memory: &GuestMemory, epoch: Epoch, disk: &str) -> Result<Appended, CheckpointError> {
        let directory = self.home.checkpoints();
        let state = devices_file(&self.home, epoch.0);
        let devices = std::fs::read(&state);
        let devices = devices.map_err(|source| CheckpointError::Io { action: "read", path: state, source })?;
        let mut image = Image::open_to_write(&directory)?;
        // Gone when this one fails: what its epoch has is in no later one.
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Compacted, it is the same one.
        let which = |checkpoint: &Checkpoint| (checkpoint.number, checkpoint.taken_unix_ms);
        let known = image.last().as_ref().map(which);
        let last = last.filter(|(last, _)| known == Some(which(last)) && image.depth(last.number) < DEPTH_MAX);
        // Where an epoch between the two is not kept, nobody knows what changed.
        let changed = last.and_then(|(last, before)| Some((last.number, memory.changed_since(before, epoch).ok()?)));
        let (since, pages) = match changed {
            Some((last, changed)) => (Some(last), changed),
            None => (None, memory.present(epoch)?),
        };
        image.check_space(pages.len() as u64)?;
        let mut writer = image.begin(since)?;
        let mut content = [0; PAGE_BYTES];
        for page in &pages {
            memory.read(epoch, *page, &mut content)?;
            writer.page(*page, &content)?;
        }
        let number = writer.commit(unix_ms(), &devices, disk)?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = image.last().map(|last| (last, epoch));
        Ok(Appended { number, since, pages: pages.len() as u64 })
    }
}

/// What changed since an epoch, or all.
fn pages(memory: &GuestMemory, epoch: u64, since: Option<u64>) -> Result<Vec<u32>, CheckpointError> {
    match since {
        Some(since) => memory.changed_since(Epoch(since), Epoch(epoch)),
        None => memory.present(Epoch(epoch)),
    }
}

/// Begins to serve pages to who asks; how many there are.
fn serve_pages(
    memory: &Arc<GuestMemory>,
    (epoch, since): (u64, Option<u64>),
    (process_id, descriptor): (u32, i32),
) -> Result<usize, CheckpointError> {
    let failed = |source| CheckpointError::Io { action: "send pages to", path: PathBuf::from("a keeper"), source };
    let (pages, memory) = (pages(memory, epoch, since)?, Arc::clone(memory));
    let stream = UnixStream::from(descriptor_of(process_id, descriptor).map_err(failed)?);
    let count = pages.len();
    let serving = move || {
        let served = pages::serve(&stream, &pages, |page, into| Ok(memory.read(Epoch(epoch), page, into)?));
        if let Err(error) = served {
            tracing::warn!(error, epoch, "the pages of an epoch are not all served");
        }
    };
    std::thread::Builder::new().name("memory-pages".to_owned()).spawn(serving).map_err(failed)?;
    Ok(count)
}

fn value(of: impl Serialize) -> serde_json::Value {
    serde_json::to_value(of).expect("answers are strings and numbers")
}
