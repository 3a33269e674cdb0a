//! The files `journal.N`: what changed in the map since checkpoint `N`.
//!
//! ```text
//! file:   head (512 bytes), then records, each at a multiple of 512 bytes
//! head:   "ONECOPYJ" version u32, 0 u32, number u64, first sequence u64, checksum u64
//! record: "OCJR", body length u32, sequence u64, epoch u32, 0 u32, checksum u64, body
//! body:   notes: kind u8 and what it says
//! ```
//! Checksums are XXH3-64 with the disk's identity as seed, over all of the head or record but themselves. A record is
//! written only after the one before it is durable: so only the last can be torn, and a damaged one that a later one
//! follows is not a torn one.

use xxhash_rust::xxh3::Xxh3;

use super::{Reader, SnapshotRecord, VERSION, Writer};
use crate::map::State;

/// Records and the head begin at multiples of this.
pub(crate) const ALIGNMENT_BYTES: u64 = 512;
/// Longest body: a longer batch becomes several records.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 20;

const HEAD_MAGIC: &[u8; 8] = b"ONECOPYJ";
const RECORD_MAGIC: &[u8; 4] = b"OCJR";
const RECORD_HEAD_BYTES: usize = 32;
/// More than the longest note takes.
const NOTE_BYTES_MAX: usize = 256;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// `count` blocks in a row have a new state, places in a row.
    Run { block: u32, count: u32, state: State },
    /// A snapshot of all that was noted before.
    Taken(SnapshotRecord),
    /// A snapshot is gone.
    Deleted { number: u32 },
    /// The disk was opened, as this generation of its lease.
    Opened { generation: u64 },
    /// The disk was closed in order.
    Closed,
}

/// One durable step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) sequence: u64,
    /// The births of its runs.
    pub(crate) epoch: u32,
    pub(crate) notes: Vec<Note>,
}

fn checksum(identity: u64, parts: &[&[u8]]) -> u64 {
    let mut hash = Xxh3::with_seed(identity);
    for part in parts {
        hash.update(part);
    }
    hash.digest()
}

/// The first bytes of a journal.
pub(crate) fn head(identity: u64, number: u64, first_sequence: u64) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.bytes(HEAD_MAGIC);
    writer.u32(VERSION);
    writer.u32(0);
    writer.u64(number);
    writer.u64(first_sequence);
    let sum = checksum(identity, &[&writer.0]);
    writer.u64(sum);
    writer.0.resize(ALIGNMENT_BYTES as usize, 0);
    writer.0
}

/// Checks a journal's first bytes and gives the sequence number of its first record.
pub(crate) fn parse_head(identity: u64, number: u64, bytes: &[u8]) -> Result<u64, String> {
    let mut reader = Reader(bytes);
    if reader.bytes(8)? != HEAD_MAGIC {
        return Err("is no journal".into());
    }
    let version = reader.u32()?;
    let (_, found, first_sequence, sum) = (reader.u32()?, reader.u64()?, reader.u64()?, reader.u64()?);
    if sum != checksum(identity, &[&bytes[..32]]) {
        return Err("its head is damaged, or belongs to another disk".into());
    }
    if version != VERSION || found != number {
        return Err(format!("is journal {found} of format {version}, not journal {number} of format {VERSION}"));
    }
    Ok(first_sequence)
}

/// Writes notes as records from `sequence` on, one after another: as many as their size asks for, at least one.
pub(crate) fn encode(identity: u64, sequence: u64, epoch: u32, notes: &[Note]) -> Vec<Vec<u8>> {
    let (mut records, mut body) = (Vec::new(), Writer::default());
    for note in notes {
        if body.0.len() > BODY_BYTES_MAX - NOTE_BYTES_MAX {
            records.push(record(identity, sequence + records.len() as u64, epoch, &body.0));
            body.0.clear();
        }
        encode_note(note, &mut body);
    }
    records.push(record(identity, sequence + records.len() as u64, epoch, &body.0));
    records
}

fn record(identity: u64, sequence: u64, epoch: u32, body: &[u8]) -> Vec<u8> {
    let mut head = Writer::default();
    head.bytes(RECORD_MAGIC);
    head.u32(body.len() as u32);
    head.u64(sequence);
    head.u32(epoch);
    head.u32(0);
    let sum = checksum(identity, &[&head.0, body]);
    head.u64(sum);
    head.bytes(body);
    head.0.resize(head.0.len().next_multiple_of(ALIGNMENT_BYTES as usize), 0);
    head.0
}

fn encode_note(note: &Note, writer: &mut Writer) {
    match note {
        Note::Run { block, count, state } => {
            writer.u8(1);
            writer.u32(*block);
            writer.u32(*count);
            writer.u32(state.code());
        }
        Note::Taken(record) => {
            writer.u8(2);
            writer.snapshot(record);
        }
        Note::Deleted { number } => {
            writer.u8(3);
            writer.u32(*number);
        }
        Note::Opened { generation } => {
            writer.u8(4);
            writer.u64(*generation);
        }
        Note::Closed => writer.u8(5),
    }
}

fn decode_note(reader: &mut Reader<'_>) -> Result<Note, String> {
    Ok(match reader.u8()? {
        1 => Note::Run { block: reader.u32()?, count: reader.u32()?, state: State::from_code(reader.u32()?) },
        2 => Note::Taken(reader.snapshot()?),
        3 => Note::Deleted { number: reader.u32()? },
        4 => Note::Opened { generation: reader.u64()? },
        5 => Note::Closed,
        kind => return Err(format!("a note of unknown kind {kind}")),
    })
}

/// The record at the beginning of `bytes`, and the bytes it takes; none when there is no whole, undamaged one.
pub(crate) fn decode(identity: u64, bytes: &[u8]) -> Option<(Result<Record, String>, u64)> {
    let (head, rest) = bytes.split_at_checked(RECORD_HEAD_BYTES)?;
    let mut reader = Reader(head);
    if reader.bytes(4).ok()? != RECORD_MAGIC {
        return None;
    }
    let length = reader.u32().ok()? as usize;
    let (sequence, epoch) = (reader.u64().ok()?, reader.u32().ok()?);
    let _ = reader.u32().ok()?;
    let sum = reader.u64().ok()?;
    if length > BODY_BYTES_MAX {
        return None;
    }
    let body = rest.get(..length)?;
    if sum != checksum(identity, &[&head[..RECORD_HEAD_BYTES - 8], body]) {
        return None;
    }
    let taken = (RECORD_HEAD_BYTES + length).next_multiple_of(ALIGNMENT_BYTES as usize) as u64;
    Some((decode_body(sequence, epoch, body), taken))
}

fn decode_body(sequence: u64, epoch: u32, body: &[u8]) -> Result<Record, String> {
    let (mut reader, mut notes) = (Reader(body), Vec::new());
    while !reader.0.is_empty() {
        notes.push(decode_note(&mut reader)?);
    }
    Ok(Record { sequence, epoch, notes })
}

/// What a journal holds.
#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) first_sequence: u64,
    pub(crate) records: Vec<Record>,
    /// Where the next record goes.
    pub(crate) end: u64,
    /// Behind the end are traces of a record that was not finished.
    pub(crate) is_torn: bool,
}

/// Reads a whole journal.
pub(crate) fn parse(identity: u64, number: u64, bytes: &[u8]) -> Result<Contents, String> {
    let first_sequence = parse_head(identity, number, bytes)?;
    let mut contents = Contents { first_sequence, records: Vec::new(), end: ALIGNMENT_BYTES, is_torn: false };
    while let Some((record, taken)) = decode(identity, bytes.get(contents.end as usize..).unwrap_or(&[])) {
        let record = record?;
        let expected = first_sequence.wrapping_add(contents.records.len() as u64);
        if record.sequence != expected {
            return Err(format!("record {} stands where {expected} belongs", record.sequence));
        }
        contents.records.push(record);
        contents.end += taken;
    }
    let rest = bytes.get(contents.end as usize..).unwrap_or(&[]);
    contents.is_torn = rest.iter().any(|byte| *byte != 0);
    if contents.is_torn {
        refuse_later_records(identity, first_sequence + contents.records.len() as u64, rest)?;
    }
    Ok(contents)
}

/// A record is written only when the one before it is durable: behind a torn one there is none.
fn refuse_later_records(identity: u64, expected: u64, rest: &[u8]) -> Result<(), String> {
    for offset in (0..rest.len()).step_by(ALIGNMENT_BYTES as usize) {
        if let Some((Ok(record), _)) = decode(identity, &rest[offset..])
            && record.sequence > expected
        {
            return Err(format!("record {expected} is damaged, but record {} follows it", record.sequence));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::options::Snapshot;

    fn notes() -> Vec<Note> {
        let snapshot = Snapshot { name: "before".into(), epoch: crate::Epoch(7 << 32), created_unix_ms: 12 };
        vec![
            Note::Opened { generation: 3 },
            Note::Run { block: 9, count: 4, state: State::Data(100) },
            Note::Run { block: 1, count: 1, state: State::Zero },
            Note::Taken(SnapshotRecord { number: 5, snapshot }),
            Note::Deleted { number: 5 },
            Note::Closed,
        ]
    }

    fn journal() -> Vec<u8> {
        let mut bytes = head(1, 4, 10);
        for sequence in 10..14 {
            encode(1, sequence, 2, &notes()).into_iter().for_each(|record| bytes.extend(record));
        }
        bytes
    }

    #[test]
    fn what_was_written_comes_back() {
        let mut bytes = journal();
        bytes.resize(bytes.len() + 8192, 0);
        let contents = parse(1, 4, &bytes).unwrap();
        assert_eq!(contents.records.len(), 4);
        assert!(!contents.is_torn);
        assert_eq!(contents.records[3], Record { sequence: 13, epoch: 2, notes: notes() });
        assert!(parse(2, 4, &bytes).is_err() && parse(1, 5, &bytes).is_err());
    }

    #[test]
    fn a_long_batch_becomes_several_records() {
        let many: Vec<Note> = (0..200_000).map(|block| Note::Run { block, count: 1, state: State::Zero }).collect();
        let records = encode(1, 0, 2, &many);
        assert!(records.len() > 2 && records.iter().all(|record| record.len() <= BODY_BYTES_MAX + 512));
        let bytes: Vec<u8> = [head(1, 0, 0)].into_iter().chain(records).flatten().collect();
        let notes: Vec<Note> =
            parse(1, 0, &bytes).unwrap().records.into_iter().flat_map(|record| record.notes).collect();
        assert_eq!(notes, many);
    }

    #[test]
    fn a_torn_tail_is_cut_and_damage_before_the_tail_is_refused() {
        let bytes = journal();
        for torn in 0..512 {
            let contents = parse(1, 4, &bytes[..bytes.len() - 1 - torn]);
            assert_eq!(contents.unwrap().records.len(), if torn < 511 - record_tail() { 4 } else { 3 }, "{torn}");
        }
        let mut damaged = bytes.clone();
        damaged[512 + 40] ^= 1;
        assert!(parse(1, 4, &damaged).unwrap_err().contains("record 10 is damaged"));
        let mut damaged = bytes;
        let last = damaged.len() - 512;
        damaged[last + 40] ^= 1;
        assert_eq!(parse(1, 4, &damaged).unwrap().records.len(), 3);
    }

    /// The last byte of a record that counts, within its 512.
    fn record_tail() -> usize {
        let mut body = Writer::default();
        notes().iter().for_each(|note| encode_note(note, &mut body));
        RECORD_HEAD_BYTES + body.0.len() - 1
    }

    proptest! {
        /// Spec: C6
        #[test]
        fn any_bytes_are_a_journal_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let _ = parse(1, 4, &bytes);
        }

        /// Spec: C6
        #[test]
        fn a_damaged_journal_gives_a_prefix_or_an_error(at in 0usize..2560, value in any::<u8>(), cut in 0usize..2560) {
            let (whole, mut bytes) = (parse(1, 4, &journal()).unwrap(), journal());
            bytes[at] = value;
            bytes.truncate(cut);
            if let Ok(contents) = parse(1, 4, &bytes) {
                prop_assert_eq!(&contents.records[..], &whole.records[..contents.records.len()]);
            }
        }

        #[test]
        fn a_body_of_any_bytes_is_notes_or_an_error(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(1, &record(1, 0, 0, &body));
        }
    }
}
