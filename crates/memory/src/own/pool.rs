//! The buffer pool of a server at this moment: found, checked, counted.

use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use onecopy_postgres::ControlFile;

use super::header::{self, HEADER_BYTES, State};
use super::process::Variables;
use crate::segment::{PAGE_BYTES, Postmaster, Segment, Window, whole_pages};
use crate::{Bytes, MemoryError};

/// The fewest and the most buffers that PostgreSQL can have (`shared_buffers`).
const BUFFERS: std::ops::RangeInclusive<u32> = 16..=1 << 30;
/// So many pages are looked at to see whether they are where they should be.
const PAGES_CHECKED: u32 = 256;
/// Where a page says its size and version: `pd_pagesize_version` of `PageHeaderData`.
const PAGE_SIZE_AT: usize = 18;
/// Bytes of a page's header.
const PAGE_HEADER_BYTES: usize = 24;
/// `PG_PAGE_LAYOUT_VERSION`.
const PAGE_VERSION: u16 = 4;

/// A server's buffer pool.
pub(super) struct Pool {
    pub segment: Segment,
    headers: Window,
    blocks: Window,
    blocks_place: u64,
    pub buffers: u32,
    pub block_bytes: u64,
}

/// What of the pool was in RAM at one moment.
pub(super) struct Resident {
    /// All of it.
    pub bytes: Bytes,
    /// Where in the shared memory the first page begins that is looked at.
    start: u64,
    /// Whether each is in RAM.
    pages: Vec<bool>,
}

impl Resident {
    /// How much of the whole pages of a range was in RAM.
    pub fn bytes_of_whole_pages(&self, place: u64, length: u64) -> Bytes {
        let whole = whole_pages(place, length, PAGE_BYTES as u64);
        whole.map_or(0, |(start, length)| self.count(start, start + length) * PAGE_BYTES as u64)
    }

    /// Whether any page of a range was in RAM, also one that lies in it in part.
    pub fn any(&self, place: u64, length: u64) -> bool {
        let start = place / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        self.count(start, (place + length).next_multiple_of(PAGE_BYTES as u64)) > 0
    }

    /// Pages in RAM between two that begin at these places.
    fn count(&self, start: u64, end: u64) -> u64 {
        let number =
            |place: u64| usize::try_from(place.saturating_sub(self.start) / PAGE_BYTES as u64).unwrap_or(usize::MAX);
        let end = number(end).min(self.pages.len());
        self.pages[number(start).min(end)..end].iter().filter(|page| **page).count() as u64
    }
}

impl Pool {
    /// Finds and checks the pool of the server of this data directory.
    ///
    /// # Errors
    /// [`MemoryError::NoServer`]; [`MemoryError::NotAllowed`] with the reason why this server's pool is not touched.
    pub fn attach(data_directory: &Path) -> Result<Pool, MemoryError> {
        let control = ControlFile::read(data_directory).map_err(|error| refuse(error.to_string()))?;
        if !header::MAJOR_VERSIONS.contains(&control.major_version) {
            return Err(refuse(format!("PostgreSQL {} is not one of 15 to 18", control.major_version)));
        }
        let postmaster = Postmaster::find(data_directory)?;
        let variables = Variables::read(&postmaster).map_err(refuse)?;
        let segment = Segment::open(&postmaster, variables.blocks_address)?;
        let pool = Pool::of(segment, variables, control.block_bytes.into()).map_err(refuse)?;
        pool.check_headers().and_then(|()| pool.check_pages()).map_err(|reason| refuse(reason.to_owned()))?;
        Ok(pool)
    }

    fn of(segment: Segment, variables: Variables, block_bytes: u64) -> Result<Pool, String> {
        if segment.page_bytes() != PAGE_BYTES as u64 {
            return Err("its shared memory has huge pages, which hold many buffers each".to_owned());
        }
        if !BUFFERS.contains(&variables.buffers) {
            return Err(format!("{} buffers are impossible", variables.buffers));
        }
        let place = |address| segment.place_of(address).ok_or("its buffers and their headers lie apart");
        let headers_place = place(variables.headers_address)?;
        let blocks_place = place(variables.blocks_address)?;
        let buffers = u64::from(variables.buffers);
        let words = |error: std::io::Error| format!("its shared memory cannot be mapped: {error}");
        let headers = segment.window(headers_place, buffers * HEADER_BYTES as u64).map_err(words)?;
        let blocks = segment.window(blocks_place, buffers * block_bytes).map_err(words)?;
        Ok(Pool { segment, headers, blocks, blocks_place, buffers: variables.buffers, block_bytes })
    }

    /// A word of a buffer's header.
    fn word(&self, buffer: u32, at: usize) -> &AtomicU32 {
        assert!(buffer < self.buffers);
        self.headers.word(buffer as usize * HEADER_BYTES + at).expect("all headers are mapped, at multiples of four")
    }

    /// The state of a buffer, to be changed.
    pub fn state_word(&self, buffer: u32) -> &AtomicU32 {
        self.word(buffer, header::STATE_AT)
    }

    /// The state of a buffer now.
    pub fn state(&self, buffer: u32) -> State {
        State(self.state_word(buffer).load(Acquire))
    }

    /// Place and length of some buffers in the shared memory.
    pub fn place_of(&self, first: u32, count: u32) -> (u64, u64) {
        (self.blocks_place + u64::from(first) * self.block_bytes, u64::from(count) * self.block_bytes)
    }

    /// The whole pool.
    pub fn size_bytes(&self) -> Bytes {
        u64::from(self.buffers) * self.block_bytes
    }

    /// What of it is in RAM. About 10 ms for 1 GB.
    pub fn resident(&self) -> std::io::Result<Resident> {
        // The buffers of 15 begin inside a page, which is of other things, too.
        let start = self.blocks_place.next_multiple_of(PAGE_BYTES as u64);
        let length = self.size_bytes() - (start - self.blocks_place);
        let position = usize::try_from(start - self.blocks_place).expect("less than a page");
        let pages = self.blocks.resident(position, usize::try_from(length).expect("it is mapped"))?;
        let bytes = pages.iter().filter(|page| **page).count() as u64 * PAGE_BYTES as u64;
        Ok(Resident { bytes, start, pages })
    }

    /// Whether what is taken for the headers is headers: each says its own number, and its parts fit together. A server
    /// that was built otherwise has headers of another size, and none of this is true.
    fn check_headers(&self) -> Result<(), &'static str> {
        for buffer in 0..self.buffers {
            if self.word(buffer, header::NUMBER_AT).load(Relaxed) != buffer {
                return Err("its buffers' headers are not as they are known; it may be a build for debugging");
            }
            let before = self.state(buffer);
            let tag_is_right = self.word(buffer, header::TABLESPACE_AT).load(Relaxed) != 0
                && self.word(buffer, header::FORK_AT).load(Relaxed) <= header::FORK_MAX;
            // Who holds the lock is changing it.
            let quiet = before == self.state(buffer) && before != before.locked();
            if quiet && (!before.makes_sense() || before.has_tag() && !tag_is_right) {
                return Err("its buffers' headers do not make sense");
            }
        }
        Ok(())
    }

    /// Whether what is taken for pages is pages, by some of them.
    fn check_pages(&self) -> Result<(), &'static str> {
        let valid = (0..self.buffers).filter(|buffer| self.state(*buffer).is_valid()).take(PAGES_CHECKED as usize);
        let expected = u16::try_from(self.block_bytes).map_or(0, |bytes| bytes | PAGE_VERSION);
        for buffer in valid {
            let before = self.state(buffer);
            let mut page = [0; PAGE_HEADER_BYTES];
            let (place, _) = self.place_of(buffer, 1);
            self.segment.read(place, &mut page).map_err(|_| "its pages cannot be read")?;
            let found = u16::from_le_bytes([page[PAGE_SIZE_AT], page[PAGE_SIZE_AT + 1]]);
            // A page that was added to a table and not used yet is empty.
            let is_page = found == expected || page == [0; PAGE_HEADER_BYTES];
            if !is_page && before == self.state(buffer) && before.is_valid() {
                return Err("its pages are not where they should be");
            }
        }
        Ok(())
    }
}

/// Why the pool of this server is not touched.
fn refuse(reason: String) -> MemoryError {
    MemoryError::NotAllowed { what: "to drop pages by the server's own buffer table", reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages 1, 2 and 4 of five that begin at 4096.
    fn resident() -> Resident {
        Resident { bytes: 3 * 4096, start: 4096, pages: vec![false, true, true, false, true] }
    }

    #[test]
    fn whole_pages_in_memory_are_counted() {
        let resident = resident();
        assert_eq!(resident.bytes_of_whole_pages(0, 1 << 20), 3 * 4096);
        assert_eq!(resident.bytes_of_whole_pages(8192, 8192), 8192);
        assert_eq!(resident.bytes_of_whole_pages(8191, 8192), 4096);
        assert_eq!(resident.bytes_of_whole_pages(8193, 8190), 0);
        assert_eq!(resident.bytes_of_whole_pages(1 << 20, 8192), 0);
    }

    #[test]
    fn a_page_that_is_shared_counts_as_there() {
        let resident = resident();
        assert!(resident.any(8192 + 4095, 1) && resident.any(8191, 2) && resident.any(0, 1 << 20));
        assert!(!resident.any(0, 8192) && !resident.any(16384, 4096) && !resident.any(1 << 20, 1));
    }
}
