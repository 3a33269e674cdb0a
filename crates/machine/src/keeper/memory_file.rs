//! Where the memory of a machine that comes from another host is written.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{Destination, HeldEpoch, Space, Version};
use onecopy_checkpoint::take::Cause;
use tokio::sync::RwLock;

/// The file that is, or will be, the memory of the machine that comes. Without its source it is of no use: what comes
/// is written in place.
pub(super) struct MemoryFile {
    pub(super) file: File,
    /// There is nothing in it.
    pub(super) is_new: bool,
}

/// Held to be read by who has the memory open that a QEMU waits with, until that is closed; to write it is only waited
/// for. The close waits until the memory's server has all that was written, or until nobody has the kernel's end
/// (`/dev/fuse`) any more. A process that has both, and is killed together with that server, would wait for itself, and
/// nothing could end it: so this keeper has not that end meanwhile. Source: `fuse_flush`, and `do_exit`, which lets go
/// of files only after it has closed all of them.
pub(super) type MemoryOpen = Arc<RwLock<()>>;

impl MemoryFile {
    fn at(space: Space, first: u64) -> Result<u64, Cause> {
        match space {
            Space::Memory => Ok(first * PAGE_BYTES as u64),
            Space::Disk => Err("writes to the disk came".into()),
        }
    }
}

impl Destination for MemoryFile {
    fn begin(&self, _: u64, since: HeldEpoch, _: &[Version]) -> Result<(), Cause> {
        match self.is_new == (since == HeldEpoch::NOTHING) {
            true => Ok(()),
            false => Err("it begins anew in its middle".into()),
        }
    }

    fn read(&self, space: Space, first: u64, into: &mut [u8]) -> Result<(), Cause> {
        Ok(self.file.read_exact_at(into, MemoryFile::at(space, first)?)?)
    }

    fn write(&self, space: Space, first: u64, content: &[u8]) -> Result<(), Cause> {
        Ok(self.file.write_all_at(content, MemoryFile::at(space, first)?)?)
    }

    fn zero(&self, space: Space, numbers: Range<u64>) -> Result<(), Cause> {
        // Of a new file nothing was written there: an epoch has each page once.
        for page in if self.is_new { 0..0 } else { numbers } {
            self.write(space, page, &[0; PAGE_BYTES])?;
        }
        Ok(())
    }
}
