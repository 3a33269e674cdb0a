//! Disks of virtual machines: one storage core, and its NBD server and its vhost-user-blk back end.

mod attachment;
mod check;
mod disk;
mod engine;
mod epoch;
mod error;
mod export;
mod format;
mod lease;
mod map;
pub mod nbd;
mod observer;
mod options;
mod request;
pub mod source;
mod space;
mod storage;
pub mod vhost_user;

pub use attachment::Attachment;
pub use check::CheckReport;
pub use disk::Disk;
pub use engine::View;
pub use epoch::{At, Epoch, WriteLog, WriteRecord};
pub use error::{DiskError, Found};
pub use export::export;
pub use observer::{Direction, Observer, Opened};
pub use options::{CreateOptions, Geometry, OpenOptions, Snapshot, Statistics};
pub use request::{Attempt, Completion, GuestSegment, Request, Requester};
pub use source::{BaseSpecification, Extent, Hydration, Source, SourceError, TlsFiles};

/// The unit of the map, of copies on write and of content hashes: the guest's page.
pub const BLOCK_BYTES: u64 = 4096;

/// The unit of requests.
pub const SECTOR_BYTES: u64 = 512;
