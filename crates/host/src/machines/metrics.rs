//! Metrics of machines, and the page of a host that has some of its own.

use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_control::metrics::Metric;
use onecopy_machine::keeper::{ProtectionRole, ProtectionState, ProtectionStatus, unix_ms};
use onecopy_machine::migration::{Arrival, Departure, DepartureState, MigrationResult};
use onecopy_machine::{MachineError, MachineHome, MachineStatus, NetworkStatistics, TotalFootprint};
use tokio::sync::Mutex;

use super::registry::blocking;
use super::{MachineSummary, Machines};
use crate::{HostError, Observed};

/// How long what was seen of machines is told again: looking at them asks each keeper and guest.
const SEEN_FOR: Duration = Duration::from_secs(1);

/// A machine that takes longer is not told of: who scrapes waits some ten seconds.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// The page of the machines of a directory that are no cluster's: a cluster tells of its own.
#[derive(Debug)]
pub struct MachinesPage {
    machines: Machines,
    /// One look at a time, and when the last one ended.
    seen: Mutex<Option<(Instant, Arc<Vec<Seen>>)>>,
}

/// A machine, and what is written down of its going and coming. What cannot be read is not told.
#[derive(Debug)]
struct Seen {
    summary: MachineSummary,
    departure: Option<Departure>,
    arrival: Option<Arrival>,
    /// It is sent to another host now.
    is_sent: bool,
    /// What is kept of it; none where no checkpoints can be taken of it.
    checkpoints: Option<CheckpointFiles>,
}

/// Files of checkpoints, as the file system tells of them: a scrape reads none.
#[derive(Debug, Default)]
struct CheckpointFiles {
    count: u64,
    /// Of the host's disk.
    bytes: u64,
    /// The number and the age of the newest one.
    newest: Option<(u64, Duration)>,
}

impl CheckpointFiles {
    fn of(home: &MachineHome) -> CheckpointFiles {
        let mut found = CheckpointFiles::default();
        for entry in std::fs::read_dir(home.checkpoints()).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("checkpoint.")?.parse::<u64>().ok());
            let Some((number, metadata)) = number.zip(entry.metadata().ok()) else { continue };
            found.count += 1;
            found.bytes += metadata.blocks() * 512;
            let age = metadata.modified().ok().map(|written| written.elapsed().unwrap_or_default());
            found.newest = found.newest.max(age.map(|age| (number, age)));
        }
        found
    }
}

impl MachinesPage {
    /// That of these.
    pub fn of(machines: Machines) -> MachinesPage {
        MachinesPage { machines, seen: Mutex::default() }
    }

    async fn look(&self) -> Result<Arc<Vec<Seen>>, HostError> {
        let mut seen = self.seen.lock().await;
        if let Some((_, known)) = seen.as_ref().filter(|(at, _)| at.elapsed() < SEEN_FOR) {
            return Ok(Arc::clone(known));
        }
        let list = self.machines.list_within(LOOK_MAX).await?;
        let directory = self.machines.directory.machines();
        let own = list.into_iter().filter(|summary| !summary.of_cluster);
        let own = own.map(|summary| (MachineHome::of(&directory, &summary.name), summary)).collect::<Vec<_>>();
        let look =
            move || Ok::<_, HostError>(own.into_iter().map(|(home, summary)| Seen::of(&home, summary)).collect());
        let now = Arc::new(blocking("looking at machines", look).await?);
        *seen = Some((Instant::now(), Arc::clone(&now)));
        Ok(now)
    }
}

impl Observed for MachinesPage {
    async fn metrics(&self) -> String {
        let mut text = String::new();
        let seen = self.look().await.unwrap_or_else(|error| {
            tracing::warn!(%error, "no metrics of machines");
            Arc::default()
        });
        let machines: Vec<_> = seen.iter().map(|seen| (seen.name(), &seen.summary.machine)).collect();
        machine_metrics(&machines, &mut text);
        migration_metrics(&seen, &mut text);
        checkpoint_metrics(&seen, &mut text);
        protection_metrics(&machines, &mut text);
        text
    }

    async fn status(&self) -> serde_json::Value {
        match self.look().await {
            Ok(seen) => serde_json::json!(seen.iter().map(|seen| &seen.summary).collect::<Vec<_>>()),
            Err(error) => serde_json::json!({ "error": error.to_string() }),
        }
    }

    /// No machine is asked.
    async fn health(&self) -> Result<(), String> {
        let directory = self.machines.directory.machines();
        let names = blocking("looking for machines", move || MachineHome::names(&directory)).await;
        names.map(|_| ()).map_err(|error: MachineError| error.to_string())
    }
}

impl Seen {
    fn of(home: &MachineHome, summary: MachineSummary) -> Seen {
        let departure = Departure::of(home).unwrap_or_default();
        let is_begun = |departure: &Departure| departure.state == DepartureState::Begun && !departure.protects;
        let is_begun = departure.as_ref().is_some_and(is_begun);
        let is_sent = is_begun && home.has_keeper() && !home.is_migrated();
        let has_checkpoints = home.configuration().is_ok_and(|configuration| configuration.checkpoints);
        let checkpoints = has_checkpoints.then(|| CheckpointFiles::of(home));
        Seen { summary, departure, arrival: Arrival::of(home).unwrap_or_default(), is_sent, checkpoints }
    }

    fn name(&self) -> &str {
        self.summary.name.as_str()
    }

    /// Its last migration from here, where it has ended there.
    fn result(&self) -> Option<&MigrationResult> {
        self.departure.as_ref().and_then(|departure| departure.result.as_ref())
    }
}

fn migration_metrics(machines: &[Seen], text: &mut String) {
    let mut add = |name, help, value: &dyn Fn(&Seen) -> Option<Box<dyn Display>>| {
        let mut metric = Metric::new(text, name, "gauge", help);
        for machine in machines {
            if let Some(value) = value(machine) {
                metric.sample(&[("server", machine.name())], value);
            }
        }
    };
    add("onecopy_machine_migration_under_way", "1 while the machine is sent to another host.", &|machine| {
        machine.departure.as_ref().map(|_| Box::new(u8::from(machine.is_sent)) as Box<dyn Display>)
    });
    add(
        "onecopy_machine_migration_in_doubt",
        "1 while the machine stands and it is not known here on which host it goes on.",
        &|machine| {
            let has_moved = machine.departure.is_some() || machine.arrival.is_some();
            has_moved.then(|| Box::new(u8::from(machine.summary.machine.in_doubt)) as Box<dyn Display>)
        },
    );
    add("onecopy_machine_arrival_disk_whole", "1 when the disk needs nothing of where it came from.", &|machine| {
        Some(Box::new(u8::from(machine.arrival.as_ref()?.is_whole)))
    });
    add("onecopy_machine_migration_pause_seconds", "How long the machine stood to go to another host.", &|machine| {
        Some(Box::new(machine.result()?.pause_us as f64 / 1e6))
    });
    add("onecopy_machine_migration_duration_seconds", "How long its going took in all.", &|machine| {
        Some(Box::new(machine.result()?.total_ms as f64 / 1e3))
    });
    add("onecopy_machine_migration_rounds", "Rounds, with the last one.", &|machine| {
        Some(Box::new(machine.result()?.rounds))
    });
    add("onecopy_machine_migration_bytes", "Bytes of memory that went over the connection.", &|machine| {
        Some(Box::new(machine.result()?.bytes))
    });
    let help = "Pages by what was sent of them: nothing of zeros and of what was known there or on its disk, or data.";
    let mut pages = Metric::new(text, "onecopy_machine_migration_pages", "gauge", help);
    for (machine, result) in machines.iter().filter_map(|machine| Some((machine, machine.result()?))) {
        let MigrationResult { zero_pages, known_pages, disk_pages, data_pages, .. } = result;
        for (kind, count) in [("zero", zero_pages), ("known", known_pages), ("disk", disk_pages), ("data", data_pages)]
        {
            pages.sample(&[("server", machine.name()), ("kind", kind)], count);
        }
    }
}

/// Of machines of which checkpoints can be taken.
fn checkpoint_metrics(machines: &[Seen], text: &mut String) {
    let mut add = |name, help, value: &dyn Fn(&CheckpointFiles) -> Option<f64>| {
        let mut metric = Metric::new(text, name, "gauge", help);
        for machine in machines {
            if let Some(value) = machine.checkpoints.as_ref().and_then(value) {
                metric.sample(&[("server", machine.name())], value);
            }
        }
    };
    add("onecopy_machine_checkpoints", "Checkpoints that are kept of it.", &|kept| Some(kept.count as f64));
    add("onecopy_machine_checkpoint_bytes", "What their files take of the host's disk.", &|kept| {
        Some(kept.bytes as f64)
    });
    add("onecopy_machine_checkpoint_age_seconds", "Age of the newest one.", &|kept| Some(kept.newest?.1.as_secs_f64()));
}

/// Of machines that are protected, and of copies that protect others.
fn protection_metrics(machines: &[(&str, &MachineStatus)], text: &mut String) {
    let mut add = |name, kind, help, value: &dyn Fn(&ProtectionStatus) -> Option<f64>| {
        let mut metric = Metric::new(text, name, kind, help);
        let protected = machines.iter().filter_map(|(name, machine)| Some((name, machine.protection.as_ref()?)));
        for (name, status) in protected {
            if let Some(value) = value(status) {
                let role = if status.role == ProtectionRole::Primary { "primary" } else { "backup" };
                metric.sample(&[("server", name), ("role", role)], value);
            }
        }
    };
    let seconds = |microseconds: u64| (microseconds > 0).then_some(microseconds as f64 / 1e6);
    add("onecopy_machine_protected", "gauge", "1 while the other host's copy could go on; 0 while not.", &|status| {
        Some(f64::from(u8::from(status.state == ProtectionState::Protected)))
    });
    add("onecopy_machine_protection_age_seconds", "gauge", "Age of the newest checkpoint that is there.", &|status| {
        Some(unix_ms().saturating_sub(status.newest_unix_ms?) as f64 / 1e3)
    });
    add("onecopy_machine_protection_epochs_total", "counter", "Checkpoints that the copy has had.", &|status| {
        Some(status.epochs as f64)
    });
    add("onecopy_machine_protection_pause_seconds", "gauge", "How long it stood for the last one.", &|status| {
        seconds(status.pause_us)
    });
    add("onecopy_machine_protection_held_seconds", "gauge", "From then until its output was let go.", &|status| {
        seconds(status.held_us)
    });
    add(
        "onecopy_machine_protection_braked_seconds_total",
        "counter",
        "How long it stood because it changed faster than its checkpoints travelled.",
        &|status| (status.role == ProtectionRole::Primary).then_some(status.braked_us as f64 / 1e6),
    );
    let primaries = || {
        let protected = machines.iter().filter_map(|(name, machine)| Some((*name, machine.protection.as_ref()?)));
        protected.filter(|(_, status)| status.role == ProtectionRole::Primary)
    };
    let name = "onecopy_machine_protection_bytes_total";
    let mut bytes = Metric::new(text, name, "counter", "Bytes that were sent of them, for memory and for the disk.");
    for (name, status) in primaries() {
        let of_memory = status.bytes.saturating_sub(status.disk_bytes);
        for (of, count) in [("memory", of_memory), ("disk", status.disk_bytes)] {
            bytes.sample(&[("server", name), ("of", of)], count);
        }
    }
    let help = "Pages and blocks of 4 KiB: sent as data, known to the copy's host, or there before it was copied.";
    let mut pieces = Metric::new(text, "onecopy_machine_protection_pieces_total", "counter", help);
    for (name, status) in primaries() {
        for (of, kind, count) in [
            ("memory", "data", status.data_pages),
            ("memory", "known", status.known_pages),
            ("disk", "data", status.data_blocks),
            ("disk", "known", status.known_blocks),
            ("disk", "same", status.same_blocks),
        ] {
            pieces.sample(&[("server", name), ("of", of), ("kind", kind)], count);
        }
    }
}

/// Machines, by the names of their servers or their own.
pub(crate) fn machine_metrics(machines: &[(&str, &MachineStatus)], text: &mut String) {
    let mut add = |name, kind, help, value: &dyn Fn(&MachineStatus) -> Option<u64>| {
        family(text, machines, (name, kind, help), value);
    };
    add("onecopy_machine_running", "gauge", "1 when the machine runs and its guest answers.", &|machine| {
        Some(u64::from(machine.state == "running"))
    });
    add(
        "onecopy_machine_unresponsive_seconds",
        "gauge",
        "For how long the guest has run and not answered; 0 while it answers.",
        &|machine| Some(machine.unresponsive_s.unwrap_or(0)),
    );
    add("onecopy_machine_memory_bytes", "gauge", "Memory of the machine.", &|machine| Some(machine.memory_bytes));
    add(
        "onecopy_machine_memory_available_bytes",
        "gauge",
        "What programs in the guest could still have.",
        &|machine| machine.memory_available_bytes,
    );
    add("onecopy_machine_disk_used_bytes", "gauge", "What the machine's disk takes of the host's.", &|machine| {
        Some(machine.disk_used_bytes)
    });
    add(
        "onecopy_machine_disk_restarts_total",
        "counter",
        "Starts of the disk's process after the first.",
        &|machine| Some(machine.disk_restarts),
    );
    add("onecopy_machine_memory_private_bytes", "gauge", "The guest's memory that no other machine has.", &|machine| {
        Some(machine.footprint.private_bytes)
    });
    add(
        "onecopy_machine_memory_merged_bytes",
        "gauge",
        "What of its private memory the kernel has merged with equal pages.",
        &|machine| Some(machine.footprint.merged_bytes),
    );
    add(
        "onecopy_machine_memory_shared_bytes",
        "gauge",
        "Frozen memory that it has in common with other forks; told by each of them.",
        &|machine| machine.footprint.shared.as_ref().map(|shared| shared.bytes),
    );
    add("onecopy_machine_memory_shadow_bytes", "gauge", "Kept beside its memory for checkpoints.", &|machine| {
        Some(machine.footprint.shadow_bytes)
    });
    add("onecopy_machine_memory_overhead_bytes", "gauge", "Its processes, without the guest's memory.", &|machine| {
        Some(machine.footprint.overhead_bytes)
    });
    if let Some(total) = total_footprint(machines) {
        let mut add = |name, help, value: u64| {
            Metric::new(text, name, "gauge", help).sample(&[], value);
        };
        add("onecopy_machines_memory_bytes", "Memory of the host that all machines take.", total.memory_bytes);
        add("onecopy_machines_disk_bytes", "What their disks take, each once.", total.disk_bytes);
    }
    network_metrics(machines, text);
}

/// What machines take together; none where there are none.
pub(crate) fn total_footprint(machines: &[(&str, &MachineStatus)]) -> Option<TotalFootprint> {
    let lying = machines.iter().map(|(_, machine)| (&machine.footprint, &machine.disks[..]));
    (!machines.is_empty()).then(|| TotalFootprint::of(lying))
}

/// Of machines on a bridge, while they run.
fn network_metrics(machines: &[(&str, &MachineStatus)], text: &mut String) {
    type Of = fn(&NetworkStatistics) -> u64;
    let dropped: Of = |network| {
        let refused = network.malformed_frames + network.foreign_source_frames + network.for_bridge_frames;
        refused + network.not_taken_frames + network.lost_frames
    };
    let metrics: [(&str, &str, &str, Of); 8] = [
        ("sent_frames_total", "counter", "Frames of the machine that its network has.", |network| network.sent_frames),
        ("sent_bytes_total", "counter", "Their bytes.", |network| network.sent_bytes),
        ("received_frames_total", "counter", "Frames that the machine was given.", |network| network.received_frames),
        ("received_bytes_total", "counter", "Their bytes.", |network| network.received_bytes),
        ("dropped_frames_total", "counter", "Frames that went nowhere.", dropped),
        ("held_frames", "gauge", "Frames of the machine that wait for their epoch.", |network| network.held_frames),
        ("held_bytes", "gauge", "Their bytes.", |network| network.held_bytes),
        ("blocks_total", "counter", "How often the machine was made to wait.", |network| network.blocks),
    ];
    for (name, kind, help, of) in metrics {
        let name = format!("onecopy_machine_network_{name}");
        family(text, machines, (&name, kind, help), |machine| {
            Some(of(machine.network.as_ref()?.statistics.as_ref()?))
        });
    }
    let help = "How long frames have waited that are gone.";
    family(text, machines, ("onecopy_machine_network_wait_seconds_total", "counter", help), |machine| {
        Some(machine.network.as_ref()?.statistics.as_ref()?.freed_wait_us as f64 / 1e6)
    });
}

/// One metric (name, kind, help) with a sample for each machine that has a value.
fn family<V: Display>(
    text: &mut String,
    machines: &[(&str, &MachineStatus)],
    (name, kind, help): (&str, &str, &str),
    value: impl Fn(&MachineStatus) -> Option<V>,
) {
    let mut metric = Metric::new(text, name, kind, help);
    for (server, machine) in machines {
        if let Some(value) = value(machine) {
            metric.sample(&[("server", server)], value);
        }
    }
}
