//! Whether this host has memory for forks: refused before they are made is better than killed with their parent.

use onecopy_machine::{MachineConfiguration, MachineError, MachineName};
use onecopy_memory::pressure::Host;
use onecopy_memory::{BindingLimit, MemoryError};

/// What is soon its own of a fork's memory, in percent: measured was less after a minute of reads
/// (`docs/results/fork.md`). The rest is in files, from which the kernel can read it again.
const OWN_PERCENT: u64 = 10;

/// QEMU and the processes that look after a machine.
const PROCESSES_BYTES: u64 = 64 << 20;

/// Memory that so many forks need soon.
fn wanted(memory_bytes: u64, count: u64) -> u64 {
    (memory_bytes / 100 * OWN_PERCENT + PROCESSES_BYTES).saturating_mul(count)
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
    count: usize,
) -> Result<(), MachineError> {
    let wanted_bytes = wanted(configuration.memory_bytes, count as u64);
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
    fn what_forks_share_is_not_needed_again() {
        let gibibyte = 1 << 30;
        assert!((4 * PROCESSES_BYTES..gibibyte).contains(&wanted(gibibyte, 4)));
        assert_eq!(wanted(u64::MAX, 1 << 40), u64::MAX);
    }
}
