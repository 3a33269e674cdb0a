//! Sizes that are set by hand.

use std::time::Duration;

use super::members::Mode;
use super::{Agent, Outcome};
use crate::arbiter;
use crate::engine::{Change, Progress, Report};
use crate::{BindingLimit, Bytes, InstanceName, MemoryError, Observation};

/// How often a change that somebody waits for is looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

impl Agent {
    /// Gives a server a size by hand. It keeps it until [`Agent::set_auto`] gives it back, also over a restart of the
    /// server. Does not wait until the size is reached, see [`Agent::reach`]; where others must shrink first, it may
    /// take some rounds. The size is rounded up to one that the server can have: the answer tells it.
    ///
    /// # Errors
    /// [`MemoryError::UnknownInstance`]; [`MemoryError::BelowFloor`], [`MemoryError::AboveCeiling`];
    /// [`MemoryError::AboveLimit`] for a cgroup's limit; [`MemoryError::OverBudget`] when the others cannot make room;
    /// what the server said when it refuses. Nothing has changed then.
    pub async fn set(&self, instance: &InstanceName, target_bytes: Bytes) -> Result<Change, MemoryError> {
        self.lock().members.get(instance)?;
        self.observe().await;
        let (before, target_bytes, mode_before, decided) = {
            let mut state = self.lock();
            let before = state.admit(instance, target_bytes)?;
            // What the server cannot have exactly would never be reached.
            let target_bytes = before.rounded(target_bytes);
            let decided = state.decisions.noted();
            let member = state.members.get_mut(instance)?;
            let mode_before = std::mem::replace(&mut member.mode, Mode::Pinned { target_bytes });
            (before, target_bytes, mode_before, decided)
        };
        self.round().await;
        let mut state = self.lock();
        let refused = state.decisions.last_of(instance).and_then(|last| match &last.outcome {
            Outcome::Failed { reason } if last.number > decided => Some(reason.clone()),
            _ => None,
        });
        let member = state.members.get_mut(instance)?;
        if let Some(reason) = refused {
            member.mode = mode_before;
            return Err(MemoryError::Statement { instance: instance.clone(), action: "take this size", reason });
        }
        let pool_bytes = member.observation.as_ref().map_or(before.pool_bytes, |now| now.pool_bytes);
        // As the server has rounded it.
        let target_bytes = if let Mode::Pinned { target_bytes } = member.mode { target_bytes } else { target_bytes };
        Ok(Change { from_bytes: before.pool_bytes, target_bytes, pool_bytes })
    }

    /// Waits until a server that was set by hand has its size, and reports on the way. It asks the agent, not the
    /// server.
    ///
    /// # Errors
    /// [`MemoryError::UnknownInstance`], also when the server leaves meanwhile; [`MemoryError::Unable`] when it is no
    /// longer set by hand, or to another size.
    pub async fn reach(
        &self,
        instance: &InstanceName,
        target_bytes: Bytes,
        report: Report<'_>,
    ) -> Result<Change, MemoryError> {
        let mut from_bytes = None;
        loop {
            let progress = self.progress(instance, target_bytes, from_bytes)?;
            from_bytes = Some(progress.from_bytes);
            report(&progress);
            if progress.pool_bytes == target_bytes {
                let Progress { from_bytes, target_bytes, pool_bytes, .. } = progress;
                return Ok(Change { from_bytes, target_bytes, pool_bytes });
            }
            tokio::time::sleep(WATCH_INTERVAL).await;
            self.observe().await;
        }
    }

    fn progress(
        &self,
        instance: &InstanceName,
        target_bytes: Bytes,
        from_bytes: Option<Bytes>,
    ) -> Result<Progress, MemoryError> {
        let state = self.lock();
        let member = state.members.get(instance)?;
        if member.mode != (Mode::Pinned { target_bytes }) {
            return Err(MemoryError::Unable {
                instance: instance.clone(),
                action: "reach this size",
                reason: "somebody has set another one meanwhile".to_owned(),
                remedy: "ask for the status",
            });
        }
        let observation = member.observation.as_ref();
        let pool_bytes = observation.map_or(0, |observation| observation.pool_bytes);
        let waiting = state.decisions.last_of(instance).and_then(|last| match &last.outcome {
            Outcome::Postponed => Some(match state.members.unknown() {
                Some(name) => format!("the server {name} has not told yet what it has"),
                None => "the memory of others has not come back yet".to_owned(),
            }),
            Outcome::Noted => Some(last.why.clone()),
            Outcome::Failed { reason } => Some(reason.clone()),
            Outcome::Told => None,
        });
        let blocked_by = member.failure.clone().or_else(|| observation?.blocked_by.clone()).or(waiting);
        Ok(Progress { from_bytes: from_bytes.unwrap_or(pool_bytes), target_bytes, pool_bytes, blocked_by })
    }
}

/// Refuses to grow to what a cgroup above the server does not allow. To shrink is always right.
fn check_limits(observation: &Observation, target_bytes: Bytes) -> Result<(), MemoryError> {
    let most = |limit: &BindingLimit| limit.bound_bytes() - arbiter::group_reserve_bytes(limit.bound_bytes());
    let tightest = observation.limits.iter().min_by_key(|limit| limit.bound_bytes());
    match tightest {
        Some(limit) if target_bytes > observation.committed_bytes() && target_bytes > most(limit) => {
            Err(MemoryError::AboveLimit {
                instance: observation.instance.clone(),
                target_bytes,
                cgroup: limit.cgroup.clone(),
                limit_bytes: limit.bound_bytes(),
                most_bytes: most(limit),
            })
        }
        _ => Ok(()),
    }
}

impl super::State {
    /// Whether a size can be given at all: what the others cannot give up counts against the budget.
    fn admit(&self, instance: &InstanceName, target_bytes: Bytes) -> Result<Observation, MemoryError> {
        let member = self.members.get(instance)?;
        let Some(observation) = &member.observation else {
            return Err(MemoryError::Statement {
                instance: instance.clone(),
                action: "take this size",
                reason: member.failure.clone().unwrap_or_else(|| "it has not answered yet".to_owned()),
            });
        };
        if !observation.answered {
            let reason = member.failure.clone().unwrap_or_else(|| "it does not answer".to_owned());
            return Err(MemoryError::Statement { instance: instance.clone(), action: "take this size", reason });
        }
        let own = self.policy.instances.get(instance).cloned().unwrap_or_default();
        let ceiling_bytes = own.ceiling_bytes.unwrap_or(Bytes::MAX).min(observation.ceiling_bytes);
        let floor_bytes = own.floor_bytes.max(observation.floor_bytes).min(ceiling_bytes);
        if target_bytes < floor_bytes {
            return Err(MemoryError::BelowFloor { instance: instance.clone(), target_bytes, floor_bytes });
        }
        // What the server would make of it: above a ceiling of odd size it would never be allowed to come there.
        let rounded_bytes = observation.rounded(target_bytes);
        if target_bytes.max(rounded_bytes) > ceiling_bytes {
            let target_bytes = target_bytes.max(rounded_bytes);
            return Err(MemoryError::AboveCeiling { instance: instance.clone(), target_bytes, ceiling_bytes });
        }
        let target_bytes = rounded_bytes;
        check_limits(observation, target_bytes)?;
        let others_least_bytes = self.others_least_bytes(instance);
        let budget_bytes = self.policy.budget_bytes;
        if target_bytes > observation.committed_bytes()
            && others_least_bytes.saturating_add(target_bytes) > budget_bytes
        {
            return Err(MemoryError::OverBudget {
                instance: instance.clone(),
                target_bytes,
                others_bytes: others_least_bytes,
                budget_bytes,
            });
        }
        Ok(observation.clone())
    }

    /// What the other servers keep in any case: an automatic one its floor, another what it has.
    fn others_least_bytes(&self, instance: &InstanceName) -> Bytes {
        let least = |name: &InstanceName, observation: &Observation, mode: Mode| match mode {
            Mode::Automatic if observation.answered => {
                let own_bytes = self.policy.instances.get(name).map_or(0, |policy| policy.floor_bytes);
                own_bytes.max(observation.floor_bytes).min(observation.committed_bytes())
            }
            _ => observation.committed_bytes(),
        };
        let others = self.members.iter().filter(|(name, _)| *name != instance);
        others
            .filter_map(|(name, member)| Some(least(name, member.observation.as_ref()?, member.mode)))
            .fold(0, Bytes::saturating_add)
    }
}
