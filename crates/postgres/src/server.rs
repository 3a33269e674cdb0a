//! One server: its data directory, its configuration and its postmaster.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{
    AccessRule, Binaries, ConnectionParameters, ControlFile, Lsn, PostgresError, ReplicationState, ServiceUser,
    Settings, StandbyOptions,
};

/// How to stop a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Wait until all clients have left (SIGTERM).
    Smart,
    /// Disconnect the clients, roll back what is open, shut down cleanly (SIGINT).
    Fast,
    /// Do not shut down cleanly; the next start recovers (SIGQUIT).
    Immediate,
}

/// What [`Server::start`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartOutcome {
    /// It started a postmaster.
    Started,
    /// One was running already and is taken over.
    Adopted,
}

/// What a server is made of. The configuration here is the truth: it is written before each start.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The programs.
    pub binaries: Binaries,
    /// The account that it runs as.
    pub user: ServiceUser,
    /// The directory that holds `data/`, `server.log` and, unless said otherwise, the Unix socket.
    pub home: PathBuf,
    /// The directory of the Unix socket; none: `home`.
    pub socket_directory: Option<PathBuf>,
    /// The address for TCP, `127.0.0.1` unless other machines must reach it.
    pub listen_address: String,
    /// The port, also part of the Unix socket's name.
    pub port: u16,
    /// The superuser that initdb makes.
    pub superuser: String,
    /// Its password.
    pub password: String,
    /// Settings beside addresses, port and sockets, which come from here.
    pub settings: Settings,
    /// Access rules.
    pub access_rules: Vec<AccessRule>,
    /// How long a start may take, recovery included.
    pub start_timeout: Duration,
    /// How long a stop may take.
    pub stop_timeout: Duration,
}

impl ServerOptions {
    /// A server of this machine alone: listens on 127.0.0.1, superuser `postgres`, access by password.
    pub fn new(binaries: Binaries, user: ServiceUser, home: PathBuf, port: u16, password: String) -> ServerOptions {
        ServerOptions {
            binaries,
            user,
            home,
            socket_directory: None,
            listen_address: "127.0.0.1".to_owned(),
            port,
            superuser: "postgres".to_owned(),
            password,
            settings: Settings::new(),
            access_rules: AccessRule::local_machine(),
            start_timeout: Duration::from_secs(300),
            stop_timeout: Duration::from_secs(60),
        }
    }

    /// Where the data directory is: what a [`crate::FollowerMaker`] fills before [`Server::open`].
    pub fn data_directory(&self) -> PathBuf {
        self.home.join("data")
    }
}

/// A PostgreSQL server, running or not. All methods take `&self`: share it in an `Arc`.
#[derive(Debug)]
pub struct Server {
    options: ServerOptions,
}

impl Server {
    /// Makes a new data directory (checksums, UTF-8, SCRAM); does not start.
    ///
    /// # Errors
    /// [`PostgresError::DataDirectoryNotEmpty`], [`PostgresError::NotReachable`], [`PostgresError::SocketPathTooLong`],
    /// [`PostgresError::Program`] with what initdb said.
    pub async fn create(_options: ServerOptions) -> Result<Server, PostgresError> {
        todo!()
    }

    /// Opens an existing data directory, running or not.
    ///
    /// # Errors
    /// [`PostgresError::NotADataDirectory`], [`PostgresError::VersionMismatch`], [`PostgresError::SocketPathTooLong`].
    pub async fn open(_options: ServerOptions) -> Result<Server, PostgresError> {
        todo!()
    }

    /// What it is made of.
    pub fn options(&self) -> &ServerOptions {
        &self.options
    }

    /// The data directory.
    pub fn data_directory(&self) -> &Path {
        todo!()
    }

    /// The server's log file.
    pub fn log_file(&self) -> &Path {
        todo!()
    }

    /// The last complaints in the server's log.
    pub fn log_complaints(&self) -> String {
        todo!()
    }

    /// How its superuser reaches it over TCP, database `postgres`.
    pub fn connection(&self) -> ConnectionParameters {
        todo!()
    }

    /// How its superuser reaches it over the Unix socket, database `postgres`.
    pub fn socket_connection(&self) -> ConnectionParameters {
        todo!()
    }

    /// The configured settings, without addresses, port and sockets.
    pub fn settings(&self) -> Settings {
        todo!()
    }

    /// Replaces the settings; they count from the next start or [`Server::reload`].
    pub fn set_settings(&self, _settings: Settings) {
        todo!()
    }

    /// Writes the configuration, starts the postmaster and waits until it accepts connections; or takes over one that runs.
    ///
    /// # Errors
    /// [`PostgresError::StartFailed`] and [`PostgresError::NotReady`] with the server's own words,
    /// [`PostgresError::RunningOnOtherPort`].
    pub async fn start(&self) -> Result<StartOutcome, PostgresError> {
        todo!()
    }

    /// Stops it and waits until all its processes are gone; a server that does not run is stopped already.
    ///
    /// # Errors
    /// [`PostgresError::NotStopped`] after the stop timeout.
    pub async fn stop(&self, _mode: StopMode) -> Result<(), PostgresError> {
        todo!()
    }

    /// Stops and starts.
    ///
    /// # Errors
    /// Those of [`Server::stop`] and [`Server::start`].
    pub async fn restart(&self, _mode: StopMode) -> Result<(), PostgresError> {
        todo!()
    }

    /// Kills the postmaster (SIGKILL) and waits until its children are gone, as a crash would leave it.
    ///
    /// # Errors
    /// [`PostgresError::NotRunning`], [`PostgresError::NotStopped`].
    pub async fn crash_stop(&self) -> Result<(), PostgresError> {
        todo!()
    }

    /// Writes the configuration and makes the server read it; what needs a restart waits for one.
    ///
    /// # Errors
    /// [`PostgresError::NotRunning`], [`PostgresError::File`].
    pub async fn reload(&self) -> Result<(), PostgresError> {
        todo!()
    }

    /// Whether its postmaster runs.
    pub fn is_running(&self) -> bool {
        todo!()
    }

    /// The postmaster's process id, when it runs.
    pub fn process_id(&self) -> Option<u32> {
        todo!()
    }

    /// Waits until it accepts connections.
    ///
    /// # Errors
    /// [`PostgresError::NotReady`], [`PostgresError::NotRunning`].
    pub async fn wait_ready(&self, _timeout: Duration) -> Result<(), PostgresError> {
        todo!()
    }

    /// Waits until its postmaster is gone, for whatever reason.
    pub async fn wait_exit(&self) {
        todo!()
    }

    /// Reads its control file; also while it runs.
    ///
    /// # Errors
    /// [`PostgresError::File`], [`PostgresError::ControlFile`].
    pub fn control_file(&self) -> Result<ControlFile, PostgresError> {
        ControlFile::read(self.data_directory())
    }

    /// Makes it a standby from its next start on (`standby.signal`, `primary_conninfo`, slot). Called again, it follows another primary;
    /// a running standby then needs [`Server::reload`].
    ///
    /// # Errors
    /// [`PostgresError::File`], [`PostgresError::InvalidSetting`].
    pub fn make_standby(&self, _standby: &StandbyOptions) -> Result<(), PostgresError> {
        todo!()
    }

    /// Makes a running standby a primary and waits until it takes updates; returns where its new timeline begins.
    ///
    /// # Errors
    /// [`PostgresError::Sql`], [`PostgresError::UnexpectedAnswer`] when it does not end recovery in time.
    pub async fn promote(&self, _timeout: Duration) -> Result<Lsn, PostgresError> {
        todo!()
    }

    /// Makes a physical replication slot that keeps the log from now on; one that exists is left as it is.
    ///
    /// # Errors
    /// [`PostgresError::Sql`].
    pub async fn create_slot(&self, _name: &str) -> Result<(), PostgresError> {
        todo!()
    }

    /// Drops a replication slot; one that does not exist is dropped already.
    ///
    /// # Errors
    /// [`PostgresError::Sql`], also while a standby uses it.
    pub async fn drop_slot(&self, _name: &str) -> Result<(), PostgresError> {
        todo!()
    }

    /// Its part in replication, now.
    ///
    /// # Errors
    /// [`PostgresError::Connect`], [`PostgresError::Sql`].
    pub async fn replication_state(&self) -> Result<ReplicationState, PostgresError> {
        todo!()
    }
}
