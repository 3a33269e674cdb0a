//! What the host's owner wants: how much for all, how much for each, how fast.

use std::collections::BTreeMap;
use std::time::Duration;

use super::MIB;
use crate::{Bytes, InstanceName};

/// Without a word of the owner all pools together get this part of the host's memory.
const BUDGET_PART: u64 = 4;
/// Without a word of the owner this part of the host's memory stays available for others.
const RESERVE_PART: u64 = 20;

/// What the host's owner wants.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// All pools together may never have more.
    pub budget_bytes: Bytes,
    /// So much of the host's memory stays available for others.
    pub reserve_bytes: Bytes,
    /// What differs for one instance; one that is not named here has [`InstancePolicy::default`].
    pub instances: BTreeMap<InstanceName, InstancePolicy>,
    /// How fast, and how small a change is not worth its trouble.
    pub pace: Pace,
}

impl Policy {
    /// The policy for a host with `total_bytes` of RAM whose owner has said nothing: a quarter of it for the pools, a
    /// twentieth kept available.
    pub fn for_host(total_bytes: Bytes) -> Policy {
        Policy {
            budget_bytes: total_bytes / BUDGET_PART,
            reserve_bytes: total_bytes / RESERVE_PART,
            instances: BTreeMap::new(),
            pace: Pace::default(),
        }
    }
}

/// What the host's owner wants of one instance.
#[derive(Debug, Clone, PartialEq)]
pub struct InstancePolicy {
    /// Never less than this, nor than the server's own floor.
    pub floor_bytes: Bytes,
    /// Never more than this, nor than the server's own ceiling; none for no other limit.
    pub ceiling_bytes: Option<Bytes>,
    /// How much its need counts against that of others; 1 is usual, more than 0. Anything else counts as 1.
    pub weight: f64,
    /// Set by hand: it has exactly this until it is freed.
    pub pinned_bytes: Option<Bytes>,
}

impl Default for InstancePolicy {
    fn default() -> Self {
        InstancePolicy { floor_bytes: 0, ceiling_bytes: None, weight: 1.0, pinned_bytes: None }
    }
}

/// How fast memory moves where nothing presses. What the budget or pressure demands is done at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Pace {
    /// No smaller change by need than this ...
    pub change_bytes_min: Bytes,
    /// ... nor than this share of the pool.
    pub change_share_min: f64,
    /// The part of the budget that moves in one change of an instance, at most.
    pub step_share_max: f64,
    /// Time between two changes by need of one instance: so long its figures need to tell what the first one did.
    pub settle: Duration,
    /// Time between changes of one instance in opposite directions, and between pressure and the next growth.
    pub reversal: Duration,
    /// Memory moves from one instance to another only for so many times what the donor loses.
    pub trade_ratio_min: f64,
    /// Reads a second saved by 1 MiB below which nobody gets more.
    pub gain_per_mib_min: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            change_bytes_min: 16 * MIB,
            change_share_min: 0.02,
            step_share_max: 0.125,
            settle: Duration::from_secs(2),
            reversal: Duration::from_secs(10),
            trade_ratio_min: 2.0,
            gain_per_mib_min: 0.02,
        }
    }
}

impl Pace {
    /// The smallest change by need of a pool of `size_bytes`.
    pub(super) fn least_change_bytes(&self, size_bytes: Bytes) -> Bytes {
        self.change_bytes_min.max((size_bytes as f64 * self.change_share_min) as Bytes)
    }

    /// The largest change by need where the budget is `budget_bytes`.
    pub(super) fn step_bytes_max(&self, budget_bytes: Bytes) -> Bytes {
        self.change_bytes_min.max((budget_bytes as f64 * self.step_share_max) as Bytes)
    }
}
