//! A server on a disk of its own, with a swap file on that disk and a control group that bounds its memory.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};
use onecopy_postgres::{
    Binaries, InstalledExtension, Role, Server, ServerOptions, ServiceUser, StopMode, processes_of,
    recommended_settings,
};

use super::MIB;
use crate::cluster::{DATABASE, PASSWORD, free_port};
use crate::disk::{Mount, run};
use crate::load::{Load, Work};

/// What servers load, and what SQL calls it.
pub const EXTENSION: &str = "onecopy";
/// The disk: sparse, so only what is written takes room.
const DISK_BYTES: u64 = 24 << 30;
/// Few, so that the extension's floor is far below every size here.
const CONNECTIONS_MAX: u32 = 50;

/// How a server is started.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// `shared_buffers`.
    pub pool_bytes: u64,
    /// Whether the extension is loaded.
    pub has_extension: bool,
    /// What is kept published for an agent that does not ask.
    pub reserve_bytes: u64,
    /// Whether the pool lies in huge pages.
    pub huge_pages: bool,
}

impl Start {
    /// A server with the extension.
    pub fn with_extension(pool_bytes: u64) -> Start {
        Start { pool_bytes, has_extension: true, reserve_bytes: 0, huge_pages: false }
    }

    /// A stock server.
    pub fn plain(pool_bytes: u64) -> Start {
        Start { has_extension: false, ..Start::with_extension(pool_bytes) }
    }
}

/// A server and the disk below it.
pub struct Site {
    /// The server.
    pub server: Server,
    // In this order: what lies in a file system goes before it.
    mount: Mount,
    directory: tempfile::TempDir,
}

impl Site {
    /// Makes the disk and a stopped server on it.
    pub async fn make() -> anyhow::Result<Site> {
        let directory = tempfile::Builder::new().prefix("onecopy-bench-").tempdir()?;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        let mount = Mount::make(directory.path(), DISK_BYTES)?;
        let (binaries, user) = (Binaries::find(None)?, ServiceUser::resolve(None)?);
        InstalledExtension::find(&binaries, EXTENSION).context("run scripts/extension.sh, or make build")?;
        let home = mount.place().join("server");
        let options = ServerOptions::new(binaries, user, home, free_port()?, PASSWORD.to_owned());
        let server = Server::create(options).await?;
        Ok(Site { server, mount, directory })
    }

    /// Starts the server anew.
    pub async fn start(&self, start: Start) -> anyhow::Result<()> {
        if self.server.is_running() {
            self.server.stop(StopMode::Fast).await?;
        }
        let mut settings = recommended_settings(Role::Leader, "bench");
        // A checkpoint or a vacuum in one run and not in its neighbour would be measured as a difference.
        settings.set("max_wal_size", "16GB").set("checkpoint_timeout", "1h").set("autovacuum", "off");
        settings.set("max_connections", CONNECTIONS_MAX).set("max_parallel_workers_per_gather", 0);
        settings.set("shared_buffers", format!("{}MB", start.pool_bytes / MIB));
        settings.set("huge_pages", if start.huge_pages { "on" } else { "off" });
        if start.has_extension {
            settings.preload(EXTENSION);
            settings.set("onecopy.memory_reserve", format!("{}MB", start.reserve_bytes / MIB));
        }
        self.server.set_settings(settings);
        self.server.start().await?;
        Ok(())
    }

    /// Makes the database with pgbench's tables; the server runs.
    pub async fn fill(&self, scale: u32) -> anyhow::Result<()> {
        let client = self.server.connection().connect_as_client().await?;
        client.batch_execute(&format!("CREATE DATABASE {DATABASE}")).await?;
        let options = self.server.options();
        let mut command = options.user.command(options.binaries.program("pgbench"));
        command.args(["-i", "-q", "-I", "dtGvp", "-s", &scale.to_string(), "-h", "127.0.0.1"]);
        command.args(["-p", &options.port.to_string(), "-U", &options.superuser, DATABASE]).env("PGPASSWORD", PASSWORD);
        run(&mut command)?;
        let extensions = "CREATE EXTENSION onecopy; CREATE EXTENSION pg_prewarm; CHECKPOINT";
        Ok(self.client().await?.batch_execute(extensions).await?)
    }

    /// A session of the superuser.
    pub async fn client(&self) -> anyhow::Result<tokio_postgres::Client> {
        Ok(self.server.connection().with_database(DATABASE).connect_as_client().await?)
    }

    /// Starts clients of the superuser.
    pub async fn load(&self, work: Work) -> anyhow::Result<Load> {
        let pgbench = self.server.options().binaries.program("pgbench");
        Load::start(&pgbench, &self.server.connection().with_database(DATABASE), work, self.directory.path())
    }

    /// Reads relations into the pool as far as they fit.
    pub async fn warm(&self, relations: &[&str]) -> anyhow::Result<()> {
        let client = self.client().await?;
        for relation in relations {
            client.query_one("SELECT pg_prewarm($1::text::regclass)", &[relation]).await?;
        }
        Ok(())
    }

    /// The disk.
    pub fn disk(&self) -> &Mount {
        &self.mount
    }

    /// Stops the server.
    pub async fn stop(&self) -> anyhow::Result<()> {
        Ok(self.server.stop(StopMode::Immediate).await?)
    }
}

/// Pages that were found in the pool and that were read, since the server began to count. Other sessions' counts may be
/// a second late.
pub async fn counts(client: &tokio_postgres::Client) -> anyhow::Result<(i64, i64)> {
    let row =
        client.query_one("SELECT sum(blks_hit)::bigint, sum(blks_read)::bigint FROM pg_stat_database", &[]).await?;
    Ok((row.get(0), row.get(1)))
}

impl Drop for Site {
    fn drop(&mut self) {
        // The directory goes away below it: there is nothing to be saved.
        for process in processes_of(self.server.data_directory()) {
            if let Ok(process) = i32::try_from(process) {
                // One that has ended meanwhile is as well.
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(process), nix::sys::signal::Signal::SIGKILL);
            }
        }
    }
}

/// A swap file; out of use when this is dropped.
#[derive(Debug)]
pub struct Swap(PathBuf);

impl Swap {
    /// Puts one into use, on the disk of a site: swapping shares it with the data.
    pub fn begin(site: &Site, bytes: u64) -> anyhow::Result<Swap> {
        let path = site.disk().place().join("swap");
        // Not sparse: swapon(8) refuses holes.
        run(Command::new("fallocate").arg("--length").arg(bytes.to_string()).arg(&path))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        run(Command::new("mkswap").arg("--quiet").arg(&path))?;
        run(Command::new("swapon").arg(&path))?;
        Ok(Swap(path))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // A file that is still in use must keep its name, or nobody could take it out of use.
        match run(Command::new("swapoff").arg(&self.0)) {
            Ok(()) => drop(std::fs::remove_file(&self.0)),
            Err(error) => eprintln!("onecopy-bench: {} stays in use: {error:#}", self.0.display()),
        }
    }
}

/// Huge pages that are reserved until this is dropped.
#[derive(Debug)]
pub struct HugePages(u64);

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";
const COMPACT: &str = "/proc/sys/vm/compact_memory";

impl HugePages {
    /// Reserves so many of 2 MiB.
    pub fn reserve(pages: u64) -> anyhow::Result<HugePages> {
        let number = || -> anyhow::Result<u64> { Ok(std::fs::read_to_string(HUGE_PAGES)?.trim().parse()?) };
        let before = number()?;
        let reserved = HugePages(before);
        // What the page cache has scattered is not found in one piece.
        std::fs::write(COMPACT, "1").with_context(|| COMPACT.to_owned())?;
        std::fs::write(HUGE_PAGES, (before + pages).to_string()).with_context(|| HUGE_PAGES.to_owned())?;
        if number()? < before + pages {
            bail!("the kernel has no {pages} huge pages");
        }
        Ok(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(HUGE_PAGES, self.0.to_string()) {
            eprintln!("onecopy-bench: {HUGE_PAGES} is not {} again: {error}", self.0);
        }
    }
}
