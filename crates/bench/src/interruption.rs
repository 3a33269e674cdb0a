//! Somebody wants an experiment to end before it is done.

use anyhow::{Context, anyhow};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Ctrl-C, a terminal that goes away, and kill.
pub struct Interruption {
    signals: [Signal; 3],
}

impl Interruption {
    /// From now on these signals end nothing by themselves.
    pub fn listen() -> anyhow::Result<Interruption> {
        let kinds = [SignalKind::interrupt(), SignalKind::hangup(), SignalKind::terminate()];
        let [one, two, three] = kinds.map(|kind| signal(kind).context("cannot listen for signals"));
        Ok(Interruption { signals: [one?, two?, three?] })
    }

    /// Ends when one has come.
    pub async fn received(&mut self) {
        let [interrupt, hang_up, terminate] = &mut self.signals;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = hang_up.recv() => {}
            _ = terminate.recv() => {}
        }
    }
}

/// Runs what leaves nothing behind when it is dropped: servers, machines, mounts, swap and control groups are values
/// in it.
///
/// # Errors
/// What it says, or that it was interrupted.
pub async fn until_interrupted<T>(experiment: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let mut interruption = Interruption::listen()?;
    tokio::select! {
        outcome = experiment => outcome,
        () = interruption.received() => Err(anyhow!("interrupted")),
    }
}
