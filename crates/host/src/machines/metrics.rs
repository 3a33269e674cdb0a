//! Metrics of machines.

use onecopy_control::metrics::Metric;
use onecopy_machine::{MachineStatus, NetworkStatistics, TotalFootprint};

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
    let metrics: [(&str, &str, &str, Of); 9] = [
        ("sent_frames_total", "counter", "Frames of the machine that its network has.", |network| network.sent_frames),
        ("sent_bytes_total", "counter", "Their bytes.", |network| network.sent_bytes),
        ("received_frames_total", "counter", "Frames that the machine was given.", |network| network.received_frames),
        ("received_bytes_total", "counter", "Their bytes.", |network| network.received_bytes),
        ("dropped_frames_total", "counter", "Frames that went nowhere.", dropped),
        ("held_frames", "gauge", "Frames of the machine that wait for their epoch.", |network| network.held_frames),
        ("held_bytes", "gauge", "Their bytes.", |network| network.held_bytes),
        ("wait_microseconds_total", "counter", "How long frames have waited that are gone.", |network| {
            network.freed_wait_us
        }),
        ("blocks_total", "counter", "How often the machine was made to wait.", |network| network.blocks),
    ];
    for (name, kind, help, of) in metrics {
        let name = format!("onecopy_machine_network_{name}");
        family(text, machines, (&name, kind, help), |machine| {
            Some(of(machine.network.as_ref()?.statistics.as_ref()?))
        });
    }
}

/// One metric (name, kind, help) with a sample for each machine that has a value.
fn family(
    text: &mut String,
    machines: &[(&str, &MachineStatus)],
    (name, kind, help): (&str, &str, &str),
    value: impl Fn(&MachineStatus) -> Option<u64>,
) {
    let mut metric = Metric::new(text, name, kind, help);
    for (server, machine) in machines {
        if let Some(value) = value(machine) {
            metric.sample(&[("server", server)], value);
        }
    }
}
