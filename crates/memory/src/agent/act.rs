//! Carrying out what was decided: shrinks first, growths only into room that is there.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::decisions::Outcome;
use super::{Agent, Mode};
use crate::arbiter::Decision;
use crate::engine::{Change, Engine, Taken};
use crate::{Bytes, Level, MemoryError};

impl Agent {
    /// Carries out the decisions of one round.
    pub(super) async fn act(&self, decisions: Vec<Decision>) {
        let (shrinks, others): (Vec<_>, Vec<_>) =
            decisions.into_iter().partition(|decision| decision.to_bytes < decision.from_bytes);
        self.shrink(shrinks).await;
        for decision in others {
            if decision.to_bytes > decision.from_bytes {
                self.grow(decision).await;
            } else {
                let mut state = self.lock();
                state.figures.refusals += 1;
                state.decisions.note(decision, Outcome::Noted);
            }
        }
    }

    /// All at once: memory is wanted now, and a slow server must not hold up the others.
    async fn shrink(&self, decisions: Vec<Decision>) {
        let timeout = self.shared.rhythm.answer_timeout;
        let mut shrinking = JoinSet::new();
        for decision in decisions {
            let Ok(engine) = self.engine(&decision.instance) else { continue };
            shrinking.spawn(async move {
                let taken = take(&*engine, &decision, timeout).await;
                let result = set_target(engine, decision.to_bytes, timeout).await;
                (decision, taken, result)
            });
        }
        while let Some(done) = shrinking.join_next().await {
            match done {
                Ok((decision, taken, result)) => {
                    self.note_taken(&decision, taken);
                    self.note(decision, result);
                }
                Err(error) => tracing::error!(%error, "memory: shrinking a server broke down"),
            }
        }
    }

    /// Grows one server when the room for it is there, counting what others still hold.
    async fn grow(&self, decision: Decision) {
        let (engine, fits) = {
            let state = self.lock();
            let Ok(member) = state.members.get(&decision.instance) else { return };
            let own_bytes = member.observation.as_ref().map_or(0, crate::Observation::committed_bytes);
            let others_bytes = state.members.committed_bytes().saturating_sub(own_bytes);
            let fits = state.members.unknown().is_none()
                && others_bytes.saturating_add(decision.to_bytes) <= state.policy.budget_bytes;
            (Arc::clone(&member.engine), fits)
        };
        if !fits {
            let mut state = self.lock();
            state.figures.postponed += 1;
            state.decisions.note(decision, Outcome::Postponed);
            return;
        }
        let result = set_target(engine, decision.to_bytes, self.shared.rhythm.answer_timeout).await;
        self.note(decision, result);
    }

    fn note_taken(&self, decision: &Decision, taken: Result<Taken, MemoryError>) {
        let mut state = self.lock();
        match taken {
            Ok(taken) => state.figures.taken_bytes += taken.bytes,
            Err(error) => {
                // The server is asked in the ordinary way next; what was not taken comes back so.
                tracing::warn!(instance = %decision.instance, %error, "memory: nothing could be taken");
                state.figures.failures += 1;
            }
        }
    }

    /// Notes what came of a decision, and counts the new target at once: the server is asked again only in the next
    /// round.
    fn note(&self, decision: Decision, result: Result<Change, MemoryError>) {
        let mut state = self.lock();
        let outcome = match result {
            Ok(change) => {
                let bytes = decision.to_bytes.abs_diff(decision.from_bytes);
                if decision.to_bytes < decision.from_bytes {
                    state.figures.shrinks += 1;
                    state.figures.shrunk_bytes += bytes;
                } else {
                    state.figures.growths += 1;
                    state.figures.grown_bytes += bytes;
                }
                if let Ok(member) = state.members.get_mut(&decision.instance) {
                    member.note_change(&change, decision.to_bytes);
                }
                Outcome::Told
            }
            Err(error) => {
                state.figures.failures += 1;
                // It may have heard of it all the same: the memory is promised until it answers.
                if let Ok(member) = state.members.get_mut(&decision.instance)
                    && let Some(observation) = &mut member.observation
                {
                    observation.target_bytes = observation.target_bytes.max(decision.to_bytes);
                }
                Outcome::Failed { reason: error.to_string() }
            }
        };
        state.decisions.note(decision, outcome);
    }
}

impl super::members::Member {
    /// What the server answered to a new target. A server that rounds gets what it made of it as what was set by hand,
    /// lest it be told the same again for ever.
    fn note_change(&mut self, change: &Change, wanted_bytes: Bytes) {
        if let Some(observation) = &mut self.observation {
            observation.target_bytes = change.target_bytes;
            observation.pool_bytes = change.pool_bytes;
        }
        if self.mode == (Mode::Pinned { target_bytes: wanted_bytes }) {
            self.mode = Mode::Pinned { target_bytes: change.target_bytes };
        }
    }
}

/// What a server has parked for us is taken before it is asked for the rest.
async fn take(engine: &dyn Engine, decision: &Decision, timeout: Duration) -> Result<Taken, MemoryError> {
    if engine.level() != Level::Publish {
        return Ok(Taken::default());
    }
    let bytes = decision.from_bytes - decision.to_bytes;
    let waited =
        || MemoryError::NoAnswer { instance: decision.instance.clone(), action: "give memory", waited: timeout };
    tokio::time::timeout(timeout, engine.take(bytes)).await.unwrap_or_else(|_| Err(waited()))
}

/// Tells a server its target, bounded in time.
async fn set_target(engine: Arc<dyn Engine>, target_bytes: Bytes, timeout: Duration) -> Result<Change, MemoryError> {
    let waited =
        || MemoryError::NoAnswer { instance: engine.instance().clone(), action: "take a new target", waited: timeout };
    tokio::time::timeout(timeout, engine.set_target(target_bytes)).await.unwrap_or_else(|_| Err(waited()))
}
