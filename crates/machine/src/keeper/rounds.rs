//! What is sent of a machine's memory to another host, epoch by epoch, not faster than was allowed.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use onecopy_checkpoint::delta::{
    Changed, Counts, Encoder, Epoch, Known, NothingKnown, Options, Sizes, Source, Version,
};
use onecopy_checkpoint::link::{Pace, Sending, Session};
use onecopy_checkpoint::take::Cause;
use onecopy_checkpoint::{LinkError, PAGE_BYTES};
use onecopy_clone::network::protocol::words as other_hosts_words;
use onecopy_guest_agent::protocol::FreePages as FreePagesTold;

use super::disk_comparison::Peer;
use super::disk_epochs::EpochBlocks;
use super::free_pages::{self, FreePages};
use super::link::{Answered, Said, SourceLink, TURN_TIMEOUT, Watch, directions, message, set_protected, understand};
use super::sent_pages::{Keeping, SentPages};
use super::shared_disk::DiskPageMap;
use super::words;
use super::work::Work;
use crate::machine::CHECKPOINT_TIMEOUT;
use crate::memory_server::{EpochPages, Request};

/// What the other side has already.
#[derive(Debug, Clone, Copy)]
pub(super) enum Since<'a> {
    /// Nothing; and what the guest has free, as it has told behind the cut.
    Nothing(Option<&'a FreePagesTold>),
    /// What was sent of this epoch.
    Epoch(u64),
}

impl Since<'_> {
    fn epoch(self) -> Option<u64> {
        match self {
            Since::Nothing(_) => None,
            Since::Epoch(epoch) => Some(epoch),
        }
    }
}

/// The source's end of a migration, with what it knows of the other one.
pub(super) struct Sender {
    link: SourceLink,
    encoder: Encoder,
    /// What is on the disk that the other side reads, too.
    pub(super) page_map: Option<DiskPageMap>,
    sent_pages: SentPages,
    sizes: Sizes,
    stream: UnixStream,
    is_cancelled: Arc<AtomicBool>,
}

impl Sender {
    /// Begins with a host that holds nothing of the machine.
    pub(super) fn begin(
        stream: UnixStream,
        sizes: Sizes,
        page_map: Option<DiskPageMap>,
        bytes_per_second: Option<u64>,
        is_cancelled: Arc<AtomicBool>,
    ) -> Result<Sender, String> {
        let _watch = Watch::begin(&stream, &is_cancelled, None).map_err(words)?;
        let (from, to) = stream.try_clone().and_then(directions).map_err(words)?;
        let pace = Arc::new(Pace::new(bytes_per_second));
        let (link, _) = Sending::begin(Session::new(), sizes, from, to, pace, TURN_TIMEOUT).map_err(lost)?;
        let seed = page_map.as_ref().map_or_else(rand::random, |map| map.seed);
        let encoder = Encoder::new(sizes, Options::new(seed)).map_err(words)?;
        let sent_pages = SentPages::new(sizes.memory_bytes);
        Ok(Sender { link, encoder, page_map, sent_pages, sizes, stream, is_cancelled })
    }

    /// What has changed travels as data, also where the other side has it elsewhere. Before anything is sent.
    pub(super) fn send_all(&mut self) -> Result<(), String> {
        self.forget_disk();
        let options = Options { refers: false, ..Options::new(rand::random()) };
        self.encoder = Encoder::new(self.sizes, options).map_err(words)?;
        Ok(())
    }

    /// Whether the other side reads the disk.
    pub(super) fn shares_disk(&self) -> bool {
        self.page_map.is_some()
    }

    /// The other side does not read the disk: nothing refers to it.
    pub(super) fn forget_disk(&mut self) {
        if let Some(map) = self.page_map.take() {
            map.forget();
        }
    }

    /// Ends the connection when the migration is cancelled, or after so long.
    pub(super) fn watch(&self, longest: Option<Duration>) -> Result<Watch, String> {
        Watch::begin(&self.stream, &self.is_cancelled, longest).map_err(words)
    }

    /// What the machine says waits for the other side from now on, which may be silent for so many seconds.
    pub(super) fn set_protected(&self, detection_s: Option<u64>) -> Result<(), String> {
        set_protected(&self.stream, detection_s).map_err(words)
    }

    /// Says something.
    pub(super) fn say(&mut self, said: &Said) -> Result<(), String> {
        self.link.say(&message(said)).map_err(lost)
    }

    /// Sends bytes that the other side knows to await.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.link.say(bytes).map_err(lost)
    }

    /// What the other side answers, for which it has [`TURN_TIMEOUT`].
    pub(super) fn answer(&mut self) -> Result<Answered, String> {
        self.link.hear().and_then(|answered| understand(&answered)).map_err(lost)
    }
}

impl Peer for Sender {
    fn say(&mut self, message: &[u8]) -> Result<(), Cause> {
        Ok(self.send(message)?)
    }

    /// For which the other side has [`TURN_TIMEOUT`].
    fn hear(&mut self) -> Result<Vec<u8>, Cause> {
        Ok(self.link.hear().map_err(lost)?)
    }
}

/// Why a connection ended.
fn lost(error: LinkError) -> String {
    match error {
        LinkError::Refused { reason } => other_hosts_words(&reason),
        LinkError::Delta(error) => error.to_string(),
        error => format!("the other host is lost: {error}"),
    }
}

impl Work {
    /// What its guest has free, which is asked behind the cut of the first epoch; none where it does not tell.
    pub(super) fn ask_free_pages(&self) -> Option<FreePagesTold> {
        let asked = self.handle.block_on(free_pages::ask(&self.keeper, &self.is_cancelled));
        asked.inspect_err(|reason| tracing::info!(reason, "what is free of its memory travels, too")).ok()
    }

    /// What pages held at the end of an epoch, those that changed since another one or all that are not zeros.
    fn epoch_pages(&self, memory_bytes: u64, epoch: u64, since: Option<u64>) -> Result<EpochPages, String> {
        let (near, far) = UnixStream::pair().map_err(words)?;
        let (process_id, descriptor) = (std::process::id(), far.as_raw_fd());
        self.ask::<u64>(Request::Pages { epoch, since, process_id, descriptor })?;
        // Read to its end where the server has died.
        drop(far);
        EpochPages::open(near, memory_bytes / PAGE_BYTES as u64, CHECKPOINT_TIMEOUT).map_err(words)
    }

    /// How many pages the first round has at most, of an epoch that has just ended.
    pub(super) fn count_used(&self, memory_bytes: u64, epoch: u64) -> Result<u64, String> {
        let told = self.ask_free_pages();
        let pages = self.epoch_pages(memory_bytes, epoch, None)?;
        Ok(without_free(&pages, told.as_ref(), memory_bytes).len() as u64)
    }

    /// Sends what pages held at the end of an epoch, those that changed since another one or all, the disk's blocks,
    /// where they travel, and the devices of a machine that stands; the other host holds them when this returns.
    pub(super) fn send(
        &self,
        sender: &mut Sender,
        epoch: u64,
        since: Since<'_>,
        disk: Option<&EpochBlocks>,
        devices: &[u8],
    ) -> Result<Counts, String> {
        let pages = self.epoch_pages(sender.sizes.memory_bytes, epoch, since.epoch())?;
        let keeping = Keeping { source: &pages, sent: &sender.sent_pages };
        let used;
        let memory = match since {
            Since::Epoch(_) => Changed { numbers: pages.numbers(), source: &keeping },
            Since::Nothing(told) => {
                // Most of what is sent first does not change again.
                sender.sent_pages.forget();
                used = without_free(&pages, told, sender.sizes.memory_bytes);
                Changed { numbers: &used, source: &pages }
            }
        };
        let versions: Vec<Version> = sender.page_map.as_ref().and_then(DiskPageMap::version).into_iter().collect();
        let disk = disk.map(|blocks| Changed { numbers: blocks.numbers(), source: blocks });
        let epoch = Epoch { number: epoch, versions: &versions, memory, disk, devices };
        let known: &mut dyn Known = match &mut sender.page_map {
            Some(map) => map,
            None => &mut NothingKnown,
        };
        let sent = sender.link.epoch(&mut sender.encoder, &epoch, known).map_err(lost)?;
        sender.sent_pages.acknowledge();
        if let Some(rate) = sent.link_bytes_per_second {
            sender.encoder.set_link(rate);
        }
        let mut counts = sent.counts;
        counts.add(&sent.repaired);
        Ok(counts)
    }
}

/// The pages of an epoch without those that its guest has free, as it has told behind the cut.
fn without_free(pages: &EpochPages, told: Option<&FreePagesTold>, memory_bytes: u64) -> Vec<u64> {
    let told = told.map(|told| FreePages::of(told, memory_bytes, |page, into| pages.read(page, into)));
    let free = match told {
        Some(Ok(free)) => free,
        Some(Err(reason)) => {
            tracing::warn!(reason, "what is free of its memory travels, too");
            FreePages::default()
        }
        None => FreePages::default(),
    };
    tracing::info!(pages = free.count(), "what its guest has free does not travel");
    free.without(pages.numbers())
}
