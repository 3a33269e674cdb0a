//! What a server is made of.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{AccessRule, Binaries, ConnectionParameters, PostgresError, ServiceUser, Settings};

/// Longest path of a Unix socket in bytes: `sun_path` of Linux has 108, one of them the final zero (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// What a server is made of. The configuration here is the truth: it is written before each start.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The programs.
    pub binaries: Binaries,
    /// The account that it runs as.
    pub user: ServiceUser,
    /// The directory that holds `data/`, `server.log` and, unless said otherwise, the Unix socket in `run/`.
    pub home: PathBuf,
    /// The data directory; none: `data` in `home`.
    pub data_directory: Option<PathBuf>,
    /// The directory of the Unix socket; none: `run` in `home`.
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
    /// A server of this machine alone: listens on 127.0.0.1, superuser `postgres`, access by password, 5 min to start,
    /// 1 min to stop.
    pub fn new(binaries: Binaries, user: ServiceUser, home: PathBuf, port: u16, password: String) -> ServerOptions {
        ServerOptions {
            binaries,
            user,
            home,
            data_directory: None,
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

    /// Where the data directory is: what a [`crate::FollowerMaker`] fills before [`crate::Server::open`].
    pub fn data_directory(&self) -> PathBuf {
        self.data_directory.clone().unwrap_or_else(|| self.home.join("data"))
    }

    /// Where the Unix socket is.
    pub fn socket_directory(&self) -> PathBuf {
        self.socket_directory.clone().unwrap_or_else(|| self.home.join("run"))
    }

    /// How the superuser reaches the server at this host or in this socket directory, database `postgres`.
    pub(crate) fn connection_at(&self, host: String) -> ConnectionParameters {
        ConnectionParameters {
            host,
            port: self.port,
            user: self.superuser.clone(),
            password: Some(self.password.clone()),
            database: "postgres".to_owned(),
            application_name: Some("onecopy".to_owned()),
        }
    }

    /// The Unix socket, beside which its lock file lies.
    pub(crate) fn socket(&self) -> PathBuf {
        self.socket_directory().join(format!(".s.PGSQL.{}", self.port))
    }

    /// Makes the paths absolute and checks that the socket's path is not too long.
    pub(crate) fn checked(mut self) -> Result<ServerOptions, PostgresError> {
        let absolute = |path: &Path| std::path::absolute(path).map_err(PostgresError::file("resolve", path));
        self.home = absolute(&self.home)?;
        self.data_directory = self.data_directory.as_deref().map(absolute).transpose()?;
        self.socket_directory = self.socket_directory.as_deref().map(absolute).transpose()?;
        let path = self.socket();
        let length = path.as_os_str().len();
        if length > SOCKET_PATH_BYTES_MAX {
            return Err(PostgresError::SocketPathTooLong { path, length, length_max: SOCKET_PATH_BYTES_MAX });
        }
        Ok(self)
    }

    /// `settings` with addresses, port and sockets.
    pub(crate) fn complete(&self, settings: &Settings) -> Settings {
        // The setting is a list: quoted, a directory with a comma is one directory.
        let socket_directory = self.socket_directory().to_string_lossy().replace('"', "\"\"");
        let mut complete = settings.clone();
        complete
            .set("listen_addresses", &self.listen_address)
            .set("port", self.port)
            .set("unix_socket_directories", format!("\"{socket_directory}\""))
            .set("unix_socket_permissions", "0777")
            // The log is the postmaster's standard error, so that also its first words are in it.
            .set("logging_collector", "off")
            .set("log_destination", "stderr");
        complete
    }
}

/// Whom a standby follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandbyOptions {
    /// The primary, with a role that may replicate; `application_name` is what the primary calls the standby.
    pub primary: ConnectionParameters,
    /// A physical replication slot on the primary; none: the primary does not wait with removing its log.
    pub slot: Option<String>,
}
