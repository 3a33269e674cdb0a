//! Servers with the extension, in a directory of their own that goes away with the value.

use std::process::Command;

use anyhow::{Context, ensure};
use onecopy_postgres::{Role, Server, ServerOptions, Settings, StandbyOptions, StopMode, recommended_settings};
use onecopy_testing::{Content, TestDirectory, create_with, server_options};

use crate::clones::contents::wait_replayed;
use crate::clones::version::Version;
use crate::memory::pool::Pool;
use crate::servers::{DATABASE, LEADER, TestServer};

/// What servers load, and what SQL calls it.
pub const EXTENSION: &str = "onecopy";
/// The standby's name.
pub const STANDBY: &str = "standby";
/// Few enough that the extension's own floor is far below the sizes of tests.
const CONNECTIONS_MAX: u32 = 60;
/// A standby that is killed again and again still finds its log, though it has no slot.
const LOG_KEPT: &str = "2GB";
/// What every server holds at first.
const CONTENT: Content<'_> = Content {
    databases: &[DATABASE],
    scripts: &[("template1", EXTENSIONS), ("postgres", EXTENSIONS), (DATABASE, EXTENSIONS)],
    pgbench: None,
};
const EXTENSIONS: &str = "CREATE EXTENSION amcheck; CREATE EXTENSION pg_prewarm; CREATE EXTENSION pg_buffercache";

/// What is to be started.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Of which version.
    pub version: Version,
    /// `shared_buffers`.
    pub ceiling_bytes: u64,
    /// Whether the extension is loaded and made.
    pub has_extension: bool,
    /// Whether a hot standby follows.
    pub has_standby: bool,
    /// Further settings.
    pub settings: Settings,
}

impl Plan {
    /// One server with the extension whose pool is as large as its ceiling.
    pub fn new(version: Version, ceiling_bytes: u64) -> Plan {
        let mut settings = Settings::new();
        if version == Version::Eighteen {
            // By its defaults each process may pin so much ahead that the floor is above the sizes of most tests.
            settings.set("effective_io_concurrency", 1).set("maintenance_io_concurrency", 1);
        }
        Plan { version, ceiling_bytes, has_extension: true, has_standby: false, settings }
    }

    /// The same with a hot standby.
    pub fn with_standby(mut self) -> Plan {
        self.has_standby = true;
        self
    }

    /// The same as a stock server.
    pub fn without_extension(mut self) -> Plan {
        self.has_extension = false;
        self
    }

    /// The same with one more setting.
    pub fn set(mut self, name: &str, value: impl std::fmt::Display) -> Plan {
        self.settings.set(name, value);
        self
    }

    fn all_settings(&self, role: Role, name: &str) -> Settings {
        let mut settings = recommended_settings(role, name);
        settings
            .set("shared_buffers", format!("{}kB", self.ceiling_bytes >> 10))
            .set("max_connections", CONNECTIONS_MAX)
            .set("wal_keep_size", LOG_KEPT)
            .set("max_wal_size", "1GB")
            .set("checkpoint_timeout", "30s")
            // What a crash of the machine would lose is not the subject here.
            .set("fsync", "off")
            .set("full_page_writes", "off")
            // A standby's readers are not to be cancelled by what the leader drops.
            .set("max_standby_streaming_delay", "-1")
            // Ten seconds of nothing must not tell a server that is only slow from one that is gone.
            .set("wal_sender_timeout", "60s");
        if self.has_extension {
            settings.preload(EXTENSION);
        }
        settings.merge(&self.settings);
        settings
    }
}

/// A leader, and a standby if there is one.
#[derive(Debug)]
pub struct Harness {
    /// What was started.
    pub plan: Plan,
    servers: Vec<TestServer>,
    directory: TestDirectory,
}

impl Harness {
    /// Starts what is planned, with a database [`DATABASE`] and the extension in it.
    ///
    /// # Errors
    ///
    /// What a program or a server said that failed.
    pub async fn start(plan: Plan) -> anyhow::Result<Harness> {
        // The product's own words, when asked for by RUST_LOG; a second harness in one process finds them set up.
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
        let directory = TestDirectory::new()?;
        let mut harness = Harness { plan, servers: Vec::new(), directory };
        let leader = create_with(harness.options(LEADER, Role::Leader)?, &CONTENT).await?;
        if harness.plan.has_standby {
            // A standby must allow as many connections as its leader's control file tells: before the first start, the
            // template's.
            leader.start().await?;
            leader.stop(StopMode::Fast).await?;
        }
        // From a cold copy: quicker than a base backup.
        let standby = if harness.plan.has_standby { Some(harness.standby_of(&leader)?) } else { None };
        leader.start().await?;
        harness.servers.push(TestServer { name: LEADER.to_owned(), server: leader });
        if let Some(options) = standby {
            let server = Server::open(options).await?;
            let primary = harness.leader().server.connection().with_application_name(STANDBY);
            server.make_standby(&StandbyOptions { primary, slot: None })?;
            server.start().await?;
            harness.servers.push(TestServer { name: STANDBY.to_owned(), server });
        }
        if harness.plan.has_extension {
            harness.leader().connect("setup").await?.run(&format!("CREATE EXTENSION {EXTENSION}")).await?;
        }
        Ok(harness)
    }

    fn options(&self, name: &str, role: Role) -> anyhow::Result<ServerOptions> {
        let mut options = server_options(self.plan.version.binaries()?, self.directory.join(name))?;
        options.settings = self.plan.all_settings(role, name);
        Ok(options)
    }

    fn standby_of(&self, leader: &Server) -> anyhow::Result<ServerOptions> {
        let options = self.options(STANDBY, Role::Follower)?;
        options.user.create_directory(&options.home)?;
        let copied = Command::new("cp").arg("-a").arg(leader.data_directory()).arg(&options.home).output()?;
        ensure!(copied.status.success(), "cp: {}", String::from_utf8_lossy(&copied.stderr));
        Ok(options)
    }

    /// The leader.
    pub fn leader(&self) -> &TestServer {
        &self.servers[0]
    }

    /// The standby.
    ///
    /// # Errors
    ///
    /// None was planned.
    pub fn standby(&self) -> anyhow::Result<&TestServer> {
        self.servers.get(1).context("no standby was planned")
    }

    /// All of them, the leader first.
    pub fn all(&self) -> &[TestServer] {
        &self.servers
    }

    /// Waits until the standby has replayed what the leader has flushed.
    ///
    /// # Errors
    ///
    /// There is no standby, or it does not come that far.
    pub async fn wait_replayed(&self) -> anyhow::Result<()> {
        wait_replayed(self.leader(), self.standby()?).await
    }

    /// The pool of the leader.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn pool(&self) -> anyhow::Result<Pool> {
        Pool::of(self.leader()).await
    }
}
