//! A cluster as its clients see it: the servers, and before them a router or, as a control, nothing.

use tokio_postgres::Config;

use crate::client::Session;
use crate::servers::{DATABASE, ReplayWatch, Servers};

/// Servers with or without a router.
pub struct TestCluster {
    /// The servers themselves.
    pub servers: Servers,
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
        let servers = Servers::start(followers).await?;
        let replay = ReplayWatch::open(&servers).await?;
        Ok(TestCluster { servers, replay })
    }

    /// Whether a router stands before the servers.
    pub fn has_router(&self) -> bool {
        false
    }

    /// How a client connects.
    pub fn client_config(&self) -> Config {
        self.servers.leader().config(DATABASE)
    }

    /// A session for updates.
    ///
    /// # Errors
    ///
    /// A refused connection.
    pub async fn updater(&self, name: &str) -> anyhow::Result<Session> {
        Ok(Session::connect(name, &self.client_config()).await?)
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

    /// The statement that begins an update transaction.
    pub fn begin_update(&self) -> &'static str {
        "BEGIN ISOLATION LEVEL SERIALIZABLE"
    }

    /// The statement that begins a read-only transaction on `server`. A hot standby knows no SERIALIZABLE, the router
    /// gives it.
    pub fn begin_read(&self, server: &str) -> &'static str {
        if self.has_router() || server == crate::servers::LEADER {
            "BEGIN ISOLATION LEVEL SERIALIZABLE, READ ONLY"
        } else {
            "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
        }
    }

    /// Without a router: waits until the followers show what is committed, so that a schedule has one outcome.
    ///
    /// # Errors
    ///
    /// A follower that does not replay.
    pub async fn settle(&self) -> anyhow::Result<()> {
        if self.has_router() { Ok(()) } else { self.replay.wait().await }
    }
}
