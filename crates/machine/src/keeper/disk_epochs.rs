//! The epochs of a protected machine's disk: cut with its memory, and read when they travel.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{Piece, Source};
use onecopy_checkpoint::take::{self, Cause};
use onecopy_disk::Source as _;
use onecopy_disk::source::{NbdClient, NbdClientOptions};
use onecopy_disk_server::DiskClient;
use onecopy_disk_server::protocol::{ChangedBlocks, Request};

use super::server::nbd_socket;
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
    source: Option<NbdClient>,
    /// The newest first, each by its place among all of them.
    read: Mutex<VecDeque<(usize, Vec<u8>)>>,
}

impl EpochBlocks {
    /// What has changed in an epoch since another one; all that is not known to be zeros where there is none.
    ///
    /// # Errors
    /// The disk's server does not answer, or knows one of the epochs no more: it is another one.
    pub(super) fn open(
        home: &MachineHome,
        account: u32,
        epoch: u64,
        since: Option<u64>,
    ) -> Result<EpochBlocks, Cause> {
        let connect = || {
            let options = NbdClientOptions {
                account: Some(account),
                source_timeout: Some(READ_TIMEOUT),
                connections: 1,
                ..NbdClientOptions::default()
            };
            NbdClient::connect(&nbd_url(&format!("epoch/{epoch}"), &nbd_socket(home)), options)
        };
        let (ranges, source) = match since {
            Some(since) => {
                let ranges = changed(home, since, epoch)?;
                let source = if ranges.is_empty() { None } else { Some(connect()?) };
                (ranges, source)
            }
            None => {
                let source = connect()?;
                let extents = source.extents(0..source.size_bytes())?;
                let block = PAGE_BYTES as u64;
                let mut ranges: Vec<Range<u64>> = Vec::new();
                for extent in extents.iter().filter(|extent| !extent.is_zero) {
                    let start = (extent.range.start / block).max(ranges.last().map_or(0, |range| range.end));
                    ranges.push(start..extent.range.end.div_ceil(block));
                }
                (ranges, Some(source))
            }
        };
        Ok(EpochBlocks::new(ranges, source))
    }

    fn new(ranges: Vec<Range<u64>>, source: Option<NbdClient>) -> EpochBlocks {
        let split = |range: &Range<u64>| {
            let (start, end) = (range.start, range.end);
            (start..end).step_by(BATCH_BLOCKS as usize).map(move |first| first..end.min(first + BATCH_BLOCKS))
        };
        let batches = ranges.iter().flat_map(split).collect();
        let numbers = ranges.into_iter().flatten().collect();
        EpochBlocks { numbers, batches, source, read: Mutex::default() }
    }

    /// Their numbers, rising.
    pub(super) fn numbers(&self) -> &[u64] {
        &self.numbers
    }
}

fn changed(home: &MachineHome, from: u64, to: u64) -> Result<Vec<Range<u64>>, Cause> {
    let mut client = DiskClient::connect(&home.disk())?;
    let (mut ranges, mut first): (Vec<Range<u64>>, u64) = (Vec::new(), 0);
    loop {
        let told: ChangedBlocks = client.ask(&Request::Changed { from, to, first })?;
        for (start, end) in told.ranges {
            if start < first || start >= end {
                return Err(format!("the disk's server tells of the blocks {start} to {end} behind {first}").into());
            }
            first = end;
            ranges.push(start..end);
        }
        match told.next {
            Some(next) if next >= first => first = next,
            Some(next) => return Err(format!("the disk's server goes on at block {next} behind {first}").into()),
            None => return Ok(ranges),
        }
    }
}

impl Source for EpochBlocks {
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
        let batch = self.batches.partition_point(|batch| batch.end <= number);
        let blocks = self.batches.get(batch).filter(|blocks| blocks.contains(&number));
        let (Some(blocks), Some(source)) = (blocks, &self.source) else {
            return Err(format!("block {number} is not one that the epoch has").into());
        };
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        match read.iter().position(|(known, _)| *known == batch) {
            Some(place) => read.swap(0, place),
            None => {
                let mut content = vec![0; (blocks.end - blocks.start) as usize * PAGE_BYTES];
                source.read(blocks.start * PAGE_BYTES as u64, &mut content)?;
                read.truncate(BATCHES_MAX - 1);
                read.push_front((batch, content));
            }
        }
        let at = (number - blocks.start) as usize * PAGE_BYTES;
        into.copy_from_slice(&read[0].1[at..at + PAGE_BYTES]);
        Ok(())
    }

    fn read_acknowledged(&self, _: u64, _: &mut Piece) -> Result<bool, Cause> {
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_in_runs_and_none_that_the_epoch_has_not() {
        let blocks = EpochBlocks::new(vec![3..5, 100..230], None);
        assert_eq!(blocks.batches, [3..5, 100..164, 164..228, 228..230]);
        assert_eq!((blocks.numbers().len(), blocks.numbers()[..3].to_vec()), (132, vec![3, 4, 100]));
        for number in [2, 3, 5, 229, 230] {
            let error = blocks.read(number, &mut [0; PAGE_BYTES]).unwrap_err().to_string();
            assert!(error.contains(&format!("block {number} ")), "{error}");
        }
    }
}
