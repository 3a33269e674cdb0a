//! What machines take of their host, in words.

use onecopy_host::{MachineStatus, TotalFootprint};
use onecopy_memory::size;

/// Of one machine that runs.
pub fn footprint_line(machine: &MachineStatus) -> String {
    let memory = &machine.footprint;
    let shared = memory.shared.as_ref().map(|shared| format!(", {} shared", size::text(shared.bytes)));
    let merged = (memory.merged_bytes > 0).then(|| format!(" ({} of it merged)", size::text(memory.merged_bytes)));
    let layers: u64 = machine.disks.iter().skip(1).map(|disk| disk.bytes).sum();
    let layers = (layers > 0).then(|| format!(", disk over {} of others", size::text(layers)));
    format!(
        "takes {} of its own memory{}{}, {} shadow, {} processes{}",
        size::text(memory.private_bytes),
        merged.unwrap_or_default(),
        shared.unwrap_or_default(),
        size::text(memory.shadow_bytes),
        size::text(memory.overhead_bytes),
        layers.unwrap_or_default()
    )
}

/// Of all.
pub fn total_line(total: &TotalFootprint) -> String {
    format!(
        "all machines take {} of memory ({} own, {} shared, {} shadow, {} processes) and {} of disk",
        size::text(total.memory_bytes),
        size::text(total.private_bytes),
        size::text(total.shared_bytes),
        size::text(total.shadow_bytes),
        size::text(total.overhead_bytes),
        size::text(total.disk_bytes)
    )
}
