//! A trigger of PSI as something that a task can wait for.

use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::psi::Trigger;

/// A trigger that is registered with the runtime of the task that made it.
#[derive(Debug)]
pub(super) struct Watch(AsyncFd<Trigger>);

impl Watch {
    /// Registers a trigger; to be called within a runtime.
    pub(super) fn of(trigger: Trigger) -> io::Result<Watch> {
        // SAFETY: a trigger owns its file and gives out that file's descriptor always; the file is closed when the
        // trigger is dropped, which `AsyncFd` does after it has taken the descriptor from the runtime.
        let registered = unsafe { AsyncFd::register_with_interest(trigger, Interest::PRIORITY) };
        Ok(Watch(registered?))
    }

    /// Ends at the kernel's next word.
    ///
    /// # Errors
    /// There will be none any more: the cgroup that was watched is gone.
    pub(super) async fn fired(&self) -> io::Result<()> {
        let mut ready = self.0.ready(Interest::PRIORITY).await?;
        let gone = ready.ready().is_error();
        ready.clear_ready();
        if gone { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) }
    }
}
