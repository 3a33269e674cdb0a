//! Making a follower: a data directory that is a copy of a running server's.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;

use serde::{Deserialize, Serialize};

use crate::{ConnectionParameters, PostgresError};

/// How far a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes that are copied.
    pub done_bytes: u64,
    /// Bytes that the copy will have, as far as known; 0 while it is not.
    pub total_bytes: u64,
}

/// What [`FollowerMaker::make`] returns.
pub type MakeFuture<'a> = Pin<Box<dyn Future<Output = Result<(), PostgresError>> + Send + 'a>>;

/// A way to make a data directory from a running server, ready to be opened and started as its standby.
pub trait FollowerMaker: Send + Sync {
    /// Fills `target`, a data directory that does not exist or is empty, from the server `source`.
    ///
    /// `target` exists only when the copy is complete: an interrupted copy leaves nothing that could be taken for one.
    /// `progress` is called now and then, and once at the end with `done_bytes == total_bytes`.
    fn make<'a>(
        &'a self,
        source: &'a ConnectionParameters,
        target: &'a Path,
        progress: &'a (dyn Fn(Progress) + Send + Sync),
    ) -> MakeFuture<'a>;
}
