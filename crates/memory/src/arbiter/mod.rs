//! How much each instance gets: pure, without a clock and without I/O.
//!
//! ```text
//!  1 range     what was set by hand; floors and ceilings
//!  2 budget    the targets together fit into the budget                       } give, at once:
//!  3 scopes    the host and every cgroup with a limit keep their reserve      } the coldest first, never below a floor
//!  4 wishes    growths of 1, where there is room                              } get: only what is really there,
//!  5 need      growths by measured gain; else a trade with who loses less     } never where memory is short
//! ```
//!
//! Memory that a pool has not given back yet is counted as its own, so that what one gives another gets in a later
//! round only. A pool that nobody needs anything from keeps what it has. Why it is so:
//! docs/decisions/0009-memory-arbiter.md.

mod allocation;
mod curve;
mod growth;
mod policy;
mod reason;
mod scope;
mod shrink;
mod state;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::time::Duration;

use crate::{Bytes, HostPressure, Observation};

pub use policy::{InstancePolicy, Pace, Policy};
pub use reason::{Cause, Decision, Reason};
pub use state::ArbiterState;

use allocation::Allocation;
use growth::Growth;
use scope::MemoryScope;
pub(crate) use scope::{group_reserve_bytes, is_short};

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
    state: &mut ArbiterState,
) -> Vec<Decision> {
    let mut seen: Vec<&Observation> = observations.iter().collect();
    seen.sort_by(|one, other| one.instance.cmp(&other.instance));
    seen.dedup_by(|one, other| one.instance == other.instance);
    state.begin(&seen, elapsed, &policy.pace);

    let budget_bytes = budget_bytes(policy, pressure);
    let mut allocations: Vec<Allocation<'_>> =
        seen.into_iter().map(|seen| Allocation::new(seen, policy, state)).collect();
    let mut scopes = scope::scopes(policy, pressure, &allocations, state);
    keep_to_budget(budget_bytes, &mut allocations, state);
    for scope in &scopes {
        relieve(scope, &mut allocations, state);
    }
    let mut growth = Growth { budget_bytes, scopes: &mut scopes, pace: &policy.pace };
    growth.fulfil_wishes(&mut allocations);
    growth.follow_need(&mut allocations, state);

    report_unresponsive(&mut allocations);
    let mut decisions: Vec<Decision> = allocations.into_iter().filter_map(Allocation::decision).collect();
    state.end(&mut decisions);
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
        total_bytes => policy.budget_bytes.min(total_bytes - scope::host_reserve_bytes(policy, pressure)),
    }
}

fn keep_to_budget(budget_bytes: Bytes, allocations: &mut [Allocation<'_>], state: &ArbiterState) {
    let targets_bytes =
        allocations.iter().fold(0, |sum: Bytes, allocation| sum.saturating_add(allocation.wanted_bytes()));
    if targets_bytes > budget_bytes {
        let all: Vec<usize> = (0..allocations.len()).collect();
        let cause = Cause::Budget { targets_bytes, budget_bytes };
        shrink::take(allocations, &all, targets_bytes - budget_bytes, &cause, state);
    }
}

/// Takes what a scope wants, beyond what was taken in this round already.
fn relieve(scope: &MemoryScope, allocations: &mut [Allocation<'_>], state: &ArbiterState) {
    let Some((want_bytes, cause)) = &scope.want else {
        return;
    };
    for at in &scope.members {
        // What was promised and is not used yet is not memory that comes back.
        let promised_bytes = allocations[*at].promised_bytes();
        if allocations[*at].is_movable {
            allocations[*at].give(promised_bytes, Reason::Pressed { cause: cause.clone() });
        }
    }
    let before_bytes = |allocation: &Allocation<'_>| allocation.seen.target_bytes.min(allocation.seen.pool_bytes);
    let given_bytes = scope.sum(allocations, |allocation| before_bytes(allocation).saturating_sub(allocation.to_bytes));
    if given_bytes < *want_bytes {
        shrink::take(allocations, &scope.members, want_bytes - given_bytes, cause, state);
    }
}

fn report_unresponsive(allocations: &mut [Allocation<'_>]) {
    for allocation in allocations.iter_mut().filter(|allocation| !allocation.seen.answered) {
        allocation.reason = Some(Reason::Unresponsive { counted_bytes: allocation.committed_bytes() });
    }
}
