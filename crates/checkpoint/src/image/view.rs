//! A checkpoint that is being read.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Layer;
use super::format::{DATA_AT, page_sum};
use crate::{CheckpointError, PAGE_BYTES};

/// Pages that are read at once: 1 MiB.
const RUN_PAGES: u32 = 256;

/// Threads that fill a memory's file.
const FILLING_THREADS: usize = 2;

/// A checkpoint, with all that it stands on. It stays readable when its files are removed.
pub struct View {
    identity: u64,
    /// The newest first; there is one.
    layers: Vec<Layer>,
    /// Rising; none overlaps another.
    places: Vec<Place>,
}

/// Where the content of pages is.
#[derive(Clone, Copy, Debug)]
struct Place {
    first: u32,
    end: u32,
    layer: usize,
    /// The number of the first one's data in its layer; none: zeros.
    data: Option<u64>,
}

impl View {
    pub(super) fn new(identity: u64, layers: Vec<Layer>) -> View {
        let mut places: Vec<Place> = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            let own = own_places(number, layer);
            places = below(&places, &own);
        }
        View { identity, layers, places }
    }

    /// The state of the machine's devices.
    pub fn devices(&self) -> &[u8] {
        &self.layers[0].tables.devices
    }

    /// The disk's name of its epoch.
    pub fn disk(&self) -> &str {
        &self.layers[0].tables.disk
    }

    /// The pages that are not zeros, rising.
    pub fn present(&self) -> impl Iterator<Item = u32> {
        self.told().filter(|(_, is_data)| *is_data).map(|(page, _)| page)
    }

    /// The pages of which its layers say what they hold, and whether that is not zeros; rising.
    pub(super) fn told(&self) -> impl Iterator<Item = (u32, bool)> {
        let pages = |place: &Place| (place.first..place.end).zip(std::iter::repeat(place.data.is_some()));
        self.places.iter().flat_map(pages)
    }

    /// Reads what a page held.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`]; the file system refuses.
    pub fn read(&self, page: u32, into: &mut [u8; PAGE_BYTES]) -> Result<(), CheckpointError> {
        let at = self.places.partition_point(|place| place.end <= page);
        let place = self.places.get(at).filter(|place| place.first <= page);
        let Some((place, data)) = place.and_then(|place| Some((place, place.data?))) else {
            into.fill(0);
            return Ok(());
        };
        self.read_run(page, place.layer, data + u64::from(page - place.first), into)
    }

    /// Reads pages that follow each other, from their layer's data of this number on.
    fn read_run(&self, first: u32, layer: usize, data: u64, into: &mut [u8]) -> Result<(), CheckpointError> {
        let layer = &self.layers[layer];
        layer.file.read(DATA_AT + data * PAGE_BYTES as u64, into)?;
        let data = usize::try_from(data).expect("there is a sum for it");
        let sums = &layer.tables.sums[data..data + into.len() / PAGE_BYTES];
        for ((page, content), sum) in (first..).zip(into.as_chunks().0).zip(sums) {
            if page_sum(self.identity, page, content) != *sum {
                let reason = format!("the checksum of page {page} is wrong");
                return Err(CheckpointError::damaged(layer.file.path(), reason));
            }
        }
        Ok(())
    }

    /// Writes all that is not zeros into an empty file, sparse: what a memory shows that is mounted over it.
    ///
    /// # Errors
    /// As [`View::read`]; the file cannot be written.
    pub fn fill(&self, file: &File) -> Result<(), CheckpointError> {
        let failed = |error| CheckpointError::io("fill", std::path::Path::new("a memory's file"))(error);
        file.set_len(self.layers[0].head.memory_bytes).map_err(failed)?;
        let runs: Vec<(Range<u32>, usize, u64)> = self.places.iter().flat_map(Place::runs).collect();
        let next = AtomicUsize::new(0);
        let fill = || {
            let mut content = vec![0; RUN_PAGES as usize * PAGE_BYTES];
            while let Some((pages, layer, data)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let content = &mut content[..pages.len() * PAGE_BYTES];
                self.read_run(pages.start, *layer, *data, content)?;
                file.write_all_at(content, u64::from(pages.start) * PAGE_BYTES as u64).map_err(failed)?;
            }
            Ok(())
        };
        // The machine stands until this is done.
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..FILLING_THREADS).map(|_| scope.spawn(fill)).collect();
            let others = others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            others.fold(fill(), Result::and)
        })
    }
}

fn own_places(number: usize, layer: &Layer) -> Vec<Place> {
    let mut data = 0;
    let place = |run: &super::format::Run| {
        let begin = data;
        data += if run.is_data { u64::from(run.pages) } else { 0 };
        Place { first: run.first, end: run.first + run.pages, layer: number, data: run.is_data.then_some(begin) }
    };
    layer.tables.runs.iter().map(place).collect()
}

impl Place {
    /// Its pages that have data, at most [`RUN_PAGES`] each, with their layer and the number of the first one's data.
    fn runs(&self) -> impl Iterator<Item = (Range<u32>, usize, u64)> {
        let Place { first, end, layer, data } = *self;
        let starts = data.into_iter().flat_map(move |data| {
            (first..end).step_by(RUN_PAGES as usize).map(move |start| (start, data + u64::from(start - first)))
        });
        starts.map(move |(start, data)| (start..end.min(start.saturating_add(RUN_PAGES)), layer, data))
    }

    /// Without the pages before this one.
    fn from(self, first: u32) -> Place {
        let cut = u64::from(first - self.first);
        Place { first, data: self.data.map(|data| data + cut), ..self }
    }
}

/// The upper places, and of the lower ones what lies between.
fn below(upper: &[Place], lower: &[Place]) -> Vec<Place> {
    let mut places = upper.to_vec();
    for place in lower {
        let mut rest = *place;
        let over = upper.partition_point(|over| over.end <= rest.first);
        for over in upper[over..].iter().take_while(|over| over.first < place.end) {
            if over.first > rest.first {
                places.push(Place { end: over.first, ..rest });
            }
            rest = rest.from(over.end.min(rest.end));
        }
        if rest.first < rest.end {
            places.push(rest);
        }
    }
    places.sort_unstable_by_key(|place| place.first);
    places
}
