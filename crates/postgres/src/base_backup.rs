//! Making a follower by PostgreSQL's own base backup.

use std::path::Path;

use crate::{Binaries, ConnectionParameters, FollowerMaker, MakeFuture, Progress, ServiceUser};

/// Copies a server by `pg_basebackup`, with the log that is written meanwhile and a replication slot on the source that stays for the
/// follower.
#[derive(Debug, Clone)]
pub struct BaseBackup {
    /// The programs.
    pub binaries: Binaries,
    /// The account that the follower will run as.
    pub user: ServiceUser,
    /// The physical replication slot; made by the copy. One of the same name that nobody uses is dropped before.
    pub slot: String,
}

impl FollowerMaker for BaseBackup {
    fn make<'a>(
        &'a self,
        _source: &'a ConnectionParameters,
        _target: &'a Path,
        _progress: &'a (dyn Fn(Progress) + Send + Sync),
    ) -> MakeFuture<'a> {
        Box::pin(async move { todo!() })
    }
}
