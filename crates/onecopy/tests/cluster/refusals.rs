//! What is refused, with which words and which exit code.

use std::net::TcpListener;
use std::process::Command;

use crate::directory::ClusterDirectory;

/// Two daemons never share a directory; the second names the first.
///
/// Spec: A3
#[test]
fn c13_two_daemons_never_share_a_directory() {
    let directory = ClusterDirectory::new();
    directory.up(0);
    let complaint = directory.run(&["up", "--detach"]).refused(5);
    assert!(complaint.contains(&format!("process {}", directory.daemon())), "{complaint}");
    let complaint = directory.run(&["up"]).refused(5);
    assert!(complaint.contains("onecopy down"), "{complaint}");
    assert_eq!(directory.sql("SELECT 1"), "1");
}

/// A directory with other files is refused and left as it is.
///
/// Spec: L4
#[test]
fn c14_a_directory_that_cannot_be_one_is_left_alone() {
    let directory = ClusterDirectory::new();
    std::fs::create_dir(directory.path()).expect("make it");
    std::fs::write(directory.path().join("letter.txt"), "dear").expect("write");
    let complaint = directory.run(&["up", "--detach"]).refused(1);
    assert!(complaint.contains("letter.txt"), "{complaint}");
    assert_eq!(std::fs::read_dir(directory.path()).expect("read").count(), 1);

    let file = directory.path().join("letter.txt");
    for (dir, word) in
        [(file.join("below"), "letter.txt"), (file.clone(), "letter.txt"), ("/nonexistent/a/b".into(), "/nonexistent")]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_onecopy")).arg("up").arg("--dir").arg(dir).output().expect("run");
        assert_eq!(output.status.code(), Some(1));
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(complaint.contains(word), "{complaint}");
    }
}

/// Where no cluster is, no command but `up` makes anything.
///
/// Spec: L4
#[test]
fn c15_where_no_cluster_is_nothing_is_made() {
    let directory = ClusterDirectory::new();
    for command in [&["status"][..], &["down"], &["dsn"], &["psql"]] {
        let complaint = directory.run(command).refused(3);
        assert!(complaint.contains("onecopy up --dir"), "{command:?}: {complaint}");
    }
    assert!(!directory.path().exists());
}

/// A port in use is named before anything is made.
///
/// Spec: L4
#[test]
fn c16_a_port_in_use_is_named_and_nothing_runs_on() {
    let directory = ClusterDirectory::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    for option in ["--port", "--metrics-port"] {
        let other = if option == "--port" { "--metrics-port=0" } else { "--port=0" };
        let complaint =
            directory.run(&["up", "--detach", "--replicas=0", &format!("{option}={port}"), other]).refused(1);
        assert!(complaint.contains(&port), "{complaint}");
        assert_eq!(directory.postmasters(), []);
    }
}

/// PostgreSQL's programs that are not found are named with the remedy.
///
/// Spec: L4
#[test]
fn c17_programs_that_are_not_there_are_named() {
    let directory = ClusterDirectory::new();
    let complaint = directory.run(&["up", "--detach", "--pg-bindir=/nonexistent/bin"]).refused(1);
    assert!(complaint.contains("/nonexistent/bin") && complaint.contains("--pg-bindir"), "{complaint}");
}

/// A wrong `onecopy.toml` is refused with line, column and what to write.
///
/// Spec: L4
#[test]
fn c18_a_wrong_configuration_is_refused_with_its_place() {
    let directory = ClusterDirectory::new();
    std::fs::create_dir(directory.path()).expect("make it");
    let file = directory.path().join("onecopy.toml");
    let path = file.to_str().expect("a plain path");
    let example = directory.run(&["config", "show"]).ok();
    std::fs::write(&file, &example).expect("write");
    assert!(directory.run(&["config", "check", path]).ok().contains("is good"));
    std::fs::write(&file, example.replace("clients_max", "clients_min")).expect("write");
    for command in [&["config", "check", path][..], &["router", "--config", path]] {
        let complaint = directory.run(command).refused(4);
        let line = example.lines().position(|line| line.starts_with("clients_max")).expect("a setting") + 1;
        assert!(complaint.contains(&format!("line {line}, column 1: unknown field `clients_min`")), "{complaint}");
    }
    assert!(directory.run(&["config", "check", "/nonexistent.toml"]).refused(4).contains("config show"));
}
