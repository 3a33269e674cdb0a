//! The table `[memory]` of `onecopy.toml`: how the memory of a host's servers is shared out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use onecopy_memory::{InstanceName, Kind, Level, Size};
use serde::{Deserialize, Serialize};

/// How the memory of a cluster's servers, and of other servers of the host, is shared out. What is left out has a
/// default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfiguration {
    /// Whether the cluster's servers load the extension that resizes their pools.
    pub extension: ExtensionUse,
    /// Targets follow need and pressure by themselves; else only what is set by hand holds.
    pub auto: bool,
    /// How closely servers and host work together.
    pub level: Level,
    /// The risk of level `own` is taken.
    pub own_allowed: bool,
    /// What all pools together may have; a share is one of the host's memory.
    pub budget: Size,
    /// What stays available for all else on the host; a share is one of the host's memory.
    pub keep_available: Size,
    /// The most that each server's pool may ever have (`shared_buffers`); a share is one of the host's memory.
    pub ceiling: Size,
    /// What it has at first; a share is one of its ceiling.
    pub start: Size,
    /// What it always keeps; a share is one of its ceiling. The server has a floor of its own beside it.
    pub floor: Size,
    /// How much its need counts against that of others.
    pub weight: f64,
    /// Memory that it keeps ready to be taken without asking, at level `publish`; a share is one of its ceiling.
    pub reserve: Size,
    /// Whether each of the cluster's servers has a control group of its own.
    pub cgroup: CgroupUse,
    /// What may be used in it, page cache and all, before the kernel takes pages away, swaps, or kills; a share is one
    /// of the host's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Size>,
    /// What differs for one server of the cluster, by its name.
    #[serde(rename = "server", skip_serializing_if = "BTreeMap::is_empty")]
    pub servers: BTreeMap<InstanceName, ServerMemory>,
    /// Servers that the cluster has not started.
    #[serde(rename = "instance", skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<InstanceMemory>,
}

impl Default for MemoryConfiguration {
    fn default() -> Self {
        MemoryConfiguration {
            extension: ExtensionUse::Auto,
            auto: true,
            level: Level::Request,
            own_allowed: false,
            budget: Size::Millionths(250_000),
            keep_available: Size::Millionths(50_000),
            ceiling: Size::Millionths(62_500),
            start: Size::Millionths(250_000),
            floor: Size::Bytes(64 << 20),
            weight: 1.0,
            reserve: Size::Millionths(62_500),
            cgroup: CgroupUse::Off,
            limit: None,
            servers: BTreeMap::new(),
            instances: Vec::new(),
        }
    }
}

/// Whether the extension is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExtensionUse {
    /// Where it is installed.
    Auto,
    /// A cluster whose PostgreSQL lacks it is not started.
    On,
    /// Never.
    Off,
}

/// Whether servers have control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupUse {
    /// They stay where they were started. A limit would bound the page cache of a server, too.
    Off,
    /// Where the host allows it.
    Auto,
    /// A cluster is not started where the host does not allow it.
    On,
}

/// What differs for one server of the cluster.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerMemory {
    /// As [`MemoryConfiguration::ceiling`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<Size>,
    /// As [`MemoryConfiguration::start`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<Size>,
    /// As [`MemoryConfiguration::floor`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<Size>,
    /// As [`MemoryConfiguration::weight`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// As [`MemoryConfiguration::reserve`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve: Option<Size>,
    /// As [`MemoryConfiguration::limit`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Size>,
    /// As [`MemoryConfiguration::level`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<Level>,
}

/// A server that somebody else has started, and how it is reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceMemory {
    /// What it is called.
    pub name: InstanceName,
    /// What it is.
    pub kind: Kind,
    /// PostgreSQL: a connection string of a superuser, or of a role that may call the extension's functions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dsn: Option<String>,
    /// PostgreSQL: its data directory, where `postmaster.pid` tells its socket if there is no `dsn`; needed for the
    /// level `publish`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_directory: Option<PathBuf>,
    /// MariaDB, MySQL: its Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// MariaDB, MySQL: a file of options with `[client]` user, password, socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defaults_file: Option<PathBuf>,
    /// Who logs in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// PostgreSQL: a file whose first line is the password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
    /// What it always keeps; a share is one of the host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<Size>,
    /// The most that it may have, below its own ceiling; a share is one of the host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<Size>,
    /// How much its need counts against that of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// How closely it and the host work together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<Level>,
}

impl MemoryConfiguration {
    /// What one server of the cluster has, all of it.
    pub fn of_server(&self, name: &str) -> ServerMemory {
        let own = self.servers.iter().find(|(server, _)| server.as_str() == name).map(|(_, memory)| memory.clone());
        let own = own.unwrap_or_default();
        ServerMemory {
            ceiling: own.ceiling.or(Some(self.ceiling)),
            start: own.start.or(Some(self.start)),
            floor: own.floor.or(Some(self.floor)),
            weight: own.weight.or(Some(self.weight)),
            reserve: own.reserve.or(Some(self.reserve)),
            limit: own.limit.or(self.limit),
            level: own.level.or(Some(self.level)),
        }
    }

    /// Whether its names fit a cluster, whose servers have names of their own.
    ///
    /// # Errors
    /// In words, what to write instead.
    pub fn check_names(&self) -> Result<(), String> {
        let is_number = |number: &str| number.parse::<usize>().is_ok_and(|number| number > 0);
        let is_server = |name: &str| name == "leader" || name.strip_prefix("follower-").is_some_and(is_number);
        if let Some(name) = self.servers.keys().find(|name| !is_server(name.as_str())) {
            return Err(format!(
                "[memory.server.{name}] is no server of a cluster; they are called leader, follower-1, \
                 follower-2 and so on"
            ));
        }
        match self.instances.iter().find(|instance| is_server(instance.name.as_str())) {
            Some(instance) => Err(format!(
                "[[memory.instance]] {:?} has the name of a server of the cluster; give it another `name`",
                instance.name.as_str()
            )),
            None => Ok(()),
        }
    }

    /// Whether it contradicts itself.
    ///
    /// # Errors
    /// In words, what to write instead.
    pub fn check(&self) -> Result<(), String> {
        check_weight("[memory]", self.weight)?;
        check_order("[memory]", &self.of_server(""))?;
        self.check_limit("[memory]", self.limit)?;
        self.check_level("[memory]", self.level)?;
        for (name, server) in &self.servers {
            let place = format!("[memory.server.{name}]");
            check_weight(&place, server.weight.unwrap_or(1.0))?;
            check_order(&place, &self.of_server(name.as_str()))?;
            self.check_limit(&place, server.limit)?;
            self.check_level(&place, server.level.unwrap_or_default())?;
        }
        let mut names = BTreeSet::new();
        for instance in &self.instances {
            let place = format!("[[memory.instance]] {:?}", instance.name.as_str());
            if !names.insert(&instance.name) {
                return Err(format!("two of {place}; give each a `name` of its own"));
            }
            check_weight(&place, instance.weight.unwrap_or(1.0))?;
            self.check_level(&place, instance.level.unwrap_or_default())?;
            instance.check(&place)?;
        }
        Ok(())
    }

    fn check_limit(&self, place: &str, limit: Option<Size>) -> Result<(), String> {
        match limit {
            Some(limit) if self.cgroup == CgroupUse::Off => Err(format!(
                "{place} has `limit = \"{limit}\"`, which needs control groups; write `cgroup = \"auto\"` or \
                 `cgroup = \"on\"` into [memory], or leave it out"
            )),
            _ => Ok(()),
        }
    }

    fn check_level(&self, place: &str, level: Level) -> Result<(), String> {
        match level {
            Level::Own => check_own(place, cfg!(feature = "own"), self.own_allowed),
            _ => Ok(()),
        }
    }
}

/// Whether level `own` is there, and its risk taken.
fn check_own(place: &str, is_built: bool, is_allowed: bool) -> Result<(), String> {
    match (is_built, is_allowed) {
        (true, true) => Ok(()),
        (false, _) => Err(format!(
            "{place} has `level = \"own\"`, and this onecopy was built without it: docs/guide/level-own.md says who \
             needs it and how it is built (`--features own`); or write another level"
        )),
        (true, false) => Err(format!(
            "{place} has `level = \"own\"`, which writes into a running server's memory past the server: a mistake or \
             a death in the middle ends all its sessions; write `own_allowed = true` into [memory] to take that risk, \
             or another level"
        )),
    }
}

impl InstanceMemory {
    fn check(&self, place: &str) -> Result<(), String> {
        let given = |wanted: &[(&str, bool)]| {
            wanted.iter().filter(|(_, given)| *given).map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>()
        };
        let of_postgres = [("dsn", self.dsn.is_some()), ("data_directory", self.data_directory.is_some())];
        let of_maria = [("socket", self.socket.is_some()), ("defaults_file", self.defaults_file.is_some())];
        let (ways, others) = match self.kind {
            Kind::PostgreSql => (given(&of_postgres), given(&of_maria)),
            Kind::MariaDb | Kind::MySql => (given(&of_maria), given(&of_postgres)),
        };
        if let Some(other) = others.first() {
            return Err(format!("{place} has {other}, which a server of kind \"{}\" has not; leave it out", self.kind));
        }
        if let Some(level @ (Level::Publish | Level::Own)) = self.level.filter(|_| self.kind != Kind::PostgreSql) {
            return Err(format!(
                "{place} has `level = \"{level}\"`, which only PostgreSQL has; leave it out: \
                 a server of kind \"{}\" is asked",
                self.kind
            ));
        }
        match (self.kind, ways.len()) {
            (Kind::PostgreSql, 0) => {
                Err(format!("{place} does not say how it is reached; write `dsn` or `data_directory`"))
            }
            (Kind::PostgreSql, _) => Ok(()),
            (_, 0) => Err(format!("{place} does not say how it is reached; write `socket` or `defaults_file`")),
            _ => Ok(()),
        }
    }
}

/// Refuses a start or floor above the ceiling, as far as that is known before the host is.
fn check_order(place: &str, memory: &ServerMemory) -> Result<(), String> {
    let Some(Size::Bytes(ceiling_bytes)) = memory.ceiling else { return Ok(()) };
    for (name, size) in [("start", memory.start), ("floor", memory.floor)] {
        // What nobody has written gives way.
        let written = size.filter(|size| *size != MemoryConfiguration::default().floor);
        if let Some(size) = written.filter(|size| size.of(ceiling_bytes) > ceiling_bytes) {
            let ceiling = Size::Bytes(ceiling_bytes);
            return Err(format!(
                "{place} has `{name} = \"{size}\"` above its ceiling of {ceiling}; write at most that"
            ));
        }
    }
    Ok(())
}

fn check_weight(place: &str, weight: f64) -> Result<(), String> {
    match weight.is_finite() && weight > 0.0 {
        true => Ok(()),
        false => Err(format!("{place} has `weight = {weight}`; write a number above 0, 1 for no difference")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<MemoryConfiguration, String> {
        let configuration: MemoryConfiguration = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        configuration.check().map(|()| configuration)
    }

    #[test]
    fn nothing_written_is_the_default_and_the_default_can_be_written() {
        assert_eq!(read("").unwrap(), MemoryConfiguration::default());
        let text = toml::to_string(&MemoryConfiguration::default()).unwrap();
        assert_eq!(read(&text).unwrap(), MemoryConfiguration::default(), "{text}");
    }

    #[test]
    fn names_of_a_cluster_are_its_own() {
        for (text, words) in [
            ("[server.leadr]", Some("called leader, follower-1")),
            ("[server.follower-0]", Some("called leader, follower-1")),
            ("[server.follower-12]\n[server.leader]", None),
            ("[[instance]]\nname = \"follower-1\"\nkind = \"mysql\"\nsocket = \"/x\"", Some("another `name`")),
            ("[[instance]]\nname = \"follower-db\"\nkind = \"mysql\"\nsocket = \"/x\"", None),
        ] {
            let told = read(text).unwrap().check_names();
            match words {
                Some(words) => assert!(told.as_ref().unwrap_err().contains(words), "{text}: {told:?}"),
                None => assert_eq!(told, Ok(()), "{text}"),
            }
        }
    }

    #[test]
    fn one_server_may_differ() {
        let text = "ceiling = \"1GB\"\nweight = 2.0\n[server.leader]\nceiling = \"2GB\"\nlevel = \"publish\"\n";
        let configuration = read(text).unwrap();
        let leader = configuration.of_server("leader");
        assert_eq!((leader.ceiling, leader.level), (Some(Size::Bytes(2 << 30)), Some(Level::Publish)));
        assert_eq!((leader.weight, leader.start), (Some(2.0), Some(Size::Millionths(250_000))));
        let follower = configuration.of_server("follower-1");
        assert_eq!((follower.ceiling, follower.level), (Some(Size::Bytes(1 << 30)), Some(Level::Request)));
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_remedy() {
        let instance = "[[instance]]\nname = \"shop\"\nkind = ";
        let cases = [
            ("ceilling = \"1GB\"".to_owned(), "unknown field `ceilling`"),
            ("ceiling = \"1 XB\"".to_owned(), "its unit is unknown"),
            ("ceiling = 5".to_owned(), "invalid type: integer"),
            ("ceiling = \"1GB\"\nstart = \"2GB\"".to_owned(), "at most that"),
            ("floor = \"2GB\"\n[server.leader]\nceiling = \"1GB\"".to_owned(), "[memory.server.leader] has `floor"),
            ("limit = \"1GB\"".to_owned(), "cgroup = \"auto\""),
            ("[server.leader]\nlimit = \"1GB\"".to_owned(), "[memory.server.leader] has `limit"),
            ("cgroup = \"always\"".to_owned(), "unknown variant `always`"),
            ("weight = 0.0".to_owned(), "above 0"),
            ("weight = nan".to_owned(), "above 0"),
            ("[server.leader]\nlevel = \"own\"".to_owned(), "[memory.server.leader]"),
            ("[server.\"a/b\"]\nweight = 1.0".to_owned(), "cannot name an instance"),
            (format!("{instance}\"oracle\""), "unknown variant `oracle`"),
            (format!("{instance}\"postgresql\""), "`dsn` or `data_directory`"),
            (format!("{instance}\"postgresql\"\nsocket = \"/x\"\ndsn = \"host=x\""), "leave it out"),
            (format!("{instance}\"mariadb\""), "`socket` or `defaults_file`"),
            (
                format!("{instance}\"mariadb\"\nsocket = \"/x\"\n{instance}\"mariadb\"\nsocket = \"/y\""),
                "`name` of its own",
            ),
        ];
        for (text, expected) in cases {
            let error = read(&text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        // Said twice, it is meant.
        assert_eq!(check_own("[memory]", true, true), Ok(()));
        for (is_built, is_allowed, expected) in
            [(true, false, "own_allowed = true"), (false, true, "--features own"), (false, false, "--features own")]
        {
            let error = check_own("[memory]", is_built, is_allowed).unwrap_err();
            assert!(error.starts_with("[memory] has `level") && error.contains(expected), "{error}");
        }
        assert_eq!(read("own_allowed = true\nlevel = \"own\"").is_ok(), cfg!(feature = "own"));
    }
}
