//! What goes over the connection between two hosts.
//!
//! ```text
//!  frame   u8 kind, u32 length, content
//!  pages   u32 count, count words (page, and whether it is zeros), one zstd frame with the others one after another
//! ```
//!
//! What is read may be anything: every length has a bound, memory is taken as bytes come, and a page is of the
//! machine's memory or an error.

use std::io::{self, ErrorKind, Read, Write};

use zstd::bulk::{Compressor, Decompressor};

use crate::PAGE_BYTES;

/// Pages of one frame at most.
pub const CHUNK_PAGES: usize = 256;

/// A text of a frame at most.
pub const TEXT_BYTES_MAX: usize = 64 << 10;

/// What else a frame has at most: the state of devices, or what QEMU tells of itself.
pub const BLOB_BYTES_MAX: usize = 64 << 20;

/// Of what is compressed, pages of random bytes become a little longer.
const CHUNK_BYTES_MAX: usize = CHUNK_PAGES * (PAGE_BYTES + 64) + 4096;

/// Set in the word of a page that is zeros.
const ZERO: u32 = 1 << 31;

/// The fastest one: two hosts' links carry what it gives.
const LEVEL: i32 = 1;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Pages of memory.
    Pages,
    /// Text.
    Text,
    /// Bytes.
    Blob,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Pages, Kind::Text, Kind::Blob];

    fn byte(self) -> u8 {
        match self {
            Kind::Pages => 1,
            Kind::Text => 2,
            Kind::Blob => 3,
        }
    }

    fn bytes_max(self) -> usize {
        match self {
            Kind::Pages => CHUNK_BYTES_MAX,
            Kind::Text => TEXT_BYTES_MAX,
            Kind::Blob => BLOB_BYTES_MAX,
        }
    }
}

fn wrong(what: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// Writes a frame; the bytes that it takes.
///
/// # Errors
/// It is too long, or what writing says.
pub fn write(to: &mut impl Write, kind: Kind, content: &[u8]) -> io::Result<u64> {
    if content.len() > kind.bytes_max() {
        return Err(wrong(format!("a frame of {} bytes is too long", content.len())));
    }
    let length = u32::try_from(content.len()).map_err(|_| wrong("a frame is too long".to_owned()))?;
    let mut head = [kind.byte(), 0, 0, 0, 0];
    head[1..].copy_from_slice(&length.to_le_bytes());
    to.write_all(&head)?;
    to.write_all(content)?;
    to.flush()?;
    Ok(head.len() as u64 + content.len() as u64)
}

/// Reads a frame.
///
/// # Errors
/// It is none, or what reading says.
pub fn read(from: &mut impl Read) -> io::Result<(Kind, Vec<u8>)> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.byte() == head[0]);
    let kind = kind.ok_or_else(|| wrong(format!("a frame of kind {}", head[0])))?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if length > kind.bytes_max() {
        return Err(wrong(format!("a frame of {length} bytes is too long")));
    }
    // It grows as bytes come: a length alone takes nothing.
    let mut content = Vec::new();
    from.take(length as u64).read_to_end(&mut content)?;
    match content.len() == length {
        true => Ok((kind, content)),
        false => Err(ErrorKind::UnexpectedEof.into()),
    }
}

/// Pages by what is sent of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of zeros: a word each.
    pub zero_pages: u64,
    /// Compressed.
    pub data_pages: u64,
    /// Bytes of all, as they go over the connection.
    pub bytes: u64,
}

impl Counts {
    /// All pages.
    pub fn pages(&self) -> u64 {
        self.zero_pages + self.data_pages
    }

    /// Both.
    pub fn add(&mut self, other: Counts) {
        self.zero_pages += other.zero_pages;
        self.data_pages += other.data_pages;
        self.bytes += other.bytes;
    }
}

/// Makes frames of pages.
pub struct Encoder {
    compressor: Compressor<'static>,
    words: Vec<u32>,
    data: Vec<u8>,
    counts: Counts,
}

impl Encoder {
    /// With nothing in it.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new() -> io::Result<Encoder> {
        let compressor = Compressor::new(LEVEL)?;
        Ok(Encoder { compressor, words: Vec::new(), data: Vec::new(), counts: Counts::default() })
    }

    /// One more page; a frame is written when enough are there. The bytes that were written.
    ///
    /// # Errors
    /// What writing says.
    pub fn page(&mut self, to: &mut impl Write, page: u32, content: &[u8; PAGE_BYTES]) -> io::Result<u64> {
        if content.iter().all(|byte| *byte == 0) {
            self.words.push(page | ZERO);
            self.counts.zero_pages += 1;
        } else {
            self.words.push(page);
            self.data.extend_from_slice(content);
            self.counts.data_pages += 1;
        }
        if self.words.len() < CHUNK_PAGES { Ok(0) } else { self.flush(to) }
    }

    /// Writes what has come since the last frame. The bytes that were written.
    ///
    /// # Errors
    /// What writing says.
    pub fn flush(&mut self, to: &mut impl Write) -> io::Result<u64> {
        if self.words.is_empty() {
            return Ok(0);
        }
        let count = u32::try_from(self.words.len()).expect("a bounded number of pages");
        let mut content = count.to_le_bytes().to_vec();
        content.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
        if !self.data.is_empty() {
            content.extend(self.compressor.compress(&self.data)?);
        }
        self.words.clear();
        self.data.clear();
        let bytes = write(to, Kind::Pages, &content)?;
        self.counts.bytes += bytes;
        Ok(bytes)
    }

    /// What was written since this was asked for last.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }
}

/// Reads frames of pages of a memory.
pub struct Decoder {
    decompressor: Decompressor<'static>,
    pages: u64,
}

impl Decoder {
    /// Of a memory of so many pages.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new(pages: u64) -> io::Result<Decoder> {
        Ok(Decoder { decompressor: Decompressor::new()?, pages })
    }

    /// Shows each page of a frame's content; of zeros as none.
    ///
    /// # Errors
    /// It is none, or has pages that the memory has not; what `show` says.
    pub fn decode(
        &mut self,
        content: &[u8],
        mut show: impl FnMut(u32, Option<&[u8; PAGE_BYTES]>) -> io::Result<()>,
    ) -> io::Result<()> {
        let (count, rest) = content.split_first_chunk().ok_or_else(|| wrong("a frame without pages".to_owned()))?;
        let count = u32::from_le_bytes(*count) as usize;
        if count > CHUNK_PAGES || rest.len() < count * 4 {
            return Err(wrong(format!("{count} pages in {} bytes", content.len())));
        }
        let (words, compressed) = rest.split_at(count * 4);
        let words: Vec<u32> = words.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        if let Some(word) = words.iter().find(|word| u64::from(**word & !ZERO) >= self.pages) {
            return Err(wrong(format!("page {} of a memory of {}", word & !ZERO, self.pages)));
        }
        let data_pages = words.iter().filter(|word| **word & ZERO == 0).count();
        let data = match data_pages {
            0 if compressed.is_empty() => Vec::new(),
            _ => self.decompressor.decompress(compressed, data_pages * PAGE_BYTES)?,
        };
        if data.len() != data_pages * PAGE_BYTES {
            return Err(wrong(format!("{} bytes of {data_pages} pages", data.len())));
        }
        let mut data = data.as_chunks().0.iter();
        for word in words {
            match word & ZERO {
                0 => show(word, data.next())?,
                _ => show(word & !ZERO, None)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(content: &[u8], pages: u64) -> io::Result<Vec<(u32, Option<u8>)>> {
        let mut seen = Vec::new();
        let mut decoder = Decoder::new(pages)?;
        decoder.decode(content, |page, content| {
            seen.push((page, content.map(|content| content[7])));
            Ok(())
        })?;
        Ok(seen)
    }

    /// Spec: D6
    #[test]
    fn pages_arrive_as_they_were_and_are_counted_by_kind() {
        let (mut encoder, mut sent) = (Encoder::new().unwrap(), Vec::new());
        let mut wanted = Vec::new();
        for page in 0..600 {
            let byte = u8::try_from(page % 3).unwrap();
            encoder.page(&mut sent, page, &[byte; PAGE_BYTES]).unwrap();
            wanted.push((page, (byte != 0).then_some(byte)));
        }
        encoder.flush(&mut sent).unwrap();
        let counts = encoder.take_counts();
        assert_eq!((counts.zero_pages, counts.data_pages, counts.bytes), (200, 400, sent.len() as u64));
        let (mut from, mut seen) = (sent.as_slice(), Vec::new());
        while !from.is_empty() {
            let (kind, content) = read(&mut from).unwrap();
            assert_eq!(kind, Kind::Pages);
            seen.extend(shown(&content, 600).unwrap());
        }
        assert_eq!(seen, wanted);
        let (_, first) = read(&mut sent.as_slice()).unwrap();
        assert!(shown(&first, 255).unwrap_err().to_string().contains("page 255 of a memory of 255"));
    }

    /// Spec: D6
    #[test]
    fn a_length_that_lies_is_an_error_and_takes_no_memory() {
        let mut long = vec![2];
        long.extend(u32::MAX.to_le_bytes());
        assert!(read(&mut long.as_slice()).unwrap_err().to_string().contains("too long"));
        let mut short = vec![3];
        short.extend((BLOB_BYTES_MAX as u32).to_le_bytes());
        short.extend([0; 100]);
        assert_eq!(read(&mut short.as_slice()).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        // More than it says.
        let mut bomb = 1_u32.to_le_bytes().to_vec();
        bomb.extend(0_u32.to_le_bytes());
        bomb.extend(zstd::bulk::compress(&vec![1; 1 << 20], 1).unwrap());
        shown(&bomb, 1).unwrap_err();
    }

    proptest! {
        /// Spec: D6
        #[test]
        fn any_bytes_are_frames_and_pages_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&mut bytes.as_slice());
            for (page, _) in shown(&bytes, 16).unwrap_or_default() {
                prop_assert!(page < 16);
            }
        }
    }
}
