//! Making a clone's server read the source's hot pages into its shared buffers when it starts.
//!
//! PostgreSQL's module `pg_prewarm` does that after a restart: a worker reads the file `autoprewarm.blocks` in the data
//! directory once the server is consistent, also on a standby, and stops when no buffer is free. It needs no extension
//! in the catalogs, only its library.
//!
//! Source of the format: PostgreSQL 15 to 18, `contrib/pg_prewarm/autoprewarm.c`, `apw_dump_now`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use onecopy_postgres::{Binaries, ServiceUser, Settings};

use super::HotPages;
use crate::CloneError;

/// The file's name in a data directory.
pub const BLOCKS_FILE: &str = "autoprewarm.blocks";

/// Its permission bits.
const BLOCKS_MODE: u32 = 0o600;

/// The module's name.
const LIBRARY: &str = "pg_prewarm";

/// Where a server's modules are, from the directory of its programs: Debian's layout and source's.
const LIBRARY_DIRECTORIES: [&str; 3] = ["../lib", "../lib/postgresql", "../lib64/pgsql"];

/// Why a clone's shared buffers are not filled at its start.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum CannotPrewarm {
    #[error("no {LIBRARY}.so in {looked_at:?}: install PostgreSQL's contrib modules, or do with a warm page cache")]
    NoLibrary { looked_at: Vec<PathBuf> },
}

/// Writes [`BLOCKS_FILE`] into a clone's data directory, whose server does not run yet: as many of the source's pages
/// as it has in its shared buffers, and at most `buffers_max`. Gives back how many.
///
/// # Errors
/// [`CloneError::Postgres`] when the file cannot be written. The clone is whole without it.
pub fn write(
    pages: &HotPages,
    user: &ServiceUser,
    data_directory: &Path,
    buffers_max: usize,
) -> Result<usize, CloneError> {
    let content = blocks(pages, buffers_max);
    user.write_file(&data_directory.join(BLOCKS_FILE), content.as_bytes(), BLOCKS_MODE)?;
    Ok(pages.pages.len().min(buffers_max))
}

/// The content of [`BLOCKS_FILE`] for the hottest pages that fit into `buffers_max` buffers.
pub fn blocks(pages: &HotPages, buffers_max: usize) -> String {
    let mut hottest = pages.pages.clone();
    hottest.sort_unstable_by_key(|page| (std::cmp::Reverse(page.usage), *page));
    hottest.truncate(buffers_max);
    // In the order in which the worker reads them: file by file.
    hottest.sort_unstable();
    let mut text = format!("<<{}>>\n", hottest.len());
    for page in hottest {
        let (database, tablespace) = (page.database, page.tablespace);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{database},{tablespace},{},{},{}", page.relation, page.fork, page.block);
    }
    text
}

/// `settings` with what makes a server read [`BLOCKS_FILE`] at its start. The module writes the file again only when
/// the server stops.
///
/// # Errors
/// [`CannotPrewarm::NoLibrary`]: a server that is told to load what is not there does not start.
pub fn settings(binaries: &Binaries, settings: &Settings) -> Result<Settings, CannotPrewarm> {
    let directories = LIBRARY_DIRECTORIES.map(|directory| binaries.directory().join(directory));
    if !directories.iter().any(|directory| is_library_in(directory)) {
        return Err(CannotPrewarm::NoLibrary { looked_at: directories.to_vec() });
    }
    let mut complete = settings.clone();
    let loaded = settings.get("shared_preload_libraries").map(str::trim).filter(|list| !list.is_empty());
    let libraries = match loaded {
        Some(list) if list.split(',').any(|library| library.trim() == LIBRARY) => list.to_owned(),
        Some(list) => format!("{list}, {LIBRARY}"),
        None => LIBRARY.to_owned(),
    };
    complete.set("shared_preload_libraries", libraries);
    complete.set("pg_prewarm.autoprewarm", "on").set("pg_prewarm.autoprewarm_interval", "0");
    Ok(complete)
}

fn is_library_in(directory: &Path) -> bool {
    directory.join(format!("{LIBRARY}.so")).is_file()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::warm::HotPage;

    fn page(block: u32, usage: u8) -> HotPage {
        HotPage { database: 5, tablespace: 1663, relation: 16384, fork: 0, block, usage }
    }

    #[test]
    fn the_hottest_are_listed_in_the_order_of_the_file() {
        let pages = HotPages { pages: vec![page(9, 5), page(1, 0), page(3, 4)] };
        assert_eq!(blocks(&pages, 2), "<<2>>\n5,1663,16384,0,3\n5,1663,16384,0,9\n");
        assert_eq!(blocks(&HotPages::default(), 2), "<<0>>\n");
    }

    #[test]
    fn other_libraries_stay() {
        let binaries = Binaries::find(None).expect("PostgreSQL");
        for (before, after) in [
            (None, "pg_prewarm"),
            (Some("auto_explain"), "auto_explain, pg_prewarm"),
            (Some("pg_prewarm,auto_explain"), "pg_prewarm,auto_explain"),
        ] {
            let mut given = Settings::new();
            if let Some(before) = before {
                given.set("shared_preload_libraries", before);
            }
            let complete = settings(&binaries, &given).expect("contrib is installed");
            assert_eq!(complete.get("shared_preload_libraries"), Some(after));
        }
    }
}
