//! What the processes of a server have in RAM and in swap, and which limits are above them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use onecopy_postgres::{innermost_number, status_field};

use super::Presence;
use crate::pressure::Host;
use crate::segment::{Postmaster, shared_memory_bytes};
use crate::{BindingLimit, Bytes, MemoryError, Observation, untrusted_file};

/// More processes are not looked at: reading each costs some microseconds, and a server with so many has other
/// troubles.
const PROCESSES_MAX: usize = 4096;

/// Memory of a server's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Resident {
    /// Private memory of all, and their shared memory: all of it, which may be in swap, or where that cannot be seen,
    /// what one of them has touched.
    resident_bytes: Bytes,
    /// Private memory in swap. Shared memory in swap is in the figures of the cgroup only.
    swap_bytes: Bytes,
}

/// Looks at a server from outside.
#[derive(Debug, Clone)]
pub(super) struct Outside {
    host: Option<Arc<Host>>,
    /// Held by who looks, on a thread that may wait: a data directory may lie on storage that hangs.
    looking: Arc<tokio::sync::Mutex<()>>,
}

impl Outside {
    pub(super) fn new() -> Outside {
        let host = Host::new().inspect_err(|error| tracing::warn!(%error, "memory: limits of servers cannot be seen"));
        Outside { host: host.ok().map(Arc::new), looking: Arc::default() }
    }

    /// Looks on a thread that may wait, one at a time. Who asks a server gives up after a while: without its cgroups'
    /// limits it must not count as one that has answered. None is a fault of ours.
    async fn look<T: Send + 'static>(&self, look: impl FnOnce(&Outside) -> T + Send + 'static) -> Option<T> {
        let looking = Arc::clone(&self.looking).lock_owned().await;
        let outside = self.clone();
        let look = move || {
            let _looking = looking;
            look(&outside)
        };
        tokio::task::spawn_blocking(look).await.ok()
    }

    /// Adds what is seen of the PostgreSQL server of this data directory, also when it runs in a container; nothing
    /// when it does not run on this host.
    pub(super) async fn add_server_to(&self, observation: &mut Observation, data_directory: Option<&Path>) {
        let Some(directory) = data_directory.map(Path::to_owned) else { return };
        let look = move |outside: &Outside| {
            let process_id = postmaster_of(&directory)?;
            Some((outside.process(process_id)?, shared_memory_bytes(process_id)))
        };
        if let Some((process, touched_bytes)) = self.look(look).await.flatten() {
            process.add_to(observation);
            observation.touched_bytes = touched_bytes;
        }
    }

    /// Whether the PostgreSQL server of this data directory is seen on this host. One without is taken for another
    /// host's: its memory is no part of this one's.
    pub(super) async fn presence_of(&self, data_directory: Option<&Path>) -> Result<Presence, MemoryError> {
        let Some(directory) = data_directory.map(Path::to_owned) else { return Ok(Presence::Absent) };
        let look = move |outside: &Outside| {
            let process_id = postmaster_of(&directory);
            process_id.map_or(Presence::Absent, |process_id| Presence::Running(outside.limits_above(process_id)))
        };
        // A fault of ours is no answer.
        Ok(self.look(look).await.unwrap_or(Presence::Unclear))
    }

    /// Adds what is seen of the server whose process id stands in this file; nothing when it does not run on this host,
    /// or when the process is not of the account that owns the file.
    pub(super) async fn add_to(&self, observation: &mut Observation, pid_file: Option<&Path>) {
        let Some(path) = pid_file.map(Path::to_owned) else { return };
        let look = move |outside: &Outside| {
            read_pid(&path)
                .filter(|&process_id| is_of_owner(process_id, &path))
                .and_then(|process_id| outside.process(process_id))
        };
        if let Some(process) = self.look(look).await.flatten() {
            process.add_to(observation);
        }
    }

    fn process(&self, process_id: u32) -> Option<Process> {
        Some(Process { resident: resident(process_id)?, limits: self.limits_above(process_id) })
    }

    fn limits_above(&self, process_id: u32) -> Vec<BindingLimit> {
        let limits = self.host.as_ref().map(|host| host.limits_of(process_id));
        // It may have ended this moment: then the next answer tells.
        limits.and_then(Result::ok).unwrap_or_default()
    }
}

/// A server's first process.
struct Process {
    resident: Resident,
    limits: Vec<BindingLimit>,
}

impl Process {
    fn add_to(self, observation: &mut Observation) {
        observation.resident_bytes = Some(self.resident.resident_bytes);
        observation.swap_bytes = Some(self.resident.swap_bytes);
        observation.limits = self.limits;
    }
}

/// The figures of a process and its children; none when it is gone. Source: proc_pid_status(5), fields RssAnon,
/// RssShmem, VmSwap.
fn resident(process_id: u32) -> Option<Resident> {
    let mut sum = Resident::default();
    let mut shared_bytes_max = 0;
    let own = fs::read_to_string(format!("/proc/{process_id}/status")).ok()?;
    let children = children(process_id);
    let others = children.iter().filter_map(|child| fs::read_to_string(format!("/proc/{child}/status")).ok());
    for status in std::iter::once(own).chain(others) {
        sum.resident_bytes += field_bytes(&status, "RssAnon:");
        sum.swap_bytes += field_bytes(&status, "VmSwap:");
        shared_bytes_max = shared_bytes_max.max(field_bytes(&status, "RssShmem:"));
    }
    sum.resident_bytes += match shared_bytes_max {
        0 => 0,
        touched_bytes => shared_memory_bytes(process_id).unwrap_or(touched_bytes),
    };
    Some(sum)
}

/// The postmaster of a data directory. Who may not look where processes work believes the number in its file, if the
/// process has it also where it was written, and belongs to the directory's account.
fn postmaster_of(data_directory: &Path) -> Option<u32> {
    if let Ok(server) = Postmaster::find(data_directory) {
        return Some(server.process_id);
    }
    let process_id = read_pid(&data_directory.join("postmaster.pid"))?;
    let may_look = fs::read_link(format!("/proc/{process_id}/cwd")).is_ok();
    (!may_look && is_of_owner(process_id, data_directory)).then_some(process_id)
}

/// Whether a process belongs to the account that owns `path`, and has its number also where that was written.
fn is_of_owner(process_id: u32, path: &Path) -> bool {
    let user = status_field(process_id, "Uid:")
        .and_then(|users| users.split_ascii_whitespace().next().and_then(|user| user.parse::<u32>().ok()));
    let owner = fs::metadata(path).map(|metadata| metadata.uid());
    user.zip(owner.ok()).is_some_and(|(user, owner)| user == owner) && innermost_number(process_id) == Some(process_id)
}

/// The process id in a server's own file.
fn read_pid(path: &Path) -> Option<u32> {
    untrusted_file::read(path).ok()?.lines().next()?.trim().parse().ok().filter(|number| *number > 0)
}

/// Children of its first thread; a postmaster has but one.
fn children(process_id: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{process_id}/task/{process_id}/children")).unwrap_or_default();
    text.split_ascii_whitespace().take(PROCESSES_MAX).filter_map(|number| number.parse().ok()).collect()
}

/// A field of a status, given there in kB; 0 when it is not there.
fn field_bytes(status: &str, name: &str) -> Bytes {
    let value = status.lines().find_map(|line| line.strip_prefix(name));
    let kilobytes = value.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<Bytes>().ok());
    kilobytes.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_from_any_text() {
        let status = "Name:\tx\nRssAnon:\t    123 kB\nVmSwap:\t99999999999999999999 kB\nRssShmem:\t7\n";
        assert_eq!(field_bytes(status, "RssAnon:"), 123 * 1024);
        assert_eq!(
            (field_bytes(status, "VmSwap:"), field_bytes(status, "RssShmem:"), field_bytes("", "X:")),
            (0, 0, 0)
        );
    }

    #[test]
    fn a_number_in_a_file_is_believed_when_the_process_is_of_its_owner() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("pid");
        fs::write(&path, "1\n").expect("written");
        let own = std::process::id();
        assert!(is_of_owner(own, &path));
        assert!(!is_of_owner(own, &directory.path().join("none")) && !is_of_owner(u32::MAX, &path));
        // Root may give the file away; for anybody else the first process is another account's.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).expect("given away");
            assert!(!is_of_owner(own, &path));
        } else {
            assert!(!is_of_owner(1, &path));
        }
    }

    #[test]
    fn children_are_counted_in() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("a child");
        let alone = resident(child.id()).expect("it lives");
        // The child belongs to the thread of this test, which need not be the first one: only its own figures are sure.
        assert!(alone.resident_bytes > 0);
        child.kill().expect("killed");
        child.wait().expect("gone");
        assert_eq!(resident(child.id()), None);
    }
}
