//! What each command does, on a disk at rest and on one that is served.

use std::fs;

use crate::directory::{DiskDirectory, are_equal};

/// Every command does the same on a disk at rest and on one that is served; `--json` is one object a line.
///
/// Spec: L5
#[test]
fn b50_commands_do_the_same_on_a_disk_at_rest_and_on_one_that_is_served() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "64M"]);
    assert_eq!(directory.info("disk")["geometry"]["size_bytes"], 64 << 20);
    assert!(directory.info("disk")["served"].is_null());
    directory.done(&["snapshot", "disk", "empty"]);

    let server = directory.serve("disk", &[]);
    directory.io("disk", &["write -P 7 0 1M", "write -P 8 40M 64k", "flush"]);
    directory.done(&["snapshot", "disk", "written"]);
    directory.io("disk", &["write -P 9 0 4k", "discard 40M 64k", "flush"]);
    assert_eq!(directory.done(&["snapshot", "disk", "--list"]), "empty\nwritten");
    for (disk, file) in [("disk", "served.raw"), ("disk@written", "written.raw"), ("disk@empty", "empty.raw")] {
        directory.done(&["export", disk, file]);
    }
    assert_eq!(directory.done(&["snapshot", "disk", "--list"]), "empty\nwritten", "an export leaves nothing");
    directory.done(&["check", "disk"]);
    directory.done(&["stop", "disk"]);
    server.ends();

    assert_eq!(directory.done(&["snapshot", "disk", "--list"]), "empty\nwritten");
    directory.done(&["check", "disk", "--content"]);
    for (disk, file) in [("disk", "rest.raw"), ("disk@written", "written-rest.raw")] {
        directory.done(&["export", disk, file]);
    }
    assert!(are_equal(&directory.path("served.raw"), &directory.path("rest.raw")));
    assert!(are_equal(&directory.path("written.raw"), &directory.path("written-rest.raw")));
    let (now, written) =
        (fs::read(directory.path("rest.raw")).unwrap(), fs::read(directory.path("written.raw")).unwrap());
    let part =
        |image: &[u8], start: usize, length: usize, byte: u8| image[start..][..length].iter().all(|b| *b == byte);
    assert!(part(&now, 0, 4096, 9) && part(&now, 4096, (1 << 20) - 4096, 7) && part(&now, 1 << 20, 63 << 20, 0));
    assert!(part(&written, 0, 1 << 20, 7) && part(&written, 40 << 20, 64 << 10, 8));
    assert!(part(&fs::read(directory.path("empty.raw")).unwrap(), 0, 64 << 20, 0));

    directory.done(&["snapshot", "disk", "empty", "--delete"]);
    assert_eq!(directory.done(&["snapshot", "disk", "--list"]), "written");
    directory.done(&["create", "over", "--base", "disk@written"]);
    directory.done(&["export", "over", "over.raw"]);
    assert!(are_equal(&directory.path("over.raw"), &directory.path("written.raw")));
}

/// Spec: L5
#[test]
fn b50_json_is_one_object_a_line() {
    let directory = DiskDirectory::new();
    let lines = [
        vec!["create", "disk", "--size", "16M", "--json"],
        vec!["snapshot", "disk", "monday", "--json"],
        vec!["snapshot", "disk", "--list", "--json"],
        vec!["info", "disk", "--json"],
        vec!["check", "disk", "--content", "--json"],
        vec!["export", "disk", "disk.raw", "--json"],
        vec!["snapshot", "disk", "monday", "--delete", "--json"],
    ];
    for arguments in lines {
        let said = directory.done(&arguments);
        assert!(!said.is_empty());
        for line in said.lines() {
            serde_json::from_str::<serde_json::Value>(line)
                .unwrap_or_else(|error| panic!("{arguments:?}: {line}: {error}"));
        }
    }
}

/// Refusals say what and what to do, with the documented exit code, and leave nothing; a damaged disk is told by check.
///
/// Spec: L4
#[test]
fn b51_refusals_say_what_and_what_to_do() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "16M"]);
    fs::write(directory.path("image"), vec![1; 1 << 20]).unwrap();
    let cases: [(i32, &[&str], &str); 12] = [
        (2, &["create", "other"], "--size"),
        (2, &["create", "other", "--size", "16"], "16"),
        (1, &["create", "other", "--size", "1000B"], "4096"),
        (1, &["create", "disk", "--size", "16M"], "disk"),
        (1, &["create", "other", "--base", "nothing"], "nothing"),
        (1, &["create", "other", "--base", "disk"], "onecopy disk snapshot"),
        (1, &["create", "other", "--base", "image", "--size", "4kB"], "larger --size"),
        (1, &["serve", "disk"], "--vhost"),
        (1, &["info", "nothing"], "nothing"),
        (1, &["snapshot", "disk", "none", "--delete"], "no snapshot"),
        (3, &["stop", "disk"], "onecopy disk serve disk"),
        (1, &["export", "disk", "image"], "exists"),
    ];
    for (code, arguments, told) in cases {
        let said = directory.fails(code, arguments);
        assert!(said.contains(told), "{arguments:?}: {said}");
        assert!(!directory.path("other").exists(), "{arguments:?} leaves something behind");
    }
}

/// Spec: L4
#[test]
fn b51_what_is_no_disk_is_told_with_the_remedy_by_every_command() {
    let directory = DiskDirectory::new();
    fs::create_dir(directory.path("empty")).unwrap();
    fs::write(directory.path("image"), [1; 4096]).unwrap();
    let commands: [&[&str]; 9] = [
        &["check", "DISK"],
        &["info", "DISK"],
        &["snapshot", "DISK", "monday"],
        &["snapshot", "DISK", "--list"],
        &["export", "DISK", "out"],
        &["export", "DISK@monday", "out"],
        &["serve", "DISK", "--nbd", "unix:socket"],
        &["limit", "DISK", "0"],
        &["stop", "DISK"],
    ];
    for (place, told) in
        [("empty", "empty is no disk"), ("image", "image is no disk"), ("nothing", "there is no nothing")]
    {
        for command in commands {
            let arguments: Vec<String> = command.iter().map(|word| word.replace("DISK", place)).collect();
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let said = directory.fails(1, &arguments);
            assert!(said.contains(told) && said.contains("onecopy disk create"), "{arguments:?}: {said}");
        }
    }
    assert!(directory.fails(1, &["create", "over", "--base", "empty@monday"]).contains("empty is no disk"));
    assert_eq!(fs::read_dir(directory.path("empty")).unwrap().count(), 0, "nothing is left in it");
    for name in ["nothing", "out", "socket", "over"] {
        assert!(!directory.path(name).exists(), "{name} was made");
    }
}

/// Spec: L4
#[test]
fn b51_a_damaged_disk_is_told_by_check() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "16M"]);
    let server = directory.serve("disk", &[]);
    directory.io("disk", &["write -P 7 0 1M", "flush"]);
    server.terminate();
    for entry in fs::read_dir(directory.path("disk")).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("map.") {
            let mut bytes = fs::read(entry.path()).unwrap();
            let last = bytes.len() - 1;
            bytes[last / 2] ^= 0xff;
            fs::write(entry.path(), bytes).unwrap();
        }
    }
    assert!(directory.fails(1, &["check", "disk"]).contains("damaged"));
}
