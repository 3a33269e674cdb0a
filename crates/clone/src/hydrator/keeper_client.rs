//! What this process gives to its keeper, so that its successor can go on.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::CloneError;
use crate::keeper::{Channel, KeptFiles};

/// The keeper, as seen from below.
#[derive(Debug, Clone)]
pub struct KeeperClient {
    channel: Arc<Channel>,
}

impl KeeperClient {
    /// Takes what was kept, and says in the log when the keeper dies.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: the keeper is gone already.
    pub fn take_over(channel: Channel) -> Result<(KeeperClient, KeptFiles), CloneError> {
        let kept = channel.take_over().map_err(CloneError::kernel("hand over what was kept"))?;
        let channel = Arc::new(channel);
        let watched = Arc::clone(&channel);
        std::thread::spawn(move || {
            let word = watched.receive(true);
            tracing::error!(
                ?word,
                "the keeper is gone: going on without it; if this process dies, too, its clones are lost"
            );
        });
        Ok((KeeperClient { channel }, kept))
    }

    /// Keeps a file under a name, instead of one that had it.
    pub fn keep(&self, name: &str, file: impl AsFd) {
        if let Err(error) = self.channel.keep(name, file) {
            tracing::warn!(name, %error, "not kept");
        }
    }

    /// Closes the keeper's copy.
    pub fn forget(&self, name: &str) {
        if let Err(error) = self.channel.forget(name) {
            tracing::warn!(name, %error, "the keeper does not forget");
        }
    }
}

/// A copy of a file that was kept.
///
/// # Errors
/// [`CloneError::Kernel`]: it was not kept, or there are no descriptors left.
pub fn copy_of(kept: &KeptFiles, name: &str) -> Result<OwnedFd, CloneError> {
    let missing = || std::io::Error::other(format!("{name} was not kept"));
    let copy = kept.get(name).ok_or_else(missing).and_then(OwnedFd::try_clone);
    copy.map_err(CloneError::kernel("hand over what was kept"))
}
