//! The pages of an ended epoch, as another process reads them.
//!
//! ```text
//!  memory server                                     who asks
//!    how many u32, their numbers u32, rising ──────>
//!              <─────────────────────────────────    the place of the first in that list u32, how many u32
//!    0 u8, their content, 4096 bytes each ─────────>   or 1 u8, bytes u32, why they cannot be read
//! ```
//!
//! All little-endian. It ends when the other side closes the connection, or with what cannot be read.

use std::collections::VecDeque;
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{Piece, Source};
use onecopy_checkpoint::take::Cause;

/// Pages that are read at once.
const BATCH_PAGES: usize = 64;

/// Batches that are kept: each of the encoder's threads reads in a place of its own, and some are read again.
const BATCHES_MAX: usize = 8;

/// The longest reason.
const REASON_BYTES_MAX: usize = 1 << 10;

/// Before content, and before a reason.
const CONTENT: u8 = 0;
const REASON: u8 = 1;

/// Who takes nothing for so long is gone, or hangs.
const TAKE_TIMEOUT: Duration = Duration::from_secs(600);

/// Who asks for nothing for so long is gone, or hangs: a slow link takes a batch in minutes.
const ASK_TIMEOUT: Duration = Duration::from_secs(3600);

/// Tells these pages, and what they hold, until the other side has enough.
///
/// # Errors
/// It asks for what there is not, or takes nothing; a page cannot be read.
pub(super) fn serve(
    stream: &UnixStream,
    pages: &[u32],
    mut read: impl FnMut(u32, &mut Piece) -> Result<(), Cause>,
) -> Result<(), Cause> {
    stream.set_write_timeout(Some(TAKE_TIMEOUT))?;
    stream.set_read_timeout(Some(ASK_TIMEOUT))?;
    let (mut from, mut to) = (stream, stream);
    let mut numbers = BufWriter::new(stream);
    numbers.write_all(&u32::try_from(pages.len())?.to_le_bytes())?;
    for page in pages {
        numbers.write_all(&page.to_le_bytes())?;
    }
    numbers.flush()?;
    let (mut asked, mut content, mut answer) = ([0; 8], [0; PAGE_BYTES], Vec::new());
    loop {
        match from.read_exact(&mut asked) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let (first, count) = (word(&asked, 0) as usize, word(&asked, 4) as usize);
        let wanted = first.checked_add(count).filter(|_| count <= BATCH_PAGES).and_then(|end| pages.get(first..end));
        answer.clear();
        answer.push(CONTENT);
        for page in wanted.ok_or("pages are asked for that the epoch has not")? {
            if let Err(error) = read(*page, &mut content) {
                let reason = error.to_string();
                let reason = &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES_MAX)];
                to.write_all(&[REASON])?;
                to.write_all(&u32::try_from(reason.len())?.to_le_bytes())?;
                to.write_all(reason)?;
                return Err(error);
            }
            answer.extend(content);
        }
        to.write_all(&answer)?;
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// What a memory server tells: what an epoch has that travels.
pub(crate) struct EpochPages {
    numbers: Vec<u64>,
    reader: Mutex<Reader>,
}

struct Reader {
    stream: UnixStream,
    /// The newest first, each by its place among all of them.
    batches: VecDeque<(usize, Vec<u8>)>,
}

impl EpochPages {
    /// Reads which there are, of a memory of so many; the server may take so long for anything.
    ///
    /// # Errors
    /// The connection broke, or the server tells of other pages than a memory can have.
    pub(crate) fn open(mut stream: UnixStream, pages: u64, timeout: Duration) -> io::Result<EpochPages> {
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let mut count = [0; 4];
        stream.read_exact(&mut count)?;
        let count = word(&count, 0);
        let wrong = || io::Error::new(ErrorKind::InvalidData, "the memory server tells of pages that there are not");
        if u64::from(count) > pages {
            return Err(wrong());
        }
        let mut bytes = vec![0; count as usize * 4];
        stream.read_exact(&mut bytes)?;
        let numbers: Vec<u64> = bytes.chunks_exact(4).map(|bytes| word(bytes, 0).into()).collect();
        if !numbers.is_sorted_by(|one, next| one < next) || numbers.last().is_some_and(|last| *last >= pages) {
            return Err(wrong());
        }
        Ok(EpochPages { numbers, reader: Mutex::new(Reader { stream, batches: VecDeque::new() }) })
    }

    /// Which there are, rising.
    pub(crate) fn numbers(&self) -> &[u64] {
        &self.numbers
    }
}

impl Reader {
    /// The content of one batch.
    fn batch(&mut self, batch: usize, pages: usize) -> io::Result<&[u8]> {
        match self.batches.iter().position(|(known, _)| *known == batch) {
            Some(place) => self.batches.swap(0, place),
            None => {
                let first = batch * BATCH_PAGES;
                let count = BATCH_PAGES.min(pages - first);
                let words = [first, count].map(|number| u32::try_from(number).expect("there are as many pages"));
                self.stream.write_all(words.map(u32::to_le_bytes).as_flattened())?;
                let mut kind = [0];
                self.stream.read_exact(&mut kind)?;
                if kind != [CONTENT] {
                    return Err(io::Error::other(self.reason()?));
                }
                let mut content = vec![0; count * PAGE_BYTES];
                self.stream.read_exact(&mut content)?;
                self.batches.truncate(BATCHES_MAX - 1);
                self.batches.push_front((batch, content));
            }
        }
        Ok(&self.batches[0].1)
    }

    /// Why the server cannot read pages.
    fn reason(&mut self) -> io::Result<String> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length)?;
        let mut reason = vec![0; REASON_BYTES_MAX.min(word(&length, 0) as usize)];
        self.stream.read_exact(&mut reason)?;
        Ok(String::from_utf8_lossy(&reason).into_owned())
    }
}

impl Source for EpochPages {
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
        let place = self.numbers.binary_search(&number).map_err(|_| format!("page {number} is not of the epoch"))?;
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let batch = reader.batch(place / BATCH_PAGES, self.numbers.len());
        let batch = batch.map_err(|error| format!("the memory server does not send page {number}: {error}"))?;
        into.copy_from_slice(&batch[place % BATCH_PAGES * PAGE_BYTES..][..PAGE_BYTES]);
        Ok(())
    }

    /// No epoch is kept beside the one that travels.
    fn read_acknowledged(&self, _: u64, _: &mut Piece) -> Result<bool, Cause> {
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Reads each wanted page of those that a server has, whose content is their number.
    fn read(pages: &[u32], wanted: &[u64]) -> Vec<Result<u8, String>> {
        let (near, far) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let content = |page: u32, into: &mut Piece| match page {
                13 => Err("it is lost".into()),
                page => {
                    into.fill(u8::try_from(page % 251).unwrap());
                    Ok(())
                }
            };
            let served = scope.spawn(move || serve(&far, pages, content).map_err(|error| error.to_string()));
            let there = EpochPages::open(near, 100_000, TIMEOUT).unwrap();
            assert_eq!(there.numbers(), pages.iter().map(|page| u64::from(*page)).collect::<Vec<_>>());
            let one = |number: &u64| {
                let mut piece = [0; PAGE_BYTES];
                there.read(*number, &mut piece).map(|()| piece[4095]).map_err(|error| error.to_string())
            };
            let found: Vec<_> = wanted.iter().map(one).collect();
            drop(there);
            let is_lost = found.iter().any(Result::is_err) && pages.contains(&13);
            assert_eq!(served.join().unwrap().is_err(), is_lost);
            found
        })
    }

    /// Spec: D6
    #[test]
    fn pages_of_an_epoch_are_read_in_any_order_and_none_beside_them() {
        let pages: Vec<u32> = (0..5000).filter(|page| page % 3 == 0).collect();
        let places = (0..200).map(|step| u64::from(pages[step * 769 % pages.len()]));
        let wanted: Vec<u64> = places.chain([4998, 0]).collect();
        let right: Vec<_> = wanted.iter().map(|page| Ok(u8::try_from(page % 251).unwrap())).collect();
        assert_eq!(read(&pages, &wanted), right);
        assert!(read(&pages, &[1])[0].as_ref().unwrap_err().contains("page 1 is not of the epoch"));
        assert_eq!(read(&[], &[]), []);
    }

    /// Spec: D6
    #[test]
    fn a_page_that_is_lost_is_an_error_and_no_other_page() {
        let error = read(&[7, 13], &[7]).remove(0).unwrap_err();
        assert!(error.contains("does not send page 7") && error.contains("it is lost"), "{error}");
    }

    /// Spec: D6
    #[test]
    fn what_no_memory_can_have_is_refused_and_takes_none() {
        for words in [&[u32::MAX][..], &[2, 5, 5], &[2, 6, 5], &[1, 8]] {
            let (near, mut far) = UnixStream::pair().unwrap();
            far.write_all(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()).unwrap();
            drop(far);
            assert!(EpochPages::open(near, 8, TIMEOUT).is_err(), "{words:?}");
        }
        let (near, far) = UnixStream::pair().unwrap();
        let served = thread::spawn(move || serve(&far, &[1, 2], |_, _| Ok(())).map_err(|error| error.to_string()));
        (&near).write_all(&[1_u32, 2].map(u32::to_le_bytes).concat()).unwrap();
        let error = served.join().unwrap().unwrap_err();
        assert!(error.contains("that the epoch has not"), "{error}");
    }
}
