//! A primary on an XFS of its own, in a file; all goes away with the value.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use onecopy_postgres::{Binaries, Role, Server, ServerOptions, ServiceUser, StopMode, recommended_settings};

use crate::cluster::{DATABASE, PASSWORD, free_port};
use crate::disk::{Mount, run};

/// The file system's size for each unit of pgbench's scale, and at least: source and one clone, with their logs.
const BYTES_A_SCALE: u64 = 40 << 20;
const BYTES_MIN: u64 = 64 << 30;

/// A primary and room for its clones.
pub struct Site {
    /// The primary.
    pub source: Server,
    /// The program that makes and fills clones.
    pub program: PathBuf,
    // Before the directory, which it is in.
    mount: Mount,
    directory: tempfile::TempDir,
}

impl Site {
    /// Makes the file system, starts a primary there and fills pgbench's tables.
    pub async fn make(scale: u32, program: PathBuf) -> anyhow::Result<Site> {
        let directory = tempfile::Builder::new().prefix("onecopy-bench-").tempdir()?;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        let mount = Mount::make(directory.path(), (u64::from(scale) * BYTES_A_SCALE).max(BYTES_MIN))?;
        let options = options(mount.place(), "source", Role::Leader)?;
        let source = Server::create(options).await?;
        let site = Site { source, program, mount, directory };
        site.source.start().await?;
        let client = site.source.connection().connect_as_client().await?;
        client.batch_execute(&format!("CREATE DATABASE {DATABASE}")).await?;
        site.fill(scale)?;
        client.batch_execute("CHECKPOINT").await?;
        Ok(site)
    }

    fn fill(&self, scale: u32) -> anyhow::Result<()> {
        let options = self.source.options();
        let mut command = options.user.command(options.binaries.program("pgbench"));
        command.args(["-i", "-q", "-I", "dtGvp", "-s", &scale.to_string(), "-h", "127.0.0.1"]);
        command.args(["-p", &options.port.to_string(), "-U", &options.superuser, DATABASE]).env("PGPASSWORD", PASSWORD);
        run(&mut command)
    }

    /// Adds a table of empty pages, `gigabytes` long, that takes no room on the disk.
    pub async fn grow(&self, gigabytes: u32) -> anyhow::Result<()> {
        let client = self.source.connection().with_database(DATABASE).connect_as_client().await?;
        client.batch_execute("CREATE TABLE large (content text); INSERT INTO large VALUES ('x'); CHECKPOINT").await?;
        let row = client.query_one("SELECT pg_relation_filepath('large')", &[]).await?;
        let first = self.source.data_directory().join(row.get::<_, &str>(0));
        // What the server knows of a file's length it knows only while it runs.
        self.source.stop(StopMode::Fast).await?;
        for segment in 0..gigabytes {
            let path =
                if segment == 0 { first.clone() } else { PathBuf::from(format!("{}.{segment}", first.display())) };
            let file = std::fs::File::options().write(true).create(true).truncate(false).open(&path)?;
            file.set_len(1 << 30)?;
            self.source.options().user.own_file(&file, &path)?;
        }
        self.source.start().await?;
        Ok(())
    }

    /// What a clone called `name` is made of.
    pub fn options(&self, name: &str) -> anyhow::Result<ServerOptions> {
        options(&self.mounted(), name, Role::Follower)
    }

    /// Where source and clones lie.
    pub fn mounted(&self) -> PathBuf {
        self.mount.place().to_owned()
    }

    /// The device below them, as `major:minor`.
    pub fn device(&self) -> anyhow::Result<String> {
        self.mount.device()
    }

    /// PostgreSQL's version.
    pub fn version(&self) -> String {
        self.source.options().binaries.version().to_owned()
    }

    /// How large the source's data directory is without its log.
    pub fn data_bytes(&self) -> anyhow::Result<u64> {
        let directory = self.source.data_directory();
        let mut total = 0;
        for name in ["base", "global"] {
            total += size_of(&directory.join(name))?;
        }
        Ok(total)
    }

    /// Stops the primary.
    pub async fn stop(&self) -> anyhow::Result<()> {
        Ok(self.source.stop(StopMode::Immediate).await?)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // The file system goes away below them: there is nothing to be saved.
        onecopy_testing::process::kill_all(|| onecopy_testing::process::of_directory(self.directory.path()));
    }
}

fn options(directory: &Path, name: &str, role: Role) -> anyhow::Result<ServerOptions> {
    let (binaries, user) = (Binaries::find(None)?, ServiceUser::resolve(None)?);
    let home = directory.join(name);
    let mut options = ServerOptions::new(binaries, user, home, free_port()?, PASSWORD.to_owned());
    options.settings = recommended_settings(role, name);
    // A checkpoint or a vacuum in one run and not in its neighbour would be measured as a difference.
    options.settings.set("max_wal_size", "8GB").set("checkpoint_timeout", "1h").set("autovacuum", "off");
    options.settings.set("shared_buffers", "512MB");
    Ok(options)
}

fn size_of(directory: &Path) -> anyhow::Result<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        // A temporary file may be gone by now.
        let Ok(metadata) = entry.metadata() else { continue };
        total += if metadata.is_dir() { size_of(&entry.path())? } else { metadata.len() };
    }
    Ok(total)
}
