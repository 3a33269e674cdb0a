//! How to reach a server with SQL.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_postgres::config::Host;
use tokio_postgres::{Client, Config, NoTls};

use crate::PostgresError;

/// How long [`ConnectionParameters::connect`] waits for a server to let it in.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// What a session of Onecopy's own goes by, whatever the settings of its database and role say. Those of a database are
/// its owner's choice, and the session is a superuser's. Start-up parameters go before both.
pub const OWN_SETTINGS: [(&str, &str); 11] = [
    // No operator, function or table of somebody else's is found.
    ("search_path", "pg_catalog"),
    // What is made belongs to who has logged in.
    ("role", "none"),
    // Statements, and what answers to them, are written so.
    ("standard_conforming_strings", "on"),
    ("DateStyle", "ISO"),
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_read_only", "off"),
    ("default_transaction_deferrable", "off"),
    // What must not take for ever is bounded where it is asked.
    ("statement_timeout", "0"),
    ("lock_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    ("idle_session_timeout", "0"),
];

/// Where a server is and who logs in to it. `Debug` and `Display` do not show the password.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionParameters {
    /// Host name or address, or the directory of the Unix socket when it starts with `/`.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Role to log in as.
    pub user: String,
    /// Its password; none for `trust` or `peer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// Database to log in to.
    pub database: String,
    /// What `pg_stat_activity` shows; a standby's name in `pg_stat_replication`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub application_name: Option<String>,
}

impl ConnectionParameters {
    /// The same server and user, in another database.
    pub fn with_database(&self, database: &str) -> ConnectionParameters {
        ConnectionParameters { database: database.to_owned(), ..self.clone() }
    }

    /// The same connection under another `application_name`.
    pub fn with_application_name(&self, name: &str) -> ConnectionParameters {
        ConnectionParameters { application_name: Some(name.to_owned()), ..self.clone() }
    }

    /// The keyword form of libpq, `host='..' port='..' ..`, with the password if there is one.
    ///
    /// Source of the quoting: PostgreSQL documentation, "Connection Strings", keyword/value form.
    pub fn to_dsn(&self) -> String {
        let port = self.port.to_string();
        let mut pairs = vec![("host", self.host.as_str()), ("port", &port), ("user", &self.user)];
        pairs.extend(self.password.as_deref().map(|password| ("password", password)));
        pairs.push(("dbname", &self.database));
        pairs.extend(self.application_name.as_deref().map(|name| ("application_name", name)));
        let pairs: Vec<String> =
            pairs.into_iter().map(|(keyword, value)| format!("{keyword}={}", quote_value(value))).collect();
        pairs.join(" ")
    }

    /// What [`ConnectionParameters::to_dsn`] gives, without the password; for files and command lines that others can
    /// read.
    pub fn to_dsn_without_password(&self) -> String {
        ConnectionParameters { password: None, ..self.clone() }.to_dsn()
    }

    /// The same for the driver `tokio_postgres`.
    fn to_config(&self) -> Config {
        let mut config = Config::new();
        if self.host.starts_with('/') {
            config.host_path(Path::new(&self.host));
        } else {
            config.host(&self.host);
        }
        config.port(self.port).user(&self.user).dbname(&self.database).connect_timeout(CONNECT_TIMEOUT);
        if let Some(password) = &self.password {
            config.password(password);
        }
        if let Some(name) = &self.application_name {
            config.application_name(name);
        }
        config
    }

    /// Logs in to administer, without TLS; by [`OWN_SETTINGS`], so objects that are not PostgreSQL's are found by
    /// qualified names only. The connection's task runs until the client is dropped.
    ///
    /// # Errors
    /// [`PostgresError::Connect`] with the server's message, [`PostgresError::ConnectTimeout`] after 10 s.
    pub async fn connect(&self) -> Result<Client, PostgresError> {
        let options = OWN_SETTINGS.map(|(name, value)| format!("-c {name}={}", value.replace(' ', "\\ ")));
        let mut config = self.to_config();
        config.options(options.join(" "));
        self.log_in(&config).await
    }

    /// Logs in as programs of users do, by the settings of the database and the role.
    ///
    /// # Errors
    /// As [`ConnectionParameters::connect`].
    pub async fn connect_as_client(&self) -> Result<Client, PostgresError> {
        self.log_in(&self.to_config()).await
    }

    async fn log_in(&self, config: &Config) -> Result<Client, PostgresError> {
        let (client, connection) = tokio::time::timeout(CONNECT_TIMEOUT, config.connect(NoTls))
            .await
            .map_err(|_| PostgresError::ConnectTimeout { target: self.to_string(), waited: CONNECT_TIMEOUT })?
            .map_err(|source| PostgresError::Connect { target: self.to_string(), source })?;
        let target = self.to_string();
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                // The client's next statement fails with the same cause; this line keeps it when there is none.
                tracing::debug!(%target, %error, "connection ended");
            }
        });
        Ok(client)
    }
}

/// One value in libpq's keyword form, always quoted.
fn quote_value(value: &str) -> String {
    format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
}

impl fmt::Display for ConnectionParameters {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}@{}:{}/{}", self.user, self.host, self.port, self.database)
    }
}

impl fmt::Debug for ConnectionParameters {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ConnectionParameters({self})")
    }
}

impl FromStr for ConnectionParameters {
    type Err = PostgresError;

    /// Understands `host=.. port=..` and `postgresql://..`; only the first host counts. Absent: host `127.0.0.1`, port
    /// 5432, user `postgres`, database as the user.
    fn from_str(text: &str) -> Result<Self, PostgresError> {
        let config: Config = text.parse().map_err(|error: tokio_postgres::Error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            PostgresError::InvalidConnectionString(cause.unwrap_or_else(|| error.to_string()))
        })?;
        let host = match config.get_hosts().first() {
            Some(Host::Tcp(name)) => name.clone(),
            Some(Host::Unix(directory)) => directory.to_string_lossy().into_owned(),
            None => "127.0.0.1".to_owned(),
        };
        let password = config.get_password().map(|bytes| {
            String::from_utf8(bytes.to_vec())
                .map_err(|_| PostgresError::InvalidConnectionString("the password is not UTF-8".to_owned()))
        });
        let user = config.get_user().unwrap_or("postgres").to_owned();
        Ok(ConnectionParameters {
            host,
            port: config.get_ports().first().copied().unwrap_or(5432),
            password: password.transpose()?,
            database: config.get_dbname().unwrap_or(&user).to_owned(),
            application_name: config.get_application_name().map(str::to_owned),
            user,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parameters(password: &str) -> ConnectionParameters {
        ConnectionParameters {
            host: "127.0.0.1".to_owned(),
            port: 5433,
            user: "postgres".to_owned(),
            password: Some(password.to_owned()),
            database: "shop".to_owned(),
            application_name: Some("follower-1".to_owned()),
        }
    }

    #[test]
    fn both_forms_are_understood() {
        let url: ConnectionParameters =
            "postgresql://postgres:it%27s@127.0.0.1:5433/shop?application_name=follower-1".parse().expect("a URL");
        assert_eq!(url, parameters("it's"));
        let socket: ConnectionParameters = "host=/run/postgresql user=me".parse().expect("keywords");
        assert_eq!((socket.host.as_str(), socket.port, socket.database.as_str()), ("/run/postgresql", 5432, "me"));
        assert!(matches!("nonsense".parse::<ConnectionParameters>(), Err(PostgresError::InvalidConnectionString(_))));
    }

    #[test]
    fn password_is_not_shown() {
        let parameters = parameters("secret");
        assert!(!format!("{parameters} {parameters:?} {}", parameters.to_dsn_without_password()).contains("secret"));
        assert_eq!(
            parameters.to_dsn(),
            "host='127.0.0.1' port='5433' user='postgres' password='secret' dbname='shop' application_name='follower-1'"
        );
    }

    proptest! {
        #[test]
        fn every_password_survives_the_dsn(password in "[^\0]+") {
            let parameters = parameters(&password);
            prop_assert_eq!(parameters.to_dsn().parse::<ConnectionParameters>().expect("own DSN"), parameters);
        }
    }
}
