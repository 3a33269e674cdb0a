//! The router experiment as tables, as JSON and as a page with a plot.

use std::path::Path;

use serde::Serialize;
use serde_json::json;

use crate::head::Head;
use crate::pgbench::{Protocol, Script};
use crate::plot::{Bar, Panel, draw};
use crate::router::measurement::{Gates, Measurement, WORKLOADS};
use crate::statistics::Spread;

/// The ways in, in the order of the columns.
const PROXIES: [&str; 3] = ["direct", "pgbouncer", "onecopy"];

/// What others and the design say of the same figures: the bar to be measured against.
const BARS: [(&str, &str); 6] = [
    (
        "Proxy CPU, simple",
        "aim <= 15 us a transaction; PgBouncer 1.18 took 14.4-14.9 us, Pgpool-II 4.3 42-58 us (streaming) and 39-88 us \
         (snapshot isolation) on such a machine",
    ),
    (
        "Proxy CPU, extended",
        "aim <= 17 us a transaction; PgBouncer 1.18 took 17-18 us. First aim for both: \
         at most twice PgBouncer of the same run",
    ),
    (
        "Throughput, select-only",
        "aim: above direct autocommit (ratio > 1); Pgpool-II's snapshot isolation reached 0.02-0.06 (simple)",
    ),
    ("Gate", "the design's trial: p50 0.3-0.5 ms with the leader alone, 1.0-1.2 ms with one standby"),
    ("Epochs", "the design's trial: 50 to 200 a second without loss of throughput above noise"),
    ("Extra aborts by tripwire", "the design's trial: 1.7 % on 100 hot rows, 0.3 % on 1000 rows, 0 on 100 000 rows"),
];

/// Everything that one experiment gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// Connections of pgbench.
    pub clients: u16,
    /// Length of one run.
    pub seconds: u32,
    /// Rounds.
    pub pairs: u32,
    /// pgbench's scale.
    pub scale: u32,
    /// Followers behind the leader.
    pub followers: usize,
    /// Every run that ended well.
    pub measurements: Vec<Measurement>,
}

/// The runs of one workload over one proxy, taken together.
#[derive(Debug, Clone, Serialize)]
struct Row {
    script: Script,
    protocol: Protocol,
    proxy: &'static str,
    runs: usize,
    transactions_per_second: Option<Spread>,
    /// To direct, within each round.
    throughput_ratio: Option<Spread>,
    proxy_cpu_us: Option<Spread>,
    servers_cpu_us: Option<Spread>,
    latency_ms: Option<Spread>,
    /// Further tries that clients made, a hundred transactions.
    retries_percent: Option<Spread>,
    failed: u64,
}

/// What the router said of its gates in the runs of one workload.
#[derive(Debug, Clone, Serialize)]
struct GateRow {
    script: Script,
    protocol: Protocol,
    gates_per_second: Option<Spread>,
    closed_p50_ms: Option<Spread>,
    closed_p99_ms: Option<Spread>,
    closed_percent: Option<Spread>,
    epoch_age_ms: Option<Spread>,
    gave_up: Option<Spread>,
    /// Transactions that the tripwire aborted, a hundred that ended well.
    tripwire_aborts_percent: Option<Spread>,
}

impl Report {
    fn of(&self, script: Script, protocol: Protocol, proxy: &str) -> Vec<&Measurement> {
        let matching = |measurement: &&Measurement| {
            (measurement.script, measurement.protocol, measurement.proxy) == (script, protocol, proxy)
        };
        self.measurements.iter().filter(matching).collect()
    }

    fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (script, protocol) in WORKLOADS {
            let direct = self.of(script, protocol, "direct");
            for proxy in PROXIES {
                let runs = self.of(script, protocol, proxy);
                if !runs.is_empty() {
                    rows.push(row(&runs, &direct));
                }
            }
        }
        rows
    }

    fn gate_rows(&self) -> Vec<GateRow> {
        let workloads = WORKLOADS.iter().map(|(script, protocol)| self.of(*script, *protocol, "onecopy"));
        workloads.filter(|runs| !runs.is_empty()).map(|runs| gate_row(&runs, self.seconds)).collect()
    }

    /// All figures as one JSON object: every run, and the spreads over them.
    pub fn to_json(&self) -> serde_json::Value {
        json!({ "report": self, "summary": self.rows(), "gates": self.gate_rows() })
    }

    /// The tables alone.
    pub fn to_text(&self) -> String {
        let mut text = table(&ROW_HEAD, &self.rows().iter().map(row_cells).collect::<Vec<_>>());
        let gates = self.gate_rows();
        if !gates.is_empty() {
            text.push('\n');
            text.push_str(&table(&GATE_HEAD, &gates.iter().map(gate_cells).collect::<Vec<_>>()));
        }
        text
    }

    /// Writes the page.
    pub fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let mut notes = vec![
            format!(
                "pgbench with {} clients, {} s a run, {} interleaved rounds, scale {}; one leader and {} followers on \
                 the same machine",
                self.clients, self.seconds, self.pairs, self.scale, self.followers,
            ),
            "medians, with the smallest and the largest; ratios are formed within one round".to_owned(),
            "*direct* is the physical limit of this machine without a proxy: clients, servers and proxies share its \
             processors, so whatever a proxy uses is missing elsewhere"
                .to_owned(),
        ];
        // Half a processor's worth of other work is enough to blur a comparison of wall times.
        if self.head.machine.load_before > 0.5 {
            notes.push(
                "**the machine had other work during this experiment**: its throughputs and their ratios are blurred, \
                 as their spread shows, and so are times of gates; processor times stand"
                    .to_owned(),
            );
        }
        let title = ("Router: price and gain", &notes[..], &*self.page_tables());
        self.head.write(directory, title, |path| draw(path, &self.panels()))
    }

    fn page_tables(&self) -> String {
        let mut page = "## Throughput and processor time\n\n".to_owned();
        page.push_str(&table(&ROW_HEAD, &self.rows().iter().map(row_cells).collect::<Vec<_>>()));
        page.push_str(
            "\n`select-only` is one read by primary key, autocommit, READ COMMITTED for direct and pgbouncer and \
             serializable\nthrough onecopy. `tpcb-like` is SERIALIZABLE everywhere and tried again after 40001; \
             `mixed` is nine reads to one such\ntransaction, all SERIALIZABLE. PgBouncer has no row for named \
             statements: before 1.21 it cannot pool them.\n",
        );
        let gates = self.gate_rows();
        if !gates.is_empty() {
            page.push_str("\n## Gates and tripwire\n\n");
            page.push_str(&table(&GATE_HEAD, &gates.iter().map(gate_cells).collect::<Vec<_>>()));
            page.push_str(
                "\n*closed*: commits wait while a gate takes the epoch on all servers. An epoch that lacks no commit \
                 stays fresh however\nold it is, and nobody makes a new one while nobody reads. `-`: nothing of the \
                 kind happened.\n",
            );
        }
        page.push_str("\n## The bars\n\n");
        page.push_str(&table(&["what", "bar"], &BARS.map(|(what, bar)| vec![what.to_owned(), bar.to_owned()])));
        page
    }

    fn panels(&self) -> [Panel; 2] {
        let rows = self.rows();
        let measured = |way: &(usize, &str)| rows.iter().any(|row| row.proxy == way.1);
        let ways: Vec<(usize, &str)> = PROXIES.into_iter().enumerate().filter(measured).collect();
        let behind_proxies = ways.iter().copied().filter(|way| way.1 != "direct").collect();
        let panel = |title: &str, proxies: Vec<(usize, &'static str)>, value: fn(&Row) -> Option<Spread>| Panel {
            title: title.to_owned(),
            series: proxies.iter().map(|(colour, proxy)| ((*proxy).to_owned(), *colour)).collect(),
            groups: WORKLOADS
                .iter()
                .map(|(script, protocol)| {
                    let bar = |(_, proxy): &(usize, &'static str)| -> Bar {
                        rows.iter()
                            .find(|row| (row.script, row.protocol, row.proxy) == (*script, *protocol, *proxy))
                            .and_then(value)
                    };
                    (format!("{} {}", script.name(), protocol.name()), proxies.iter().map(bar).collect())
                })
                .collect(),
        };
        [
            panel("throughput, ratio to direct", ways, |row| row.throughput_ratio),
            panel("processor time of the proxy, us a transaction", behind_proxies, |row| row.proxy_cpu_us),
        ]
    }
}

fn row(runs: &[&Measurement], direct: &[&Measurement]) -> Row {
    let first = runs[0];
    let spread = |value: &dyn Fn(&Measurement) -> Option<f64>| {
        Spread::of(&runs.iter().filter_map(|run| value(run)).collect::<Vec<f64>>())
    };
    Row {
        script: first.script,
        protocol: first.protocol,
        proxy: first.proxy,
        runs: runs.len(),
        transactions_per_second: spread(&|run| Some(run.counts.transactions_per_second)),
        throughput_ratio: spread(&|run| {
            let partner = direct.iter().find(|partner| partner.round == run.round)?;
            Some(run.counts.transactions_per_second / partner.counts.transactions_per_second)
        }),
        proxy_cpu_us: spread(&|run| run.proxy_cpu_us),
        servers_cpu_us: spread(&|run| Some(run.servers_cpu_us)),
        latency_ms: spread(&|run| Some(run.counts.latency_ms)),
        retries_percent: spread(&|run| Some(100.0 * run.counts.retries as f64 / run.counts.transactions as f64)),
        failed: runs.iter().map(|run| run.counts.failed).sum(),
    }
}

fn gate_row(runs: &[&Measurement], seconds: u32) -> GateRow {
    let spread = |value: &dyn Fn(&Measurement, &Gates) -> Option<f64>| {
        let values = runs.iter().filter_map(|run| value(run, run.gates.as_ref()?));
        Spread::of(&values.collect::<Vec<f64>>())
    };
    GateRow {
        script: runs[0].script,
        protocol: runs[0].protocol,
        gates_per_second: spread(&|_, gates| Some(gates.gates? / f64::from(seconds))),
        closed_p50_ms: spread(&|_, gates| gates.closed_p50_ms),
        closed_p99_ms: spread(&|_, gates| gates.closed_p99_ms),
        closed_percent: spread(&|_, gates| Some(gates.closed_share? * 100.0)),
        epoch_age_ms: spread(&|_, gates| gates.epoch_age_ms),
        gave_up: spread(&|_, gates| gates.gave_up),
        tripwire_aborts_percent: spread(&|run, gates| {
            Some(100.0 * gates.tripwire_aborts? / run.counts.transactions as f64)
        }),
    }
}

const ROW_HEAD: [&str; 8] =
    ["workload", "way", "tps", "ratio to direct", "proxy CPU us/tx", "servers CPU us/tx", "latency ms", "retries %"];

fn row_cells(row: &Row) -> Vec<String> {
    let failed = if row.failed > 0 { format!(", {} failed", row.failed) } else { String::new() };
    vec![
        format!("{} {}", row.script.name(), row.protocol.name()),
        row.proxy.to_owned(),
        cell(row.transactions_per_second, 0),
        cell(row.throughput_ratio, 2),
        cell(row.proxy_cpu_us, 1),
        cell(row.servers_cpu_us, 0),
        cell(row.latency_ms, 2),
        cell(row.retries_percent, 1) + &failed,
    ]
}

const GATE_HEAD: [&str; 8] = [
    "workload",
    "gates/s",
    "closed p50 ms",
    "closed p99 ms",
    "closed % of time",
    "epoch age ms",
    "gave up",
    "tripwire aborts %",
];

fn gate_cells(row: &GateRow) -> Vec<String> {
    vec![
        format!("{} {}", row.script.name(), row.protocol.name()),
        cell(row.gates_per_second, 0),
        cell(row.closed_p50_ms, 2),
        cell(row.closed_p99_ms, 2),
        cell(row.closed_percent, 1),
        cell(row.epoch_age_ms, 1),
        cell(row.gave_up, 0),
        cell(row.tripwire_aborts_percent, 2),
    ]
}

fn cell(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or("-".to_owned(), |spread| {
        format!("{:.digits$} ({:.digits$}-{:.digits$})", spread.median, spread.min, spread.max)
    })
}

/// A Markdown table whose columns line up on a terminal as well.
fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells.zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("| {} |\n", padded.join(" | "))
    };
    let dashes: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
    let mut text = line(&mut head.iter().copied()) + &line(&mut dashes.iter().map(String::as_str));
    for row in rows {
        text.push_str(&line(&mut row.iter().map(String::as_str)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pgbench::Counts;

    fn measurement(proxy: &'static str, round: u32, speed: f64) -> Measurement {
        Measurement {
            script: Script::SelectOnly,
            protocol: Protocol::Simple,
            proxy,
            round,
            counts: Counts {
                transactions: 1000,
                failed: 0,
                retries: 10,
                transactions_per_second: speed,
                latency_ms: 1.0,
            },
            proxy_cpu_us: (proxy != "direct").then_some(15.0),
            servers_cpu_us: 50.0,
            gates: None,
        }
    }

    fn report() -> Report {
        Report {
            head: Head::new("router", "onecopy-bench router".to_owned(), vec!["PostgreSQL 15".to_owned()]),
            clients: 8,
            seconds: 1,
            pairs: 3,
            scale: 1,
            followers: 2,
            measurements: vec![
                measurement("direct", 1, 100.0),
                measurement("onecopy", 1, 150.0),
                measurement("direct", 2, 200.0),
                measurement("onecopy", 2, 100.0),
                // Its partner failed: it counts for speed, not for the ratio.
                measurement("onecopy", 3, 400.0),
            ],
        }
    }

    #[test]
    fn ratios_are_formed_within_a_round() {
        let rows = report().rows();
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].proxy, rows[1].proxy), ("direct", "onecopy"));
        assert_eq!(rows[0].throughput_ratio, Some(Spread { median: 1.0, min: 1.0, max: 1.0 }));
        assert_eq!(rows[1].throughput_ratio, Some(Spread { median: 1.0, min: 0.5, max: 1.5 }));
        assert_eq!(rows[1].transactions_per_second, Some(Spread { median: 150.0, min: 100.0, max: 400.0 }));
        assert_eq!(rows[0].proxy_cpu_us, None);
        assert_eq!(rows[1].retries_percent.map(|spread| spread.median), Some(1.0));
    }

    #[test]
    fn the_page_has_all_ways_and_the_bars() {
        let page = report().page_tables();
        assert!(page.contains("<= 15 us"), "{page}");
        let (throughput, gates) = page.split_once("## Gates").expect("both tables");
        let is_row = |line: &&str| line.starts_with("| select-only simple");
        assert_eq!(gates.lines().filter(is_row).count(), 1, "{page}");
        let lines: Vec<&str> = throughput.lines().filter(is_row).collect();
        assert_eq!(lines.len(), 2, "{page}");
        assert!(lines[1].contains("1.00 (0.50-1.50)"), "{}", lines[1]);
    }

    #[test]
    fn json_has_runs_and_summary() {
        let json = report().to_json();
        assert_eq!(json["report"]["measurements"].as_array().map(Vec::len), Some(5));
        assert_eq!(json["summary"][1]["throughput_ratio"]["median"], 1.0);
        assert_eq!(json["report"]["measurements"][0]["script"], "select-only");
    }
}
