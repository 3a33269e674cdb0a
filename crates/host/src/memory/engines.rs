//! How the agent reaches each server.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(not(feature = "own"))]
use onecopy_memory::MemoryError;
#[cfg(feature = "own")]
use onecopy_memory::engine::OwnEngine;
use onecopy_memory::engine::{Engine, ExtensionEngine, MariaDbAccess, MariaDbEngine, PlainEngine, Reach};
use onecopy_memory::{Bytes, InstanceName, Kind, Level, untrusted_file};
use onecopy_postgres::{ConnectionParameters, Server};

use super::configuration::{InstanceMemory, MemoryConfiguration};
use super::starting::ServersMemory;
use crate::HostError;

/// What the servers' lists of connections show.
const APPLICATION_NAME: &str = "onecopy memory";

/// A server of the cluster.
///
/// # Errors
/// [`HostError::Memory`] when its level is not possible.
pub(super) fn of_server(
    name: &InstanceName,
    server: &Server,
    memory: &ServersMemory,
) -> Result<Arc<dyn Engine>, HostError> {
    let connection = server.socket_connection().with_application_name(APPLICATION_NAME);
    let data_directory = server.data_directory().to_owned();
    let (name, directory) = (name.clone(), Some(data_directory));
    match memory.configuration().of_server(name.as_str()).level.unwrap_or_default() {
        Level::Own => owned(name, Reach::from(&connection), directory),
        _ if memory.extension().is_none() => Ok(Arc::new(PlainEngine::new(name, &connection, directory))),
        level => Ok(Arc::new(ExtensionEngine::new(name, level, &connection, directory)?)),
    }
}

/// A server at level `own`: the configuration was refused unless that is built, and its risk taken.
#[cfg(feature = "own")]
fn owned(name: InstanceName, reach: Reach, data_directory: Option<PathBuf>) -> Result<Arc<dyn Engine>, HostError> {
    Ok(Arc::new(OwnEngine::new(name, reach, data_directory)?))
}

#[cfg(not(feature = "own"))]
fn owned(instance: InstanceName, _: Reach, _: Option<PathBuf>) -> Result<Arc<dyn Engine>, HostError> {
    let action = "be used by an onecopy that was built without it";
    Err(MemoryError::WrongLevel { instance, level: Level::Own, action }.into())
}

/// A server that somebody else has started; `host_bytes` is the memory of the host.
///
/// # Errors
/// [`HostError::Memory`] when its level is not possible; [`HostError::InstanceUnreachable`] when nothing tells how it
/// is reached.
pub(super) fn of_instance(
    instance: &InstanceMemory,
    configuration: &MemoryConfiguration,
    host_bytes: Bytes,
) -> Result<Arc<dyn Engine>, HostError> {
    let name = instance.name.clone();
    let level = instance.level.unwrap_or(configuration.level);
    match instance.kind {
        Kind::PostgreSql => {
            let reach = reach(instance)?;
            let directory = instance.data_directory.clone();
            match level {
                Level::Own => owned(name, reach, directory),
                _ => Ok(Arc::new(ExtensionEngine::new(name, level, reach, directory)?)),
            }
        }
        Kind::MariaDb | Kind::MySql => {
            let access = MariaDbAccess {
                program: None,
                defaults_file: instance.defaults_file.clone(),
                socket: instance.socket.clone(),
                user: instance.user.clone(),
            };
            let ceiling_bytes = instance.ceiling.map_or(host_bytes, |ceiling| ceiling.of(host_bytes));
            Ok(Arc::new(MariaDbEngine::new(name, instance.kind, access, ceiling_bytes)))
        }
    }
}

/// How a server is reached that need not run yet: one that is known by its data directory only is looked for there
/// before each try.
fn reach(instance: &InstanceMemory) -> Result<Reach, HostError> {
    let user = instance.user.clone();
    let password = match &instance.password_file {
        Some(file) => {
            let text = fs::read_to_string(file).map_err(HostError::file("read", file))?;
            text.lines().next().map(str::to_owned)
        }
        None => None,
    };
    let completed = move |mut connection: ConnectionParameters| {
        connection.user = user.clone().unwrap_or(connection.user);
        connection.password = password.clone().or(connection.password);
        connection.with_application_name(APPLICATION_NAME)
    };
    match (&instance.dsn, instance.data_directory.clone()) {
        (Some(dsn), _) => Ok(Reach::from(&completed(dsn.parse::<ConnectionParameters>()?))),
        (None, Some(directory)) => Ok(Reach::found_by(move || of_running(&directory).map(&completed))),
        (None, None) => Err(HostError::InstanceUnreachable {
            name: instance.name.to_string(),
            reason: "neither `dsn` nor `data_directory` is written; write one of them".to_owned(),
        }),
    }
}

/// Where the server in a data directory listens now.
///
/// Source: PostgreSQL, `src/include/utils/pidfile.h`: port, socket directory, first address are the lines 4, 5 and 6.
fn of_running(directory: &Path) -> Result<ConnectionParameters, String> {
    let path = directory.join("postmaster.pid");
    let text = untrusted_file::read(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let line = |number: usize| text.lines().nth(number - 1).map(str::trim).filter(|line| !line.is_empty());
    let port = line(4).and_then(|port| port.parse().ok()).ok_or("the server is only starting")?;
    Ok(ConnectionParameters {
        host: line(5).or(line(6)).unwrap_or("127.0.0.1").to_owned(),
        port,
        user: "postgres".to_owned(),
        password: None,
        database: "postgres".to_owned(),
        application_name: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(text: &str) -> InstanceMemory {
        toml::from_str(&format!("name = \"shop\"\n{text}")).unwrap()
    }

    fn engine(text: &str) -> Result<Arc<dyn Engine>, HostError> {
        of_instance(&instance(text), &MemoryConfiguration::default(), 1 << 30)
    }

    #[test]
    fn each_kind_has_its_engine() {
        for (text, kind) in [
            ("kind = \"postgresql\"\ndsn = \"host=/run user=postgres\"", Kind::PostgreSql),
            ("kind = \"mariadb\"\nsocket = \"/run/mysqld.sock\"", Kind::MariaDb),
            ("kind = \"mysql\"\ndefaults_file = \"/etc/my.cnf\"", Kind::MySql),
        ] {
            let engine = engine(text).unwrap();
            assert_eq!((engine.kind(), engine.instance().as_str(), engine.level()), (kind, "shop", Level::Request));
        }
    }

    #[test]
    fn a_server_is_found_by_its_data_directory_and_logged_in_to_by_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let text = format!(
            "kind = \"postgresql\"\ndata_directory = \"{0}\"\nuser = \"keeper\"\npassword_file = \"{0}/password\"",
            directory.path().display()
        );
        let Err(error) = engine(&text) else { panic!("without the password") };
        assert!(error.to_string().contains("password"), "{error}");
        fs::write(directory.path().join("password"), "secret\nmore\n").unwrap();
        // It need not run yet, and may come back elsewhere.
        assert!(engine(&text).is_ok());
        let reach = reach(&instance(&text)).unwrap();
        let reason = || reach.find().err().unwrap_or_else(|| panic!("nothing runs there"));
        assert!(reason().contains("postmaster.pid"), "{}", reason());
        // The server's account may put there what never ends, or what is never written.
        let file = directory.path().join("postmaster.pid");
        rustix::fs::mkfifoat(rustix::fs::CWD, &file, rustix::fs::Mode::RUSR).unwrap();
        assert!(reason().contains("postmaster.pid"), "a pipe");
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
        assert!(reason().contains("postmaster.pid"), "a link");
        fs::remove_file(&file).unwrap();
        fs::write(&file, "1\n/data\n0\n5438\n").unwrap();
        assert_eq!(reach.find().unwrap().port, 5438);
        fs::write(file, "1\n/data\n0\n5439\n/run/pg\n*\n").unwrap();
        let found = reach.find().unwrap();
        assert_eq!((found.host.as_str(), found.port, found.user.as_str()), ("/run/pg", 5439, "keeper"));
        assert_eq!(found.password.as_deref(), Some("secret"));
    }

    #[test]
    fn levels_that_cannot_be_are_refused() {
        let Err(error) = engine("kind = \"postgresql\"\ndsn = \"host=/run\"\nlevel = \"publish\"") else {
            panic!("without a data directory")
        };
        assert!(error.to_string().contains("data directory"), "{error}");
    }
}
