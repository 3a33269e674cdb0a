//! Records what is done to a disk's files, refuses some of it on demand, and rebuilds what a power cut leaves.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// What a power cut leaves of a write it comes before the end of: whole sectors.
const SECTOR: usize = 512;
/// The folder's name among those whose synchronizations are refused.
pub(crate) const FOLDER: &str = ".";

/// One thing that was done. Recorded when it is done: so nothing is taken for durable that came after a
/// synchronization began.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Create { name: String },
    Rename { from: String, to: String },
    Remove { name: String },
    SynchronizeFolder { begin: usize },
    Write { name: String, offset: u64, bytes: Vec<u8> },
    SetLength { name: String, length: u64 },
    Synchronize { name: String, begin: usize },
}

/// How a write or synchronization fails.
#[derive(Clone, Copy)]
pub(crate) struct Refusal {
    errno: i32,
    /// What a write has written when it fails.
    pub(crate) written_bytes: usize,
}

impl Refusal {
    pub(crate) fn error(self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }
}

#[derive(Default)]
struct Recorded {
    events: Vec<Event>,
    /// Names of files whose writes or synchronizations fail, with the errno.
    refused_writes: Vec<(String, Refusal)>,
    refused_synchronizations: Vec<(String, Refusal)>,
    /// Names of files for which no more than this can be reserved at once.
    reserves_max: Vec<(String, u64)>,
}

/// All that is done to the files of one directory.
#[derive(Clone, Default)]
pub(crate) struct Recorder(Arc<Mutex<Recorded>>);

static RECORDERS: Mutex<BTreeMap<PathBuf, Recorder>> = Mutex::new(BTreeMap::new());

/// The recorder of a directory, if it has one.
pub(crate) fn of(directory: &Path) -> Option<Recorder> {
    RECORDERS.lock().unwrap().get(directory).cloned()
}

/// Ends the recording of a directory when it goes.
pub(crate) struct Recording {
    directory: PathBuf,
    pub(crate) recorder: Recorder,
}

impl Recording {
    /// From now on, what is done to files of this directory is recorded.
    pub(crate) fn begin(directory: &Path) -> Recording {
        let recorder = Recorder::default();
        RECORDERS.lock().unwrap().insert(directory.to_owned(), recorder.clone());
        Recording { directory: directory.to_owned(), recorder }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDERS.lock().unwrap().remove(&self.directory);
    }
}

impl Recorder {
    pub(crate) fn push(&self, event: Event) {
        self.0.lock().unwrap().events.push(event);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().events.len()
    }

    /// Lets writes to files of this beginning fail, until [`Recorder::allow_all`].
    pub(crate) fn refuse_writes(&self, name: &str, errno: i32) {
        self.refuse_writes_after(name, 0, errno);
    }

    /// Lets them fail when they have written so much.
    pub(crate) fn refuse_writes_after(&self, name: &str, written_bytes: usize, errno: i32) {
        self.0.lock().unwrap().refused_writes.push((name.to_owned(), Refusal { errno, written_bytes }));
    }

    /// Lets no more be reserved at once for files of this beginning.
    pub(crate) fn limit_reserves(&self, name: &str, bytes_max: u64) {
        self.0.lock().unwrap().reserves_max.push((name.to_owned(), bytes_max));
    }

    pub(crate) fn refuses_to_reserve(&self, name: &str, bytes: u64) -> bool {
        let recorded = self.0.lock().unwrap();
        recorded.reserves_max.iter().any(|(start, bytes_max)| name.starts_with(start) && bytes > *bytes_max)
    }

    /// The folder itself is called [`FOLDER`].
    pub(crate) fn refuse_synchronizations(&self, name: &str, errno: i32) {
        let refusal = Refusal { errno, written_bytes: 0 };
        self.0.lock().unwrap().refused_synchronizations.push((name.to_owned(), refusal));
    }

    /// As if this file had never been synchronized.
    pub(crate) fn forget_synchronizations(&self, file: &str) {
        for event in &mut self.0.lock().unwrap().events {
            if let Event::Synchronize { name, begin } = event
                && name == file
            {
                *begin = 0;
            }
        }
    }

    pub(crate) fn allow_all(&self) {
        let mut recorded = self.0.lock().unwrap();
        recorded.refused_writes.clear();
        recorded.refused_synchronizations.clear();
        recorded.reserves_max.clear();
    }

    pub(crate) fn refused_write(&self, name: &str) -> Option<Refusal> {
        refused(&self.0.lock().unwrap().refused_writes, name)
    }

    pub(crate) fn refused_synchronization(&self, name: &str) -> Option<Refusal> {
        refused(&self.0.lock().unwrap().refused_synchronizations, name)
    }

    /// Writes into a new directory what is there after the first `count` events.
    pub(crate) fn rebuild(&self, count: usize, cut: Cut, into: &Path) {
        let events = self.0.lock().unwrap().events[..count].to_vec();
        Rebuilding::new(&events, cut).run(into);
    }
}

fn refused(list: &[(String, Refusal)], name: &str) -> Option<Refusal> {
    Some(list.iter().find(|(prefix, _)| name.starts_with(prefix.as_str()))?.1)
}

/// How the recorded process ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut {
    /// The process was killed: all that it did is there.
    Killed,
    /// The power went: what was synchronized is there, and of the rest what this seed chooses.
    Power { seed: u64 },
}

/// A file's content, whatever it is called at the end.
#[derive(Default)]
struct Content(Vec<u8>);

struct Rebuilding<'a> {
    events: &'a [Event],
    is_power_cut: bool,
    random: StdRng,
    /// How likely a sector that was not synchronized is there, in percent.
    survival: u32,
}

impl<'a> Rebuilding<'a> {
    fn new(events: &'a [Event], cut: Cut) -> Rebuilding<'a> {
        let seed = match cut {
            Cut::Killed => 0,
            Cut::Power { seed } => seed,
        };
        let mut random = StdRng::seed_from_u64(seed);
        let survival = [0, 50, 90, 100][random.random_range(0..4)];
        Rebuilding { events, is_power_cut: matches!(cut, Cut::Power { .. }), random, survival }
    }

    fn run(mut self, into: &Path) {
        let durable_names = self.durable(|event| match event {
            Event::SynchronizeFolder { begin } => Some((String::new(), *begin)),
            _ => None,
        });
        let durable = self.durable(|event| match event {
            Event::Synchronize { name, begin } => Some((name.clone(), *begin)),
            _ => None,
        });
        let names_until = durable_names.get("").copied().unwrap_or(0);
        // Of changes of names, a file system with a journal keeps the first ones.
        let names_kept = self.random.random_range(names_until..=self.events.len());
        let mut files: Vec<Content> = Vec::new();
        let (mut writing, mut named): (BTreeMap<&str, usize>, BTreeMap<&str, usize>) = Default::default();
        for (at, event) in self.events.iter().enumerate() {
            let is_name_kept = !self.is_power_cut || at < names_kept;
            match event {
                Event::Create { name } => {
                    files.push(Content::default());
                    writing.insert(name, files.len() - 1);
                    if is_name_kept {
                        named.insert(name, files.len() - 1);
                    }
                }
                Event::Rename { from, to } => {
                    if let Some(file) = writing.get(from.as_str()).copied() {
                        writing.insert(to, file);
                    }
                    if is_name_kept && let Some(file) = named.remove(from.as_str()) {
                        named.insert(to, file);
                    }
                }
                Event::Remove { name } if is_name_kept => {
                    named.remove(name.as_str());
                }
                Event::Write { name, offset, bytes } => {
                    let is_durable = at < durable.get(name).copied().unwrap_or(0);
                    self.write(&mut files[writing[name.as_str()]], *offset, bytes, is_durable);
                }
                Event::SetLength { name, length } => files[writing[name.as_str()]].0.resize(*length as usize, 0),
                _ => {}
            }
        }
        for (name, file) in named {
            // After a power cut the machine has booted anew.
            if !(self.is_power_cut && name.starts_with("recent.")) {
                std::fs::write(into.join(name), &files[file].0).unwrap();
            }
        }
    }

    /// Up to which event each file's writes are durable.
    fn durable(&self, synchronization: impl Fn(&Event) -> Option<(String, usize)>) -> BTreeMap<String, usize> {
        self.events.iter().filter_map(synchronization).collect()
    }

    fn write(&mut self, content: &mut Content, offset: u64, bytes: &[u8], is_durable: bool) {
        let offset = offset as usize;
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            if self.is_power_cut && !is_durable && self.random.random_range(0..100) >= self.survival {
                continue;
            }
            let begin = offset + index * SECTOR;
            if content.0.len() < begin + sector.len() {
                content.0.resize(begin + sector.len(), 0);
            }
            content.0[begin..begin + sector.len()].copy_from_slice(sector);
        }
    }
}
