//! A page map in a file, from one clean close of its disk to the next opening.
//!
//! ```text
//! magic "1CPYPMAP" | version u32 | extents u32 | uuid 16 | generation u64 | seed u64 | blocks u64
//! then for each extent: number u32 | fingerprints 1024 x u64
//! then XXH3-64 of all before
//! ```
//! All numbers are little-endian. The index is not written: it follows from the fingerprints. The file is believed only
//! for the disk, the seed and the generation that the caller names, and only whole: it is removed as soon as it has
//! been read, so a process that dies leaves none.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::sync::atomic::Ordering;

use xxhash_rust::xxh3::Xxh3;

use crate::contents::{EXTENT_BLOCKS, Fingerprint};
use crate::{Bounds, PageMap, PageMapError};

const MAGIC: [u8; 8] = *b"1CPYPMAP";
/// Of the layout, and of [`content_hash`](crate::content_hash).
pub(crate) const VERSION: u32 = 1;
const HEADER_BYTES: usize = 8 + 4 + 4 + 16 + 8 + 8 + 8;
const FINGERPRINT_BYTES: usize = 8;
const EXTENT_BYTES: usize = 4 + FINGERPRINT_BYTES * EXTENT_BLOCKS as usize;

/// Which disk, as it was when, a page map tells about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The disk's own number.
    pub uuid: [u8; 16],
    /// Counts the openings of the disk: another one means that somebody may have written meanwhile.
    pub generation: u64,
}

impl PageMap {
    /// Writes it to a file, which appears whole or not at all. The disk must be at rest.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: &Path, identity: &Identity) -> Result<(), PageMapError> {
        let unfinished = path.with_extension("unfinished");
        let written = File::create(&unfinished).and_then(|file| self.write(file, identity));
        let done = written.and_then(|()| fs::rename(&unfinished, path));
        done.map_err(|source| PageMapError::File { action: "write", path: path.to_owned(), source })
    }

    /// Reads one from a file and removes the file. `None`: there is none.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or is of another disk, generation, seed or version. It is removed in these
    /// cases, too.
    pub fn load(
        path: &Path,
        size_bytes: u64,
        seed: u64,
        bounds: Bounds,
        identity: &Identity,
    ) -> Result<Option<PageMap>, PageMapError> {
        let failed = |action, source| PageMapError::File { action, path: path.to_owned(), source };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("open", error)),
        };
        // Before anything is believed: from now on the disk may change, and the file would not.
        fs::remove_file(path).map_err(|error| failed("remove", error))?;
        let map = PageMap::new(size_bytes, seed, bounds)?;
        match map.fill(file, identity) {
            Ok(()) => Ok(Some(map)),
            Err(Refusal::Read(source)) => Err(failed("read", source)),
            Err(Refusal::Damaged(reason)) => Err(PageMapError::Damaged { path: path.to_owned(), reason }),
            Err(Refusal::Foreign(reason)) => Err(PageMapError::Foreign { path: path.to_owned(), reason }),
        }
    }

    fn write(&self, file: File, identity: &Identity) -> io::Result<()> {
        let mut out = Summed { inner: BufWriter::new(file), sum: Xxh3::new() };
        // The disk is at rest, so the count holds.
        let extents = u32::try_from(self.contents.extents()).expect("a disk has 2^32 blocks at most");
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&extents.to_le_bytes())?;
        out.write_all(&identity.uuid)?;
        for number in [identity.generation, self.seed(), self.blocks()] {
            out.write_all(&number.to_le_bytes())?;
        }
        self.contents.each_extent(|number, fingerprints| {
            out.write_all(&number.to_le_bytes())?;
            fingerprints
                .iter()
                .try_for_each(|fingerprint| out.write_all(&fingerprint.load(Ordering::Relaxed).to_le_bytes()))
        })?;
        let sum = out.sum.digest();
        let mut file = out.inner;
        file.write_all(&sum.to_le_bytes())?;
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    }

    /// Fills an empty map from a file.
    fn fill(&self, file: File, identity: &Identity) -> Result<(), Refusal> {
        let length = file.metadata()?.len();
        let mut from = Summed { inner: BufReader::new(file), sum: Xxh3::new() };
        let mut header = [0; HEADER_BYTES];
        from.read_exact(&mut header)?;
        let extents = self.accept(&header, identity)?;
        let expected = HEADER_BYTES as u64 + u64::from(extents) * EXTENT_BYTES as u64 + 8;
        if length != expected {
            return Err(Refusal::Damaged("its length does not fit its header"));
        }
        // Entered only when the sum is right: until then nobody but this function has the map.
        let mut extent = vec![0; EXTENT_BYTES];
        for _ in 0..extents {
            from.read_exact(&mut extent)?;
            self.enter_extent(&extent)?;
        }
        let sum = from.sum.digest();
        let mut stated = [0; 8];
        from.inner.read_exact(&mut stated)?;
        if sum != u64::from_le_bytes(stated) {
            return Err(Refusal::Damaged("its sum is wrong"));
        }
        Ok(())
    }

    /// Looks whether a header is of this disk as it is now. Returns how many extents follow.
    fn accept(&self, header: &[u8; HEADER_BYTES], identity: &Identity) -> Result<u32, Refusal> {
        let (magic, rest) = header.split_at(MAGIC.len());
        let (version, rest) = rest.split_at(4);
        let (extents, rest) = rest.split_at(4);
        let (uuid, numbers) = rest.split_at(16);
        let number = |place: usize| u64::from_le_bytes(numbers[place * 8..][..8].try_into().expect("eight bytes"));
        if magic != MAGIC {
            return Err(Refusal::Damaged("it does not begin as a page map does"));
        }
        if version != VERSION.to_le_bytes() {
            return Err(Refusal::Foreign("it has another version".to_owned()));
        }
        if uuid != identity.uuid || number(1) != self.seed() || number(2) != self.blocks() {
            return Err(Refusal::Foreign("it is another disk's".to_owned()));
        }
        if number(0) != identity.generation {
            let (then, now) = (number(0), identity.generation);
            return Err(Refusal::Foreign(format!("the disk was opened since (generation {then}, not {now})")));
        }
        Ok(u32::from_le_bytes(extents.try_into().expect("four bytes")))
    }

    fn enter_extent(&self, bytes: &[u8]) -> Result<(), Refusal> {
        let (number, fingerprints) = bytes.split_at(4);
        let number = u32::from_le_bytes(number.try_into().expect("four bytes"));
        let first = u64::from(number) * u64::from(EXTENT_BLOCKS);
        for (fingerprint, block) in fingerprints.chunks_exact(FINGERPRINT_BYTES).zip(first..) {
            let bits = u64::from_le_bytes(fingerprint.try_into().expect("eight bytes"));
            let Some(fingerprint) = Fingerprint::from_bits(bits) else { continue };
            if block >= self.blocks() {
                return Err(Refusal::Damaged("it names a block behind the disk's end"));
            }
            self.enter(u32::try_from(block).expect("a disk has 2^32 blocks at most"), fingerprint);
        }
        Ok(())
    }
}

/// Why a file is not believed.
enum Refusal {
    Read(io::Error),
    Damaged(&'static str),
    Foreign(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Refusal::Damaged("it ends too early"),
            _ => Refusal::Read(error),
        }
    }
}

/// A file, and the sum of what went through.
struct Summed<T> {
    inner: T,
    sum: Xxh3,
}

impl<T: Write> Summed<T> {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.update(bytes);
        self.inner.write_all(bytes)
    }
}

impl<T: Read> Summed<T> {
    fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.inner.read_exact(bytes)?;
        self.sum.update(bytes);
        Ok(())
    }
}
