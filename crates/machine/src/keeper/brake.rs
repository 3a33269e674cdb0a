//! A machine that changes faster than its checkpoints travel: it stands until the one that is under way is there, or
//! for a while. The next one would be longer else, and the one after it longer again.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use onecopy_hypervisor::{Machine, State};
use tokio::runtime::Handle;

use super::conclude;
use super::service::Kept;
use crate::MachineError;
use crate::desired_state::DesiredState;
use crate::error::hypervisor_failed;

/// How long it stands for one checkpoint at most.
const STAND_MAX: Duration = Duration::from_secs(10);

/// From then on its guest's clock is set when it goes on.
const CLOCK_AFTER: Duration = Duration::from_secs(1);

/// Sends a checkpoint; when that takes longer than `longest` the machine stands until it is done. With for how long.
pub(super) fn while_sent<T>(
    (kept, machine, handle): (&Arc<Kept>, &Machine, &Handle),
    longest: Duration,
    send: impl FnOnce() -> T,
) -> (T, Duration) {
    let (sending, is_sent) = channel::<()>();
    std::thread::scope(|scope| {
        let braking = scope.spawn(move || match is_sent.recv_timeout(longest) {
            Err(RecvTimeoutError::Timeout) => handle.block_on(stand(kept, machine, &is_sent)),
            _ => Duration::ZERO,
        });
        let sent = send();
        drop(sending);
        (sent, braking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// As for a take: nobody else's turn is it meanwhile, and who takes the machine over lets it go.
async fn stand(kept: &Arc<Kept>, machine: &Machine, is_sent: &Receiver<()>) -> Duration {
    let _alone = kept.no_take().await;
    // An error, as nothing is said.
    let is_over = |within| is_sent.recv_timeout(within) != Err(RecvTimeoutError::Timeout);
    if machine.state() != State::Running || is_over(Duration::ZERO) {
        return Duration::ZERO;
    }
    let begun = Instant::now();
    match stop(kept, machine).await {
        Ok(()) => {
            // A thread of its own.
            is_over(STAND_MAX);
        }
        Err(error) => tracing::warn!(%error, "the machine changes faster than it is copied, and goes on"),
    }
    conclude::let_go(kept, machine).await;
    let stood = begun.elapsed();
    if stood > CLOCK_AFTER
        && let Some(agent) = kept.agent()
    {
        tokio::spawn(async move {
            if let Err(error) = agent.set_clock().await {
                tracing::warn!(%error, "the guest's clock is late by as long as it stood");
            }
        });
    }
    stood
}

async fn stop(kept: &Kept, machine: &Machine) -> Result<(), MachineError> {
    kept.note(DesiredState::Taking)?;
    // Until that is its state: who comes next sees it.
    machine.pause().await.map_err(|error| hypervisor_failed(kept.home().name(), error))
}
