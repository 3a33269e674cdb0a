//! A clone's directory: made empty in the shape of its source, unstartable for anybody else until it is whole.
//!
//! ```text
//!  Marker ─> Skeleton::make ─> reconcile ─> write_small ─> VersionGuard::lay ─> (filled, while its server runs) ─> finish
//!            directories,      the final    what is small                                        fsync, PG_VERSION for the
//!            sparse files      image                                                             guard, the marker goes
//! ```

mod finish;
mod guard;
mod location;
mod marker;
mod remove;
mod skeleton;
mod tablespaces;
#[cfg(test)]
mod tests;

pub use finish::finish;
pub(crate) use guard::VERSION_FILE;
pub use guard::{PIN_DESCRIPTOR_NUMBER, VERSION_DESCRIPTOR_NUMBER, VersionGuard};
pub use location::CloneLocation;
pub use marker::{MARKER_FILE, Marker, Owner};
pub use remove::{remove, remove_tablespaces, remove_ungiven, remove_unmarked};
pub(crate) use skeleton::DIRECTORIES_NEEDED;
pub use skeleton::Skeleton;
pub(crate) use tablespaces::TABLESPACES_DIRECTORY;
