//! What is known of one pool, and of the host, at one moment.

use serde::{Deserialize, Serialize};

use crate::{Bytes, InstanceName};

/// What one pool has, wants and would gain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Of which server.
    pub instance: InstanceName,
    /// False when it did not answer this time: the figures are those of its last answer. It is counted at them and
    /// never grown.
    pub answered: bool,
    /// What the pool uses now. More than the target while it shrinks.
    pub pool_bytes: Bytes,
    /// What the server itself works towards.
    pub target_bytes: Bytes,
    /// The most it can ever have without a restart.
    pub ceiling_bytes: Bytes,
    /// The least that the server itself allows.
    pub floor_bytes: Bytes,
    /// The server's sizes are multiples of this; 0 and 1 when any size will do.
    #[serde(default)]
    pub granule_bytes: Bytes,
    /// Memory of the pool that was given up by the server and may be taken without asking (level `publish`).
    pub published_bytes: Bytes,
    /// Whether the pool lies in huge pages that the host has set aside: what it gives back is for other users of such
    /// pages, and neither the host's available memory nor a cgroup's usage changes by it.
    #[serde(default)]
    pub huge_pages: bool,
    /// What of the memory given back lies in the host's pool of huge pages, free.
    #[serde(default)]
    pub returned_huge_bytes: Bytes,
    /// What of the pool is used again and again; none where the server cannot tell.
    pub working_set_bytes: Option<Bytes>,
    /// Pages found in the pool, of all that were wanted since the last observation or over the server's own window;
    /// none when none were.
    pub hit_ratio: Option<f64>,
    /// Pages a second that were found in the pool.
    #[serde(default)]
    pub hits_per_second: f64,
    /// Pages a second that were not in the pool.
    pub reads_per_second: f64,
    /// What a larger pool would save, by growing `larger_by_bytes`; empty where the server cannot tell.
    pub ghost: Vec<GhostStep>,
    /// Memory of the server's processes and shared memory that is in RAM; none when they are not on this host.
    pub resident_bytes: Option<Bytes>,
    /// Memory of the server that is in swap; none when it is not known.
    pub swap_bytes: Option<Bytes>,
    /// Its shared memory that somebody has touched since it started, in RAM or in swap; none when it is not known.
    #[serde(default)]
    pub touched_bytes: Option<Bytes>,
    /// Why the pool does not get to its target, in the server's words; none when nothing hinders it.
    pub blocked_by: Option<String>,
    /// Every cgroup above the server that has a limit, from its own upwards (`pressure::limits_of`); empty where none
    /// has.
    #[serde(default)]
    pub limits: Vec<BindingLimit>,
}

impl Observation {
    /// The size that the server can have and that is nearest above `bytes`; at most its ceiling.
    pub fn rounded(&self, bytes: Bytes) -> Bytes {
        let granule_bytes = self.granule_bytes.max(1);
        bytes.div_ceil(granule_bytes).saturating_mul(granule_bytes).min(self.ceiling_bytes)
    }

    /// What the pool may take at most until it is observed again: it has one and may grow to the other.
    pub fn committed_bytes(&self) -> Bytes {
        self.pool_bytes.max(self.target_bytes)
    }
}

/// Reads that a larger pool would have saved.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GhostStep {
    /// How much larger than now.
    pub larger_by_bytes: Bytes,
    /// Reads a second that would have been hits.
    pub hits_per_second: f64,
}

/// What the host has, and how much it stalls for lack of it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct HostPressure {
    /// RAM that can be had without swapping (`MemAvailable`).
    pub available_bytes: Bytes,
    /// RAM (`MemTotal`).
    pub total_bytes: Bytes,
    /// Swap in use.
    pub swap_used_bytes: Bytes,
    /// Share of the last 10 s in which some task waited for memory, 0 to 100; none without PSI.
    pub psi_some_avg10: Option<f64>,
    /// Share of the last 10 s in which all tasks waited for memory, 0 to 100; none without PSI.
    pub psi_full_avg10: Option<f64>,
    /// The tightest limit above the servers; none when no cgroup limits them.
    pub limit: Option<BindingLimit>,
}

/// A cgroup's limit and how near it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BindingLimit {
    /// Which cgroup, as a path below the file system of cgroups.
    pub cgroup: String,
    /// Where the kernel begins to kill (`memory.max`, `memory.limit_in_bytes`); none when only `high` is set.
    pub limit_bytes: Option<Bytes>,
    /// Where the kernel begins to slow down (`memory.high`).
    pub high_bytes: Option<Bytes>,
    /// What is used now, with page cache.
    pub usage_bytes: Bytes,
    /// What of that can be had back without swapping (clean page cache).
    pub reclaimable_bytes: Bytes,
    /// What of the group is in swap; none where swap is not counted.
    #[serde(default)]
    pub swap_bytes: Option<Bytes>,
    /// Processes that the kernel has killed here for lack of memory, since the group was made.
    #[serde(default)]
    pub oom_kills: u64,
    /// Share of the last 10 s in which some task of the group waited for memory, 0 to 100; none without PSI (cgroup
    /// v1).
    #[serde(default)]
    pub psi_some_avg10: Option<f64>,
}
