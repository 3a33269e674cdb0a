//! Version 2 on recorded files. Version 1 is tried on a real host in tests/host/cgroup.rs.

use std::fs;
use std::path::Path;

use super::*;

const MIB: u64 = 1 << 20;

/// A host of version 2 in a directory, with the files that the kernel would make for an instance `a`.
fn recorded() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for (path, content) in [
        ("proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("proc/7/cgroup", "0::/user.slice/session-1.scope\n"),
        ("proc/8/cgroup", "0::/system.slice/postgresql@15-main.service\n"),
        ("proc/9/cgroup", "0::/pod\n"),
        ("proc/10/cgroup", "0::/pod/onecopy/a\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
        ("sys/fs/cgroup/cgroup.subtree_control", "\n"),
        ("sys/fs/cgroup/pod/memory.current", "1\n"),
        ("sys/fs/cgroup/pod/memory.max", "1000000000\n"),
        ("sys/fs/cgroup/onecopy/cgroup.subtree_control", "\n"),
        ("sys/fs/cgroup/onecopy/a/cgroup.procs", ""),
        ("sys/fs/cgroup/onecopy/a/memory.current", "209715200\n"),
        ("sys/fs/cgroup/onecopy/a/memory.stat", "active_file 0\ninactive_file 52428800\n"),
        ("sys/fs/cgroup/onecopy/a/memory.max", "max\n"),
        ("sys/fs/cgroup/onecopy/a/memory.high", "max\n"),
        ("sys/fs/cgroup/onecopy/a/memory.swap.max", "max\n"),
    ] {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("it has one")).expect("a directory");
        fs::write(path, content).expect("a file");
    }
    root
}

fn name(text: &str) -> InstanceName {
    text.parse().expect("a name")
}

fn group(host: &Arc<Host>, root: &Path) -> InstanceGroup {
    InstanceGroup::create(host, &root.join("sys/fs/cgroup"), &name("a")).expect("all files are there")
}

#[test]
fn a_limit_keeps_away_from_what_is_used_and_all_files_are_written() {
    let root = recorded();
    let host = Arc::new(Host::recorded(root.path()).expect("readable"));
    let group = group(&host, root.path());
    assert_eq!(group.name(), "/onecopy/a");
    let file = |name: &str| fs::read_to_string(group.directory().join(name)).expect("a file");
    assert_eq!(
        fs::read_to_string(root.path().join("sys/fs/cgroup/cgroup.subtree_control")).expect("a file"),
        "+memory"
    );

    // 200 MiB are used, 50 MiB of them clean page cache: 166 MiB is the least, and with these files nothing is ever
    // reclaimed.
    let limits = |mib: u64| Limits { max_bytes: Some(mib * MIB), ..Limits::default() };
    for mib in [100, 165, 166, 199] {
        let error = group.limit(&limits(mib)).expect_err("less than is used").to_string();
        assert!(error.contains("/onecopy/a") && error.contains(&format!("{mib}MB")), "{error}");
        assert_eq!((file("memory.max").trim(), file("memory.high").trim()), ("max", "max"), "nothing has changed");
    }
    let high = Limits { high_bytes: Some(180 * MIB), swap_max_bytes: Some(0), ..limits(256) };
    group.limit(&high).expect("enough");
    assert_eq!(file("memory.max"), (256 * MIB).to_string());
    assert_eq!((file("memory.high"), file("memory.swap.max")), ((180 * MIB).to_string(), "0".to_owned()));
    group.limit(&Limits::default()).expect("no limit is always right");
    assert_eq!((file("memory.max").as_str(), file("memory.swap.max").as_str()), ("max", "max"));
    let error = group.limit(&Limits { swappiness: Some(0), ..Limits::default() }).expect_err("not in version 2");
    assert!(error.to_string().contains("swappiness"), "{error}");
}

#[test]
fn a_raised_limit_is_no_danger_even_when_it_is_too_low() {
    let root = recorded();
    let host = Arc::new(Host::recorded(root.path()).expect("readable"));
    let group = group(&host, root.path());
    fs::write(group.directory().join("memory.max"), "1000000\n").expect("a file");
    fs::write(group.directory().join("memory.current"), "1000000\n").expect("a file");
    group.limit(&Limits { max_bytes: Some(2_000_000), ..Limits::default() }).expect("more than before");
}

#[test]
fn an_instance_stays_below_the_limits_that_it_has() {
    let root = recorded();
    let host = Arc::new(Host::recorded(root.path()).expect("readable"));
    let parent = |pid| parent_of(&host, pid, &name("a"));
    let mount = root.path().join("sys/fs/cgroup");
    assert_eq!(parent(7).expect("nothing limits it"), mount);
    assert_eq!(parent(9).expect("a container limits it"), mount.join("pod"));
    assert_eq!(parent(10).expect("it is there already"), mount.join("pod"));
    let error = parent(8).expect_err("it is systemd's").to_string();
    assert!(error.contains("postgresql@15-main.service") && error.contains("MemoryMax="), "{error}");
    assert!(parent(11).is_err(), "no such process");
}

#[test]
fn a_host_without_the_controller_is_told_so() {
    let root = recorded();
    let missing = Arc::new(Host::recorded(root.path()).expect("readable"));
    let error = InstanceGroup::create(&missing, &root.path().join("sys/fs/cgroup"), &name("b")).expect_err("no kernel");
    assert!(error.to_string().contains("handed") || error.to_string().contains("controller"), "{error}");
    fs::write(root.path().join("sys/fs/cgroup/cgroup.controllers"), "cpu\n").expect("a file");
    let host = Arc::new(Host::recorded(root.path()).expect("readable"));
    for error in [
        InstanceGroup::create(&host, &root.path().join("sys/fs/cgroup"), &name("a")).expect_err("no controller"),
        parent_of(&host, 7, &name("a")).expect_err("no controller"),
    ] {
        assert!(error.to_string().contains("no controller for memory"), "{error}");
    }
}
