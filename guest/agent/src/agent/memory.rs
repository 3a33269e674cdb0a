//! The memory of the server's control group.

use super::replies::{Result, failed};
use crate::protocol::MemoryUse;
use std::fs::{read_to_string, write};

/// The group that the guest's first process makes and that the server runs in.
pub(crate) const GROUP: &str = "/sys/fs/cgroup/postgresql";

/// Lets the group use about that much.
pub(crate) fn set_target(bytes: Option<u64>) -> Result<MemoryUse> {
    let limit = bytes.map_or("max".to_string(), |bytes| bytes.to_string());
    write(format!("{GROUP}/memory.high"), limit).map_err(|error| failed("setting memory.high", error))?;
    let used =
        read_to_string(format!("{GROUP}/memory.current")).map_err(|error| failed("reading memory.current", error))?;
    let used_bytes = used.trim_end().parse().map_err(|error| failed("memory.current", error))?;
    Ok(MemoryUse { target_bytes: bytes, used_bytes })
}
