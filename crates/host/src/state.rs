//! What a cluster remembers between two runs: the file `cluster.toml` of its directory.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use onecopy_router::config::Freshness;
use serde::{Deserialize, Serialize};

use crate::HostError;

/// Form of the file that this program reads and writes.
const FORMAT: u32 = 1;

/// Most followers on one machine: a leader serves 16 replication connections and slots, copies in progress included.
pub const REPLICAS_MAX: usize = 8;

/// The first socket number: PostgreSQL names its Unix socket by a port, also when it listens on none.
const FIRST_SOCKET_NUMBER: u16 = 5432;

/// The remembered shape and choices of one cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterState {
    /// Form of this file.
    pub format: u32,
    /// Port of the router on 127.0.0.1.
    pub port: u16,
    /// Port of `/metrics`, `/healthz` and `/status` on 127.0.0.1.
    pub metrics_port: u16,
    /// How fresh reads are when a session does not say.
    pub freshness: Freshness,
    /// Where PostgreSQL's programs are, when the user said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pg_bindir: Option<PathBuf>,
    /// The servers, the leader first.
    #[serde(rename = "server")]
    pub servers: Vec<ServerState>,
}

/// One server of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerState {
    /// Its name, which is also that of its data directory and its log.
    pub name: String,
    /// Number of its Unix socket.
    pub socket_number: u16,
    /// Its data directory is complete. What lies there before is a broken start and is made again.
    pub made: bool,
}

impl ClusterState {
    /// A cluster of a leader without followers.
    pub fn new(port: u16, metrics_port: u16, freshness: Freshness) -> ClusterState {
        let leader = ServerState { name: "leader".to_owned(), socket_number: FIRST_SOCKET_NUMBER, made: false };
        ClusterState { format: FORMAT, port, metrics_port, freshness, pg_bindir: None, servers: vec![leader] }
    }

    /// The only server that executes updates.
    pub fn leader(&self) -> &ServerState {
        // `read` refuses a file without servers, `new` makes one.
        self.servers.first().expect("a cluster has a leader")
    }

    /// All other servers.
    pub fn followers(&self) -> &[ServerState] {
        &self.servers[1..]
    }

    /// Adds followers until there are `replicas`.
    pub fn add_followers(&mut self, replicas: usize) {
        while self.followers().len() < replicas {
            let number = self.servers.len() as u16;
            let name = format!("follower-{number}");
            self.servers.push(ServerState { name, socket_number: FIRST_SOCKET_NUMBER + number, made: false });
        }
    }

    /// Reads the file; none when it is not there.
    ///
    /// # Errors
    /// [`HostError::File`] when it cannot be read, [`HostError::InvalidState`] when it is not such a file.
    pub fn read(path: &Path) -> Result<Option<ClusterState>, HostError> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(HostError::file("read", path)(error)),
        };
        let invalid = |reason: String| HostError::InvalidState { path: path.to_owned(), reason };
        let state: ClusterState = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        if state.format != FORMAT {
            return Err(invalid(format!("it has form {}, this program knows {FORMAT}", state.format)));
        }
        if state.servers.is_empty() {
            return Err(invalid("it names no server".to_owned()));
        }
        Ok(Some(state))
    }

    /// Replaces the file as a whole: a reader sees the old or the new one.
    ///
    /// # Errors
    /// [`HostError::File`] when it cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), HostError> {
        let text = toml::to_string(self).expect("strings, numbers and lists have a TOML form");
        let unfinished = path.with_extension("unfinished");
        let mut file = fs::File::create(&unfinished).map_err(HostError::file("create", &unfinished))?;
        writeln!(file, "# Written by onecopy; change it by the options of `onecopy up`.")
            .map_err(HostError::file("write", &unfinished))?;
        file.write_all(text.as_bytes()).map_err(HostError::file("write", &unfinished))?;
        file.sync_all().map_err(HostError::file("sync", &unfinished))?;
        fs::rename(&unfinished, path).map_err(HostError::file("rename to", path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> ClusterState {
        let mut state = ClusterState::new(6432, 6433, Freshness::Session);
        state.add_followers(2);
        state
    }

    #[test]
    fn what_is_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cluster.toml");
        assert_eq!(ClusterState::read(&path).unwrap(), None);
        state().write(&path).unwrap();
        assert_eq!(ClusterState::read(&path).unwrap(), Some(state()));
    }

    #[test]
    fn followers_are_added_and_never_renamed() {
        let mut state = state();
        let before = state.servers.clone();
        state.add_followers(1);
        assert_eq!(state.servers, before);
        state.add_followers(3);
        assert_eq!(state.servers[..3], before[..]);
        assert_eq!(state.servers[3], ServerState { name: "follower-3".to_owned(), socket_number: 5435, made: false });
        assert_eq!((state.leader().name.as_str(), state.followers().len()), ("leader", 3));
    }

    #[test]
    fn a_strange_file_is_refused_with_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cluster.toml");
        let cases = [
            ("format = 1\nport = \"x\"\n", "line 2"),
            ("format = 2\nport = 1\nmetrics_port = 2\nfreshness = \"session\"\nserver = []\n", "form 2"),
            ("format = 1\nport = 1\nmetrics_port = 2\nfreshness = \"session\"\nserver = []\n", "no server"),
        ];
        for (text, expected) in cases {
            fs::write(&path, text).unwrap();
            let error = ClusterState::read(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("cluster.toml"), "{error}");
        }
    }
}
