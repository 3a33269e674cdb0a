//! Pressure as the real host tells it.

use std::fs;

use onecopy_memory::cgroup::{Limits, parent_of};
use onecopy_memory::pressure::{Host, Source};
use onecopy_testing::{WAIT_MAX, skip};

use crate::squeezed::{Family, Group, MIB, host, name};

#[test]
fn the_figures_of_this_host_make_sense() {
    let host = Host::new().expect("the kernel's files can be read");
    let pressure = host.pressure().expect("they are whole");
    assert!(pressure.total_bytes > 64 * MIB && pressure.available_bytes <= pressure.total_bytes, "{pressure:?}");
    let has_psi = fs::read("/proc/pressure/memory").is_ok();
    assert_eq!((pressure.psi_some_avg10.is_some(), pressure.psi_full_avg10.is_some()), (has_psi, has_psi));
    let memory = host.memory().expect("they are whole");
    assert!(memory.shared_bytes <= memory.total_bytes && memory.huge_page_bytes >= MIB, "{memory:?}");
    host.limits_of(std::process::id()).expect("this process is in some cgroup");
    assert!(host.limits_of(u32::MAX).is_err(), "there is no such process");
}

#[test]
fn every_limit_above_a_process_is_found() {
    let Some(host) = host("every_limit_above_a_process_is_found") else { return };
    let mut outer = Group::new(&host, "outer");
    let limits = |mib: u64| Limits { max_bytes: Some(mib * MIB), ..Limits::default() };
    outer.get().limit(&limits(512)).expect("nothing is used");
    let outer_directory = outer.get().directory().to_owned();
    let family = Family::waiting("sleep 1000");
    let parent = parent_of(&host, family.pid(), &name("inner"));
    if host.limits_of(family.pid()).expect("it lives").is_empty() {
        assert_eq!(parent.expect("it may have one"), host.hierarchy().expect("it was looked for").mount_point);
    }
    let mut inner = Group::below(&host, &outer_directory, "inner");
    inner.get().take_in(family.pid()).expect("root may move it");
    let bounds = |host: &Host| {
        let limits = host.limits_of(family.pid()).expect("it lives");
        limits.iter().map(|limit| limit.limit_bytes.expect("no other is set") / MIB).collect::<Vec<_>>()
    };
    assert_eq!(bounds(&host), [512]);
    inner.get().limit(&limits(256)).expect("little is used");
    assert_eq!(bounds(&host), [256, 512]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_wakes_who_waits_for_it() {
    let Some(host) = host("a_stall_wakes_who_waits_for_it") else { return };
    if host.pressure().expect("they are whole").psi_some_avg10.is_none() {
        skip("a_stall_wakes_who_waits_for_it", "the kernel has no PSI");
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory on a disk");
    let file = directory.path().join("file");
    // Written by somebody else, to the disk: those who read it can give back each page, and none of them is killed.
    fs::write(&file, vec![0; 96 * MIB as usize]).expect("there is room");
    let written = fs::File::open(&file).expect("it is there");
    written.sync_all().expect("written");
    rustix::fs::fadvise(&written, 0, None, rustix::fs::Advice::DontNeed).expect("it is a file");

    let mut group = Group::new(&host, "stalled");
    // Four readers whose pages never stay: each read waits for memory.
    let reader = format!("while :; do cat {} > /dev/null; done &", file.display());
    let script = format!("{} wait", reader.repeat(4));
    let mut family = Family::waiting(&script);
    group.get().take_in(family.pid()).expect("root may move it");
    // The limit is set before anything is used.
    group.get().limit(&Limits { max_bytes: Some(20 * MIB), ..Limits::default() }).expect("little is used");
    let stalled = host.stalled();
    family.go();
    // Others on this host may stall, too: the first word need not be about these.
    tokio::time::timeout(WAIT_MAX, stalled).await.expect("the kernel tells of it");
    tokio::time::timeout(WAIT_MAX, host.stalled()).await.expect("and tells of it again while it lasts");
    let memory = group.get().memory().expect("readable").expect("it is there");
    assert!(memory.limit_hits > 0 && memory.oom_kills == 0, "{memory:?}");
}
