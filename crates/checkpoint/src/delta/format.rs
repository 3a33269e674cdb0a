//! The bytes of an epoch: parts, each with its kind and length. All are read as from somebody who may lie.

use std::io::{self, Read, Write};

use super::{DeltaError, HeldEpoch, Sizes, Space, VERSIONS_MAX, Version};
use crate::PAGE_BYTES;
use crate::restore::DEVICES_BYTES_MAX;

/// The version of these bytes.
const FORMAT: u32 = 1;
/// Pieces of a part at most.
pub(super) const PART_PIECES_MAX: usize = 512;
/// Pieces that are compressed together.
pub(super) const GROUP_PIECES: usize = 32;
/// Pieces that are not zeros and have a digest together.
pub(super) const DIGEST_PIECES: usize = 32;
/// Bytes of a digest.
pub(super) const DIGEST_BYTES: usize = 32;
/// A part of pieces is not longer: their content as it is, and 64 bytes of runs, lengths and digests for each.
const PIECES_BYTES_MAX: usize = PART_PIECES_MAX * (PAGE_BYTES + 64);
/// A part of devices is not longer: what cannot be made smaller grows by a 256th and some bytes.
const DEVICES_PART_BYTES_MAX: usize = DEVICES_BYTES_MAX + DEVICES_BYTES_MAX / 128 + 1024;
/// Other parts are not longer: sixteen names of 255 bytes.
const SMALL_PART_BYTES_MAX: usize = 8 << 10;
/// What is read of a part before its sender has sent it all: so that a length alone takes no memory.
const READ_AHEAD_BYTES: usize = 256 << 10;

/// What a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An epoch begins.
    Begin = 1,
    /// Some pieces.
    Pieces = 2,
    /// The state of the devices.
    Devices = 3,
    /// All has been sent.
    End = 4,
    /// What differs of an epoch is sent again.
    Repair = 5,
}

impl Kind {
    fn of(byte: u8) -> Option<Kind> {
        Some(match byte {
            1 => Kind::Begin,
            2 => Kind::Pieces,
            3 => Kind::Devices,
            4 => Kind::End,
            5 => Kind::Repair,
            _ => return None,
        })
    }

    fn bytes_max(self) -> usize {
        match self {
            Kind::Pieces => PIECES_BYTES_MAX,
            Kind::Devices => DEVICES_PART_BYTES_MAX,
            Kind::Begin | Kind::End | Kind::Repair => SMALL_PART_BYTES_MAX,
        }
    }
}

pub(super) fn write_part(to: &mut impl Write, kind: Kind, body: &[u8]) -> io::Result<()> {
    debug_assert!(body.len() <= kind.bytes_max(), "{kind:?} of {} bytes", body.len());
    let mut head = [kind as u8, 0, 0, 0, 0];
    head[1..].copy_from_slice(&u32::try_from(body.len()).expect("parts are short").to_le_bytes());
    to.write_all(&head)?;
    to.write_all(body)
}

pub(super) fn read_part(from: &mut impl Read) -> Result<(Kind, Vec<u8>), DeltaError> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let kind = Kind::of(head[0]).ok_or_else(|| DeltaError::malformed(format!("a part of kind {}", head[0])))?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if length > kind.bytes_max() {
        return Err(DeltaError::malformed(format!("a part {kind:?} of {length} bytes")));
    }
    let mut body = Vec::with_capacity(length.min(READ_AHEAD_BYTES));
    from.take(length as u64).read_to_end(&mut body)?;
    if body.len() < length {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok((kind, body))
}

/// How an epoch begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    pub(super) epoch: u64,
    pub(super) since: HeldEpoch,
    pub(super) sizes: Sizes,
    pub(super) versions: Vec<Version>,
}

impl Begin {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = FORMAT.to_le_bytes().to_vec();
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.since.to_bytes());
        bytes.extend(self.sizes.memory_bytes.to_le_bytes());
        bytes.extend(self.sizes.disk_bytes.to_le_bytes());
        bytes.push(u8::from(self.sizes.disk_travels));
        bytes.push(u8::try_from(self.versions.len()).expect("they were counted"));
        for version in &self.versions {
            match version {
                Version::Snapshot(name) => {
                    bytes.extend([1, u8::try_from(name.len()).expect("it was measured")]);
                    bytes.extend(name.as_bytes());
                }
                Version::Epoch(number) => {
                    bytes.extend([2, 8]);
                    bytes.extend(number.to_le_bytes());
                }
            }
        }
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Begin, DeltaError> {
        let mut reader = Reader(bytes);
        let format = u32::from_le_bytes(reader.array()?);
        if format != FORMAT {
            return Err(DeltaError::malformed(format!("its format is {format}, and this version knows {FORMAT}")));
        }
        let epoch = u64::from_le_bytes(reader.array()?);
        let since = HeldEpoch::from_bytes(&reader.array()?);
        let (memory_bytes, disk_bytes) = (u64::from_le_bytes(reader.array()?), u64::from_le_bytes(reader.array()?));
        let [disk_travels, count] = reader.array()?;
        if disk_travels > 1 || usize::from(count) > VERSIONS_MAX {
            return Err(DeltaError::malformed(format!("a begin with {count} versions")));
        }
        let sizes = Sizes { memory_bytes, disk_bytes, disk_travels: disk_travels == 1 };
        let mut versions = Vec::with_capacity(count.into());
        for _ in 0..count {
            let [kind, length] = reader.array()?;
            let name = reader.bytes(length.into())?;
            versions.push(match kind {
                1 => Version::Snapshot(
                    String::from_utf8(name.to_vec()).map_err(|_| DeltaError::malformed("a snapshot without a name"))?,
                ),
                2 => Version::Epoch(u64::from_le_bytes(
                    name.try_into().map_err(|_| DeltaError::malformed("an epoch without a number"))?,
                )),
                _ => return Err(DeltaError::malformed(format!("a version of kind {kind}"))),
            });
        }
        reader.end()?;
        Ok(Begin { epoch, since, sizes, versions })
    }
}

/// How an epoch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// Pieces of both spaces that were sent.
    pub(super) pieces: u64,
    /// The digest of [`HeldEpoch`] once it counts.
    pub(super) digest: [u8; DIGEST_BYTES],
}

impl End {
    pub(super) fn to_bytes(self) -> [u8; 8 + DIGEST_BYTES] {
        let mut bytes = [0; 8 + DIGEST_BYTES];
        bytes[..8].copy_from_slice(&self.pieces.to_le_bytes());
        bytes[8..].copy_from_slice(&self.digest);
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<End, DeltaError> {
        let mut reader = Reader(bytes);
        let end = End { pieces: u64::from_le_bytes(reader.array()?), digest: reader.array()? };
        reader.end()?;
        Ok(end)
    }
}

/// What a run's pieces are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Zero,
    /// From this block on.
    Block {
        version: u8,
        first: u64,
    },
    /// From this page on.
    Held {
        first: u64,
    },
    Xor,
    Zstd,
    Literal,
}

/// Pieces that follow each other and travel alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) form: Form,
}

impl Run {
    pub(super) fn end(&self) -> u64 {
        self.first + self.count
    }

    /// Takes a piece in, if it follows.
    pub(super) fn extend(&mut self, number: u64, form: Form) -> bool {
        let follows = self.end() == number
            && match (self.form, form) {
                (Form::Block { version, first }, Form::Block { version: other, first: next }) => {
                    version == other && first + self.count == next
                }
                (Form::Held { first }, Form::Held { first: next }) => first + self.count == next,
                (own, other) => own == other,
            };
        self.count += u64::from(follows);
        follows
    }
}

/// Runs as bytes: numbers are told by their distance from where the run before ended.
pub(super) fn runs_to_bytes(runs: &[Run], bytes: &mut Vec<u8>) {
    let (mut end, mut block_end, mut page_end) = (0, 0, 0);
    for run in runs {
        bytes.push(match run.form {
            Form::Zero => 1,
            Form::Block { .. } => 2,
            Form::Held { .. } => 3,
            Form::Xor => 4,
            Form::Zstd => 5,
            Form::Literal => 6,
        });
        push_number(bytes, run.first - end);
        push_number(bytes, run.count);
        match run.form {
            Form::Block { version, first } => {
                bytes.push(version);
                push_number(bytes, zigzag(first, block_end));
                block_end = first + run.count;
            }
            Form::Held { first } => {
                push_number(bytes, zigzag(first, page_end));
                page_end = first + run.count;
            }
            _ => {}
        }
        end = run.end();
    }
}

/// Reads so many runs: each within its space, rising from `end` on, and what they refer to within the machine.
pub(super) fn parse_runs(
    bytes: &[u8],
    count: usize,
    space: Space,
    end: u64,
    begin: &Begin,
) -> Result<Vec<Run>, DeltaError> {
    let (mut reader, mut runs) = (Reader(bytes), Vec::with_capacity(count.min(PART_PIECES_MAX)));
    let (pieces, pages, blocks) =
        (begin.sizes.pieces(space), begin.sizes.pieces(Space::Memory), begin.sizes.pieces(Space::Disk));
    let (mut run_end, mut block_end, mut page_end, mut total) = (0, 0, 0, 0);
    for _ in 0..count {
        let [kind] = reader.array()?;
        let first = add(run_end, reader.number()?)?;
        let length = reader.number()?;
        run_end = add(first, length)?;
        total = add(total, length)?;
        if length == 0 || first < end || run_end > pieces || total > PART_PIECES_MAX as u64 {
            return Err(DeltaError::malformed(format!(
                "a run of {length} at {first} of the {pieces} of {space:?}, behind {end}"
            )));
        }
        let form = match kind {
            1 => Form::Zero,
            2 => {
                let [version] = reader.array()?;
                let first = unzigzag(reader.number()?, block_end)?;
                block_end = add(first, length)?;
                if block_end > blocks || usize::from(version) >= begin.versions.len() {
                    return Err(DeltaError::malformed(format!("{length} blocks at {first} of version {version}")));
                }
                Form::Block { version, first }
            }
            3 => {
                let first = unzigzag(reader.number()?, page_end)?;
                page_end = add(first, length)?;
                if page_end > pages {
                    return Err(DeltaError::malformed(format!("{length} held pages at {first} of {pages}")));
                }
                Form::Held { first }
            }
            4 => Form::Xor,
            5 => Form::Zstd,
            6 => Form::Literal,
            _ => return Err(DeltaError::malformed(format!("a run of kind {kind}"))),
        };
        runs.push(Run { first, count: length, form });
    }
    reader.end()?;
    Ok(runs)
}

fn add(one: u64, other: u64) -> Result<u64, DeltaError> {
    one.checked_add(other).ok_or_else(|| DeltaError::malformed("a number that leaves 64 bits"))
}

/// The distance of a number from another one, small in both directions.
fn zigzag(number: u64, from: u64) -> u64 {
    let distance = number.wrapping_sub(from) as i64;
    ((distance << 1) ^ (distance >> 63)) as u64
}

fn unzigzag(bits: u64, from: u64) -> Result<u64, DeltaError> {
    let distance = (bits >> 1) as i64 ^ -((bits & 1) as i64);
    from.checked_add_signed(distance).ok_or_else(|| DeltaError::malformed("a reference before the first"))
}

/// Seven bits a byte, the lowest first; the eighth says that more follow.
fn push_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Reads from the beginning of bytes.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], DeltaError> {
        let (found, rest) =
            self.0.split_at_checked(count).ok_or_else(|| DeltaError::malformed("a part that ends too soon"))?;
        self.0 = rest;
        Ok(found)
    }

    pub(super) fn array<const COUNT: usize>(&mut self) -> Result<[u8; COUNT], DeltaError> {
        Ok(self.bytes(COUNT)?.try_into().expect("as many were read"))
    }

    pub(super) fn number(&mut self) -> Result<u64, DeltaError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(DeltaError::malformed("a number that leaves 64 bits"))
    }

    pub(super) fn end(&self) -> Result<(), DeltaError> {
        match self.0 {
            [] => Ok(()),
            rest => Err(DeltaError::malformed(format!("{} bytes behind a part's end", rest.len()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn begin() -> Begin {
        let sizes = Sizes { memory_bytes: 4096 << 12, disk_bytes: 4096 << 14, disk_travels: true };
        let versions = vec![Version::Snapshot("daily".to_owned()), Version::Epoch(7)];
        Begin { epoch: 8, since: HeldEpoch { epoch: 7, digest: [3; 32] }, sizes, versions }
    }

    #[test]
    fn a_begin_is_read_as_it_was_written_and_no_other_length_is() {
        let bytes = begin().to_bytes();
        assert_eq!(Begin::parse(&bytes).unwrap(), begin());
        for length in 0..bytes.len() {
            Begin::parse(&bytes[..length]).unwrap_err();
        }
        Begin::parse(&[&bytes[..], &[0]].concat()).unwrap_err();
    }

    #[test]
    fn numbers_of_any_size_are_read_and_longer_ones_are_refused() {
        for number in [0, 1, 127, 128, 1 << 35, u64::MAX] {
            let mut bytes = Vec::new();
            push_number(&mut bytes, number);
            assert_eq!(Reader(&bytes).number().unwrap(), number);
        }
        Reader(&[0xff; 10]).number().unwrap_err();
        Reader(&[0x80, 0x80]).number().unwrap_err();
    }

    proptest! {
        #[test]
        fn runs_are_read_as_they_were_written(
            shapes in prop::collection::vec((0_u64..9, 1_u64..9, 0_u8..6, 0_u64..4000), 0..50)
        ) {
            let (mut end, mut runs) = (0, Vec::new());
            for (gap, count, kind, at) in shapes {
                let form = match kind {
                    0 => Form::Zero,
                    1 => Form::Block { version: (at % 2) as u8, first: at },
                    2 => Form::Held { first: at },
                    3 => Form::Xor,
                    4 => Form::Zstd,
                    _ => Form::Literal,
                };
                runs.push(Run { first: end + gap, count, form });
                end += gap + count;
            }
            let mut bytes = Vec::new();
            runs_to_bytes(&runs, &mut bytes);
            prop_assert_eq!(parse_runs(&bytes, runs.len(), Space::Memory, 0, &begin()).unwrap(), runs);
        }

        #[test]
        fn runs_of_any_bytes_stay_within_the_machine(
            bytes in prop::collection::vec(any::<u8>(), 0..200), count in 0_usize..40
        ) {
            if let Ok(runs) = parse_runs(&bytes, count, Space::Disk, 5, &begin()) {
                let mut end = 5;
                for run in runs {
                    prop_assert!(run.first >= end && run.count > 0 && run.end() <= 1 << 14);
                    end = run.end();
                }
            }
        }
    }
}
