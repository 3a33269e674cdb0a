//! Where pressure on memory is seen: the host's free memory, its stalls (PSI), and the limits of cgroups.

mod group;
mod hierarchy;
mod host;
mod meminfo;
mod psi;
mod text;
mod watch;

use std::future::Future;
use std::pin::Pin;

use crate::{HostPressure, MemoryError};

pub use group::GroupMemory;
pub use hierarchy::{Hierarchy, Version};
pub use host::Host;
pub use meminfo::MemoryInformation;
pub use psi::{Share, Stall, Threshold, Trigger};

/// What [`Source::stalled`] returns.
pub type StallFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Tells what the host has and whether it stalls.
pub trait Source: Send + Sync {
    /// The figures now. Reads some small files of the kernel.
    ///
    /// # Errors
    /// [`MemoryError::File`], [`MemoryError::Malformed`].
    fn pressure(&self) -> Result<HostPressure, MemoryError>;

    /// Ends when the host begins to stall for memory; never ends where that cannot be noticed. Dropping it is allowed
    /// at any time.
    fn stalled(&self) -> StallFuture<'_> {
        Box::pin(std::future::pending())
    }
}
