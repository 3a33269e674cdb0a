//! Disks that are copies of something elsewhere.

use onecopy_testing::until;

use crate::directory::{DiskDirectory, are_equal};

/// A disk with content, its snapshot `whole`, and that as `whole.raw`.
fn source(directory: &DiskDirectory) {
    directory.done(&["create", "source", "--size", "32M"]);
    let server = directory.serve("source", &[]);
    directory.io("source", &["write -P 1 0 8M", "write -P 2 20M 4M", "write -P 3 30M 512", "flush"]);
    directory.done(&["snapshot", "source", "whole"]);
    server.terminate();
    directory.done(&["export", "source@whole", "whole.raw"]);
}

/// A copy is used at once, goes on after a kill, holds to its limit until that is lifted, becomes whole, and needs its
/// source no more.
///
/// Spec: D4
#[test]
fn b58_a_copy_is_used_at_once_and_becomes_whole_in_the_background() {
    let directory = DiskDirectory::new();
    source(&directory);
    let origin = directory.serve("source", &[]);
    let url = format!("nbd+unix:///snapshot/whole?socket={}", directory.socket("source").display());
    directory.done(&["create", "copy", "--from", &url]);
    let hydration = || directory.info("copy")["served"]["hydration"].clone();
    let copied = || hydration()["copied_bytes"].as_u64().unwrap_or(0);
    // Slowly enough that it is not whole when it is first read.
    let server = directory.serve("copy", &["--limit", "64kB", "--scan-limit", "0"]);
    directory.io("copy", &["read -P 2 20M 4M", "write -P 9 8M 1M", "flush"]);
    let early = copied();
    assert!(early >= 4 << 20 && early < hydration()["total_bytes"].as_u64().unwrap(), "{}", hydration());
    server.kill();
    let server = directory.serve("copy", &["--limit", "64kB", "--scan-limit", "0"]);
    directory.done(&["limit", "copy", "0"]);
    until("it is whole", || hydration()["is_whole"] == true);
    // From here on it needs its source no more.
    origin.terminate();
    directory.io("copy", &["read -P 1 0 8M", "read -P 9 8M 1M", "read -P 2 20M 4M", "read -P 3 30M 512"]);
    server.terminate();
    let server = directory.serve("copy", &[]);
    directory.io("copy", &["read -P 1 0 8M"]);
    server.terminate();
}

/// Spec: D4
#[test]
fn b58_create_can_wait_until_a_copy_is_whole() {
    let directory = DiskDirectory::new();
    source(&directory);
    directory.done(&["create", "copy", "--from", "source@whole", "--wait"]);
    std::fs::rename(directory.path("source"), directory.path("away")).unwrap();
    directory.done(&["export", "copy", "copy.raw"]);
    assert!(are_equal(&directory.path("copy.raw"), &directory.path("whole.raw")));
}
