//! The side that receives.
//!
//! ```text
//!  calling thread: reads and parses ──> fetchers: blocks, zstd ──┐  parts ahead: AHEAD_PARTS
//!                        └── in order ───────────────────────────┴──> applier: held, xor, digests, writes
//! ```

use std::collections::BTreeSet;
use std::io::Read;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::fetch::{Fetched, Parsed};
use super::format::{Begin, DIGEST_PIECES, End, Form, Kind, Reader, Run, read_part};
use super::part::{Digest, xor};
use super::{Blocks, Decoded, DeltaError, Destination, Different, HeldEpoch, Sizes, Space};
use crate::PAGE_BYTES;
use crate::restore::DEVICES_BYTES_MAX;

/// Threads that read blocks and uncompress.
const FETCHERS_MAX: usize = 4;
/// Parts that are fetched before they are needed, each with up to 4 MiB.
const AHEAD_PARTS: usize = 8;

/// Decodes epochs of one other side into a machine's memory and disk.
///
/// The other side may lie: nothing outside of the machine's sizes is read or written, and no epoch counts whose pieces
/// are not what its sender says that they are. What the sender says is its own affair.
pub struct Decoder {
    sizes: Sizes,
    held: HeldEpoch,
    devices: Vec<u8>,
    open: Option<Open>,
    is_verified: bool,
    is_end_checked: bool,
}

/// An epoch that has come and is not whole.
struct Open {
    held: HeldEpoch,
    begin: Begin,
    devices: Devices,
    different: Different,
}

/// Devices that came, and what they should be.
#[derive(Default)]
struct Devices {
    bytes: Vec<u8>,
    is_different: bool,
}

impl Decoder {
    /// For a machine that holds nothing of the other side.
    pub fn new(sizes: Sizes) -> Decoder {
        Decoder::holding(sizes, HeldEpoch::NOTHING, Vec::new())
    }

    /// For a machine that holds an epoch of the other side, with its devices.
    pub fn holding(sizes: Sizes, held: HeldEpoch, devices: Vec<u8>) -> Decoder {
        Decoder { sizes, held, devices, open: None, is_verified: true, is_end_checked: true }
    }

    /// What every test must fail with that is about what digests find.
    #[cfg(test)]
    pub(super) fn without_verification(self) -> Decoder {
        Decoder { is_verified: false, ..self }
    }

    /// Ends of epochs are taken for right: what lies behind them is reached by bytes that nobody has hashed.
    #[cfg(any(test, fuzzing))]
    pub(super) fn believing_ends(self) -> Decoder {
        Decoder { is_end_checked: false, ..self }
    }

    /// The epoch that is held: the last one that was whole.
    pub fn held(&self) -> HeldEpoch {
        self.held
    }

    /// The devices of that epoch.
    pub fn devices(&self) -> &[u8] {
        &self.devices
    }

    /// Reads an epoch, or what is sent again of the one before, up to its end. `from` ends by an error when its peer is
    /// silent: this waits as long as it does.
    ///
    /// # Errors
    /// The bytes are none, or of another machine; the epoch stands on another one ([`DeltaError::Order`]); the machine
    /// cannot be read or written; the connection breaks. Nothing counts, and the connection is of no use any more.
    pub fn decode(
        &mut self,
        from: &mut impl Read,
        to: &dyn Destination,
        blocks: &dyn Blocks,
    ) -> Result<Decoded, DeltaError> {
        let (kind, body) = read_part(from)?;
        match kind {
            Kind::Begin => self.epoch(&Begin::parse(&body)?, &body, from, to, blocks),
            Kind::Repair => {
                let mut reader = Reader(&body);
                let epoch = u64::from_le_bytes(reader.array()?);
                reader.end()?;
                let open = self.open.take().filter(|open| open.held.epoch == epoch);
                let open = open.ok_or_else(|| DeltaError::malformed(format!("nothing differs of epoch {epoch}")))?;
                self.repair(open, from, to)
            }
            kind => Err(DeltaError::malformed(format!("a part {kind:?} in the place of an epoch"))),
        }
    }

    fn epoch(
        &mut self,
        begin: &Begin,
        begin_bytes: &[u8],
        from: &mut impl Read,
        to: &dyn Destination,
        blocks: &dyn Blocks,
    ) -> Result<Decoded, DeltaError> {
        self.open = None;
        if begin.sizes != self.sizes {
            return Err(DeltaError::malformed(format!(
                "it is a machine of {:?}, and here of {:?}",
                begin.sizes, self.sizes
            )));
        }
        // Who begins anew says so, and this side forgets what it holds.
        let is_anew = begin.since == HeldEpoch::NOTHING;
        if !is_anew && begin.since != self.held || begin.epoch <= begin.since.epoch {
            return Err(DeltaError::Order { since: begin.since, held: self.held });
        }
        if is_anew {
            (self.held, self.devices) = (HeldEpoch::NOTHING, Vec::new());
        }
        to.begin(begin.epoch, begin.since, &begin.versions).map_err(DeltaError::machine("begin an epoch"))?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(begin_bytes);
        let mut applied = Applied::new(to, self.is_verified);
        let mut coming = Coming::default();
        std::thread::scope(|scope| {
            let (in_order, apply) = sync_channel::<Receiver<Result<Fetched, DeltaError>>>(AHEAD_PARTS);
            let applier = scope.spawn(|| applied.all(apply));
            let (jobs, to_do) = sync_channel::<Job>(AHEAD_PARTS);
            let to_do = Arc::new(Mutex::new(to_do));
            let (mut fetchers, mut ends) = (0, [0; 2]);
            let devices = &self.devices;
            let read = read_parts(from, &mut coming, devices, |body| {
                let parsed = Parsed::parse(body, begin, ends)?;
                ends[usize::from(parsed.space == Space::Disk)] = parsed.end();
                for told in parsed.told() {
                    hasher.update(told);
                }
                let pieces = parsed.pieces();
                if fetchers < FETCHERS_MAX {
                    let to_do = to_do.clone();
                    scope.spawn(move || fetch_all(&to_do, begin, blocks));
                    fetchers += 1;
                }
                let (answer, fetched) = sync_channel(1);
                // Who does not take them has had an error, which is found below.
                let _ = jobs.send(Job { parsed, answer });
                in_order.send(fetched).map(|()| pieces).map_err(|_| DeltaError::malformed("given up"))
            });
            drop((jobs, in_order));
            let applied = applier.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            applied.and(read)
        })?;
        if let Some(told) = &coming.devices_told {
            hasher.update(told);
        }
        let digest = *hasher.finalize().as_bytes();
        self.check_end(coming.end, digest)?;
        let mut different = applied.different;
        different.devices = self.is_verified && coming.devices.is_different;
        let held = HeldEpoch { epoch: begin.epoch, digest };
        let open = Open { held, begin: begin.clone(), devices: coming.devices, different };
        Ok(self.finish(open))
    }

    fn check_end(&self, end: Option<End>, digest: [u8; 32]) -> Result<(), DeltaError> {
        match end {
            Some(end) if end.digest == digest || !self.is_end_checked => Ok(()),
            _ => Err(DeltaError::malformed("its end does not tell of it")),
        }
    }

    /// The epoch counts, or what differs is told.
    fn finish(&mut self, open: Open) -> Decoded {
        if open.different.is_empty() {
            (self.held, self.devices) = (open.held, open.devices.bytes);
            return Decoded::Whole(self.held);
        }
        let different = open.different.clone();
        self.open = Some(open);
        Decoded::Different(different)
    }

    fn repair(&mut self, open: Open, from: &mut impl Read, to: &dyn Destination) -> Result<Decoded, DeltaError> {
        let mut missing: [BTreeSet<u64>; 2] =
            [&open.different.pages, &open.different.blocks].map(|numbers| numbers.iter().copied().collect());
        let (mut applied, mut coming) = (Applied::new(to, self.is_verified), Coming::default());
        let (mut ends, mut devices) = ([0; 2], open.devices);
        read_parts(from, &mut coming, &[], |body| {
            let parsed = Parsed::parse(body, &open.begin, ends)?;
            let space = usize::from(parsed.space == Space::Disk);
            ends[space] = parsed.end();
            for run in &parsed.runs {
                if !matches!(run.form, Form::Zero | Form::Zstd | Form::Literal) {
                    return Err(DeltaError::malformed("what is sent again refers to something"));
                }
                if !(run.first..run.end()).all(|number| missing[space].remove(&number)) {
                    return Err(DeltaError::malformed("what is sent again was right"));
                }
            }
            applied.part(parsed.fetch(&open.begin, &super::NoBlocks)?)?;
            Ok(parsed.pieces())
        })?;
        self.check_end(coming.end, open.held.digest)?;
        let mut left = missing.iter().map(BTreeSet::len).sum::<usize>();
        left += applied.different.pages.len() + applied.different.blocks.len();
        if open.different.devices {
            left += usize::from(coming.devices_told.is_none() || coming.devices.is_different);
            devices = coming.devices;
        }
        if left > 0 {
            return Err(DeltaError::StillDifferent { epoch: open.held.epoch, pieces: left });
        }
        Ok(self.finish(Open { different: Different::default(), devices, ..open }))
    }
}

/// What came beside pieces.
#[derive(Default)]
struct Coming {
    pieces: u64,
    devices: Devices,
    /// Length and digest of the devices.
    devices_told: Option<Vec<u8>>,
    end: Option<End>,
}

/// Reads parts up to the end; `pieces` takes each that has pieces, and tells how many.
fn read_parts(
    from: &mut impl Read,
    coming: &mut Coming,
    devices: &[u8],
    mut pieces: impl FnMut(Vec<u8>) -> Result<u64, DeltaError>,
) -> Result<(), DeltaError> {
    loop {
        let (kind, body) = read_part(from)?;
        match kind {
            Kind::Pieces if coming.devices_told.is_none() => coming.pieces += pieces(body)?,
            Kind::Devices if coming.devices_told.is_none() => {
                let told = body.get(1..DEVICES_AT).ok_or_else(|| DeltaError::malformed("devices that end too soon"))?;
                coming.devices_told = Some(told.to_vec());
                coming.devices = parse_devices(&body, devices)?;
            }
            Kind::End => {
                let end = End::parse(&body)?;
                if end.pieces != coming.pieces {
                    let what = format!("{} pieces came, and its end tells of {}", coming.pieces, end.pieces);
                    return Err(DeltaError::malformed(what));
                }
                coming.end = Some(end);
                return Ok(());
            }
            kind => return Err(DeltaError::malformed(format!("a part {kind:?} in the midst of an epoch"))),
        }
    }
}

/// Where the compressed bytes of devices begin.
const DEVICES_AT: usize = 1 + 4 + 32;

fn parse_devices(body: &[u8], held: &[u8]) -> Result<Devices, DeltaError> {
    let mut reader = Reader(body);
    let [is_difference] = reader.array()?;
    let length = u32::from_le_bytes(reader.array()?) as usize;
    let digest: [u8; 32] = reader.array()?;
    if is_difference > 1 || length > DEVICES_BYTES_MAX || is_difference == 1 && length != held.len() {
        return Err(DeltaError::malformed(format!("devices of {length} bytes, and {} are held", held.len())));
    }
    let uncompressed = zstd::bulk::decompress(reader.0, length);
    let mut bytes = uncompressed.map_err(|error| DeltaError::malformed(format!("devices: {error}")))?;
    if bytes.len() != length {
        return Err(DeltaError::malformed(format!("{} bytes of devices in the place of {length}", bytes.len())));
    }
    if is_difference == 1 {
        xor(&mut bytes, held);
    }
    let is_different = *blake3::hash(&bytes).as_bytes() != digest;
    Ok(Devices { bytes, is_different })
}

struct Job {
    parsed: Parsed,
    answer: SyncSender<Result<Fetched, DeltaError>>,
}

/// Does what there is to do, until nothing comes any more.
fn fetch_all(to_do: &Mutex<Receiver<Job>>, begin: &Begin, blocks: &dyn Blocks) {
    loop {
        let job = to_do.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { parsed, answer }) = job else { return };
        // Who does not want it any more has had an error.
        let _ = answer.send(parsed.fetch(begin, blocks));
    }
}

/// What was written of an epoch.
struct Applied<'a> {
    to: &'a dyn Destination,
    different: Different,
    is_verified: bool,
}

impl<'a> Applied<'a> {
    fn new(to: &'a dyn Destination, is_verified: bool) -> Applied<'a> {
        Applied { to, different: Different::default(), is_verified }
    }

    fn all(&mut self, parts: Receiver<Receiver<Result<Fetched, DeltaError>>>) -> Result<(), DeltaError> {
        for part in parts {
            match part.recv() {
                Ok(fetched) => self.part(fetched?)?,
                Err(_) => return Err(DeltaError::malformed("given up")),
            }
        }
        Ok(())
    }

    /// Writes a part, in the order of its runs: a page that is held may be one that it has written itself.
    fn part(&mut self, part: Fetched) -> Result<(), DeltaError> {
        let Fetched { space, runs, mut content, digests } = part;
        let mut unwritten = Unwritten { to: self.to, space, first: 0, from: 0, until: 0 };
        let mut at = 0;
        for run in &runs {
            if run.form == Form::Zero {
                let zeroed = self.to.zero(space, run.first..run.end());
                zeroed.map_err(DeltaError::machine("write zeros"))?;
                continue;
            }
            let until = at + usize::try_from(run.count).expect("runs were counted") * PAGE_BYTES;
            match run.form {
                Form::Held { first } => {
                    unwritten.write(&content)?;
                    // Of a run that refers to itself each page is there before the next one is read.
                    let is_own = space == Space::Memory && first < run.first && run.first < first + run.count;
                    let step = if is_own { PAGE_BYTES } else { until - at };
                    for (from, place) in (first..).zip((at..until).step_by(step)) {
                        let held = self.to.read(Space::Memory, from, &mut content[place..place + step]);
                        held.map_err(DeltaError::machine("read what is held"))?;
                        if is_own {
                            let number = run.first + (from - first);
                            unwritten.add(number, place..place + step, &content)?;
                            unwritten.write(&content)?;
                        }
                    }
                    if is_own {
                        at = until;
                        continue;
                    }
                }
                Form::Xor => {
                    let mut held = vec![0; until - at];
                    self.to.read(space, run.first, &mut held).map_err(DeltaError::machine("read what is held"))?;
                    xor(&mut content[at..until], &held);
                }
                _ => {}
            }
            unwritten.add(run.first, at..until, &content)?;
            at = until;
        }
        unwritten.write(&content)?;
        if self.is_verified {
            self.verify(space, &runs, &content, &digests);
        }
        Ok(())
    }

    fn verify(&mut self, space: Space, runs: &[Run], content: &[u8], digests: &[[u8; 32]]) {
        let pieces = runs.iter().filter(|run| run.form != Form::Zero).flat_map(|run| run.first..run.end());
        let numbers: Vec<u64> = pieces.collect();
        let mut digest = Digest::new(space);
        let groups = numbers.chunks(DIGEST_PIECES).zip(content.chunks(DIGEST_PIECES * PAGE_BYTES)).zip(digests);
        for ((numbers, content), expected) in groups {
            let mut found = None;
            for (number, piece) in numbers.iter().zip(content.chunks(PAGE_BYTES)) {
                found = digest.add(*number, piece);
            }
            if found.or_else(|| digest.rest()) != Some(*expected) {
                match space {
                    Space::Memory => self.different.pages.extend(numbers),
                    Space::Disk => self.different.blocks.extend(numbers),
                }
            }
        }
    }
}

/// Pieces that follow each other and are to be written with one call.
struct Unwritten<'a> {
    to: &'a dyn Destination,
    space: Space,
    first: u64,
    from: usize,
    until: usize,
}

impl Unwritten<'_> {
    fn add(&mut self, first: u64, place: std::ops::Range<usize>, content: &[u8]) -> Result<(), DeltaError> {
        let count = ((self.until - self.from) / PAGE_BYTES) as u64;
        if self.first + count != first || self.until != place.start {
            self.write(content)?;
            (self.first, self.from) = (first, place.start);
        }
        self.until = place.end;
        Ok(())
    }

    fn write(&mut self, content: &[u8]) -> Result<(), DeltaError> {
        if self.from < self.until {
            let written = self.to.write(self.space, self.first, &content[self.from..self.until]);
            written.map_err(DeltaError::machine("write pieces"))?;
        }
        self.first += ((self.until - self.from) / PAGE_BYTES) as u64;
        self.from = self.until;
        Ok(())
    }
}
