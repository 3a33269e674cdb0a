//! Below which cgroup an instance's own one is made.

use std::path::PathBuf;

use crate::pressure::{Host, Version};
use crate::{InstanceName, MemoryError};

use super::{OURS, refused};

/// The cgroup below which the one of an instance is made, whose first process is `pid`.
///
/// # Errors
/// [`MemoryError::NotAllowed`] when its own one would take it from systemd, which then could not stop it any more; or
/// there is no controller for memory. [`MemoryError::Malformed`] when there is no such process.
pub fn parent_of(host: &Host, pid: u32, instance: &InstanceName) -> Result<PathBuf, MemoryError> {
    let hierarchy = host.hierarchy().ok_or_else(|| refused("no controller for memory is mounted"))?;
    let group = host.group_of(pid)?.ok_or_else(|| refused("no controller for memory is mounted"))?;
    if let Some(parent) = group.parent().filter(|ours| ours.ends_with(OURS) && group.ends_with(instance.as_str())) {
        // It is there already.
        return Ok(parent.parent().unwrap_or(&hierarchy.mount_point).to_owned());
    }
    let unit = group.file_name().and_then(|name| name.to_str()).filter(|name| name.ends_with(".service"));
    if let (Version::V2, Some(unit)) = (hierarchy.version, unit) {
        return Err(refused(format!(
            "process {pid} belongs to systemd's {unit}, which would lose sight of it; \
             set MemoryHigh= and MemoryMax= there"
        )));
    }
    // Out of the reach of a limit nobody is moved.
    let is_limited = !host.limits_of(pid)?.is_empty();
    Ok(if is_limited { group } else { hierarchy.mount_point.clone() })
}
