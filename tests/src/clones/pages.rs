//! The pages of a server that does not run, looked at without PostgreSQL.
//!
//! Source of the layout: PostgreSQL, `src/include/storage/bufpage.h`: a page begins with the position of the last
//! record of the log that changed it, high half first, each half in the machine's byte order.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use onecopy_postgres::Lsn;

/// PostgreSQL's page.
pub const PAGE_BYTES: usize = 8192;

/// Pages read at once.
const BATCH_PAGES: usize = 128;

/// Directories that hold relations.
const RELATION_DIRECTORIES: [&str; 3] = ["base", "global", "pg_tblspc"];

/// Below `pg_tblspc` a relation lies four directories deep.
const DEPTH_MAX: usize = 4;

/// A page that was changed after a position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaterPage {
    /// Its file, relative to the data directory.
    pub file: PathBuf,
    /// Its number in that file.
    pub number: u64,
    /// The end of the last record that changed it.
    pub changed_at: Lsn,
}

impl fmt::Display for LaterPage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} page {} at {}", self.file.display(), self.number, self.changed_at)
    }
}

/// How many pages with content there are, and those that were changed after `position`: in a copy as of `position` they
/// come from its future.
///
/// # Errors
///
/// A file that cannot be read; no pages at all, because that would prove nothing.
pub fn pages_after(data_directory: &Path, position: Lsn) -> anyhow::Result<(u64, Vec<LaterPage>)> {
    let (mut pages, mut later) = (0, Vec::new());
    for path in relation_files(data_directory)? {
        let mut number = 0;
        let mut file = File::open(&path).with_context(|| path.display().to_string())?;
        let mut batch = vec![0; BATCH_PAGES * PAGE_BYTES];
        loop {
            let length = read_full(&mut file, &mut batch)?;
            for page in batch[..length].chunks_exact(PAGE_BYTES) {
                let changed = changed_at(page);
                pages += u64::from(changed.0 != 0);
                if changed > position {
                    let file = path.strip_prefix(data_directory)?.to_owned();
                    later.push(LaterPage { file, number, changed_at: changed });
                }
                number += 1;
            }
            if length < batch.len() {
                break;
            }
        }
    }
    ensure!(pages > 0, "{} has no pages", data_directory.display());
    Ok((pages, later))
}

/// When a page was changed last; 0 for one that is empty or of a kind that is not logged.
pub fn changed_at(page: &[u8]) -> Lsn {
    let half = |at: usize| page.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes);
    Lsn(u64::from(half(0)) << 32 | u64::from(half(4)))
}

fn read_full(file: &mut File, buffer: &mut [u8]) -> anyhow::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read(&mut buffer[length..])? {
            0 => break,
            more => length += more,
        }
    }
    Ok(length)
}

/// All files of relations, whatever their fork; tablespaces elsewhere too.
fn relation_files(data_directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut directories: Vec<(PathBuf, usize)> =
        RELATION_DIRECTORIES.iter().map(|name| (data_directory.join(name), 0)).collect();
    while let Some((directory, depth)) = directories.pop() {
        for entry in std::fs::read_dir(&directory).with_context(|| directory.display().to_string())? {
            let path = entry?.path();
            let is_number = path
                .file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with(|first: char| first.is_ascii_digit()));
            if path.is_dir() && depth < DEPTH_MAX {
                directories.push((path, depth + 1));
            } else if is_number {
                files.push(path);
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_from_the_future_are_named() {
        let directory = tempfile::tempdir().expect("a directory");
        for name in RELATION_DIRECTORIES {
            std::fs::create_dir(directory.path().join(name)).expect("made");
        }
        let mut content = vec![0; 3 * PAGE_BYTES];
        content[..4].copy_from_slice(&1_u32.to_ne_bytes());
        content[4..8].copy_from_slice(&16_u32.to_ne_bytes());
        std::fs::write(directory.path().join("base/16384"), &content).expect("written");
        std::fs::write(directory.path().join("base/pg_filenode.map"), vec![255; PAGE_BYTES]).expect("written");
        let (pages, later) = pages_after(directory.path(), Lsn(0x1_0000_0010)).expect("read");
        assert_eq!((pages, later.len()), (1, 0));
        let (_, later) = pages_after(directory.path(), Lsn(0x1_0000_000F)).expect("read");
        assert_eq!(later[0].to_string(), "base/16384 page 0 at 1/10");
    }

    #[test]
    fn a_directory_without_pages_proves_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        for name in RELATION_DIRECTORIES {
            std::fs::create_dir(directory.path().join(name)).expect("made");
        }
        assert!(pages_after(directory.path(), Lsn(1)).is_err());
    }
}
