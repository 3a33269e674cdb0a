//! One instance while a round is decided.

use crate::{Bytes, Observation};

use super::curve::{self, Layer};
use super::reason::{Decision, Reason};
use super::state::ArbiterState;
use super::{InstancePolicy, Policy};

/// One instance while a round is decided.
pub(super) struct Allocation<'a> {
    pub(super) seen: &'a Observation,
    /// Finite and more than 0.
    pub(super) weight: f64,
    pub(super) floor_bytes: Bytes,
    pub(super) ceiling_bytes: Bytes,
    /// What it must get, whatever its need: set by hand, or its floor.
    pub(super) wish: Option<(Bytes, Reason)>,
    /// False for one that was set by hand or does not answer.
    pub(super) is_movable: bool,
    /// Its target as decided so far.
    pub(super) to_bytes: Bytes,
    pub(super) reason: Option<Reason>,
    /// Memory that it is about to give back by an earlier decision.
    pub(super) coming_bytes: Bytes,
}

impl<'a> Allocation<'a> {
    pub(super) fn new(seen: &'a Observation, policy: &Policy, state: &ArbiterState) -> Allocation<'a> {
        let usual = InstancePolicy::default();
        let own = policy.instances.get(&seen.instance).unwrap_or(&usual);
        let floor_bytes = own.floor_bytes.max(seen.floor_bytes).min(seen.ceiling_bytes);
        let mut allocation = Allocation {
            seen,
            weight: if own.weight.is_finite() && own.weight > 0.0 { own.weight } else { usual.weight },
            floor_bytes,
            ceiling_bytes: seen.ceiling_bytes,
            wish: None,
            is_movable: seen.answered && own.pinned_bytes.is_none(),
            to_bytes: seen.target_bytes,
            reason: None,
            coming_bytes: state.coming_bytes(seen),
        };
        if let Some(ceiling_bytes) = own.ceiling_bytes {
            allocation.ceiling_bytes = allocation.possible(ceiling_bytes);
        }
        if seen.answered {
            allocation.keep_to_range(own.pinned_bytes);
        }
        allocation
    }

    /// Sets what is set by hand and what lies outside the instance's range; growths are left as a wish.
    fn keep_to_range(&mut self, pinned_bytes: Option<Bytes>) {
        let target_bytes = self.seen.target_bytes;
        let (wanted_bytes, reason) = match pinned_bytes {
            Some(pinned_bytes) => {
                let wanted_bytes = pinned_bytes.clamp(self.floor_bytes, self.ceiling_bytes);
                // The server may have rounded it up.
                if wanted_bytes.abs_diff(target_bytes) < self.seen.granule_bytes {
                    return;
                }
                let wanted_bytes = self.possible(wanted_bytes);
                (wanted_bytes, Reason::Pinned { target_bytes: wanted_bytes })
            }
            None => {
                let (floor_bytes, ceiling_bytes) = (self.floor_bytes, self.ceiling_bytes);
                (target_bytes.clamp(floor_bytes, ceiling_bytes), Reason::OutOfRange { floor_bytes, ceiling_bytes })
            }
        };
        if wanted_bytes < target_bytes {
            (self.to_bytes, self.reason) = (wanted_bytes, Some(reason));
        } else if wanted_bytes > target_bytes {
            self.wish = Some((wanted_bytes, reason));
        }
    }

    /// The largest target that the instance may have up to `bytes`; its floor, when that is more.
    pub(super) fn possible(&self, bytes: Bytes) -> Bytes {
        if bytes >= self.ceiling_bytes {
            return self.ceiling_bytes;
        }
        let granule_bytes = self.seen.granule_bytes.max(1);
        (bytes - bytes % granule_bytes).max(self.floor_bytes)
    }

    /// What it shall have in the end, as decided so far.
    pub(super) fn wanted_bytes(&self) -> Bytes {
        self.wish.as_ref().map_or(self.to_bytes, |(bytes, _)| *bytes)
    }

    /// What may be used until the next round: memory that has not come back is still used.
    pub(super) fn committed_bytes(&self) -> Bytes {
        self.seen.pool_bytes.max(self.to_bytes)
    }

    /// Memory that was promised to it and that it has not taken yet.
    pub(super) fn promised_bytes(&self) -> Bytes {
        self.to_bytes.saturating_sub(self.seen.pool_bytes)
    }

    /// What it will still take of the memory that is available now: what was promised, and what of its pool nobody has
    /// touched yet, where that is known.
    pub(super) fn untouched_bytes(&self) -> Bytes {
        let pool_bytes = self.seen.pool_bytes;
        self.to_bytes.saturating_sub(self.seen.touched_bytes.map_or(pool_bytes, |bytes| bytes.min(pool_bytes)))
    }

    /// What can be taken from it, coldest first; the losses are weighted.
    pub(super) fn layers(&self, state: &ArbiterState) -> Vec<Layer> {
        let lessons = state.lessons(&self.seen.instance);
        let mut layers = curve::layers(self.seen, lessons, self.to_bytes, self.floor_bytes);
        layers.iter_mut().for_each(|layer| layer.loss_per_mib *= self.weight);
        layers
    }

    /// Lowers its target so that at least `bytes` are given where its floor allows; tells how many are.
    pub(super) fn give(&mut self, bytes: Bytes, reason: Reason) -> Bytes {
        if bytes == 0 {
            return 0;
        }
        let to_bytes = self.possible(self.to_bytes.saturating_sub(bytes)).min(self.to_bytes);
        let given_bytes = self.to_bytes - to_bytes;
        if given_bytes > 0 {
            (self.to_bytes, self.reason) = (to_bytes, Some(reason));
        }
        given_bytes
    }

    /// What was decided, or what cannot be; none when all stays as it is.
    pub(super) fn decision(self) -> Option<Decision> {
        let from_bytes = self.seen.target_bytes;
        let instance = self.seen.instance.clone();
        let said = self.reason.map(|reason| Decision { instance, from_bytes, to_bytes: self.to_bytes, reason });
        let says_nothing = |decision: &Decision| {
            let is_refusal = matches!(
                decision.reason,
                Reason::FloorsReached { .. } | Reason::NoRoom { .. } | Reason::Unresponsive { .. }
            );
            !decision.is_change() && !is_refusal
        };
        said.filter(|decision| !says_nothing(decision))
    }
}
