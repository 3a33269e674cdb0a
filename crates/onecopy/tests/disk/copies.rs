//! Disks that are copies of something elsewhere.

use crate::laboratory::{Laboratory, are_equal, wait_until};

/// A disk with content, its snapshot `whole`, and that as `whole.raw`.
fn source(laboratory: &Laboratory) {
    laboratory.done(&["create", "source", "--size", "32M"]);
    let server = laboratory.serve("source", &[]);
    laboratory.io("source", &["write -P 1 0 8M", "write -P 2 20M 4M", "write -P 3 30M 512", "flush"]);
    laboratory.done(&["snapshot", "source", "whole"]);
    server.terminate();
    laboratory.done(&["export", "source@whole", "whole.raw"]);
}

#[test]
fn b58_a_copy_is_used_at_once_and_becomes_whole_in_the_background() {
    let laboratory = Laboratory::new();
    source(&laboratory);
    let origin = laboratory.serve("source", &[]);
    let url = format!("nbd+unix:///snapshot/whole?socket={}", laboratory.socket("source").display());
    laboratory.done(&["create", "copy", "--from", &url]);
    let hydration = || laboratory.info("copy")["served"]["hydration"].clone();
    let copied = || hydration()["copied_bytes"].as_u64().unwrap_or(0);
    // Slowly enough that it is not whole when it is first read.
    let server = laboratory.serve("copy", &["--limit", "64kB", "--scan-limit", "0"]);
    laboratory.io("copy", &["read -P 2 20M 4M", "write -P 9 8M 1M", "flush"]);
    let early = copied();
    assert!(early >= 4 << 20 && early < hydration()["total_bytes"].as_u64().unwrap(), "{}", hydration());
    server.kill();
    let server = laboratory.serve("copy", &["--limit", "64kB", "--scan-limit", "0"]);
    laboratory.done(&["limit", "copy", "0"]);
    wait_until("it is whole", || hydration()["is_whole"] == true);
    // From here on it needs its source no more.
    origin.terminate();
    laboratory.io("copy", &["read -P 1 0 8M", "read -P 9 8M 1M", "read -P 2 20M 4M", "read -P 3 30M 512"]);
    server.terminate();
    let server = laboratory.serve("copy", &[]);
    laboratory.io("copy", &["read -P 1 0 8M"]);
    server.terminate();
}

#[test]
fn b58_create_can_wait_until_a_copy_is_whole() {
    let laboratory = Laboratory::new();
    source(&laboratory);
    laboratory.done(&["create", "copy", "--from", "source@whole", "--wait"]);
    std::fs::rename(laboratory.path("source"), laboratory.path("away")).unwrap();
    laboratory.done(&["export", "copy", "copy.raw"]);
    assert!(are_equal(&laboratory.path("copy.raw"), &laboratory.path("whole.raw")));
}
