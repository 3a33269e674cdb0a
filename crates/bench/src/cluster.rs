//! The servers of an experiment: a leader with the pgbench tables and its followers, in a directory that goes away.

use std::net::TcpListener;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use onecopy_postgres::{
    BaseBackup, Binaries, FollowerMaker, Role, Server, ServerOptions, ServiceUser, StandbyOptions, StopMode,
    recommended_settings,
};
use onecopy_router::authentication::ScramVerifier;

use crate::process_cpu::family_time;

/// The database with pgbench's tables.
pub const DATABASE: &str = "bench";

/// The role whose transactions are READ COMMITTED unless they say otherwise.
pub const PLAIN_ROLE: &str = "bench_plain";

/// The role whose transactions are SERIALIZABLE unless they say otherwise.
pub const SERIALIZABLE_ROLE: &str = "bench_serializable";

/// The password of both and of the superuser: these servers live for minutes and listen on this machine alone.
pub const PASSWORD: &str = "bench";

/// Salt and iterations of the roles' verifier; PostgreSQL's default strength.
const SALT: &[u8] = b"onecopy-bench-16";
const ITERATIONS: u32 = 4096;

/// How long followers may take to have replayed the tables.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(120);

/// A leader and its followers.
pub struct Cluster {
    /// The programs.
    pub binaries: Binaries,
    /// The account that servers and PgBouncer run as.
    pub user: ServiceUser,
    /// The leader first.
    servers: Vec<Server>,
    directory: PathBuf,
}

impl Cluster {
    /// A cluster without servers; what [`Cluster::fill`] makes lies in `directory`.
    ///
    /// # Errors
    /// When PostgreSQL's programs or the account for servers are not found.
    pub fn new(directory: &Path) -> anyhow::Result<Cluster> {
        let (binaries, user) = (Binaries::find(None)?, ServiceUser::resolve(None)?);
        Ok(Cluster { binaries, user, servers: Vec::new(), directory: directory.to_owned() })
    }

    /// Makes and starts a leader, fills pgbench's tables (100 000 accounts a unit of `scale`), makes `followers` copies
    /// of it and waits until they follow. Whatever became of it, [`Cluster::stop`] stops what was started.
    pub async fn fill(&mut self, scale: u32, followers: usize) -> anyhow::Result<()> {
        let leader = Server::create(self.options("leader", Role::Leader)?).await?;
        self.servers.push(leader);
        self.leader().start().await?;
        self.make_roles_and_tables(scale).await?;
        for number in 1..=followers {
            self.add_follower(&format!("follower-{number}")).await?;
        }
        self.wait_for_followers().await
    }

    fn options(&self, name: &str, role: Role) -> anyhow::Result<ServerOptions> {
        let home = self.directory.join(name);
        let mut options =
            ServerOptions::new(self.binaries.clone(), self.user.clone(), home, free_port()?, PASSWORD.to_owned());
        options.settings = recommended_settings(role, name);
        // A checkpoint or a vacuum in one run and not in its neighbour would be measured as a difference.
        options.settings.set("max_wal_size", "8GB").set("checkpoint_timeout", "1h").set("autovacuum", "off");
        options.settings.set("shared_buffers", "512MB");
        Ok(options)
    }

    async fn make_roles_and_tables(&self, scale: u32) -> anyhow::Result<()> {
        let superuser = self.leader().connection();
        let client = superuser.connect_as_client().await?;
        for (role, isolation) in [(PLAIN_ROLE, "read committed"), (SERIALIZABLE_ROLE, "serializable")] {
            let verifier = verifier()?;
            client
                .batch_execute(&format!(
                    "CREATE ROLE {role} LOGIN PASSWORD '{verifier}'; \
                     ALTER ROLE {role} SET default_transaction_isolation = '{isolation}'"
                ))
                .await?;
        }
        client.batch_execute(&format!("CREATE DATABASE {DATABASE}")).await?;
        let output = tokio::process::Command::new(self.binaries.program("pgbench"))
            .args(["-i", "-q", "-s", &scale.to_string(), "-h", "127.0.0.1", "-p", &superuser.port.to_string()])
            .args(["-U", &superuser.user, DATABASE])
            .env_clear()
            .env("PGPASSWORD", PASSWORD)
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot run pgbench")?;
        if !output.status.success() {
            bail!("pgbench -i failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let client = superuser.with_database(DATABASE).connect_as_client().await?;
        client
            .batch_execute(&format!(
                "GRANT ALL ON ALL TABLES IN SCHEMA public TO {PLAIN_ROLE}, {SERIALIZABLE_ROLE}; CHECKPOINT"
            ))
            .await?;
        Ok(())
    }

    async fn add_follower(&mut self, name: &str) -> anyhow::Result<()> {
        let options = self.options(name, Role::Follower)?;
        let slot = name.replace('-', "_");
        let maker = BaseBackup { binaries: self.binaries.clone(), user: self.user.clone(), slot: slot.clone() };
        let primary = self.leader().socket_connection();
        self.user.create_directory(&options.home)?;
        maker.make(&primary, &options.data_directory(), &|_| {}).await?;
        let follower = Server::open(options).await?;
        let primary = primary.with_application_name(name);
        follower.make_standby(&StandbyOptions { primary, slot: Some(slot) })?;
        self.servers.push(follower);
        self.followers().last().expect("it was just added").start().await?;
        Ok(())
    }

    async fn wait_for_followers(&self) -> anyhow::Result<()> {
        let client = self.leader().connection().connect_as_client().await?;
        let followers = i64::try_from(self.servers.len() - 1)?;
        let deadline = Instant::now() + CATCH_UP_TIMEOUT;
        loop {
            let row = client
                .query_one(
                    "SELECT count(*) FROM pg_stat_replication \
                     WHERE state = 'streaming' AND replay_lsn >= pg_current_wal_flush_lsn()",
                    &[],
                )
                .await?;
            if row.get::<_, i64>(0) == followers {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the followers have not caught up in {} s", CATCH_UP_TIMEOUT.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The leader.
    pub fn leader(&self) -> &Server {
        // Nothing asks before `fill` has pushed it.
        self.servers.first().expect("the leader is made first")
    }

    /// The followers.
    pub fn followers(&self) -> &[Server] {
        &self.servers[1..]
    }

    /// Processor time of all servers since their start.
    pub fn processor_time(&self) -> anyhow::Result<Duration> {
        let ids = self.servers.iter().map(|server| server.process_id().context("a server has ended"));
        ids.map(|id| family_time(id?)).sum()
    }

    /// Stops all servers, followers first.
    pub async fn stop(&self) -> anyhow::Result<()> {
        for server in self.servers.iter().rev() {
            server.stop(StopMode::Immediate).await?;
        }
        Ok(())
    }
}

/// What the servers store of the roles' password; PgBouncer gets the same, and so can log in with what clients prove.
pub fn verifier() -> anyhow::Result<String> {
    Ok(ScramVerifier::encode(PASSWORD.as_bytes(), SALT, ITERATIONS)?)
}

/// A TCP port of this machine that nobody uses just now, below the range from which the kernel takes ports for outgoing
/// connections.
pub fn free_port() -> anyhow::Result<u16> {
    const PORTS: Range<u16> = 12_000..20_000;
    // What was given once is not given again: its user may not have bound it yet.
    static NEXT: AtomicU16 = AtomicU16::new(PORTS.start);
    loop {
        let port = NEXT.fetch_add(1, Ordering::Relaxed);
        if !PORTS.contains(&port) {
            bail!("no free port on 127.0.0.1 from {} to {}", PORTS.start, PORTS.end);
        }
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
}
