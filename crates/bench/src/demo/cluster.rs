//! The demonstration's cluster, driven by the commands that a user types, in a directory that goes away.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use onecopy_host::ClusterStatus;
use tempfile::TempDir;
use tokio_postgres::{Client, Config, NoTls};

/// How long a follower may take to replay what the leader has committed.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(120);

/// How often it is asked whether it has.
const REPLAY_LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// A cluster of `onecopy up`. Dropped, it stops and its directory goes away, unless it was kept.
pub struct Cluster {
    program: PathBuf,
    /// Holds the cluster; none when it was kept.
    directory: Option<TempDir>,
    /// The cluster's own directory.
    root: PathBuf,
    /// How clients connect to the router; filled by [`Cluster::up`].
    client: Config,
}

impl Cluster {
    /// A cluster that is not there yet, and the directory for it.
    ///
    /// # Errors
    /// When the program is missing, or the directory cannot be made.
    pub fn new(program: Option<&Path>) -> anyhow::Result<Cluster> {
        let program = match program {
            Some(program) => std::path::absolute(program)?,
            None => std::env::current_exe()?.with_file_name("onecopy"),
        };
        if !program.exists() {
            bail!("{} does not exist: run `cargo build -p onecopy`, or give --onecopy PATH", program.display());
        }
        let directory = tempfile::Builder::new().prefix("onecopy-demo-").tempdir()?;
        // The account that servers run as passes through; the cluster's own directory is closed to others.
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o711))?;
        let root = directory.path().join("cluster");
        Ok(Cluster { program, directory: Some(directory), root, client: Config::new() })
    }

    /// The command line that does `verb` with this cluster, for reading and for pasting.
    pub fn command_line(&self, verb: &str) -> String {
        let here = std::env::current_dir().unwrap_or_default();
        let program = self.program.strip_prefix(&here).unwrap_or(&self.program);
        format!("{} {verb} --dir {}", program.display(), self.root.display())
    }

    /// The directory that goes away with the cluster.
    pub fn directory(&self) -> &Path {
        self.root.parent().unwrap_or(&self.root)
    }

    /// Makes and starts the servers and the router, on free ports. What the program says goes to the user.
    ///
    /// # Errors
    /// When it cannot; it has said why.
    pub async fn up(&mut self, followers: usize) -> anyhow::Result<()> {
        let replicas = followers.to_string();
        let arguments = ["--replicas", &replicas, "--port", "0", "--metrics-port", "0", "--detach"];
        say!("$ {} {}", self.command_line("up"), arguments.join(" "));
        let status = tokio::process::Command::from(self.command("up"))
            .args(arguments)
            .kill_on_drop(true)
            .status()
            .await
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        if !status.success() {
            bail!("`onecopy up` ended with {status}; the lines above say why");
        }
        let dsn = self.ask(&["dsn"]).await?;
        self.client = dsn.trim().parse().context("`onecopy dsn` does not print a connection string")?;
        Ok(())
    }

    /// What `onecopy status --json` says.
    ///
    /// # Errors
    /// When the program fails or says something else.
    pub async fn status(&self) -> anyhow::Result<ClusterStatus> {
        let answer = self.ask(&["status", "--json"]).await?;
        serde_json::from_str(&answer).context("`onecopy status --json` does not print a cluster's status")
    }

    /// A connection through the router, as any program has it.
    ///
    /// # Errors
    /// What the router refuses.
    pub async fn connect(&self, database: &str) -> anyhow::Result<Client> {
        connect(self.client.clone().dbname(database)).await.with_context(|| format!("cannot connect to {database}"))
    }

    /// A connection to one server's own socket, past the router: for comparison, never for an application.
    ///
    /// # Errors
    /// What the server refuses, or a name that no server has.
    pub async fn connect_past_router(&self, server: &str, database: &str) -> anyhow::Result<Client> {
        let status = self.status().await?;
        let found = status.router.servers.iter().find(|known| known.name == server);
        let address = &found.with_context(|| format!("the cluster has no server {server}"))?.address;
        let (directory, port) = address
            .split_once("/.s.PGSQL.")
            .and_then(|(directory, port)| Some((directory, port.parse().ok()?)))
            .with_context(|| format!("{server} is at {address}, which is not a server's socket"))?;
        let mut config = Config::new();
        config.host_path(directory).port(port).dbname(database);
        config.user(self.client.get_user().unwrap_or_default());
        config.password(self.client.get_password().unwrap_or_default());
        connect(&config).await.with_context(|| format!("cannot connect to {server}"))
    }

    /// Stops the cluster and removes its directory.
    ///
    /// # Errors
    /// When `onecopy down` fails; the directory then stays for whoever looks why.
    pub async fn down(mut self) -> anyhow::Result<()> {
        let directory = self.directory.take();
        match self.ask(&["down"]).await {
            Ok(_) => Ok(directory.map_or(Ok(()), TempDir::close)?),
            Err(error) => {
                directory.map(TempDir::keep);
                Err(error)
            }
        }
    }

    /// Leaves the cluster running.
    pub fn keep(mut self) {
        self.directory.take().map(TempDir::keep);
    }

    /// Runs the program to its end and returns what it printed.
    async fn ask(&self, words: &[&str]) -> anyhow::Result<String> {
        let mut command = self.command(words[0]);
        command.args(&words[1..]);
        let output = tokio::process::Command::from(command).kill_on_drop(true).output().await?;
        if !output.status.success() {
            bail!("`onecopy {}` failed: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    fn command(&self, verb: &str) -> Command {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(&self.program);
        // Ctrl-C on the terminal is for this program, which then stops things in their order.
        command.arg(verb).arg("--dir").arg(&self.root).process_group(0).stdin(Stdio::null());
        command
    }
}

impl Drop for Cluster {
    /// The way out after errors, panics and Ctrl-C.
    fn drop(&mut self) {
        if self.directory.is_none() || !self.root.exists() {
            return;
        }
        let stopped = self.command("down").stdout(Stdio::null()).stderr(Stdio::piped()).output();
        let problem = match stopped {
            Ok(output) if output.status.success() => return,
            // Nothing of it runs: `up` was interrupted before there was a cluster.
            Ok(output) if output.status.code() == Some(EXIT_CODE_NO_CLUSTER) => return,
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        let root = self.directory.take().map(TempDir::keep).unwrap_or_default();
        // Not `eprintln!`: a second panic while one unwinds would end the program here.
        let _ =
            writeln!(std::io::stderr(), "onecopy-bench: the cluster in {} was not stopped: {problem}", root.display());
    }
}

/// What `onecopy` ends with when there is no cluster in a directory; see `onecopy --help`.
const EXIT_CODE_NO_CLUSTER: i32 = 3;

async fn connect(config: &Config) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    // It ends with the client; what goes wrong with it, the client's next statement says.
    tokio::spawn(connection);
    Ok(client)
}

/// Waits until a follower shows everything that the leader has committed so far.
///
/// # Errors
/// When it takes too long, or a server fails.
pub async fn wait_replayed(leader: &Client, follower: &Client) -> anyhow::Result<()> {
    let position: String = leader.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await?.get(0);
    // A position is two hexadecimal numbers: nothing in it needs quoting.
    let question = format!("SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn");
    let deadline = Instant::now() + REPLAY_TIMEOUT;
    while !follower.query_one(&question, &[]).await?.get::<_, bool>(0) {
        if Instant::now() > deadline {
            bail!("a follower has not replayed {position} in {} s", REPLAY_TIMEOUT.as_secs());
        }
        tokio::time::sleep(REPLAY_LOOK_INTERVAL).await;
    }
    Ok(())
}
