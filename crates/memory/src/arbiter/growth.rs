//! Who gets more: from memory that is really there, and from others who lose less by it.

use crate::Bytes;

use super::Pace;
use super::allocation::Allocation;
use super::curve::{self, Gain};
use super::reason::Reason;
use super::scope::MemoryScope;
use super::state::ArbiterState;

/// What limits growth in this round.
pub(super) struct Growth<'a> {
    pub(super) budget_bytes: Bytes,
    pub(super) scopes: &'a mut [MemoryScope],
    pub(super) pace: &'a Pace,
}

/// Who wants more by need.
struct Taker {
    allocation: usize,
    gain: Gain,
    /// Its gain times its weight.
    worth_per_mib: f64,
    /// How much more it should get in one step.
    wanted_bytes: Bytes,
}

/// What another one can give.
struct Offer {
    allocation: usize,
    /// The most that it loses by each MiB, times its weight.
    loss_per_mib: f64,
    capacity_bytes: Bytes,
}

impl Growth<'_> {
    /// Grows what was set by hand or is below its floor, as far as there is room.
    pub(super) fn fulfil_wishes(&mut self, allocations: &mut [Allocation<'_>]) {
        for at in 0..allocations.len() {
            let Some((wanted_bytes, reason)) = allocations[at].wish.take() else {
                continue;
            };
            let room_bytes = self.room_bytes(allocations, at);
            let highest_bytes = allocations[at].to_bytes.saturating_add(room_bytes);
            let to_bytes = allocations[at].possible(wanted_bytes.min(highest_bytes));
            // A floor is no reason to take memory that is not there.
            let is_there = self.is_calm(at) && to_bytes <= highest_bytes;
            if is_there && to_bytes > allocations[at].to_bytes {
                self.grow(allocations, at, to_bytes, reason);
            } else {
                allocations[at].reason = Some(Reason::NoRoom { wanted_bytes, room_bytes });
            }
        }
    }

    /// Grows by need from what is free, then lets one that went short take from others.
    pub(super) fn follow_need(&mut self, allocations: &mut [Allocation<'_>], state: &ArbiterState) {
        let mut unmet = None;
        for taker in self.takers(allocations, state) {
            let room_bytes = self.room_bytes(allocations, taker.allocation);
            let allocation = &allocations[taker.allocation];
            let highest_bytes = allocation.to_bytes.saturating_add(taker.wanted_bytes.min(room_bytes));
            let to_bytes = allocation.possible(highest_bytes);
            let least_bytes = self.pace.least_change_bytes(allocation.to_bytes);
            let is_there = to_bytes <= highest_bytes;
            if is_there && to_bytes.saturating_sub(allocation.to_bytes) >= least_bytes {
                let reason = Reason::Needed { gain_per_mib: taker.gain.per_mib, room_bytes };
                self.grow(allocations, taker.allocation, to_bytes, reason);
            } else if room_bytes < taker.wanted_bytes && unmet.is_none() {
                unmet = Some(taker);
            }
        }
        if let Some(taker) = unmet {
            self.trade(allocations, &taker, state);
        }
    }

    /// Who wants more by need and may have it, the one with the highest gain first.
    fn takers(&self, allocations: &[Allocation<'_>], state: &ArbiterState) -> Vec<Taker> {
        let step_bytes = self.pace.step_bytes_max(self.budget_bytes);
        let mut takers: Vec<Taker> = allocations
            .iter()
            .enumerate()
            .filter(|(_, allocation)| {
                allocation.is_movable && allocation.reason.is_none() && allocation.promised_bytes() == 0
            })
            .filter(|(at, allocation)| self.is_calm(*at) && state.may_grow(&allocation.seen.instance, self.pace))
            .filter_map(|(at, allocation)| {
                let gain = curve::gain(allocation.seen, self.pace)?;
                let possible_bytes = allocation.ceiling_bytes.saturating_sub(allocation.to_bytes);
                let step_bytes = step_bytes.max(allocation.seen.granule_bytes);
                let wanted_bytes = gain.larger_by_bytes.max(self.pace.least_change_bytes(allocation.to_bytes));
                let wanted_bytes = wanted_bytes.min(step_bytes).min(possible_bytes);
                let least_bytes = self.pace.least_change_bytes(allocation.to_bytes);
                let taker =
                    Taker { allocation: at, gain, worth_per_mib: gain.per_mib * allocation.weight, wanted_bytes };
                (wanted_bytes >= least_bytes).then_some(taker)
            })
            .collect();
        takers.sort_by(|one, other| {
            other.worth_per_mib.total_cmp(&one.worth_per_mib).then(one.allocation.cmp(&other.allocation))
        });
        takers
    }

    /// Shrinks others for a taker. It grows in a later round, when the memory has come back.
    fn trade(&self, allocations: &mut [Allocation<'_>], taker: &Taker, state: &ArbiterState) {
        let of_taker: Vec<&MemoryScope> =
            self.scopes.iter().filter(|scope| scope.members.contains(&taker.allocation)).collect();
        let short: Vec<&MemoryScope> =
            of_taker.into_iter().filter(|scope| scope.room_bytes < taker.wanted_bytes).collect();
        let coming_bytes =
            allocations.iter().fold(0, |sum: Bytes, allocation| sum.saturating_add(allocation.coming_bytes));
        let there_bytes = self.room_bytes(allocations, taker.allocation).saturating_add(coming_bytes);
        let mut need_bytes = taker.wanted_bytes.saturating_sub(there_bytes);
        let mut offers = self.offers(allocations, taker, state);
        offers.retain(|offer| short.iter().all(|scope| scope.members.contains(&offer.allocation)));
        // Less than it may take at once, rounded down, would lie idle, and its owner would take it back.
        let least_bytes = self.pace.least_change_bytes(allocations[taker.allocation].to_bytes);
        let useful_bytes = least_bytes.saturating_add(allocations[taker.allocation].seen.granule_bytes);
        if offers.iter().fold(there_bytes, |sum: Bytes, offer| sum.saturating_add(offer.capacity_bytes)) < useful_bytes
        {
            return;
        }
        for offer in offers {
            let least_bytes = self.pace.least_change_bytes(allocations[offer.allocation].to_bytes);
            let to = allocations[taker.allocation].seen.instance.clone();
            let reason = Reason::Traded { to, gain_per_mib: taker.worth_per_mib, loss_per_mib: offer.loss_per_mib };
            if need_bytes > 0 {
                let bytes = need_bytes.max(least_bytes).min(offer.capacity_bytes);
                need_bytes = need_bytes.saturating_sub(allocations[offer.allocation].give(bytes, reason));
            }
        }
    }

    /// Who can give to a taker, the cheapest first.
    fn offers(&self, allocations: &[Allocation<'_>], taker: &Taker, state: &ArbiterState) -> Vec<Offer> {
        let price_per_mib = taker.worth_per_mib / self.pace.trade_ratio_min;
        let mut offers: Vec<Offer> = allocations
            .iter()
            .enumerate()
            .filter(|(at, allocation)| *at != taker.allocation && allocation.is_movable && allocation.reason.is_none())
            .filter(|(_, allocation)| {
                allocation.promised_bytes() == 0 && state.may_shrink(&allocation.seen.instance, self.pace)
            })
            .filter_map(|(at, allocation)| {
                let layers = allocation.layers(state);
                let last = layers.iter().take_while(|layer| layer.loss_per_mib <= price_per_mib).last()?;
                let capacity_bytes = allocation.to_bytes.saturating_sub(last.bottom_bytes);
                let is_enough = capacity_bytes >= self.pace.least_change_bytes(allocation.to_bytes);
                is_enough.then_some(Offer { allocation: at, loss_per_mib: last.loss_per_mib, capacity_bytes })
            })
            .collect();
        offers.sort_by(|one, other| {
            one.loss_per_mib.total_cmp(&other.loss_per_mib).then(one.allocation.cmp(&other.allocation))
        });
        offers
    }

    /// Whether memory is short nowhere where an instance is.
    fn is_calm(&self, at: usize) -> bool {
        self.scopes.iter().all(|scope| scope.is_calm || !scope.members.contains(&at))
    }

    /// How much higher the target of an instance may be: by the budget, and by every scope that it is in. Memory that
    /// has not come back is still used, also where it comes from the same instance.
    fn room_bytes(&self, allocations: &[Allocation<'_>], at: usize) -> Bytes {
        let committed =
            allocations.iter().fold(0, |sum: Bytes, allocation| sum.saturating_add(allocation.committed_bytes()));
        let of_places = self.scopes.iter().filter(|scope| scope.members.contains(&at)).map(|scope| scope.room_bytes);
        of_places.fold(self.budget_bytes.saturating_sub(committed), Bytes::min)
    }

    fn grow(&mut self, allocations: &mut [Allocation<'_>], at: usize, to_bytes: Bytes, reason: Reason) {
        let before_bytes = allocations[at].committed_bytes();
        (allocations[at].to_bytes, allocations[at].reason) = (to_bytes, Some(reason));
        let taken_bytes = allocations[at].committed_bytes() - before_bytes;
        for scope in self.scopes.iter_mut().filter(|scope| scope.members.contains(&at)) {
            scope.room_bytes = scope.room_bytes.saturating_sub(taken_bytes);
        }
    }
}
