//! The memory of a guest as a file that this process serves.
//!
//! ```text
//!  QEMU maps the file (share=on)
//!     │ the kernel writes back what is dirty, each page once          keeper: holds both descriptors
//!     v                                                               and gives them to the next server
//!  /dev/fuse ──> server thread ──> pages: open epoch │ ended epochs ──release──> shadow (a sparse file)
//!                                  └──── state, a memory file ────┘
//! ```
//!
//! **Epochs.** All that is written back since the last [`cut`](GuestMemory::cut) belongs to the open epoch. A cut costs
//! one word. It shows an instant only when the machine stood and [`synchronize`] had returned before: stray write-back
//! belongs to the epoch that is open when it comes.
//!
//! **Modes.** A memory that is locked by its machine begins *dropping*: what is written back is not kept, because the
//! page cache never loses it. [`keep`](GuestMemory::keep) turns to *keeping* while the machine runs. A page whose only
//! content is in the page cache is never answered by zeros or by something older, but by an error.
//!
//! **Death.** The state lives in a memory file, the connection in a descriptor. Whoever holds both gives them to
//! [`adopt`](GuestMemory::adopt): the next server goes on, and who has the file mapped only waits. Without the state
//! ([`adopt_without_state`](GuestMemory::adopt_without_state)) every resident page counts as changed and all epochs are
//! void.
//!
//! The server's process holds no file of its own mount, but for moments in a thread apart: the kernel writes back at a
//! close and waits for the answer, so a killed server would wait for its successor to be gone.

mod apart;
mod between;
mod fuse;
mod keep;
mod pages;
mod residency;
mod shadow;
mod state;
mod store;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

use rustix::mm::MlockAllFlags;

use crate::{CheckpointError, PAGE_BYTES};
pub use between::Between;
use fuse::Looks;
pub use keep::Kept;
use keep::memory_resident;
pub use residency::resident_bytes;
use shadow::Shadow;
use state::{EPOCH_BITS, State};
pub use store::MemoryStatistics;
use store::Store;

/// An ended epoch of a memory. Numbers of one state rise; those of another are unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// What a memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOptions {
    /// The guest's memory, bytes: whole pages, at most 1 TiB.
    pub size_bytes: u64,
    /// What ended epochs may keep beside as many bytes as the memory has. When it is used up the oldest epoch goes.
    pub epochs_bytes_max: u64,
    /// The account of the machine's process.
    pub user_id: u32,
    /// Its group.
    pub group_id: u32,
    /// What is written back is not kept: the machine locks its memory (`-overcommit mem-lock=on-fault`).
    pub drops: bool,
}

/// What a keeper holds for the next server.
#[derive(Debug)]
pub struct Descriptors {
    /// The kernel's end of the file. The file is there as long as one of these is open.
    pub device: OwnedFd,
    /// The pages that are in no shadow yet.
    pub state: OwnedFd,
}

/// An epoch that has just ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Its number.
    pub epoch: Epoch,
    /// Pages changed in it.
    pub pages: u64,
}

/// A guest's memory, served by a thread of this process. Dropping it leaves the mount as it is, and nobody serves it
/// any more when that returns: another may adopt it. When the thread fails or panics the process is aborted, because a
/// guest whose memory nobody serves waits for ever, while a keeper hears of a process's end.
pub struct GuestMemory {
    store: Arc<Store>,
    device: Arc<File>,
    place: PathBuf,
    /// None: its end was waited for.
    server: Option<JoinHandle<Result<(), CheckpointError>>>,
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // The thread may wait for a request: it hands that on, and ends.
        *self.store.is_served.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// Dropped when it was not forgotten, in a panic, too.
struct OrAbort;

impl Drop for OrAbort {
    fn drop(&mut self) {
        tracing::error!("nobody serves a guest's memory any more: the process ends for the next one");
        std::process::abort();
    }
}

impl GuestMemory {
    /// Mounts a guest's memory over the file `place`, which is made, for a server to come: who touches the file waits
    /// for [`GuestMemory::adopt`]. What the file `shadow` holds is what the memory holds at first; where there is none,
    /// or an empty one, it is made, and all is zeros. Needs root.
    ///
    /// # Errors
    /// [`CheckpointError::Size`]; [`CheckpointError::Damaged`]: the shadow has another length; the operating system
    /// refuses.
    pub fn prepare(place: &Path, shadow: &Path, options: &MemoryOptions) -> Result<Descriptors, CheckpointError> {
        let create = |size_bytes| Shadow::create(shadow, size_bytes);
        let store = Store::fresh(create, options.size_bytes, options.epochs_bytes_max)?;
        if !options.drops {
            store.pages().state.set_keeping();
        }
        let device = fuse::mount(place, looks(options))?.into();
        let state =
            store.pages().state.descriptor().map_err(CheckpointError::io("duplicate a descriptor of", place))?;
        Ok(Descriptors { device, state })
    }

    /// Serves a memory that was prepared, or goes on for a server that has died: what that one had read and not
    /// answered is asked for again.
    ///
    /// # Errors
    /// [`CheckpointError::State`] when that is no state: [`GuestMemory::adopt_without_state`] is left then;
    /// [`CheckpointError::Damaged`]: the shadow is not the file that the memory began with; the operating system
    /// refuses: also a kernel that cannot ask again.
    pub fn adopt(
        place: &Path,
        shadow: &Path,
        descriptors: Descriptors,
        (user_id, group_id): (u32, u32),
    ) -> Result<GuestMemory, CheckpointError> {
        let store = Store::kept(State::open(descriptors.state)?, shadow)?;
        let device = File::from(descriptors.device);
        fuse::ask_again(&device)?;
        let looks = Looks { size_bytes: store.size_bytes, user_id, group_id };
        GuestMemory::begin(place, device, store, looks)
    }

    /// Goes on when the state is lost. All epochs are void, and what the page cache does not have is not known any
    /// more: with `drops`, of a locked memory, that are pages which the guest never touched, or gave back since; else
    /// reading one is an error. [`GuestMemory::keep`] makes the memory one of which epochs can be cut.
    ///
    /// A page that was given back shows zeros, and what the shadow holds if that was after the memory had begun to keep
    /// and before that epoch was released.
    ///
    /// # Errors
    /// As [`GuestMemory::prepare`].
    pub fn adopt_without_state(
        place: &Path,
        shadow: &Path,
        device: OwnedFd,
        options: &MemoryOptions,
    ) -> Result<GuestMemory, CheckpointError> {
        let open = |size_bytes| Shadow::open(shadow, size_bytes);
        let store = Store::fresh(open, options.size_bytes, options.epochs_bytes_max)?;
        if options.drops {
            store.knows_resident.store(false, Ordering::Release);
        } else {
            let mut pages = store.pages();
            pages.state.set_keeping();
            for page in 0..u32::try_from(options.size_bytes / PAGE_BYTES as u64).expect("checked with the state") {
                pages.set_dropped(page, true);
            }
        }
        let device = File::from(device);
        fuse::ask_again(&device)?;
        let memory = GuestMemory::begin(place, device, store, looks(options))?;
        if options.drops {
            // It is closed when reads are answered: the kernel may wait for them then.
            let (known, is_known) = mpsc::channel::<()>();
            let (resident, is_resident) = mpsc::sync_channel(1);
            let work = move || {
                let file = fuse::opened(place)?;
                // Who listens may have given up.
                let _ = resident.send(memory_resident(place, &file, options.size_bytes)?);
                let _ = is_known.recv();
                Ok(())
            };
            let (worked, asked) = apart::apart(place, work, || {
                let Ok(resident) = is_resident.recv() else { return Ok(()) };
                let mut pages = memory.store.pages();
                for page in (0u32..).zip(resident).filter_map(|(page, is_resident)| is_resident.then_some(page)) {
                    pages.set_dropped(page, true);
                }
                drop(pages);
                memory.store.knows_resident.store(true, Ordering::Release);
                let asked = fuse::ask_again(&memory.device);
                drop(known);
                asked
            });
            worked.and(asked)?;
        }
        Ok(memory)
    }

    fn begin(place: &Path, device: File, store: Store, looks: Looks) -> Result<GuestMemory, CheckpointError> {
        let store = Arc::new(store);
        let device = Arc::new(device);
        let server = std::thread::Builder::new().name("memory-server".to_owned()).spawn({
            let (store, device) = (store.clone(), device.clone());
            move || {
                let served = OrAbort;
                let ended = fuse::serve(&device, &store, looks);
                let ended = ended.inspect_err(|error| tracing::error!(%error, "a memory's server ends"));
                // The kernel answers for a server that it has not agreed with.
                if matches!(ended, Ok(()) | Err(CheckpointError::Protocol { .. })) {
                    std::mem::forget(served);
                }
                ended
            }
        });
        let server = server.map_err(CheckpointError::io("start a thread for", place))?;
        let memory = GuestMemory { store, device, place: place.to_owned(), server: Some(server) };
        // The server answers already: these look at the file.
        let look = || fuse::allow_dirty_pages(place).and_then(|()| fuse::set_size(place, looks.size_bytes));
        apart::apart(place, look, || ()).0?;
        Ok(memory)
    }

    /// What a keeper must hold, so that the memory outlives this process.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn descriptors(&self) -> Result<Descriptors, CheckpointError> {
        let failed = || CheckpointError::io("duplicate a descriptor of", &self.place);
        let device = self.device.try_clone().map_err(|error| failed()(error))?.into();
        let state = self.store.pages().state.descriptor().map_err(|error| failed()(error))?;
        Ok(Descriptors { device, state })
    }

    fn epoch(&self, number: u64) -> Epoch {
        Epoch(self.store.pages().state.identity() << EPOCH_BITS | number)
    }

    fn number(&self, epoch: Epoch) -> Result<u64, CheckpointError> {
        let number = epoch.0 & ((1 << EPOCH_BITS) - 1);
        if self.epoch(number) == epoch { Ok(number) } else { Err(CheckpointError::UnknownEpoch { epoch: epoch.0 }) }
    }

    /// Ends the open epoch in constant time.
    ///
    /// # Errors
    /// [`CheckpointError::NotKept`] while the memory drops, or when something could not be kept or is lost;
    /// [`CheckpointError::TooManyEpochs`].
    pub fn cut(&self) -> Result<Cut, CheckpointError> {
        let (number, pages) = self.store.pages().cut()?;
        Ok(Cut { epoch: self.epoch(number), pages })
    }

    /// The pages that changed in an ended epoch, rising.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownEpoch`].
    pub fn changed(&self, epoch: Epoch) -> Result<Vec<u32>, CheckpointError> {
        let number = self.number(epoch)?;
        self.store.changed_since(number.saturating_sub(1), number)
    }

    /// The pages that changed in the epochs after `before`, up to and with `until`, rising. Epochs of takes that were
    /// void lie between two that count.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownEpoch`]: also when one between them is not kept, so that nobody knows what changed,
    /// and when `before` is not the earlier one.
    pub fn changed_since(&self, before: Epoch, until: Epoch) -> Result<Vec<u32>, CheckpointError> {
        let (before, until) = (self.number(before)?, self.number(until)?);
        self.store.changed_since(before, until)
    }

    /// The pages that are not known to be zeros at the end of an epoch, rising: what a first checkpoint has to have.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownEpoch`].
    pub fn present(&self, epoch: Epoch) -> Result<Vec<u32>, CheckpointError> {
        let number = self.number(epoch)?;
        self.store.present(number)
    }

    /// Reads what a page held at the end of an epoch.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownEpoch`]: also when its room was needed meanwhile. The shadow cannot be read.
    pub fn read(&self, epoch: Epoch, page: u32, into: &mut [u8; PAGE_BYTES]) -> Result<(), CheckpointError> {
        let number = self.number(epoch)?;
        if u64::from(page) * PAGE_BYTES as u64 >= self.store.size_bytes {
            into.fill(0);
            return Ok(());
        }
        self.store.pages().read_at(&self.store.shadow, number, page, into)
    }

    /// Lets all epochs up to this one go: the shadow is as at its end when this returns.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownEpoch`]; the shadow cannot be written: then it is done by the next release, or when
    /// room is needed.
    pub fn release(&self, epoch: Epoch) -> Result<(), CheckpointError> {
        let number = self.number(epoch)?;
        self.store.release(number)
    }

    /// Lets all epochs go that have ended.
    ///
    /// # Errors
    /// As [`GuestMemory::release`].
    pub fn release_all(&self) -> Result<(), CheckpointError> {
        self.store.release_all()
    }

    /// Somebody has written the shadow: what it holds by now is what the memory holds, where that was not written to.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn reread_shadow(&self) -> Result<(), CheckpointError> {
        self.store.look_into_shadow()?;
        fuse::forget_read(&self.device)
    }

    /// The guest's memory, bytes.
    pub fn size_bytes(&self) -> u64 {
        self.store.size_bytes
    }

    /// What it did, and what it holds.
    pub fn statistics(&self) -> MemoryStatistics {
        self.store.statistics()
    }

    /// Takes the file away, and the server ends, unless somebody has it open or mapped: false then. Waits until all of
    /// it is written back.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn unmount(&self) -> Result<bool, CheckpointError> {
        fuse::unmount(&self.place)
    }

    /// Whether the server has ended: the mount is gone. Waits for nobody.
    pub fn has_ended(&self) -> bool {
        self.server.as_ref().is_none_or(std::thread::JoinHandle::is_finished)
    }

    /// Waits for the server's end: the mount is gone.
    ///
    /// # Errors
    /// The kernel's FUSE is too old.
    pub fn ended(mut self) -> Result<(), CheckpointError> {
        let server = self.server.take().expect("its end is waited for once");
        server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn looks(options: &MemoryOptions) -> Looks {
    Looks { size_bytes: options.size_bytes, user_id: options.user_id, group_id: options.group_id }
}

/// Waits until all that a guest has written to its memory by now is with its server. For another process than the
/// server's: see the module. It waits in a thread apart: killed, it keeps nothing but the file.
///
/// # Errors
/// A page could not be kept: then the memory's next cut says so, too.
pub fn synchronize(place: &Path) -> Result<(), CheckpointError> {
    let work = || fuse::opened(place)?.sync_data().map_err(CheckpointError::io("synchronize", place));
    apart::apart(place, work, || ()).0
}

/// Whether a memory is mounted over this file, also one whose server is dead. Asks nobody but the kernel.
///
/// # Errors
/// The operating system refuses.
pub fn is_mounted(place: &Path) -> Result<bool, CheckpointError> {
    fuse::is_mounted(place)
}

/// Takes away what is mounted over this file, if anything is; who has it mapped keeps it.
///
/// # Errors
/// The operating system refuses.
pub fn unmount_left(place: &Path) -> Result<(), CheckpointError> {
    while fuse::is_mounted(place)? {
        fuse::detach(place)?;
    }
    Ok(())
}

/// Makes this process one that serves memory: it is never swapped out, and the kernel, which may wait for it to make
/// room, does not make it wait for room in turn. Before any thread is started.
///
/// # Errors
/// The rights are missing (`CAP_SYS_RESOURCE`, `CAP_IPC_LOCK` or the limit of locked memory).
pub fn become_memory_server() -> Result<(), CheckpointError> {
    let own = Path::new("/proc/self");
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    rustix::mm::mlockall(flags).map_err(CheckpointError::io("lock the memory of", own))?;
    rustix::process::configure_io_flusher_behavior(true).map_err(CheckpointError::io("change the role of", own))
}
