//! A cluster as its clients see it: the servers, and before them a router or, as a control, nothing.

use std::time::Duration;

use anyhow::Context;
use onecopy_router::Router;
use onecopy_router::config::{RouterConfiguration, RouterSettings, ServerConfiguration};
use tokio_postgres::Config;

use crate::client::Session;
use crate::servers::{DATABASE, LEADER, PASSWORD, ReplayWatch, Servers, TestServer, USER};

/// How long a gate waits for a follower.
const FOLLOWER_TIMEOUT_MS: u64 = 5000;
/// How long a server may leave a probe unanswered, and a client may wait for a back end.
const SERVER_TIMEOUT_MS: u64 = 30_000;
const BACKEND_WAIT_MS: u64 = 60_000;
/// Within this a read finds an epoch to run at.
const EPOCH_TIMEOUT: Duration = Duration::from_secs(120);

/// What `SHOW onecopy.served_by` contains after a read at an epoch.
pub const AT_EPOCH: &str = " at epoch ";

/// Servers with or without a router.
pub struct TestCluster {
    /// The servers themselves.
    pub servers: Servers,
    router: Option<Router>,
    /// The router's.
    pub settings: RouterSettings,
    replay: ReplayWatch,
}

impl TestCluster {
    /// Servers without a router: updates run on the leader, SERIALIZABLE, and reads on whatever server is named,
    /// as in programs that balance reads over hot standbys today.
    ///
    /// # Errors
    ///
    /// What a server said that did not start.
    pub async fn without_router(followers: usize) -> anyhow::Result<TestCluster> {
        TestCluster::before(Servers::start(followers).await?).await
    }

    /// A client's view of servers that run already.
    ///
    /// # Errors
    ///
    /// A server's refusal.
    pub async fn before(servers: Servers) -> anyhow::Result<TestCluster> {
        let replay = ReplayWatch::open(&servers).await?;
        Ok(TestCluster { servers, router: None, settings: RouterSettings::default(), replay })
    }

    /// Servers behind a router, in this process, with what `change` makes of the default settings.
    ///
    /// # Errors
    ///
    /// What a server or the router said that did not start.
    pub async fn with_router(
        followers: usize,
        change: impl FnOnce(&mut RouterSettings),
    ) -> anyhow::Result<TestCluster> {
        let mut cluster = TestCluster::without_router(followers).await?;
        cluster.start_router(change).await?;
        Ok(cluster)
    }

    /// Puts a router before the servers, in the place of one that stood there.
    ///
    /// # Errors
    ///
    /// What the router said that did not start.
    pub async fn start_router(&mut self, change: impl FnOnce(&mut RouterSettings)) -> anyhow::Result<()> {
        // The router's own words, when asked for by RUST_LOG; a second router in one process finds them set up.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        self.stop_router().await;
        let mut settings = RouterSettings {
            listen: ([127, 0, 0, 1], 0).into(),
            // On a busy machine nobody is to be left behind or given up, except by tests of just that.
            follower_timeout_ms: FOLLOWER_TIMEOUT_MS,
            server_timeout_ms: SERVER_TIMEOUT_MS,
            backend_wait_ms: BACKEND_WAIT_MS,
            ..RouterSettings::default()
        };
        change(&mut settings);
        self.settings = settings.clone();
        self.router = Some(Router::start(router_configuration(&self.servers, settings)).await?);
        Ok(())
    }

    /// Reloads the router with the settings that it was started with, `change`d.
    ///
    /// # Errors
    ///
    /// What the router refuses.
    pub async fn reload(&self, change: impl FnOnce(&mut RouterSettings)) -> anyhow::Result<()> {
        let mut settings = self.settings.clone();
        change(&mut settings);
        Ok(self.router().reload(&router_configuration(&self.servers, settings)).await?)
    }

    /// The router; panics when there is none, which is a mistake in the test.
    pub fn router(&self) -> &Router {
        self.router.as_ref().expect("the test started a router")
    }

    /// Whether a router stands before the servers.
    pub fn has_router(&self) -> bool {
        self.router.is_some()
    }

    /// How a client connects.
    pub fn client_config(&self) -> Config {
        let mut config = self.servers.leader().config(DATABASE);
        if let Some(router) = &self.router {
            config = Config::new();
            let address = router.local_address();
            config.host(address.ip().to_string()).port(address.port());
            config.user(USER).password(PASSWORD).dbname(DATABASE);
        }
        config
    }

    /// A session for updates.
    ///
    /// # Errors
    ///
    /// A refused connection.
    pub async fn updater(&self, name: &str) -> anyhow::Result<Session> {
        let session = Session::connect(name, &self.client_config()).await?;
        if !self.has_router() {
            // What the router gives to every statement outside a transaction.
            session.run("SET default_transaction_isolation = 'serializable'").await?;
        }
        Ok(session)
    }

    /// A session whose read-only transactions run on `server`.
    ///
    /// # Errors
    ///
    /// A refused connection, an unknown server.
    pub async fn reader(&self, name: &str, server: &str) -> anyhow::Result<Session> {
        if !self.has_router() {
            return self.servers.server(server)?.connect(name).await;
        }
        let session = self.updater(name).await?;
        session.run(&format!("SET onecopy.server = '{server}'")).await?;
        Ok(session)
    }

    /// Runs `read` in `session` until the router answers it at an epoch: the first ones may run on the leader.
    ///
    /// # Errors
    ///
    /// A refused read, or no epoch in time.
    pub async fn read_until_at_epoch(&self, session: &Session, read: &str) -> anyhow::Result<()> {
        let reads = async {
            loop {
                session.run(read).await?;
                let place = session.run("SHOW onecopy.served_by").await?;
                if place.rows[0][0].as_deref().is_some_and(|place| place.contains(AT_EPOCH)) {
                    return anyhow::Ok(());
                }
            }
        };
        let reads = tokio::time::timeout(EPOCH_TIMEOUT, reads).await;
        reads.with_context(|| format!("no read at an epoch: {:?}", self.router().status()))?
    }

    /// The statement that begins an update transaction.
    pub fn begin_update(&self) -> &'static str {
        "BEGIN ISOLATION LEVEL SERIALIZABLE"
    }

    /// The statement that begins a read-only transaction on `server`. A hot standby knows no SERIALIZABLE, the router
    /// gives it.
    pub fn begin_read(&self, server: &str) -> &'static str {
        if self.has_router() || server == LEADER {
            "BEGIN ISOLATION LEVEL SERIALIZABLE, READ ONLY"
        } else {
            "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
        }
    }

    /// Without a router, or behind one without epochs: waits until the followers show what is committed, so that a
    /// schedule has one outcome. Epochs see to it themselves.
    ///
    /// # Errors
    ///
    /// A follower that does not replay.
    pub async fn wait_for_replay(&self) -> anyhow::Result<()> {
        if self.has_router() && !self.settings.unsafe_without_epochs { Ok(()) } else { self.replay.wait().await }
    }

    /// Stops the router, if there is one.
    pub async fn stop_router(&mut self) {
        if let Some(router) = self.router.take() {
            router.shutdown().await;
        }
    }
}

/// The configuration of a router before `servers`.
pub fn router_configuration(servers: &Servers, settings: RouterSettings) -> RouterConfiguration {
    RouterConfiguration {
        router: settings,
        leader: server_configuration(servers.leader()),
        followers: servers.followers().iter().map(server_configuration).collect(),
    }
}

/// How the router reaches `server`.
pub fn server_configuration(server: &TestServer) -> ServerConfiguration {
    ServerConfiguration {
        name: server.name.clone(),
        host: "127.0.0.1".to_owned(),
        port: server.port(),
        user: USER.to_owned(),
        password: Some(PASSWORD.to_owned()),
        database: "postgres".to_owned(),
        password_file: None,
    }
}
