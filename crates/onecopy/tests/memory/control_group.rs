//! Control groups of a cluster's servers, on the host as it is: made, limited, taken over, removed.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use onecopy_memory::pressure::Host;
use onecopy_testing::process::{children_of, kill, lives};
use onecopy_testing::{skip, until};
use serde_json::Value;

use crate::cluster::{CONFIGURATION, MIB, START_BYTES, configure, instance, pool_bytes, status};
use crate::directory::ClusterDirectory;

/// The kernel's control groups; none, and the test is left out, where there are none for memory. A cluster that cannot
/// go without them is told so there.
fn host(test: &str) -> Option<Host> {
    let host = Host::new().expect("the kernel's files");
    if host.hierarchy().is_some() {
        return Some(host);
    }
    let directory = ClusterDirectory::new();
    configure(&directory, &format!("{CONFIGURATION}cgroup = \"on\"\n"));
    let complaint = directory.run(&["up", "--detach", "--port=0", "--replicas=0"]).refused(1);
    assert!(complaint.contains("no controller for memory"), "{complaint}");
    assert_eq!(directory.postmasters(), []);
    skip(test, "the kernel has no controller for memory");
    None
}

fn group_of(host: &Host, process: u32) -> PathBuf {
    host.group_of(process).expect("it lives").expect("it is in one")
}

/// The limit of its own group, as the agent sees it.
fn limit_of(directory: &ClusterDirectory, name: &str) -> Value {
    instance(&status(directory), name)["observation"]["limits"][0].clone()
}

/// A server lives in a control group of its own with a limit, where that is wanted, from its start over its restarts to
/// its end; followers that come and go, too.
///
/// Spec: A6
#[test]
fn a_server_lives_in_a_limited_group_from_start_to_end() {
    let Some(host) = host("a_server_lives_in_a_limited_group_from_start_to_end") else { return };
    let directory = ClusterDirectory::new();
    configure(&directory, &format!("{CONFIGURATION}cgroup = \"on\"\nlimit = \"1GB\"\n"));
    directory.up(1);
    let mut groups = Vec::new();
    for name in ["leader", "follower-1"] {
        let first = directory.postmaster(name);
        let group = group_of(&host, first);
        let own = group.file_name().expect("it has a name").to_string_lossy().into_owned();
        assert!(own.starts_with(&format!("{name}.")) && group.parent().expect("it has one").ends_with("onecopy"));
        // Processes that are just ending are shown in the root.
        until("all that it has started is there, too", || {
            let children = children_of(first);
            !children.is_empty()
                && children.into_iter().all(|child| host.group_of(child).is_ok_and(|now| now.as_ref() == Some(&group)))
        });
        until("it tells its limit", || limit_of(&directory, name)["limit_bytes"] == 1024 * MIB);
        groups.push(group);
    }
    assert_ne!(groups[0], groups[1]);

    let before = limit_of(&directory, "leader")["usage_bytes"].as_u64().expect("a number");
    directory
        .superuser_sql("leader", "CREATE TABLE much AS SELECT g, repeat('x', 1000) FROM generate_series(1, 100000) g");
    until("what it writes is counted there", || {
        limit_of(&directory, "leader")["usage_bytes"].as_u64().expect("a number") > before + 100 * MIB
    });
    let table = directory.run(&["memory", "status"]).ok();
    assert!(table.contains("  cgroup /") && table.contains(" of 1GB, "), "{table}");
    let (_, metrics) = directory.page("/metrics");
    let limit = format!("onecopy_memory_cgroup_limit_bytes{{instance=\"leader\"}} {}\n", 1024 * MIB);
    assert!(metrics.contains(&limit), "{metrics}");

    // Restarted by its supervisor: a new first process.
    let killed = directory.postmaster("follower-1");
    kill(killed);
    until("it is there again, in its group", || {
        let found = directory.postmasters().into_iter().find(|(server, _)| server == "follower-1");
        found.is_some_and(|(_, now)| {
            now != killed && host.group_of(now).is_ok_and(|now| now.as_ref() == Some(&groups[1]))
        })
    });
    directory.run(&["down"]).ok();
    assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
}

/// A daemon that is killed leaves the groups to the next one, and to `down`.
///
/// Spec: A3
#[test]
fn a_killed_daemon_leaves_the_group_to_the_next_one() {
    let Some(host) = host("a_killed_daemon_leaves_the_group_to_the_next_one") else { return };
    let directory = ClusterDirectory::new();
    configure(&directory, &format!("{CONFIGURATION}cgroup = \"auto\"\nlimit = \"1GB\"\n"));
    directory.up(0);
    let first = directory.postmaster("leader");
    let group = group_of(&host, first);
    directory.kill_daemon();
    assert!(lives(first) && group_of(&host, first) == group);

    configure(&directory, &format!("{CONFIGURATION}cgroup = \"auto\"\nlimit = \"1.5GB\"\n"));
    directory.up(0);
    assert_eq!(directory.postmaster("leader"), first, "the server runs on");
    assert_eq!(group_of(&host, first), group);
    until("the new limit holds", || limit_of(&directory, "leader")["limit_bytes"] == 1536 * MIB);

    // Nobody's daemon: `down` finds the group by its server.
    directory.kill_daemon();
    directory.run(&["down"]).ok();
    assert!(!lives(first) && !group.exists(), "{}", group.display());

    directory.up(0);
    directory.kill_daemon();
    let first = directory.postmaster("leader");
    configure(&directory, CONFIGURATION);
    directory.up(0);
    assert!(!group.exists(), "groups are not wanted any more");
    assert!(lives(first) && group_of(&host, first) != group);
}

/// Spec: L4
#[test]
fn a_size_above_a_limit_is_refused_and_the_limit_stays() {
    let Some(host) = host("a_size_above_a_limit_is_refused_and_the_limit_stays") else { return };
    let directory = ClusterDirectory::new();
    configure(&directory, &format!("{CONFIGURATION}cgroup = \"on\"\nlimit = \"1GB\"\n"));
    directory.up(0);
    until("it tells its pool", || pool_bytes(&directory, "leader") == Some(START_BYTES));
    let group = group_of(&host, directory.postmaster("leader"));
    // Somebody has lowered it from outside, so that the ceiling does not fit any more.
    let files = ["memory.max", "memory.limit_in_bytes"].map(|file| group.join(file));
    let file = files.iter().find(|file| file.exists()).expect("one of them");
    std::fs::write(file, (400 * MIB).to_string()).expect("root may lower it");
    until("it tells that limit", || limit_of(&directory, "leader")["limit_bytes"] == 400 * MIB);
    let complaint = directory.run(&["memory", "set", "leader", "500MB"]).refused(1);
    assert!(complaint.contains("limited to 400MB") && complaint.contains("raise the limit"), "{complaint}");
    directory.run(&["memory", "set", "leader", "200MB", "--wait"]).ok();
    assert_eq!(limit_of(&directory, "leader")["limit_bytes"], 400 * MIB);
}

/// Spec: L4
#[test]
fn a_limit_that_the_pool_does_not_fit_into_starts_nothing() {
    let directory = ClusterDirectory::new();
    configure(&directory, &format!("{CONFIGURATION}cgroup = \"auto\"\nlimit = \"600MB\"\n"));
    let complaint = directory.run(&["up", "--detach", "--port=0", "--replicas=0"]).refused(4);
    assert!(complaint.contains("its pool may have 512MB") && complaint.contains("at least 810MB"), "{complaint}");
    assert_eq!(directory.postmasters(), []);
}

/// Spec: A6
#[test]
fn followers_that_come_and_go_have_groups_that_come_and_go() {
    let Some(host) = host("followers_that_come_and_go_have_groups_that_come_and_go") else { return };
    let directory = ClusterDirectory::new();
    configure(&directory, &format!("{CONFIGURATION}cgroup = \"on\"\n"));
    directory.up(0);
    directory.run(&["scale", "1", "--mode=lazy"]).ok();
    let follower = directory.postmaster("follower-1");
    until("it is moved", || group_of(&host, follower).parent().is_some_and(|ours| ours.ends_with("onecopy")));
    let group = group_of(&host, follower);
    directory.run(&["scale", "0"]).ok();
    until("its group is removed", || !group.exists());
    assert!(group_of(&host, directory.postmaster("leader")).exists());
}

/// Runs `up` where nobody may make groups, as in most containers.
fn up_in_a_container(host: &Host, directory: &ClusterDirectory) -> std::process::Output {
    let mount = &host.hierarchy().expect("it was looked for").mount_point;
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", "mount -o bind,remount,ro \"$0\" && exec \"$@\""]).arg(mount);
    command.arg(env!("CARGO_BIN_EXE_onecopy")).args(["up", "--detach", "--port=0", "--replicas=1"]);
    command.env("ONECOPY_DIR", directory.path()).stdin(Stdio::null()).output().expect("run unshare")
}

/// A host that allows no groups is told of once, or nothing is started; a limit that pool and processes do not fit into
/// is refused; a size above a limit, too, and the limit stays.
///
/// Spec: L4
#[test]
fn a_host_that_allows_no_groups_is_told_once_or_refused() {
    let Some(host) = host("a_host_that_allows_no_groups_is_told_once_or_refused") else { return };
    let directory = ClusterDirectory::new();
    configure(&directory, &format!("{CONFIGURATION}cgroup = \"on\"\n"));
    let refused = up_in_a_container(&host, &directory);
    let complaint = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(complaint.contains("mounted read-only") && complaint.contains("set the limit where"), "{complaint}");
    assert_eq!(directory.postmasters(), []);

    configure(&directory, &format!("{CONFIGURATION}cgroup = \"auto\"\n"));
    let told = up_in_a_container(&host, &directory);
    assert!(told.status.success(), "{told:?}");
    let words = [told.stdout, told.stderr].concat();
    let words = String::from_utf8_lossy(&words);
    assert_eq!(words.matches("without a control group of their own").count(), 1, "{words}");
    assert_eq!(directory.postmasters().len(), 2);
}
