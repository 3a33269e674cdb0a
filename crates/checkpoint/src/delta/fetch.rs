//! A part of pieces that has come: parsed, then filled with what does not depend on the parts before it.

use super::format::{Begin, DIGEST_BYTES, DIGEST_PIECES, Form, GROUP_PIECES, Reader, Run, parse_runs};
use super::part::RUNS_AT;
use super::{Blocks, DeltaError, Space};
use crate::PAGE_BYTES;

/// A part whose bytes are as they should be; what they hold is not looked at yet.
pub(super) struct Parsed {
    pub(super) space: Space,
    pub(super) runs: Vec<Run>,
    body: Vec<u8>,
    /// Where the groups begin.
    groups_at: usize,
    literals_at: usize,
    digests_at: usize,
}

/// Pieces of each form.
#[derive(Clone, Copy, Default)]
struct Total {
    all: usize,
    xor: usize,
    zstd: usize,
    literal: usize,
    zero: usize,
}

impl Total {
    fn of(runs: &[Run]) -> Total {
        let mut total = Total::default();
        for run in runs {
            let count = usize::try_from(run.count).expect("runs were counted");
            total.all += count;
            match run.form {
                Form::Xor => total.xor += count,
                Form::Zstd => total.zstd += count,
                Form::Literal => total.literal += count,
                Form::Zero => total.zero += count,
                Form::Block { .. } | Form::Held { .. } => {}
            }
        }
        total
    }
}

impl Parsed {
    /// `ends` are where the last runs of memory and disk ended.
    pub(super) fn parse(body: Vec<u8>, begin: &Begin, ends: [u64; 2]) -> Result<Parsed, DeltaError> {
        let mut reader = Reader(&body);
        let [space] = reader.array()?;
        let (space, end) = match space {
            1 => (Space::Memory, ends[0]),
            2 if begin.sizes.disk_travels => (Space::Disk, ends[1]),
            _ => return Err(DeltaError::malformed(format!("pieces of space {space}"))),
        };
        let count = u16::from_le_bytes(reader.array()?).into();
        let length = u32::from_le_bytes(reader.array()?);
        let runs_bytes = reader.bytes(usize::try_from(length).map_err(|_| DeltaError::malformed("too many runs"))?)?;
        let runs = parse_runs(runs_bytes, count, space, end, begin)?;
        if runs.is_empty() {
            return Err(DeltaError::malformed("a part without pieces"));
        }
        let total = Total::of(&runs);
        let groups_at = body.len() - reader.0.len();
        for _ in 0..total.xor.div_ceil(GROUP_PIECES) + total.zstd.div_ceil(GROUP_PIECES) {
            group(&mut reader)?;
        }
        let literals_at = body.len() - reader.0.len();
        reader.bytes(total.literal * PAGE_BYTES)?;
        let digests_at = body.len() - reader.0.len();
        reader.bytes((total.all - total.zero).div_ceil(DIGEST_PIECES) * DIGEST_BYTES)?;
        reader.end()?;
        debug_assert!(groups_at == RUNS_AT + runs_bytes.len());
        Ok(Parsed { space, runs, groups_at, literals_at, digests_at, body })
    }

    /// What belongs into the epoch's digest.
    pub(super) fn told(&self) -> [&[u8]; 2] {
        [&self.body[..self.groups_at], &self.body[self.digests_at..]]
    }

    pub(super) fn pieces(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    pub(super) fn end(&self) -> u64 {
        self.runs.last().map_or(0, Run::end)
    }

    /// Reads blocks and uncompresses.
    pub(super) fn fetch(&self, begin: &Begin, blocks: &dyn Blocks) -> Result<Fetched, DeltaError> {
        let total = Total::of(&self.runs);
        let mut content = vec![0; (total.all - total.zero) * PAGE_BYTES];
        let (mut differences, mut contents) = (Vec::new(), Vec::new());
        let (mut literals, mut named) = (Reader(&self.body[self.literals_at..self.digests_at]), Vec::new());
        let mut at = 0;
        for run in &self.runs {
            let count = usize::try_from(run.count).expect("runs were counted");
            let places = at..at + count;
            match run.form {
                Form::Zero => continue,
                Form::Block { version, first } => {
                    named.extend(places.clone().zip(first..).map(|(place, block)| (version, block, place)));
                }
                Form::Xor => differences.extend(places.clone()),
                Form::Zstd => contents.extend(places.clone()),
                Form::Literal => {
                    let bytes = literals.bytes(count * PAGE_BYTES)?;
                    content[at * PAGE_BYTES..][..bytes.len()].copy_from_slice(bytes);
                }
                Form::Held { .. } => {}
            }
            at = places.end;
        }
        let mut groups = Reader(&self.body[self.groups_at..self.literals_at]);
        uncompress(&mut groups, &differences, &mut content)?;
        uncompress(&mut groups, &contents, &mut content)?;
        read_blocks(named, begin, blocks, &mut content)?;
        let digests = self.body[self.digests_at..].as_chunks().0.to_vec();
        Ok(Fetched { space: self.space, runs: self.runs.clone(), content, digests })
    }
}

/// A part whose content is there, but for what is held here.
pub(super) struct Fetched {
    pub(super) space: Space,
    pub(super) runs: Vec<Run>,
    /// Of all pieces that are not zeros, in the order of the runs.
    pub(super) content: Vec<u8>,
    pub(super) digests: Vec<[u8; DIGEST_BYTES]>,
}

fn group<'a>(reader: &mut Reader<'a>) -> Result<&'a [u8], DeltaError> {
    let length = u32::from_le_bytes(reader.array()?);
    reader.bytes(usize::try_from(length).map_err(|_| DeltaError::malformed("a group that is too long"))?)
}

/// Uncompresses groups into the places of their pieces.
fn uncompress(groups: &mut Reader<'_>, places: &[usize], content: &mut [u8]) -> Result<(), DeltaError> {
    let mut bytes = vec![0; GROUP_PIECES.min(places.len()) * PAGE_BYTES];
    for places in places.chunks(GROUP_PIECES) {
        let bytes = &mut bytes[..places.len() * PAGE_BYTES];
        let wrong = |what: String| DeltaError::malformed(format!("a group of {} pieces: {what}", places.len()));
        let uncompressed = zstd::bulk::decompress_to_buffer(group(groups)?, bytes);
        match uncompressed {
            Ok(length) if length == bytes.len() => {}
            Ok(length) => return Err(wrong(format!("{length} bytes"))),
            Err(error) => return Err(wrong(error.to_string())),
        }
        for (place, piece) in places.iter().zip(bytes.chunks(PAGE_BYTES)) {
            content[place * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(piece);
        }
    }
    Ok(())
}

/// Reads blocks, each once, in their order, and puts each into the places of the pieces that name it.
fn read_blocks(
    mut named: Vec<(u8, u64, usize)>,
    begin: &Begin,
    blocks: &dyn Blocks,
    content: &mut [u8],
) -> Result<(), DeltaError> {
    named.sort_unstable();
    for of_version in named.chunk_by(|one, other| one.0 == other.0) {
        let mut numbers: Vec<u64> = of_version.iter().map(|(_, block, _)| *block).collect();
        numbers.dedup();
        let mut bytes = vec![0; numbers.len() * PAGE_BYTES];
        let version = &begin.versions[usize::from(of_version[0].0)];
        blocks.read_many(version, &numbers, &mut bytes).map_err(DeltaError::machine("read blocks"))?;
        let pieces = numbers.iter().zip(bytes.chunks(PAGE_BYTES));
        let mut named = of_version.iter().peekable();
        for (number, bytes) in pieces {
            while let Some((_, _, place)) = named.next_if(|(_, block, _)| block == number) {
                content[place * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(bytes);
            }
        }
    }
    Ok(())
}
