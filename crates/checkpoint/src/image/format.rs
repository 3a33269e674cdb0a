//! What is in the files of a machine's checkpoints; `docs/checkpoint-format.md` tells it to people.
//!
//! Bytes that are read here may be anything: each parser is total, checks each number against what there can be, and
//! never reserves more memory than the file has bytes for.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::PAGE_BYTES;

pub(super) const VERSION: u32 = 1;
const MACHINE_MARK: [u8; 8] = *b"ONECOPYI";
const CHECKPOINT_MARK: [u8; 8] = *b"ONECOPYK";
pub(super) const HEAD_BYTES: usize = 128;
/// Where the data begins.
pub(super) const DATA_AT: u64 = PAGE_BYTES as u64;
/// Pages of a memory at most, 1 TiB.
const PAGES_MAX: u64 = 1 << 28;
/// Bytes of a prefix or of a device state at most.
pub(super) const BLOB_BYTES_MAX: u64 = 64 << 20;
/// Bytes of the name of a disk's epoch at most.
pub(super) const DISK_BYTES_MAX: u64 = 4096;
const RUN_BYTES: u64 = 12;

/// Numbers one after another.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or_else(|| format!("it ends {count} bytes too early"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.bytes(4)?.try_into().expect("four bytes")))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.bytes(8)?.try_into().expect("eight bytes")))
    }

    fn mark(&mut self, mark: [u8; 8], what: &str) -> Result<(), String> {
        if self.bytes(8)? != mark {
            return Err(format!("it is no {what}"));
        }
        match (self.u32()?, self.u32()?) {
            (VERSION, 0) => Ok(()),
            (version, _) => Err(format!("format {version}; this program knows format {VERSION}")),
        }
    }
}

/// Takes the checksum off the end.
fn checked(bytes: &[u8], seed: u64) -> Result<&[u8], String> {
    let (content, sum) = bytes.split_last_chunk().ok_or("it ends too early")?;
    match xxh3_64_with_seed(content, seed) == u64::from_le_bytes(*sum) {
        true => Ok(content),
        false => Err("its checksum is wrong".to_owned()),
    }
}

fn check_memory(memory_bytes: u64) -> Result<(), String> {
    let pages = memory_bytes / PAGE_BYTES as u64;
    match memory_bytes.is_multiple_of(PAGE_BYTES as u64) && (1..=PAGES_MAX).contains(&pages) {
        true => Ok(()),
        false => Err(format!("memory of {memory_bytes} bytes")),
    }
}

/// The file `machine`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Machine {
    pub(super) identity: u64,
    pub(super) memory_bytes: u64,
    pub(super) prefix: Vec<u8>,
}

impl Machine {
    pub(super) const BYTES_MAX: u64 = BLOB_BYTES_MAX + 48;

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MACHINE_MARK.to_vec();
        bytes.extend([VERSION, 0].map(u32::to_le_bytes).as_flattened());
        let words = [self.identity, self.memory_bytes, self.prefix.len() as u64];
        bytes.extend(words.map(u64::to_le_bytes).as_flattened());
        bytes.extend_from_slice(&self.prefix);
        let sum = xxh3_64_with_seed(&bytes, self.identity);
        bytes.extend(sum.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Machine, String> {
        let mut reader = Reader(bytes);
        reader.mark(MACHINE_MARK, "machine of checkpoints")?;
        let (identity, memory_bytes, length) = (reader.u64()?, reader.u64()?, reader.u64()?);
        checked(bytes, identity)?;
        check_memory(memory_bytes)?;
        if reader.0.len() as u64 != length.saturating_add(8) {
            return Err(format!("{length} bytes of prefix do not fit its length"));
        }
        let prefix = reader.bytes(reader.0.len() - 8)?.to_vec();
        Ok(Machine { identity, memory_bytes, prefix })
    }
}

/// The head of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) number: u64,
    pub(super) parent: u64,
    pub(super) memory_bytes: u64,
    pub(super) taken_unix_ms: u64,
    pub(super) data_pages: u64,
    pub(super) runs: u64,
    pub(super) devices_bytes: u64,
    pub(super) disk_bytes: u64,
    pub(super) tables_sum: u64,
}

impl Head {
    pub(super) fn to_bytes(self, identity: u64) -> [u8; HEAD_BYTES] {
        let mut bytes = CHECKPOINT_MARK.to_vec();
        bytes.extend([VERSION, 0].map(u32::to_le_bytes).as_flattened());
        let words = [
            identity,
            self.number,
            self.parent,
            self.memory_bytes,
            self.taken_unix_ms,
            self.data_pages,
            self.runs,
            self.devices_bytes,
            self.disk_bytes,
            self.tables_sum,
        ];
        bytes.extend(words.map(u64::to_le_bytes).as_flattened());
        bytes.resize(HEAD_BYTES - 8, 0);
        let sum = xxh3_64_with_seed(&bytes, identity);
        bytes.extend(sum.to_le_bytes());
        bytes.try_into().expect("as long as it was made")
    }

    pub(super) fn parse(bytes: &[u8; HEAD_BYTES], machine: &Machine, number: u64) -> Result<Head, String> {
        let mut reader = Reader(bytes);
        reader.mark(CHECKPOINT_MARK, "checkpoint")?;
        let identity = reader.u64()?;
        checked(bytes, identity)?;
        if identity != machine.identity {
            return Err("it is of another machine".to_owned());
        }
        let head = Head {
            number: reader.u64()?,
            parent: reader.u64()?,
            memory_bytes: reader.u64()?,
            taken_unix_ms: reader.u64()?,
            data_pages: reader.u64()?,
            runs: reader.u64()?,
            devices_bytes: reader.u64()?,
            disk_bytes: reader.u64()?,
            tables_sum: reader.u64()?,
        };
        if head.number != number || head.parent >= number || head.memory_bytes != machine.memory_bytes {
            return Err(format!("it is number {} over {} of {} bytes", head.number, head.parent, head.memory_bytes));
        }
        let pages = machine.memory_bytes / PAGE_BYTES as u64;
        let is_bounded = head.data_pages <= pages && head.runs <= pages && head.disk_bytes <= DISK_BYTES_MAX;
        if !is_bounded || head.devices_bytes > BLOB_BYTES_MAX {
            return Err("its tables are larger than they can be".to_owned());
        }
        Ok(head)
    }

    pub(super) fn tables_at(&self) -> u64 {
        DATA_AT + self.data_pages * PAGE_BYTES as u64
    }

    /// At most some gigabytes: all numbers are bounded.
    pub(super) fn tables_bytes(&self) -> u64 {
        self.runs * RUN_BYTES + self.data_pages * 8 + self.devices_bytes + self.disk_bytes
    }
}

/// Pages that follow each other and have content, or have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u32,
    pub(super) pages: u32,
    pub(super) is_data: bool,
}

/// What stands behind the data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tables {
    pub(super) runs: Vec<Run>,
    pub(super) sums: Vec<u64>,
    pub(super) devices: Vec<u8>,
    pub(super) disk: String,
}

impl Tables {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for run in &self.runs {
            bytes.extend([run.first, run.pages, if run.is_data { 1 } else { 2 }].map(u32::to_le_bytes).as_flattened());
        }
        bytes.extend(self.sums.iter().flat_map(|sum| sum.to_le_bytes()));
        bytes.extend_from_slice(&self.devices);
        bytes.extend_from_slice(self.disk.as_bytes());
        bytes
    }

    /// `bytes` are as many as the head says.
    pub(super) fn parse(bytes: &[u8], head: &Head, identity: u64) -> Result<Tables, String> {
        if xxh3_64_with_seed(bytes, identity) != head.tables_sum {
            return Err("the checksum of its tables is wrong".to_owned());
        }
        let pages = head.memory_bytes / PAGE_BYTES as u64;
        let (mut reader, mut tables) = (Reader(bytes), Tables::default());
        let (mut end, mut data_pages) = (0, 0);
        for _ in 0..head.runs {
            let (first, count, kind) = (reader.u32()?, reader.u32()?, reader.u32()?);
            let is_data = kind == 1;
            if !matches!(kind, 1 | 2) || count == 0 || u64::from(first) < end {
                return Err(format!("a run of {count} pages of kind {kind} at {first} behind {end}"));
            }
            end = u64::from(first) + u64::from(count);
            data_pages += if is_data { u64::from(count) } else { 0 };
            tables.runs.push(Run { first, pages: count, is_data });
        }
        if end > pages || data_pages != head.data_pages {
            return Err(format!("runs end at page {end} and have {data_pages} pages of data"));
        }
        for _ in 0..head.data_pages {
            tables.sums.push(reader.u64()?);
        }
        let devices = usize::try_from(head.devices_bytes).map_err(|error| error.to_string())?;
        tables.devices = reader.bytes(devices)?.to_vec();
        tables.disk = String::from_utf8(reader.0.to_vec()).map_err(|_| "the disk's name is no text".to_owned())?;
        Ok(tables)
    }
}

/// The checksum of a page: the same content elsewhere has another one.
pub(super) fn page_sum(identity: u64, page: u32, content: &[u8; PAGE_BYTES]) -> u64 {
    xxh3_64_with_seed(content, identity.wrapping_add(u64::from(page)).wrapping_add(1))
}

pub(super) fn tables_sum(identity: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, identity)
}
