//! Making servers: the leader by initdb, a follower as a copy of the running leader.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use onecopy_clone::warm::Prewarming;
use onecopy_postgres::{
    AccessRule, BaseBackup, Binaries, ConnectionParameters, FollowerMaker, Instance, Role, Server, ServerOptions,
    ServiceUser, StandbyOptions, recommended_settings,
};

use onecopy_router::Topology;
use onecopy_router::config::ServerConfiguration;

use crate::memory::ServersMemory;
use crate::secret::Secrets;
use crate::state::ServerState;
use crate::steps::{ServerMaker, StepFuture};
use crate::{Directory, Event, HostError, Progress, orphans, roles};
use onecopy_machine::{HOST_IN_GUEST, MachineTemplate};

/// What a new server takes at first, with room for its log: 40 MB of catalogs, then segments of 16 MB.
const NEW_SERVER_BYTES: u64 = 160 << 20;

/// How long the leader may take to notice that a copy was broken off.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked whether it has.
const SLOT_INTERVAL: Duration = Duration::from_millis(50);

/// What all servers of a cluster are made with.
#[derive(Debug, Clone)]
pub struct Provisioner {
    /// The cluster's directory.
    pub directory: Directory,
    /// PostgreSQL's programs.
    pub binaries: Binaries,
    /// The account that servers run as.
    pub user: ServiceUser,
    /// The roles' passwords.
    pub secrets: Secrets,
    /// What servers are started with as far as memory goes.
    pub(crate) memory: Arc<ServersMemory>,
    /// What servers' machines are made of; none: servers are processes of this host.
    pub(crate) machines: Option<MachineTemplate>,
}

impl Provisioner {
    /// Refuses to begin what would fill the disk: `servers` new ones with `data_bytes` each.
    ///
    /// # Errors
    /// [`HostError::NoSpace`], [`HostError::File`].
    pub fn check_space(&self, servers: usize, data_bytes: u64) -> Result<(), HostError> {
        let root = self.directory.root();
        let space = rustix::fs::statvfs(root)
            .map_err(|error| HostError::file("ask for the free space of", root)(error.into()))?;
        let one = data_bytes.max(NEW_SERVER_BYTES);
        let (free_bytes, wanted_bytes) = (space.f_bavail * space.f_frsize, one.saturating_mul(servers as u64));
        if free_bytes < wanted_bytes {
            return Err(HostError::NoSpace { directory: root.to_owned(), free_bytes, wanted_bytes, servers });
        }
        Ok(())
    }

    pub(crate) fn options(&self, server: &ServerState, role: Role) -> ServerOptions {
        let home = self.directory.server_home(&server.name);
        let password = self.secrets.superuser.clone();
        let mut options =
            ServerOptions::new(self.binaries.clone(), self.user.clone(), home, server.socket_number, password);
        options.superuser = roles::SUPERUSER.to_owned();
        // Only this machine's router and followers talk to it: no port of it is open to anybody.
        options.listen_address = String::new();
        options.socket_directory = Some(self.directory.sockets());
        options.access_rules = AccessRule::by_password(&[]);
        options.settings = recommended_settings(role, &server.name);
        let data_directory = options.data_directory();
        self.memory.add_to(&mut options.settings, &server.name, &data_directory);
        options
    }

    /// Makes the leader's data directory; what a broken start left there is thrown away.
    ///
    /// # Errors
    /// [`HostError::Server`] with what initdb said.
    pub async fn make_leader(&self, state: &ServerState) -> Result<Arc<dyn Instance>, HostError> {
        if self.machines.is_some() {
            return self.make_leader_in_machine(state).await;
        }
        let options = self.options(state, Role::Leader);
        self.remove_broken(&options.home).await?;
        let server = Server::create(options).await.map_err(HostError::server(&state.name))?;
        Ok(Arc::new(server))
    }

    /// Opens a server that is complete.
    ///
    /// # Errors
    /// [`HostError::Server`].
    pub async fn open(&self, state: &ServerState, role: Role) -> Result<Arc<dyn Instance>, HostError> {
        match self.guest_server(state, role, None)? {
            Some(server) => Ok(server),
            None => Ok(self.open_process(state, role).await?),
        }
    }

    async fn open_process(&self, state: &ServerState, role: Role) -> Result<Arc<Server>, HostError> {
        Server::open(self.options(state, role)).await.map(Arc::new).map_err(HostError::server(&state.name))
    }

    /// Whether a server runs already: it has loaded the libraries that were installed when it was started.
    pub async fn is_any_running(&self, topology: &Topology<ServerState>) -> bool {
        for server in topology.servers().filter(|server| self.is_there(server)) {
            // The role decides on settings only. What cannot be opened is not taken over either.
            if self.open(server, Role::Follower).await.is_ok_and(|server| server.process_id().is_some()) {
                return true;
            }
        }
        false
    }

    /// Whether the data that `state` speaks of is there.
    pub fn is_there(&self, state: &ServerState) -> bool {
        if let Some(home) = self.machine_home(state) {
            return home.is_made();
        }
        // That of a clone that is not whole is a link to nowhere for all but its own server.
        fs::symlink_metadata(self.data_directory(state).join("PG_VERSION")).is_ok()
    }

    /// Where the data of a server is, or will be.
    pub fn data_directory(&self, state: &ServerState) -> PathBuf {
        self.directory.server_home(&state.name).join("data")
    }

    /// Everything of a server is below this.
    pub(crate) fn home_of(&self, state: &ServerState) -> PathBuf {
        let machine = self.machine_home(state).map(|home| home.root().to_owned());
        machine.unwrap_or_else(|| self.directory.server_home(&state.name))
    }

    /// How the router reaches a server.
    pub fn routed(&self, server: &ServerState) -> ServerConfiguration {
        let (host, port) = self.address(server);
        ServerConfiguration {
            name: server.name.clone(),
            host,
            port,
            user: roles::SUPERUSER.to_owned(),
            password: Some(self.secrets.superuser.clone()),
            password_file: None,
            database: roles::DATABASE.to_owned(),
        }
    }

    /// Where a server is reached from this host: directory of its socket, or address, and port.
    pub(crate) fn address(&self, server: &ServerState) -> (String, u16) {
        match (&self.machines, server.port) {
            (Some(_), Some(port)) => (Ipv4Addr::LOCALHOST.to_string(), port),
            _ => (self.directory.sockets().to_string_lossy().into_owned(), server.socket_number),
        }
    }

    /// How the superuser reaches a server from this host.
    pub(crate) fn administration(&self, server: &ServerState) -> ConnectionParameters {
        let (host, port) = self.address(server);
        ConnectionParameters {
            host,
            port,
            user: roles::SUPERUSER.to_owned(),
            password: Some(self.secrets.superuser.clone()),
            database: roles::DATABASE.to_owned(),
            application_name: Some("onecopy".to_owned()),
        }
    }

    /// Copies the running leader into the data directory of a follower.
    ///
    /// # Errors
    /// [`HostError::Server`] with what the copy said.
    pub async fn copy_leader(
        &self,
        leader: &ServerState,
        follower: &ServerState,
        progress: &dyn Progress,
    ) -> Result<(), HostError> {
        if self.machines.is_some() {
            return self.copy_leader_to_machine(leader, follower, progress).await;
        }
        let options = self.options(follower, Role::Follower);
        let target = options.data_directory();
        self.remove_broken(&options.home).await?;
        self.user.create_directory(&options.home)?;
        self.free_slot(leader, &slot_name(&follower.name)).await?;
        let maker =
            BaseBackup { binaries: self.binaries.clone(), user: self.user.clone(), slot: slot_name(&follower.name) };
        let server = follower.name.clone();
        let report = move |copied: onecopy_postgres::Progress| {
            let (done_bytes, total_bytes) = (copied.done_bytes, copied.total_bytes);
            progress.report(Event::Copying { server: server.clone(), done_bytes, total_bytes });
        };
        let source = self.replication_access(leader, follower);
        maker.make(&source, &target, &report).await.map_err(HostError::server(&follower.name))
    }

    /// Opens a follower and tells it whom to follow, which may have moved since its last run.
    ///
    /// # Errors
    /// [`HostError::Server`].
    pub async fn open_follower(
        &self,
        leader: &ServerState,
        follower: &ServerState,
    ) -> Result<Arc<dyn Instance>, HostError> {
        self.open_new_follower(leader, follower, None).await
    }

    /// The same of a follower that starts for the first time; it reads the pages that `prewarming` names into its
    /// shared buffers.
    ///
    /// # Errors
    /// [`HostError::Server`].
    pub(crate) async fn open_new_follower(
        &self,
        leader: &ServerState,
        follower: &ServerState,
        prewarming: Option<&Prewarming>,
    ) -> Result<Arc<dyn Instance>, HostError> {
        if let Some(server) = self.guest_server(follower, Role::Follower, Some(leader))? {
            return Ok(server);
        }
        let mut options = self.options(follower, Role::Follower);
        if let Some(prewarming) = prewarming
            && let Err(reason) = prewarming.apply(&mut options, &self.data_directory(follower)).await
        {
            tracing::warn!(follower = %follower.name, reason, "its shared buffers are not filled at its start");
        }
        let server = Server::open(options).await.map(Arc::new).map_err(HostError::server(&follower.name))?;
        let standby = StandbyOptions {
            primary: self.replication_access(leader, follower),
            slot: Some(slot_name(&follower.name)),
        };
        server.make_standby(&standby).map_err(HostError::server(&follower.name))?;
        Ok(server)
    }

    /// Removes everything of a follower: who fills it, its processes, its slot, its files.
    ///
    /// # Errors
    /// [`HostError::OrphanStays`], [`HostError::SlotInUse`], [`HostError::Server`], [`HostError::File`].
    pub async fn remove_server(&self, leader: &ServerState, follower: &ServerState) -> Result<(), HostError> {
        self.discard(leader, follower).await?;
        let slot = slot_name(&follower.name);
        self.free_slot(leader, &slot).await?;
        let server = self.open(leader, Role::Leader).await?;
        server.drop_slot(&slot).await.map_err(HostError::server(&leader.name))
    }

    /// The same but for its slot, which only a leader that runs can drop.
    ///
    /// # Errors
    /// [`HostError::OrphanStays`], [`HostError::File`].
    pub async fn discard(&self, leader: &ServerState, follower: &ServerState) -> Result<(), HostError> {
        if self.machines.is_some() {
            return self.remove_machine(follower).await;
        }
        self.end_filling(leader, follower).await;
        self.remove_broken(&self.directory.server_home(&follower.name)).await
    }

    /// Removes a server that is not complete or not wanted, and ends what still works in it.
    async fn remove_broken(&self, home: &Path) -> Result<(), HostError> {
        orphans::end(home, self.user.user_id()).await?;
        // All of it: even the directory may be half made, without its owner. It may have a million files.
        let path = home.to_owned();
        let removed = tokio::task::spawn_blocking(move || fs::remove_dir_all(path)).await;
        #[cfg(test)]
        crate::kills::note(home);
        match removed.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(HostError::file("remove", home)(error)),
        }
    }

    /// Ends the leader's own side of a copy that was broken off: until it notices, the slot cannot be made anew.
    pub(crate) async fn free_slot(&self, leader: &ServerState, slot: &str) -> Result<(), HostError> {
        let client = self.administration(leader).connect().await.map_err(HostError::server(&leader.name))?;
        let users = "SELECT active_pid, pg_catalog.pg_terminate_backend(active_pid) \
             FROM pg_catalog.pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL";
        let mut waited = Duration::ZERO;
        loop {
            let user = client.query_opt(users, &[&slot]).await.map_err(HostError::sql(&leader.name, "free a slot"))?;
            let Some(user) = user else { return Ok(()) };
            if waited >= SLOT_TIMEOUT {
                let (leader, slot) = (leader.name.clone(), slot.to_owned());
                return Err(HostError::SlotInUse { leader, slot, process_id: user.get(0) });
            }
            tokio::time::sleep(SLOT_INTERVAL).await;
            waited += SLOT_INTERVAL;
        }
    }

    pub(crate) fn replication_access(&self, leader: &ServerState, follower: &ServerState) -> ConnectionParameters {
        let (host, port) = match (&self.machines, leader.port) {
            (Some(_), Some(port)) => (HOST_IN_GUEST.to_owned(), port),
            _ => self.address(leader),
        };
        ConnectionParameters {
            host,
            port,
            user: roles::REPLICATION.to_owned(),
            password: Some(self.secrets.replication.clone()),
            database: roles::DATABASE.to_owned(),
            application_name: Some(follower.name.clone()),
        }
    }
}

/// The provisioner, as a start uses it: it tells what it does.
pub(crate) struct ReportingMaker<'a> {
    /// What makes them.
    pub provisioner: &'a Provisioner,
    /// Who is told.
    pub progress: &'a dyn Progress,
}

impl ServerMaker for ReportingMaker<'_> {
    type Server = Arc<dyn Instance>;

    fn is_there(&self, server: &ServerState) -> bool {
        self.provisioner.is_there(server)
    }

    fn home_of(&self, server: &ServerState) -> PathBuf {
        self.provisioner.home_of(server)
    }

    fn open_leader<'a>(&'a self, leader: &'a ServerState) -> StepFuture<'a, Arc<dyn Instance>> {
        Box::pin(self.provisioner.open(leader, Role::Leader))
    }

    fn make_leader<'a>(&'a self, leader: &'a ServerState) -> StepFuture<'a, Arc<dyn Instance>> {
        self.progress.step(format!("making the leader (PostgreSQL {})", self.provisioner.postgres_version()));
        Box::pin(self.provisioner.make_leader(leader))
    }

    fn copy_leader<'a>(&'a self, leader: &'a ServerState, follower: &'a ServerState) -> StepFuture<'a, ()> {
        self.progress.step(format!("copying the leader to {}", follower.name));
        Box::pin(self.provisioner.copy_leader(leader, follower, self.progress))
    }

    fn fork_leader<'a>(
        &'a self,
        leader: &'a ServerState,
        followers: &'a [ServerState],
    ) -> StepFuture<'a, Vec<ServerState>> {
        Box::pin(async move {
            if self.provisioner.fork_obstacle(leader).is_some() {
                return Ok(Vec::new());
            }
            let forked = match self.provisioner.fork_followers(leader, leader, followers, self.progress).await {
                Ok(forked) => forked,
                // A copy needs more.
                Err(error) if error.is_no_memory() => return Err(error),
                Err(error) => {
                    self.progress.notice(format!("{error}; its data is copied instead"));
                    return Ok(Vec::new());
                }
            };
            for (follower, error) in forked.iter().filter_map(|(follower, made)| Some((follower, made.as_ref().err()?)))
            {
                self.progress.notice(format!("{} is no fork of the leader: {error}; it is copied", follower.name));
            }
            Ok(forked.into_iter().filter_map(|(follower, made)| made.ok().map(|()| follower)).collect())
        })
    }

    fn tell_gone(&self, follower: &ServerState) {
        self.progress.notice(format!("the data of {} is gone; it is copied from the leader again", follower.name));
    }
}

/// A slot's name has letters, digits and underscores only.
pub(crate) fn slot_name(follower: &str) -> String {
    follower.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: L2
    #[test]
    fn a_disk_without_room_is_refused_before_anything_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let provisioner = Provisioner {
            directory: Directory::new(directory.path()).unwrap(),
            binaries: Binaries::find(None).unwrap(),
            user: ServiceUser::resolve(None).unwrap(),
            secrets: Secrets::read_or_make(directory.path()).unwrap(),
            memory: Arc::new(ServersMemory::none()),
            machines: None,
        };
        provisioner.check_space(0, 0).unwrap();
        for (servers, data_bytes) in [(1 << 32, 0), (2, 1 << 60)] {
            let error = provisioner.check_space(servers, data_bytes).unwrap_err();
            assert!(matches!(error, HostError::NoSpace { servers: found, .. } if found == servers), "{error}");
        }
    }
}
