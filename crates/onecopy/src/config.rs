//! `onecopy config`: checks and shows `onecopy.toml`: the router's part, and what `onecopy up` and `onecopy memory`
//! read of it.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use onecopy_host::memory::MemoryConfiguration;
use onecopy_router::config::{RouterConfiguration, RouterSettings, ServerConfiguration};
use serde::{Deserialize, Serialize};

use crate::exit::InvalidConfiguration;
use crate::output;

/// The file when nobody names one.
pub const FILE_DEFAULT: &str = "onecopy.toml";

/// Check or show onecopy.toml, the configuration of `onecopy router`, and of memory for `onecopy up`
#[derive(Debug, Args)]
pub struct Config {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Say whether a file is good, or where it is wrong and what to write
    Check {
        /// The file
        #[arg(default_value = FILE_DEFAULT)]
        file: PathBuf,
    },
    /// Print a file with every setting at its default
    Show,
}

impl Config {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        match &self.action {
            Action::Check { file } => {
                output::say(format_args!("{} is good: {}", file.display(), describe(&read_all(file)?)));
                Ok(())
            }
            Action::Show => {
                std::io::stdout().write_all(example()?.as_bytes())?;
                Ok(())
            }
        }
    }
}

/// All that may be in a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    router: RouterSettings,
    leader: Option<ServerConfiguration>,
    #[serde(default, rename = "follower")]
    followers: Vec<ServerConfiguration>,
    memory: Option<MemoryConfiguration>,
}

/// Reads and checks a file for the router.
///
/// # Errors
/// [`InvalidConfiguration`] with line, column and what to write.
pub fn read(file: &Path) -> anyhow::Result<RouterConfiguration> {
    let File { router, leader, followers, .. } = read_all(file)?;
    let leader = leader.ok_or_else(|| {
        let missing = "it has no [leader]; write the server that executes updates";
        InvalidConfiguration(format!("{}: {missing}", file.display()))
    })?;
    Ok(RouterConfiguration { router, leader, followers })
}

/// Reads and checks a file for what it says of memory.
///
/// # Errors
/// [`InvalidConfiguration`] with line, column and what to write.
pub fn read_memory(file: &Path) -> anyhow::Result<MemoryConfiguration> {
    Ok(read_all(file)?.memory.unwrap_or_default())
}

fn read_all(file: &Path) -> anyhow::Result<File> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        InvalidConfiguration(format!(
            "cannot read {}: {error}; `onecopy config show` prints one to begin with",
            file.display()
        ))
    })?;
    Ok(parse(&text).map_err(|reason| InvalidConfiguration(format!("{}: {reason}", file.display())))?)
}

/// Understands the text of a file; the error says line, column, and what to write.
fn parse(text: &str) -> Result<File, String> {
    let configuration: File = toml::from_str(text).map_err(|error| {
        let place = error.span().map(|span| place(text, span.start)).unwrap_or_default();
        format!("{place}{}", error.message().trim())
    })?;
    let mut names = BTreeSet::new();
    for server in configuration.leader.iter().chain(&configuration.followers) {
        check_server(server)?;
        if !names.insert(&server.name) {
            return Err(format!("two servers are called {:?}; give each a `name` of its own", server.name));
        }
    }
    check_settings(&configuration.router)?;
    configuration.memory.as_ref().map_or(Ok(()), MemoryConfiguration::check)?;
    Ok(configuration)
}

/// What a good file is for.
fn describe(file: &File) -> String {
    let followers = file.followers.len();
    let router =
        file.leader.as_ref().map(|_| format!("a leader and {followers} followers behind {}", file.router.listen));
    let memory = file.memory.as_ref().map(|memory| {
        let automatic = if memory.auto { "automatic" } else { "set by hand" };
        format!("memory is {automatic}, with {} servers besides a cluster's", memory.instances.len())
    });
    let parts: Vec<String> = router.into_iter().chain(memory).collect();
    if parts.is_empty() { "it says nothing".to_owned() } else { parts.join("; ") }
}

fn check_server(server: &ServerConfiguration) -> Result<(), String> {
    let name = &server.name;
    if name.is_empty() {
        return Err("a server has an empty `name`; call it as status and metrics shall".to_owned());
    }
    if server.port == 0 {
        return Err(format!("{name:?} has port 0; write the port that the server listens on"));
    }
    if server.password.is_some() && server.password_file.is_some() {
        return Err(format!("{name:?} has both `password` and `password_file`; write one of them"));
    }
    Ok(())
}

fn check_settings(settings: &RouterSettings) -> Result<(), String> {
    // Port 0 is any free port, each time another.
    if settings.listen.port() != 0 && settings.metrics_listen == Some(settings.listen) {
        return Err(format!(
            "`listen` and `metrics_listen` are both {}; give metrics a port of its own",
            settings.listen
        ));
    }
    let limits = [
        ("clients_max", settings.clients_max == 0),
        ("leader_backends_max", settings.leader_backends_max == 0),
        ("reader_backends_max", settings.reader_backends_max == 0),
        ("message_bytes_max", settings.message_bytes_max == 0),
        ("authentication_timeout_s", settings.authentication_timeout_s == 0),
    ];
    if let Some((name, _)) = limits.iter().find(|(_, is_zero)| *is_zero) {
        return Err(format!("`{name}` is 0, so nobody could be served; write at least 1, or leave it out"));
    }
    let waits = [
        ("server_timeout_ms", settings.server_timeout_ms),
        ("gate_timeout_ms", settings.gate_timeout_ms),
        ("follower_timeout_ms", settings.follower_timeout_ms),
        ("epoch_interval_ms", settings.epoch_interval_ms),
    ];
    match waits.iter().find(|(_, milliseconds)| *milliseconds == 0) {
        Some((name, _)) => {
            Err(format!("`{name}` is 0, and nothing is done within that; write at least 1, or leave it out"))
        }
        None => Ok(()),
    }
}

/// Line and column of a byte of the text, each from 1.
fn place(text: &str, offset: usize) -> String {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    format!("line {line}, column {column}: ")
}

/// A file with every setting at its default, and servers to replace.
fn example() -> anyhow::Result<String> {
    let server = |name: &str, host: &str| ServerConfiguration {
        name: name.to_owned(),
        host: host.to_owned(),
        port: 5432,
        user: "postgres".to_owned(),
        password: None,
        password_file: Some(PathBuf::from("superuser.password")),
        database: "postgres".to_owned(),
    };
    let configuration = File {
        router: RouterSettings::default(),
        leader: Some(server("leader", "db1.example.org")),
        followers: vec![server("follower-1", "db2.example.org")],
        memory: Some(MemoryConfiguration::default()),
    };
    Ok(toml::to_string(&configuration)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADER: &str = "[leader]\nname = \"a\"\nhost = \"h\"\nport = 5432\nuser = \"postgres\"\n";

    #[test]
    fn the_example_is_good_and_names_every_setting() {
        let text = example().unwrap();
        let configuration = parse(&text).unwrap();
        assert_eq!(configuration.router, RouterSettings::default());
        assert_eq!(configuration.followers.len(), 1);
        assert_eq!(configuration.memory, Some(MemoryConfiguration::default()));
        assert!(text.contains("freshness = \"session\"") && text.contains("clients_max = 1000"), "{text}");
    }

    #[test]
    fn a_wrong_file_is_refused_with_place_and_remedy() {
        let cases = [
            (
                "[router]\nlsten = \"127.0.0.1:1\"\n",
                "line 2, column 1: unknown field `lsten`, expected one of `listen`",
            ),
            ("[router]\n\nfreshness = \"fresh\"\n", "line 3, column 13: unknown freshness \"fresh\": give \"strict\""),
            ("[router]\nclients_max = -1\n", "line 2, column 15"),
            ("[router\n", "line 1"),
            ("[memory]\nceiling = \"1 XB\"\n", "line 2, column 11: \"1 XB\" is not a size"),
            ("[memory]\nlevel = \"own\"\n", "own_allowed = true"),
        ];
        for (text, expected) in cases {
            let error = parse(&format!("{text}{LEADER}")).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn one_file_serves_the_router_and_the_memory() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(FILE_DEFAULT);
        std::fs::write(&file, "[memory]\nauto = false\n").unwrap();
        assert!(!read_memory(&file).unwrap().auto);
        let error = read(&file).unwrap_err().to_string();
        assert!(error.contains("[leader]") && error.contains(FILE_DEFAULT), "{error}");
        std::fs::write(&file, LEADER).unwrap();
        assert_eq!(read_memory(&file).unwrap(), MemoryConfiguration::default());
        assert_eq!(read(&file).unwrap().leader.name, "a");
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let follower = LEADER.replace("[leader]", "[[follower]]");
        let cases = [
            (format!("{LEADER}{follower}"), "two servers are called \"a\""),
            (format!("{LEADER}password = \"x\"\npassword_file = \"y\"\n"), "both `password` and `password_file`"),
            (LEADER.replace("5432", "0"), "port 0"),
            (format!("[router]\nreader_backends_max = 0\n{LEADER}"), "`reader_backends_max` is 0"),
            (format!("[router]\nauthentication_timeout_s = 0\n{LEADER}"), "`authentication_timeout_s` is 0"),
            (format!("[router]\nserver_timeout_ms = 0\n{LEADER}"), "`server_timeout_ms` is 0"),
            (format!("[router]\nmetrics_listen = \"127.0.0.1:6432\"\n{LEADER}"), "port of its own"),
        ];
        for (text, expected) in cases {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
