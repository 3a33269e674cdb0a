//! On what a figure was measured.

use std::fs;

use serde::Serialize;

/// The machine under a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Model of the first processor, as the kernel names it.
    pub processor: String,
    /// Processors that the kernel schedules on.
    pub processors: usize,
    /// Memory, in mebibytes.
    pub memory_mib: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// Load average over the last minute before the experiment: who else was at work.
    pub load_before: f64,
}

impl Machine {
    /// Asks the kernel (`proc(5)`); what it does not say is shown as unknown.
    pub fn observe() -> Machine {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Machine {
            processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or("unknown").to_owned(),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            memory_mib: field(&read("/proc/meminfo"), "MemTotal")
                .and_then(|value| value.trim_end_matches(" kB").parse::<u64>().ok())
                .map_or(0, |kibibytes| kibibytes / 1024),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load_before: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(f64::NAN),
        }
    }
}

/// Load average over the last minute; not a number where the kernel does not tell.
pub fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(f64::NAN)
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_files() {
        let text = "processor\t: 0\nmodel name\t: Some CPU: fast\nMemTotal:       2048 kB\n";
        assert_eq!(field(text, "model name"), Some("Some CPU: fast"));
        assert_eq!(field(text, "MemTotal"), Some("2048 kB"));
        assert_eq!(field(text, "absent"), None);
    }
}
