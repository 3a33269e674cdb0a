//! A leader and its standbys: real servers in a directory of their own that goes away with the value.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use onecopy_postgres::{
    Binaries, Role, Server, ServerOptions, ServiceUser, Settings, StandbyOptions, recommended_settings,
};
use rustix::process::{Pid, Signal};
use tokio_postgres::Config;

use crate::client::Session;
use crate::ports;

/// The leader's name, in the router's configuration and as `cluster_name`.
pub const LEADER: &str = "leader";
/// The database that tests use.
pub const DATABASE: &str = "shop";
/// The database in which outcomes are judged; no test reads there.
pub const JUDGE_DATABASE: &str = "judge";
/// The role that tests log in as, on the servers and through the router.
pub const USER: &str = "postgres";
/// Its password.
pub const PASSWORD: &str = "a secret of the tests";

/// How long a server may take until it answers.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(180);
const REPLAY_DEADLINE: Duration = Duration::from_secs(120);
const REPLAY_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How often a dropped directory is searched for processes and removed before it is left behind.
const REMOVE_ROUNDS_MAX: usize = 1000;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// A leader and its followers.
#[derive(Debug)]
pub struct Servers {
    all: Vec<TestServer>,
    settings: Settings,
    directory: tempfile::TempDir,
}

/// One server.
#[derive(Debug)]
pub struct TestServer {
    /// `leader` or `follower-<n>`.
    pub name: String,
    /// The server itself, to be stopped, crashed and started.
    pub server: Server,
}

impl Servers {
    /// Starts a leader and `followers` standbys with a database [`DATABASE`]. Nothing is written durably: what a crash
    /// of the machine would lose is not the subject here.
    ///
    /// # Errors
    ///
    /// What a program said that failed.
    pub async fn start(followers: usize) -> anyhow::Result<Servers> {
        Servers::start_with(followers, &Settings::new()).await
    }

    /// The same with further settings for every server.
    ///
    /// # Errors
    ///
    /// What a program said that failed.
    pub async fn start_with(followers: usize, settings: &Settings) -> anyhow::Result<Servers> {
        let directory = tempfile::tempdir()?;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        // From here on a failure removes what is there.
        let mut servers = Servers { all: Vec::new(), settings: settings.clone(), directory };
        let leader = Server::create(servers.options(LEADER, Role::Leader)?).await?;
        let mut waiting = Vec::new();
        for number in 1..=followers {
            waiting.push(servers.follower_of(&leader, &format!("follower-{number}")).await?);
        }
        leader.start().await?;
        servers.all.push(TestServer { name: LEADER.to_owned(), server: leader });
        for follower in waiting {
            follower.server.start().await?;
            servers.all.push(follower);
        }
        let session = Session::connect("setup", &servers.leader().config("postgres")).await?;
        session.run_when_unused(&format!("CREATE DATABASE {DATABASE}")).await?;
        session.run_when_unused(&format!("CREATE DATABASE {JUDGE_DATABASE}")).await?;
        servers.wait_replayed().await?;
        Ok(servers)
    }

    fn options(&self, name: &str, role: Role) -> anyhow::Result<ServerOptions> {
        let home = self.directory.path().join(name);
        let (binaries, user) = (Binaries::find(None)?, ServiceUser::resolve(None)?);
        let mut options = ServerOptions::new(binaries, user, home, free_port()?, PASSWORD.to_owned());
        options.settings = recommended_settings(role, name);
        options.settings.set("fsync", "off").set("full_page_writes", "off").set("shared_buffers", "32MB");
        // Followers have no slot: a leader that has crashed keeps what they lack of its log all the same.
        options.settings.set("wal_keep_size", "1GB");
        options.settings.merge(&self.settings);
        options.start_timeout = START_TIMEOUT;
        Ok(options)
    }

    /// A standby from a cold copy of a leader that has not started yet: quicker than a base backup of a running one.
    async fn follower_of(&self, leader: &Server, name: &str) -> anyhow::Result<TestServer> {
        let options = self.options(name, Role::Follower)?;
        options.user.create_directory(&options.home)?;
        let copied = Command::new("cp").arg("-a").arg(leader.data_directory()).arg(&options.home).output()?;
        ensure!(copied.status.success(), "cp: {}", String::from_utf8_lossy(&copied.stderr));
        let server = Server::open(options).await?;
        let primary = leader.connection().with_application_name(name);
        server.make_standby(&StandbyOptions { primary, slot: None })?;
        Ok(TestServer { name: name.to_owned(), server })
    }

    /// The leader, then the followers.
    pub fn all(&self) -> &[TestServer] {
        &self.all
    }

    /// The leader.
    pub fn leader(&self) -> &TestServer {
        &self.all[0]
    }

    /// The followers, in the order of their numbers.
    pub fn followers(&self) -> &[TestServer] {
        &self.all[1..]
    }

    /// The server called `name`.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn server(&self, name: &str) -> anyhow::Result<&TestServer> {
        self.all.iter().find(|server| server.name == name).with_context(|| format!("no server is called {name}"))
    }

    /// The directory of all of them, for a test's own files too.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Waits until every follower has replayed all that the leader has flushed: all that is committed.
    ///
    /// # Errors
    ///
    /// A follower that is not there in time.
    pub async fn wait_replayed(&self) -> anyhow::Result<()> {
        ReplayWatch::open(self).await?.wait().await
    }
}

impl TestServer {
    /// How a client connects to it directly.
    pub fn config(&self, database: &str) -> Config {
        let options = self.server.options();
        let mut config = Config::new();
        config.host("127.0.0.1").port(options.port).user(USER).password(PASSWORD).dbname(database);
        config
    }

    /// Connects directly to [`DATABASE`].
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn connect(&self, session: &str) -> anyhow::Result<Session> {
        Ok(Session::connect(session, &self.config(DATABASE)).await?)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.server.options().port
    }

    /// Sends a signal to the postmaster and all its children; STOP makes a server that is there and says nothing.
    ///
    /// # Errors
    ///
    /// The list of processes cannot be read.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let mut reached = Vec::new();
        loop {
            let mut processes = processes_in(&self.server.options().home)?;
            processes.retain(|process| !reached.contains(process));
            if processes.is_empty() {
                return Ok(());
            }
            // The postmaster may have started one more before its own signal came.
            for process in processes {
                // One that has just ended needs no signal.
                let _ = rustix::process::kill_process(process, signal);
                reached.push(process);
            }
        }
    }
}

/// Connections that see how far every follower is.
pub struct ReplayWatch {
    leader: Session,
    followers: Vec<Session>,
}

impl ReplayWatch {
    /// Connects to every server.
    ///
    /// # Errors
    ///
    /// A server's refusal.
    pub async fn open(servers: &Servers) -> anyhow::Result<ReplayWatch> {
        let leader = Session::connect("replay", &servers.leader().config("postgres")).await?;
        let mut followers = Vec::new();
        for follower in servers.followers() {
            followers.push(Session::connect(&follower.name, &follower.config("postgres")).await?);
        }
        Ok(ReplayWatch { leader, followers })
    }

    /// Waits until every follower shows all that is committed now.
    ///
    /// # Errors
    ///
    /// A follower that is not there in time.
    pub async fn wait(&self) -> anyhow::Result<()> {
        if self.followers.is_empty() {
            return Ok(());
        }
        // Not the insert position: nobody flushes what is not committed, so it may be long in coming.
        let flushed = self.leader.run("SELECT pg_current_wal_flush_lsn()").await?.text()?.to_owned();
        for follower in &self.followers {
            let question = format!("SELECT (pg_last_wal_replay_lsn() >= '{flushed}')::int");
            let deadline = tokio::time::Instant::now() + REPLAY_DEADLINE;
            while follower.run(&question).await?.text()? != "1" {
                ensure!(tokio::time::Instant::now() < deadline, "{} does not replay {flushed}", follower.name());
                tokio::time::sleep(REPLAY_POLL_INTERVAL).await;
            }
        }
        Ok(())
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        remove_with_processes(self.directory.path());
    }
}

/// Kills all processes that work in `directory` and removes it.
pub(crate) fn remove_with_processes(directory: &Path) {
    // A postmaster and its children work in their data directory; this finds them whatever state they are in. On a
    // busy machine it takes a while until they are gone, and until then they may still make files.
    for _ in 0..REMOVE_ROUNDS_MAX {
        let processes = processes_in(directory).unwrap_or_default();
        for process in &processes {
            let _ = rustix::process::kill_process(*process, Signal::KILL);
        }
        if processes.is_empty() && std::fs::remove_dir_all(directory).is_ok() {
            return;
        }
        std::thread::sleep(REMOVE_PAUSE);
    }
    eprintln!("{} is left behind", directory.display());
}

/// The processes whose working directory lies in `directory`: servers with all their children.
pub(crate) fn processes_in(directory: &Path) -> anyhow::Result<Vec<Pid>> {
    let mut processes = Vec::new();
    for entry in std::fs::read_dir("/proc")?.filter_map(Result::ok) {
        let works_there = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|path| path.starts_with(directory));
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (true, Some(process)) = (works_there, number.and_then(Pid::from_raw)) {
            processes.push(process);
        }
    }
    Ok(processes)
}

/// A port that nobody has now, and that nobody takes before its server has it.
///
/// # Errors
///
/// No port is left.
pub fn free_port() -> anyhow::Result<u16> {
    ports::free_port().context("no port of this test's part is free")
}
