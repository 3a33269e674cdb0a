//! The host and its cgroups: where memory may run out, who lives there, and what must be given back.

use crate::{BindingLimit, Bytes, HostPressure};

use super::memory::Memory;
use super::reason::Cause;
use super::seat::Seat;
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
pub(super) struct Place {
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
pub(super) fn places(policy: &Policy, pressure: &HostPressure, seats: &[Seat<'_>], memory: &mut Memory) -> Vec<Place> {
    let groups = groups(pressure, seats);
    memory
        .retain_places(|place| place.as_ref().is_none_or(|path| groups.iter().any(|(group, _)| group.cgroup == *path)));
    let mut places = vec![host(policy, pressure, seats, memory)];
    places.extend(groups.into_iter().map(|(limit, members)| group(limit, members, seats, &policy.pace, memory)));
    places
}

/// The reserve of the host: what the policy says, but never more than half of the memory.
pub(super) fn host_reserve_bytes(policy: &Policy, pressure: &HostPressure) -> Bytes {
    policy.reserve_bytes.min(pressure.total_bytes / 2)
}

/// What of a cgroup's limit is kept free.
pub(crate) fn group_reserve_bytes(limit_bytes: Bytes) -> Bytes {
    limit_bytes / GROUP_RESERVE_PART
}

/// Those whose pools count on the host and in cgroups. Huge pages are set aside: they are no available memory, used or
/// not, and no cgroup's.
fn in_ordinary_memory(seats: &[Seat<'_>]) -> Vec<usize> {
    (0..seats.len()).filter(|at| !seats[*at].seen.huge_pages).collect()
}

/// Each cgroup once, with all who are in it.
fn groups<'a>(pressure: &'a HostPressure, seats: &[Seat<'a>]) -> Vec<(&'a BindingLimit, Vec<usize>)> {
    let mut groups: Vec<(&BindingLimit, Vec<usize>)> = Vec::new();
    for at in in_ordinary_memory(seats) {
        for limit in &seats[at].seen.limits {
            match groups.iter_mut().find(|(group, _)| group.cgroup == limit.cgroup) {
                Some((_, members)) if members.last() != Some(&at) => members.push(at),
                Some(_) => {}
                None => groups.push((limit, vec![at])),
            }
        }
    }
    if let Some(limit) = &pressure.limit
        && groups.iter().all(|(group, _)| group.cgroup != limit.cgroup)
    {
        groups.push((limit, in_ordinary_memory(seats)));
    }
    groups
}

fn host(policy: &Policy, pressure: &HostPressure, seats: &[Seat<'_>], memory: &mut Memory) -> Place {
    let available_bytes = pressure.available_bytes;
    let reserve_bytes = host_reserve_bytes(policy, pressure);
    let members = in_ordinary_memory(seats);
    let grown_bytes = memory.swap_growth_bytes(None, pressure.swap_used_bytes);
    let mut wants = Vec::new();
    if available_bytes < reserve_bytes {
        let want_bytes = scaled(reserve_bytes, RESERVE_RESTORED).saturating_sub(available_bytes);
        wants.push((want_bytes, Cause::LowMemory { available_bytes, reserve_bytes }));
    }
    if available_bytes <= pressure.total_bytes / SHORT_PART {
        let some_avg10 = pressure.psi_some_avg10.unwrap_or(0.0);
        let full_avg10 = pressure.psi_full_avg10.unwrap_or(0.0);
        wants.extend(stalled(None, some_avg10, full_avg10, &members, seats, memory));
        wants.extend(swapping(None, pressure.swap_used_bytes, grown_bytes));
    }
    let mut place = Place::new(None, members, wants, seats, &policy.pace, memory);
    // Of a host that tells nothing about itself nothing is known that would hinder.
    place.leave(if pressure.total_bytes == 0 { Bytes::MAX } else { available_bytes }, reserve_bytes, seats);
    place
}

fn group(limit: &BindingLimit, members: Vec<usize>, seats: &[Seat<'_>], pace: &Pace, memory: &mut Memory) -> Place {
    let (limit_bytes, available_bytes) = (limit.bound_bytes(), limit.available_bytes());
    let reserve_bytes = group_reserve_bytes(limit_bytes);
    let cause = || Cause::NearLimit { cgroup: limit.cgroup.clone(), limit_bytes, available_bytes, reserve_bytes };
    let path = Some(limit.cgroup.as_str());
    let mut wants = Vec::new();
    if available_bytes < reserve_bytes {
        wants.push((scaled(reserve_bytes, RESERVE_RESTORED).saturating_sub(available_bytes), cause()));
    }
    let some_avg10 = limit.psi_some_avg10.unwrap_or(0.0);
    wants.extend(stalled(path, some_avg10, 0.0, &members, seats, memory));
    if let Some(swap_bytes) = limit.swap_bytes {
        let grown_bytes = memory.swap_growth_bytes(path, swap_bytes);
        wants.extend(swapping(path, swap_bytes, grown_bytes));
    }
    let mut place = Place::new(path, members, wants, seats, pace, memory);
    // The targets themselves must fit, used or not.
    let targets_bytes = place.sum(seats, |seat| seat.to_bytes);
    let excess_bytes = targets_bytes.saturating_sub(limit_bytes - reserve_bytes);
    if excess_bytes > place.want.as_ref().map_or(0, |(bytes, _)| *bytes) {
        place.want = Some((excess_bytes, cause()));
    }
    // What is in swap wants to come back before anything grows.
    place.leave(available_bytes.saturating_sub(limit.swap_bytes.unwrap_or(0)), reserve_bytes, seats);
    place.room_bytes = place.room_bytes.min((limit_bytes - reserve_bytes).saturating_sub(targets_bytes));
    place
}

impl Place {
    fn new(
        path: Option<&str>,
        members: Vec<usize>,
        wants: Vec<(Bytes, Cause)>,
        seats: &[Seat<'_>],
        pace: &Pace,
        memory: &mut Memory,
    ) -> Place {
        let is_pressed = !wants.is_empty();
        if is_pressed {
            memory.press(path);
        }
        let is_calm = memory.is_calm(path, pace) && !is_pressed;
        let mut place = Place { members, room_bytes: 0, is_calm, want: None };
        let coming_bytes = place.sum(seats, |seat| seat.coming_bytes);
        let largest = wants.into_iter().max_by_key(|(bytes, _)| *bytes);
        place.want = largest
            .filter(|(bytes, _)| *bytes > coming_bytes)
            .map(|(bytes, cause)| ((bytes - coming_bytes).max(pace.change_bytes_min), cause));
        place
    }

    /// Sets the room: what is available beyond the reserve and beyond what was promised.
    fn leave(&mut self, available_bytes: Bytes, reserve_bytes: Bytes, seats: &[Seat<'_>]) {
        if self.is_calm {
            let promised_bytes = self.sum(seats, |seat| seat.promised_bytes());
            let kept_bytes = scaled(reserve_bytes, RESERVE_FOR_GROWTH).saturating_add(promised_bytes);
            self.room_bytes = available_bytes.saturating_sub(kept_bytes);
        }
    }

    /// Over all members.
    pub(super) fn sum(&self, seats: &[Seat<'_>], of: impl Fn(&Seat<'_>) -> Bytes) -> Bytes {
        self.members.iter().fold(0, |sum: Bytes, at| sum.saturating_add(of(&seats[*at])))
    }
}

/// What stalls want: a part of the pools above their floors, larger the more tasks wait.
fn stalled(
    path: Option<&str>,
    some_avg10: f64,
    full_avg10: f64,
    members: &[usize],
    seats: &[Seat<'_>],
    memory: &mut Memory,
) -> Option<(Bytes, Cause)> {
    let (_, _, part) = STALL_STEPS.iter().find(|(some, full, _)| some_avg10 >= *some || full_avg10 >= *full)?;
    let possible_bytes = members
        .iter()
        .map(|at| &seats[*at])
        .filter(|seat| seat.is_movable)
        .fold(0, |sum: Bytes, seat| sum.saturating_add(seat.to_bytes.saturating_sub(seat.floor_bytes)));
    let want_bytes = if memory.may_step(path) { possible_bytes / part } else { 0 };
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
