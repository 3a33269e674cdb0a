//! Who gets more: from memory that is really there, and from others who lose less by it.

use crate::Bytes;

use super::Pace;
use super::curve::{self, Gain};
use super::memory::Memory;
use super::place::Place;
use super::reason::Reason;
use super::seat::Seat;

/// What limits growth in this round.
pub(super) struct Rooms<'a> {
    pub(super) budget_bytes: Bytes,
    pub(super) places: &'a mut [Place],
    pub(super) pace: &'a Pace,
}

/// Who wants more by need.
struct Taker {
    seat: usize,
    gain: Gain,
    /// Its gain times its weight.
    worth_per_mib: f64,
    /// How much more it should get in one step.
    wanted_bytes: Bytes,
}

/// What another one can give.
struct Offer {
    seat: usize,
    /// The most that it loses by each MiB, times its weight.
    loss_per_mib: f64,
    capacity_bytes: Bytes,
}

impl Rooms<'_> {
    /// Grows what was set by hand or is below its floor, as far as there is room.
    pub(super) fn fulfil_wishes(&mut self, seats: &mut [Seat<'_>]) {
        for at in 0..seats.len() {
            let Some((wanted_bytes, reason)) = seats[at].wish.take() else {
                continue;
            };
            let room_bytes = self.room_bytes(seats, at);
            let highest_bytes = seats[at].to_bytes.saturating_add(room_bytes);
            let to_bytes = seats[at].possible(wanted_bytes.min(highest_bytes));
            // A floor is no reason to take memory that is not there.
            let is_there = self.is_calm(at) && to_bytes <= highest_bytes;
            if is_there && to_bytes > seats[at].to_bytes {
                self.grow(seats, at, to_bytes, reason);
            } else {
                seats[at].reason = Some(Reason::NoRoom { wanted_bytes, room_bytes });
            }
        }
    }

    /// Grows by need from what is free, then lets one that went short take from others.
    pub(super) fn follow_need(&mut self, seats: &mut [Seat<'_>], memory: &Memory) {
        let mut unmet = None;
        for taker in self.takers(seats, memory) {
            let room_bytes = self.room_bytes(seats, taker.seat);
            let seat = &seats[taker.seat];
            let highest_bytes = seat.to_bytes.saturating_add(taker.wanted_bytes.min(room_bytes));
            let to_bytes = seat.possible(highest_bytes);
            let least_bytes = self.pace.least_change_bytes(seat.to_bytes);
            let is_there = to_bytes <= highest_bytes;
            if is_there && to_bytes.saturating_sub(seat.to_bytes) >= least_bytes {
                let reason = Reason::Needed { gain_per_mib: taker.gain.per_mib, room_bytes };
                self.grow(seats, taker.seat, to_bytes, reason);
            } else if room_bytes < taker.wanted_bytes && unmet.is_none() {
                unmet = Some(taker);
            }
        }
        if let Some(taker) = unmet {
            self.trade(seats, &taker, memory);
        }
    }

    /// Who wants more by need and may have it, the one with the highest gain first.
    fn takers(&self, seats: &[Seat<'_>], memory: &Memory) -> Vec<Taker> {
        let step_bytes = self.pace.step_bytes_max(self.budget_bytes);
        let mut takers: Vec<Taker> = seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| seat.is_movable && seat.reason.is_none() && seat.promised_bytes() == 0)
            .filter(|(at, seat)| self.is_calm(*at) && memory.may_grow(&seat.seen.instance, self.pace))
            .filter_map(|(at, seat)| {
                let gain = curve::gain(seat.seen, self.pace)?;
                let possible_bytes = seat.ceiling_bytes.saturating_sub(seat.to_bytes);
                let step_bytes = step_bytes.max(seat.seen.granule_bytes);
                let wanted_bytes = gain.larger_by_bytes.max(self.pace.least_change_bytes(seat.to_bytes));
                let wanted_bytes = wanted_bytes.min(step_bytes).min(possible_bytes);
                let least_bytes = self.pace.least_change_bytes(seat.to_bytes);
                let taker = Taker { seat: at, gain, worth_per_mib: gain.per_mib * seat.weight, wanted_bytes };
                (wanted_bytes >= least_bytes).then_some(taker)
            })
            .collect();
        takers.sort_by(|one, other| other.worth_per_mib.total_cmp(&one.worth_per_mib).then(one.seat.cmp(&other.seat)));
        takers
    }

    /// Shrinks others for a taker. It grows in a later round, when the memory has come back.
    fn trade(&self, seats: &mut [Seat<'_>], taker: &Taker, memory: &Memory) {
        let of_taker: Vec<&Place> = self.places.iter().filter(|place| place.members.contains(&taker.seat)).collect();
        let short: Vec<&Place> = of_taker.into_iter().filter(|place| place.room_bytes < taker.wanted_bytes).collect();
        let coming_bytes = seats.iter().fold(0, |sum: Bytes, seat| sum.saturating_add(seat.coming_bytes));
        let there_bytes = self.room_bytes(seats, taker.seat).saturating_add(coming_bytes);
        let mut need_bytes = taker.wanted_bytes.saturating_sub(there_bytes);
        let mut offers = self.offers(seats, taker, memory);
        offers.retain(|offer| short.iter().all(|place| place.members.contains(&offer.seat)));
        // Less than it may take at once, rounded down, would lie idle, and its owner would take it back.
        let least_bytes = self.pace.least_change_bytes(seats[taker.seat].to_bytes);
        let useful_bytes = least_bytes.saturating_add(seats[taker.seat].seen.granule_bytes);
        if offers.iter().fold(there_bytes, |sum: Bytes, offer| sum.saturating_add(offer.capacity_bytes)) < useful_bytes
        {
            return;
        }
        for offer in offers {
            let least_bytes = self.pace.least_change_bytes(seats[offer.seat].to_bytes);
            let to = seats[taker.seat].seen.instance.clone();
            let reason = Reason::Traded { to, gain_per_mib: taker.worth_per_mib, loss_per_mib: offer.loss_per_mib };
            if need_bytes > 0 {
                let bytes = need_bytes.max(least_bytes).min(offer.capacity_bytes);
                need_bytes = need_bytes.saturating_sub(seats[offer.seat].give(bytes, reason));
            }
        }
    }

    /// Who can give to a taker, the cheapest first.
    fn offers(&self, seats: &[Seat<'_>], taker: &Taker, memory: &Memory) -> Vec<Offer> {
        let price_per_mib = taker.worth_per_mib / self.pace.trade_ratio_min;
        let mut offers: Vec<Offer> = seats
            .iter()
            .enumerate()
            .filter(|(at, seat)| *at != taker.seat && seat.is_movable && seat.reason.is_none())
            .filter(|(_, seat)| seat.promised_bytes() == 0 && memory.may_shrink(&seat.seen.instance, self.pace))
            .filter_map(|(at, seat)| {
                let layers = seat.layers(memory);
                let last = layers.iter().take_while(|layer| layer.loss_per_mib <= price_per_mib).last()?;
                let capacity_bytes = seat.to_bytes.saturating_sub(last.bottom_bytes);
                let is_enough = capacity_bytes >= self.pace.least_change_bytes(seat.to_bytes);
                is_enough.then_some(Offer { seat: at, loss_per_mib: last.loss_per_mib, capacity_bytes })
            })
            .collect();
        offers.sort_by(|one, other| one.loss_per_mib.total_cmp(&other.loss_per_mib).then(one.seat.cmp(&other.seat)));
        offers
    }

    /// Whether memory is short nowhere where an instance is.
    fn is_calm(&self, at: usize) -> bool {
        self.places.iter().all(|place| place.is_calm || !place.members.contains(&at))
    }

    /// How much higher the target of an instance may be: by the budget, and by every place that it is in. Memory that
    /// has not come back is still used, also where it comes from the same instance.
    fn room_bytes(&self, seats: &[Seat<'_>], at: usize) -> Bytes {
        let committed = seats.iter().fold(0, |sum: Bytes, seat| sum.saturating_add(seat.committed_bytes()));
        let of_places = self.places.iter().filter(|place| place.members.contains(&at)).map(|place| place.room_bytes);
        of_places.fold(self.budget_bytes.saturating_sub(committed), Bytes::min)
    }

    fn grow(&mut self, seats: &mut [Seat<'_>], at: usize, to_bytes: Bytes, reason: Reason) {
        let before_bytes = seats[at].committed_bytes();
        (seats[at].to_bytes, seats[at].reason) = (to_bytes, Some(reason));
        let taken_bytes = seats[at].committed_bytes() - before_bytes;
        for place in self.places.iter_mut().filter(|place| place.members.contains(&at)) {
            place.room_bytes = place.room_bytes.saturating_sub(taken_bytes);
        }
    }
}
