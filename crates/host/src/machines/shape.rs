//! The machines of a cluster: what each server's is made of, and which port leads to it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::configuration::{DISK_BYTES_DEFAULT, GUEST_PORT, MEMORY_BYTES_DEFAULT};
use super::{Forward, GuestImage, MachineConfiguration, MachineError, MachineHome};
use crate::ports::{self, PORTS, is_free};
use crate::state::{ClusterState, Runtime, ServerState};
use crate::{Directory, UpOptions};

/// What the machines of a cluster are made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineTemplate {
    /// Memory.
    pub memory_bytes: u64,
    /// Processors.
    pub processors: u32,
    /// Size of the disk of a machine that is made from now on.
    pub disk_bytes: u64,
    /// Directory of the guest image that a disk begins with.
    pub image: PathBuf,
}

/// What is asked for; what is left out stays as it was, or gets its default.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachineOverrides {
    /// Memory.
    pub memory_bytes: Option<u64>,
    /// Processors.
    pub processors: Option<u32>,
    /// Size of a new disk.
    pub disk_bytes: Option<u64>,
    /// Directory of the guest image.
    pub image: Option<PathBuf>,
}

impl MachineOverrides {
    /// Whether anything is asked for.
    pub fn is_empty(&self) -> bool {
        *self == MachineOverrides::default()
    }

    /// `before`, changed as is asked for.
    ///
    /// # Errors
    /// [`MachineError::NoImage`], [`MachineError::InvalidConfiguration`].
    pub fn applied_to(&self, before: Option<&MachineTemplate>) -> Result<MachineTemplate, MachineError> {
        let named = self.image.as_deref().or(before.map(|before| before.image.as_path()));
        let image = GuestImage::find(named)?;
        let shape = MachineTemplate {
            memory_bytes: self
                .memory_bytes
                .or(before.map(|before| before.memory_bytes))
                .unwrap_or(MEMORY_BYTES_DEFAULT),
            processors: self.processors.or(before.map(|before| before.processors)).unwrap_or(1),
            disk_bytes: self.disk_bytes.or(before.map(|before| before.disk_bytes)).unwrap_or(DISK_BYTES_DEFAULT),
            image: image.directory,
        };
        shape.configuration(Vec::new(), true).check()?;
        Ok(shape)
    }
}

impl MachineTemplate {
    /// A machine of this shape, with these ports.
    pub(super) fn configuration(&self, forwards: Vec<Forward>, postgresql: bool) -> MachineConfiguration {
        let (memory_bytes, processors, disk_bytes) = (self.memory_bytes, self.processors, self.disk_bytes);
        let configuration = MachineConfiguration::new(self.image.clone());
        MachineConfiguration { memory_bytes, processors, disk_bytes, forwards, postgresql, ..configuration }
    }

    /// The machine of a server of the cluster.
    pub(crate) fn of_server(&self, server: &ServerState) -> MachineConfiguration {
        let forward = server.port.map(|host_port| Forward { host_port, guest_port: GUEST_PORT });
        self.configuration(forward.into_iter().collect(), true)
    }
}

/// A port that is free and none of `taken`.
///
/// # Errors
/// [`MachineError::InvalidConfiguration`] when none is found.
pub(crate) fn free_port(taken: &BTreeSet<u16>) -> Result<u16, MachineError> {
    ports::free_port(taken).ok_or_else(|| MachineError::InvalidConfiguration {
        reason: format!("no port of 127.0.0.1 from {} to {} is free for a machine", PORTS.start, PORTS.end - 1),
    })
}

/// Gives a port to each server in a machine that has none, or whose port somebody else has taken while its machine was
/// at rest.
///
/// # Errors
/// [`MachineError::InvalidConfiguration`] when none is free, or for a name that no machine can have.
pub(crate) fn assign_ports(directory: &Directory, state: &mut ClusterState) -> Result<(), MachineError> {
    let mut taken: BTreeSet<u16> = state.servers.iter().filter_map(|server| server.port).collect();
    for server in &mut state.servers {
        let home = MachineHome::of(directory, &server.name.parse()?);
        let is_good = |port: u16| home.process_id().is_some() || is_free(port);
        if server.port.is_none_or(|port| !is_good(port)) {
            let port = free_port(&taken)?;
            taken.insert(port);
            server.port = Some(port);
        }
    }
    Ok(())
}

/// What servers run in: chosen when the cluster is made, and what their machines are made of.
///
/// # Errors
/// [`MachineError::RuntimeFixed`], [`MachineError::NoMachines`], and those of [`MachineOverrides::applied_to`] and
/// [`assign_ports`].
pub(crate) fn choose_runtime(options: &UpOptions, state: &mut ClusterState) -> Result<(), MachineError> {
    let wanted = options.runtime.unwrap_or(state.runtime);
    let is_begun = !state.founding || state.servers.iter().any(|server| server.made);
    if wanted != state.runtime && is_begun {
        let (directory, existing) = (options.directory.root().to_owned(), state.runtime.as_str());
        return Err(MachineError::RuntimeFixed { directory, existing, wanted: wanted.as_str() });
    }
    state.runtime = wanted;
    if wanted == Runtime::Vm {
        let shape = options.machine.applied_to(state.machine.as_ref())?;
        state.machine = Some(shape);
        return assign_ports(&options.directory, state);
    }
    if !options.machine.is_empty() {
        return Err(MachineError::NoMachines);
    }
    Ok(())
}
