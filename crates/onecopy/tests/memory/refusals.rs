//! What is refused, with which words and which exit code.

use onecopy_testing::until;

use crate::cluster::{CONFIGURATION, START_BYTES, configure, pool_bytes, up};
use crate::directory::ClusterDirectory;

/// Spec: A6
#[test]
fn sizes_that_cannot_be_are_refused_with_the_figures() {
    let directory = up(CONFIGURATION, 0);
    until("it tells its pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
    for (size, words) in [("1MB", "its floor is 126MB"), ("0B", "its floor is"), ("513MB", "its ceiling is 512MB")] {
        let complaint = directory.run(&["memory", "set", "leader", size]).refused(1);
        assert!(complaint.contains(words), "{size}: {complaint}");
    }
    for size in ["", "-1", "NaN", "1e99 PB", "99999999PB", "300", "101%", "1 XB", "'; DROP TABLE x"] {
        let complaint = directory.run(&["memory", "set", "--", "leader", size]).refused(2);
        assert!(complaint.contains("is not a size"), "{size}: {complaint}");
    }
    let complaint = directory.run(&["memory", "set", "follower-9", "200MB"]).refused(1);
    assert!(complaint.contains("\"follower-9\"") && complaint.contains("there are: leader"), "{complaint}");
    let complaint = directory.run(&["memory", "auto", "on", "nobody"]).refused(1);
    assert!(complaint.contains("there are: leader"), "{complaint}");
    directory.run(&["memory", "auto", "maybe"]).refused(2);
    directory.run(&["memory", "set", "../x", "200MB"]).refused(2);
    until("it tells the same pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
}

#[test]
fn nobody_there_is_said_with_the_remedy() {
    let directory = ClusterDirectory::new();
    for command in
        [&["memory", "status"][..], &["memory", "history"], &["memory", "set", "x", "1GB"], &["memory", "auto", "on"]]
    {
        let complaint = directory.run(command).refused(3);
        assert!(complaint.contains("onecopy up --dir"), "{complaint}");
        let complaint = directory.run(&[command, &["--socket=/nonexistent.sock"]].concat()).refused(3);
        assert!(complaint.contains("onecopy memory agent"), "{complaint}");
    }
    assert!(!directory.path().exists());
}

#[test]
fn a_wrong_configuration_starts_nothing() {
    let directory = ClusterDirectory::new();
    for (text, words) in [
        ("[memory]\nceiling = \"1 XB\"\n", "line 2, column 11"),
        ("[memory]\nsize = \"1GB\"\n", "unknown field `size`"),
        ("[memory]\nlevel = \"own\"\n", "own_allowed = true"),
        ("[memory.server.leadr]\nweight = 2.0\n", "called leader, follower-1"),
        ("[[memory.instance]]\nname = \"leader\"\nkind = \"mariadb\"\nsocket = \"/x\"\n", "another `name`"),
    ] {
        configure(&directory, text);
        for up in [&["up", "--detach", "--port=0"][..], &["up", "--port=0"]] {
            let complaint = directory.run(up).refused(4);
            assert!(complaint.contains(words), "{complaint}");
        }
        assert_eq!(directory.postmasters(), []);
    }
}

/// Memory is changed over the daemon's own socket only, and clients of the router may look.
///
/// Spec: C2
#[test]
fn memory_is_changed_on_the_socket_only() {
    let directory = up(CONFIGURATION, 0);
    until("it tells its pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
    for (path, body) in
        [("/memory/set", "{\"instance\":\"leader\",\"size\":\"200MB\"}"), ("/memory/auto", "{\"automatic\":true}")]
    {
        let answer = directory.post_to_page(path, body);
        assert!(answer.starts_with("HTTP/1.0 404"), "{answer}");
    }
    until("it tells the same pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
}
