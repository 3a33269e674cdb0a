//! The loop that observes, decides and acts.
//!
//! ```text
//!   every second, or when the host stalls, or when somebody sets a size:
//!   engines ──observe, all at once, bounded in time──┐
//!   source ───────pressure───────────────────────────┴──> arbiter::decide ──> shrinks, all at once ──> growths, one by one,
//!                                                                                  │        only into room that is there
//!                                                                                  └──> log of decisions, figures
//! ```
//!
//! A server of level `publish` that does not answer while the host is short of memory is not asked: what it has
//! published is taken.
//!
//! It keeps nothing that must outlive it: a new agent begins with what the servers say. A server that does not answer
//! is counted at its last known size and not grown; while one has never answered that is there, nobody grows. A server
//! whose automatic is off is only watched; one that was set by hand keeps that size, also when it comes back from a
//! restart with another, until it is given back to the automatic.

mod act;
mod decisions;
mod manual;
mod members;
mod round;
mod status;
mod unresponsive;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::MissedTickBehavior;

use crate::arbiter::{self, InstancePolicy, Policy};
use crate::engine::Engine;
use crate::pressure::Source;
use crate::{InstanceName, MemoryError};

pub use decisions::{DECISIONS_MAX, Logged, Outcome};
pub use members::Mode;
pub use status::{Figures, InstanceStatus, Status};

use members::Members;
use round::Deciding;

/// How often the agent acts, and how long it waits for a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rhythm {
    /// From one round to the next, when nothing happens.
    pub interval: Duration,
    /// A server that takes longer for an answer is left out of this round.
    pub answer_timeout: Duration,
}

impl Default for Rhythm {
    fn default() -> Self {
        Rhythm { interval: Duration::from_secs(1), answer_timeout: Duration::from_secs(2) }
    }
}

/// Rounds are never closer than this, however often the host stalls.
const ROUND_PAUSE_MIN: Duration = Duration::from_millis(100);

/// Gives each server of a host its share of memory. Clones of it are the same agent.
#[derive(Clone)]
pub struct Agent {
    shared: Arc<Shared>,
}

struct Shared {
    decide: round::Decide,
    source: Arc<dyn Source>,
    rhythm: Rhythm,
    /// Locked for moments only, never over an await.
    state: Mutex<State>,
    /// Held over a round: rounds exclude each other.
    deciding: tokio::sync::Mutex<Deciding>,
    /// Somebody wants a round now.
    wake: Notify,
    stopping: watch::Sender<bool>,
}

struct State {
    policy: Policy,
    members: Members,
    pressure: Option<crate::HostPressure>,
    decisions: decisions::Decisions,
    figures: Figures,
}

impl Agent {
    /// An agent for these servers, all automatic, with the usual rhythm. It does nothing before [`Agent::run`].
    pub fn new(policy: Policy, engines: Vec<Arc<dyn Engine>>, source: Arc<dyn Source>) -> Agent {
        Agent::with_rhythm(policy, engines, source, Rhythm::default())
    }

    /// The same with another rhythm.
    pub fn with_rhythm(
        policy: Policy,
        engines: Vec<Arc<dyn Engine>>,
        source: Arc<dyn Source>,
        rhythm: Rhythm,
    ) -> Agent {
        Agent::deciding_by(arbiter::decide, policy, engines, source, rhythm)
    }

    fn deciding_by(
        decide: round::Decide,
        policy: Policy,
        engines: Vec<Arc<dyn Engine>>,
        source: Arc<dyn Source>,
        rhythm: Rhythm,
    ) -> Agent {
        let mut members = Members::new();
        for engine in engines {
            members.add(engine);
        }
        let state = State {
            policy,
            members,
            pressure: None,
            decisions: decisions::Decisions::default(),
            figures: Figures::default(),
        };
        let shared = Shared {
            decide,
            source,
            rhythm,
            state: Mutex::new(state),
            deciding: tokio::sync::Mutex::new(Deciding::default()),
            wake: Notify::new(),
            stopping: watch::Sender::new(false),
        };
        Agent { shared: Arc::new(shared) }
    }

    /// Works until [`Agent::stop`]. A round that is under way is finished; the servers keep what they have.
    pub async fn run(&self) {
        let mut stopping = self.shared.stopping.subscribe();
        let mut ticks = tokio::time::interval(self.shared.rhythm.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !*stopping.borrow() {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.shared.wake.notified() => {}
                () = self.shared.source.stalled() => self.lock().figures.stalls += 1,
                _ = stopping.wait_for(|stop| *stop) => break,
            }
            self.round().await;
            tokio::select! {
                () = tokio::time::sleep(ROUND_PAUSE_MIN) => {}
                _ = stopping.wait_for(|stop| *stop) => break,
            }
        }
    }

    /// Ends [`Agent::run`]; may be called before it.
    pub fn stop(&self) {
        self.shared.stopping.send_replace(true);
    }

    /// Takes one more server into care, automatic or not as [`Agent::set_auto`] said last for all. One of the same name
    /// is replaced.
    pub fn add(&self, engine: Arc<dyn Engine>, policy: InstancePolicy) {
        let mut state = self.lock();
        state.policy.instances.insert(engine.instance().clone(), policy);
        state.members.add(engine);
        drop(state);
        self.shared.wake.notify_one();
    }

    /// Leaves a server alone; it keeps the size that it has. False when there is none of this name.
    pub fn remove(&self, instance: &InstanceName) -> bool {
        let mut state = self.lock();
        state.policy.instances.remove(instance);
        state.members.remove(instance)
    }

    /// Changes the policy from the next round on.
    pub fn set_policy(&self, policy: Policy) {
        self.lock().policy = policy;
        self.shared.wake.notify_one();
    }

    /// Switches the automatic on or off, for one server or for all and those to come. On: also what was set by hand is
    /// given back to it. Off: the server is watched and keeps what it has; what was set by hand stays so.
    ///
    /// # Errors
    /// [`MemoryError::UnknownInstance`].
    pub fn set_auto(&self, instance: Option<&InstanceName>, on: bool) -> Result<(), MemoryError> {
        self.lock().members.set_auto(instance, on)?;
        self.shared.wake.notify_one();
        Ok(())
    }

    /// The server of this name, for what the agent does not do itself.
    ///
    /// # Errors
    /// [`MemoryError::UnknownInstance`].
    pub fn engine(&self, instance: &InstanceName) -> Result<Arc<dyn Engine>, MemoryError> {
        Ok(Arc::clone(&self.lock().members.get(instance)?.engine))
    }

    /// What is known and what was done, at this moment; asks no server.
    pub fn status(&self) -> Status {
        Status::of(&self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
