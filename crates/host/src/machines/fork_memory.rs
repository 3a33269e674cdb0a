//! Whether this host has memory for forks: refused before they are made is better than killed with their parent.

use onecopy_machine::{MachineConfiguration, MachineError, MachineName};
use onecopy_memory::pressure::Host;
use onecopy_memory::{BindingLimit, MemoryError};

/// What is its own of the memory of a fork that shares the rest: measured was less after a minute of reads
/// (`docs/results/fork.md`).
const OWN_PERCENT: u64 = 10;

/// QEMU and the processes that look after a machine.
const PROCESSES_BYTES: u64 = 64 << 20;

/// Memory that so many forks need soon. One that shares nothing has all of its memory.
fn wanted(memory_bytes: u64, shares: bool, count: u64) -> u64 {
    let own = if shares { memory_bytes / 100 * OWN_PERCENT } else { memory_bytes };
    (own + PROCESSES_BYTES).saturating_mul(count)
}

/// What can be had without swapping: of this host, and by this process, whose limits machines that it starts have.
fn available() -> Result<u64, MemoryError> {
    let host = Host::new()?;
    let limits = host.limits_of(std::process::id())?;
    let least = limits.iter().map(BindingLimit::available_bytes).min().unwrap_or(u64::MAX);
    Ok(host.memory()?.available_bytes.min(least))
}

/// Refuses forks of a machine that there is no memory for.
///
/// # Errors
/// [`MachineError::NoMemory`].
pub(super) fn check(
    parent: &MachineName,
    configuration: &MachineConfiguration,
    shares: bool,
    count: usize,
) -> Result<(), MachineError> {
    let wanted_bytes = wanted(configuration.memory_bytes, shares, count as u64);
    match available() {
        Ok(available_bytes) if available_bytes < wanted_bytes => {
            Err(MachineError::NoMemory { parent: parent.clone(), wanted_bytes, available_bytes })
        }
        Ok(_) => Ok(()),
        Err(error) => {
            tracing::warn!(%error, "whether there is memory for a fork is not known");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_is_not_needed_again() {
        let gibibyte = 1 << 30;
        assert_eq!(wanted(gibibyte, false, 1), gibibyte + PROCESSES_BYTES);
        assert!(wanted(gibibyte, true, 4) < gibibyte, "four that share");
        assert_eq!(wanted(u64::MAX / 2, false, 1 << 40), u64::MAX);
    }
}
