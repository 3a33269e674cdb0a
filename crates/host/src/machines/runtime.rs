//! What the servers of a cluster run in: their machines, and which port leads to each.

use std::collections::BTreeSet;

use onecopy_machine::{Forward, GUEST_PORT, MachineConfiguration, MachineError, MachineHome, MachineTemplate};

use crate::ports::{self, PORTS, is_free};
use crate::state::{ClusterState, Runtime, ServerState};
use crate::{Directory, UpOptions};

/// The machine of a server of the cluster.
pub(super) fn machine_of(template: &MachineTemplate, server: &ServerState) -> MachineConfiguration {
    let forward = server.port.map(|host_port| Forward { host_port, guest_port: GUEST_PORT });
    template.configuration(forward.into_iter().collect(), true)
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
    let mut taken: BTreeSet<u16> = state.topology.servers().filter_map(|server| server.port).collect();
    for server in state.topology.servers_mut() {
        let home = MachineHome::of(&directory.machines(), &server.name.parse()?);
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
/// [`MachineError::RuntimeFixed`], [`MachineError::NoMachines`], and those of
/// [`MachineOverrides::applied_to`](onecopy_machine::MachineOverrides::applied_to) and [`assign_ports`].
pub(crate) fn choose_runtime(options: &UpOptions, state: &mut ClusterState) -> Result<(), MachineError> {
    let wanted = options.runtime.unwrap_or(state.runtime);
    let is_begun = !state.founding || state.topology.servers().any(|server| server.made);
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
