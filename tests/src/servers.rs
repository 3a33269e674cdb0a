//! A leader and its standbys: real servers in a directory of their own that goes away with the value.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use onecopy_postgres::{Binaries, Role, Server, ServerOptions, Settings, StandbyOptions, recommended_settings};
use onecopy_testing::{Content, Frozen, TestDirectory, create_with, process, server_options, until, wait_replayed};
use rustix::process::Signal;
use tokio_postgres::Config;

use crate::client::Session;

/// The role that tests log in as, on the servers and through the router, and its password.
pub use onecopy_testing::{PASSWORD, USER};

/// The leader's name, in the router's configuration and as `cluster_name`.
pub const LEADER: &str = "leader";
/// The database that tests use.
pub const DATABASE: &str = "shop";
/// The database in which outcomes are checked; no test reads there.
pub const CHECKER_DATABASE: &str = "checker";
/// What every leader holds at first.
const CONTENT: Content<'_> = Content { databases: &[DATABASE, CHECKER_DATABASE], scripts: &[], pgbench: None };

/// A leader and its followers.
#[derive(Debug)]
pub struct Servers {
    all: Vec<TestServer>,
    settings: Settings,
    directory: TestDirectory,
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
        let directory = TestDirectory::new()?;
        let mut servers = Servers { all: Vec::new(), settings: settings.clone(), directory };
        let leader = create_with(servers.options(LEADER, Role::Leader)?, &CONTENT).await?;
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
        servers.wait_replayed().await?;
        Ok(servers)
    }

    fn options(&self, name: &str, role: Role) -> anyhow::Result<ServerOptions> {
        let mut options = server_options(Binaries::find(None)?, self.directory.join(name))?;
        let mut settings = recommended_settings(role, name);
        settings.set("shared_buffers", "32MB").merge(&options.settings);
        options.settings = settings;
        // Followers have no slot: a leader that has crashed keeps what they lack of its log all the same.
        options.settings.set("wal_keep_size", "1GB");
        options.settings.merge(&self.settings);
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
        loop {
            match Session::connect(session, &self.config(DATABASE)).await {
                // A standby ends whoever is in the way of its replay, also on the way in.
                Err(error) if error.code == "40001" => {}
                connected => return Ok(connected?),
            }
        }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.server.options().port
    }

    /// Kills all its processes at once, as a loss of power would, and waits until they are gone.
    pub fn kill(&self) {
        let home = &self.server.options().home;
        until("the server's processes are gone", || {
            // The postmaster may have started one more before its own end came.
            let processes = process::working_in(home);
            for process in &processes {
                process::send(*process, Signal::KILL);
            }
            processes.is_empty()
        });
    }

    /// Stops all its processes until the value is dropped: a server that is there and says nothing.
    ///
    /// # Errors
    ///
    /// It does not run.
    pub fn freeze(&self) -> anyhow::Result<Frozen> {
        let postmaster = self.server.process_id().with_context(|| format!("{} does not run", self.name))?;
        Ok(Frozen::server(postmaster))
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
        for follower in &self.followers {
            wait_replayed(self.leader.client(), follower.client()).await.with_context(|| follower.name().to_owned())?;
        }
        Ok(())
    }
}
