//! Clones that are made and filled while nothing goes wrong.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use onecopy_clone::image::Image;
use onecopy_clone::service::{CloneState, HYDRATOR_COMMAND, Service, SpareWanted};
use onecopy_testing::process::kill;
use onecopy_testing::{FileSystem, MountedDisk, TestDirectory, USER, WAIT_MAX, until_async};

use crate::primary::{
    ClonedPrimary, Load, PROGRAM, assert_ordinary, begin_clone, connect, make, processes, restart_plainly, wait_gone,
    watch,
};

/// A clone answers while its data is missing, becomes whole, and is then an ordinary directory: no mark, mount or
/// process of ours, restarted, promoted, written.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_answers_before_its_data_is_there_and_becomes_whole() {
    let primary = ClonedPrimary::start(100_000).await;
    let load = Load::start(&primary).await;
    let service = primary.service().await;
    let plan = primary.plan("clone", Some(1 << 18));
    let ready = primary.make(&service, vec![plan.clone()]).await.remove(0);
    let clone = primary.run(ready).await;
    let client = connect(&clone).await;
    client.query_one("SELECT count(*) FROM pg_class", &[]).await.expect("a query");
    let progress = service.list().await.expect("listed").remove(0);
    assert_eq!(progress.state, CloneState::Filling, "{progress:?}");
    assert!(progress.filled_bytes < progress.total_bytes && progress.demand_faults > 0, "{progress:?}");
    primary.client().await.batch_execute("DROP TABLE removed").await.expect("dropped");
    service.set_limit(&plan.target, None).await.expect("no limit");
    let whole = watch(&service, &plan.target).await;
    assert!(load.end().await > 0);
    assert_ordinary(&whole);
    primary.assert_same(&clone).await;
    wait_gone(&service).await;
    restart_plainly(&clone).await;
    primary.assert_same(&clone).await;
}

/// Clones of one order share one freeze; those of different freezes are filled side by side; a whole clone can be
/// cloned.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread")]
async fn clones_of_one_order_share_a_freeze() {
    let primary = ClonedPrimary::start(20_000).await;
    let load = Load::start(&primary).await;
    let service = primary.service().await;
    let plans: Vec<_> = ["one", "two", "three"].map(|name| primary.plan(name, None)).into();
    let mut clones = Vec::new();
    for ready in primary.make(&service, plans.clone()).await {
        clones.push(primary.run(ready).await);
    }
    for plan in &plans {
        assert_ordinary(&watch(&service, &plan.target).await);
    }
    load.end().await;
    for clone in &clones {
        primary.assert_same(clone).await;
    }
    wait_gone(&service).await;
}

/// A directory of somebody else is neither used nor removed; a discarded clone leaves nothing.
///
/// Spec: C6
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_of_somebody_else_is_neither_used_nor_removed() {
    let primary = ClonedPrimary::start(100).await;
    let service = primary.service().await;
    let plan = primary.plan("clone", None);
    std::fs::create_dir_all(&plan.target).expect("made");
    std::fs::write(plan.target.join("precious"), "content").expect("written");
    let (ready, failed) = make(&service, vec![plan.clone()]).await;
    assert!(ready.is_empty() && failed.len() == 1 && failed[0].contains("not empty"), "{failed:?}");
    assert_eq!(std::fs::read(plan.target.join("precious")).expect("there"), b"content");
    wait_gone(&service).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_of_more_files_than_may_be_open_is_refused_by_name_before_anything_is_made() {
    let primary = ClonedPrimary::start(100).await;
    // As a unit with LimitNOFILE: root can go beyond it only with a capability that is taken away.
    let program = primary.directory.join("limited");
    let script = format!(
        "#!/bin/sh\nexec setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource prlimit --nofile=5000:5000 \
         {PROGRAM} \"$@\"\n"
    );
    std::fs::write(&program, script).expect("written");
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("its mode");
    let service = Service::reach(&program, primary.server.data_directory()).await.expect("a service");
    let plan = primary.plan("clone", None);
    let (ready, failed) = make(&service, vec![plan.clone()]).await;
    assert!(ready.is_empty() && failed.len() == 1, "{failed:?}");
    for word in ["5000", "LimitNOFILE", "ulimit -n", "--mode copy"] {
        assert!(failed[0].contains(word), "{word}: {failed:?}");
    }
    assert!(!plan.target.exists());
    let client = primary.client().await;
    let slots = client.query("SELECT slot_name FROM pg_replication_slots", &[]).await.expect("slots");
    assert!(slots.is_empty());
    wait_gone(&service).await;
}

/// Spec: C6
#[tokio::test(flavor = "multi_thread")]
async fn the_slot_of_another_clone_is_neither_taken_nor_dropped() {
    let primary = ClonedPrimary::start(100).await;
    let service = primary.service().await;
    let first = primary.plan("one", None);
    let ready = primary.make(&service, vec![first.clone()]).await.remove(0);
    let clone = primary.run(ready).await;
    assert_ordinary(&watch(&service, &first.target).await);
    primary.assert_same(&clone).await;
    let mut second = primary.plan("two", None);
    second.slot = first.slot.clone();
    // While its standby is away it looks like one that was left.
    for is_away in [false, true] {
        if is_away {
            clone.stop(onecopy_postgres::StopMode::Fast).await.expect("stopped");
        }
        let service = primary.service().await;
        let (ready, failed) = make(&service, vec![second.clone()]).await;
        assert!(ready.is_empty() && failed.len() == 1 && failed[0].contains("--slot"), "{failed:?}");
        assert!(!second.target.exists());
    }
    // Nobody is still trying to drop it.
    clone.start().await.expect("started");
    primary.assert_same(&clone).await;
    let client = primary.client().await;
    // It may have had all before it was connected again.
    let active = "SELECT slot_name::text FROM pg_replication_slots WHERE active";
    until_async("the slot is used again", async || client.query(active, &[]).await.expect("slots").len() == 1).await;
    wait_gone(&service).await;
}

/// Spec: C6
#[tokio::test(flavor = "multi_thread")]
async fn a_discarded_clone_leaves_nothing() {
    let (primary, service, plan, clone) = begin_clone(20_000).await;
    let watched = tokio::spawn({
        let (service, target) = (service.clone(), plan.target.clone());
        async move { watch(&service, &target).await }
    });
    service.discard(&plan.target).await.expect("discarded");
    let progress = watched.await.expect("watched");
    assert!(matches!(progress.state, CloneState::Discarded { .. }), "{progress:?}");
    assert!(!clone.is_running() && !plan.target.exists());
    let client = primary.client().await;
    let slots = client.query("SELECT slot_name FROM pg_replication_slots", &[]).await.expect("slots");
    assert!(slots.is_empty());
    wait_gone(&service).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_directory_is_used_and_made_anew() {
    let primary = ClonedPrimary::start(20_000).await;
    let service = primary.service().await;
    let directory = primary.directory.join("spare");
    let first = primary.plan("one", None);
    // Some files come and go meanwhile.
    let files = Image::scan(primary.server.data_directory()).expect("listed").image.files.len() - 10;
    let wanted = SpareWanted { directory: directory.clone(), user_name: USER.to_owned(), source: first.source.clone() };
    service.set_spare(Some(wanted)).await.expect("wanted");
    let prepared = wait_prepared(&directory, files, None).await;
    primary
        .client()
        .await
        .batch_execute("DROP TABLE removed; CREATE TABLE made (); CHECKPOINT")
        .await
        .expect("changed");
    let ready = primary.make(&service, vec![first.clone()]).await.remove(0);
    let made = std::fs::metadata(&first.target).and_then(|metadata| metadata.created()).expect("there");
    assert_eq!(made, prepared, "it is the prepared one");
    let clone = primary.run(ready).await;
    let again = wait_prepared(&directory, files, Some(prepared)).await;
    assert_ordinary(&watch(&service, &first.target).await);
    primary.assert_same(&clone).await;
    processes(&service, HYDRATOR_COMMAND).into_iter().for_each(kill);
    wait_prepared(&directory, files, Some(again)).await;
    service.set_spare(None).await.expect("no more");
    wait_gone(&service).await;
    assert!(!directory.exists());
}

/// Waits for a prepared directory with at least so many files, another one than before; when it was made.
async fn wait_prepared(directory: &Path, files_min: usize, before: Option<SystemTime>) -> SystemTime {
    let (begin, mut files, mut looks_alike) = (std::time::Instant::now(), 0, 0);
    loop {
        let made = std::fs::metadata(directory).and_then(|metadata| metadata.created()).ok();
        let files_before = std::mem::replace(&mut files, count_files(directory));
        looks_alike = if files == files_before { looks_alike + 1 } else { 0 };
        // It is done when it grows no more.
        if made != before && files >= files_min && looks_alike >= 3 {
            return made.expect("found");
        }
        assert!(begin.elapsed() < WAIT_MAX, "no directory is prepared");
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
}

fn count_files(directory: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    let count = |entry: std::fs::DirEntry| if entry.path().is_dir() { count_files(&entry.path()) } else { 1 };
    entries.flatten().map(count).sum()
}

/// A clone that keeps too much of the log is discarded with the reason.
///
/// Spec: A5
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_cannot_catch_up_is_discarded_with_the_reason() {
    let primary = ClonedPrimary::start(20_000).await;
    let service = primary.service().await;
    let mut plan = primary.plan("clone", Some(0));
    plan.wal_keep_bytes_max = 1 << 20;
    // It is never started: nothing is replayed.
    primary.make(&service, vec![plan.clone()]).await;
    let client = primary.client().await;
    client
        .batch_execute("UPDATE item SET filler = 'changed'; UPDATE item SET filler = 'again'")
        .await
        .expect("a lot of log");
    let progress = watch(&service, &plan.target).await;
    let CloneState::Discarded { reason } = &progress.state else { panic!("{progress:?}") };
    assert!(reason.contains("cannot catch up"), "{reason}");
    let slots = client.query("SELECT slot_name FROM pg_replication_slots", &[]).await.expect("slots");
    assert!(slots.is_empty() && !plan.target.exists());
    wait_gone(&service).await;
}

/// A full disk discards the clone, not the source.
///
/// Spec: A5
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_discards_the_clone_and_not_the_source() {
    let primary = ClonedPrimary::start(100_000).await;
    let disk = MountedDisk::new(FileSystem::Ext4, primary.directory.path(), "disk", 24 << 20).expect("a disk");
    let service = primary.service().await;
    let mut plan = primary.plan("clone", None);
    (plan.target, plan.tablespaces) = (disk.path().join("clone/data"), disk.path().join("clone/tablespaces"));
    let load = Load::start(&primary).await;
    primary.make(&service, vec![plan.clone()]).await;
    let progress = watch(&service, &plan.target).await;
    let CloneState::Discarded { reason } = &progress.state else { panic!("{progress:?}") };
    assert!(reason.contains("No space left"), "{reason}");
    let rounds = load.end().await;
    assert!(rounds > 0 && !plan.target.exists());
    wait_gone(&service).await;
}

/// Leaves so much of a file system beside the 50th that no clone takes; the file that takes the rest.
fn fill_up(disk: &Path, left_bytes: u64) -> PathBuf {
    let space = rustix::fs::statvfs(disk).expect("mounted");
    let free_bytes = (space.f_bavail - space.f_blocks / 50) * space.f_frsize;
    let (path, flags) = (disk.join("ballast"), rustix::fs::FallocateFlags::empty());
    let file = std::fs::File::create(&path).expect("made");
    rustix::fs::fallocate(file, flags, 0, free_bytes - left_bytes).expect("there is room");
    path
}

/// A clone on a file system of its source is refused when it would not find room there beside the source and the clones
/// that are being filled there, and given up before less than a 50th of it is free.
///
/// Spec: L2
#[tokio::test(flavor = "multi_thread")]
async fn k30_a_clone_never_fills_the_disk_of_its_source() {
    let room = TestDirectory::new().expect("a directory");
    let disk = MountedDisk::new(FileSystem::Ext4, room.path(), "disk", 400 << 20).expect("a disk");
    let directory = TestDirectory::new().expect("a directory");
    let primary = ClonedPrimary::start_at(directory, &disk.path().join("primary"), 50_000).await;
    let mut plan = primary.plan("clone", Some(0));
    (plan.target, plan.tablespaces) = (disk.path().join("clone/data"), disk.path().join("clone/tablespaces"));
    // What is too little from the beginning is refused, and nothing is made.
    let ballast = fill_up(disk.path(), 4 << 20);
    let service = primary.service().await;
    let (ready, failed) = make(&service, vec![plan.clone()]).await;
    assert!(ready.is_empty() && failed.len() == 1 && failed[0].contains("bytes when it is whole"), "{failed:?}");
    assert!(!plan.target.exists());
    std::fs::remove_file(ballast).expect("removed");
    // What becomes too little ends the clone, not the source.
    let service = primary.service().await;
    primary.make(&service, vec![plan.clone()]).await;
    fill_up(disk.path(), 4 << 20);
    service.set_limit(&plan.target, None).await.expect("no limit");
    let progress = watch(&service, &plan.target).await;
    let CloneState::Discarded { reason } = &progress.state else { panic!("{progress:?}") };
    assert!(reason.contains("less than a 50th"), "{reason}");
    assert!(progress.filled_bytes > 0 && progress.filled_bytes < progress.total_bytes, "{progress:?}");
    let client = primary.client().await;
    client
        .batch_execute("UPDATE item SET filler = 'changed' WHERE number < 100; CHECKPOINT")
        .await
        .expect("it goes on");
    assert!(!plan.target.exists());
    wait_gone(&service).await;
}
