//! The background scan: reads what has not passed through the disk yet, so that the page map knows it, too.
//!
//! It reads through the disk itself, as a guest does: only the disk can tell a content apart from the one that is being
//! written in its place. What would have to come from another host is left out until it is here.

use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onecopy_disk::source::Source;
use onecopy_disk::{At, BLOCK_BYTES, Disk, DiskError};
use onecopy_pagemap::PageMap;

use crate::observer::ObservedPages;

/// Bytes that are looked at between two pauses.
const STEP_BYTES: u64 = 1 << 20;

/// How long a pause is at most, so that an end is noticed.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Goes over the disk once, from where the opening before left off. Ends early when it is told to, and when the disk is
/// closed.
///
/// # Errors
/// The disk cannot be read.
pub(crate) fn run(
    disk: &Disk,
    pages: &Arc<ObservedPages>,
    bytes_per_second: u64,
    ended: &AtomicBool,
) -> Result<(), DiskError> {
    let Some(map) = pages.map() else { return Ok(()) };
    let size_bytes = disk.size_bytes();
    let begin = Instant::now();
    let mut read_bytes = 0;
    let mut buffer = vec![0; STEP_BYTES as usize];
    for start in (pages.scanned_bytes()..size_bytes).step_by(STEP_BYTES as usize) {
        if ended.load(Ordering::Relaxed) {
            return Ok(());
        }
        let end = size_bytes.min(start + STEP_BYTES);
        let view = disk.view(&At::Current)?;
        for range in unknown_data(&view, map, start..end)? {
            let length = (range.end - range.start) as usize;
            disk.read(range.start, &mut [IoSliceMut::new(&mut buffer[..length])])?;
            read_bytes += length as u64;
        }
        drop(view);
        pages.set_scanned_bytes(end);
        let due = Duration::from_secs_f64(read_bytes as f64 / bytes_per_second.max(1) as f64);
        while begin.elapsed() < due && !ended.load(Ordering::Relaxed) {
            std::thread::sleep(PAUSE_MAX.min(due.saturating_sub(begin.elapsed())));
        }
    }
    Ok(())
}

/// Runs of blocks that hold data, are here, and are not known.
fn unknown_data(view: &impl Source, map: &PageMap, range: Range<u64>) -> Result<Vec<Range<u64>>, DiskError> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for extent in view.extents(range)?.into_iter().filter(|extent| !extent.is_zero) {
        let blocks = extent.range.start / BLOCK_BYTES..extent.range.end.div_ceil(BLOCK_BYTES);
        for block in blocks.filter(|block| !map.knows(*block)) {
            let start = block * BLOCK_BYTES;
            let end = (start + BLOCK_BYTES).min(view.size_bytes());
            if !view.is_local(start, end - start) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == start => run.end = end,
                _ => runs.push(start..end),
            }
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use onecopy_disk::source::{Extent, SourceError};
    use onecopy_pagemap::Bounds;

    use super::*;

    /// Data everywhere; some blocks of it are with another host.
    struct PartlyHere(Range<u64>);

    impl Source for PartlyHere {
        fn size_bytes(&self) -> u64 {
            16 * BLOCK_BYTES
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), SourceError> {
            panic!("what to read is found without reading")
        }

        fn is_local(&self, offset: u64, length: u64) -> bool {
            let blocks = offset / BLOCK_BYTES..(offset + length).div_ceil(BLOCK_BYTES);
            blocks.end <= self.0.start || blocks.start >= self.0.end
        }

        fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
            Ok(vec![Extent { range, is_zero: false }])
        }

        fn describe(&self) -> String {
            "partly here".into()
        }
    }

    #[test]
    fn only_unknown_data_that_is_here_is_read() {
        let view = PartlyHere(4..9);
        let map = PageMap::new(view.size_bytes(), 1, Bounds::for_disk(view.size_bytes())).unwrap();
        map.record(1, 77, None);
        map.record(12, 78, None);
        let runs = unknown_data(&view, &map, 0..view.size_bytes()).unwrap();
        let blocks: Vec<Range<u64>> =
            runs.into_iter().map(|run| run.start / BLOCK_BYTES..run.end / BLOCK_BYTES).collect();
        assert_eq!(blocks, [0..1, 2..4, 9..12, 13..16]);
    }
}
