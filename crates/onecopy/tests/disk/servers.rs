//! Servers of disks: how they end, what is left then, and who may start one.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use onecopy_testing::{free_port, until};

use crate::directory::{DiskDirectory, are_equal};

/// Spec: D4
#[test]
fn b52_a_server_that_is_killed_loses_nothing_that_was_flushed_and_can_be_started_at_once() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "64M"]);
    for round in 1..=5 {
        let server = directory.serve("disk", &[]);
        let write = format!("write -P {round} {round}M 1M");
        directory.io("disk", &[&write, "flush", "write -P 99 0 64k"]);
        server.kill();
    }
    let server = directory.serve("disk", &[]);
    let reads: Vec<String> = (1..=5).map(|round| format!("read -P {round} {round}M 1M")).collect();
    directory.io("disk", &reads.iter().map(String::as_str).collect::<Vec<_>>());
    server.terminate();
    directory.done(&["check", "disk", "--content"]);
}

/// A second server is refused and told who has the disk; the first serves on.
///
/// Spec: L4
#[test]
fn b53_a_second_server_is_refused_and_told_who_has_the_disk() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "16M"]);
    let server = directory.serve("disk", &[]);
    let id = server.id().to_string();
    let same = directory.fails(5, &["serve", "disk", "--nbd", "unix:other.sock"]);
    assert!(same.contains(&id) && same.contains("onecopy disk stop disk"), "{same}");
    // With a control socket of its own it meets the disk's lease.
    let other = ["serve", "disk", "--nbd", "unix:other.sock", "--control", "other.control", "--lease-timeout", "0"];
    let leased = directory.fails(5, &other);
    assert!(leased.contains(&id), "{leased}");
    // And the first one serves on.
    directory.io("disk", &["write -P 1 0 64k", "flush"]);
    server.terminate();
    assert!(!directory.path("disk/control.sock").exists());
}

/// An orderly end keeps the page map, commands at rest do, too; a killed server's is scanned again.
///
/// After a kill it is built again in the background (with B54).
///
/// Spec: L5, A8
#[test]
fn b54_an_orderly_end_keeps_the_page_map_and_a_killed_servers_is_scanned_again() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "16M"]);
    let known = || directory.info("disk")["served"]["page_map"]["known_blocks"].as_u64();
    let origin = || directory.info("disk")["served"]["page_map"]["origin"].as_str().map(str::to_owned);
    let server = directory.serve("disk", &["--scan-limit", "0"]);
    directory.io("disk", &["write -P 7 0 1M", "flush"]);
    assert_eq!(known(), Some(256));
    server.terminate();
    // Commands at rest do not lose it either.
    directory.done(&["snapshot", "disk", "monday"]);
    let server = directory.serve("disk", &["--scan-limit", "0"]);
    assert_eq!((origin(), known()), (Some("loaded".to_owned()), Some(256)));
    server.kill();
    let server = directory.serve("disk", &["--scan-limit", "0"]);
    assert_eq!((origin(), known()), (Some("empty".to_owned()), Some(0)));
    server.kill();
    let server = directory.serve("disk", &[]);
    until("all is scanned", || known() == Some(256));
    server.terminate();
    let server = directory.serve("disk", &["--no-page-map"]);
    assert!(directory.info("disk")["served"]["page_map"].is_null());
    server.terminate();
}

/// Spec: L5
#[test]
fn b55_the_control_socket_answers_each_line_and_survives_nonsense() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "16M"]);
    let server = directory.serve("disk", &[]);
    let ask = |lines: &[u8]| {
        let mut stream = UnixStream::connect(directory.path("disk/control.sock")).unwrap();
        // A server that hangs up early is one of the answers.
        let _ = stream.write_all(lines);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    let answers = ask(b"{\"command\":\"flush\"}\nnonsense\n{\"command\":\"snapshot\",\"name\":\"a\"}\n\xff\xfe\n{}\n");
    let kinds: Vec<bool> = answers.lines().map(|line| line.starts_with("{\"ok\"")).collect();
    assert_eq!(kinds, [true, false, true, false, false], "{answers}");
    assert_eq!(ask(&vec![b'x'; 1 << 20]), "");
    assert_eq!(ask(b"{\"command\":\"stop\""), "", "half a line is no request");
    let held = ask(b"{\"command\":\"hold\",\"what\":\"flushes\"}\n{\"command\":\"release\",\"epoch\":1}\n");
    assert_eq!(held, "{\"ok\":null}\n{\"ok\":null}\n");
    directory.io("disk", &["write -P 1 0 64k", "flush"]);
    server.terminate();
}

/// Spec: L5
#[test]
fn b56_metrics_are_those_of_the_guide_and_tell_what_was_done() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "16M"]);
    let listen = format!("127.0.0.1:{}", free_port());
    let server = directory.serve("disk", &["--metrics", &listen]);
    directory.io("disk", &["write -P 7 0 1M", "flush"]);
    let mut stream = TcpStream::connect(&listen).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let names: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(names.len() > 20, "{page}");
    let guide = include_str!("../../../../docs/guide/metrics.md");
    for name in names {
        assert!(guide.contains(&format!("`{name}`")), "the guide does not name the metric {name}");
    }
    let value = |name: &str| {
        let line = page
            .lines()
            .find(|line| line.starts_with(&format!("{name}{{")))
            .unwrap_or_else(|| panic!("{name}: {page}"));
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(value("onecopy_disk_attached"), 1);
    assert_eq!(value("onecopy_disk_written_bytes_total"), 1 << 20);
    assert_eq!(value("onecopy_pagemap_known_blocks"), 256);
    server.terminate();
}

/// Spec: C5
#[test]
fn b57_read_only_clients_cannot_write() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "16M"]);
    let server = directory.serve("disk", &[]);
    directory.io("disk", &["write -P 7 0 1M", "flush"]);
    server.terminate();
    directory.done(&["export", "disk", "before.raw"]);
    let server = directory.serve("disk", &["--read-only"]);
    let url = format!("nbd+unix:///?socket={}", directory.socket("disk").display());
    let written = std::process::Command::new("qemu-io").args(["-f", "raw", &url, "-c", "write 0 4k"]).output().unwrap();
    assert!(!written.status.success(), "{written:?}");
    let read = std::process::Command::new("qemu-io").args(["-r", "-f", "raw", &url, "-c", "read -P 7 0 1M"]).output();
    let read = read.unwrap();
    assert!(read.status.success() && !String::from_utf8_lossy(&read.stdout).contains("failed"), "{read:?}");
    server.terminate();
    directory.done(&["export", "disk", "after.raw"]);
    assert!(are_equal(&directory.path("before.raw"), &directory.path("after.raw")));
    assert!(fs::metadata(directory.path("disk")).unwrap().is_dir());
}

/// A disk is not offered in the clear to other hosts unless that is asked for, and a file named as a socket by mistake
/// stays.
///
/// Spec: C3
#[test]
fn b59_a_disk_is_not_offered_to_other_hosts_in_the_clear_unasked() {
    let directory = DiskDirectory::new();
    directory.done(&["create", "disk", "--size", "16M"]);
    let refused = directory.fails(1, &["serve", "disk", "--nbd", "127.0.0.1:0", "--nbd", "0.0.0.0:0"]);
    assert!(refused.contains("0.0.0.0:0") && refused.contains("--nbd-unencrypted"), "{refused}");
    let server = directory.serve("disk", &["--nbd", "127.0.0.1:0", "--nbd", "0.0.0.0:0", "--nbd-unencrypted"]);
    server.terminate();
    // A file that is named by mistake stays.
    let refused = directory.fails(1, &["serve", "disk", "--nbd", "unix:a.sock", "--control", "disk/data"]);
    assert!(refused.contains("disk/data"), "{refused}");
    directory.done(&["check", "disk"]);
}
