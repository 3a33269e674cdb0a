//! What the arbiter keeps from one call to the next.

use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};
use std::time::Duration;

use crate::{Bytes, InstanceName, Observation};

use super::Pace;
use super::curve::{self, Lesson};
use super::reason::{Cause, Decision, Reason};

/// A pool that has not come nearer to its target for so long is taken as not coming: others give instead.
const STUCK_AFTER: Duration = Duration::from_secs(10);
/// What cannot be done is said again when it had not to be said for so long.
const SAID_FORGOTTEN: Duration = Duration::from_secs(60);
/// Stalls last in their averages: a step that they ask for is followed by the next one after this time only.
const STALL_STEP_INTERVAL: Duration = Duration::from_secs(5);

/// What the arbiter keeps from one call to the next. A new one knows nothing and is as good; it only tries some things
/// again.
#[derive(Debug, Clone, Default)]
pub struct ArbiterState {
    /// Time since the first call.
    clock: Duration,
    instances: BTreeMap<InstanceName, Past>,
    /// The host (none) and the cgroups.
    scopes: BTreeMap<Option<String>, ScopePast>,
}

#[derive(Debug, Clone, Default)]
struct Past {
    target_bytes: Bytes,
    pool_bytes: Bytes,
    /// When the pool came nearer to its target last.
    moved: Duration,
    shrunk: Option<Duration>,
    grown: Option<Duration>,
    lessons: Vec<Lesson>,
    /// What was said that cannot be done, and when it last could not. One entry for each kind of reason and cause at
    /// most.
    said: Vec<(Kind, Duration)>,
}

type Kind = (Discriminant<Reason>, Option<Discriminant<Cause>>);

#[derive(Debug, Clone, Default)]
struct ScopePast {
    swap_bytes: Option<Bytes>,
    pressed: Option<Duration>,
    stepped: Option<Duration>,
}

impl ArbiterState {
    /// Begins a round: takes in what is seen, forgets who is not there any more.
    pub(super) fn begin(&mut self, observations: &[&Observation], elapsed: Duration, pace: &Pace) {
        self.clock = self.clock.saturating_add(elapsed);
        self.instances.retain(|name, _| observations.iter().any(|seen| seen.instance == *name));
        for seen in observations.iter().filter(|seen| seen.answered) {
            let past = self.instances.entry(seen.instance.clone()).or_default();
            if past.target_bytes != seen.target_bytes || seen.pool_bytes < past.pool_bytes {
                past.moved = self.clock;
            }
            (past.target_bytes, past.pool_bytes) = (seen.target_bytes, seen.pool_bytes);
            curve::learn(&mut past.lessons, seen, pace);
        }
    }

    /// Forgets scopes where nobody is any more.
    pub(super) fn retain_scopes(&mut self, is_there: impl Fn(&Option<String>) -> bool) {
        self.scopes.retain(|scope, _| is_there(scope));
    }

    /// What was measured of an instance when it was smaller.
    pub(super) fn lessons(&self, instance: &InstanceName) -> &[Lesson] {
        self.instances.get(instance).map_or(&[], |past| &past.lessons)
    }

    /// Memory that an instance is about to give back.
    pub(super) fn coming_bytes(&self, seen: &Observation) -> Bytes {
        let stuck = self.instances.get(&seen.instance).is_none_or(|past| self.clock - past.moved >= STUCK_AFTER);
        if stuck || !seen.answered { 0 } else { seen.pool_bytes.saturating_sub(seen.target_bytes) }
    }

    /// Whether an instance may be grown by need now.
    pub(super) fn may_grow(&self, instance: &InstanceName, pace: &Pace) -> bool {
        let past = self.instances.get(instance);
        self.is_past(past.and_then(|past| past.grown), pace.settle)
            && self.is_past(past.and_then(|past| past.shrunk), pace.reversal)
    }

    /// Whether an instance may be shrunk by the need of another one now.
    pub(super) fn may_shrink(&self, instance: &InstanceName, pace: &Pace) -> bool {
        let past = self.instances.get(instance);
        self.is_past(past.and_then(|past| past.shrunk), pace.settle)
            && self.is_past(past.and_then(|past| past.grown), pace.reversal)
    }

    fn is_past(&self, moment: Option<Duration>, wait: Duration) -> bool {
        moment.is_none_or(|moment| self.clock - moment >= wait)
    }

    /// Takes in how much of a scope is in swap, and tells how much more that is than before.
    pub(super) fn swap_growth_bytes(&mut self, scope: Option<&str>, swap_bytes: Bytes) -> Bytes {
        let before = self.scope(scope).swap_bytes.replace(swap_bytes);
        before.map_or(0, |before| swap_bytes.saturating_sub(before))
    }

    /// Whether stalls may ask for another step.
    pub(super) fn may_step(&mut self, scope: Option<&str>) -> bool {
        let clock = self.clock;
        let scope = self.scope(scope);
        let may = scope.stepped.is_none_or(|stepped| clock - stepped >= STALL_STEP_INTERVAL);
        if may {
            scope.stepped = Some(clock);
        }
        may
    }

    /// Notes that a scope wants memory back now.
    pub(super) fn press(&mut self, scope: Option<&str>) {
        let clock = self.clock;
        self.scope(scope).pressed = Some(clock);
    }

    /// Whether a scope has not wanted memory back for a while.
    pub(super) fn is_calm(&mut self, scope: Option<&str>, pace: &Pace) -> bool {
        let pressed = self.scope(scope).pressed;
        self.is_past(pressed, pace.reversal)
    }

    fn scope(&mut self, scope: Option<&str>) -> &mut ScopePast {
        self.scopes.entry(scope.map(str::to_owned)).or_default()
    }

    /// Ends a round: notes what is done, and leaves out what was said before.
    pub(super) fn end(&mut self, decisions: &mut Vec<Decision>) {
        decisions.retain(|decision| self.is_news(decision));
    }

    fn is_news(&mut self, decision: &Decision) -> bool {
        let clock = self.clock;
        let past = self.instances.entry(decision.instance.clone()).or_default();
        if decision.is_change() {
            let shrinks = decision.to_bytes < decision.from_bytes;
            *(if shrinks { &mut past.shrunk } else { &mut past.grown }) = Some(clock);
            return true;
        }
        past.said.retain(|(_, last)| clock - *last < SAID_FORGOTTEN);
        let kind = kind(&decision.reason);
        match past.said.iter_mut().find(|(said, _)| *said == kind) {
            Some((_, last)) => *last = clock,
            None => {
                past.said.push((kind, clock));
                return true;
            }
        }
        false
    }
}

fn kind(reason: &Reason) -> Kind {
    let cause = match reason {
        Reason::Pressed { cause } | Reason::FloorsReached { cause, .. } => Some(discriminant(cause)),
        _ => None,
    };
    (discriminant(reason), cause)
}
