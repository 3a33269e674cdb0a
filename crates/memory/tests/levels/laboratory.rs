//! Where the real tests happen: a directory, a server that does not outlive the test, and what it holds.

#[path = "../../../../tests/src/ports.rs"]
mod ports;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use onecopy_postgres::{Binaries, Role, Server, ServerOptions, ServiceUser, recommended_settings};
use tempfile::TempDir;
use tokio_postgres::Client;

/// `shared_buffers` of all servers here: a little less than what their tables have, so that all of it is used.
pub const CEILING_BYTES: u64 = 144 << 20;

/// A server with the tables of pgbench in its pool: about 150 MB.
pub struct Laboratory {
    pub server: Server,
    directory: TempDir,
}

impl Laboratory {
    /// A stock server.
    pub async fn stock() -> Laboratory {
        Laboratory::start(&[]).await
    }

    /// A server with the extension. Its pool is as large as its ceiling and full, all but this reserve, which it publishes.
    pub async fn publishing(reserve_bytes: u64) -> Laboratory {
        let settings = [("shared_preload_libraries", "onecopy"), ("onecopy.memory_floor", "32MB")];
        let laboratory = Laboratory::start(&settings).await;
        let client = laboratory.client().await;
        client.batch_execute("CREATE EXTENSION onecopy").await.expect("the extension is installed");
        laboratory.keep_reserve(reserve_bytes).await;
        // Nobody uses a page meanwhile: memory of a chunk that is in use for long goes before it can be published.
        let published = "SELECT published_bytes FROM onecopy_memory_status";
        until("the reserve", async || laboratory.number(published).await == reserve_bytes).await;
        laboratory
    }

    /// Has the server keep this published.
    pub async fn keep_reserve(&self, reserve_bytes: u64) {
        let client = self.client().await;
        let set = format!("ALTER SYSTEM SET onecopy.memory_reserve = '{}MB'", reserve_bytes >> 20);
        client.batch_execute(&set).await.expect("the extension is loaded");
        client.batch_execute("SELECT pg_reload_conf()").await.expect("reloaded");
    }

    async fn start(settings: &[(&str, &str)]) -> Laboratory {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).expect("searchable");
        let binaries = Binaries::find(None).expect("PostgreSQL is installed");
        let user = ServiceUser::resolve(None).expect("its account exists");
        let home = directory.path().join("server");
        let mut options =
            ServerOptions::new(binaries, user, home, ports::free_port().expect("a free port"), "secret".to_owned());
        options.settings = recommended_settings(Role::Leader, "levels");
        options.settings.set("shared_buffers", format!("{}MB", CEILING_BYTES >> 20));
        options.settings.set("max_connections", 50).set("fsync", "off").set("autovacuum", "off");
        // What is dirty stays so until a test asks for a checkpoint, however long it takes.
        options.settings.set("checkpoint_timeout", "1h").set("max_wal_size", "8GB");
        for (name, value) in settings {
            options.settings.set(name, value);
        }
        let server = Server::create(options).await.expect("made");
        server.start().await.expect("started");
        let laboratory = Laboratory { server, directory };
        laboratory.pgbench(&["-i", "-q", "-s", "10"]).await;
        // By the index: a scan of the whole table would only use a small ring of buffers.
        let fill = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET max_parallel_workers_per_gather = 0; \
                    SELECT sum(abalance) FROM pgbench_accounts WHERE aid > 0; CHECKPOINT";
        laboratory.client().await.batch_execute(fill).await.expect("all is in the pool, and on disk");
        laboratory
    }

    pub fn data_directory(&self) -> &Path {
        self.server.data_directory()
    }

    pub async fn client(&self) -> Client {
        self.server.connection().connect().await.expect("connected")
    }

    /// Runs pgbench to its end; none of its statements may fail.
    pub async fn pgbench(&self, arguments: &[&str]) {
        let output = self.pgbench_command(arguments).output().await.expect("pgbench is installed");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !said.contains("ERROR"), "{said}");
    }

    pub fn pgbench_command(&self, arguments: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(self.server.options().binaries.program("pgbench"));
        command.args(arguments).arg(self.server.connection().to_dsn()).kill_on_drop(true);
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
        let question = "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM pgbench_branches), \
                        (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";
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
        let log = std::fs::read_to_string(self.server.log_file()).expect("a log");
        let bad = log.lines().find(|line| line.contains("PANIC") || line.contains("terminated by signal"));
        assert_eq!(bad, None, "{log}");
    }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        let Ok(entries) = std::fs::read_dir("/proc") else { return };
        for entry in entries.filter_map(Result::ok) {
            let works_here =
                std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(self.directory.path()));
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if let (true, Some(process)) = (works_here, number.and_then(rustix::process::Pid::from_raw)) {
                let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            }
        }
    }
}

/// Waits until something holds; three minutes are for ever.
pub async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(180), "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
