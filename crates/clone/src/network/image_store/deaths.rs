//! Killed at every step, and in the middle of each write: whoever goes on with an image reads the frozen content of all
//! that is not delivered, or learns that it was given up.

use std::collections::BTreeSet;
use std::io::Write;

use super::*;
use crate::network::manifest::tests::manifest;
use crate::network::server::tests::{LiveFiles, Numbers};
use crate::recorder::Event;

const SIZES: [u64; 2] = [CHUNK_BYTES * 9 + 10, CHUNK_BYTES * 20];
/// What each thread does.
const OPERATIONS: usize = 40;

/// What there is at one moment.
#[derive(Clone)]
struct State {
    /// The source's files.
    source: Vec<Vec<u8>>,
    store: Vec<u8>,
    saved: BTreeSet<u64>,
    delivered: BTreeSet<u64>,
    is_given_up: bool,
}

impl State {
    fn begin(frozen: &[Vec<u8>]) -> State {
        let source = frozen.to_vec();
        State { source, store: Vec::new(), saved: BTreeSet::new(), delivered: BTreeSet::new(), is_given_up: false }
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Bring { offset_bytes, content, .. } => self.write_store(*offset_bytes, content),
            Event::GiveBack { start, length } => self.write_store(*start, &vec![0; *length as usize]),
            Event::Set { bitmap: "saved", bit } => {
                self.saved.insert(*bit);
            }
            Event::Set { bit, .. } => {
                self.delivered.insert(*bit);
            }
            Event::GiveUp => self.is_given_up = true,
            Event::SourceWrites { file, offset_bytes, content } => {
                let start = *offset_bytes as usize;
                self.source[file.0 as usize][start..start + content.len()].copy_from_slice(content);
            }
            other => panic!("{other:?} is not of this host"),
        }
    }

    fn write_store(&mut self, offset_bytes: u64, content: &[u8]) {
        let (start, end) = (offset_bytes as usize, offset_bytes as usize + content.len());
        self.store.resize(self.store.len().max(end), 0);
        self.store[start..end].copy_from_slice(content);
    }

    /// Has a successor read everything.
    fn succeed(&self, frozen: &[Vec<u8>]) -> Result<(), String> {
        let image = Arc::new(manifest(&SIZES).image);
        let bitmap = |bits: &BTreeSet<u64>| {
            let bitmap = SharedBitmap::create(&image).unwrap();
            for bit in bits {
                bitmap.set(*bit);
            }
            bitmap.as_fd().try_clone_to_owned().unwrap()
        };
        let mut store = tempfile::tempfile().unwrap();
        store.write_all(&self.store).unwrap();
        let (saved, delivered) = (bitmap(&self.saved), bitmap(&self.delivered));
        if self.is_given_up {
            SharedBitmap::open(saved.try_clone().unwrap()).unwrap().give_up();
        }
        let descriptors = ImageStoreDescriptors { store: store.into(), saved, delivered };
        let origin: Arc<dyn Origin> = Arc::new(LiveFiles::new(self.source.clone()));
        let image_store = match ImageStore::reopen(Arc::clone(&image), origin, descriptors) {
            Ok(_) if self.is_given_up => return Err("it goes on with what was given up".to_owned()),
            Ok(image_store) => image_store,
            Err(_) if self.is_given_up => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        let layout = Layout::new(&image);
        for (number, content) in (0..).zip(frozen) {
            let file = FileNumber(number);
            for bit in layout.chunks(file, ByteRange::WHOLE) {
                let bytes = layout.bytes(file, &(bit..bit + 1));
                let expected = &content[bytes.start as usize..bytes.end as usize];
                let mut found = vec![0; expected.len()];
                let read = image_store.read(file, bytes.start, &mut found);
                match self.delivered.contains(&bit) {
                    true if read.is_ok() => return Err(format!("chunk {bit} is not kept any more, and is read")),
                    false if read.is_err() || found != expected => {
                        return Err(format!("chunk {bit} is not as it was frozen: {read:?}"));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// Goes on from before and after every event, and from the middle of every write; how often it did.
fn go_on_from_everywhere(frozen: &[Vec<u8>], events: &[Event]) -> Result<usize, String> {
    let (mut state, mut deaths) = (State::begin(frozen), 0);
    let mut die = |state: &State, after: usize| {
        deaths += 1;
        let told = |reason| format!("killed after {after} of {} events: {reason}", events.len());
        state.succeed(frozen).map_err(told)
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

fn frozen(seed: u64) -> Vec<Vec<u8>> {
    let mut numbers = Numbers(seed);
    // Without zeros, which is what is read of a store where nothing was saved.
    let mut file = |size: &u64| (0..*size).map(|_| numbers.below(255) as u8 + 1).collect::<Vec<u8>>();
    SIZES.iter().map(&mut file).collect()
}

/// All that is done to an image's store and bitmaps while the source writes and the clone says what it has; with
/// `gives_up` it is given up at some moment, and the source goes on without it.
fn record(frozen: &[Vec<u8>], seed: u64, gives_up: bool) -> Vec<Event> {
    let directory = tempfile::tempdir().unwrap();
    let live = Arc::new(LiveFiles::new(frozen.to_vec()));
    let origin: Arc<dyn Origin> = Arc::<LiveFiles>::clone(&live);
    let image_store = ImageStore::create(Arc::new(manifest(&SIZES).image), origin, directory.path()).unwrap();
    image_store.recorder.begin();
    std::thread::scope(|scope| {
        let (image_store, live) = (&image_store, &live);
        scope.spawn(move || {
            let mut numbers = Numbers(seed ^ 0xabc);
            for operation in 0..OPERATIONS {
                if gives_up && operation == OPERATIONS / 2 {
                    image_store.fail("it was only a test");
                }
                source_write(&mut numbers, image_store, live);
            }
        });
        scope.spawn(move || {
            let mut numbers = Numbers(seed ^ 0xdef);
            for _ in 0..OPERATIONS / 4 {
                let (file, first) = access(&mut numbers);
                image_store.deliver(DeliveredRange { file, first, count: 1 + numbers.below(4) });
            }
        });
    });
    image_store.recorder.events()
}

/// A chunk of a file.
fn access(numbers: &mut Numbers) -> (FileNumber, u64) {
    let file = numbers.below(2) as u32;
    (FileNumber(file), numbers.below(SIZES[file as usize].div_ceil(CHUNK_BYTES)))
}

fn source_write(numbers: &mut Numbers, image_store: &ImageStore, live: &LiveFiles) {
    let (file, chunk) = access(numbers);
    let range = ByteRange::new(chunk * CHUNK_BYTES, CHUNK_BYTES);
    // One that has failed is not waited for.
    if !image_store.has(file, range) && !image_store.take_now(file, range).unwrap_or(true) {
        let _ = image_store.take(file, range);
    }
    let length = range.end.min(SIZES[file.0 as usize]) - range.start;
    image_store.recorder.note(|| {
        let content = vec![0; length as usize];
        Event::SourceWrites { file, offset_bytes: range.start, content }
    });
    live.write(None, file.0 as usize, chunk, 0);
}

/// Spec: A3
#[test]
fn k8_an_image_is_served_on_as_it_was_frozen_whenever_the_process_that_saves_it_is_killed() {
    let mut deaths = 0;
    for seed in 1..5 {
        let frozen = frozen(seed);
        let events = record(&frozen, seed, seed % 2 == 0);
        deaths += go_on_from_everywhere(&frozen, &events).unwrap_or_else(|reason| panic!("seed {seed}: {reason}"));
    }
    assert!(deaths > 200, "{deaths}");
}

#[test]
fn control_a_bit_before_its_content_a_write_unasked_and_space_given_back_early_are_found_out() {
    let frozen = frozen(7);
    let directory = tempfile::tempdir().unwrap();
    let origin: Arc<dyn Origin> = Arc::new(LiveFiles::new(frozen.clone()));
    let image_store = ImageStore::create(Arc::new(manifest(&SIZES).image), origin, directory.path()).unwrap();
    image_store.recorder.begin();
    image_store.take(FileNumber(0), ByteRange::WHOLE).unwrap();
    let events = image_store.recorder.events();
    assert!(matches!(events[..2], [Event::Bring { .. }, Event::Set { bitmap: "saved", .. }]), "{}", events.len());
    go_on_from_everywhere(&frozen, &events).unwrap();
    let mut early = events.clone();
    early.swap(0, 1);
    go_on_from_everywhere(&frozen, &early).unwrap_err();
    let unasked = Event::SourceWrites { file: FileNumber(1), offset_bytes: 0, content: vec![0; 8192] };
    go_on_from_everywhere(&frozen, &[&events[..], &[unasked]].concat()).unwrap_err();
    let given_back = Event::GiveBack { start: 0, length: CHUNK_BYTES };
    go_on_from_everywhere(&frozen, &[&events[..], &[given_back]].concat()).unwrap_err();
}
