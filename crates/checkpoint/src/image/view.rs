//! A checkpoint that is being read.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::Layer;
use super::format::{DATA_AT, page_sum};
use crate::{CheckpointError, PAGE_BYTES};

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
        self.places.iter().filter(|place| place.data.is_some()).flat_map(|place| place.first..place.end)
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
        let (layer, data) = (&self.layers[place.layer], data + u64::from(page - place.first));
        layer.file.read(DATA_AT + data * PAGE_BYTES as u64, into)?;
        let sum = layer.tables.sums[usize::try_from(data).expect("there is a sum for it")];
        match page_sum(self.identity, page, into) == sum {
            true => Ok(()),
            false => Err(CheckpointError::damaged(layer.file.path(), format!("the checksum of page {page} is wrong"))),
        }
    }

    /// Writes all that is not zeros into an empty file, sparse: what a memory shows that is mounted over it.
    ///
    /// # Errors
    /// As [`View::read`]; the file cannot be written.
    pub fn fill(&self, file: &File) -> Result<(), CheckpointError> {
        let failed = |error| CheckpointError::io("fill", std::path::Path::new("a memory's file"))(error);
        file.set_len(self.layers[0].head.memory_bytes).map_err(failed)?;
        let mut content = [0; PAGE_BYTES];
        for page in self.present() {
            self.read(page, &mut content)?;
            let written: std::io::Result<()> = file.write_all_at(&content, u64::from(page) * PAGE_BYTES as u64);
            written.map_err(failed)?;
        }
        Ok(())
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
