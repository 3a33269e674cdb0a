//! One round: ask all servers and the host, let the arbiter decide, act.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::{Agent, Mode};
use crate::arbiter::{self, Decision, Policy};
use crate::engine::{Engine, Presence};
use crate::{HostPressure, MemoryError, Observation};

/// How targets are decided: [`arbiter::decide`].
pub(super) type Decide =
    fn(&Policy, &HostPressure, &[Observation], Duration, &mut arbiter::ArbiterState) -> Vec<Decision>;

/// What is kept from round to round.
#[derive(Default)]
pub(super) struct Deciding {
    state: arbiter::ArbiterState,
    last: Option<Instant>,
}

impl Agent {
    /// One round, now. [`Agent::run`] does it again and again.
    pub async fn round(&self) {
        let mut deciding = self.shared.deciding.lock().await;
        let begin = Instant::now();
        self.observe().await;
        let pressure = self.shared.source.pressure();
        let elapsed = deciding.last.map_or(Duration::ZERO, |last| begin.duration_since(last));
        deciding.last = Some(begin);
        let decisions = match pressure {
            Ok(pressure) => {
                self.take_unasked(&pressure).await;
                let (policy, observations) = {
                    let mut state = self.lock();
                    state.pressure = Some(pressure.clone());
                    (state.members.pinned_in(&state.policy), state.members.observations())
                };
                (self.shared.decide)(&policy, &pressure, &observations, elapsed, &mut deciding.state)
            }
            Err(error) => {
                tracing::warn!(%error, "memory: the host's figures cannot be read; nothing is decided");
                let mut state = self.lock();
                state.pressure = None;
                state.figures.blind_rounds += 1;
                Vec::new()
            }
        };
        self.act(self.allowed(decisions)).await;
        let mut state = self.lock();
        state.figures.rounds += 1;
        state.figures.last_round_us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
    }

    /// Decisions that may be carried out: a server that is only watched is left alone, whatever the arbiter thinks of
    /// it.
    fn allowed(&self, mut decisions: Vec<Decision>) -> Vec<Decision> {
        let state = self.lock();
        decisions
            .retain(|decision| state.members.get(&decision.instance).is_ok_and(|member| member.mode != Mode::Watched));
        decisions
    }

    /// Asks all servers at once and keeps their answers. For one that did not answer the last time nobody waits: its
    /// answer is there for a later round.
    pub(super) async fn observe(&self) {
        let mut asking = JoinSet::new();
        let timeout = self.shared.rhythm.answer_timeout;
        for (engine, is_unresponsive) in self.to_ask() {
            let agent = self.clone();
            let question = async move {
                let answer = ask(&engine, timeout).await;
                let runs = match &answer {
                    Ok(_) => true,
                    Err(error) => may_run_here(&engine, error, timeout).await,
                };
                agent.keep(&engine, answer, runs);
            };
            if is_unresponsive {
                tokio::spawn(question);
            } else {
                asking.spawn(question);
            }
        }
        asking.join_all().await;
    }

    /// Servers to be asked now, each with whether it was unresponsive; not those whose question is under way.
    fn to_ask(&self) -> Vec<(Arc<dyn Engine>, bool)> {
        let mut state = self.lock();
        let idle = state.members.iter_mut().filter(|member| !member.is_asked);
        idle.map(|member| {
            let is_unresponsive = member.unanswered > 0;
            member.is_asked = is_unresponsive;
            (Arc::clone(&member.engine), is_unresponsive)
        })
        .collect()
    }

    /// `runs`: it runs on this host, or may, though it does not answer.
    fn keep(&self, engine: &Arc<dyn Engine>, answer: Result<Observation, MemoryError>, runs: bool) {
        let instance = engine.instance();
        let mut state = self.lock();
        // It may have been removed or replaced meanwhile.
        let member = state.members.get_mut(instance).ok().filter(|member| Arc::ptr_eq(&member.engine, engine));
        let Some(member) = member else { return };
        member.is_asked = false;
        match answer {
            Ok(observation) => {
                if member.unanswered > 0 {
                    tracing::info!(%instance, after = member.unanswered, "memory: the server answers again");
                }
                (member.observation, member.failure, member.unanswered) = (Some(observation), None, 0);
                member.is_unknown = false;
            }
            Err(error) => {
                if member.unanswered == 0 {
                    tracing::warn!(%instance, %error, "memory: the server does not answer; it is counted as it was");
                }
                match &mut member.observation {
                    Some(observation) => observation.answered = false,
                    // One that does not run here has nothing of this host's.
                    None => member.is_unknown = runs,
                }
                member.failure = Some(error.to_string());
                member.unanswered += 1;
                state.figures.unanswered += 1;
            }
        }
    }
}

/// Whether a server that does not answer may run on this host. Where that cannot be seen, one that hangs may, and one
/// that cannot be reached does not.
async fn may_run_here(engine: &Arc<dyn Engine>, error: &MemoryError, timeout: Duration) -> bool {
    match tokio::time::timeout(timeout, engine.presence()).await {
        Ok(Ok(Presence::Running(_))) => true,
        Ok(Ok(Presence::Absent)) => false,
        _ => matches!(error, MemoryError::NoAnswer { .. }),
    }
}

/// One question, bounded in time. A fault of ours in it is no answer, and does not end the agent.
async fn ask(engine: &Arc<dyn Engine>, timeout: Duration) -> Result<Observation, MemoryError> {
    let instance = engine.instance().clone();
    let action = "tell its memory";
    let mut asking = JoinSet::new();
    let asked = Arc::clone(engine);
    asking.spawn(async move { asked.observe().await });
    match tokio::time::timeout(timeout, asking.join_next()).await {
        Ok(Some(Ok(answer))) => answer,
        Ok(Some(Err(error))) => Err(MemoryError::Statement { instance, action, reason: error.to_string() }),
        Ok(None) | Err(_) => Err(MemoryError::NoAnswer { instance, action, waited: timeout }),
    }
}
