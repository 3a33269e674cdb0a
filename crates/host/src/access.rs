//! How a client on this machine reaches the cluster.

use std::path::PathBuf;

use onecopy_postgres::Binaries;

use crate::{Directory, HostError, roles, secret};

/// Where the router is and who a client is there. `Debug` does not show the password.
#[derive(Clone)]
pub struct ClientAccess {
    /// Address of the router.
    pub host: String,
    /// Port of the router.
    pub port: u16,
    /// Role.
    pub user: String,
    /// Its password: letters and digits.
    pub password: String,
    /// Database.
    pub database: String,
    pg_bindir: Option<PathBuf>,
}

impl std::fmt::Debug for ClientAccess {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "ClientAccess({}@{}:{}/{})", self.user, self.host, self.port, self.database)
    }
}

impl ClientAccess {
    /// Access to the cluster of a directory, whether it runs or not.
    ///
    /// # Errors
    /// [`HostError::NotACluster`]; [`HostError::File`] when the password is not for this user to read.
    pub fn of(directory: &Directory) -> Result<ClientAccess, HostError> {
        let state = directory.state()?;
        Ok(ClientAccess {
            host: "127.0.0.1".to_owned(),
            port: state.port,
            user: roles::CLIENT.to_owned(),
            password: secret::client_password(&directory.secrets())?,
            database: roles::DATABASE.to_owned(),
            pg_bindir: state.pg_bindir,
        })
    }

    /// The connection string, as every driver of PostgreSQL understands it.
    pub fn url(&self) -> String {
        format!("postgresql://{}:{}@{}:{}/{}", self.user, self.password, self.host, self.port, self.database)
    }

    /// The program `psql` beside the servers' programs, or the one on the `PATH`.
    pub fn psql(&self) -> PathBuf {
        let beside = Binaries::find(self.pg_bindir.as_deref()).map(|binaries| binaries.program("psql"));
        beside.ok().filter(|program| program.exists()).unwrap_or_else(|| PathBuf::from("psql"))
    }
}
