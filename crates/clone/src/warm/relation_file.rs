//! Which file of an image holds which page of which relation.
//!
//! Source of the names: PostgreSQL, `src/common/relpath.c`, `GetRelationPath`, and `src/backend/storage/smgr/md.c`,
//! `_mdfd_segpath`.

use std::collections::HashMap;
use std::path::Path;

use super::ranges::PAGE_BYTES;
use crate::image::{FileNumber, Image};

/// The tablespaces that PostgreSQL makes itself (`src/include/catalog/pg_tablespace.dat`).
const DEFAULT_TABLESPACE: u32 = 1663;
const GLOBAL_TABLESPACE: u32 = 1664;

/// Pages of a file of the usual size, 1 GiB; a server that is compiled with another one gets its first pages only.
const SEGMENT_PAGES: u32 = 1 << 17;

/// One file of a relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RelationFile {
    pub tablespace: u32,
    pub database: u32,
    pub relation: u32,
    pub fork: u32,
    pub segment: u32,
}

impl RelationFile {
    /// Understands a path from the data directory; none for what is no relation's file.
    pub fn of_path(path: &Path) -> Option<RelationFile> {
        let mut parts = Vec::new();
        for part in path.iter() {
            parts.push(part.to_str()?);
        }
        let (tablespace, database, name) = match parts.as_slice() {
            ["global", name] => (GLOBAL_TABLESPACE, 0, *name),
            ["base", database, name] => (DEFAULT_TABLESPACE, database.parse().ok()?, *name),
            ["pg_tblspc", tablespace, version, database, name] if version.starts_with("PG_") => {
                (tablespace.parse().ok()?, database.parse().ok()?, *name)
            }
            _ => return None,
        };
        let (name, segment) = match name.split_once('.') {
            Some((name, segment)) => (name, segment.parse().ok()?),
            None => (name, 0),
        };
        let (relation, fork) = match name.split_once('_') {
            None => (name, 0),
            Some((relation, "fsm")) => (relation, 1),
            Some((relation, "vm")) => (relation, 2),
            Some(_) => return None,
        };
        Some(RelationFile { tablespace, database, relation: relation.parse().ok()?, fork, segment })
    }
}

/// All files of relations in an image, with their sizes in bytes.
pub(super) fn by_relation(image: &Image) -> HashMap<RelationFile, (FileNumber, u64)> {
    let numbers = (0..).map(FileNumber);
    let files = numbers.zip(&image.files);
    files.filter_map(|(number, file)| Some((RelationFile::of_path(&file.path)?, (number, file.size_bytes)))).collect()
}

/// Where a block lies of the relation whose first file is told: its file and its first byte there. None when the image
/// does not have it.
pub(super) fn place(
    files: &HashMap<RelationFile, (FileNumber, u64)>,
    first: RelationFile,
    block: u32,
) -> Option<(FileNumber, u64)> {
    let (number, size_bytes) = *files.get(&RelationFile { segment: block / SEGMENT_PAGES, ..first })?;
    let start = u64::from(block % SEGMENT_PAGES) * PAGE_BYTES;
    (start < size_bytes).then_some((number, start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_are_understood() {
        let file = |tablespace, database, relation, fork, segment| {
            Some(RelationFile { tablespace, database, relation, fork, segment })
        };
        for (path, expected) in [
            ("base/5/16384", file(1663, 5, 16384, 0, 0)),
            ("base/5/16384_fsm", file(1663, 5, 16384, 1, 0)),
            ("base/5/16384_vm.3", file(1663, 5, 16384, 2, 3)),
            ("base/5/16384.12", file(1663, 5, 16384, 0, 12)),
            ("global/1262", file(1664, 0, 1262, 0, 0)),
            ("pg_tblspc/16400/PG_17_202406281/5/16401.1", file(16400, 5, 16401, 0, 1)),
            ("base/5/16384_init", None),
            ("base/5/t3_16384", None),
            ("base/5/pg_filenode.map", None),
            ("global/pg_control", None),
            ("pg_xact/0000", None),
            ("pg_multixact/members/0000", None),
            ("base/5/4294967296", None),
            ("", None),
        ] {
            assert_eq!(RelationFile::of_path(Path::new(path)), expected, "{path}");
        }
    }

    proptest! {
        #[test]
        fn no_path_panics(path: String) {
            let _ = RelationFile::of_path(Path::new(&path));
        }
    }
}
