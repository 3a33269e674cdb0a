//! MariaDB's own shrink of its buffer pool, next to ours.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use onecopy_postgres::ServiceUser;
use serde::Serialize;

use super::MIB;

/// The pool before, and after.
pub const POOL_BYTES: u64 = 1024 * MIB;
const HALF_BYTES: u64 = POOL_BYTES / 2;
/// Rows of one page each, nearly: they fill nine tenths of the pool, and are dirty.
const ROWS: u64 = 110_000;
const ROW_BYTES: u64 = 7_600;
const START_TIMEOUT: Duration = Duration::from_secs(60);
const SHRINK_TIMEOUT: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(10);

/// One shrink.
#[derive(Debug, Clone, Serialize)]
pub struct Shrink {
    /// In which round, from 1.
    pub round: u32,
    /// The server's version.
    pub version: String,
    /// Bytes given back.
    pub bytes: u64,
    /// Dirty pages at the begin.
    pub dirty_pages: u64,
    /// Until the server said that it is done.
    pub seconds: f64,
}

/// Fills a pool and has it halved, without load.
pub async fn measure(round: u32) -> anyhow::Result<Shrink> {
    // Its client is a program that blocks.
    tokio::task::block_in_place(|| {
        let server = Server::start()?;
        server.sql(&format!(
            "CREATE DATABASE bench; USE bench; \
             CREATE TABLE filler (id INT PRIMARY KEY, content VARCHAR({ROW_BYTES}) CHARSET latin1); \
             INSERT INTO filler SELECT seq, REPEAT(CHAR(65 + seq % 26), {ROW_BYTES}) FROM seq_1_to_{ROWS}"
        ))?;
        server.sql("SELECT COUNT(content) FROM bench.filler")?;
        let dirty_pages = server.status("Innodb_buffer_pool_pages_dirty")?.parse()?;
        let began = Instant::now();
        server.sql(&format!("SET GLOBAL innodb_buffer_pool_size = {HALF_BYTES}"))?;
        // Newer ones have answered when it is done, and have no such status. Others say so in words: "Completed
        // resizing buffer pool".
        while !server.resize_status()?.is_none_or(|status| status.to_lowercase().contains("completed")) {
            if began.elapsed() > SHRINK_TIMEOUT {
                bail!("MariaDB has not shrunk its pool");
            }
            std::thread::sleep(LOOK);
        }
        let seconds = began.elapsed().as_secs_f64();
        let version = server.sql("SELECT VERSION()")?;
        Ok(Shrink { round, version, bytes: POOL_BYTES - HALF_BYTES, dirty_pages, seconds })
    })
}

/// A server of its own: own directory, own socket, no port.
struct Server {
    process: Child,
    directory: tempfile::TempDir,
}

impl Server {
    fn start() -> anyhow::Result<Server> {
        let directory = tempfile::Builder::new().prefix("onecopy-bench-").tempdir()?;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        let user = format!("--user={}", ServiceUser::resolve(None)?.name());
        let data = directory.path().join("data");
        crate::disk::run(
            Command::new("mariadb-install-db")
                .args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db", &user])
                .arg(format!("--datadir={}", data.display())),
        )?;
        let process = spawn(&data, &user)?;
        let mut server = Server { process, directory };
        let began = Instant::now();
        while server.sql("SELECT 1").is_err() {
            if server.process.try_wait()?.is_some() || began.elapsed() > START_TIMEOUT {
                let log = std::fs::read_to_string(data.join("log")).unwrap_or_default();
                bail!("mariadbd does not start: {log}");
            }
            std::thread::sleep(LOOK);
        }
        Ok(server)
    }

    fn sql(&self, statements: &str) -> anyhow::Result<String> {
        let output = Command::new("mariadb")
            .args(["--no-defaults", "--batch", "--skip-column-names", "--user=root", "--execute", statements])
            .arg(format!("--socket={}", self.directory.path().join("data/socket").display()))
            .output()
            .context("cannot run mariadb: run `make setup`")?;
        if !output.status.success() {
            bail!("MariaDB: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn resize_status(&self) -> anyhow::Result<Option<String>> {
        let line = self.sql("SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_resize_status'")?;
        Ok(line.split_once('\t').map(|(_, value)| value.to_owned()))
    }

    fn status(&self, name: &str) -> anyhow::Result<String> {
        let line = self.sql(&format!("SHOW GLOBAL STATUS LIKE '{name}'"))?;
        let (_, value) = line.split_once('\t').with_context(|| format!("MariaDB has no {name}"))?;
        Ok(value.to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(data: &Path, user: &str) -> anyhow::Result<Child> {
    Command::new("mariadbd")
        .args(["--no-defaults", "--skip-networking", "--innodb-buffer-pool-load-at-startup=OFF", user])
        .arg(format!("--datadir={}", data.display()))
        .arg(format!("--socket={}", data.join("socket").display()))
        .arg(format!("--pid-file={}", data.join("pid").display()))
        .arg(format!("--log-error={}", data.join("log").display()))
        .arg(format!("--innodb-buffer-pool-size={POOL_BYTES}"))
        // As PostgreSQL's max_wal_size here: no checkpoint in between.
        .arg("--innodb-log-file-size=2G")
        .args(["--innodb-max-dirty-pages-pct=99", "--innodb-flush-log-at-trx-commit=2"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot run mariadbd: run `make setup`")
}
