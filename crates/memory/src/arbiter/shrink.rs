//! What must be given back, and who gives it: the coldest memory first, of equally cold memory the more the less an
//! instance counts.

use crate::Bytes;

use super::allocation::Allocation;
use super::reason::{Cause, Reason};
use super::state::ArbiterState;

/// Takes `want_bytes` from the targets of `members`. Tells how much was taken; it is less only when the floors do not
/// allow more, and the reasons say so then.
pub(super) fn take(
    allocations: &mut [Allocation<'_>],
    members: &[usize],
    want_bytes: Bytes,
    cause: &Cause,
    state: &ArbiterState,
) -> Bytes {
    let mut donors: Vec<Donor> = members
        .iter()
        .filter(|at| allocations[**at].is_movable)
        .map(|at| Donor { allocation: *at, layers: classes(&allocations[*at], state) })
        .collect();
    let mut classes: Vec<i32> = donors.iter().flat_map(|donor| donor.layers.iter().map(|(class, _)| *class)).collect();
    classes.sort_unstable();
    classes.dedup();

    let mut left_bytes = want_bytes;
    let reason = Reason::Pressed { cause: cause.clone() };
    for class in classes {
        left_bytes -= take_of_class(allocations, &mut donors, class, left_bytes, &reason);
    }
    if left_bytes > 0 {
        let given_bytes = want_bytes - left_bytes;
        say_floors_reached(
            allocations,
            members,
            Reason::FloorsReached { cause: cause.clone(), wanted_bytes: want_bytes, given_bytes },
        );
    }
    want_bytes - left_bytes
}

/// Who may give.
struct Donor {
    allocation: usize,
    /// Down to where its memory is of which class.
    layers: Vec<(i32, Bytes)>,
}

impl Donor {
    /// What it has of this class and colder ones.
    fn capacity_bytes(&self, class: i32, allocations: &[Allocation<'_>]) -> Bytes {
        let bottoms = self.layers.iter().filter(|(of, _)| *of <= class).map(|(_, bottom_bytes)| *bottom_bytes);
        bottoms.min().map_or(0, |bottom_bytes| allocations[self.allocation].to_bytes.saturating_sub(bottom_bytes))
    }
}

/// Losses within a factor of two are alike: no estimate is better than that.
fn classes(allocation: &Allocation<'_>, state: &ArbiterState) -> Vec<(i32, Bytes)> {
    let class = |loss_per_mib: f64| if loss_per_mib > 0.0 { loss_per_mib.log2().floor() as i32 } else { i32::MIN };
    allocation.layers(state).into_iter().map(|layer| (class(layer.loss_per_mib), layer.bottom_bytes)).collect()
}

fn take_of_class(
    allocations: &mut [Allocation<'_>],
    donors: &mut [Donor],
    class: i32,
    want_bytes: Bytes,
    reason: &Reason,
) -> Bytes {
    let parts: Vec<(Bytes, f64)> = donors
        .iter()
        .map(|donor| (donor.capacity_bytes(class, allocations), allocations[donor.allocation].weight))
        .collect();
    let mut left_bytes = want_bytes;
    for (donor, share_bytes) in donors.iter().zip(shares(want_bytes, &parts)) {
        let given_bytes = allocations[donor.allocation].give(share_bytes.min(left_bytes), reason.clone());
        left_bytes = left_bytes.saturating_sub(given_bytes);
    }
    // What rounding has left over.
    for donor in donors.iter() {
        let rest_bytes = donor.capacity_bytes(class, allocations).min(left_bytes);
        let given_bytes = allocations[donor.allocation].give(rest_bytes, reason.clone());
        left_bytes = left_bytes.saturating_sub(given_bytes);
    }
    want_bytes - left_bytes
}

/// Divides `want_bytes` in proportion to capacity by weight, nobody above its capacity.
fn shares(want_bytes: Bytes, parts: &[(Bytes, f64)]) -> Vec<Bytes> {
    let mut shares = vec![0; parts.len()];
    let mut open: Vec<usize> = (0..parts.len()).filter(|at| parts[*at].0 > 0).collect();
    let mut left_bytes = want_bytes;
    // Each turn fills at least one of them or is the last.
    while left_bytes > 0 && !open.is_empty() {
        let portion = |at: usize| parts[at].0 as f64 / parts[at].1;
        let whole: f64 = open.iter().map(|at| portion(*at)).sum();
        let due = |at: usize| (left_bytes as f64 * (portion(at) / whole)).ceil() as Bytes;
        let full: Vec<usize> = open.iter().copied().filter(|at| due(*at) >= parts[*at].0).collect();
        if full.is_empty() {
            open.iter().for_each(|at| shares[*at] = due(*at));
            break;
        }
        for at in full {
            shares[at] = parts[at].0;
            left_bytes = left_bytes.saturating_sub(parts[at].0);
            open.retain(|other| *other != at);
        }
    }
    shares
}

fn say_floors_reached(allocations: &mut [Allocation<'_>], members: &[usize], reason: Reason) {
    for at in members {
        let allocation = &mut allocations[*at];
        if allocation.seen.answered && matches!(allocation.reason, None | Some(Reason::Pressed { .. })) {
            allocation.reason = Some(reason.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_follow_capacity_and_weight() {
        assert_eq!(shares(30, &[(100, 1.0), (200, 1.0)]), [10, 20]);
        assert_eq!(shares(30, &[(100, 1.0), (100, 2.0)]), [20, 10]);
        assert_eq!(shares(150, &[(100, 1.0), (100, 9.0)]), [100, 50], "who is empty leaves the rest to others");
        assert_eq!(shares(500, &[(100, 1.0), (0, 1.0)]), [100, 0]);
        assert_eq!(shares(5, &[]), Vec::<Bytes>::new());
    }

    proptest! {
        #[test]
        fn shares_make_up_what_is_wanted(
            want_bytes in 0..1_u64 << 45,
            parts in prop::collection::vec((0..1_u64 << 44, 0.001..1000.0), 0..6),
        ) {
            let shares = shares(want_bytes, &parts);
            let capacity: Bytes = parts.iter().map(|(bytes, _)| bytes).sum();
            prop_assert!(shares.iter().zip(&parts).all(|(share, (bytes, _))| share <= bytes));
            prop_assert!(shares.iter().sum::<Bytes>() >= want_bytes.min(capacity));
        }
    }
}
