//! Resident memory of another process, and the most that it has had (`proc_pid_status(5)`).

use std::fs;

use anyhow::Context;

/// Memory of one process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessMemory {
    process_id: u32,
}

impl ProcessMemory {
    /// That of the process of this number.
    pub fn of(process_id: u32) -> ProcessMemory {
        ProcessMemory { process_id }
    }

    /// What is resident now, in MiB.
    ///
    /// # Errors
    /// The process has ended.
    pub fn resident_mib(self) -> anyhow::Result<f64> {
        self.field("VmRSS:")
    }

    /// The most that has been resident since its start or [`ProcessMemory::forget_peak`], in MiB.
    ///
    /// # Errors
    /// The process has ended.
    pub fn peak_mib(self) -> anyhow::Result<f64> {
        self.field("VmHWM:")
    }

    /// From now on a peak is one of later.
    ///
    /// # Errors
    /// The process has ended, or is another account's.
    pub fn forget_peak(self) -> anyhow::Result<()> {
        // CLEAR_REFS_MM_HIWATER_RSS, proc_pid_clear_refs(5).
        let path = format!("/proc/{}/clear_refs", self.process_id);
        fs::write(&path, "5").with_context(|| format!("cannot write {path}"))
    }

    fn field(self, name: &str) -> anyhow::Result<f64> {
        let path = format!("/proc/{}/status", self.process_id);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let kib =
            text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<f64>().ok());
        Ok(kib.with_context(|| format!("no {name} in {path}"))? / 1024.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_is_told_until_it_is_forgotten() {
        const MIB: usize = 64;
        let own = ProcessMemory::of(std::process::id());
        let before = own.resident_mib().unwrap();
        drop(std::hint::black_box(vec![1_u8; MIB << 20]));
        assert!(own.peak_mib().unwrap() >= before + MIB as f64 / 2.0);
        own.forget_peak().unwrap();
        assert!(own.peak_mib().unwrap() < before + MIB as f64 / 2.0);
        assert!(ProcessMemory::of((1 << 22) + 1).resident_mib().is_err());
    }
}
