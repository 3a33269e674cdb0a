//! The host and its cgroups: where memory may run out, who lives there, and what must be given back.

use crate::{BindingLimit, Bytes, HostPressure};

use super::allocation::Allocation;
use super::reason::Cause;
use super::state::ArbiterState;
use super::{Pace, Policy};

/// Of a cgroup's limit this part is kept free, since the kernel kills or swaps at the limit itself.
const GROUP_RESERVE_PART: Bytes = 20;
/// A little more than the reserve is restored, and growth leaves a little more than that: else both would meet at the
/// border.
const RESERVE_RESTORED: f64 = 1.125;
const RESERVE_FOR_GROWTH: f64 = 1.25;
/// With more than this part of the host's memory available, stalls and swapping on the host come from a cgroup that is
/// short of memory, which a smaller pool elsewhere does not help.
const SHORT_PART: Bytes = 4;
/// Less new swap than this between two rounds is no sign of anything.
const SWAP_NOISE_BYTES: Bytes = 4 << 20;
/// Stalls from which on memory is given back (some tasks, all tasks; shares of time, 0 to 100), and the part of all
/// pools that is given.
const STALL_STEPS: [(f64, f64, Bytes); 3] = [(50.0, 20.0, 4), (25.0, 5.0, 8), (10.0, 2.0, 16)];

/// The host or a cgroup with a limit.
pub(super) struct MemoryScope {
    /// Whose memory counts here.
    pub(super) members: Vec<usize>,
    /// How much its members may grow together.
    pub(super) room_bytes: Bytes,
    /// It has enough memory, and had for a while.
    pub(super) is_calm: bool,
    /// What must be given beyond what comes already.
    pub(super) want: Option<(Bytes, Cause)>,
}

/// The host and every cgroup that has a limit.
pub(super) fn scopes(
    policy: &Policy,
    pressure: &HostPressure,
    allocations: &[Allocation<'_>],
    state: &mut ArbiterState,
) -> Vec<MemoryScope> {
    let groups = groups(pressure, allocations);
    state
        .retain_scopes(|scope| scope.as_ref().is_none_or(|path| groups.iter().any(|(group, _)| group.cgroup == *path)));
    let mut scopes = vec![host(policy, pressure, allocations, state)];
    scopes.extend(groups.into_iter().map(|(limit, members)| group(limit, members, allocations, &policy.pace, state)));
    scopes
}

/// The reserve of the host: what the policy says, but never more than half of the memory.
pub(super) fn host_reserve_bytes(policy: &Policy, pressure: &HostPressure) -> Bytes {
    policy.reserve_bytes.min(pressure.total_bytes / 2)
}

/// Whether so little of the host's memory is available that its stalls and swapping may be for lack of it.
pub(crate) fn is_short(pressure: &HostPressure) -> bool {
    pressure.available_bytes <= pressure.total_bytes / SHORT_PART
}

/// What of a cgroup's limit is kept free.
pub(crate) fn group_reserve_bytes(limit_bytes: Bytes) -> Bytes {
    limit_bytes / GROUP_RESERVE_PART
}

/// Those whose pools count on the host and in cgroups. Huge pages are set aside: they are no available memory, used or
/// not, and no cgroup's.
fn in_ordinary_memory(allocations: &[Allocation<'_>]) -> Vec<usize> {
    (0..allocations.len()).filter(|at| !allocations[*at].seen.huge_pages).collect()
}

/// Each cgroup once, with all who are in it.
fn groups<'a>(pressure: &'a HostPressure, allocations: &[Allocation<'a>]) -> Vec<(&'a BindingLimit, Vec<usize>)> {
    let mut groups: Vec<(&BindingLimit, Vec<usize>)> = Vec::new();
    for at in in_ordinary_memory(allocations) {
        for limit in &allocations[at].seen.limits {
            match groups.iter_mut().find(|(group, _)| group.cgroup == limit.cgroup) {
                Some((known, members)) => {
                    // What one that does not answer knew of it last is old, and would press the others for good.
                    if allocations[at].seen.answered {
                        *known = limit;
                    }
                    if members.last() != Some(&at) {
                        members.push(at);
                    }
                }
                None => groups.push((limit, vec![at])),
            }
        }
    }
    if let Some(limit) = &pressure.limit
        && groups.iter().all(|(group, _)| group.cgroup != limit.cgroup)
    {
        groups.push((limit, in_ordinary_memory(allocations)));
    }
    groups
}

fn host(
    policy: &Policy,
    pressure: &HostPressure,
    allocations: &[Allocation<'_>],
    state: &mut ArbiterState,
) -> MemoryScope {
    let available_bytes = pressure.available_bytes;
    let reserve_bytes = host_reserve_bytes(policy, pressure);
    let members = in_ordinary_memory(allocations);
    let grown_bytes = state.swap_growth_bytes(None, pressure.swap_used_bytes);
    let mut wants = Vec::new();
    if available_bytes < reserve_bytes {
        let want_bytes = scaled(reserve_bytes, RESERVE_RESTORED).saturating_sub(available_bytes);
        wants.push((want_bytes, Cause::LowMemory { available_bytes, reserve_bytes }));
    }
    if is_short(pressure) {
        let some_avg10 = pressure.psi_some_avg10.unwrap_or(0.0);
        let full_avg10 = pressure.psi_full_avg10.unwrap_or(0.0);
        wants.extend(stalled(None, some_avg10, full_avg10, &members, allocations, state));
        wants.extend(swapping(None, pressure.swap_used_bytes, grown_bytes));
    }
    let mut scope = MemoryScope::new(None, members, wants, allocations, &policy.pace, state);
    // Of a host that tells nothing about itself nothing is known that would hinder.
    scope.leave(if pressure.total_bytes == 0 { Bytes::MAX } else { available_bytes }, reserve_bytes, allocations);
    scope
}

fn group(
    limit: &BindingLimit,
    members: Vec<usize>,
    allocations: &[Allocation<'_>],
    pace: &Pace,
    state: &mut ArbiterState,
) -> MemoryScope {
    let (limit_bytes, available_bytes) = (limit.bound_bytes(), limit.available_bytes());
    let reserve_bytes = group_reserve_bytes(limit_bytes);
    let cause = || Cause::NearLimit { cgroup: limit.cgroup.clone(), limit_bytes, available_bytes, reserve_bytes };
    let path = Some(limit.cgroup.as_str());
    let mut wants = Vec::new();
    if available_bytes < reserve_bytes {
        wants.push((scaled(reserve_bytes, RESERVE_RESTORED).saturating_sub(available_bytes), cause()));
    }
    let some_avg10 = limit.psi_some_avg10.unwrap_or(0.0);
    wants.extend(stalled(path, some_avg10, 0.0, &members, allocations, state));
    if let Some(swap_bytes) = limit.swap_bytes {
        let grown_bytes = state.swap_growth_bytes(path, swap_bytes);
        wants.extend(swapping(path, swap_bytes, grown_bytes));
    }
    let mut scope = MemoryScope::new(path, members, wants, allocations, pace, state);
    // The targets themselves must fit, used or not.
    let targets_bytes = scope.sum(allocations, |allocation| allocation.to_bytes);
    let excess_bytes = targets_bytes.saturating_sub(limit_bytes - reserve_bytes);
    if excess_bytes > scope.want.as_ref().map_or(0, |(bytes, _)| *bytes) {
        scope.want = Some((excess_bytes, cause()));
    }
    // What is in swap wants to come back before anything grows.
    scope.leave(available_bytes.saturating_sub(limit.swap_bytes.unwrap_or(0)), reserve_bytes, allocations);
    scope.room_bytes = scope.room_bytes.min((limit_bytes - reserve_bytes).saturating_sub(targets_bytes));
    scope
}

impl MemoryScope {
    fn new(
        path: Option<&str>,
        members: Vec<usize>,
        wants: Vec<(Bytes, Cause)>,
        allocations: &[Allocation<'_>],
        pace: &Pace,
        state: &mut ArbiterState,
    ) -> MemoryScope {
        let is_pressed = !wants.is_empty();
        if is_pressed {
            state.press(path);
        }
        let is_calm = state.is_calm(path, pace) && !is_pressed;
        let mut scope = MemoryScope { members, room_bytes: 0, is_calm, want: None };
        let coming_bytes = scope.sum(allocations, |allocation| allocation.coming_bytes);
        let largest = wants.into_iter().max_by_key(|(bytes, _)| *bytes);
        scope.want = largest
            .filter(|(bytes, _)| *bytes > coming_bytes)
            .map(|(bytes, cause)| ((bytes - coming_bytes).max(pace.change_bytes_min), cause));
        scope
    }

    /// Sets the room: what is available beyond the reserve and beyond what its members will take in any case.
    fn leave(&mut self, available_bytes: Bytes, reserve_bytes: Bytes, allocations: &[Allocation<'_>]) {
        if self.is_calm {
            let untouched_bytes = self.sum(allocations, |allocation| allocation.untouched_bytes());
            let kept_bytes = scaled(reserve_bytes, RESERVE_FOR_GROWTH).saturating_add(untouched_bytes);
            self.room_bytes = available_bytes.saturating_sub(kept_bytes);
        }
    }

    /// Over all members.
    pub(super) fn sum(&self, allocations: &[Allocation<'_>], of: impl Fn(&Allocation<'_>) -> Bytes) -> Bytes {
        self.members.iter().fold(0, |sum: Bytes, at| sum.saturating_add(of(&allocations[*at])))
    }
}

/// What stalls want: a part of the pools above their floors, larger the more tasks wait.
fn stalled(
    path: Option<&str>,
    some_avg10: f64,
    full_avg10: f64,
    members: &[usize],
    allocations: &[Allocation<'_>],
    state: &mut ArbiterState,
) -> Option<(Bytes, Cause)> {
    let (_, _, part) = STALL_STEPS.iter().find(|(some, full, _)| some_avg10 >= *some || full_avg10 >= *full)?;
    let possible_bytes = members
        .iter()
        .map(|at| &allocations[*at])
        .filter(|allocation| allocation.is_movable)
        .fold(0, |sum: Bytes, allocation| {
            sum.saturating_add(allocation.to_bytes.saturating_sub(allocation.floor_bytes))
        });
    let want_bytes = if state.may_step(path) { possible_bytes / part } else { 0 };
    Some((want_bytes, Cause::Stalled { cgroup: path.map(str::to_owned), some_avg10, full_avg10 }))
}

/// What swapping wants: as much as went out.
fn swapping(path: Option<&str>, swap_bytes: Bytes, grown_bytes: Bytes) -> Option<(Bytes, Cause)> {
    let cause = Cause::Swapping { cgroup: path.map(str::to_owned), swap_bytes, grown_bytes };
    (grown_bytes > SWAP_NOISE_BYTES).then_some((grown_bytes, cause))
}

fn scaled(bytes: Bytes, factor: f64) -> Bytes {
    (bytes as f64 * factor) as Bytes
}
