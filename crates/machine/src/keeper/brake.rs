//! A machine that changes faster than its checkpoints travel. One that is protected stands until the checkpoint that is
//! under way is there, or for a while: the next one would be longer else, and the one after it longer again. One that
//! migrates is slowed down, where that is wished: it stands for a while, again and again.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onecopy_hypervisor::{Machine, State};
use tokio::runtime::Handle;

use super::conclude;
use super::state::Keeper;
use crate::desired_state::DesiredState;
use crate::error::hypervisor_failed;

/// How long it stands for one checkpoint at most.
const STAND_MAX: Duration = Duration::from_secs(10);

/// When it has stood for so long its guest's clock is set.
const CLOCK_AFTER: Duration = Duration::from_secs(1);

/// When a machine that somebody else made stand, or that did not stand, is slowed down again.
const AGAIN_INTERVAL: Duration = Duration::from_millis(100);

/// How long the guest may take to set its clock until another one may be told to.
const CLOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Sends a checkpoint; when that takes longer than `longest` the machine stands until it is done. With for how long.
pub(super) fn while_sent<T>(
    (keeper, machine, handle): (&Arc<Keeper>, &Machine, &Handle),
    longest: Duration,
    send: impl FnOnce() -> T,
) -> (T, Duration) {
    let (sending, is_sent) = channel::<()>();
    std::thread::scope(|scope| {
        let braking = scope.spawn(move || match is_sent.recv_timeout(longest) {
            Err(RecvTimeoutError::Timeout) => {
                let turn = handle.block_on(stand(keeper, machine, &is_sent, STAND_MAX)).unwrap_or_default();
                if turn.stood > CLOCK_AFTER {
                    set_clock(keeper, handle);
                }
                turn.stood
            }
            _ => Duration::ZERO,
        });
        let sent = send();
        drop(sending);
        (sent, braking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// A machine that is slowed down until this is dropped.
pub(super) struct Slowed {
    turns: Arc<Mutex<Turns>>,
    stood_us: Arc<AtomicU64>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// It runs for so long, and stands for so long then, again and again.
#[derive(Clone, Copy)]
pub(super) struct Turns {
    pub(super) runs: Duration,
    pub(super) stands: Duration,
}

impl Slowed {
    pub(super) fn begin(keeper: &Arc<Keeper>, machine: &Machine, handle: &Handle, turns: Turns) -> io::Result<Slowed> {
        let (turns, stood_us) = (Arc::new(Mutex::new(turns)), Arc::new(AtomicU64::new(0)));
        let (end, is_over) = channel();
        let (keeper, machine, handle) = (Arc::clone(keeper), machine.clone(), handle.clone());
        let (wanted, told) = (Arc::clone(&turns), Arc::clone(&stood_us));
        let slow_down = move || {
            let mut late = Duration::ZERO;
            let mut setting: Option<tokio::task::JoinHandle<()>> = None;
            let mut runs = wanted.lock().unwrap_or_else(PoisonError::into_inner).runs;
            while is_over.recv_timeout(runs) == Err(RecvTimeoutError::Timeout) {
                let turns = *wanted.lock().unwrap_or_else(PoisonError::into_inner);
                let turn = handle.block_on(stand(&keeper, &machine, &is_over, turns.stands)).unwrap_or_default();
                told.fetch_add(u64::try_from(turn.stood.as_micros()).unwrap_or(u64::MAX), Ordering::AcqRel);
                late += turn.stood;
                // One after the other: none is overtaken by an older one.
                if late > CLOCK_AFTER && setting.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
                    (late, setting) = (Duration::ZERO, set_clock(&keeper, &handle));
                }
                runs = match turn.stood {
                    Duration::ZERO => AGAIN_INTERVAL,
                    _ => turns.runs.saturating_sub(turn.noting),
                };
            }
            if let Some(setting) = setting {
                // Whoever sets it next is not overtaken.
                let _ = handle.block_on(async { tokio::time::timeout(CLOCK_TIMEOUT, setting).await });
            }
        };
        let thread = std::thread::Builder::new().name("brake".to_owned()).spawn(slow_down)?;
        Ok(Slowed { turns, stood_us, end: Some(end), thread: Some(thread) })
    }

    pub(super) fn set(&self, turns: Turns) {
        *self.turns.lock().unwrap_or_else(PoisonError::into_inner) = turns;
    }

    /// For how long it has stood in all.
    pub(super) fn stood(&self) -> Duration {
        Duration::from_micros(self.stood_us.load(Ordering::Acquire))
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // It has nothing to say of how it ended.
            let _ = thread.join();
        }
    }
}

/// For how long a machine has stood.
#[derive(Clone, Copy, Default)]
struct Stood {
    stood: Duration,
    /// How long it ran while that was written down.
    noting: Duration,
}

/// As for a take: nobody else's turn is it meanwhile, and who takes the machine over lets it go. For no longer than
/// `longest`, and no longer than nothing is said. None: it cannot stand, which is said.
async fn stand(keeper: &Arc<Keeper>, machine: &Machine, said: &Receiver<()>, longest: Duration) -> Option<Stood> {
    let _alone = keeper.no_take().await;
    // An error, as nothing is said.
    let is_over = |within| said.recv_timeout(within) != Err(RecvTimeoutError::Timeout);
    if machine.state() != State::Running || is_over(Duration::ZERO) {
        return Some(Stood::default());
    }
    let begun = Instant::now();
    let noted = keeper.note(DesiredState::Taking);
    let noting = begun.elapsed();
    let stopped = match noted {
        // Until that is its state: who comes next sees it.
        Ok(()) => machine.pause().await.map_err(|error| hypervisor_failed(keeper.home().name(), error)),
        Err(error) => Err(error),
    };
    match &stopped {
        Ok(()) => {
            // A thread of its own.
            is_over((noting + longest).saturating_sub(begun.elapsed()));
        }
        Err(error) => tracing::warn!(%error, "the machine changes faster than it is copied, and goes on"),
    }
    conclude::let_go(keeper, machine).await;
    // That it runs is written down as durably, while it does.
    let noting = noting * 2;
    stopped.ok().map(|()| Stood { stood: begun.elapsed().saturating_sub(noting), noting })
}

/// After it has stood.
pub(super) fn set_clock(keeper: &Keeper, handle: &Handle) -> Option<tokio::task::JoinHandle<()>> {
    let agent = keeper.agent()?;
    Some(handle.spawn(async move {
        if let Err(error) = agent.set_clock().await {
            tracing::warn!(%error, "the guest's clock is late by as long as it stood");
        }
    }))
}
