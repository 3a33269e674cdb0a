//! Pages that PostgreSQL writes before their log is flushed.
//!
//! A page that leaves the buffer pool waits until its log is flushed. Whoever fills a new relation - an index that is
//! built, a table that is rewritten - logs its pages as full-page images and extends the file past the buffer pool,
//! without that wait (PostgreSQL 15: `src/backend/access/nbtree/nbtsort.c` and `src/backend/access/heap/rewriteheap.c`,
//! `log_newpage` and then `smgrextend`; 17: `src/backend/storage/smgr/bulk_write.c`). So a page with a position after
//! all that is flushed may lie in a file at any instant. Whoever recovers replays the image, and nobody sees the
//! relation before the transaction that made it has committed, which is later still.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use onecopy_postgres::Lsn;

use super::pages::LaterPage;

/// Blocks of a file of a relation: it is split at 1 GiB.
const SEGMENT_BLOCKS: u64 = 131_072;

/// What the log after `flushed` says of pages.
#[derive(Debug, Default)]
pub struct LaterLog {
    /// The records' starts, with what `pg_waldump` says of each.
    records: BTreeMap<Lsn, String>,
    /// Log beyond this can never have been written unflushed: it would not have had room in `wal_buffers`.
    unflushed_end: Lsn,
}

impl LaterLog {
    /// Reads the log of the server with these binaries and this directory, from `flushed` as far as it goes.
    ///
    /// # Errors
    ///
    /// `pg_waldump` finds no record there.
    pub fn read(pg_waldump: &Path, data_directory: &Path, flushed: Lsn, wal_buffers: u64) -> anyhow::Result<LaterLog> {
        let mut command = Command::new(pg_waldump);
        command.arg("--path").arg(data_directory.join("pg_wal")).arg("--start").arg(flushed.to_string());
        let output = command.output().with_context(|| pg_waldump.display().to_string())?;
        // It ends with an error, because the log has no end that it knows of.
        let log = LaterLog::parse(&String::from_utf8_lossy(&output.stdout), Lsn(flushed.0 + wal_buffers))?;
        ensure!(!log.records.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(log)
    }

    fn parse(text: &str, unflushed_end: Lsn) -> anyhow::Result<LaterLog> {
        let mut records = BTreeMap::new();
        for line in text.lines().filter(|line| line.starts_with("rmgr: ")) {
            let (_, rest) = line.split_once("lsn: ").with_context(|| line.to_owned())?;
            let (position, _) = rest.split_once(',').with_context(|| line.to_owned())?;
            records.insert(position.parse()?, line.to_owned());
        }
        Ok(LaterLog { records, unflushed_end })
    }

    /// Whether the page can have been written before its log was flushed: its content is a full-page image that is
    /// logged for a page written past the buffer pool, at a position that `wal_buffers` allows for.
    pub fn is_written_unflushed(&self, page: &LaterPage) -> bool {
        let image = |record: &str| record.starts_with("rmgr: XLOG ") && record.contains(" desc: FPI ");
        page.changed_at <= self.unflushed_end
            && self.record(page.changed_at).is_some_and(|record| image(record) && names(record, page))
    }

    /// The page and the record that changed it, for a report.
    pub fn describe(&self, page: &LaterPage) -> String {
        format!("{page} by {}", self.record(page.changed_at).unwrap_or("no record of the log"))
    }

    /// The record that ends at `end`: pages carry the end of what changed them.
    fn record(&self, end: Lsn) -> Option<&str> {
        self.records.range(..end).next_back().map(|(_, record)| record.as_str())
    }
}

/// Whether one of the record's blocks is this page. `rel` is tablespace, database and file; a fork other than the main
/// one is named.
fn names(record: &str, page: &LaterPage) -> bool {
    let Some(name) = page.file.file_name().and_then(|name| name.to_str()) else { return false };
    let (name, segment) = name.split_once('.').unwrap_or((name, "0"));
    let (file, fork) = name.split_once('_').unwrap_or((name, "main"));
    let Ok(segment) = segment.parse::<u64>() else { return false };
    let block = segment * SEGMENT_BLOCKS + page.number;
    record.split("blkref #").skip(1).any(|reference| {
        let words: Vec<&str> = reference.split([' ', ',']).collect();
        let after = |word| words.iter().position(|found| *found == word).and_then(|at| words.get(at + 1)).copied();
        after("rel").and_then(|relation| relation.rsplit('/').next()) == Some(file)
            && after("fork").unwrap_or("main") == fork
            && after("blk") == Some(block.to_string().as_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "\
rmgr: XLOG        len (rec/tot):    100/ 16500, tx:        740, lsn: 0/09B00028, prev 0/09AFFFF0, desc: FPI , \
blkref #0: rel 1663/5/16402 blk 13 FPW, blkref #1: rel 1663/5/16402 blk 14 FPW
rmgr: XLOG        len (rec/tot):     49/  8241, tx:        740, lsn: 0/09B040A0, prev 0/09B00028, desc: FPI , \
blkref #0: rel 1663/5/16403 fork fsm blk 131073 FPW
rmgr: Heap        len (rec/tot):     54/    54, tx:        741, lsn: 0/09B060F0, prev 0/09B040A0, desc: LOCK off 3, \
blkref #0: rel 1663/5/16402 blk 13
rmgr: XLOG        len (rec/tot):     49/  8241, tx:        742, lsn: 0/09B06128, prev 0/09B060F0, desc: FPI_FOR_HINT , \
blkref #0: rel 1663/5/16402 blk 13 FPW
";

    #[test]
    fn only_images_logged_for_new_relations_and_near_what_was_flushed_are_excused() {
        let log = LaterLog::parse(DUMP, Lsn(0x9B0_8000)).expect("positions");
        let excused = |file: &str, number, changed_at| {
            log.is_written_unflushed(&LaterPage { file: file.into(), number, changed_at: Lsn(changed_at) })
        };
        assert!(excused("base/5/16402", 13, 0x9B0_40A0) && excused("base/5/16402", 14, 0x9B0_40A0));
        assert!(excused("base/5/16403_fsm.1", 1, 0x9B0_60F0), "another fork, in its second file");
        assert!(!excused("base/5/16402", 15, 0x9B0_40A0), "another block");
        assert!(!excused("base/5/16404", 13, 0x9B0_40A0), "another file");
        assert!(!excused("base/5/16402", 13, 0x9B0_6128), "changed in the buffer pool");
        assert!(!excused("base/5/16402", 13, 0x9B0_8000), "a hint's image");
        assert!(!excused("base/5/16402", 13, 0x9B0_0028), "no record before it");
        let far = LaterLog::parse(DUMP, Lsn(0x9B0_4000)).expect("positions");
        let page = LaterPage { file: "base/5/16402".into(), number: 13, changed_at: Lsn(0x9B0_40A0) };
        assert!(!far.is_written_unflushed(&page), "beyond what wal_buffers can hold");
        assert!(far.describe(&page).contains("page 13 at 0/9B040A0 by rmgr: XLOG"), "{}", far.describe(&page));
    }
}
