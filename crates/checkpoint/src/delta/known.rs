//! What the encoder asks of the page map.

use std::ops::Range;

use onecopy_pagemap::{ContentHash, PageMap};

use super::BlockAt;
use crate::take::Cause;

/// A page whose content is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its number.
    pub page: u64,
    /// The [`content_hash`](onecopy_pagemap::content_hash) of its content, with the seed of the encoder.
    pub hash: ContentHash,
}

/// Which block of a version that the other side can read holds a content. An index: who is wrong costs a repair.
pub trait Known {
    /// Puts one answer for each wanted page. Of several blocks the one is best that follows the block that was found
    /// for the page before. No block that the epoch has changed need be left out: the encoder does.
    ///
    /// # Errors
    /// It cannot be asked; the epoch does not travel.
    fn find_many(&mut self, wanted: &[Wanted], found: &mut Vec<Option<BlockAt>>) -> Result<(), Cause>;
}

/// No block is known: there is no disk, or the other side has none.
#[derive(Clone, Copy, Debug, Default)]
pub struct NothingKnown;

impl Known for NothingKnown {
    fn find_many(&mut self, wanted: &[Wanted], found: &mut Vec<Option<BlockAt>>) -> Result<(), Cause> {
        found.extend(wanted.iter().map(|_| None));
        Ok(())
    }
}

/// A page map that is taken as one version's.
pub struct Mapped<'a> {
    /// The page map of the running disk.
    pub map: &'a PageMap,
    /// The place of the version in [`Epoch::versions`](super::Epoch::versions).
    pub version: u8,
    /// Blocks that were written since that version, rising and apart: they are not told.
    pub changed: &'a [Range<u64>],
}

impl Mapped<'_> {
    fn is_changed(&self, block: u64) -> bool {
        let at = self.changed.partition_point(|range| range.end <= block);
        self.changed.get(at).is_some_and(|range| range.contains(&block))
    }
}

impl Known for Mapped<'_> {
    fn find_many(&mut self, wanted: &[Wanted], found: &mut Vec<Option<BlockAt>>) -> Result<(), Cause> {
        let pages = wanted.iter().map(|wanted| (wanted.page, wanted.hash));
        let blocks = self.map.find_many(pages, |block| !self.is_changed(block));
        found.extend(blocks.into_iter().map(|block| block.map(|block| BlockAt { version: self.version, block })));
        Ok(())
    }
}
