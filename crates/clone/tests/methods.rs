//! Real clones by the methods that make whole directories, and the choice between all methods.

mod harness;

use std::path::Path;
use std::sync::Mutex;

use harness::{Load, assert_same_rows, badly_owned, open_clone, plan_for, primary, prove, slots, xfs};
use onecopy_clone::CloneError;
use onecopy_clone::methods::{CloneMethod, Copy, MethodName, PreparedClone, Reflink, choose};
use onecopy_clone::plan::{Plan, Recovery};
use onecopy_clone::target::{MARKER_FILE, VersionGuard};
use onecopy_postgres::{PostgresError, Progress, Server, Settings};
use onecopy_testing::TestDirectory;

/// Makes clones while the source is written to; none of them may have anything of us in it.
async fn make(method: &dyn CloneMethod, source: &Server, plans: &[Plan]) -> Vec<PreparedClone> {
    let reports = Mutex::new(Vec::new());
    let report =
        |plan: &Plan, progress: Progress| reports.lock().expect("unpoisoned").push((plan.slot.clone(), progress));
    let load = Load::begin(source).await;
    let results = method.make(plans, &report).await;
    load.end().await;
    let made: Vec<PreparedClone> = results.into_iter().map(|result| result.expect("made")).collect();
    let reports = reports.into_inner().expect("unpoisoned");
    for made in &made {
        let last = reports.iter().rfind(|(slot, _)| *slot == made.plan.slot).expect("reported").1;
        assert!(last.done_bytes == last.total_bytes && last.total_bytes > 1 << 20, "{last:?}");
        assert!(made.inherited.is_empty() && made.pause.is_zero());
        let target = &made.plan.target;
        assert!(!target.join(MARKER_FILE).exists() && !VersionGuard::is_installed(target));
        assert_eq!(badly_owned(source, target), Vec::<&Path>::new());
        assert_eq!(badly_owned(source, &made.plan.tablespaces), Vec::<&Path>::new());
    }
    made
}

#[tokio::test]
async fn a_copy_of_a_busy_source_with_a_tablespace_is_its_standby() {
    let directory = TestDirectory::new().expect("a directory");
    let source = primary(directory.path(), &Settings::new()).await;
    let plan = plan_for(&source, directory.path(), "copied", Recovery::Auto);
    let copy = Copy { binaries: source.options().binaries.clone() };
    let made = make(&copy, &source, std::slice::from_ref(&plan)).await;
    assert_eq!(made[0].consistent_at, None);
    let clone = open_clone(&source, &plan, Vec::new()).await;
    clone.start().await.expect("follows");
    prove(&source, &clone).await;

    let again = copy.make(std::slice::from_ref(&plan), &|_, _| ()).await.remove(0).expect_err("it is there");
    assert!(matches!(again, CloneError::Postgres(PostgresError::DataDirectoryNotEmpty { .. })), "{again}");
}

#[tokio::test]
async fn clones_that_share_blocks_are_standbys_in_both_modes() {
    let directory = TestDirectory::new().expect("a directory");
    let mount = xfs(&directory);
    let source = primary(mount.path(), &Settings::new()).await;
    let single = plan_for(&source, mount.path(), "single", Recovery::Backup);
    let twins = ["first", "second"].map(|name| plan_for(&source, mount.path(), name, Recovery::Crash));
    assert_eq!(choose(None, &single).expect("chosen").reason, "reflink: source and target share an XFS file system");
    let mut made = make(&Reflink, &source, &twins).await;
    assert_eq!(made[0].consistent_at, made[1].consistent_at, "one recovery serves both");
    made.extend(make(&Reflink, &source, &[single]).await);
    for made in made {
        let clone = open_clone(&source, &made.plan, Vec::new()).await;
        clone.start().await.expect("follows");
        prove(&source, &clone).await;
    }
    // What the clones wrote when they were primaries is not in the blocks that they shared.
    let client = source.connection().connect_as_client().await.expect("connected");
    let row = client.query_one("SELECT count(*) FROM items WHERE n < 0", &[]).await.expect("read");
    assert_eq!(row.get::<_, i64>(0), 0);
}

#[tokio::test]
async fn a_clone_that_fails_leaves_nothing_and_does_not_harm_its_twin() {
    let directory = TestDirectory::new().expect("a directory");
    let mount = xfs(&directory);
    let source = primary(mount.path(), &Settings::new()).await;
    let good = plan_for(&source, mount.path(), "good", Recovery::Auto);
    let bad = plan_for(&source, directory.path(), "bad", Recovery::Auto);
    let results = Reflink.make(&[bad.clone(), good.clone()], &|_, _| ()).await;
    let error = results[0].as_ref().expect_err("on another file system").to_string();
    assert!(error.contains("share the blocks"), "{error}");
    assert!(results[1].is_ok());
    assert!(!bad.target.exists() && !bad.tablespaces.exists());
    assert_eq!(slots(&source).await, ["good"]);
    let clone = open_clone(&source, &good, Vec::new()).await;
    clone.start().await.expect("follows");
    assert_same_rows(&source, &clone).await;
}

/// The way is chosen by what the file systems can, and said with its reason.
///
/// Spec: A5
#[tokio::test]
async fn the_choice_is_by_what_the_file_systems_can() {
    let directory = TestDirectory::new().expect("a directory");
    let mount = xfs(&directory);
    let source = primary(directory.path(), &Settings::new()).await;
    let same = plan_for(&source, directory.path(), "same", Recovery::Auto);
    let choice = choose(None, &same).expect("chosen");
    assert_eq!(
        (choice.name, choice.reason.as_str()),
        (MethodName::Lazy, "lazy: the file system ext4 cannot share blocks")
    );

    let other = plan_for(&source, mount.path(), "other", Recovery::Auto);
    let choice = choose(None, &other).expect("chosen");
    assert_eq!(choice.name, MethodName::Lazy);
    assert!(choice.reason.ends_with("are on two file systems"), "{}", choice.reason);

    // No file system of its own, and none that tells of accesses.
    let volatile = plan_for(&source, Path::new("/dev/shm"), "volatile", Recovery::Auto);
    let choice = choose(None, &volatile).expect("chosen");
    assert_eq!(choice.name, MethodName::Copy);
    assert!(choice.reason.contains("file system tmpfs"), "{}", choice.reason);

    let error = choose(Some(MethodName::Reflink), &same).expect_err("ext4").to_string();
    assert_eq!(error, "the method reflink is not possible: the file system ext4 cannot share blocks");
    assert_eq!(choose(Some(MethodName::Copy), &same).expect("always").reason, "copy: it was asked for");
}
