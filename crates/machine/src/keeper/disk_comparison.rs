//! The first copy of a disk leaves out what the other host has: that one begins its copy with what it knows of the
//! disk, and says by digests what that is.
//!
//! ```text
//!  destination                                            source
//!  the image, or the disk of before ──> copy ── digests ──> compared with the disk's first epoch
//!                                       copy <── what differs, and what was not told and is not zeros
//! ```
//!
//! The first message is a key of 32 bytes, so that no guest can make blocks that differ and seem the same. Each other
//! one is the number of a block of 4 KiB (eight bytes, little-endian), and a digest of that one and of each that
//! follows: the first 16 bytes of its BLAKE3 with that key, or 16 zeros for a block of zeros. They rise, and what lies
//! between two of them is zeros. One without digests ends a window of the disk, and is answered once that is compared;
//! at most one is under way unanswered. The last one ends at the disk's end.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::take::Cause;
use onecopy_disk::{Source, SourceError};

/// Blocks that a message tells of at most: 16 KiB of digests.
const BLOCKS_MAX: u64 = 1024;

/// Zeros between two runs that are said with them, in blocks.
const GAP_BLOCKS_MAX: u64 = 32;

/// Blocks of a window: 256 MiB.
const WINDOW_BLOCKS: u64 = 1 << 16;

const BLOCK: u64 = PAGE_BYTES as u64;

/// What others may write on the copy's file system until the next window.
const FREE_BYTES_MIN: u64 = 256 << 20;

/// What is answered.
const COMPARED: &[u8] = b"compared";

/// What a host hears of that does not keep to this.
const MALFORMED: &str = "the other host tells of its disk what nobody understands; run the same onecopy on both";

type Key = [u8; 32];

/// What a block is compared by.
type Digest = [u8; 16];

const ZEROS: Digest = [0; 16];

fn digest(block: &[u8], key: &Key) -> Digest {
    match block.iter().all(|byte| *byte == 0) {
        true => ZEROS,
        false => *blake3::keyed_hash(key, block).as_bytes().first_chunk().expect("it has 32 bytes"),
    }
}

/// The other side, as either hears it.
pub(super) trait Peer {
    fn say(&mut self, message: &[u8]) -> Result<(), Cause>;
    fn hear(&mut self) -> Result<Vec<u8>, Cause>;
}

/// The blocks among these that are not known to be zeros; of a disk of that many bytes, which may end within one.
///
/// # Errors
/// The source could not be asked.
pub(super) fn not_zero(disk: &dyn Source, blocks: Range<u64>) -> Result<Vec<Range<u64>>, SourceError> {
    let bytes = blocks.start * BLOCK..(blocks.end * BLOCK).min(disk.size_bytes());
    let mut ranges: Vec<Range<u64>> = Vec::new();
    if bytes.is_empty() {
        return Ok(ranges);
    }
    for extent in disk.extents(bytes)?.iter().filter(|extent| !extent.is_zero) {
        let behind = ranges.last().map_or(blocks.start, |range| range.end);
        let range = (extent.range.start / BLOCK).max(behind)..extent.range.end.div_ceil(BLOCK).min(blocks.end);
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    Ok(ranges)
}

/// What was said of all but the disk's end.
pub(super) struct Told {
    blocks: u64,
    is_unanswered: bool,
}

impl Told {
    fn end_window(&mut self, end: u64, peer: &mut impl Peer) -> Result<(), Cause> {
        peer.say(&message(end, &[]))?;
        match std::mem::replace(&mut self.is_unanswered, true) {
            true => hear_compared(peer),
            false => Ok(()),
        }
    }

    /// Ends it: from here on what differs comes.
    ///
    /// # Errors
    /// The other side is lost.
    pub(super) fn end(mut self, peer: &mut impl Peer) -> Result<(), Cause> {
        self.end_window(self.blocks, peer)?;
        hear_compared(peer)
    }
}

/// Begins an empty copy with what is known of the disk, if anything is, and says what that is. Where that cannot be
/// read or written any more, or leaves others no room, the copy has nothing from there on.
///
/// # Errors
/// The other side is lost; what was written and not said cannot be removed.
pub(super) fn begin_with(
    mut known: Option<&dyn Source>,
    copy: &File,
    disk_bytes: u64,
    peer: &mut impl Peer,
) -> Result<Told, Cause> {
    let key: Key = rand::random();
    peer.say(&key)?;
    let mut told = Told { blocks: disk_bytes.div_ceil(BLOCK), is_unanswered: false };
    for start in (0..told.blocks).step_by(WINDOW_BLOCKS as usize) {
        let window = start..told.blocks.min(start + WINDOW_BLOCKS);
        if let Some(source) = known
            && let Err(given_up) = tell(source, copy, window.clone(), &key, peer)?
        {
            tracing::warn!(error = %given_up.error, "no more is taken from what is known of the disk");
            copy.set_len(given_up.at * BLOCK)?;
            copy.set_len(disk_bytes)?;
            known = None;
        }
        if window.end < told.blocks {
            told.end_window(window.end, peer)?;
        }
    }
    Ok(told)
}

fn hear_compared(peer: &mut impl Peer) -> Result<(), Cause> {
    match peer.hear()? == COMPARED {
        true => Ok(()),
        false => Err("it says something else than that it has compared".into()),
    }
}

/// Why nothing more is known, and from which block on.
struct GivenUp {
    at: u64,
    error: Cause,
}

/// Takes what is known of a window into the copy, and says it.
fn tell(
    known: &dyn Source,
    copy: &File,
    window: Range<u64>,
    key: &Key,
    peer: &mut impl Peer,
) -> Result<Result<(), GivenUp>, Cause> {
    // A last block that is none as a whole is not worth a word.
    let whole = window.start..window.end.min(known.size_bytes() / BLOCK).max(window.start);
    let ranges = check_room(copy).and_then(|()| Ok(not_zero(known, whole)?));
    let ranges = match ranges {
        Ok(ranges) => joined(ranges),
        Err(error) => return Ok(Err(GivenUp { at: window.start, error })),
    };
    let pieces = |range: &Range<u64>| {
        let (start, end) = (range.start, range.end);
        (start..end).step_by(BLOCKS_MAX as usize).map(move |first| first..end.min(first + BLOCKS_MAX))
    };
    for piece in ranges.iter().flat_map(pieces) {
        match take(known, copy, piece.clone(), key) {
            Ok(digests) => peer.say(&message(piece.start, &digests))?,
            Err(error) => return Ok(Err(GivenUp { at: piece.start, error })),
        }
    }
    Ok(Ok(()))
}

/// Without gaps that take less to read than another message takes.
fn joined(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start - last.end <= GAP_BLOCKS_MAX => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

fn check_room(copy: &File) -> Result<(), Cause> {
    let space = rustix::fs::fstatvfs(copy)?;
    match space.f_bavail.saturating_mul(space.f_frsize) < FREE_BYTES_MIN + WINDOW_BLOCKS * BLOCK {
        true => Err("the copy's file system has too little room for both".into()),
        false => Ok(()),
    }
}

/// Writes blocks, without those of zeros: their digests.
fn take(known: &dyn Source, copy: &File, blocks: Range<u64>, key: &Key) -> Result<Vec<Digest>, Cause> {
    let mut content = vec![0; ((blocks.end - blocks.start) * BLOCK) as usize];
    known.read(blocks.start * BLOCK, &mut content)?;
    let digests: Vec<Digest> = content.chunks(PAGE_BYTES).map(|block| digest(block, key)).collect();
    let mut at = 0;
    for run in digests.chunk_by(|one, next| (*one == ZEROS) == (*next == ZEROS)) {
        let bytes = run.len() * PAGE_BYTES;
        if run[0] != ZEROS {
            copy.write_all_at(&content[at..at + bytes], blocks.start * BLOCK + at as u64)?;
        }
        at += bytes;
    }
    Ok(digests)
}

fn message(first: u64, digests: &[Digest]) -> Vec<u8> {
    [&first.to_le_bytes(), digests.as_flattened()].concat()
}

fn parse(message: &[u8]) -> Option<(u64, &[Digest])> {
    let (first, digests) = message.split_first_chunk()?;
    let (digests, rest) = digests.as_chunks();
    (rest.is_empty() && digests.len() as u64 <= BLOCKS_MAX).then_some((u64::from_le_bytes(*first), digests))
}

/// What of a disk another host has not.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Difference {
    /// Blocks that it has not as they are, rising.
    pub(super) ranges: Vec<Range<u64>>,
    /// How many blocks that are not zeros it has as they are.
    pub(super) same: u64,
}

impl Difference {
    fn add(&mut self, range: Range<u64>) {
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.ranges.push(range),
        }
    }
}

/// Compares a disk with what another host says that it has of it.
///
/// # Errors
/// The other host is lost, or lies; the disk cannot be read.
pub(super) fn compare(disk: &dyn Source, peer: &mut impl Peer) -> Result<Difference, Cause> {
    let blocks = disk.size_bytes().div_ceil(BLOCK);
    let key: Key = peer.hear()?.try_into().map_err(|_| MALFORMED)?;
    let (mut difference, mut window, mut end) = (Difference::default(), 0, 0);
    loop {
        let heard = peer.hear()?;
        let (first, digests) = parse(&heard).ok_or(MALFORMED)?;
        let (told, may_end_at) = (digests.len() as u64, blocks.min(window + WINDOW_BLOCKS));
        let goes_on = first >= end && first <= may_end_at && told <= may_end_at - first;
        if !goes_on || told == 0 && first == window {
            return Err(format!("the other host tells of the blocks {first} and {told} more, of {blocks}").into());
        }
        not_zero(disk, end..first)?.into_iter().for_each(|range| difference.add(range));
        if told == 0 {
            peer.say(COMPARED)?;
            if first == blocks {
                return Ok(difference);
            }
            (window, end) = (first, first);
            continue;
        }
        let mut content = vec![0; digests.len() * PAGE_BYTES];
        disk.read(first * BLOCK, &mut content)?;
        for (number, (told, block)) in (first..).zip(digests.iter().zip(content.chunks(PAGE_BYTES))) {
            match digest(block, &key) == *told {
                true => difference.same += u64::from(*told != ZEROS),
                false => difference.add(number..number + 1),
            }
        }
        end = first + told;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use onecopy_disk::Extent;
    use onecopy_disk::source::RawFile;

    use super::*;

    /// One end of a connection.
    struct End(Sender<Vec<u8>>, Receiver<Vec<u8>>);

    impl End {
        fn both() -> (End, End) {
            let ((to_one, from_other), (to_other, from_one)) = (channel(), channel());
            (End(to_one, from_one), End(to_other, from_other))
        }
    }

    impl Peer for End {
        fn say(&mut self, message: &[u8]) -> Result<(), Cause> {
            Ok(self.0.send(message.to_vec())?)
        }

        fn hear(&mut self) -> Result<Vec<u8>, Cause> {
            Ok(self.1.recv()?)
        }
    }

    /// A file of these blocks, each of one byte; zeros are holes.
    fn file(directory: &tempfile::TempDir, name: &str, blocks: &[u8]) -> RawFile {
        let path = directory.path().join(name);
        let file = File::create(&path).unwrap();
        file.set_len(blocks.len() as u64 * BLOCK).unwrap();
        for (number, byte) in (0..).zip(blocks).filter(|(_, byte)| **byte != 0) {
            file.write_all_at(&[*byte; PAGE_BYTES], number * BLOCK).unwrap();
        }
        RawFile::open(&path).unwrap()
    }

    fn empty(directory: &tempfile::TempDir, bytes: u64) -> File {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(directory.path().join("copy")).unwrap();
        file.set_len(bytes).unwrap();
        file
    }

    /// Of one range.
    fn one(range: Range<u64>, same: u64) -> Difference {
        let mut difference = Difference { ranges: Vec::new(), same };
        difference.add(range);
        difference
    }

    /// Both sides.
    fn compared(known: Option<&dyn Source>, copy: &File, disk: &RawFile) -> Difference {
        let (mut destination, mut source) = End::both();
        std::thread::scope(|scope| {
            let begun = scope.spawn(move || {
                let told = begin_with(known, copy, disk.size_bytes(), &mut destination);
                told.and_then(|told| told.end(&mut destination)).map_err(|error| error.to_string())
            });
            let difference = compare(disk, &mut source).map_err(|error| error.to_string());
            begun.join().unwrap().unwrap();
            difference.unwrap()
        })
    }

    /// Spec: D8
    #[test]
    fn p7_a_copy_begins_with_what_is_known_and_gets_what_differs() {
        let directory = tempfile::tempdir().unwrap();
        let known = file(&directory, "known", &[1, 1, 0, 5, 6, 0, 0, 7, 8, 0, 9, 9]);
        let disk = file(&directory, "disk", &[1, 2, 3, 5, 0, 0, 4, 7, 8, 4]);
        let copy = empty(&directory, 10 * BLOCK);
        let difference = compared(Some(&known), &copy, &disk);
        // Changed, new in a hole, zeros now, new in a hole, behind what is known.
        assert_eq!(difference, Difference { ranges: vec![1..3, 4..5, 6..7, 9..10], same: 4 });
        let mut bytes = vec![0; 10 * PAGE_BYTES];
        copy.read_exact_at(&mut bytes, 0).unwrap();
        let begun: Vec<u8> = bytes.chunks(PAGE_BYTES).map(|block| block[0]).collect();
        assert_eq!(begun, [1, 1, 0, 5, 6, 0, 0, 7, 8, 0]);
        assert_eq!(copy.metadata().unwrap().blocks() * 512, 6 * BLOCK, "holes stay holes");
        // With what it gets it is the disk.
        for number in difference.ranges.into_iter().flatten() {
            disk.read(number * BLOCK, &mut bytes[..PAGE_BYTES]).unwrap();
            copy.write_all_at(&bytes[..PAGE_BYTES], number * BLOCK).unwrap();
        }
        let (mut is, mut shall) = (vec![0; 10 * PAGE_BYTES], vec![0; 10 * PAGE_BYTES]);
        copy.read_exact_at(&mut is, 0).unwrap();
        disk.read(0, &mut shall).unwrap();
        assert!(is == shall);
        // Nothing is known.
        let difference = compared(None, &empty(&directory, 10 * BLOCK), &disk);
        assert_eq!(difference, Difference { ranges: vec![0..4, 6..10], same: 0 });
    }

    /// Larger than a message, smaller than the disk, and the disk smaller than what is known.
    #[test]
    fn what_is_known_may_be_of_any_size() {
        let directory = tempfile::tempdir().unwrap();
        let many = vec![3; 2 * BLOCKS_MAX as usize + 7];
        let (disk, end) = (file(&directory, "disk", &many), many.len() as u64);
        for known in [0, 1, many.len() / 2, many.len(), 2 * many.len()] {
            let source = file(&directory, "known", &vec![3; known]);
            let copy = empty(&directory, disk.size_bytes());
            let difference = compared(Some(&source), &copy, &disk);
            let same = end.min(known as u64);
            let due = if same == end { Difference { ranges: Vec::new(), same } } else { one(same..end, same) };
            assert_eq!(difference, due);
            assert_eq!(copy.metadata().unwrap().len(), disk.size_bytes());
        }
        // Of several windows, which end within a block.
        let windows = File::create(directory.path().join("windows")).unwrap();
        let (last, bytes) = (2 * WINDOW_BLOCKS + 5, (2 * WINDOW_BLOCKS + 5) * BLOCK + 1);
        windows.set_len(bytes).unwrap();
        let written = [0, WINDOW_BLOCKS - 1, WINDOW_BLOCKS, 2 * WINDOW_BLOCKS + 1, last - 1];
        written.iter().for_each(|block| windows.write_all_at(&[5; PAGE_BYTES], block * BLOCK).unwrap());
        windows.write_all_at(&[5], last * BLOCK).unwrap();
        let disk = RawFile::open(&directory.path().join("windows")).unwrap();
        let copy = empty(&directory, bytes);
        let difference = compared(Some(&disk), &copy, &disk);
        assert_eq!(difference, one(last..last + 1, 5));
        assert_eq!(copy.metadata().unwrap().len(), bytes);
        let known = file(&directory, "known", &[5, 5]);
        let difference = compared(Some(&known), &empty(&directory, bytes), &disk);
        let ranges = [1..2, WINDOW_BLOCKS - 1..WINDOW_BLOCKS + 1, last - 4..last - 3, last - 1..last + 1];
        assert_eq!(difference, Difference { ranges: ranges.to_vec(), same: 1 });
    }

    /// A disk that cannot be read from some place on.
    struct Broken(RawFile, u64);

    impl Source for Broken {
        fn size_bytes(&self) -> u64 {
            self.0.size_bytes()
        }

        fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
            self.0.read(offset, into)?;
            match offset < self.1 {
                true => Ok(()),
                false => Err(SourceError { source_name: "it".to_owned(), reason: "is broken".to_owned() }),
            }
        }

        fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
            self.0.extents(range)
        }

        fn describe(&self) -> String {
            self.0.describe()
        }
    }

    #[test]
    fn what_is_known_and_cannot_be_read_travels() {
        let directory = tempfile::tempdir().unwrap();
        let many = vec![3; 2 * BLOCKS_MAX as usize];
        let disk = file(&directory, "disk", &many);
        let copy = empty(&directory, disk.size_bytes());
        let difference = compared(Some(&Broken(file(&directory, "known", &many), BLOCK)), &copy, &disk);
        assert_eq!(difference, one(BLOCKS_MAX..2 * BLOCKS_MAX, BLOCKS_MAX));
        let mut behind = vec![7; PAGE_BYTES];
        copy.read_exact_at(&mut behind, BLOCKS_MAX * BLOCK).unwrap();
        assert!(behind == [0; PAGE_BYTES]);
    }

    #[test]
    fn a_host_that_lies_of_its_blocks_is_not_believed() {
        let directory = tempfile::tempdir().unwrap();
        let blocks = BLOCKS_MAX + 8;
        let disk = file(&directory, "disk", &vec![3; blocks as usize]);
        let told = |first, count| message(first, &vec![[1; 16]; count]);
        let (key, end) = (vec![7; 32], told(blocks, 0));
        let hear = |said: &[Vec<u8>]| {
            let (mut destination, mut source) = End::both();
            said.iter().for_each(|message| destination.say(message).unwrap());
            // Nothing more comes, and its answers are taken.
            let _answers = destination.1;
            drop(destination.0);
            compare(&disk, &mut source).map_err(|error| error.to_string())
        };
        let lies = [
            vec![vec![]],
            vec![vec![0; 9]],
            vec![told(blocks - 8, 9)],
            vec![told(blocks, 1)],
            vec![told(blocks + 1, 0)],
            vec![told(0, 0)],
            vec![told(4, 0), told(4, 0)],
            vec![told(u64::MAX, 1)],
            vec![told(2, 3), told(4, 1)],
            vec![told(2, 3), told(2, 0)],
            vec![told(0, BLOCKS_MAX as usize + 1)],
        ];
        for lie in lies {
            let said = [std::slice::from_ref(&key), &*lie, std::slice::from_ref(&end)].concat();
            let reason = hear(&said).expect_err(&format!("{lie:?}"));
            assert!(reason.starts_with("the other host tells of"), "{lie:?}: {reason}");
        }
        assert_eq!(hear(&[vec![7; 31], end.clone()]).unwrap_err(), MALFORMED);
        // Broken off.
        hear(&[]).unwrap_err();
        hear(&[key.clone(), told(0, 8)]).unwrap_err();
        assert_eq!(hear(&[key, told(2, 3), told(6, 0), end]), Ok(one(0..blocks, 0)));
    }
}
