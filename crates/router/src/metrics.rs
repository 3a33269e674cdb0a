//! A router's state as Prometheus text (exposition format 0.0.4).

use onecopy_control::metrics::Metric;

use crate::servers::Health;
use crate::status::RouterStatus;

/// All metrics of a router.
pub fn text(status: &RouterStatus) -> String {
    let mut text = String::new();
    Metric::new(&mut text, "onecopy_router_clients", "gauge", "Clients connected.").sample(&[], status.clients);
    let help = "Bytes of messages that are held, in the buffers of all connections and outside of them.";
    Metric::new(&mut text, "onecopy_router_buffered_bytes", "gauge", help).sample(&[], status.buffered_bytes);
    for (name, help, value) in [
        ("onecopy_router_logins_total", "Clients that logged in.", status.logins),
        ("onecopy_router_refused_total", "Clients that were refused.", status.refused),
        ("onecopy_router_reads_total", "Units of work that only read.", status.reads),
        ("onecopy_router_updates_total", "Units of work that may write.", status.updates),
        ("onecopy_router_read_retries_total", "Reads that ran again on another server or epoch.", status.read_retries),
        (
            "onecopy_router_update_retries_total",
            "Autocommit updates that ran again after 40001.",
            status.update_retries,
        ),
    ] {
        Metric::new(&mut text, name, "counter", help).sample(&[], value);
    }
    servers(&mut text, status);
    databases(&mut text, status);
    gates(&mut text, status);
    text
}

fn servers(text: &mut String, status: &RouterStatus) {
    let mut up = Metric::new(text, "onecopy_server_up", "gauge", "1 when the server answers.");
    for server in &status.servers {
        up.sample(&[("server", &server.name)], u8::from(server.health == Health::Up));
    }
    let mut reads = Metric::new(text, "onecopy_server_reads_total", "counter", "Reads answered by the server.");
    for server in &status.servers {
        reads.sample(&[("server", &server.name)], server.reads);
    }
    let help = "Part of the choices for a read in which the server takes part.";
    let mut share = Metric::new(text, "onecopy_server_read_share_ratio", "gauge", help);
    for server in &status.servers {
        share.sample(&[("server", &server.name)], server.read_share);
    }
    let mut lag = Metric::new(text, "onecopy_server_replay_lag_bytes", "gauge", "WAL not yet replayed there.");
    for server in &status.servers {
        lag.sample(&[("server", &server.name)], server.replay_lag_bytes);
    }
}

fn databases(text: &mut String, status: &RouterStatus) {
    type Value = fn(&crate::status::DatabaseStatus) -> Option<f64>;
    const SECOND: f64 = 1e6;
    let metrics: [(&'static str, &str, &str, Value); 9] = [
        ("onecopy_epoch_age_seconds", "gauge", "Since the newest epoch's gate closed.", |database| {
            database.epoch_age_ms.map(|age| age as f64 / 1000.0)
        }),
        ("onecopy_epoch_servers", "gauge", "Servers on which the newest epoch is open.", |database| {
            Some(database.epoch_servers.len() as f64)
        }),
        ("onecopy_database_commits_total", "counter", "Commits of updates.", |database| Some(database.commits as f64)),
        ("onecopy_gate_epochs_total", "counter", "Gates that made an epoch.", |database| {
            Some(database.gates.epochs as f64)
        }),
        ("onecopy_gate_gave_up_total", "counter", "Gates that found commits in flight for too long.", |database| {
            Some(database.gates.gave_up as f64)
        }),
        ("onecopy_gate_failed_total", "counter", "Gates that a failure ended.", |database| {
            Some(database.gates.failed as f64)
        }),
        (
            "onecopy_gate_closed_seconds_total",
            "counter",
            "Time in which gates held commits, also those that made no epoch.",
            |database| Some(database.gates.closed_microseconds as f64 / SECOND),
        ),
        ("onecopy_tripwire_commits_total", "counter", "Commits through the tripwire.", |database| {
            Some(database.gates.tripwires as f64)
        }),
        ("onecopy_tripwire_aborts_total", "counter", "Commits that the tripwire aborted.", |database| {
            Some(database.gates.tripwire_aborts as f64)
        }),
    ];
    for (name, kind, help, value) in metrics {
        let mut metric = Metric::new(text, name, kind, help);
        for database in &status.databases {
            if let Some(value) = value(database) {
                metric.sample(&[("database", &database.name)], value);
            }
        }
    }
}

/// How long gates held commits, as a histogram: quantiles of any span of time can be computed from its samples.
fn gates(text: &mut String, status: &RouterStatus) {
    let seconds = |microseconds: u64| microseconds as f64 / 1e6;
    let help = "Time for which a gate that made an epoch held commits.";
    let mut metric = Metric::new(text, "onecopy_gate_seconds", "histogram", help);
    for database in &status.databases {
        let (gates, name) = (&database.gates, ("database", database.name.as_str()));
        for (bound, count) in &gates.gate_buckets {
            metric.sample_of("_bucket", &[name, ("le", &seconds(*bound).to_string())], count);
        }
        metric.sample_of("_bucket", &[name, ("le", "+Inf")], gates.epochs);
        metric.sample_of("_sum", &[name], seconds(gates.epoch_microseconds));
        metric.sample_of("_count", &[name], gates.epochs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_are_a_histogram() {
        let gate_buckets = vec![(100, 1), (1_500, 3)];
        let gates =
            crate::epoch::GateSummary { epochs: 4, epoch_microseconds: 2_500, gate_buckets, ..Default::default() };
        let database = crate::status::DatabaseStatus { name: "shop".to_owned(), gates, ..Default::default() };
        let status = RouterStatus { databases: vec![database], ..Default::default() };
        let text = text(&status);
        let series: Vec<&str> = text.lines().filter(|line| line.starts_with("onecopy_gate_seconds")).collect();
        assert_eq!(
            series,
            [
                "onecopy_gate_seconds_bucket{database=\"shop\",le=\"0.0001\"} 1",
                "onecopy_gate_seconds_bucket{database=\"shop\",le=\"0.0015\"} 3",
                "onecopy_gate_seconds_bucket{database=\"shop\",le=\"+Inf\"} 4",
                "onecopy_gate_seconds_sum{database=\"shop\"} 0.0025",
                "onecopy_gate_seconds_count{database=\"shop\"} 4",
            ]
        );
    }
}
