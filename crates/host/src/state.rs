//! What a cluster remembers between two runs: the file `cluster.toml` of its directory.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use onecopy_router::Topology;
use onecopy_router::config::Freshness;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::HostError;
use crate::change::Change;
use onecopy_directory::atomic_file;
use onecopy_machine::MachineTemplate;

/// Form of the file that this program writes. It reads form 1 as well, which had a list of servers.
const FORMAT: u32 = 2;

/// Everybody may read it, as far as the umask lets them: no password is in it. Only its owner says what is started.
const FILE_MODE: u32 = 0o644;

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
    /// Where the user's own configuration is, when the user said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration_file: Option<PathBuf>,
    /// No client was served yet: its first followers are copied before the first one comes.
    #[serde(default, skip_serializing_if = "is_false")]
    pub founding: bool,
    /// The files of one more follower are kept ready, where clones are filled on demand.
    #[serde(default = "yes")]
    pub spare: bool,
    /// What the servers run in.
    #[serde(default, skip_serializing_if = "Runtime::is_process")]
    pub runtime: Runtime,
    /// What a new server's machine is made of, where servers run in machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineTemplate>,
    /// Who leads and who follows.
    #[serde(alias = "server", deserialize_with = "topology_of_either_form")]
    pub topology: Topology<ServerState>,
}

/// Form 1 had a list of servers in its place, `[[server]]`, the leader first.
fn topology_of_either_form<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Topology<ServerState>, D::Error> {
    struct EitherForm;
    impl<'de> Visitor<'de> for EitherForm {
        type Value = Topology<ServerState>;

        fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
            formatter.write_str("who leads and who follows")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Topology<ServerState>, A::Error> {
            Topology::deserialize(MapAccessDeserializer::new(map))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Topology<ServerState>, A::Error> {
            let mut servers = Vec::<ServerState>::deserialize(SeqAccessDeserializer::new(list))?.into_iter();
            let leader = servers.next().ok_or_else(|| A::Error::custom("it names no server"))?;
            Ok(Topology::new(leader, servers.collect()))
        }
    }
    deserializer.deserialize_any(EitherForm)
}

/// What the servers of a cluster run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// They are processes of this host.
    #[default]
    Process,
    /// Each has a virtual machine of its own.
    Vm,
}

impl Runtime {
    fn is_process(&self) -> bool {
        *self == Runtime::Process
    }

    /// The word for it, as in the options of `onecopy up`.
    pub fn as_str(self) -> &'static str {
        match self {
            Runtime::Process => "process",
            Runtime::Vm => "vm",
        }
    }
}

/// One server of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerState {
    /// Its name, which is also that of its data directory and its log.
    pub name: String,
    /// Number of its Unix socket.
    pub socket_number: u16,
    /// Port of 127.0.0.1 that leads to it, where it runs in a machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// It can be started. What lies there before is a broken start and is made again.
    pub made: bool,
    /// It is a clone whose data is not there yet: it runs only as long as a process fills it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub filling: bool,
    /// It is being removed; whatever is left of it is not wanted any more.
    #[serde(default, skip_serializing_if = "is_false")]
    pub leaving: bool,
    /// How its data came here, for `status`; none for a base backup of the first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub way: Option<String>,
}

impl ServerState {
    fn new(name: String, socket_number: u16) -> ServerState {
        ServerState { name, socket_number, port: None, made: false, filling: false, leaving: false, way: None }
    }

    /// The files that are kept ready for a follower to come; it has no server.
    pub fn spare() -> ServerState {
        ServerState::new("spare".to_owned(), 0)
    }

    /// Forgets that there is anything of it: it is made anew.
    pub fn mark_unmade(&mut self) {
        (self.made, self.filling, self.way) = (false, false, None);
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

fn yes() -> bool {
    true
}

impl ClusterState {
    /// A cluster of a leader without followers.
    pub fn new(port: u16, metrics_port: u16, freshness: Freshness) -> ClusterState {
        let leader = ServerState::new("leader".to_owned(), FIRST_SOCKET_NUMBER);
        ClusterState {
            format: FORMAT,
            port,
            metrics_port,
            freshness,
            pg_bindir: None,
            configuration_file: None,
            founding: true,
            spare: true,
            runtime: Runtime::Process,
            machine: None,
            topology: Topology::new(leader, Vec::new()),
        }
    }

    /// The only server that executes updates.
    pub fn leader(&self) -> &ServerState {
        &self.topology.leader
    }

    /// All other servers.
    pub fn followers(&self) -> &[ServerState] {
        &self.topology.followers
    }

    /// The server of this name.
    pub fn server_mut(&mut self, name: &str) -> Option<&mut ServerState> {
        self.topology.servers_mut().find(|server| server.name == name)
    }

    /// Adds followers until there are `replicas`.
    pub fn add_followers(&mut self, replicas: usize) {
        for follower in self.topology.followers.iter_mut().take(replicas).filter(|follower| follower.leaving) {
            // Nobody knows how much of it is gone already.
            follower.leaving = false;
            follower.mark_unmade();
        }
        while self.followers().len() < replicas {
            // Numbers have no gaps: those that leave are the highest ones.
            let number = self.followers().len() as u16 + 1;
            self.topology.followers.push(ServerState::new(format!("follower-{number}"), FIRST_SOCKET_NUMBER + number));
        }
    }

    /// Marks the followers beyond `replicas` as leaving; returns their names, the highest number first.
    pub fn remove_followers(&mut self, replicas: usize) -> Vec<String> {
        let leaving = self.topology.followers.iter_mut().skip(replicas).rev();
        leaving
            .map(|server| {
                server.leaving = true;
                server.name.clone()
            })
            .collect()
    }

    /// Wants what a change asks for; nothing is done yet.
    pub(crate) fn want(&mut self, change: &Change) {
        match change {
            Change::Resume => {}
            Change::Scale { replicas } => {
                self.remove_followers(*replicas);
                self.add_followers(*replicas);
            }
            Change::Reinit { follower } => {
                if let Some(follower) = self.server_mut(follower) {
                    follower.mark_unmade();
                }
            }
        }
    }

    /// After a change that failed: followers that were not there `before` and were not made are not wanted any more.
    pub(crate) fn remove_unmade(&mut self, before: &[String]) {
        let new = |follower: &&mut ServerState| !follower.made && !before.contains(&follower.name);
        // From the highest number on, and only as far as there is no gap: names are numbered without one.
        let last = self.topology.followers.iter_mut().rev();
        last.take_while(new).for_each(|follower| follower.leaving = true);
    }

    /// Followers that are being removed, the highest number first.
    pub(crate) fn leaving(&self) -> Vec<ServerState> {
        self.followers().iter().rev().filter(|follower| follower.leaving).cloned().collect()
    }

    /// Followers that are not made.
    pub(crate) fn missing(&self) -> Vec<ServerState> {
        self.followers().iter().filter(|follower| !follower.made).cloned().collect()
    }

    /// A follower can be started: it has all its data, or is a clone that is being filled.
    pub(crate) fn note_made(&mut self, name: &str, filling: bool, way: String) {
        if let Some(server) = self.server_mut(name) {
            (server.made, server.filling, server.way) = (true, filling, Some(way));
        }
    }

    /// All data of a clone is there.
    pub(crate) fn note_whole(&mut self, name: &str) {
        if let Some(server) = self.server_mut(name) {
            server.filling = false;
        }
    }

    /// Forgets a follower.
    pub fn forget(&mut self, name: &str) {
        self.topology.followers.retain(|follower| follower.name != name);
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
        let mut state: ClusterState = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        if !(1..=FORMAT).contains(&state.format) {
            return Err(invalid(format!("it has form {}, this program knows 1 to {FORMAT}", state.format)));
        }
        state.format = FORMAT;
        Ok(Some(state))
    }

    /// Replaces the file as a whole: a reader sees the old or the new one.
    ///
    /// # Errors
    /// [`HostError::File`] when it cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), HostError> {
        let text = toml::to_string(self).expect("strings, numbers and lists have a TOML form");
        let head = "# Written by onecopy; change it by the options of `onecopy up` and `onecopy scale`.";
        Ok(atomic_file::write(path, FILE_MODE, format!("{head}\n{text}").as_bytes())?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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
        let before = rustix::process::umask(rustix::fs::Mode::empty());
        state().write(&path).unwrap();
        rustix::process::umask(before);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(ClusterState::read(&path).unwrap(), Some(state()));
    }

    #[test]
    fn followers_are_added_and_never_renamed() {
        let mut state = state();
        let before = state.topology.clone();
        state.add_followers(1);
        assert_eq!(state.topology, before);
        state.add_followers(3);
        assert_eq!((state.leader(), &state.followers()[..2]), (&before.leader, &before.followers[..]));
        assert_eq!(state.followers()[2], ServerState::new("follower-3".to_owned(), 5435));
        assert_eq!((state.leader().name.as_str(), state.followers().len()), ("leader", 3));
    }

    #[test]
    fn the_highest_numbers_leave_and_come_back() {
        let mut state = state();
        state.add_followers(4);
        assert_eq!(state.remove_followers(2), ["follower-4", "follower-3"]);
        assert_eq!(state.followers().iter().filter(|server| server.leaving).count(), 2);
        state.forget("follower-4");
        state.forget("follower-3");
        assert_eq!(state.remove_followers(2), [""; 0]);
        state.add_followers(3);
        assert_eq!(state.followers()[2], ServerState::new("follower-3".to_owned(), 5435));
    }

    #[test]
    fn files_of_form_1_are_understood() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cluster.toml");
        let server = |name: &str| format!("[[server]]\nname = \"{name}\"\nsocket_number = 5432\nmade = true\n");
        let servers = server("leader") + &server("follower-1");
        let text = format!("format = 1\nport = 1\nmetrics_port = 2\nfreshness = \"session\"\n{servers}");
        fs::write(&path, text).unwrap();
        let state = ClusterState::read(&path).unwrap().expect("it is there");
        assert_eq!((state.founding, state.spare, state.leader().filling), (false, true, false));
        assert_eq!((state.leader().name.as_str(), state.topology.term), ("leader", 1));
        assert_eq!(state.followers().iter().map(|server| &server.name).collect::<Vec<_>>(), ["follower-1"]);
        state.write(&path).unwrap();
        assert!(fs::read_to_string(&path).unwrap().contains("[topology.leader]"));
        assert_eq!(ClusterState::read(&path).unwrap(), Some(state));
    }

    #[test]
    fn a_strange_file_is_refused_with_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cluster.toml");
        let cases = [
            ("format = 1\nport = \"x\"\n", "line 2"),
            (
                "format = 3\nport = 1\nmetrics_port = 2\nfreshness = \"session\"\n[topology]\nterm = 1\n\
                 leader = { name = \"leader\", socket_number = 1, made = true }\n",
                "form 3",
            ),
            ("format = 1\nport = 1\nmetrics_port = 2\nfreshness = \"session\"\nserver = []\n", "no server"),
        ];
        for (text, expected) in cases {
            fs::write(&path, text).unwrap();
            let error = ClusterState::read(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("cluster.toml"), "{error}");
        }
    }
}
