//! Whether this host has memory for forks: refused before they are made is better than killed with their parent.

use onecopy_machine::{MachineConfiguration, MachineError, MachineName, MemoryFootprint};
use onecopy_memory::pressure::Host;
use onecopy_memory::{BindingLimit, MemoryError};

/// What is soon its own of a fork's memory, in percent: measured was less after a minute of reads
/// (`docs/results/fork.md`). The rest is in files, from which the kernel can read it again.
const OWN_PERCENT: u64 = 10;

/// QEMU and the processes that look after a machine.
const PROCESSES_BYTES: u64 = 64 << 20;

/// What is to be made.
pub(super) struct Wanted {
    /// So many forks.
    pub count: usize,
    /// They share what none of them changes; otherwise each has all of it.
    pub shares: bool,
    /// A checkpoint of the parent is taken for them.
    pub takes_checkpoint: bool,
}

impl Wanted {
    /// Memory that they need soon. What a machine has that nothing was kept of before is there twice at its first
    /// checkpoint, until that is written.
    fn bytes(&self, memory_bytes: u64, parent: &MemoryFootprint) -> u64 {
        let own = if self.shares { memory_bytes / 100 * OWN_PERCENT } else { parent.private_bytes };
        let twice = if self.takes_checkpoint && parent.shadow_bytes == 0 { parent.private_bytes } else { 0 };
        own.saturating_add(PROCESSES_BYTES).saturating_mul(self.count as u64).saturating_add(twice)
    }
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
    wanted: Wanted,
    footprint: &MemoryFootprint,
) -> Result<(), MachineError> {
    let wanted_bytes = wanted.bytes(configuration.memory_bytes, footprint);
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
        let parent = |shadow_bytes| MemoryFootprint { private_bytes: gibibyte, shadow_bytes, ..Default::default() };
        let wanted = |count, shares, takes_checkpoint| Wanted { count, shares, takes_checkpoint };
        let shared = wanted(4, true, true).bytes(gibibyte, &parent(1));
        assert!((4 * PROCESSES_BYTES..gibibyte).contains(&shared));
        assert_eq!(wanted(4, true, true).bytes(gibibyte, &parent(0)), shared + gibibyte, "its first checkpoint");
        assert_eq!(wanted(4, true, false).bytes(gibibyte, &parent(0)), shared, "one that is there");
        assert!(wanted(1, false, false).bytes(gibibyte, &parent(1)) > gibibyte, "it shares nothing");
        assert_eq!(wanted(1 << 40, true, true).bytes(u64::MAX, &parent(0)), u64::MAX);
    }
}
