//! What the agent adds to the metrics.

use onecopy_control::metrics::Metric;
use onecopy_memory::agent::{InstanceStatus, Status};
use onecopy_memory::{HostPressure, Observation};

/// Name without its beginning, kind, help, and the value where it is known.
type Family<T> = (&'static str, &'static str, &'static str, fn(&T) -> Option<f64>);

const OF_HOST: [Family<Status>; 15] = [
    ("automatic", "gauge", "1 when targets follow need and pressure.", |status| {
        Some(f64::from(u8::from(status.automatic)))
    }),
    ("budget_bytes", "gauge", "What all pools together may have.", |status| Some(status.budget_bytes as f64)),
    ("committed_bytes", "gauge", "What all pools use or may use now.", |status| Some(status.committed_bytes as f64)),
    ("available_bytes", "gauge", "Memory that the host has left.", |status| {
        pressure(status, |pressure| Some(pressure.available_bytes as f64))
    }),
    ("stalled_ratio", "gauge", "Part of the last 10 s in which something waited for memory.", |status| {
        pressure(status, |pressure| Some(pressure.psi_some_avg10? / 100.0))
    }),
    ("rounds_total", "counter", "Rounds of asking and deciding.", |status| Some(status.figures.rounds as f64)),
    ("stalls_total", "counter", "Rounds that a stall of the host began.", |status| Some(status.figures.stalls as f64)),
    ("shrinks_total", "counter", "Targets to shrink to.", |status| Some(status.figures.shrinks as f64)),
    ("shrunk_bytes_total", "counter", "Bytes of them.", |status| Some(status.figures.shrunk_bytes as f64)),
    ("growths_total", "counter", "Targets to grow to.", |status| Some(status.figures.growths as f64)),
    ("grown_bytes_total", "counter", "Bytes of them.", |status| Some(status.figures.grown_bytes as f64)),
    ("taken_bytes_total", "counter", "Bytes taken without asking.", |status| Some(status.figures.taken_bytes as f64)),
    ("refusals_total", "counter", "Decisions that something is not possible.", |status| {
        Some(status.figures.refusals as f64)
    }),
    ("failures_total", "counter", "Targets that a server did not accept.", |status| {
        Some(status.figures.failures as f64)
    }),
    ("unanswered_total", "counter", "Questions that a server did not answer.", |status| {
        Some(status.figures.unanswered as f64)
    }),
];

const OF_INSTANCE: [Family<InstanceStatus>; 15] = [
    ("answering", "gauge", "1 when the server tells of its memory.", |instance| {
        Some(f64::from(u8::from(instance.failure.is_none() && instance.observation.is_some())))
    }),
    ("pool_bytes", "gauge", "What the pool uses.", |instance| observed(instance, |seen| Some(seen.pool_bytes as f64))),
    ("target_bytes", "gauge", "What it works towards.", |instance| {
        observed(instance, |seen| Some(seen.target_bytes as f64))
    }),
    ("ceiling_bytes", "gauge", "The most that it can have without a restart.", |instance| {
        observed(instance, |seen| Some(seen.ceiling_bytes as f64))
    }),
    ("floor_bytes", "gauge", "The least that it allows.", |instance| {
        observed(instance, |seen| Some(seen.floor_bytes as f64))
    }),
    ("published_bytes", "gauge", "What may be taken of it without asking.", |instance| {
        observed(instance, |seen| Some(seen.published_bytes as f64))
    }),
    ("returned_bytes", "gauge", "What of its ceiling it has not, or has given back.", |instance| {
        observed(instance, |seen| {
            // What is published is memory of its pool still.
            Some(seen.ceiling_bytes.saturating_sub(seen.pool_bytes) as f64)
        })
    }),
    ("returned_huge_bytes", "gauge", "What of that is free in the host's pool of huge pages.", |instance| {
        observed(instance, |seen| Some(seen.returned_huge_bytes as f64))
    }),
    ("working_set_bytes", "gauge", "What of it is used again and again.", |instance| {
        observed(instance, |seen| seen.working_set_bytes.map(|bytes| bytes as f64))
    }),
    ("hit_ratio", "gauge", "Part of the pages that were found in it.", |instance| {
        observed(instance, |seen| seen.hit_ratio)
    }),
    ("reads_per_second", "gauge", "Pages that were not.", |instance| {
        observed(instance, |seen| Some(seen.reads_per_second))
    }),
    ("swap_bytes", "gauge", "Memory of the server that is in swap.", |instance| {
        observed(instance, |seen| seen.swap_bytes.map(|bytes| bytes as f64))
    }),
    ("cgroup_limit_bytes", "gauge", "Limit of the nearest cgroup above it that has one.", |instance| {
        observed(instance, |seen| seen.limits.first().map(|limit| limit.bound_bytes() as f64))
    }),
    ("cgroup_usage_bytes", "gauge", "What is used in that cgroup, with page cache.", |instance| {
        observed(instance, |seen| seen.limits.first().map(|limit| limit.usage_bytes as f64))
    }),
    ("cgroup_kills_total", "counter", "Processes that the kernel has killed there for lack of memory.", |instance| {
        observed(instance, |seen| seen.limits.first().map(|limit| limit.oom_kills as f64))
    }),
];

/// The metrics in Prometheus' text form.
pub(crate) fn metrics(status: &Status) -> String {
    let mut text = String::new();
    for (name, kind, help, value) in OF_HOST {
        let mut metric = begin(&mut text, name, kind, help);
        if let Some(value) = value(status) {
            metric.sample(&[], value);
        }
    }
    for (name, kind, help, value) in OF_INSTANCE {
        let mut metric = begin(&mut text, name, kind, help);
        for instance in &status.instances {
            if let Some(value) = value(instance) {
                metric.sample(&[("instance", &instance.instance.to_string())], value);
            }
        }
    }
    ghost(status, &mut text);
    text
}

/// What a larger pool would save, a line a step.
fn ghost(status: &Status, text: &mut String) {
    let help = "Reads that a pool larger by so much would have saved.";
    let mut metric = begin(text, "ghost_hits_per_second", "gauge", help);
    for instance in &status.instances {
        for step in instance.observation.iter().flat_map(|seen| &seen.ghost) {
            let (instance, larger) = (instance.instance.to_string(), step.larger_by_bytes.to_string());
            metric.sample(&[("instance", &instance), ("larger_by_bytes", &larger)], step.hits_per_second);
        }
    }
}

fn begin<'a>(text: &'a mut String, name: &str, kind: &str, help: &str) -> Metric<'a> {
    Metric::new(text, format!("onecopy_memory_{name}"), kind, help)
}

fn pressure(status: &Status, value: impl Fn(&HostPressure) -> Option<f64>) -> Option<f64> {
    status.pressure.as_ref().and_then(value)
}

fn observed(instance: &InstanceStatus, value: impl Fn(&Observation) -> Option<f64>) -> Option<f64> {
    instance.observation.as_ref().and_then(value)
}
