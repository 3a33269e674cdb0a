//! A cluster whose memory is small enough for a test, and what is asked of it.

use std::path::PathBuf;

use onecopy_testing::TestDirectory;
use serde_json::Value;

use crate::directory::ClusterDirectory;

pub const MIB: u64 = 1 << 20;

/// The ceiling and the start of each server of [`CONFIGURATION`].
pub const CEILING_BYTES: u64 = 512 * MIB;
pub const START_BYTES: u64 = 256 * MIB;

/// Nothing moves by itself unless a test wants it to.
pub const CONFIGURATION: &str =
    "[memory]\nextension = \"on\"\nceiling = \"512MB\"\nstart = \"256MB\"\nauto = false\nbudget = \"2GB\"\n";

/// A new cluster with this configuration.
#[track_caller]
pub fn up(configuration: &str, replicas: usize) -> ClusterDirectory {
    let directory = ClusterDirectory::new();
    configure(&directory, configuration);
    directory.up(replicas);
    directory
}

/// Writes `onecopy.toml` into the cluster's directory, which need not exist yet.
pub fn configure(directory: &ClusterDirectory, configuration: &str) {
    std::fs::create_dir_all(directory.path()).expect("make the directory");
    std::fs::write(directory.path().join("onecopy.toml"), configuration).expect("write the configuration");
}

/// What `onecopy memory status --json` tells.
#[track_caller]
pub fn status(directory: &ClusterDirectory) -> Value {
    serde_json::from_str(&directory.run(&["memory", "status", "--json"]).ok()).expect("a JSON document")
}

/// One server of it; null when it is not there.
pub fn instance(status: &Value, name: &str) -> Value {
    let instances = status["instances"].as_array().expect("a list");
    instances.iter().find(|instance| instance["instance"] == name).cloned().unwrap_or_default()
}

/// The pool of one server now; none while it does not tell.
#[track_caller]
pub fn pool_bytes(directory: &ClusterDirectory, name: &str) -> Option<u64> {
    let status = status(directory);
    let observation = &instance(&status, name)["observation"];
    observation["pool_bytes"].as_u64().filter(|_| observation["answered"] == true)
}

/// A directory with the programs of PostgreSQL and nothing beside it: where an installation would have its
/// extensions there is none.
pub fn programs_alone() -> (TestDirectory, PathBuf) {
    let root = TestDirectory::new().expect("a directory");
    let programs = root.join("bin");
    std::fs::create_dir(&programs).expect("make a directory");
    let binaries = onecopy_postgres::Binaries::find(None).expect("PostgreSQL");
    for entry in std::fs::read_dir(binaries.directory()).expect("its programs").flatten() {
        if entry.file_name() != "pg_config" {
            std::os::unix::fs::symlink(entry.path(), programs.join(entry.file_name())).expect("link a program");
        }
    }
    (root, programs)
}
