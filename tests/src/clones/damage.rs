//! Clones that are wrong on purpose: a proof is trusted when it has been seen to fail.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::clones::pages::PAGE_BYTES;
use crate::servers::TestServer;

/// Where a relation of the tests' database lies, from the data directory on.
///
/// # Errors
///
/// There is no such relation.
pub async fn relation_path(server: &TestServer, relation: &str) -> anyhow::Result<PathBuf> {
    let session = server.connect("path").await?;
    Ok(session.run(&format!("SELECT pg_relation_filepath('{relation}')")).await?.text()?.into())
}

/// Reads one page of a server's file.
///
/// # Errors
///
/// The file has no such page.
pub fn read_page(server: &TestServer, path: &Path, number: u64) -> anyhow::Result<Vec<u8>> {
    let path = server.server.data_directory().join(path);
    let mut page = vec![0; PAGE_BYTES];
    let file = File::open(&path).with_context(|| path.display().to_string())?;
    file.read_exact_at(&mut page, number * PAGE_BYTES as u64)?;
    Ok(page)
}

/// Replaces one page of a server that does not run.
///
/// # Errors
///
/// The file cannot be written.
pub fn write_page(server: &TestServer, path: &Path, number: u64, page: &[u8]) -> anyhow::Result<()> {
    let path = server.server.data_directory().join(path);
    let file = File::options().write(true).open(&path).with_context(|| path.display().to_string())?;
    Ok(file.write_all_at(page, number * PAGE_BYTES as u64)?)
}
