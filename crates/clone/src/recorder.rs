//! What is done, one thing after another, to what outlives a process, for tests that go on from every moment. All is
//! noted before it is done: so what follows from it is noted after it.

use std::sync::{Arc, Mutex, OnceLock};

use crate::image::FileNumber;

/// One thing that is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// Frozen content is written: to the clone's file, or aside.
    Bring { file: FileNumber, offset_bytes: u64, content: Vec<u8> },
    /// A bit of the bitmap of this name is set.
    Set { bitmap: &'static str, bit: u64 },
    /// What was kept aside is not any more.
    GiveBack { start: u64, length: u64 },
    /// Nobody is to go on.
    GiveUp,
    /// The source's server writes.
    SourceWrites { file: FileNumber, offset_bytes: u64, content: Vec<u8> },
    /// The clone's server writes.
    CloneWrites { file: FileNumber, offset_bytes: u64, content: Vec<u8> },
    /// The clone's server waits until it may cut a file to so many bytes.
    CloneWantsToCut { file: FileNumber, size_bytes: u64 },
    /// It cuts it.
    CloneCuts { file: FileNumber, size_bytes: u64 },
}

/// Remembers what is done, from [`Recorder::begin`] on.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorder(Arc<OnceLock<Mutex<Vec<Event>>>>);

impl Recorder {
    pub fn begin(&self) {
        self.0.get_or_init(Mutex::default);
    }

    pub fn note(&self, event: impl FnOnce() -> Event) {
        if let Some(events) = self.0.get() {
            events.lock().unwrap().push(event());
        }
    }

    pub fn events(&self) -> Vec<Event> {
        self.0.get().map(|events| events.lock().unwrap().clone()).unwrap_or_default()
    }
}
