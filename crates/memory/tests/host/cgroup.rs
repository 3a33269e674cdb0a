//! Cgroups of instances on the real host, of whichever version it has.

use onecopy_memory::MemoryError;
use onecopy_memory::cgroup::{InstanceGroup, Limits};
use onecopy_testing::process::children_of;
use onecopy_testing::{skip, until};

use crate::squeezed::{Family, Group, MIB, host, name};

/// A process that has `mib` of memory of its own, and keeps it: `tail` holds a line that does not end.
fn hoarder(mib: u64) -> String {
    format!("(head -c {} /dev/zero; sleep 1000) | tail", mib * MIB)
}

#[test]
fn a_server_and_all_that_it_starts_live_in_its_cgroup_until_it_is_removed() {
    let Some(host) = host("a_server_and_all_that_it_starts_live_in_its_cgroup_until_it_is_removed") else { return };
    let mut family = Family::waiting("sleep 1000 & sleep 1000 & wait");
    let home = host.group_of(family.pid()).expect("it lives").expect("it is in one");
    family.go();
    let children = || children_of(family.pid());
    until("there are two children", || children().len() == 2);

    let mut group = Group::new(&host, "family");
    assert_eq!(group.get().take_in(family.pid()).expect("root may move it"), 3);
    assert_eq!(group.get().take_in(family.pid()).expect("they are there already"), 0);
    let directory = group.get().directory().to_owned();
    for pid in children().into_iter().chain([family.pid()]) {
        assert_eq!(host.group_of(pid).expect("it lives"), Some(directory.clone()));
    }
    let limits = Limits { max_bytes: Some(64 * MIB), ..Limits::default() };
    group.get().limit(&limits).expect("they use less");
    let seen = host.limits_of(children()[0]).expect("it lives");
    assert_eq!((seen[0].cgroup.as_str(), seen[0].limit_bytes), (group.get().name().as_str(), Some(64 * MIB)));

    let parent = host.hierarchy().expect("it was looked for").mount_point.clone();
    let again = InstanceGroup::create(&host, &parent, &name("family")).expect("the next one takes it over");
    assert_eq!(again.directory(), directory);
    group.remove();
    assert!(!directory.exists());
    for pid in children().into_iter().chain([family.pid()]) {
        assert_eq!(host.group_of(pid).expect("it lives on"), Some(home.clone()));
    }
}

#[test]
fn a_limit_below_what_is_used_is_refused_and_nobody_is_killed() {
    let Some(host) = host("a_limit_below_what_is_used_is_refused_and_nobody_is_killed") else { return };
    let mut group = Group::new(&host, "refused");
    let mut family = Family::waiting(&hoarder(100));
    group.get().take_in(family.pid()).expect("root may move it");
    family.go();
    let memory = |group: &mut Group| group.get().memory().expect("readable").expect("it is there");
    until("100 MiB are used", || memory(&mut group).unreclaimable_bytes() >= 100 * MIB);

    let limit = |group: &mut Group, mib: u64| {
        let limits = Limits { max_bytes: Some(mib * MIB), ..Limits::default() };
        group.get().limit(&limits)
    };
    for mib in [0, 1, 64, 110] {
        let error = limit(&mut group, mib).expect_err("more is used");
        assert!(matches!(error, MemoryError::LimitBelowUsage { .. }), "{error}");
        assert_eq!(memory(&mut group).limit_bytes, None, "nothing has changed");
    }
    limit(&mut group, 200).expect("less is used");
    assert_eq!(memory(&mut group).limit_bytes, Some(200 * MIB));
    limit(&mut group, 150).expect("less is used");
    limit(&mut group, 300).expect("more is always right");
    group.get().limit(&Limits::default()).expect("none is always right");
    let after = memory(&mut group);
    assert_eq!((after.limit_bytes, after.oom_kills), (None, 0));
    assert!(after.unreclaimable_bytes() >= 100 * MIB);
}

#[test]
fn swap_is_limited_with_memory_in_any_order_of_sizes() {
    let Some(host) = host("swap_is_limited_with_memory_in_any_order_of_sizes") else { return };
    let mut group = Group::new(&host, "swap");
    let both = |max: u64, swap: u64| Limits {
        max_bytes: Some(max * MIB),
        swap_max_bytes: Some(swap * MIB),
        ..Limits::default()
    };
    if let Err(error) = group.get().limit(&both(64, 0)) {
        assert!(error.to_string().contains("swap"), "{error}");
        skip("swap_is_limited_with_memory_in_any_order_of_sizes", &error.to_string());
        return;
    }
    for (max, swap) in [(128, 64), (64, 1000), (512, 0), (32, 0), (1024, 1024)] {
        group.get().limit(&both(max, swap)).expect("nothing is used");
        assert_eq!(group.get().memory().expect("readable").expect("there").limit_bytes, Some(max * MIB));
    }
    group.get().limit(&Limits::default()).expect("none is always right");
    assert_eq!(group.get().memory().expect("readable").expect("there").limit_bytes, None);
}

#[test]
fn a_kill_for_lack_of_memory_is_counted() {
    let Some(host) = host("a_kill_for_lack_of_memory_is_counted") else { return };
    let mut group = Group::new(&host, "killed");
    let limits = Limits { max_bytes: Some(32 * MIB), swap_max_bytes: Some(0), ..Limits::default() };
    if group.get().limit(&limits).is_err() {
        // Where swap is not counted the host has none either.
        group.get().limit(&Limits { swap_max_bytes: None, ..limits }).expect("nothing is used");
    }
    // The control of the tests above: this is what they keep away.
    let mut family = Family::waiting(&format!("head -c {} /dev/zero | tail", 100 * MIB));
    group.get().take_in(family.pid()).expect("root may move it");
    family.go();
    family.wait();
    let memory = group.get().memory().expect("readable").expect("it is there");
    assert!(memory.oom_kills >= 1, "{memory:?}");
}
