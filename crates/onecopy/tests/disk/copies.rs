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

/// A machine's disk that has gone on: another process lets its snapshot be read while the disk is written, and its
/// server killed and started again. What is read is the snapshot, also of blocks that the disk has given to others, and
/// a copy of it becomes whole although that process dies, too.
///
/// Spec: D4, D5
#[test]
fn b70_a_snapshot_is_served_beside_a_disk_that_is_written_and_whose_server_is_killed() {
    let directory = DiskDirectory::new();
    source(&directory);
    let reader = directory.serve_snapshot("source", "whole", "reader");
    let writer = directory.serve("source", &[]);
    let url = format!("nbd+unix:///?socket={}", directory.socket("reader").display());
    directory.done(&["create", "copy", "--from", &url]);
    let wanted = ["read -P 1 0 8M", "read -P 2 20M 4M", "read -P 3 30M 512"];
    let read = |when: &str| {
        let mut program = std::process::Command::new("qemu-io");
        program.args(["-r", "-f", "raw", &url]).args(wanted.iter().flat_map(|command| ["-c", *command]));
        let said = program.output().expect("qemu-io is there: make setup");
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.status.success() && !text.contains("failed"), "{when}: {said:?}");
    };
    read("before anything is written");
    // Again and again, and thrown away, so that places are given to others.
    for round in 4..8 {
        let writes = [format!("write -P {round} 0 32M"), "discard 0 16M".to_owned(), "flush".to_owned()];
        directory.io("source", &writes.iter().map(String::as_str).collect::<Vec<_>>());
    }
    read("all was written over");
    let served = directory.serve("copy", &["--limit", "64kB", "--scan-limit", "0"]);
    writer.kill();
    read("its disk's server was killed");
    let writer = directory.serve("source", &[]);
    directory.io("source", &["write -P 9 0 32M", "flush"]);
    read("the next one has written");
    reader.kill();
    let reader = directory.serve_snapshot("source", "whole", "reader");
    directory.done(&["limit", "copy", "0"]);
    until("it is whole", || directory.info("copy")["served"]["hydration"]["is_whole"] == true);
    writer.kill();
    reader.kill();
    directory.io("copy", &wanted);
    served.terminate();
}

/// The disk of another host names what it likes as its base, and lies where it likes: nothing is read outside of the
/// storage that both hosts have.
///
/// Spec: C3
#[test]
fn the_disk_of_another_host_shows_nothing_outside_of_the_storage_of_both() {
    let directory = DiskDirectory::new();
    source(&directory);
    std::fs::create_dir(directory.path("shared")).unwrap();
    for image in ["shared/base.raw", "other.raw"] {
        std::fs::write(directory.path(image), [7; 1 << 20]).unwrap();
    }
    std::os::unix::fs::symlink("../other.raw", directory.path("shared/link.raw")).unwrap();
    std::os::unix::fs::symlink("../source", directory.path("shared/moved")).unwrap();
    let origin = directory.serve("source", &[]);
    let url = format!("nbd+unix:///snapshot/whole?socket={}", directory.socket("source").display());
    for (disk, how, base) in [
        ("honest", "--base", "shared/base.raw"),
        ("image", "--base", "other.raw"),
        ("link", "--base", "shared/link.raw"),
        ("disk", "--base", "source@whole"),
        ("export", "--from", url.as_str()),
    ] {
        let disk = format!("shared/{disk}");
        directory.done(&["create", &disk, how, base]);
        directory.done(&["snapshot", &disk, "begun"]);
    }
    let serve =
        |disk: &str, snapshot: &str| directory.serve_confined(&format!("shared/{disk}"), snapshot, "shared", disk);
    let server = serve("honest", "begun").unwrap();
    let url = format!("nbd+unix:///?socket={}", directory.socket("honest").display());
    directory.done(&["create", "copy", "--from", &url, "--wait"]);
    directory.done(&["export", "copy", "copy.raw"]);
    assert!(are_equal(&directory.path("copy.raw"), &directory.path("shared/base.raw")));
    server.terminate();
    for (disk, snapshot, word) in [
        ("image", "begun", "Permission denied"),
        ("link", "begun", "Permission denied"),
        ("disk", "begun", "Permission denied"),
        ("export", "begun", "export"),
        ("moved", "whole", "Permission denied"),
    ] {
        let complaint = serve(disk, snapshot).map(|server| server.kill()).unwrap_err();
        assert!(complaint.contains(word), "{disk}: {complaint}");
    }
    origin.terminate();
}
