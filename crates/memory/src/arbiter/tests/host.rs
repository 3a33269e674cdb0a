//! A host with servers that have what the arbiter gives them, and whose figures follow from that.

use std::collections::VecDeque;
use std::time::Duration;

use crate::arbiter::{ArbiterState, Decision, Policy, decide};
use crate::{BindingLimit, Bytes, GhostStep, HostPressure, InstanceName, Observation};

pub(super) const MIB: Bytes = 1 << 20;

pub(super) fn name(text: &str) -> InstanceName {
    text.parse().expect("a name")
}

/// One that has `pool` and needs nothing.
pub(super) fn resting(instance: &str, pool_mib: Bytes, ceiling_mib: Bytes) -> Observation {
    Observation {
        instance: name(instance),
        answered: true,
        pool_bytes: pool_mib * MIB,
        target_bytes: pool_mib * MIB,
        ceiling_bytes: ceiling_mib * MIB,
        floor_bytes: 64 * MIB,
        granule_bytes: 2 * MIB,
        published_bytes: 0,
        huge_pages: false,
        returned_huge_bytes: 0,
        working_set_bytes: Some(0),
        hit_ratio: None,
        hits_per_second: 0.0,
        reads_per_second: 0.0,
        ghost: Vec::new(),
        resident_bytes: None,
        swap_bytes: None,
        touched_bytes: None,
        blocked_by: None,
        limits: Vec::new(),
    }
}

/// A host with plenty of memory.
pub(super) fn calm() -> HostPressure {
    HostPressure { available_bytes: 16 << 30, total_bytes: 24 << 30, ..HostPressure::default() }
}

pub(super) fn limit(cgroup: &str, limit_mib: Bytes, usage_mib: Bytes) -> BindingLimit {
    BindingLimit {
        cgroup: cgroup.to_owned(),
        limit_bytes: Some(limit_mib * MIB),
        high_bytes: None,
        usage_bytes: usage_mib * MIB,
        reclaimable_bytes: 0,
        swap_bytes: None,
        oom_kills: 0,
        psi_some_avg10: None,
    }
}

/// Decides once, of a memory that knows nothing.
pub(super) fn once(policy: &Policy, pressure: &HostPressure, seen: &[Observation]) -> Vec<Decision> {
    decide(policy, pressure, seen, Duration::ZERO, &mut ArbiterState::default())
}

/// What a server's clients do: accesses to a set of pages, some of them more often than others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Pages of the set, in bytes.
    pub(super) set_bytes: Bytes,
    pub(super) accesses_per_second: f64,
    /// 1 for even accesses; less than 1 when some pages are hotter: the best share x of the set gets x to this power of
    /// all accesses.
    pub(super) evenness: f64,
}

impl Load {
    pub(super) const NONE: Load = Load { set_bytes: 0, accesses_per_second: 0.0, evenness: 1.0 };

    fn hits_per_second(&self, pool_bytes: Bytes) -> f64 {
        if self.set_bytes == 0 {
            return self.accesses_per_second;
        }
        let share = (pool_bytes as f64 / self.set_bytes as f64).min(1.0);
        self.accesses_per_second * share.powf(self.evenness)
    }
}

/// A simulated server.
#[derive(Debug, Clone)]
pub(super) struct Server {
    pub(super) seen: Observation,
    pub(super) load: Load,
    /// Memory that it gives back in one round.
    pub(super) return_bytes_per_round: Bytes,
    pub(super) has_ghosts: bool,
    /// False for one that takes all of its pages for cold, however hot they are.
    pub(super) knows_hot: bool,
    /// Its rates are the means of so many rounds, 1 or more: they lag behind what was just changed.
    pub(super) window_rounds: usize,
    /// Hits a second, and those that larger pools would have saved.
    pub(super) past: VecDeque<(f64, [f64; 4])>,
}

impl Server {
    pub(super) fn new(instance: &str, pool_mib: Bytes, ceiling_mib: Bytes, load: Load) -> Server {
        let seen = resting(instance, pool_mib, ceiling_mib);
        Server {
            seen,
            load,
            return_bytes_per_round: 512 * MIB,
            has_ghosts: true,
            knows_hot: true,
            window_rounds: 1,
            past: VecDeque::new(),
        }
    }

    fn observe(&mut self) -> Observation {
        let mut seen = self.seen.clone();
        let steps = [8, 4, 2, 1].map(|part| seen.pool_bytes / part);
        let hits = self.load.hits_per_second(seen.pool_bytes);
        let saved = steps.map(|step| self.load.hits_per_second(seen.pool_bytes + step) - hits);
        self.past.push_back((hits, saved));
        if self.past.len() > self.window_rounds {
            self.past.pop_front();
        }
        let rounds = self.past.len() as f64;
        let hits = self.past.iter().map(|(hits, _)| hits).sum::<f64>() / rounds;
        seen.hits_per_second = hits;
        seen.reads_per_second = (self.load.accesses_per_second - hits).max(0.0);
        let hot_bytes = if self.knows_hot { self.load.set_bytes.min(seen.pool_bytes) } else { 0 };
        seen.working_set_bytes = Some(hot_bytes);
        seen.hit_ratio = (self.load.accesses_per_second > 0.0).then(|| hits / self.load.accesses_per_second);
        if self.has_ghosts {
            let saved = |at: usize| self.past.iter().map(|(_, saved)| saved[at]).sum::<f64>() / rounds;
            let ghost = |at: usize| GhostStep { larger_by_bytes: steps[at], hits_per_second: saved(at) };
            seen.ghost = (0..steps.len()).map(ghost).collect();
        }
        seen
    }

    /// One second passes.
    fn pass(&mut self) {
        let seen = &mut self.seen;
        let least_bytes = seen.pool_bytes.saturating_sub(self.return_bytes_per_round);
        seen.pool_bytes = seen.target_bytes.max(least_bytes);
    }
}

/// A simulated host; what servers do not use is available but for what others use.
#[derive(Debug, Clone)]
pub(super) struct Host {
    pub(super) policy: Policy,
    pub(super) total_bytes: Bytes,
    pub(super) others_bytes: Bytes,
    pub(super) servers: Vec<Server>,
    pub(super) state: ArbiterState,
}

impl Host {
    pub(super) fn new(policy: Policy, total_bytes: Bytes, servers: Vec<Server>) -> Host {
        Host { policy, total_bytes, others_bytes: 0, servers, state: ArbiterState::default() }
    }

    pub(super) fn pressure(&self) -> HostPressure {
        let used_bytes = self.pools_bytes() + self.others_bytes;
        HostPressure {
            available_bytes: self.total_bytes.saturating_sub(used_bytes),
            total_bytes: self.total_bytes,
            ..HostPressure::default()
        }
    }

    pub(super) fn pools_bytes(&self) -> Bytes {
        self.servers.iter().map(|server| server.seen.pool_bytes).sum()
    }

    pub(super) fn targets_bytes(&self) -> Bytes {
        self.servers.iter().map(|server| server.seen.target_bytes).sum()
    }

    pub(super) fn pool_mib(&self, server: usize) -> Bytes {
        self.servers[server].seen.pool_bytes / MIB
    }

    /// One second: observes, decides, carries out.
    pub(super) fn round(&mut self) -> Vec<Decision> {
        let seen: Vec<Observation> = self.servers.iter_mut().map(Server::observe).collect();
        let pressure = self.pressure();
        let decisions = decide(&self.policy, &pressure, &seen, Duration::from_secs(1), &mut self.state);
        for decision in &decisions {
            let mut servers = self.servers.iter_mut();
            let server = servers.find(|server| server.seen.instance == decision.instance).expect("it was observed");
            assert_eq!(server.seen.target_bytes, decision.from_bytes);
            server.seen.target_bytes = decision.to_bytes;
        }
        self.servers.iter_mut().for_each(Server::pass);
        decisions
    }

    /// So many rounds; all that was decided.
    pub(super) fn rounds(&mut self, rounds: usize) -> Vec<Decision> {
        (0..rounds).flat_map(|_| self.round()).collect()
    }
}
