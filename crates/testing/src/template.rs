//! Templates: data directories that are made once and copied by every test that wants their like.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use onecopy_postgres::{Server, ServerOptions, StopMode};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use crate::directory::TestDirectory;
use crate::port::free_port;
use crate::wait::WAIT_MAX;

/// Beside the test programs, so that they go when these do.
const CACHE: &str = "server-templates";

/// What a template holds beside what initdb makes.
#[derive(Debug, Clone, Copy)]
pub struct Content<'a> {
    /// Made first.
    pub databases: &'a [&'a str],
    /// SQL and the database that it is run in, in this order, each as one simple query.
    pub scripts: &'a [(&'a str, &'a str)],
    /// A database for the tables of pgbench, and their scale.
    pub pgbench: Option<(&'a str, u32)>,
}

impl Content<'_> {
    /// Nothing.
    pub const EMPTY: Content<'static> = Content { databases: &[], scripts: &[], pgbench: None };
}

/// A new server that is not started, with this content.
///
/// # Errors
///
/// What a program or the template's server said that failed; a data directory that is there.
pub async fn create_with(options: ServerOptions, content: &Content<'_>) -> anyhow::Result<Server> {
    let template = template(&options, content).await?;
    let data_directory = options.data_directory();
    ensure!(!data_directory.exists(), "{} is there already", data_directory.display());
    options.user.create_directory(&options.home)?;
    copy(&template, &data_directory)?;
    Ok(Server::open(options).await?)
}

/// The template for such a server; whoever comes first makes it.
async fn template(options: &ServerOptions, content: &Content<'_>) -> anyhow::Result<PathBuf> {
    let cache = std::env::current_exe()?.with_file_name(CACHE);
    std::fs::create_dir_all(&cache)?;
    let template = cache.join(key(options, content));
    // It goes with its holder. Who waits may share a thread with who makes the template: two servers are made at once.
    let lock = File::create(template.with_extension("lock"))?;
    let lock = move || flock(&lock, FlockOperation::LockExclusive).map(|()| lock);
    let _held = tokio::task::spawn_blocking(lock).await??;
    if !template.exists() {
        let unfinished = template.with_extension("new");
        if unfinished.exists() {
            std::fs::remove_dir_all(&unfinished)?;
        }
        let directory = TestDirectory::new()?;
        let made = make(options, content, &directory).await.context("a template")?;
        copy(&made, &unfinished)?;
        std::fs::rename(&unfinished, &template)?;
    }
    Ok(template)
}

/// What makes them: another maker makes others.
const MAKERS: [&str; 2] = [include_str!("template.rs"), include_str!("../../postgres/src/initialize.rs")];

/// What tells templates apart: programs, account, superuser, password, content, and how they are made.
fn key(options: &ServerOptions, content: &Content<'_>) -> String {
    let (binaries, account) = (&options.binaries, options.user.name());
    let words = format!("{binaries:?} {account} {} {} {content:?} {MAKERS:?}", options.superuser, options.password);
    let digest = Sha256::digest(words.as_bytes());
    let name: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{name}", binaries.major_version())
}

/// Makes a stopped server with the content; its data directory.
async fn make(options: &ServerOptions, content: &Content<'_>, directory: &TestDirectory) -> anyhow::Result<PathBuf> {
    let (binaries, user) = (options.binaries.clone(), options.user.clone());
    let home = directory.join("template");
    let mut own = ServerOptions::new(binaries, user, home, free_port(), options.password.clone());
    own.superuser.clone_from(&options.superuser);
    own.settings.set("fsync", "off").set("shared_buffers", "64MB").set("max_wal_size", "64MB");
    // The log's files are copied with every server.
    own.settings.set("min_wal_size", "32MB").set("wal_recycle", "off");
    own.start_timeout = WAIT_MAX;
    let server = Server::create(own).await?;
    if content.databases.is_empty() && content.scripts.is_empty() && content.pgbench.is_none() {
        return Ok(server.data_directory().to_owned());
    }
    server.start().await?;
    let filled = fill(&server, content).await;
    server.stop(StopMode::Fast).await?;
    filled?;
    Ok(server.data_directory().to_owned())
}

async fn fill(server: &Server, content: &Content<'_>) -> anyhow::Result<()> {
    let connection = server.connection();
    let client = connection.connect_as_client().await?;
    for database in content.databases {
        client.batch_execute(&format!("CREATE DATABASE {database}")).await?;
    }
    for (database, script) in content.scripts {
        let client = connection.with_database(database).connect_as_client().await?;
        client.batch_execute(script).await.context((*script).to_owned())?;
    }
    if let Some((database, scale)) = content.pgbench {
        let mut command = tokio::process::Command::new(server.options().binaries.program("pgbench"));
        command.args(["-i", "-q", "-s", &scale.to_string()]).arg(connection.with_database(database).to_dsn());
        let output = command.output().await.context("pgbench")?;
        ensure!(output.status.success(), "pgbench: {}", String::from_utf8_lossy(&output.stderr));
    }
    // Hint bits and visibility maps are set, as on a server that has been read: no test's first read writes pages.
    for database in content.databases {
        connection.with_database(database).connect_as_client().await?.batch_execute("VACUUM").await?;
    }
    Ok(())
}

/// Copies a cold data directory with owners and modes; blocks are shared where the file system can.
fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let copied = Command::new("cp").args(["-a", "--reflink=auto"]).arg(from).arg(to).output()?;
    ensure!(copied.status.success(), "cp: {}", String::from_utf8_lossy(&copied.stderr));
    Ok(())
}
