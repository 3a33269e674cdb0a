//! How a server describes what it publishes: the fixed layout of `extension/src/published.h`. The server's memory is
//! not believed: every number is checked against the size of the shared memory before anything is done with it.

/// Bytes of the description before the chunks' states.
pub(super) const HEADER_BYTES: usize = 128;
/// Where the count of bytes taken stands.
pub(super) const TAKEN_BYTES_AT: usize = 64;

const MAGIC: &[u8; 8] = b"1CMEMORY";
const VERSION: u32 = 1;
/// `BLCKSZ` that PostgreSQL can be built with.
const BLOCK_BYTES: std::ops::RangeInclusive<u32> = 1024..=32768;
/// A chunk has so many blocks; other sizes are of another version.
const CHUNK_BLOCKS: u32 = 256;
/// The most buffers that PostgreSQL can have: `shared_buffers` is at most `INT_MAX / 2`.
const BUFFERS_MAX: u64 = 1 << 30;

/// State of a chunk. `TAKING` and `TAKEN` are set by the agent, all others by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ChunkState {
    /// Parked, its memory there, to be taken.
    Published = 3,
    /// An agent is giving its memory back.
    Taking = 4,
    /// An agent has given its memory back; the server will lower its target.
    Taken = 7,
}

/// What was found to be right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// How many chunks there are.
    pub chunks: u32,
    /// Where the first buffer lies in the shared memory.
    blocks_place: u64,
    block_bytes: u64,
    buffers: u64,
}

impl Layout {
    /// Checks a description that lies at `place` of a shared memory of `size_bytes`, made at `start_us`.
    pub fn check(
        header: &[u8; HEADER_BYTES],
        place: u64,
        size_bytes: u64,
        start_us: u64,
    ) -> Result<Layout, &'static str> {
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        if header[..8] != *MAGIC || long(48) != start_us {
            return Err("there is no description of published memory; the server may have just started again");
        }
        if word(8) != VERSION || word(16) != CHUNK_BLOCKS {
            return Err("the description is of another version of onecopy");
        }
        let (block_bytes, chunks, buffers, blocks_place) = (word(12), word(20), long(24), long(32));
        if !block_bytes.is_power_of_two() || !BLOCK_BYTES.contains(&block_bytes) {
            return Err("the size of a block is impossible");
        }
        if !(1..=BUFFERS_MAX).contains(&buffers) || u64::from(chunks) != buffers.div_ceil(CHUNK_BLOCKS.into()) {
            return Err("the number of chunks does not fit the number of buffers");
        }
        // Neither can overflow: at most 2^30 buffers of 2^15 bytes.
        let blocks_bytes = buffers * u64::from(block_bytes);
        let description_bytes = HEADER_BYTES as u64 + u64::from(chunks) * 4;
        let blocks_end = blocks_place.checked_add(blocks_bytes).filter(|end| *end <= size_bytes.min(long(40)));
        let blocks_end = blocks_end.ok_or("the buffers do not lie in the shared memory")?;
        let description_end = place.checked_add(description_bytes).filter(|end| *end <= size_bytes);
        let description_end = description_end.ok_or("the description does not lie in the shared memory")?;
        if !place.is_multiple_of(8) || (place < blocks_end && blocks_place < description_end) {
            return Err("the description lies in the buffers");
        }
        Ok(Layout { chunks, blocks_place, block_bytes: block_bytes.into(), buffers })
    }

    /// Bytes of the description with the chunks' states.
    pub fn description_bytes(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.chunks) * 4
    }

    /// Where the state of a chunk stands in the description.
    pub fn state_at(&self, chunk: u32) -> usize {
        HEADER_BYTES + chunk as usize * 4
    }

    /// Place and length in the shared memory of some chunks; the last may be shorter than the others.
    pub fn place_of(&self, chunks: std::ops::Range<u32>) -> (u64, u64) {
        let block = |chunk: u32| (u64::from(chunk) * u64::from(CHUNK_BLOCKS)).min(self.buffers);
        let (first, end) = (block(chunks.start), block(chunks.end.max(chunks.start)));
        (self.blocks_place + first * self.block_bytes, (end - first) * self.block_bytes)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A right description of 1000 buffers of 8 kB behind 64 kB of other things.
    pub fn right() -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(MAGIC);
        for (at, value) in [(8, VERSION), (12, 8192), (16, CHUNK_BLOCKS), (20, 4)] {
            header[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        for (at, value) in [(24, 1000_u64), (32, 65536), (40, SIZE_BYTES), (48, START_US)] {
            header[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        header
    }

    pub const SIZE_BYTES: u64 = 65536 + 1000 * 8192;
    pub const START_US: u64 = 12345;

    fn check(header: &[u8; HEADER_BYTES]) -> Result<Layout, &'static str> {
        Layout::check(header, 1024, SIZE_BYTES, START_US)
    }

    #[test]
    fn chunks_lie_one_after_the_other_and_the_last_is_shorter() {
        let layout = check(&right()).expect("right");
        assert_eq!(layout.place_of(0..1), (65536, 256 * 8192));
        assert_eq!(layout.place_of(3..4), (65536 + 768 * 8192, 232 * 8192));
        assert_eq!(layout.place_of(0..4), (65536, 1000 * 8192));
        assert_eq!(layout.place_of(4..9), (SIZE_BYTES, 0));
        assert_eq!((layout.state_at(3), layout.description_bytes()), (140, 144));
    }

    #[test]
    fn a_wrong_description_is_refused_with_the_reason() {
        let wrong = |at: usize, value: u64, size: usize, reason: &str| {
            let mut header = right();
            header[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
            let refused = check(&header).expect_err(reason);
            assert!(refused.contains(reason), "{at}: {refused}");
        };
        wrong(0, 0, 8, "no description");
        wrong(48, 1, 8, "no description");
        wrong(8, 2, 4, "another version");
        wrong(16, 128, 4, "another version");
        wrong(12, 8191, 4, "size of a block");
        wrong(12, 0, 4, "size of a block");
        wrong(12, 65536, 4, "size of a block");
        wrong(20, 3, 4, "number of chunks");
        wrong(24, 0, 8, "number of chunks");
        wrong(24, u64::MAX, 8, "number of chunks");
        wrong(32, 65537, 8, "do not lie in");
        wrong(32, u64::MAX, 8, "do not lie in");
        wrong(40, SIZE_BYTES - 1, 8, "do not lie in");
        wrong(32, 0, 8, "in the buffers");
        let place = |place| Layout::check(&right(), place, SIZE_BYTES, START_US).expect_err("refused");
        assert!(place(65536 - 8).contains("in the buffers"));
        assert!(place(1028).contains("in the buffers"), "not aligned");
        assert!(place(SIZE_BYTES - 128).contains("does not lie in"));
        assert!(place(u64::MAX - 7).contains("does not lie in"));
    }

    proptest! {
        /// Whatever the server writes there, nothing outside the shared memory, and nothing of the description, is ever
        /// touched.
        #[test]
        fn what_is_accepted_lies_inside(
            changes in prop::collection::vec((8_usize..128, any::<u8>()), 0..12),
            place in (0_u64..SIZE_BYTES + 4096).prop_map(|place| place / 8 * 8),
            size_bytes in 0..2 * SIZE_BYTES,
            first: u32,
            end: u32,
        ) {
            let mut header = right();
            for (at, value) in changes {
                header[at] = value;
            }
            if let Ok(layout) = Layout::check(&header, place, size_bytes, START_US) {
                let (start, length) = layout.place_of(first..end);
                let description_end = place + layout.description_bytes();
                prop_assert!(start + length <= size_bytes && description_end <= size_bytes);
                prop_assert!(length == 0 || start + length <= place || description_end <= start);
                prop_assert!(
                    layout.chunks == 0
                        || layout.state_at(layout.chunks - 1) + 4 <= layout.description_bytes() as usize
                );
            }
        }
    }
}
