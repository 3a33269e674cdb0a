//! The ways in which a machine ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::{Ending, Machine, State};
use crate::HypervisorError;

/// The button is pressed again after this: a guest that was still booting has not seen it.
const BUTTON_INTERVAL: Duration = Duration::from_secs(5);

impl Machine {
    /// Ends it as gently as it lets itself be ended: the button, and if the guest does not switch itself off in time,
    /// `quit`; if that does not help either, a kill. A machine that stands is let go first: without that its guest
    /// could do nothing.
    ///
    /// # Errors
    /// [`HypervisorError::NotReached`] when the kernel does not even end a killed process.
    pub async fn stop(&self) -> Result<Arc<Ending>, HypervisorError> {
        let stands = self.state() == State::Paused;
        if stands && let Err(error) = self.resume().await {
            tracing::warn!(machine = self.name(), %error, "a paused machine cannot be let go to be stopped");
        }
        if (stands || self.state() == State::Running)
            && let Ok(ending) = self.power_down().await
        {
            return Ok(ending);
        }
        self.quit().await
    }

    /// Presses the button, again and again, until the guest has switched itself off.
    ///
    /// # Errors
    /// [`HypervisorError::NotReached`]: it runs on.
    pub async fn power_down(&self) -> Result<Arc<Ending>, HypervisorError> {
        let timeout = self.inner.seen.limits.power_down;
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline {
            let next = deadline.min(Instant::now() + BUTTON_INTERVAL);
            match tokio::time::timeout_at(next, self.monitor().power_down()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(machine = self.name(), %error, "the button cannot be pressed"),
                Err(_) => tracing::debug!(machine = self.name(), "QEMU does not press the button"),
            }
            if let Ok(ending) = tokio::time::timeout_at(next, self.wait_ended()).await {
                return Ok(ending);
            }
        }
        self.not_ended("switched off", timeout)
    }

    /// Ends QEMU at once: for the guest the plug is pulled. What it has flushed is on its disks.
    ///
    /// # Errors
    /// [`HypervisorError::NotReached`] when the kernel does not even end a killed process.
    pub async fn quit(&self) -> Result<Arc<Ending>, HypervisorError> {
        let told = self.monitor().execute_within("quit", serde_json::json!({}), self.inner.seen.limits.quit).await;
        // A connection that is lost is what quitting looks like.
        if matches!(told, Ok(_) | Err(HypervisorError::MonitorLost { .. }))
            && let Ok(ending) = tokio::time::timeout(self.inner.seen.limits.quit, self.wait_ended()).await
        {
            return Ok(ending);
        }
        tracing::warn!(machine = self.name(), "QEMU does not quit and is killed");
        self.kill();
        self.wait_killed().await
    }

    /// Kills QEMU (SIGKILL), at once and without waiting: also for the end of a test that failed.
    pub fn kill(&self) {
        if self.state().ending().is_none() {
            self.inner.seen.killed.store(true, Ordering::Relaxed);
            self.inner.seen.process.kill();
        }
    }

    /// Waits until a killed machine is gone.
    ///
    /// # Errors
    /// [`HypervisorError::NotReached`] when the kernel does not end it: it hangs in a device.
    pub async fn wait_killed(&self) -> Result<Arc<Ending>, HypervisorError> {
        let timeout = self.inner.seen.limits.kill;
        match tokio::time::timeout(timeout, self.wait_ended()).await {
            Ok(ending) => Ok(ending),
            Err(_) => self.not_ended("ended", timeout),
        }
    }

    fn not_ended(&self, wanted: &'static str, waited: Duration) -> Result<Arc<Ending>, HypervisorError> {
        match self.state().ending() {
            Some(ending) => Ok(ending.clone()),
            None => Err(HypervisorError::NotReached {
                name: self.name().to_owned(),
                wanted,
                state: self.state().to_string(),
                waited,
            }),
        }
    }
}
