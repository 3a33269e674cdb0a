//! The servers of a cluster that run in machines: made, copied, opened, removed.

use std::sync::Arc;

use onecopy_hypervisor::Qemu;
use onecopy_machine::{
    END_TIMEOUT, GuestImage, GuestServer, GuestServerOptions, Machine, MachineConfiguration, MachineError, MachineHome,
};
use onecopy_postgres::{Instance, Role, StandbyOptions, recommended_settings};
use onecopy_router::Topology;

use super::runtime::machine_of;
use crate::provisioning::{Provisioner, slot_name};
use crate::state::ServerState;
use crate::{Event, HostError, Progress};

/// The part of a machine's memory that its server has as a pool, as PostgreSQL's documentation advises ("Resource
/// Consumption").
const POOL_SHARE: u64 = 4;

/// `shared_buffers` of a server in such a machine.
pub(super) fn pool_setting(configuration: &MachineConfiguration) -> String {
    format!("{}kB", (configuration.memory_bytes / POOL_SHARE) >> 10)
}

impl Provisioner {
    /// Where the machine of a server is; none where servers are processes.
    pub(crate) fn machine_home(&self, state: &ServerState) -> Option<MachineHome> {
        self.machines.as_ref()?;
        // A cluster's names are numbers behind fixed words: see `ClusterState`.
        Some(MachineHome::of(&self.directory.machines(), &state.name.parse().ok()?))
    }

    /// The machine of a server; none where servers are processes.
    pub(crate) fn machine(&self, state: &ServerState) -> Option<Machine> {
        self.machine_home(state).map(|home| Machine::new(home, self.user.clone()))
    }

    /// Refuses to begin what cannot be run.
    ///
    /// # Errors
    /// [`MachineError::NoHypervisor`].
    pub(crate) fn check_machines(&self) -> Result<(), HostError> {
        if self.machines.is_some() {
            Qemu::find().map_err(|error| MachineError::NoHypervisor { reason: error.to_string() })?;
        }
        Ok(())
    }

    /// The version of PostgreSQL that servers run.
    pub(crate) fn postgres_version(&self) -> String {
        match &self.machines {
            None => self.binaries.version().to_owned(),
            Some(template) => {
                let major = GuestImage::find(Some(&template.image)).ok().and_then(|image| image.postgresql_major);
                major.map_or_else(|| "of the guest image".to_owned(), |major| major.to_string())
            }
        }
    }

    /// The server in its machine, as one that follows `leader` if that is given; none where servers are processes.
    ///
    /// # Errors
    /// [`MachineError::NoImage`].
    pub(crate) fn guest_server(
        &self,
        state: &ServerState,
        role: Role,
        leader: Option<&ServerState>,
    ) -> Result<Option<Arc<dyn Instance>>, HostError> {
        let server = self.server_in_machine(state, role, leader)?;
        Ok(server.map(|server| -> Arc<dyn Instance> { Arc::new(server) }))
    }

    pub(super) fn server_in_machine(
        &self,
        state: &ServerState,
        role: Role,
        leader: Option<&ServerState>,
    ) -> Result<Option<GuestServer>, HostError> {
        let (Some(template), Some(machine)) = (&self.machines, self.machine(state)) else { return Ok(None) };
        let mut configuration = machine_of(template, state);
        // What was made stays as large as it was made, and keeps the image that it was made from.
        let made = machine.home().is_made().then(|| machine.home().configuration()).transpose()?;
        if let Some(made) = made {
            (configuration.disk_bytes, configuration.image) = (made.disk_bytes, made.image);
        }
        let mut settings = recommended_settings(role, &state.name);
        settings.set("shared_buffers", pool_setting(&configuration));
        let image = if machine.home().is_made() { machine.home().image() } else { template.image.clone() };
        let major_version = GuestImage::find(Some(&image))?.postgresql_major;
        let primary = leader.map(|leader| StandbyOptions {
            primary: self.replication_access(leader, state),
            slot: Some(slot_name(&state.name)),
        });
        let administration = self.administration(state);
        let options = GuestServerOptions { administration, settings, primary, configuration, major_version };
        Ok(Some(GuestServer::new(machine, options)))
    }

    /// Makes a machine and boots it; what a broken start left there is thrown away.
    async fn make_machine(
        &self,
        state: &ServerState,
        role: Role,
        leader: Option<&ServerState>,
    ) -> Result<GuestServer, HostError> {
        self.remove_machine(state).await?;
        let no_machines = || HostError::from(MachineError::NoMachines);
        let (template, home) = self.machines.as_ref().zip(self.machine_home(state)).ok_or_else(no_machines)?;
        self.directory.make_machines()?;
        let (configuration, user) = (machine_of(template, state), self.user.clone());
        // It may copy the image.
        let made = tokio::task::spawn_blocking(move || home.make(&configuration, None, &user)).await;
        made.unwrap_or_else(|error| Err(MachineError::Task(format!("making a machine ended: {error}"))))?;
        let server = self.server_in_machine(state, role, leader)?.ok_or_else(no_machines)?;
        server.boot().await?;
        Ok(server)
    }

    /// Makes the leader in a machine of its own.
    pub(crate) async fn make_leader_in_machine(&self, state: &ServerState) -> Result<Arc<dyn Instance>, HostError> {
        let server = self.make_machine(state, Role::Leader, None).await?;
        server.initialize().await?;
        Ok(Arc::new(server))
    }

    /// Makes a machine for a follower and copies the running leader into it.
    pub(crate) async fn copy_leader_to_machine(
        &self,
        leader: &ServerState,
        follower: &ServerState,
        progress: &dyn Progress,
    ) -> Result<(), HostError> {
        let server = self.make_machine(follower, Role::Follower, Some(leader)).await?;
        let slot = slot_name(&follower.name);
        self.free_slot(leader, &slot).await?;
        self.open(leader, Role::Leader).await?.create_slot(&slot).await.map_err(HostError::server(&leader.name))?;
        let report = |done_bytes, total_bytes| {
            progress.report(Event::Copying { server: follower.name.clone(), done_bytes, total_bytes });
        };
        Ok(server.copy_primary(&report).await?)
    }

    /// Removes the machine of a server that is not complete or not wanted, and ends what runs of it.
    pub(crate) async fn remove_machine(&self, state: &ServerState) -> Result<(), HostError> {
        let Some(machine) = self.machine(state) else { return Ok(()) };
        machine.stop(true, END_TIMEOUT).await?;
        let home = machine.home().clone();
        let removed = tokio::task::spawn_blocking(move || home.remove()).await;
        Ok(removed.unwrap_or_else(|error| Err(MachineError::Task(format!("removing a machine ended: {error}"))))?)
    }

    /// After machines were removed, and before others are made: gives back what only those needed of the disks of
    /// `servers`, and of those that are gone.
    pub(crate) async fn forget_layers(&self, topology: &Topology<ServerState>) -> Result<(), HostError> {
        if self.machines.is_none() {
            return Ok(());
        }
        let machines = self.directory.machines();
        let forgotten = tokio::task::spawn_blocking(move || MachineHome::forget_layers(&machines)).await;
        forgotten.unwrap_or_else(|error| Err(MachineError::Task(format!("removing layers ended: {error}"))))?;
        for server in topology.servers().filter(|server| server.made) {
            self.forget_checkpoint(server).await;
        }
        Ok(())
    }
}
