//! What travels of a memory: what it held at the ends of two of its epochs.

use super::{Epoch, GuestMemory};
use crate::delta::{Piece, Source};
use crate::take::Cause;

/// A memory at the end of an epoch, and of the one that another host has acknowledged. Both are kept, not released,
/// while this is used.
pub struct Between<'a> {
    /// The memory.
    pub memory: &'a GuestMemory,
    /// The epoch that travels.
    pub epoch: Epoch,
    /// The one that is acknowledged; none: the other host has nothing.
    pub acknowledged: Option<Epoch>,
}

/// A number that is no page's reads as one behind the end: as zeros.
fn page(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Source for Between<'_> {
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
        Ok(self.memory.read(self.epoch, page(number), into)?)
    }

    fn read_acknowledged(&self, number: u64, into: &mut Piece) -> Result<bool, Cause> {
        let Some(acknowledged) = self.acknowledged else { return Ok(false) };
        self.memory.read(acknowledged, page(number), into)?;
        Ok(true)
    }
}
