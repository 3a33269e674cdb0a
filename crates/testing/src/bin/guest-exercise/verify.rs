//! The device after a power cut, against what was flushed before.

use super::Report;
use super::buffer::Buffer;
use super::device::Device;
use super::options::Options;
use super::record::{Fact, Told, read};
use super::sector::{Found, SECTOR_BYTES, Stamp, examine};
use std::io;

/// How much is read at once.
const PIECE_BYTES: usize = 256 * 1024;

/// What a sector may hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Allowed {
    /// Nothing was flushed: anything.
    any: bool,
    /// Zeros were flushed, or may have come since.
    zeros: bool,
    /// This generation was flushed: an older one is not allowed.
    generation: u64,
}

const ANYTHING: Allowed = Allowed { any: true, zeros: true, generation: 0 };

impl Allowed {
    fn learn(&mut self, fact: &Fact) {
        match *fact {
            Fact::Written { generation, .. } => *self = Allowed { any: false, zeros: false, generation },
            // What was written before the zeros is gone; what is written later has a higher generation.
            Fact::Zeros { .. } => *self = Allowed { any: false, zeros: true, generation: self.generation + 1 },
            Fact::Discarding { .. } => self.zeros = true,
        }
    }

    fn allows(&self, found: Found, seed: u64, sector: u64) -> bool {
        self.any
            || match found {
                Found::Zeros => self.zeros,
                Found::Whole(stamp) => stamp == Stamp { seed, sector, ..stamp } && stamp.generation >= self.generation,
                Found::Damaged(_) | Found::Foreign => false,
            }
    }
}

/// Compares the device with the log of the run before.
pub(crate) fn verify(options: &Options) -> io::Result<Report> {
    let path = options.log.clone().unwrap_or_default();
    let told = read(&std::fs::read_to_string(&path)?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{} is no log of a run", path.display())))?;
    let device = Device::open(&options.device)?;
    let allowed = allowed(&told);
    let mut report = Report::default();
    let mut buffer = Buffer::new(PIECE_BYTES);
    let piece_sectors = PIECE_BYTES / SECTOR_BYTES;
    for (index, piece) in allowed.chunks(piece_sectors).enumerate() {
        let first = (index * piece_sectors) as u64;
        let bytes = buffer.first(piece.len() * SECTOR_BYTES);
        report.reads += 1;
        if let Err(error) = device.read(first * SECTOR_BYTES as u64, bytes) {
            report.error(format!("read of {} sectors from {first}: {error}", piece.len()));
            continue;
        }
        for ((sector, allowed), bytes) in (first..).zip(piece).zip(bytes.chunks_exact(SECTOR_BYTES)) {
            report.compared += u64::from(!allowed.any);
            let found = examine(bytes);
            if !allowed.allows(found, told.seed, sector) {
                report.error(format!("sector {sector}: {allowed:?}, {found:?} found"));
            }
        }
    }
    Ok(report)
}

fn allowed(told: &Told) -> Vec<Allowed> {
    let mut allowed = vec![ANYTHING; usize::try_from(told.span_bytes).unwrap_or(0) / SECTOR_BYTES];
    for fact in &told.facts {
        let (Fact::Written { sector, count, .. } | Fact::Zeros { sector, count } | Fact::Discarding { sector, count }) =
            *fact;
        let begin = usize::try_from(sector).unwrap_or(usize::MAX).min(allowed.len());
        let end = begin.saturating_add(usize::try_from(count).unwrap_or(usize::MAX)).min(allowed.len());
        allowed[begin..end].iter_mut().for_each(|allowed| allowed.learn(fact));
    }
    allowed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_flushed_may_be_newer_but_not_older() {
        let written = |generation| Fact::Written { sector: 1, count: 1, generation };
        let cleared = [Fact::Discarding { sector: 1, count: 1 }, Fact::Zeros { sector: 1, count: 1 }];
        let whole = |generation| Found::Whole(Stamp { seed: 1, sector: 1, generation });
        let told = |facts: &[Fact]| allowed(&Told { seed: 1, span_bytes: 1024, facts: facts.to_vec() })[1];
        assert!(told(&[]).allows(Found::Foreign, 1, 1));
        let flushed = told(&[written(5)]);
        assert!(flushed.allows(whole(5), 1, 1) && flushed.allows(whole(6), 1, 1));
        assert!(!flushed.allows(whole(4), 1, 1) && !flushed.allows(Found::Zeros, 1, 1));
        assert!(!flushed.allows(whole(5), 2, 1) && !flushed.allows(whole(5), 1, 2));
        let discarding = told(&[written(5), cleared[0]]);
        assert!(discarding.allows(Found::Zeros, 1, 1) && discarding.allows(whole(5), 1, 1));
        let zeros = told(&[written(5), cleared[0], cleared[1]]);
        assert!(zeros.allows(Found::Zeros, 1, 1) && zeros.allows(whole(6), 1, 1) && !zeros.allows(whole(5), 1, 1));
    }
}
