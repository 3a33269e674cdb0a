//! How the guest is.

use super::postgres;
use super::replies::{Result, failed};
use crate::protocol::Health;
use rustix::fs::statvfs;
use std::fs::read_to_string;
use std::time::{SystemTime, UNIX_EPOCH};

/// What the guest's first process writes when something goes wrong.
const COMPLAINTS: &str = "/run/onecopy/complaints";
/// The latest of them.
const COMPLAINTS_MAX: usize = 100;

pub(crate) fn health() -> Result<Health> {
    let memory = read_to_string("/proc/meminfo").map_err(|error| failed("/proc/meminfo", error))?;
    let uptime = read_to_string("/proc/uptime").map_err(|error| failed("/proc/uptime", error))?;
    let root = statvfs("/").map_err(|error| failed("the root file system", error))?;
    let complaints = read_to_string(COMPLAINTS).unwrap_or_default();
    let complaints: Vec<String> = complaints.lines().map(ToString::to_string).collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Health {
        uptime_ms: uptime_ms(&uptime).unwrap_or_default(),
        unix_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
        memory_total_bytes: meminfo_bytes(&memory, "MemTotal:").unwrap_or_default(),
        memory_available_bytes: meminfo_bytes(&memory, "MemAvailable:").unwrap_or_default(),
        root_total_bytes: root.f_blocks * root.f_frsize,
        root_available_bytes: root.f_bavail * root.f_frsize,
        postgres: postgres::status(),
        complaints: complaints[complaints.len().saturating_sub(COMPLAINTS_MAX)..].to_vec(),
    })
}

/// Out of `/proc/uptime`: seconds and hundredths.
fn uptime_ms(text: &str) -> Option<u64> {
    let (seconds, hundredths) = text.split_whitespace().next()?.split_once('.')?;
    Some(seconds.parse::<u64>().ok()? * 1000 + hundredths.parse::<u64>().ok()? * 10)
}

/// Out of `/proc/meminfo`, whose unit is KiB.
fn meminfo_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers_are_read() {
        assert_eq!(uptime_ms("12.34 8.00\n"), Some(12_340));
        assert_eq!(meminfo_bytes("MemTotal:  490000 kB\nMemFree: 1 kB\n", "MemFree:"), Some(1024));
        assert_eq!(meminfo_bytes("", "MemFree:"), None);
    }
}
