//! The epochs of a protected machine's disk: cut with its memory, and read when they travel.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{Piece, Source};
use onecopy_checkpoint::take::{self, Cause};
use onecopy_disk::Source as _;
use onecopy_disk::source::{NbdClient, NbdClientOptions};
use onecopy_disk_server::DiskClient;
use onecopy_disk_server::protocol::{ChangedBlocks, Request};

use super::disk_comparison::{Difference, Peer, compare, not_zero};
use super::role::nbd_socket;
use super::shared_disk::nbd_url;
use crate::MachineHome;

/// Blocks that are read at once.
const BATCH_BLOCKS: u64 = 64;

/// Batches that are kept: each of the encoder's threads reads in a place of its own, and some are read again.
const BATCHES_MAX: usize = 8;

/// How long a read may take: the disk's server is on this host.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// The disk's part of a take that nobody keeps: an epoch in its server's memory.
pub(super) struct EpochDisk<'a> {
    pub(super) home: &'a MachineHome,
}

impl take::Disk for EpochDisk<'_> {
    fn flush(&mut self) -> Result<(), Cause> {
        Ok(DiskClient::connect(&self.home.disk())?.ask::<()>(&Request::Flush)?)
    }

    fn cut(&mut self) -> Result<String, Cause> {
        Ok(cut(self.home)?.to_string())
    }
}

/// Ends the disk's epoch: its number.
pub(super) fn cut(home: &MachineHome) -> Result<u64, Cause> {
    Ok(DiskClient::connect(&home.disk())?.ask(&Request::Cut)?)
}

/// Lets epochs go up to this one.
pub(super) fn release(home: &MachineHome, through: u64) -> Result<(), Cause> {
    DiskClient::connect(&home.disk())?.ask::<usize>(&Request::ReleaseEpochs { through })?;
    Ok(())
}

/// Blocks of one epoch, as the encoder reads them.
pub(super) struct EpochBlocks {
    numbers: Vec<u64>,
    /// Those that are read at once, rising.
    batches: Vec<Range<u64>>,
    /// None where there is nothing to be read.
    now: Option<Reader>,
    /// As they were at the end of the epoch that the other side has.
    before: Option<Reader>,
}

/// The end of one epoch.
struct Reader {
    source: NbdClient,
    /// Batches that were read, the newest first, each by its place among all of them.
    read: Mutex<VecDeque<(usize, Arc<Vec<u8>>)>>,
}

impl Reader {
    /// Of a disk of this size.
    fn connect(home: &MachineHome, account: u32, disk_bytes: u64, epoch: u64) -> Result<Reader, Cause> {
        let options = NbdClientOptions {
            account: Some(account),
            source_timeout: Some(READ_TIMEOUT),
            connections: 1,
            ..NbdClientOptions::default()
        };
        let source = NbdClient::connect(&nbd_url(&format!("epoch/{epoch}"), &nbd_socket(home)), options)?;
        match source.size_bytes() == disk_bytes {
            true => Ok(Reader { source, read: Mutex::default() }),
            false => Err(format!("the disk's server tells of a disk of {} bytes", source.size_bytes()).into()),
        }
    }

    fn batch(&self, batch: usize, blocks: &Range<u64>) -> Result<Arc<Vec<u8>>, Cause> {
        let known = |read: &VecDeque<(usize, Arc<Vec<u8>>)>| {
            read.iter().find(|(known, _)| *known == batch).map(|(_, content)| Arc::clone(content))
        };
        if let Some(content) = known(&self.read.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(content);
        }
        // Nobody else waits for it.
        let mut content = vec![0; (blocks.end - blocks.start) as usize * PAGE_BYTES];
        self.source.read(blocks.start * PAGE_BYTES as u64, &mut content)?;
        let content = Arc::new(content);
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.truncate(BATCHES_MAX - 1);
        read.push_front((batch, Arc::clone(&content)));
        Ok(content)
    }
}

impl EpochBlocks {
    /// What has changed in an epoch since another one; all that is not known to be zeros where there is none.
    ///
    /// # Errors
    /// The disk's server does not answer, lies, or knows one of the epochs no more: it is another one.
    pub(super) fn open(
        home: &MachineHome,
        (account, disk_bytes): (u32, u64),
        epoch: u64,
        since: Option<u64>,
    ) -> Result<EpochBlocks, Cause> {
        let connect = |epoch| Reader::connect(home, account, disk_bytes, epoch);
        let Some(since) = since else {
            let now = connect(epoch)?;
            let ranges = not_zero(&now.source, 0..disk_bytes.div_ceil(PAGE_BYTES as u64))?;
            return Ok(EpochBlocks { now: Some(now), ..EpochBlocks::of(ranges) });
        };
        let ranges = changed(home, disk_bytes.div_ceil(PAGE_BYTES as u64), (since, epoch))?;
        let blocks = EpochBlocks::of(ranges);
        match blocks.numbers.is_empty() {
            true => Ok(blocks),
            false => Ok(EpochBlocks { now: Some(connect(epoch)?), before: Some(connect(since)?), ..blocks }),
        }
    }

    /// All of an epoch that the other side has not, by what it tells of the disk that it begins with; and how many
    /// blocks it has.
    ///
    /// # Errors
    /// As [`EpochBlocks::open`] and [`compare`].
    pub(super) fn open_compared(
        home: &MachineHome,
        (account, disk_bytes): (u32, u64),
        epoch: u64,
        peer: &mut impl Peer,
    ) -> Result<(EpochBlocks, u64), Cause> {
        let now = Reader::connect(home, account, disk_bytes, epoch)?;
        let Difference { ranges, same } = compare(&now.source, peer)?;
        Ok((EpochBlocks { now: Some(now), ..EpochBlocks::of(ranges) }, same))
    }

    fn of(ranges: Vec<Range<u64>>) -> EpochBlocks {
        let split = |range: &Range<u64>| {
            let (start, end) = (range.start, range.end);
            (start..end).step_by(BATCH_BLOCKS as usize).map(move |first| first..end.min(first + BATCH_BLOCKS))
        };
        let batches = ranges.iter().flat_map(split).collect();
        let numbers = ranges.into_iter().flatten().collect();
        EpochBlocks { numbers, batches, now: None, before: None }
    }

    /// Their numbers, rising.
    pub(super) fn numbers(&self) -> &[u64] {
        &self.numbers
    }

    /// False: there is no such reader, or no such block.
    fn read_of(&self, reader: &Option<Reader>, number: u64, into: &mut Piece) -> Result<bool, Cause> {
        let batch = self.batches.partition_point(|batch| batch.end <= number);
        let blocks = self.batches.get(batch).filter(|blocks| blocks.contains(&number));
        let (Some(blocks), Some(reader)) = (blocks, reader) else { return Ok(false) };
        let content = reader.batch(batch, blocks)?;
        let at = (number - blocks.start) as usize * PAGE_BYTES;
        into.copy_from_slice(&content[at..at + PAGE_BYTES]);
        Ok(true)
    }
}

impl Source for EpochBlocks {
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
        match self.read_of(&self.now, number, into)? {
            true => Ok(()),
            false => Err(format!("block {number} is not one that the epoch has").into()),
        }
    }

    fn read_acknowledged(&self, number: u64, into: &mut Piece) -> Result<bool, Cause> {
        self.read_of(&self.before, number, into)
    }
}

/// Of a disk of so many blocks.
fn changed(home: &MachineHome, blocks: u64, (from, to): (u64, u64)) -> Result<Vec<Range<u64>>, Cause> {
    let mut client = DiskClient::connect(&home.disk())?;
    let mut told = Told { blocks, ranges: Vec::new(), first: 0 };
    while told.add(client.ask(&Request::Changed { from, to, first: told.first })?)? {}
    Ok(told.ranges)
}

/// What a disk's server has told, which may lie.
struct Told {
    blocks: u64,
    ranges: Vec<Range<u64>>,
    /// What is asked next.
    first: u64,
}

impl Told {
    /// Whether there is more.
    fn add(&mut self, changed: ChangedBlocks) -> Result<bool, Cause> {
        let is_empty = changed.ranges.is_empty();
        for (start, end) in changed.ranges {
            if start < self.first || start >= end || end > self.blocks {
                return Err(format!(
                    "the disk's server tells of the blocks {start} to {end}, from {}, of {}",
                    self.first, self.blocks
                )
                .into());
            }
            self.first = end;
            self.ranges.push(start..end);
        }
        match changed.next {
            // Each answer is further than the one before.
            Some(next) if next >= self.first && !is_empty => {
                self.first = next;
                Ok(true)
            }
            Some(next) => Err(format!("the disk's server goes on at block {next}, from {}", self.first).into()),
            None => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_in_runs_and_none_that_the_epoch_has_not() {
        let blocks = EpochBlocks::of(vec![3..5, 100..230]);
        assert_eq!(blocks.batches, [3..5, 100..164, 164..228, 228..230]);
        assert_eq!((blocks.numbers().len(), blocks.numbers()[..3].to_vec()), (132, vec![3, 4, 100]));
        assert!(!blocks.read_acknowledged(3, &mut [0; PAGE_BYTES]).unwrap());
        for number in [2, 3, 5, 229, 230] {
            let error = blocks.read(number, &mut [0; PAGE_BYTES]).unwrap_err().to_string();
            assert!(error.contains(&format!("block {number} ")), "{error}");
        }
    }

    #[test]
    fn a_disks_server_that_lies_is_not_believed_and_not_asked_for_ever() {
        let told = |first| Told { blocks: 100, ranges: Vec::new(), first };
        let changed = |ranges: &[(u64, u64)], next| ChangedBlocks { ranges: ranges.to_vec(), next };
        let mut right = told(0);
        assert!(right.add(changed(&[(0, 3), (7, 8)], Some(9))).unwrap());
        assert!(!right.add(changed(&[(9, 100)], None)).unwrap());
        assert_eq!(right.ranges, [0..3, 7..8, 9..100]);
        let lies = [
            changed(&[(0, 101)], None),
            changed(&[(5, u64::MAX)], None),
            changed(&[(6, 6)], None),
            changed(&[(6, 8), (7, 9)], None),
            changed(&[(4, 6)], None),
            changed(&[(6, 8)], Some(7)),
            changed(&[], Some(9)),
        ];
        for lie in lies {
            assert!(told(5).add(lie.clone()).is_err(), "{lie:?}");
        }
    }
}
