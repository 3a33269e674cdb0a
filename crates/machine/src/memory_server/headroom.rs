//! Whether there is memory to keep a machine's memory in: its first checkpoint has it twice, until that is written.

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_memory::pressure::Host;
use onecopy_memory::{BindingLimit, MemoryError};

/// What a process can have without swapping, bytes: of this host, and below the limits of its control groups.
///
/// # Errors
/// [`MemoryError`]: the kernel's figures cannot be read.
pub fn available_memory_bytes(process_id: u32) -> Result<u64, MemoryError> {
    let host = Host::new()?;
    let limits = host.limits_of(process_id)?;
    let least = limits.iter().map(BindingLimit::available_bytes).min().unwrap_or(u64::MAX);
    Ok(host.memory()?.available_bytes.min(least))
}

/// Refuses, with the reason, to copy so many pages that are not kept yet.
pub(super) fn check(dropped_pages: u64) -> Result<(), String> {
    let wanted_bytes = dropped_pages.saturating_mul(PAGE_BYTES as u64);
    match available_memory_bytes(std::process::id()) {
        Ok(available_bytes) if available_bytes < wanted_bytes => Err(format!(
            "what nothing was kept of yet is there twice until it is written: that takes {wanted_bytes} bytes of \
             memory at once, and {available_bytes} can be had without swapping, here and by the control group of its \
             memory server; stop something"
        )),
        Ok(_) => Ok(()),
        Err(error) => {
            tracing::warn!(%error, "whether there is memory to keep the machine's in is not known");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_no_host_has_is_refused_with_the_reason() {
        assert_eq!(check(0), Ok(()));
        let host_bytes = available_memory_bytes(std::process::id()).expect("the kernel's figures");
        let refused = check(u64::MAX / PAGE_BYTES as u64).expect_err("nobody has as much");
        assert!(host_bytes > 0 && refused.contains("bytes of memory at once"), "{host_bytes}: {refused}");
    }
}
