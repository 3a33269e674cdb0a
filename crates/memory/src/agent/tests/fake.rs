//! Servers and a host that do what a test says.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::agent::round::Decide;
use crate::agent::{Agent, Rhythm};
use crate::arbiter::{ArbiterState, Decision, Policy, Reason};
use crate::engine::{Change, Engine, EngineFuture, Presence, Report, Taken};
use crate::pressure::Source;
use crate::{BindingLimit, Bytes, HostPressure, InstanceName, Kind, Level, MemoryError, Observation};

pub(super) const MIB: Bytes = 1 << 20;

/// A server of a test's making, sizes in MiB.
pub(super) struct FakeEngine {
    name: InstanceName,
    level: Level,
    state: Mutex<FakeEngineState>,
}

#[derive(Clone)]
pub(super) struct FakeEngineState {
    pub(super) pool: Bytes,
    pub(super) target: Bytes,
    /// It does not answer.
    pub(super) hangs: bool,
    /// It is not to be seen whether it is there.
    pub(super) is_unclear: bool,
    /// It takes a size and does not say so.
    pub(super) is_silent: bool,
    /// It takes no size.
    pub(super) refuses: bool,
    /// Its sizes are multiples of this.
    pub(super) granule: Bytes,
    /// Limits of cgroups above it.
    pub(super) limits: Vec<BindingLimit>,
    /// What was asked of it.
    pub(super) calls: Vec<String>,
}

impl FakeEngine {
    pub(super) fn new(name: &str, pool: Bytes) -> Arc<FakeEngine> {
        FakeEngine::at_level(name, pool, Level::Request)
    }

    pub(super) fn at_level(name: &str, pool: Bytes, level: Level) -> Arc<FakeEngine> {
        let state = FakeEngineState {
            pool,
            target: pool,
            hangs: false,
            is_unclear: false,
            is_silent: false,
            refuses: false,
            granule: 1,
            limits: Vec::new(),
            calls: Vec::new(),
        };
        Arc::new(FakeEngine { name: name.parse().expect("a name"), level, state: Mutex::new(state) })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, FakeEngineState> {
        self.state.lock().expect("no test panics in it")
    }

    /// The pool gets to its target.
    pub(super) fn arrive(&self) {
        let mut state = self.lock();
        state.pool = state.target;
    }

    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().calls)
    }
}

impl Engine for FakeEngine {
    fn instance(&self) -> &InstanceName {
        &self.name
    }

    fn kind(&self) -> Kind {
        Kind::PostgreSql
    }

    fn level(&self) -> Level {
        self.level
    }

    fn observe(&self) -> EngineFuture<'_, Observation> {
        let FakeEngineState { pool, target, hangs, granule, limits, .. } = self.lock().clone();
        Box::pin(async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            Ok(Observation {
                instance: self.name.clone(),
                answered: true,
                pool_bytes: pool * MIB,
                target_bytes: target * MIB,
                ceiling_bytes: 1000 * MIB,
                floor_bytes: 64 * MIB,
                granule_bytes: granule * MIB,
                published_bytes: 0,
                huge_pages: false,
                returned_huge_bytes: 0,
                working_set_bytes: None,
                hit_ratio: None,
                hits_per_second: 0.0,
                reads_per_second: 0.0,
                ghost: Vec::new(),
                resident_bytes: None,
                swap_bytes: None,
                touched_bytes: None,
                blocked_by: None,
                limits,
            })
        })
    }

    fn set_target(&self, target_bytes: Bytes) -> EngineFuture<'_, Change> {
        let mut state = self.lock();
        state.calls.push(format!("set {}", target_bytes / MIB));
        if state.hangs {
            return Box::pin(std::future::pending());
        }
        if state.refuses {
            let error = MemoryError::Unreachable { instance: self.name.clone(), reason: "it is ill".to_owned() };
            return Box::pin(std::future::ready(Err(error)));
        }
        let target = (target_bytes / MIB).div_ceil(state.granule) * state.granule;
        state.target = target;
        if state.is_silent {
            return Box::pin(std::future::pending());
        }
        let pool_bytes = state.pool * MIB;
        let change = Change { from_bytes: pool_bytes, target_bytes: target * MIB, pool_bytes };
        Box::pin(std::future::ready(Ok(change)))
    }

    fn reach<'a>(&'a self, _target_bytes: Bytes, _report: Report<'a>) -> EngineFuture<'a, Change> {
        unreachable!("the agent watches by itself")
    }

    fn presence(&self) -> EngineFuture<'_, Presence> {
        if self.lock().is_unclear {
            return Box::pin(std::future::pending());
        }
        Box::pin(std::future::ready(Ok(Presence::Running(self.lock().limits.clone()))))
    }

    fn take(&self, bytes: Bytes) -> EngineFuture<'_, Taken> {
        self.lock().calls.push(format!("take {}", bytes / MIB));
        Box::pin(std::future::ready(Ok(Taken { bytes: bytes / 2, size_bytes: bytes, microseconds: 1 })))
    }
}

/// A host whose figures can be read or not.
#[derive(Default)]
pub(super) struct Host {
    pub(super) unreadable: AtomicBool,
    /// It has less memory available than shall be.
    pub(super) is_short: AtomicBool,
}

impl Source for Host {
    fn pressure(&self) -> Result<HostPressure, MemoryError> {
        if self.unreadable.load(Ordering::Relaxed) {
            let source = std::io::Error::other("gone");
            return Err(MemoryError::File { action: "read", path: "/proc/meminfo".into(), source });
        }
        let available_bytes = if self.is_short.load(Ordering::Relaxed) { 400 * MIB } else { 8000 * MIB };
        Ok(HostPressure { available_bytes, total_bytes: 10_000 * MIB, ..HostPressure::default() })
    }
}

/// How long an agent waits for a made-up server.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);

/// An agent over made-up servers with a budget in MiB.
pub(super) fn agent(decide: Decide, budget: Bytes, servers: &[&Arc<FakeEngine>]) -> (Agent, Arc<Host>) {
    let engines = servers.iter().map(|server| Arc::clone(*server) as Arc<dyn Engine>).collect();
    let policy = Policy { budget_bytes: budget * MIB, instances: BTreeMap::new(), ..Policy::for_host(10_000 * MIB) };
    let host = Arc::new(Host::default());
    let rhythm = Rhythm { interval: Duration::from_millis(10), answer_timeout: ANSWER_TIMEOUT };
    let source = Arc::clone(&host) as Arc<dyn Source>;
    (Agent::deciding_by(decide, policy, engines, source, rhythm), host)
}

/// Gives what is pinned, and nothing else.
pub(super) fn pins_only(
    policy: &Policy,
    _pressure: &HostPressure,
    observations: &[Observation],
    _elapsed: Duration,
    _state: &mut ArbiterState,
) -> Vec<Decision> {
    let pinned = |observation: &Observation| {
        let target_bytes = policy.instances.get(&observation.instance)?.pinned_bytes?;
        (target_bytes != observation.target_bytes).then(|| change(observation, target_bytes))
    };
    observations.iter().filter_map(pinned).collect()
}

/// A decision to give a server another size.
pub(super) fn change(observation: &Observation, to_bytes: Bytes) -> Decision {
    Decision {
        instance: observation.instance.clone(),
        from_bytes: observation.target_bytes,
        to_bytes,
        reason: Reason::Pinned { target_bytes: to_bytes },
    }
}
