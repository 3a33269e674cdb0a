//! Making servers: the leader by initdb, a follower as a copy of the running leader.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{
    AccessRule, BaseBackup, Binaries, ConnectionParameters, FollowerMaker, Role, Server, ServerOptions, ServiceUser,
    StandbyOptions, recommended_settings,
};

use crate::secret::Secrets;
use crate::state::ServerState;
use crate::{Directory, Event, HostError, Progress, orphans, roles};

/// What a new server takes at first, with room for its log: 40 MB of catalogs, then segments of 16 MB.
const NEW_SERVER_BYTES: u64 = 160 << 20;

/// How long the leader may take to notice that a copy was broken off.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked whether it has.
const SLOT_INTERVAL: Duration = Duration::from_millis(50);

/// What all servers of a cluster are made with.
#[derive(Debug, Clone)]
pub struct Workshop {
    /// The cluster's directory.
    pub directory: Directory,
    /// PostgreSQL's programs.
    pub binaries: Binaries,
    /// The account that servers run as.
    pub user: ServiceUser,
    /// The roles' passwords.
    pub secrets: Secrets,
}

impl Workshop {
    /// Refuses to begin what would fill the disk.
    ///
    /// # Errors
    /// [`HostError::NoSpace`], [`HostError::File`].
    pub fn check_space(&self, servers: usize) -> Result<(), HostError> {
        let root = self.directory.root();
        let space = rustix::fs::statvfs(root)
            .map_err(|error| HostError::file("ask for the free space of", root)(error.into()))?;
        let (free_bytes, wanted_bytes) = (space.f_bavail * space.f_frsize, NEW_SERVER_BYTES * servers as u64);
        if free_bytes < wanted_bytes {
            return Err(HostError::NoSpace { directory: root.to_owned(), free_bytes, wanted_bytes, servers });
        }
        Ok(())
    }

    fn options(&self, server: &ServerState, role: Role) -> ServerOptions {
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
        options
    }

    /// Makes the leader's data directory; what a broken start left there is thrown away.
    ///
    /// # Errors
    /// [`HostError::Server`] with what initdb said.
    pub async fn make_leader(&self, state: &ServerState) -> Result<Arc<Server>, HostError> {
        let options = self.options(state, Role::Leader);
        self.remove_broken(&options.home).await?;
        Server::create(options).await.map(Arc::new).map_err(HostError::server(&state.name))
    }

    /// Opens a data directory that is complete.
    ///
    /// # Errors
    /// [`HostError::Server`].
    pub async fn open(&self, state: &ServerState, role: Role) -> Result<Arc<Server>, HostError> {
        Server::open(self.options(state, role)).await.map(Arc::new).map_err(HostError::server(&state.name))
    }

    /// Whether the data directory that `state` speaks of is there.
    pub fn is_there(&self, state: &ServerState) -> bool {
        self.options(state, Role::Leader).data_directory().join("PG_VERSION").exists()
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
    pub async fn open_follower(&self, leader: &ServerState, follower: &ServerState) -> Result<Arc<Server>, HostError> {
        let server = self.open(follower, Role::Follower).await?;
        let standby = StandbyOptions {
            primary: self.replication_access(leader, follower),
            slot: Some(slot_name(&follower.name)),
        };
        server.make_standby(&standby).map_err(HostError::server(&follower.name))?;
        Ok(server)
    }

    /// Removes a server that was never complete, and ends what still makes it.
    async fn remove_broken(&self, home: &Path) -> Result<(), HostError> {
        orphans::end(home, self.user.user_id()).await?;
        // All of it: even the directory may be half made, without its owner.
        match fs::remove_dir_all(home) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(HostError::file("remove the incomplete", home)(error)),
        }
    }

    /// Ends the leader's own side of a copy that was broken off: until it notices, the slot cannot be made anew.
    async fn free_slot(&self, leader: &ServerState, slot: &str) -> Result<(), HostError> {
        let server = self.open(leader, Role::Leader).await?;
        let client = server.socket_connection().connect().await.map_err(HostError::server(&leader.name))?;
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

    fn replication_access(&self, leader: &ServerState, follower: &ServerState) -> ConnectionParameters {
        ConnectionParameters {
            host: self.directory.sockets().to_string_lossy().into_owned(),
            port: leader.socket_number,
            user: roles::REPLICATION.to_owned(),
            password: Some(self.secrets.replication.clone()),
            database: roles::DATABASE.to_owned(),
            application_name: Some(follower.name.clone()),
        }
    }
}

/// A slot's name has letters, digits and underscores only.
fn slot_name(follower: &str) -> String {
    follower.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_room_is_refused_before_anything_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let workshop = Workshop {
            directory: Directory::new(directory.path()).unwrap(),
            binaries: Binaries::find(None).unwrap(),
            user: ServiceUser::resolve(None).unwrap(),
            secrets: Secrets::read_or_make(directory.path()).unwrap(),
        };
        workshop.check_space(0).unwrap();
        let error = workshop.check_space(1 << 32).unwrap_err();
        assert!(matches!(error, HostError::NoSpace { servers: 0x1_0000_0000, .. }), "{error}");
    }
}
