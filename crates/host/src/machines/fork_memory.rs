//! Whether this host has memory for forks: refused before they are made is better than killed with their parent.

use onecopy_machine::{MachineConfiguration, MachineError, MachineName, MemoryFootprint, available_memory_bytes};

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
}

impl Wanted {
    /// Memory that they need soon.
    fn bytes(&self, memory_bytes: u64, parent: &MemoryFootprint) -> u64 {
        let own = if self.shares { memory_bytes / 100 * OWN_PERCENT } else { parent.private_bytes };
        own.saturating_add(PROCESSES_BYTES).saturating_mul(self.count as u64)
    }
}

/// Refuses forks of a machine that there is no memory for, on this host and by this process, whose limits machines that
/// it starts have. Memory for a checkpoint of the parent is looked after by its memory server.
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
    match available_memory_bytes(std::process::id()) {
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
        let parent = MemoryFootprint { private_bytes: gibibyte, ..Default::default() };
        let wanted = |count, shares| Wanted { count, shares };
        let shared = wanted(4, true).bytes(gibibyte, &parent);
        assert!((4 * PROCESSES_BYTES..gibibyte).contains(&shared));
        assert!(wanted(1, false).bytes(gibibyte, &parent) > gibibyte, "it shares nothing");
        assert_eq!(wanted(1 << 40, true).bytes(u64::MAX, &parent), u64::MAX);
    }
}
