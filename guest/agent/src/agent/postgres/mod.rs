//! The guest's PostgreSQL: one cluster, run by the user `postgres` in a control group of its own.

mod cluster;
mod control;
mod freeze;
mod log;
mod source;
mod status;

pub(crate) use control::stop_for_good;
pub(crate) use log::bound_log;
pub(crate) use status::status;

use super::replies::{Reporter, Result, failure};
use crate::protocol::{Answer, FailureKind, Postgres};
use std::path::{Path, PathBuf};

/// The cluster's directory.
const DATA: &str = "/var/lib/onecopy/data";
/// Where a cluster is made before it gets its name.
const NEW_DATA: &str = "/var/lib/onecopy/data.new";
/// What the server writes before and beside its own log.
const LOG: &str = "/var/log/postgresql/onecopy.log";
/// Who runs it.
const USER: &str = "postgres";
/// Where Debian puts the programs, a directory a version.
const VERSIONS: &str = "/usr/lib/postgresql";

/// The image's PostgreSQL.
pub(crate) struct Programs {
    pub(crate) major: u32,
    pub(crate) directory: PathBuf,
}

impl Programs {
    fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }
}

/// The newest version that is there.
pub(crate) fn programs() -> Option<Programs> {
    newest(Path::new(VERSIONS))
}

fn newest(versions: &Path) -> Option<Programs> {
    let entries = versions.read_dir().ok()?.flatten();
    let major = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).max()?;
    Some(Programs { major, directory: versions.join(major.to_string()).join("bin") })
}

fn needed_programs() -> Result<Programs> {
    programs().ok_or_else(|| failure(FailureKind::Failed, "the image has no PostgreSQL"))
}

/// Does what is asked for.
pub(crate) fn perform(action: &Postgres, reporter: &Reporter<'_>) -> Result<Answer> {
    match action {
        Postgres::Initialize(initialize) => cluster::initialize(initialize, reporter)?,
        Postgres::BaseBackup(base_backup) => cluster::copy(base_backup, reporter)?,
        Postgres::Start { timeout_ms } => control::start(*timeout_ms, reporter)?,
        Postgres::Stop { mode, timeout_ms } => control::stop(*mode, *timeout_ms, reporter)?,
        Postgres::Reload {} => control::reload()?,
        Postgres::Freeze {} => freeze::freeze()?,
        Postgres::Thaw {} => freeze::thaw()?,
        Postgres::Kill {} => freeze::kill()?,
        Postgres::Status {} => return Ok(Answer::Postgres(status())),
    }
    Ok(Answer::Done {})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_is_used() {
        let directory = tempfile::tempdir().unwrap();
        assert!(newest(directory.path()).is_none());
        for name in ["9", "17", "common"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        let programs = newest(directory.path()).unwrap();
        assert_eq!((programs.major, programs.path("initdb").ends_with("/17/bin/initdb")), (17, true));
    }
}
