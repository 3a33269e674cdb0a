//! Killed at every step, and in the middle of each write: whatever a filling leaves behind, its successor brings what
//! is missing, once, and nothing over what the clone's server has written since.

use std::collections::BTreeSet;

use super::random::Chance;
use super::*;
use crate::recorder::{Event, Recorder};

const FILES: u32 = 3;
const CHUNKS_MAX: u64 = 20;
/// What each thread does.
const OPERATIONS: usize = 50;

/// What there is at one moment, and what there should be in the end.
#[derive(Clone)]
struct State {
    /// The clone's files.
    cloned: Vec<Vec<u8>>,
    /// The frozen content, changed by the clone's own server alone.
    expected: Vec<Vec<u8>>,
    /// The source's files.
    source: Vec<Vec<u8>>,
    /// The chunks that count as filled.
    filled: BTreeSet<u64>,
    /// The clone's server waits until it may cut a file to so many bytes.
    wanted_cut: Option<(FileNumber, u64)>,
    is_given_up: bool,
}

impl State {
    fn begin(frozen: &[Vec<u8>]) -> State {
        State {
            cloned: frozen.iter().map(|content| vec![0; content.len()]).collect(),
            expected: frozen.to_vec(),
            source: frozen.to_vec(),
            filled: BTreeSet::new(),
            wanted_cut: None,
            is_given_up: false,
        }
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Bring { file, offset_bytes, content } => write(&mut self.cloned, *file, *offset_bytes, content),
            Event::Set { bit, .. } => {
                self.filled.insert(*bit);
            }
            Event::GiveUp => self.is_given_up = true,
            Event::SourceWrites { file, offset_bytes, content } => {
                write(&mut self.source, *file, *offset_bytes, content);
            }
            Event::CloneWrites { file, offset_bytes, content } => {
                write(&mut self.cloned, *file, *offset_bytes, content);
                write(&mut self.expected, *file, *offset_bytes, content);
            }
            Event::CloneWantsToCut { file, size_bytes } => self.wanted_cut = Some((*file, *size_bytes)),
            Event::CloneCuts { file, size_bytes } => {
                self.wanted_cut = None;
                for files in [&mut self.cloned, &mut self.expected] {
                    files[file.0 as usize].truncate(*size_bytes as usize);
                }
            }
            Event::GiveBack { .. } => panic!("a filling keeps nothing aside"),
        }
    }

    /// Whether what counts as filled is what it should be.
    fn check_filled(&self, image: &Image) -> Result<(), String> {
        let layout = Layout::new(image);
        for file in (0..FILES).map(FileNumber) {
            let (cloned, expected) = (&self.cloned[file.0 as usize], &self.expected[file.0 as usize]);
            if cloned.len() != expected.len() {
                return Err(format!("file {} has {} bytes, not {}", file.0, cloned.len(), expected.len()));
            }
            // Nobody needs what is about to be cut off.
            let needed = match self.wanted_cut {
                Some((cut, size_bytes)) if cut == file => size_bytes as usize,
                _ => expected.len(),
            };
            for bit in layout.chunks(file, ByteRange::WHOLE).filter(|bit| self.filled.contains(bit)) {
                let bytes = layout.bytes(file, &(bit..bit + 1));
                let bytes = (bytes.start as usize).min(needed)..(bytes.end as usize).min(needed);
                if cloned[bytes.clone()] != expected[bytes.clone()] {
                    return Err(format!("bytes {bytes:?} of file {} count as filled and are not", file.0));
                }
            }
        }
        Ok(())
    }

    /// Has a successor go on, in a harness whose files are of the frozen sizes.
    fn succeed(&self, harness: &Harness) -> Result<(), String> {
        let bitmap = SharedBitmap::create(&harness.image).unwrap();
        for bit in &self.filled {
            bitmap.set(*bit);
        }
        if self.is_given_up {
            bitmap.give_up();
        }
        for file in (0..FILES).map(FileNumber) {
            fs::write(harness.path("source", file), &self.source[file.0 as usize]).unwrap();
            fs::write(harness.path("clone", file), &self.cloned[file.0 as usize]).unwrap();
        }
        let filling = harness.filling_with(bitmap);
        if self.is_given_up {
            let goes_on = filling.failure().is_none() || filling.ensure(FIRST, ByteRange::WHOLE).is_ok();
            return if goes_on { Err("it goes on with what was given up".to_owned()) } else { Ok(()) };
        }
        let progress = filling.progress();
        let read_before = harness.origin.read_bytes.load(Ordering::SeqCst);
        let mut expected = self.expected.clone();
        // The access waited meanwhile.
        if let Some((file, size_bytes)) = self.wanted_cut {
            filling.forget_from(file, size_bytes).unwrap();
            filling.file(file).set_len(size_bytes).unwrap();
            expected[file.0 as usize].truncate(size_bytes as usize);
        }
        (0..FILES).for_each(|file| filling.ensure(FileNumber(file), ByteRange::WHOLE).unwrap());
        let read_bytes = harness.origin.read_bytes.load(Ordering::SeqCst) - read_before;
        if read_bytes > progress.total_bytes - progress.filled_bytes {
            return Err(format!("{read_bytes} bytes were brought, of {progress:?}"));
        }
        let differs = (0..FILES).find(|file| harness.cloned(FileNumber(*file)) != expected[*file as usize]);
        differs.map_or(Ok(()), |file| Err(format!("file {file} is not what it should be in the end")))
    }
}

fn write(files: &mut [Vec<u8>], file: FileNumber, offset_bytes: u64, content: &[u8]) {
    let (file, start) = (&mut files[file.0 as usize], offset_bytes as usize);
    let end = start + content.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[start..end].copy_from_slice(content);
}

/// Goes on from before and after every event, and from the middle of every write; how often it did.
fn go_on_from_everywhere(frozen: &[Vec<u8>], events: &[Event]) -> Result<usize, String> {
    let harness = Harness::new(frozen.to_vec());
    let mut state = State::begin(frozen);
    let mut deaths = 0;
    let mut die = |state: &State, after: usize| {
        deaths += 1;
        let judged = state.check_filled(&harness.image).and_then(|()| state.succeed(&harness));
        judged.map_err(|reason| format!("killed after {after} of {} events: {reason}", events.len()))
    };
    for (number, event) in events.iter().enumerate() {
        die(&state, number)?;
        if let Event::Bring { file, offset_bytes, content } = event {
            let (mut torn, content) = (state.clone(), content[..content.len() / 2].to_vec());
            torn.apply(&Event::Bring { file: *file, offset_bytes: *offset_bytes, content });
            die(&torn, number)?;
        }
        state.apply(event);
    }
    die(&state, events.len())?;
    Ok(deaths)
}

fn frozen(chance: &mut Chance) -> Vec<Vec<u8>> {
    let file = |number: u32| {
        let mut content = content(number as u8, (CHUNK_BYTES + chance.below((CHUNKS_MAX - 1) * CHUNK_BYTES)) as usize);
        // Some of it is holes.
        let (start, end) = (content.len() / 3, content.len() / 2);
        content[start..end].fill(0);
        content
    };
    (0..FILES).map(file).collect()
}

/// All that is done to a filling's files and bitmap by the clone's server, the source's and the background at once;
/// with `gives_up` it is given up at some moment, and the source goes on without it.
fn record(frozen: &[Vec<u8>], chance: &mut Chance, gives_up: bool) -> Vec<Event> {
    let harness = Harness::new(frozen.to_vec());
    harness.origin.now_every.store(2, Ordering::SeqCst);
    let filling = harness.filling();
    let recorder = filling.recorder.clone();
    recorder.begin();
    let chances = [(); 3].map(|()| Chance(chance.below(1 << 31) + 1));
    std::thread::scope(|scope| {
        let [mut of_clone, mut of_source, mut of_background] = chances;
        let (filling, recorder, origin) = (&filling, &recorder, &harness.origin);
        scope.spawn(move || {
            let mut sizes: Vec<u64> = filling.image().files.iter().map(|file| file.size_bytes).collect();
            let _ = (0..OPERATIONS).try_for_each(|_| clone_access(&mut of_clone, filling, recorder, &mut sizes));
        });
        scope.spawn(move || (0..OPERATIONS).for_each(|_| source_write(&mut of_source, filling, recorder, origin)));
        scope.spawn(move || {
            for operation in 0..OPERATIONS {
                if gives_up && operation == OPERATIONS / 2 {
                    filling.fail("it was only a test");
                }
                let (file, range) = access(&mut of_background);
                let _ = filling.ensure_in_background(file, range);
            }
        });
    });
    recorder.events()
}

/// A file, and a range that may lie beyond its end.
fn access(chance: &mut Chance) -> (FileNumber, ByteRange) {
    let (file, start) = (chance.below(u64::from(FILES)), chance.below(CHUNKS_MAX * CHUNK_BYTES));
    (FileNumber(file as u32), ByteRange::new(start, chance.below(2 * CHUNK_BYTES) + 1))
}

fn clone_access(
    chance: &mut Chance,
    filling: &Filling,
    recorder: &Recorder,
    sizes: &mut [u64],
) -> Result<(), FillError> {
    let (file, range) = access(chance);
    let size = &mut sizes[file.0 as usize];
    match chance.below(10) {
        0 => {
            let size_bytes = range.start / 4096 * 4096;
            if size_bytes < *size {
                recorder.note(|| Event::CloneWantsToCut { file, size_bytes });
                filling.forget_from(file, size_bytes)?;
                recorder.note(|| Event::CloneCuts { file, size_bytes });
                *size = size_bytes;
            }
        }
        1..=4 => filling.ensure(file, range)?,
        _ => {
            if !filling.try_ensure_now(file, range)? {
                filling.ensure(file, range)?;
            }
            let content = vec![chance.below(255) as u8 + 1; (range.end - range.start) as usize];
            *size = (*size).max(range.end);
            recorder.note(|| Event::CloneWrites { file, offset_bytes: range.start, content });
        }
    }
    Ok(())
}

fn source_write(chance: &mut Chance, filling: &Filling, recorder: &Recorder, origin: &SourceFiles) {
    let (file, mut range) = access(chance);
    range.end = range.end.min(filling.image().files[file.0 as usize].size_bytes);
    if range.start < range.end {
        // Once it is given up the source waits for it no more.
        let _ = filling.ensure(file, range);
        let content = vec![0xEE; (range.end - range.start) as usize];
        recorder.note(|| Event::SourceWrites { file, offset_bytes: range.start, content: content.clone() });
        origin.files[file.0 as usize].write_all_at(&content, range.start).unwrap();
    }
}

/// Spec: A3
#[test]
fn k8_a_filling_that_is_killed_at_any_step_is_gone_on_with_and_harms_nothing() {
    let mut deaths = 0;
    for seed in 1..7 {
        let mut chance = Chance(seed * 0x9E37_79B9);
        let frozen = frozen(&mut chance);
        let events = record(&frozen, &mut chance, seed % 2 == 0);
        deaths += go_on_from_everywhere(&frozen, &events).unwrap_or_else(|reason| panic!("seed {seed}: {reason}"));
    }
    assert!(deaths > 300, "{deaths}");
}

/// Without concurrency the events are the same each time.
fn record_simple(frozen: &[Vec<u8>]) -> Vec<Event> {
    let harness = Harness::new(frozen.to_vec());
    let filling = harness.filling();
    filling.recorder.begin();
    (0..FILES).for_each(|file| filling.ensure(FileNumber(file), ByteRange::WHOLE).unwrap());
    filling.recorder.events()
}

#[test]
fn control_a_bit_before_its_content_a_write_unasked_and_content_brought_late_are_found_out() {
    let frozen: Vec<Vec<u8>> = (0..FILES).map(|seed| content(seed as u8, 4 * CHUNK)).collect();
    let events = record_simple(&frozen);
    go_on_from_everywhere(&frozen, &events).unwrap();
    let is_bring = |event: &Event| matches!(event, Event::Bring { .. });
    let first = events.iter().position(is_bring).unwrap();
    // Its bit is set before the content is there.
    let mut early = events.clone();
    early.swap(first, first + 1);
    let found = go_on_from_everywhere(&frozen, &early).unwrap_err();
    assert!(found.contains("count as filled and are not"), "{found}");
    // The source does not ask.
    let unasked = Event::SourceWrites { file: FIRST, offset_bytes: 0, content: vec![9; CHUNK] };
    let found = go_on_from_everywhere(&frozen, &[&[unasked][..], &events[..]].concat()).unwrap_err();
    assert!(found.contains("is not what it should be"), "{found}");
    // What the clone's server has written is filled once more.
    let server = Event::CloneWrites { file: FIRST, offset_bytes: 0, content: vec![9; CHUNK] };
    let found = go_on_from_everywhere(&frozen, &[&events[..], &[server, events[first].clone()]].concat()).unwrap_err();
    assert!(found.contains("count as filled and are not"), "{found}");
    // It is given up, and nobody writes that down.
    let mut given_up = State::begin(&frozen);
    given_up.apply(&Event::GiveUp);
    let harness = Harness::new(frozen.clone());
    given_up.succeed(&harness).unwrap();
    given_up.is_given_up = false;
    given_up.apply(&Event::SourceWrites { file: FIRST, offset_bytes: 0, content: vec![9; CHUNK] });
    given_up.succeed(&harness).unwrap_err();
}
