//! The side that sends.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::mpsc::{SyncSender, sync_channel};

use onecopy_pagemap::{Bounds, ContentHash, Found, PageMap, content_hash};

use super::choice::Worth;
use super::format::{Begin, End, Form, Kind, PART_PIECES_MAX, write_part};
use super::part::{EncodedPart, Part, Plan, Planned, ZSTD_LEVEL, xor};
use super::{
    BlockAt, Changed, Counts, DeltaError, Different, Epoch, HELD_PAGES_MAX, HeldEpoch, Known, Piece, Sizes, Source,
    Space, VERSIONS_MAX, Version, Wanted, threads,
};
use crate::PAGE_BYTES;
use crate::restore::DEVICES_BYTES_MAX;

/// Parts that are made at once, and as many wait to be written: 8 MiB of content each.
const PARTS: usize = 4;
/// Pieces of a part, if there are as many: a small epoch is work for all threads, too.
const PART_PIECES_MIN: usize = 64;
/// A link of 1 Gbit/s.
const LINK_BYTES_PER_SECOND_DEFAULT: u64 = 125_000_000;

/// How epochs are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The seed of the page map's [`content_hash`](onecopy_pagemap::content_hash).
    pub seed: u64,
    /// How fast the link is, bytes a second: decides what compression is worth.
    pub link_bytes_per_second: u64,
    /// Threads at most.
    pub threads: usize,
    /// Pages of which it is remembered what the other side holds.
    pub held_pages_max: u64,
    /// Whether pages and blocks refer to content that the other side has elsewhere.
    pub refers: bool,
}

impl Options {
    /// For a disk's seed: a link of 1 Gbit/s, two threads, [`HELD_PAGES_MAX`].
    pub fn new(seed: u64) -> Options {
        let link_bytes_per_second = LINK_BYTES_PER_SECOND_DEFAULT;
        Options { seed, link_bytes_per_second, threads: 2, held_pages_max: HELD_PAGES_MAX, refers: true }
    }
}

/// An epoch that was sent and is not acknowledged.
struct Sent {
    held: HeldEpoch,
    devices: Vec<u8>,
}

/// Encodes epochs for one other side.
///
/// ```text
///            encode                   acknowledge
///  settled ─────────> under way ─────────────────> settled
///     ^                 │   ^ │ repair
///     └──── resume ─────┘   └─┘
/// ```
pub struct Encoder {
    sizes: Sizes,
    options: Options,
    /// What each page of the other side's memory holds, by what was sent of it.
    held: PageMap,
    acknowledged: HeldEpoch,
    devices: Vec<u8>,
    sent: Option<Sent>,
    /// Pages of the epoch under way: should it not arrive, it is not known what the other side holds of them.
    under_way: Vec<u64>,
    /// An epoch did not arrive since the last one that did: it is not known what the other side's blocks hold.
    is_disk_in_doubt: bool,
}

impl Encoder {
    /// For another side that holds nothing.
    ///
    /// # Errors
    /// A size that no machine has here.
    pub fn new(sizes: Sizes, options: Options) -> Result<Encoder, DeltaError> {
        let held = index(sizes, options)?;
        Ok(Encoder {
            sizes,
            options,
            held,
            acknowledged: HeldEpoch::NOTHING,
            devices: Vec::new(),
            sent: None,
            under_way: Vec::new(),
            is_disk_in_doubt: false,
        })
    }

    /// For another side that holds an epoch already that this one sent in another life: of its pages it is known that
    /// they are there as soon as they were told ([`Encoder::learn`]).
    ///
    /// # Errors
    /// As [`Encoder::new`].
    pub fn holding(sizes: Sizes, options: Options, held: HeldEpoch) -> Result<Encoder, DeltaError> {
        Ok(Encoder { acknowledged: held, ..Encoder::new(sizes, options)? })
    }

    /// The epoch that the other side holds for certain.
    pub fn acknowledged(&self) -> HeldEpoch {
        self.acknowledged
    }

    #[cfg(test)]
    pub(super) fn sent_held(&self) -> HeldEpoch {
        self.sent.as_ref().expect("an epoch is under way").held
    }

    /// Another rate of the link was measured.
    pub fn set_link(&mut self, bytes_per_second: u64) {
        self.options.link_bytes_per_second = bytes_per_second;
    }

    /// Writes an epoch: what changed since the one that was acknowledged last. It is under way then; after an error the
    /// connection is of no use any more, and [`Encoder::resume`] follows with the next one.
    ///
    /// # Errors
    /// [`DeltaError::Epoch`]: another one is under way, the number is not the next one, too many versions or devices;
    /// the machine cannot be read, or the connection written.
    pub fn encode(
        &mut self,
        epoch: &Epoch<'_>,
        known: &mut dyn Known,
        to: &mut (impl Write + Send),
    ) -> Result<Counts, DeltaError> {
        self.check(epoch)?;
        let begin = Begin {
            epoch: epoch.number,
            since: self.acknowledged,
            sizes: self.sizes,
            versions: epoch.versions.to_vec(),
        };
        let mut out = Out { to, hasher: blake3::Hasher::new(), counts: Counts::default() };
        let bytes = begin.to_bytes();
        out.hasher.update(&bytes);
        out.part(Kind::Begin, &bytes)?;
        let changed_blocks = epoch.disk.map_or(&[][..], |disk| disk.numbers);
        self.under_way.clear();
        let worth = Worth::of(self.options.link_bytes_per_second, self.options.threads);
        out.while_made(|parts| {
            self.each_stride(Space::Memory, epoch.memory, parts, worth, |encoder, planned, hashes| {
                encoder.plan_pages(planned, hashes, changed_blocks, epoch.versions.len(), known)
            })?;
            match epoch.disk {
                Some(disk) => self.each_stride(Space::Disk, disk, parts, worth, |encoder, planned, hashes| {
                    encoder.plan_blocks(planned, hashes);
                    Ok(())
                }),
                None => Ok(()),
            }
        })?;
        self.send_devices(epoch.devices, true, &mut out)?;
        let digest = *out.hasher.finalize().as_bytes();
        out.end(digest)?;
        let held = HeldEpoch { epoch: epoch.number, digest };
        self.sent = Some(Sent { held, devices: epoch.devices.to_vec() });
        Ok(out.counts)
    }

    fn check(&self, epoch: &Epoch<'_>) -> Result<(), DeltaError> {
        let no = |what: String| Err(DeltaError::Epoch { epoch: epoch.number, what });
        if let Some(sent) = &self.sent {
            return no(format!("{:?} is under way", sent.held));
        }
        if !self.under_way.is_empty() {
            return no("the one before did not arrive: agree anew what is held".to_owned());
        }
        if epoch.number <= self.acknowledged.epoch {
            return no(format!("{:?} is held", self.acknowledged));
        }
        if epoch.disk.is_some() && !self.sizes.disk_travels {
            return no("writes to the disk do not travel".to_owned());
        }
        let is_long = |version: &Version| matches!(version, Version::Snapshot(name) if name.len() > 255);
        if epoch.versions.len() > VERSIONS_MAX || epoch.versions.iter().any(is_long) {
            return no(format!("{} versions, or a name of more than 255 bytes", epoch.versions.len()));
        }
        if epoch.devices.len() > DEVICES_BYTES_MAX {
            return no(format!("{} bytes of devices", epoch.devices.len()));
        }
        for (space, changed) in [(Space::Memory, Some(epoch.memory)), (Space::Disk, epoch.disk)] {
            let numbers = changed.map_or(&[][..], |changed| changed.numbers);
            let is_rising = numbers.windows(2).all(|pair| pair[0] < pair[1]);
            if !is_rising || numbers.last().is_some_and(|last| *last >= self.sizes.pieces(space)) {
                return no(format!("the numbers of {space:?} do not rise, or leave it"));
            }
        }
        Ok(())
    }

    /// Reads and plans the pieces of a space and makes parts of them, some at a time.
    fn each_stride(
        &mut self,
        space: Space,
        changed: Changed<'_>,
        made: &SyncSender<EncodedPart>,
        worth: Worth,
        mut plan: impl FnMut(&mut Encoder, &mut [Planned], &[ContentHash]) -> Result<(), DeltaError>,
    ) -> Result<(), DeltaError> {
        let stride = (PARTS * PART_PIECES_MAX).min(changed.numbers.len());
        let mut content: Vec<Piece> = vec![[0; PAGE_BYTES]; stride];
        let (seed, threads) = (self.options.seed, self.options.threads);
        for numbers in changed.numbers.chunks(stride.max(1)) {
            let content = &mut content[..numbers.len()];
            let mut hashes = vec![0; numbers.len()];
            let ready = Plan::Ready(Form::Zero);
            let mut planned: Vec<Planned> =
                numbers.iter().map(|number| Planned { number: *number, plan: ready }).collect();
            let share = numbers.len().div_ceil(threads.max(1)).max(1);
            let shares = planned.chunks_mut(share).zip(content.chunks_mut(share)).zip(hashes.chunks_mut(share));
            threads::each(threads, shares, |((planned, content), hashes)| {
                read(changed.source, seed, planned, content, hashes)
            })?;
            plan(self, &mut planned, &hashes)?;
            let of_part = share.clamp(PART_PIECES_MIN, PART_PIECES_MAX);
            let pieces = planned.chunks(of_part).zip(content.chunks(of_part));
            let mut parts: Vec<Part<'_>> =
                pieces.map(|(planned, content)| Part::new(space, planned, content)).collect();
            threads::each(threads, parts.iter_mut(), |part| part.make(changed.source, worth))?;
            for part in parts {
                // Who does not take it any more has had an error, which is the one that is told.
                made.send(part.into_encoded()).map_err(|_| DeltaError::malformed("given up"))?;
            }
        }
        Ok(())
    }

    /// Looks for the content of pages that are not zeros: on the disk, and in what was sent. In the order of the
    /// stream, which is the one in which the other side comes to hold them.
    fn plan_pages(
        &mut self,
        planned: &mut [Planned],
        hashes: &[ContentHash],
        changed_blocks: &[u64],
        versions: usize,
        known: &mut dyn Known,
    ) -> Result<(), DeltaError> {
        let is_sought = |planned: &Planned| planned.plan != Plan::Ready(Form::Zero);
        let sought = planned.iter().zip(hashes).filter(|(planned, _)| is_sought(planned));
        let wanted: Vec<Wanted> = sought.map(|(planned, hash)| Wanted { page: planned.number, hash: *hash }).collect();
        let mut found = Vec::with_capacity(wanted.len());
        if versions > 0 {
            known.find_many(&wanted, &mut found).map_err(DeltaError::machine("look for the content of pages"))?;
        }
        found.resize(wanted.len(), None);
        let blocks = self.sizes.pieces(Space::Disk);
        let is_there = |at: &BlockAt| {
            usize::from(at.version) < versions && at.block < blocks && changed_blocks.binary_search(&at.block).is_err()
        };
        let mut found = VecDeque::from(found);
        let (mut block_next, mut page_next) = (None, None);
        for (planned, hash) in planned.iter_mut().zip(hashes) {
            let page = planned.number;
            if is_sought(planned) {
                let block = found.pop_front().flatten().filter(is_there);
                planned.plan = self.plan_page(page, *hash, block, block_next, page_next);
            }
            self.held.record(page, *hash, None);
            self.under_way.push(page);
            (block_next, page_next) = match planned.plan {
                Plan::Ready(Form::Block { version, first }) => (Some(BlockAt { version, block: first + 1 }), None),
                Plan::Ready(Form::Held { first }) => (None, Some(first + 1)),
                _ => (None, None),
            };
        }
        Ok(())
    }

    fn plan_page(
        &self,
        page: u64,
        hash: ContentHash,
        block: Option<BlockAt>,
        block_next: Option<BlockAt>,
        page_next: Option<u64>,
    ) -> Plan {
        if !self.options.refers {
            return Plan::Content { held: self.held.knows(page) };
        }
        if self.held.holds(page, hash) {
            return Plan::Same;
        }
        let by_block = |at: BlockAt| Plan::Ready(Form::Block { version: at.version, first: at.block });
        if let Some(at) = block.filter(|at| block_next == Some(*at)) {
            return by_block(at);
        }
        let follows = page_next.filter(|next| self.held.holds(*next, hash));
        // Of the other side's memory before its disk.
        match follows.or_else(|| self.held_page(hash)) {
            Some(first) => Plan::Ready(Form::Held { first }),
            None => block.map_or(Plan::Content { held: self.held.knows(page) }, by_block),
        }
    }

    /// A page of the other side's memory that has this content.
    fn held_page(&self, hash: ContentHash) -> Option<u64> {
        if !self.options.refers {
            return None;
        }
        match self.held.find_hash(hash, None) {
            Found::Block { block, .. } => Some(block),
            Found::Zero | Found::Unknown => None,
        }
    }

    /// Looks for the content of blocks among pages.
    fn plan_blocks(&self, planned: &mut [Planned], hashes: &[ContentHash]) {
        let mut next = None;
        for (planned, hash) in planned.iter_mut().zip(hashes) {
            if planned.plan == Plan::Ready(Form::Zero) {
                continue;
            }
            let page = next.filter(|page| self.held.holds(*page, *hash)).or_else(|| self.held_page(*hash));
            planned.plan =
                page.map_or(Plan::Content { held: !self.is_disk_in_doubt }, |first| Plan::Ready(Form::Held { first }));
            next = page.map(|page| page + 1);
        }
    }

    fn send_devices<W: Write + Send>(
        &self,
        devices: &[u8],
        may_differ: bool,
        out: &mut Out<'_, W>,
    ) -> Result<(), DeltaError> {
        let is_difference = may_differ && devices.len() == self.devices.len() && !devices.is_empty();
        let mut plain = devices.to_vec();
        if is_difference {
            xor(&mut plain, &self.devices);
        }
        let mut body = vec![u8::from(is_difference)];
        body.extend(u32::try_from(devices.len()).expect("it was measured").to_le_bytes());
        body.extend(blake3::hash(devices).as_bytes());
        out.hasher.update(&body[1..]);
        body.extend(zstd::bulk::compress(&plain, ZSTD_LEVEL)?);
        out.part(Kind::Devices, &body)
    }

    /// Writes what differs of the epoch that is under way as it is: no references, no differences.
    ///
    /// # Errors
    /// As [`Encoder::encode`]; there is no such epoch under way, or it does not have what is asked for.
    pub fn repair(
        &mut self,
        epoch: &Epoch<'_>,
        different: &Different,
        to: &mut (impl Write + Send),
    ) -> Result<Counts, DeltaError> {
        let no = |what: &str| DeltaError::Epoch { epoch: epoch.number, what: what.to_owned() };
        let sent = self.sent.as_ref().filter(|sent| sent.held.epoch == epoch.number);
        let digest = sent.ok_or_else(|| no("it is not under way"))?.held.digest;
        let mut out = Out { to, hasher: blake3::Hasher::new(), counts: Counts::default() };
        out.part(Kind::Repair, &epoch.number.to_le_bytes())?;
        let worth = Worth::of(self.options.link_bytes_per_second, self.options.threads);
        let disk = epoch.disk.map(|disk| (Space::Disk, disk, &different.blocks));
        for (space, changed, numbers) in [Some((Space::Memory, epoch.memory, &different.pages)), disk].iter().flatten()
        {
            let is_rising = numbers.windows(2).all(|pair| pair[0] < pair[1]);
            if !is_rising || numbers.iter().any(|number| changed.numbers.binary_search(number).is_err()) {
                return Err(no("what is to be repaired is no part of it"));
            }
            let again = Changed { numbers, ..*changed };
            // They are planned as they are read: zeros, or content.
            out.while_made(|parts| self.each_stride(*space, again, parts, worth, |_, _, _| Ok(())))?;
        }
        if different.devices {
            self.send_devices(epoch.devices, false, &mut out)?;
        }
        out.end(digest)?;
        Ok(out.counts)
    }

    /// The other side holds the epoch that is under way.
    ///
    /// # Errors
    /// [`DeltaError::Order`]: it holds another one.
    pub fn acknowledge(&mut self, held: HeldEpoch) -> Result<(), DeltaError> {
        match self.sent.take_if(|sent| sent.held == held) {
            Some(sent) => {
                (self.acknowledged, self.devices) = (sent.held, sent.devices);
                self.under_way.clear();
                self.is_disk_in_doubt = false;
                Ok(())
            }
            None => Err(DeltaError::Order { since: held, held: self.acknowledged }),
        }
    }

    /// A new connection stands, and the other side has said what it holds. What is not known of it any more is
    /// forgotten: the pages of an epoch that did not arrive, or all. True: the next epoch has what changed since
    /// [`Encoder::acknowledged`]; false: the other side begins with nothing, and the next epoch has all.
    ///
    /// # Errors
    /// A size that no machine has here.
    pub fn resume(&mut self, held: HeldEpoch) -> Result<bool, DeltaError> {
        if self.acknowledge(held).is_ok() {
            return Ok(true);
        }
        self.sent = None;
        self.is_disk_in_doubt = true;
        if held == self.acknowledged {
            for page in std::mem::take(&mut self.under_way) {
                self.held.forget(page..page + 1);
            }
            return Ok(held != HeldEpoch::NOTHING);
        }
        self.held = index(self.sizes, self.options)?;
        self.under_way.clear();
        self.devices.clear();
        self.acknowledged = HeldEpoch::NOTHING;
        Ok(false)
    }

    /// The other side holds these pages as they were at the end of the acknowledged epoch: so they can be referred to
    /// and be the base of differences. After [`Encoder::resume`] of those of the epoch that did not arrive, when the
    /// other side keeps what has not arrived apart; after [`Encoder::holding`] of all.
    ///
    /// # Errors
    /// The machine cannot be read.
    pub fn learn(&mut self, source: &dyn Source, pages: impl IntoIterator<Item = u64>) -> Result<(), DeltaError> {
        let mut content = [0; PAGE_BYTES];
        for page in pages {
            let read = source.read_acknowledged(page, &mut content);
            if read.map_err(DeltaError::machine("read what the other host holds"))? {
                self.held.record(page, content_hash(self.options.seed, &content), None);
            }
        }
        Ok(())
    }
}

fn index(sizes: Sizes, options: Options) -> Result<PageMap, DeltaError> {
    // Nothing asks it by address.
    let bounds = Bounds { blocks_max: options.held_pages_max, guest_memory_bytes: 0 };
    let made = PageMap::new(sizes.memory_bytes, options.seed, bounds);
    made.map_err(|error| DeltaError::Epoch { epoch: 0, what: error.to_string() })
}

/// Reads some pieces, and tells zeros from others; the hash of each.
fn read(
    source: &dyn Source,
    seed: u64,
    planned: &mut [Planned],
    content: &mut [Piece],
    hashes: &mut [ContentHash],
) -> Result<(), DeltaError> {
    for ((planned, content), hash) in planned.iter_mut().zip(content).zip(hashes) {
        source.read(planned.number, content).map_err(DeltaError::machine("read the epoch"))?;
        if content.as_chunks::<16>().0.iter().any(|word| *word != [0; 16]) {
            planned.plan = Plan::Content { held: false };
        }
        *hash = content_hash(seed, content);
    }
    Ok(())
}

/// Where parts go.
struct Out<'a, W> {
    to: &'a mut W,
    hasher: blake3::Hasher,
    counts: Counts,
}

impl<W: Write + Send> Out<'_, W> {
    /// Writes parts while the next ones are made: a link that is slow holds nobody up before it must.
    fn while_made(
        &mut self,
        make: impl FnOnce(&SyncSender<EncodedPart>) -> Result<(), DeltaError>,
    ) -> Result<(), DeltaError> {
        std::thread::scope(|scope| {
            let (parts, to_write) = sync_channel::<EncodedPart>(PARTS);
            let writing = scope.spawn(move || to_write.iter().try_for_each(|part| self.pieces(&part)));
            let made = make(&parts);
            drop(parts);
            let written = writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            written.and(made)
        })
    }

    fn part(&mut self, kind: Kind, body: &[u8]) -> Result<(), DeltaError> {
        write_part(self.to, kind, body)?;
        self.counts.bytes += 5 + body.len() as u64;
        Ok(())
    }

    fn pieces(&mut self, part: &EncodedPart) -> Result<(), DeltaError> {
        self.counts.add(&part.counts);
        if part.is_empty() {
            return Ok(());
        }
        for told in part.told() {
            self.hasher.update(told);
        }
        self.part(Kind::Pieces, &part.body)
    }

    fn end(&mut self, digest: [u8; 32]) -> Result<(), DeltaError> {
        let end = End { pieces: self.counts.pieces(), digest };
        self.part(Kind::End, &end.to_bytes())?;
        Ok(self.to.flush()?)
    }
}
