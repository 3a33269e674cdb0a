//! The limits of a cgroup, and the order in which they must be written.

use std::io;
use std::path::Path;

use crate::pressure::{GroupMemory, Version};
use crate::{Bytes, MemoryError};

use super::write;

/// So much must be free under a new limit: processes go on while it is set.
const FREE_BYTES_MIN: Bytes = 16 << 20;

/// What a cgroup may use; none for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Where the kernel begins to kill: `memory.max`, `memory.limit_in_bytes`.
    pub max_bytes: Option<Bytes>,
    /// Version 2: where the kernel slows processes down and takes pages away, `memory.high`. Version 1: from where on
    /// it takes pages away first when the host is short, `memory.soft_limit_in_bytes`.
    pub high_bytes: Option<Bytes>,
    /// What may be in swap. Version 1 counts memory and swap together and so limits swap only together with
    /// `max_bytes`.
    pub swap_max_bytes: Option<Bytes>,
    /// Version 1 only: how readily the kernel swaps here rather than drops page cache, 0 to 200; none: as it is.
    pub swappiness: Option<u32>,
}

impl Limits {
    pub(super) fn set(&self, version: Version, group: &Path, name: &str) -> Result<(), MemoryError> {
        self.check(version, group, name)?;
        match version {
            Version::V1 => self.set_v1(group, name),
            Version::V2 => self.set_v2(group, name),
        }
    }

    /// Refuses what cannot be or would hurt, before anything is changed.
    fn check(&self, version: Version, group: &Path, name: &str) -> Result<(), MemoryError> {
        let refused = |reason: &str| {
            Err(MemoryError::NotAllowed { what: "this limit of a cgroup", reason: format!("{name}: {reason}") })
        };
        match version {
            Version::V2 if self.swappiness.is_some() => {
                return refused("cgroups of version 2 have no swappiness; limit the swap itself");
            }
            Version::V1 if self.swap_max_bytes.is_some() && self.max_bytes.is_none() => {
                return refused("cgroups of version 1 limit swap only together with memory; set both");
            }
            Version::V1 if self.swap_max_bytes.is_some() && !group.join("memory.memsw.limit_in_bytes").exists() => {
                return refused("the kernel does not count swap; start it with swapaccount=1");
            }
            _ => {}
        }
        let lowest_bytes = self.max_bytes.unwrap_or(Bytes::MAX).min(self.high_bytes.unwrap_or(Bytes::MAX));
        let memory = GroupMemory::read(version, group)?.unwrap_or_default();
        let is_lower = memory.limit_bytes.unwrap_or(Bytes::MAX) > lowest_bytes;
        let usage_bytes = memory.unreclaimable_bytes().saturating_add(FREE_BYTES_MIN);
        // A higher limit than before is always an improvement.
        if is_lower && usage_bytes > lowest_bytes {
            return Err(below_usage(name, lowest_bytes, usage_bytes));
        }
        Ok(())
    }

    /// The kernel refuses a limit of memory above that of memory and swap, and reclaims before a lower limit holds, or
    /// refuses it.
    fn set_v1(&self, group: &Path, name: &str) -> Result<(), MemoryError> {
        let limit_bytes = GroupMemory::read(Version::V1, group)?.and_then(|memory| memory.limit_bytes);
        let is_raised = self.max_bytes.unwrap_or(Bytes::MAX) > limit_bytes.unwrap_or(Bytes::MAX);
        let both_bytes = self.max_bytes.zip(self.swap_max_bytes).map(|(max, swap)| max.saturating_add(swap));
        let has_both = group.join("memory.memsw.limit_in_bytes").exists();
        let mut files = vec![("memory.limit_in_bytes", self.max_bytes)];
        if has_both {
            files.insert(if is_raised { 0 } else { 1 }, ("memory.memsw.limit_in_bytes", both_bytes));
        }
        files.push(("memory.soft_limit_in_bytes", self.high_bytes));
        for (file, bytes) in files {
            let text = bytes.map_or("-1".to_owned(), |bytes| bytes.to_string());
            let path = group.join(file);
            write(&path, &text).map_err(|error| refusal(&path, name, bytes, error))?;
        }
        if let Some(swappiness) = self.swappiness {
            let path = group.join("memory.swappiness");
            write(&path, &swappiness.to_string()).map_err(MemoryError::file("write", &path))?;
        }
        Ok(())
    }

    /// At `memory.max` the kernel kills what it cannot reclaim. So `memory.high`, where it reclaims only, goes down
    /// first, and what it could not bring down is told instead.
    fn set_v2(&self, group: &Path, name: &str) -> Result<(), MemoryError> {
        let before = GroupMemory::read(Version::V2, group)?.unwrap_or_default();
        if let Some(max_bytes) = self.max_bytes.filter(|max| before.usage_bytes > *max) {
            write_v2(group, "memory.high", Some(max_bytes))?;
            let usage_bytes = GroupMemory::read(Version::V2, group)?.unwrap_or_default().usage_bytes;
            if usage_bytes > max_bytes {
                write_v2(group, "memory.high", before.high_bytes)?;
                return Err(below_usage(name, max_bytes, usage_bytes));
            }
        }
        write_v2(group, "memory.max", self.max_bytes)?;
        write_v2(group, "memory.high", self.high_bytes)?;
        if self.swap_max_bytes.is_some() || group.join("memory.swap.max").exists() {
            write_v2(group, "memory.swap.max", self.swap_max_bytes)?;
        }
        Ok(())
    }
}

fn write_v2(group: &Path, file: &str, bytes: Option<Bytes>) -> Result<(), MemoryError> {
    let path = group.join(file);
    let text = bytes.map_or("max".to_owned(), |bytes| bytes.to_string());
    write(&path, &text).map_err(MemoryError::file("write", &path))
}

/// EBUSY is version 1's word for what it could not reclaim.
fn refusal(path: &Path, name: &str, limit_bytes: Option<Bytes>, error: io::Error) -> MemoryError {
    match limit_bytes {
        Some(limit_bytes) if error.kind() == io::ErrorKind::ResourceBusy => below_usage(name, limit_bytes, limit_bytes),
        _ => MemoryError::file("write", path)(error),
    }
}

fn below_usage(name: &str, limit_bytes: Bytes, usage_bytes: Bytes) -> MemoryError {
    MemoryError::LimitBelowUsage { cgroup: name.to_owned(), limit_bytes, usage_bytes }
}
