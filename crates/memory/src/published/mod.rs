//! Level `publish`: memory that a server has parked is taken without asking it.
//!
//! The server's extension parks chunks of its pool in advance and publishes them. The agent takes one by a
//! compare-and-swap in the server's shared memory, gives its memory back to the host by way of the file behind that
//! memory, and says so; no process of the server needs to run for it. The server then lowers its target by what was
//! taken.
//!
//! ```text
//!              server               agent                 agent             server
//!   PARKED ───────────> PUBLISHED ─────────> TAKING ──────────────> TAKEN ─────────> RETURNED
//!            <───────────                      memory given back     target lowered
//!              server takes it back
//! ```
//!
//! Either side may die anywhere. The server never brings a chunk back that is `TAKING`, because a stopped agent could
//! still give its memory back then; when the agent's lock (`claim`) is free, the work is finished by the server or by
//! the next agent, whoever comes first. A server that starts again has new memory: it is looked up for each operation,
//! the old is not kept.
//!
//! The agent needs root of the host (CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE outside of any user namespace, for
//! `/proc/PID/map_files`). A server in a container is reached from the host, under the path that its data directory has
//! there; an agent inside a container is refused by the kernel, and says so.

mod announcement;
mod claim;
mod layout;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use announcement::Announcement;
use claim::Claim;
use layout::{ChunkState, HEADER_BYTES, Layout, TAKEN_BYTES_AT};

use crate::segment::{Postmaster, Segment, Window};
use crate::{Bytes, MemoryError};

/// Chunks that are taken at once at most: 128 MiB with blocks of 8 kB. A server that wants one of them back waits for
/// the rest.
const RUN_CHUNKS_MAX: u32 = 64;

/// What was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Taken {
    /// How much memory really went back to the host: less than the chunks' size where a server has not used them since
    /// it started. Pages that they share with others are not counted: the server gives those back.
    pub bytes: Bytes,
    /// How long it took.
    pub microseconds: u64,
    /// How many chunks the server has less.
    pub chunks: u32,
    /// Their size.
    pub size_bytes: Bytes,
}

/// A point between two steps of taking, for who watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Chunks are marked as being taken, their memory is still there.
    Claimed,
    /// Their memory is back at the host, they are still marked as being taken.
    GivenBack,
}

/// The published memory of one server. While it lives no other agent can take any.
#[derive(Debug)]
pub struct Published {
    data_directory: PathBuf,
    /// One at a time takes: what is marked as being taken when it begins was left by a dead agent.
    claim: Mutex<Claim>,
}

/// The shared memory as it is at this moment.
struct Attached {
    segment: Segment,
    layout: Layout,
    description: Window,
}

impl Published {
    /// Becomes the agent of the server of this data directory. The server must run.
    ///
    /// # Errors
    /// [`MemoryError::NoServer`]; [`MemoryError::NotAllowed`]: the server has not loaded the extension, another agent
    /// works for it, or the kernel does not let us; [`MemoryError::Malformed`]: its memory is not what it should be.
    pub fn open(data_directory: &Path) -> Result<Published, MemoryError> {
        attach(data_directory)?;
        let claim = Mutex::new(Claim::get(data_directory)?);
        Ok(Published { data_directory: data_directory.to_owned(), claim })
    }

    /// What could be taken now. Cheap: some files of the kernel, and a word of shared memory a chunk.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn available_bytes(&self) -> Result<Bytes, MemoryError> {
        let attached = attach(&self.data_directory)?;
        let published = (0..attached.layout.chunks).filter(|chunk| attached.is(*chunk, ChunkState::Published));
        Ok(published.map(|chunk| attached.layout.place_of(chunk..chunk + 1).1).sum())
    }

    /// Takes chunks from the top until their size is at least `bytes` or no more are published. Blocks: about 0.3 s for
    /// 1 GB.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`MemoryError::File`] when the kernel does not take the memory back. What was taken
    /// before stays taken.
    pub fn take(&self, bytes: Bytes) -> Result<Taken, MemoryError> {
        self.take_watched(bytes, &mut |_| ())
    }

    /// As [`take`](Self::take), and tells `watch` between the steps: there a test can stop or kill the taker.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_watched(&self, bytes: Bytes, watch: &mut dyn FnMut(Step)) -> Result<Taken, MemoryError> {
        let began = Instant::now();
        let mut claim = self.claim.lock().unwrap_or_else(PoisonError::into_inner);
        if !claim.holds() {
            *claim = Claim::get(&self.data_directory)?;
        }
        let attached = attach(&self.data_directory)?;
        attached.finish_for_dead_agent()?;
        let mut taken = Taken::default();
        let mut wanted = bytes;
        let mut end = attached.layout.chunks;
        while wanted > 0 {
            let run = attached.mark_run(end, wanted);
            if run.is_empty() {
                break;
            }
            watch(Step::Claimed);
            taken.bytes += attached.give_back(run.clone(), watch)?;
            taken.chunks += run.end - run.start;
            let size_bytes = attached.layout.place_of(run.clone()).1;
            taken.size_bytes += size_bytes;
            wanted = wanted.saturating_sub(size_bytes);
            end = run.start;
        }
        taken.microseconds = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(taken)
    }
}

impl Attached {
    fn is(&self, chunk: u32, state: ChunkState) -> bool {
        self.description.word(self.layout.state_at(chunk)).is_some_and(|word| word.load(Acquire) == state as u32)
    }

    /// One transition; false when the chunk was not in that state.
    fn change(&self, chunk: u32, from: ChunkState, to: ChunkState) -> bool {
        let word = self.description.word(self.layout.state_at(chunk));
        word.is_some_and(|word| word.compare_exchange(from as u32, to as u32, AcqRel, Acquire).is_ok())
    }

    /// Marks the topmost published chunks below `end` as being taken: neighbours only, about as many as `bytes` need.
    /// Empty when none is published.
    fn mark_run(&self, end: u32, bytes: Bytes) -> std::ops::Range<u32> {
        let (from, to) = (ChunkState::Published, ChunkState::Taking);
        let top = (0..end).rev().find(|chunk| self.change(*chunk, from, to));
        let Some(top) = top else { return 0..0 };
        let mut run = top..top + 1;
        while run.end - run.start < RUN_CHUNKS_MAX
            && self.layout.place_of(run.clone()).1 < bytes
            && run.start > 0
            && self.change(run.start - 1, from, to)
        {
            run.start -= 1;
        }
        run
    }

    /// Gives the memory of chunks back that are marked as being taken.
    fn give_back(&self, run: std::ops::Range<u32>, watch: &mut dyn FnMut(Step)) -> Result<Bytes, MemoryError> {
        let (place, length) = self.layout.place_of(run.clone());
        let given = self.segment.memory_bytes(place, length).and_then(|there| {
            let gone = self.segment.give_back(place, length)?;
            Ok(there.min(gone))
        });
        let outcome = match given {
            Ok(_) => ChunkState::Taken,
            // Nothing is lost: what such a chunk holds means nothing.
            Err(_) => ChunkState::Published,
        };
        if given.is_ok() {
            watch(Step::GivenBack);
        }
        for chunk in run {
            self.change(chunk, ChunkState::Taking, outcome);
        }
        let bytes = given.map_err(MemoryError::file("give back memory of", "the server's shared memory"))?;
        if let Some(total) = self.description.long_word(TAKEN_BYTES_AT) {
            total.fetch_add(bytes, AcqRel);
        }
        Ok(bytes)
    }

    /// We are the only agent: what is marked as being taken was marked by one that is dead.
    fn finish_for_dead_agent(&self) -> Result<(), MemoryError> {
        for chunk in (0..self.layout.chunks).filter(|chunk| self.is(*chunk, ChunkState::Taking)) {
            let bytes = self.give_back(chunk..chunk + 1, &mut |_| ())?;
            tracing::info!(chunk, bytes, "gave memory back that an earlier agent had begun to take");
        }
        Ok(())
    }
}

/// Finds and checks the shared memory.
fn attach(data_directory: &Path) -> Result<Attached, MemoryError> {
    let announcement = Announcement::read(data_directory)?;
    let postmaster = Postmaster::find(data_directory)?;
    let segment = Segment::open(&postmaster, announcement.address)?;
    let malformed = |reason: String| MemoryError::Malformed { path: postmaster.file("map_files"), reason };
    let place = segment.place_of(announcement.address);
    let place = place.ok_or_else(|| malformed("the description lies outside the shared memory".to_owned()))?;
    let mut header = [0; HEADER_BYTES];
    segment.read(place, &mut header).map_err(|error| malformed(error.to_string()))?;
    let layout = Layout::check(&header, place, segment.size_bytes(), announcement.start_us);
    let layout = layout.map_err(|reason| malformed(reason.to_owned()))?;
    let description =
        segment.window(place, layout.description_bytes()).map_err(|error| malformed(error.to_string()))?;
    Ok(Attached { segment, layout, description })
}
