//! How much each instance gets: pure, without a clock and without I/O.
//!
//! ```text
//!  1 range     what was set by hand; floors and ceilings
//!  2 budget    the targets together fit into the budget                       } give, at once:
//!  3 places    the host and every cgroup with a limit keep their reserve      } the coldest first, never below a floor
//!  4 wishes    growths of 1, where there is room                              } get: only what is really there,
//!  5 need      growths by measured gain; else a trade with who loses less     } never where memory is short
//! ```
//!
//! Memory that a pool has not given back yet is counted as its own, so that what one gives another gets in a later
//! round only. A pool that nobody needs anything from keeps what it has. Why it is so:
//! docs/decisions/0009-memory-arbiter.md.

mod curve;
mod giving;
mod growth;
mod memory;
mod place;
mod policy;
mod reason;
mod seat;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::time::Duration;

use crate::{Bytes, HostPressure, Observation};

pub use memory::Memory;
pub use policy::{InstancePolicy, Pace, Policy};
pub use reason::{Cause, Decision, Reason};

use growth::Rooms;
use place::Place;
pub(crate) use place::group_reserve_bytes;
use seat::Seat;

const MIB: Bytes = 1 << 20;

/// Decides once. `elapsed` is the time since the call before; of each instance there is one observation at most.
///
/// Shrinks come before growths, then what cannot be done, each in the order of names. Where nothing is to be done
/// nothing is returned. What cannot be done is said once as long as it lasts.
pub fn decide(
    policy: &Policy,
    pressure: &HostPressure,
    observations: &[Observation],
    elapsed: Duration,
    memory: &mut Memory,
) -> Vec<Decision> {
    let mut seen: Vec<&Observation> = observations.iter().collect();
    seen.sort_by(|one, other| one.instance.cmp(&other.instance));
    seen.dedup_by(|one, other| one.instance == other.instance);
    memory.begin(&seen, elapsed, &policy.pace);

    let budget_bytes = budget_bytes(policy, pressure);
    let mut seats: Vec<Seat<'_>> = seen.into_iter().map(|seen| Seat::new(seen, policy, memory)).collect();
    let mut places = place::places(policy, pressure, &seats, memory);
    keep_to_budget(budget_bytes, &mut seats, memory);
    for place in &places {
        relieve(place, &mut seats, memory);
    }
    let mut rooms = Rooms { budget_bytes, places: &mut places, pace: &policy.pace };
    rooms.fulfil_wishes(&mut seats);
    rooms.follow_need(&mut seats, memory);

    say_silence(&mut seats);
    let mut decisions: Vec<Decision> = seats.into_iter().filter_map(Seat::decision).collect();
    memory.end(&mut decisions);
    decisions.sort_by_key(|decision| match decision.to_bytes.cmp(&decision.from_bytes) {
        Ordering::Less => 0,
        Ordering::Greater => 1,
        Ordering::Equal => 2,
    });
    decisions
}

/// What all pools together may have: what the policy says, and no more than the host has beyond its reserve.
pub fn budget_bytes(policy: &Policy, pressure: &HostPressure) -> Bytes {
    match pressure.total_bytes {
        0 => policy.budget_bytes,
        total_bytes => policy.budget_bytes.min(total_bytes - place::host_reserve_bytes(policy, pressure)),
    }
}

fn keep_to_budget(budget_bytes: Bytes, seats: &mut [Seat<'_>], memory: &Memory) {
    let targets_bytes = seats.iter().fold(0, |sum: Bytes, seat| sum.saturating_add(seat.wanted_bytes()));
    if targets_bytes > budget_bytes {
        let all: Vec<usize> = (0..seats.len()).collect();
        let cause = Cause::Budget { targets_bytes, budget_bytes };
        giving::take(seats, &all, targets_bytes - budget_bytes, &cause, memory);
    }
}

/// Takes what a place wants, beyond what was taken in this round already.
fn relieve(place: &Place, seats: &mut [Seat<'_>], memory: &Memory) {
    let Some((want_bytes, cause)) = &place.want else {
        return;
    };
    for at in &place.members {
        // What was promised and is not used yet is not memory that comes back.
        let promised_bytes = seats[*at].promised_bytes();
        if seats[*at].is_movable {
            seats[*at].give(promised_bytes, Reason::Pressed { cause: cause.clone() });
        }
    }
    let before_bytes = |seat: &Seat<'_>| seat.seen.target_bytes.min(seat.seen.pool_bytes);
    let given_bytes = place.sum(seats, |seat| before_bytes(seat).saturating_sub(seat.to_bytes));
    if given_bytes < *want_bytes {
        giving::take(seats, &place.members, want_bytes - given_bytes, cause, memory);
    }
}

fn say_silence(seats: &mut [Seat<'_>]) {
    for seat in seats.iter_mut().filter(|seat| !seat.seen.answered) {
        seat.reason = Some(Reason::Silent { counted_bytes: seat.committed_bytes() });
    }
}
