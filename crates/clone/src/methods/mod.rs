//! The methods to make a clone, and the choice between them.
//!
//! | method | needs | the clone answers |
//! |---|---|---|
//! | [`Reflink`] | source and clone on one XFS or btrfs | after its files share all blocks; nothing is filled |
//! | [`Lazy`] | Linux 6.14 with io_uring, CAP_SYS_ADMIN, ext4, XFS or btrfs | at once; it is filled meanwhile |
//! | [`struct@Copy`] | a connection for replication | when all is copied |

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use onecopy_postgres::{InheritedDescriptor, Lsn, Progress};

use crate::CloneError;
use crate::plan::Plan;

mod choice;
mod copy;
mod filesystem;
mod lazy;
mod name;
mod reflink;

pub use choice::{Choice, choose};
pub use copy::Copy;
pub use lazy::{Lazy, LazyMaker};
pub use name::{MethodName, UnknownMethod};
pub use reflink::Reflink;

/// A clone that can be started: by [`onecopy_postgres::Server::open`], `make_standby` with the plan's slot,
/// `set_inherited`, `start`.
#[derive(Debug)]
pub struct PreparedClone {
    /// What it was made from.
    pub plan: Plan,
    /// It lets nobody in before it has replayed this; none where PostgreSQL alone knows.
    pub consistent_at: Option<Lsn>,
    /// How long the source's accesses to its files had to wait.
    pub pause: Duration,
    /// What its postmaster must inherit, whenever it is started until the clone is whole; nothing when it is whole
    /// already.
    pub inherited: Vec<InheritedDescriptor>,
}

/// Told how far the clone of a plan is.
pub type Report<'a> = &'a (dyn Fn(&Plan, Progress) + Send + Sync);

/// What [`CloneMethod::make`] returns: one result a plan, in their order.
pub type MakeFuture<'a> = Pin<Box<dyn Future<Output = Vec<Result<PreparedClone, CloneError>>> + Send + 'a>>;

/// A method to make clones.
pub trait CloneMethod: Send + Sync {
    /// Its name.
    fn name(&self) -> MethodName;

    /// Why this clone cannot be made so, in words that follow a colon; none when it can.
    fn obstacle(&self, plan: &Plan) -> Option<String>;

    /// Makes clones of one source, at once where the method allows it. A clone that fails leaves neither a directory
    /// nor a slot.
    fn make<'a>(&'a self, plans: &'a [Plan], report: Report<'a>) -> MakeFuture<'a>;
}
