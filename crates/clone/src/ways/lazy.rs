//! Files that are filled while the clone's server runs already. Made by the service of the source; this is the door to it.

use std::sync::Arc;

use super::filesystem::{nameless_file, pairs, type_name};
use super::{MakeFuture, Report, Way, WayName};
use crate::CloneError;
use crate::fanotify::{EventAccess, Group};
use crate::plan::Plan;

/// Who makes such clones: the client of [`crate::service`].
pub trait LazyMaker: Send + Sync {
    /// As [`Way::make`]; what a clone's postmaster must inherit is in [`super::Made::inherited`].
    fn make<'a>(&'a self, plans: &'a [Plan], report: Report<'a>) -> MakeFuture<'a>;
}

/// The way `lazy`.
pub struct Lazy {
    maker: Arc<dyn LazyMaker>,
}

impl Lazy {
    /// Made by this one.
    pub fn new(maker: Arc<dyn LazyMaker>) -> Lazy {
        Lazy { maker }
    }
}

impl Way for Lazy {
    fn name(&self) -> WayName {
        WayName::Lazy
    }

    fn obstacle(&self, plan: &Plan) -> Option<String> {
        obstacle(plan)
    }

    fn make<'a>(&'a self, plans: &'a [Plan], report: Report<'a>) -> MakeFuture<'a> {
        self.maker.make(plans, report)
    }
}

/// Why the kernel would not ask before files of the source and of the clone are accessed.
pub(super) fn obstacle(plan: &Plan) -> Option<String> {
    let pairs = match pairs(plan) {
        Ok(pairs) => pairs,
        Err(error) => return Some(error.to_string()),
    };
    let group = match Group::new(EventAccess::ReadWrite) {
        Ok(group) => group,
        Err(error) => return Some(format!("{error} (it takes CAP_SYS_ADMIN and Linux 6.14 or newer)")),
    };
    pairs.iter().flat_map(|pair| [&pair.source, &pair.target]).find_map(|directory| {
        let file = match nameless_file(directory) {
            Ok(file) => file,
            Err(error) => return Some(CloneError::file("make a file in", directory)(error).to_string()),
        };
        let name = type_name(directory);
        // The mark goes with the group.
        let refused = group.mark_file(&file).err()?;
        Some(format!("{refused} of the file system {name} (it takes Linux 6.14 or newer and ext4, XFS or btrfs)"))
    })
}
