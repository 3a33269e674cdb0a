//! What is measured, and what one run showed.

use std::time::Duration;

use serde::Serialize;

use crate::exposition::Samples;
use crate::pgbench::{Counts, Protocol, Script};
use crate::statistics::Spread;

/// What is run over every proxy.
pub const WORKLOADS: [(Script, Protocol); 8] = [
    (Script::SelectOnly, Protocol::Simple),
    (Script::SelectOnly, Protocol::Extended),
    (Script::SelectOnly, Protocol::Prepared),
    (Script::TpcbLike, Protocol::Simple),
    (Script::TpcbLike, Protocol::Extended),
    (Script::TpcbLike, Protocol::Prepared),
    (Script::Mixed, Protocol::Simple),
    (Script::Mixed, Protocol::Extended),
];

/// One run of pgbench over one proxy.
#[derive(Debug, Clone, Serialize)]
pub struct Measurement {
    /// Which script.
    pub script: Script,
    /// How it was sent.
    pub protocol: Protocol,
    /// Over which way.
    pub proxy: &'static str,
    /// In which round, from 1.
    pub round: u32,
    /// What pgbench counted.
    pub counts: Counts,
    /// Processor time of the proxy, in microseconds a transaction; none without a proxy.
    pub proxy_cpu_us: Option<f64>,
    /// Processor time of all servers, in microseconds a transaction.
    pub servers_cpu_us: f64,
    /// What the router says of its gates; none for others.
    pub gates: Option<Gates>,
}

/// What the router's metrics say of one run. None: the router did not say, or nothing of the kind happened.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gates {
    /// Gates that made an epoch.
    pub gates: Option<f64>,
    /// Gates that found commits in the way for too long.
    pub gave_up: Option<f64>,
    /// Half of the gates were closed for at most this, in milliseconds.
    pub closed_p50_ms: Option<f64>,
    /// 99 of 100 gates were closed for at most this, in milliseconds.
    pub closed_p99_ms: Option<f64>,
    /// Part of the run in which commits were held out, 0 to 1.
    pub closed_share: Option<f64>,
    /// Age of the newest epoch, in milliseconds: the median of looks at it during the run.
    pub epoch_age_ms: Option<f64>,
    /// Commits that inserted into the tripwire.
    pub tripwires: Option<f64>,
    /// Those of them that the leader aborted for it.
    pub tripwire_aborts: Option<f64>,
}

impl Gates {
    pub(super) fn between(before: &Samples, after: &Samples, epoch_ages_seconds: &[f64], wall: Duration) -> Gates {
        let gain = after.since(before);
        let milliseconds = |seconds: f64| seconds * 1000.0;
        Gates {
            gates: gain.total("onecopy_gate_seconds_count"),
            gave_up: gain.total("onecopy_gate_gave_up_total"),
            closed_p50_ms: gain.quantile("onecopy_gate_seconds", 0.5).map(milliseconds),
            closed_p99_ms: gain.quantile("onecopy_gate_seconds", 0.99).map(milliseconds),
            closed_share: gain.total("onecopy_gate_seconds_sum").map(|seconds| seconds / wall.as_secs_f64()),
            epoch_age_ms: Spread::of(epoch_ages_seconds).map(|ages| milliseconds(ages.median)),
            tripwires: gain.total("onecopy_tripwire_commits_total"),
            tripwire_aborts: gain.total("onecopy_tripwire_aborts_total"),
        }
    }
}
