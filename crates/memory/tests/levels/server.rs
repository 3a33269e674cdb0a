//! A server of one test and what it holds.

use std::ops::Deref;

use onecopy_postgres::{Binaries, Role, Server, recommended_settings};
use onecopy_testing::{Content, TestDirectory, create_with, server_options, until_async};
use tokio_postgres::Client;

/// `shared_buffers` of all servers here: a little less than what their tables have, so that all of it is used.
pub const CEILING_BYTES: u64 = 144 << 20;
const CONTENT: Content<'static> = Content { pgbench: Some(("postgres", 10)), ..Content::EMPTY };

/// A server with the tables of pgbench in its pool: about 150 MB.
pub struct PgbenchServer {
    server: Server,
    _directory: TestDirectory,
}

impl PgbenchServer {
    /// A stock server.
    pub async fn stock() -> PgbenchServer {
        PgbenchServer::with(&[]).await
    }

    /// A server with the extension. Its pool is as large as its ceiling and full, all but this reserve, which it
    /// publishes.
    pub async fn publishing(reserve_bytes: u64) -> PgbenchServer {
        let settings = [("shared_preload_libraries", "onecopy"), ("onecopy.memory_floor", "32MB")];
        let server = PgbenchServer::with(&settings).await;
        let client = server.client().await;
        client.batch_execute("CREATE EXTENSION onecopy").await.expect("the extension is installed");
        server.keep_reserve(reserve_bytes).await;
        // Nobody uses a page meanwhile: memory of a chunk that is in use for long goes before it can be published.
        let published = "SELECT published_bytes FROM onecopy_memory_status";
        until_async("the reserve is published", async || server.number(published).await == reserve_bytes).await;
        server
    }

    /// Has the server keep this published.
    pub async fn keep_reserve(&self, reserve_bytes: u64) {
        let client = self.client().await;
        let set = format!("ALTER SYSTEM SET onecopy.memory_reserve = '{}MB'", reserve_bytes >> 20);
        client.batch_execute(&set).await.expect("the extension is loaded");
        client.batch_execute("SELECT pg_reload_conf()").await.expect("reloaded");
    }

    async fn with(settings: &[(&str, &str)]) -> PgbenchServer {
        let directory = TestDirectory::new().expect("a directory");
        let binaries = Binaries::find(None).expect("PostgreSQL is installed");
        let mut options = server_options(binaries, directory.join("server")).expect("an account for servers");
        options.settings = recommended_settings(Role::Leader, "levels");
        options.settings.set("shared_buffers", format!("{}MB", CEILING_BYTES >> 20));
        options.settings.set("max_connections", 50).set("fsync", "off").set("autovacuum", "off");
        // What is dirty stays so until a test asks for a checkpoint, however long it takes.
        options.settings.set("checkpoint_timeout", "1h").set("max_wal_size", "8GB");
        for (name, value) in settings {
            options.settings.set(name, value);
        }
        let server = create_with(options, &CONTENT).await.expect("made");
        server.start().await.expect("started");
        let server = PgbenchServer { server, _directory: directory };
        // By the index: a scan of the whole table would only use a small ring of buffers.
        let fill = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET max_parallel_workers_per_gather = 0; \
                    SELECT sum(abalance) FROM pgbench_accounts WHERE aid > 0; CHECKPOINT";
        server.client().await.batch_execute(fill).await.expect("all is in the pool, and on disk");
        server
    }

    pub async fn client(&self) -> Client {
        self.connection().connect_as_client().await.expect("connected")
    }

    pub fn pgbench_command(&self, arguments: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(self.options().binaries.program("pgbench"));
        command.args(arguments).arg(self.connection().to_dsn()).kill_on_drop(true);
        command
    }

    /// What all tables of pgbench hold: the number of their rows and a sum over the content of each.
    pub async fn content(&self) -> Vec<String> {
        let client = self.client().await;
        let mut sums = Vec::new();
        for table in ["accounts", "branches", "tellers", "history"] {
            let question =
                format!("SELECT concat(count(*), ' ', sum(hashtextextended(t::text, 0))) FROM pgbench_{table} t");
            sums.push(client.query_one(&question, &[]).await.expect("read").get::<_, String>(0));
        }
        sums
    }

    /// The sums that every transaction of pgbench keeps equal.
    pub async fn assert_balanced(&self) {
        let question = "SELECT (SELECT sum(abalance) FROM pgbench_accounts), \
                        (SELECT sum(bbalance) FROM pgbench_branches), (SELECT sum(tbalance) FROM pgbench_tellers), \
                        (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";
        let row = self.client().await.query_one(question, &[]).await.expect("read");
        let sums: Vec<i64> = (0..4).map(|column| row.get(column)).collect();
        assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
    }

    /// One number that a query gives.
    pub async fn number(&self, question: &str) -> u64 {
        let row = self.client().await.query_one(question, &[]).await.expect("answered");
        u64::try_from(row.get::<_, i64>(0)).expect("not negative")
    }

    /// The server has not complained of anything worse than an error of a client.
    pub fn assert_no_crash(&self) {
        let log = std::fs::read_to_string(self.log_file()).expect("a log");
        let bad = log.lines().find(|line| line.contains("PANIC") || line.contains("terminated by signal"));
        assert_eq!(bad, None, "{log}");
    }
}

impl Deref for PgbenchServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}
