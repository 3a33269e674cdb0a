//! What an entry of a data directory is to a clone, told by its place and its name alone.
//!
//! Source of the names: PostgreSQL, `src/backend/backup/basebackup.c` (`excludeFiles`, `excludeDirContents`),
//! `src/common/relpath.c`, `src/backend/storage/file/reinit.c`.

use std::collections::HashSet;
use std::path::Path;

/// Where in a data directory one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DirectoryKind {
    /// The data directory itself.
    Top,
    /// `base`, or a tablespace's directory of this version: holds databases.
    Databases,
    /// A database.
    Database,
    /// `global`.
    Global,
    /// `pg_tblspc`.
    Tablespaces,
    /// A tablespace: holds one directory for each version.
    Tablespace,
    /// Transaction states.
    States,
    /// `pg_wal`: its directories are needed, nothing in them is.
    Log,
    /// A directory that a clone needs empty.
    Hollow,
    /// All else.
    Other,
}

/// What becomes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// A clone does not need it, or must not have it.
    Skip,
    /// Copied while all accesses wait.
    Copy,
    /// Filled on demand.
    Fill,
}

/// Top-level files that belong to the running server, to a backup, or that are made apart.
const TOP_FILES_SKIPPED: [&str; 13] = [
    "PG_VERSION",
    "backup_label",
    "backup_label.old",
    "backup_manifest",
    "current_logfiles",
    "current_logfiles.tmp",
    "postgresql.auto.conf.tmp",
    "postmaster.opts",
    "postmaster.pid",
    "recovery.signal",
    "standby.signal",
    "tablespace_map",
    "tablespace_map.old",
];

/// Files that say how a server runs; each also has another name until it is written as a whole.
const CONFIGURATION_FILES: [&str; 4] = ["postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf"];
const UNFINISHED_SUFFIX: &str = ".new";

/// What becomes of the file at `path` from the data directory of a server of `major_version`.
pub(crate) fn treatment(path: &Path, major_version: &str) -> Treatment {
    let directory_kind = path.parent().and_then(|parent| DirectoryKind::of(parent, major_version));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    directory_kind.map_or(Treatment::Skip, |directory_kind| directory_kind.treat(&name))
}

/// Whether a clone needs the directory at `path` from the data directory of a server of `major_version`.
pub(crate) fn is_needed(path: &Path, major_version: &str) -> bool {
    DirectoryKind::of(path, major_version).is_some()
}

impl DirectoryKind {
    /// What place the directory at `path` from the data directory is; none when a clone does not need it.
    fn of(path: &Path, major_version: &str) -> Option<DirectoryKind> {
        let mut parts = path.components().map(|part| part.as_os_str().to_string_lossy());
        parts.try_fold(DirectoryKind::Top, |directory_kind, name| directory_kind.enter(&name, major_version))
    }

    /// What place the directory `name` is; none when a clone does not need it.
    pub(super) fn enter(self, name: &str, major_version: &str) -> Option<DirectoryKind> {
        if is_temporary_directory(name) {
            return None;
        }
        match self {
            DirectoryKind::Top => DirectoryKind::enter_top(name),
            DirectoryKind::Databases => Some(DirectoryKind::Database),
            DirectoryKind::Tablespaces => Some(DirectoryKind::Tablespace),
            DirectoryKind::Tablespace => is_version_directory(name, major_version).then_some(DirectoryKind::Databases),
            DirectoryKind::Log => Some(DirectoryKind::Hollow),
            DirectoryKind::Hollow => None,
            DirectoryKind::States => Some(DirectoryKind::States),
            // Made here, as a file.
            DirectoryKind::Global if name == "pg_control" => None,
            // PostgreSQL makes no directories in these: somebody else's.
            DirectoryKind::Database | DirectoryKind::Global | DirectoryKind::Other => Some(DirectoryKind::Other),
        }
    }

    fn enter_top(name: &str) -> Option<DirectoryKind> {
        Some(match name {
            "base" => DirectoryKind::Databases,
            "global" => DirectoryKind::Global,
            "pg_tblspc" => DirectoryKind::Tablespaces,
            "pg_xact" | "pg_multixact" | "pg_commit_ts" => DirectoryKind::States,
            "pg_wal" => DirectoryKind::Log,
            "pg_dynshmem" | "pg_notify" | "pg_replslot" | "pg_serial" | "pg_snapshots" | "pg_stat_tmp"
            | "pg_subtrans" => DirectoryKind::Hollow,
            // The usual names of a server's own log; it can be larger than the data.
            "log" | "pg_log" => DirectoryKind::Hollow,
            // Where the data directory is a file system's root.
            "lost+found" => return None,
            // A file of this name is made in every clone, or decides whether and how its server starts.
            _ if name.starts_with("onecopy.") || is_of_server(name) => return None,
            _ => DirectoryKind::Other,
        })
    }

    /// Whether a link is as good as the directory that it leads to: what is in it is not read.
    pub(super) fn may_be_link(self) -> bool {
        matches!(self, DirectoryKind::Log | DirectoryKind::Hollow)
    }

    /// What becomes of the file `name`; what `unlogged` decides is not asked here.
    pub(super) fn treat(self, name: &str) -> Treatment {
        if name.starts_with("pgsql_tmp") || name.starts_with("pg_internal.init") {
            return Treatment::Skip;
        }
        match self {
            DirectoryKind::Top if TOP_FILES_SKIPPED.contains(&name) || name.starts_with("onecopy.") => Treatment::Skip,
            DirectoryKind::Global if name == "pg_control" => Treatment::Skip,
            // Right in a tablespace or beside them, nothing is PostgreSQL's.
            DirectoryKind::Log | DirectoryKind::Hollow | DirectoryKind::Tablespaces | DirectoryKind::Tablespace => {
                Treatment::Skip
            }
            DirectoryKind::Global | DirectoryKind::Database => treat_in_database(name),
            DirectoryKind::Databases | DirectoryKind::States => Treatment::Fill,
            DirectoryKind::Top | DirectoryKind::Other => Treatment::Copy,
        }
    }
}

/// Whether a top-level file of this name belongs to the server of its host.
fn is_of_server(name: &str) -> bool {
    let name = name.strip_suffix(UNFINISHED_SUFFIX).unwrap_or(name);
    TOP_FILES_SKIPPED.contains(&name) || CONFIGURATION_FILES.contains(&name)
}

fn treat_in_database(name: &str) -> Treatment {
    match name {
        "pg_filenode.map" | "PG_VERSION" => Treatment::Copy,
        "pg_filenode.map.tmp" => Treatment::Skip,
        _ if is_temporary_relation(name) => Treatment::Skip,
        _ => Treatment::Fill,
    }
}

/// `pgsql_tmp` and what extensions and older versions make beside it.
fn is_temporary_directory(name: &str) -> bool {
    name.starts_with("pgsql_tmp")
}

/// `PG_15_202209061`: others are of servers that were upgraded from, or that share the tablespace.
fn is_version_directory(name: &str, major_version: &str) -> bool {
    let catalog_version = name.strip_prefix("PG_").and_then(|rest| rest.strip_prefix(major_version));
    catalog_version.is_some_and(|rest| rest.starts_with('_'))
}

/// `t3_16384`, `t3_16384_fsm`, `t3_16384.1`: a session's temporary table.
fn is_temporary_relation(name: &str) -> bool {
    let Some((session, relation)) = name.strip_prefix('t').and_then(|rest| rest.split_once('_')) else {
        return false;
    };
    is_number(session) && relation_of(relation).is_some()
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The number and the fork of a relation's file: `16384_init.1` is of 16384's `init`, `16384` of its main fork.
fn relation_of(name: &str) -> Option<(&str, &str)> {
    let (name, segment) = name.split_once('.').unwrap_or((name, "0"));
    let (number, fork) = name.split_once('_').unwrap_or((name, ""));
    (is_number(number) && is_number(segment) && matches!(fork, "" | "fsm" | "vm" | "init")).then_some((number, fork))
}

/// The unlogged relations of one database: those that have an `init` fork. After a crash, and on a standby, they are
/// empty.
#[derive(Debug, Default)]
pub(super) struct Unlogged {
    numbers: HashSet<String>,
}

impl Unlogged {
    /// Learns from the names of all files of a database.
    pub(super) fn learn<'a>(names: impl Iterator<Item = &'a str>) -> Unlogged {
        let inits = names.filter_map(relation_of).filter(|(_, fork)| *fork == "init");
        Unlogged { numbers: inits.map(|(number, _)| number.to_owned()).collect() }
    }

    /// Whether recovery would throw this file away.
    pub(super) fn drops(&self, name: &str) -> bool {
        !self.numbers.is_empty()
            && relation_of(name).is_some_and(|(number, fork)| fork != "init" && self.numbers.contains(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_treated_by_its_place_and_name() {
        use DirectoryKind::*;
        use Treatment::*;
        let cases = [
            (Top, "postmaster.pid", Skip),
            (Top, "PG_VERSION", Skip),
            (Top, "backup_label", Skip),
            (Top, "standby.signal", Skip),
            (Top, "onecopy.incomplete", Skip),
            (Top, "postgresql.auto.conf", Copy),
            (Top, "server.crt", Copy),
            (Global, "pg_control", Skip),
            (Global, "pg_internal.init.4711", Skip),
            (Global, "pg_filenode.map", Copy),
            (Global, "1262", Fill),
            (Global, "1262_vm", Fill),
            (Database, "PG_VERSION", Copy),
            (Database, "pg_internal.init", Skip),
            (Database, "pg_control", Fill),
            (Database, "16384", Fill),
            (Database, "16384.12", Fill),
            (Database, "16384_init", Fill),
            (Database, "t3_16384", Skip),
            (Database, "t12_16384_fsm", Skip),
            (Database, "t12_16384.1", Skip),
            (Database, "t_16384", Fill),
            (Database, "tx_1", Fill),
            (Database, "pgsql_tmp123.0", Skip),
            (States, "0000", Fill),
            (Log, "000000010000000000000001", Skip),
            (Hollow, "global.stat", Skip),
            (Other, "00000001", Copy),
            (Other, "replorigin_checkpoint", Copy),
        ];
        for (directory_kind, name, expected) in cases {
            assert_eq!(directory_kind.treat(name), expected, "{directory_kind:?} {name}");
        }
    }

    #[test]
    fn every_directory_has_its_place() {
        use DirectoryKind::*;
        let cases = [
            (Top, "base", Some(Databases)),
            (Top, "pg_wal", Some(Log)),
            (Top, "pg_replslot", Some(Hollow)),
            (Top, "pg_subtrans", Some(Hollow)),
            (Top, "log", Some(Hollow)),
            (Top, "pg_multixact", Some(States)),
            (Top, "pg_twophase", Some(Other)),
            (Top, "pg_logical", Some(Other)),
            (Top, "lost+found", None),
            (Top, "onecopy.spare", None),
            (Top, "PG_VERSION", None),
            (Top, "PG_VERSION.new", None),
            (Top, "postmaster.pid", None),
            (Top, "standby.signal", None),
            (Top, "backup_label", None),
            (Top, "postgresql.conf", None),
            (Top, "postgresql.conf.new", None),
            (Top, "postgresql.auto.conf", None),
            (Top, "postgresql.auto.conf.new", None),
            (Top, "postgresql.auto.conf.tmp", None),
            (Top, "pg_hba.conf", None),
            (Top, "pg_ident.conf.new", None),
            (Top, "conf.d", Some(Other)),
            (Top, "new", Some(Other)),
            (Other, "postgresql.conf", Some(Other)),
            (Global, "pg_control", None),
            (Global, "x", Some(Other)),
            (States, "members", Some(States)),
            (Databases, "pgsql_tmp", None),
            (Databases, "5", Some(Database)),
            (Tablespaces, "16400", Some(Tablespace)),
            (Tablespace, "PG_15_202209061", Some(Databases)),
            (Tablespace, "PG_14_202107181", None),
            (Tablespace, "PG_150_1", None),
            (Log, "archive_status", Some(Hollow)),
            (Hollow, "a_slot", None),
        ];
        for (directory_kind, name, expected) in cases {
            assert_eq!(directory_kind.enter(name, "15"), expected, "{directory_kind:?} {name}");
        }
    }

    #[test]
    fn of_an_unlogged_table_only_what_makes_it_empty_is_kept() {
        let names = ["16384", "16384.1", "16384_fsm", "16384_init", "16385", "163840", "x_init", "16386_init"];
        let unlogged = Unlogged::learn(names.into_iter());
        let kept: Vec<&str> = names.into_iter().filter(|name| !unlogged.drops(name)).collect();
        assert_eq!(kept, ["16384_init", "16385", "163840", "x_init", "16386_init"]);
    }

    #[test]
    fn whole_paths_are_treated_as_their_places_are() {
        let cases = [
            ("postgresql.conf", Treatment::Copy),
            ("base/5/16384", Treatment::Fill),
            ("pg_tblspc/16400/PG_15_202209061/5/16384", Treatment::Fill),
            ("pg_tblspc/16400/PG_14_202107181/5/16384", Treatment::Skip),
            ("pg_wal/archive_status/x", Treatment::Skip),
            ("pg_replslot/x/state", Treatment::Skip),
            ("onecopy.d/x", Treatment::Skip),
            ("conf.d/x.conf", Treatment::Copy),
        ];
        for (path, expected) in cases {
            assert_eq!(treatment(Path::new(path), "15"), expected, "{path}");
        }
        assert!(!is_needed(Path::new("postgresql.conf"), "15") && !is_needed(Path::new("standby.signal/x"), "15"));
        assert!(is_needed(Path::new("pg_wal/archive_status"), "15") && !is_needed(Path::new("pg_replslot/x"), "15"));
    }

    proptest::proptest! {
        #[test]
        fn no_name_panics(name: String) {
            let _ = DirectoryKind::Database.treat(&name);
            let _ = DirectoryKind::Tablespace.enter(&name, "15");
            let _ = Unlogged::learn([name.as_str()].into_iter()).drops(&name);
        }
    }
}
