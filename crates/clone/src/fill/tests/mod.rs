//! Fillings of real files from real files.

mod background;
mod deaths;
mod demand;
mod disk_space;
mod filling;
mod random;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use tempfile::TempDir;

use super::*;
use crate::image::{FileIdentity, FileNumber, Image, ImageFile};
use crate::{ByteRange, CHUNK_BYTES, Origin, OriginError};

const CHUNK: usize = CHUNK_BYTES as usize;
const FIRST: FileNumber = FileNumber(0);

/// The directories of a source and of a clone.
struct Harness {
    directory: TempDir,
    image: Arc<Image>,
    /// What the files held at the freeze.
    frozen: Vec<Vec<u8>>,
    origin: Arc<SourceFiles>,
}

impl Harness {
    /// Files with this content on the source, and sparse ones of the same sizes in the clone.
    fn new(frozen: Vec<Vec<u8>>) -> Harness {
        Harness::at(tempfile::tempdir().unwrap(), frozen)
    }

    /// The same in this directory.
    fn at(directory: TempDir, frozen: Vec<Vec<u8>>) -> Harness {
        for side in ["source", "clone"] {
            fs::create_dir(directory.path().join(side)).unwrap();
        }
        let mut image = Image::default();
        for (number, content) in frozen.iter().enumerate() {
            let path = PathBuf::from(number.to_string());
            fs::write(directory.path().join("source").join(&path), content).unwrap();
            let file = File::create(directory.path().join("clone").join(&path)).unwrap();
            file.set_len(content.len() as u64).unwrap();
            let identity = FileIdentity { device: 0, inode: 0, born_nanoseconds: 0 };
            image.files.push(ImageFile { path, size_bytes: content.len() as u64, mode: 0o600, identity });
        }
        let origin = Arc::new(SourceFiles::open(&directory, frozen.len()));
        Harness { directory, image: Arc::new(image), frozen, origin }
    }

    fn path(&self, side: &str, file: FileNumber) -> PathBuf {
        self.directory.path().join(side).join(file.0.to_string())
    }

    fn files(&self) -> Vec<File> {
        (0..self.frozen.len()).map(|number| open(&self.path("clone", FileNumber(number as u32)))).collect()
    }

    fn filling(&self) -> Arc<Filling> {
        self.filling_with(SharedBitmap::create(&self.image).unwrap())
    }

    fn filling_with(&self, bitmap: SharedBitmap) -> Arc<Filling> {
        Arc::new(Filling::new(Arc::clone(&self.image), self.files(), self.origin.clone(), bitmap).unwrap())
    }

    fn cloned(&self, file: FileNumber) -> Vec<u8> {
        fs::read(self.path("clone", file)).unwrap()
    }
}

fn open(path: &std::path::Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Content without zero bytes, another one for each seed.
fn content(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| ((at / 512 + at) % 251) as u8 ^ seed | 1).collect()
}

/// The source's files, as slow and as broken as a test wants.
struct SourceFiles {
    files: Vec<File>,
    /// Of [`Origin::read_now`]'s calls every so-manieth works; 0: none.
    now_every: AtomicU64,
    now_calls: AtomicU64,
    /// Bytes that were read.
    read_bytes: AtomicU64,
    /// Bytes that were wanted ahead.
    prefetched_bytes: AtomicU64,
    lost: AtomicBool,
    gate: Gate,
}

impl SourceFiles {
    fn open(directory: &TempDir, count: usize) -> SourceFiles {
        let files = (0..count).map(|number| open(&directory.path().join("source").join(number.to_string()))).collect();
        SourceFiles {
            files,
            now_every: AtomicU64::new(1),
            now_calls: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            prefetched_bytes: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            gate: Gate::default(),
        }
    }

    fn never_now(&self) {
        self.now_every.store(0, Ordering::SeqCst);
    }
}

impl Origin for SourceFiles {
    fn read(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        assert_eq!(offset_bytes % CHUNK_BYTES, 0);
        self.gate.pass();
        if self.lost.load(Ordering::SeqCst) {
            return Err(OriginError::Lost("it was only a test".to_owned()));
        }
        self.read_bytes.fetch_add(buffer.len() as u64, Ordering::SeqCst);
        Ok(self.files[file.0 as usize].read_exact_at(buffer, offset_bytes)?)
    }

    fn read_now(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<bool, OriginError> {
        let every = self.now_every.load(Ordering::SeqCst);
        if every == 0 || !self.now_calls.fetch_add(1, Ordering::SeqCst).is_multiple_of(every) {
            return Ok(false);
        }
        self.read(file, offset_bytes, buffer).map(|()| true)
    }

    fn prefetch(&self, _file: FileNumber, _offset_bytes: u64, length_bytes: u64) {
        self.prefetched_bytes.fetch_add(length_bytes, Ordering::SeqCst);
    }
}

/// Holds whoever passes while it is closed.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    closed: bool,
    waiting: usize,
}

impl Gate {
    fn close(&self) {
        self.state.lock().unwrap().closed = true;
    }

    fn open(&self) {
        self.state.lock().unwrap().closed = false;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.waiting += 1;
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, |state| state.closed).unwrap();
        state.waiting -= 1;
    }

    /// Returns when `count` threads are held.
    fn wait_for(&self, count: usize) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |state| state.waiting < count).unwrap());
    }
}
