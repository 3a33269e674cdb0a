//! A primary to be cloned, in a directory of its own that goes away with the value, the clones' processes too.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use onecopy_clone::service::Rendezvous;
use onecopy_postgres::{Role, Server, ServerOptions, Settings, StandbyOptions, StopMode, recommended_settings};
use onecopy_testing::{Content, FileSystem, MountedDisk, TestDirectory, create_with, process, server_options};
use rustix::process::Signal;

use crate::client::Session;
use crate::clones::programs;
use crate::clones::version::Version;
use crate::servers::{DATABASE, TestServer};

/// The source's name.
pub const SOURCE: &str = "source";
/// A second database, because a clone is of all of them.
pub const SECOND_DATABASE: &str = "archive";
/// The tablespace that lies outside the data directory.
pub const TABLESPACE: &str = "elsewhere";

/// PostgreSQL cuts relations into files of this size.
const SEGMENT_BYTES: u64 = 1 << 30;
/// PostgreSQL's page.
const PAGE_BYTES: u64 = 8192;

/// The size of a file system that shares blocks; its file is sparse.
const DISK_BYTES: u64 = 8 << 30;

/// What every source holds at first: pgbench's tables, 15 MB for each unit of their scale, and a table of every kind.
const CONTENT: Content<'_> = Content {
    databases: &[DATABASE, SECOND_DATABASE],
    scripts: &[
        ("template1", "CREATE EXTENSION amcheck"),
        ("postgres", "CREATE EXTENSION amcheck"),
        (DATABASE, "CREATE EXTENSION amcheck; CREATE EXTENSION pg_visibility"),
        (SECOND_DATABASE, "CREATE EXTENSION amcheck; CREATE EXTENSION pg_visibility"),
        (DATABASE, TABLES),
        (SECOND_DATABASE, OLD_TABLE),
    ],
    pgbench: Some((DATABASE, 2)),
};
const TABLES: &str = "
    CREATE TABLE documents (id int PRIMARY KEY, body text);
    INSERT INTO documents SELECT i, (SELECT string_agg(md5((i * j)::text), '') FROM generate_series(1, 300) j)
        FROM generate_series(1, 400) i;
    CREATE UNLOGGED TABLE scratch (id int PRIMARY KEY);
    INSERT INTO scratch SELECT generate_series(1, 5000);
    CREATE SEQUENCE numbers;
    CREATE TABLE wide (id int, filler text) WITH (autovacuum_enabled = off)";
const OLD_TABLE: &str = "
    CREATE TABLE old AS SELECT i AS id, md5(i::text) AS body FROM generate_series(1, 30000) i;
    CREATE INDEX ON old (body)";
/// What no template holds: what lies outside the data directory, and what needs the other tables.
const PLACED_TABLES: [&str; 3] = [
    "CREATE TABLE placed (id int PRIMARY KEY, filler text) TABLESPACE elsewhere",
    "INSERT INTO placed SELECT i, repeat('p', 100) FROM generate_series(1, 20000) i",
    "CREATE MATERIALIZED VIEW summary AS SELECT bid, count(*) FROM pgbench_accounts GROUP BY bid",
];

/// A primary with data of every kind.
#[derive(Debug)]
pub struct Harness {
    /// What it runs.
    pub version: Version,
    /// The primary.
    pub source: TestServer,
    settings: Settings,
    directory: Removed,
    /// After the directory: it lies there.
    _file_system: Option<(MountedDisk, TestDirectory)>,
}

/// The directory of the source and its clones.
#[derive(Debug)]
struct Removed(TestDirectory);

impl Drop for Removed {
    fn drop(&mut self) {
        // Before the servers, some of which wait for one.
        self.end_services();
    }
}

impl Removed {
    /// Kills the clone services of all servers here; whoever waits for one can be killed then.
    fn end_services(&self) {
        let Ok(homes) = std::fs::read_dir(self.0.path()) else { return };
        for home in homes.flatten() {
            let Ok(rendezvous) = Rendezvous::of_source(&home.path().join("data")) else { continue };
            for process in process::with_argument(&rendezvous.directory().to_string_lossy()) {
                process::send(process, Signal::KILL);
            }
            // There is none for most of them.
            let _ = std::fs::remove_dir_all(rendezvous.directory());
        }
    }
}

impl Harness {
    /// Starts a primary as people run it (`fsync`, `full_page_writes`, checksums) and fills it.
    ///
    /// # Errors
    ///
    /// What a program or the server said that failed.
    pub async fn start(version: Version) -> anyhow::Result<Harness> {
        Harness::start_with(version, &Settings::new()).await
    }

    /// The same with further settings, for its clones too.
    ///
    /// # Errors
    ///
    /// What a program or the server said that failed.
    pub async fn start_with(version: Version, more: &Settings) -> anyhow::Result<Harness> {
        Harness::start_in(version, more, TestDirectory::new()?, None).await
    }

    /// The same on a file system that shares blocks.
    ///
    /// # Errors
    ///
    /// What a program or the server said that failed.
    pub async fn start_on_xfs(version: Version) -> anyhow::Result<Harness> {
        let outer = TestDirectory::new()?;
        let disk = MountedDisk::new(FileSystem::Xfs, outer.path(), "disk", DISK_BYTES)?;
        let directory = TestDirectory::within(disk.path())?;
        Harness::start_in(version, &Settings::new(), directory, Some((disk, outer))).await
    }

    async fn start_in(
        version: Version,
        more: &Settings,
        directory: TestDirectory,
        file_system: Option<(MountedDisk, TestDirectory)>,
    ) -> anyhow::Result<Harness> {
        // The product's own words, when asked for by RUST_LOG; a second harness in one process finds them set up.
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
        let directory = Removed(directory);
        let mut settings = Settings::new();
        // Small, so that pages are written out and read in again while a clone is made.
        settings.set("shared_buffers", "16MB").set("max_wal_size", "128MB").set("checkpoint_timeout", "30s");
        settings.merge(more);
        let options = options(version, directory.0.path(), SOURCE, &settings)?;
        let source = TestServer { name: SOURCE.to_owned(), server: create_with(options, &CONTENT).await? };
        let harness = Harness { version, source, settings, directory, _file_system: file_system };
        harness.source.server.start().await?;
        harness.fill().await?;
        Ok(harness)
    }

    async fn fill(&self) -> anyhow::Result<()> {
        let place = self.path(TABLESPACE);
        self.source.server.options().user.create_directory(&place)?;
        let session = Session::connect("filling", &self.source.config("postgres")).await?;
        session.run(&format!("CREATE TABLESPACE {TABLESPACE} LOCATION '{}'", place.display())).await?;
        self.source.connect("filling").await?.run_all(&PLACED_TABLES).await?;
        session.run("CHECKPOINT").await?;
        Ok(())
    }

    /// Makes `wide` larger than one file, cheaply: its pages are empty but for the first and the last.
    ///
    /// # Errors
    ///
    /// What the server said.
    pub async fn widen(&self) -> anyhow::Result<()> {
        let session = self.source.connect("widening").await?;
        session.run("INSERT INTO wide VALUES (1, 'first')").await?;
        let path = session.run("SELECT pg_relation_filepath('wide')").await?.text()?.to_owned();
        self.source.server.stop(StopMode::Fast).await?;
        let first = self.source.server.data_directory().join(path);
        let second = first.with_extension("1");
        File::options().write(true).open(&first)?.set_len(SEGMENT_BYTES)?;
        File::create(&second)?.set_len(PAGE_BYTES)?;
        own_like(&second, &first)?;
        self.source.server.start().await?;
        let session = self.source.connect("widening").await?;
        // PostgreSQL looks for room in the last page first.
        session.run("INSERT INTO wide SELECT i, repeat('w', 100) FROM generate_series(2, 200) i").await?;
        let last = session.run("SELECT max((ctid::text::point)[0]::bigint) FROM wide").await?.number()?;
        ensure!(last >= (SEGMENT_BYTES / PAGE_BYTES).try_into()?, "row in page {last}: the second file is empty");
        Ok(())
    }

    /// A path in the directory of all.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.0.path().join(name)
    }

    /// What a clone called `name` is made of: the source's programs and settings, an own home and port.
    ///
    /// # Errors
    ///
    /// The programs are gone, no port is left.
    pub fn options(&self, name: &str) -> anyhow::Result<ServerOptions> {
        options(self.version, self.directory.0.path(), name, &self.settings)
    }

    /// A copy by PostgreSQL's own base backup, started: what every other way is compared with.
    ///
    /// # Errors
    ///
    /// What a program or the server said that failed.
    pub async fn copy(&self, name: &str) -> anyhow::Result<TestServer> {
        let options = self.options(name)?;
        options.user.create_directory(&options.home)?;
        let slot = name.replace('-', "_");
        let moved = (self.path(TABLESPACE), options.home.join(TABLESPACE));
        programs::base_backup(&self.source, &options.data_directory(), &slot, &moved)?;
        let clone = self.open_standby(name, options, &self.source, Some(slot)).await?;
        clone.server.start().await?;
        Ok(clone)
    }

    /// Opens a data directory as a standby of `primary`; does not start it.
    ///
    /// # Errors
    ///
    /// What the server said.
    pub async fn open_standby(
        &self,
        name: &str,
        options: ServerOptions,
        primary: &TestServer,
        slot: Option<String>,
    ) -> anyhow::Result<TestServer> {
        let server = Server::open(options).await?;
        let primary = primary.server.connection().with_application_name(name);
        server.make_standby(&StandbyOptions { primary, slot })?;
        Ok(TestServer { name: name.to_owned(), server })
    }
}

fn options(version: Version, directory: &Path, name: &str, settings: &Settings) -> anyhow::Result<ServerOptions> {
    let mut options = server_options(version.binaries()?, directory.join(name))?;
    // Durable, as people run it.
    options.settings = recommended_settings(if name == SOURCE { Role::Leader } else { Role::Follower }, name);
    // A clone must not stay behind because a test reads in it.
    options.settings.set("max_standby_streaming_delay", "1s").merge(settings);
    Ok(options)
}

fn own_like(file: &Path, model: &Path) -> anyhow::Result<()> {
    let metadata = std::fs::metadata(model)?;
    std::os::unix::fs::chown(file, Some(metadata.uid()), Some(metadata.gid()))?;
    Ok(std::fs::set_permissions(file, metadata.permissions())?)
}
