//! Whole images under the recovery of a clone that is filled: taken from a frozen server, guarded until they are
//! finished.

mod harness;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use harness::{
    Load, assert_same_rows, badly_owned, check_pages, open_clone, plan_for, primary, prove, server, slots, source_of,
    start_by_hand,
};
use onecopy_clone::CloneError;
use onecopy_clone::image::{Image, SmallFile};
use onecopy_clone::methods::{CloneMethod, Copy};
use onecopy_clone::plan::{Plan, Recovery};
use onecopy_clone::recovery::slot::{SlotState, check_free, claim, watch};
use onecopy_clone::recovery::{Mode, begin, begin_around};
use onecopy_clone::target::{CloneLocation, MARKER_FILE, Marker, Skeleton, VersionGuard, finish, remove};
use onecopy_postgres::{ClusterState, ControlFile, InheritedDescriptor, Lsn, Server, Settings, StopMode, Supervisor};
use onecopy_testing::{Frozen, TestDirectory, WAIT_MAX, process, until_async};
use rustix::process::Signal;
use tokio_postgres::Client;

/// Fills a skeleton at once.
fn fill(plan: &Plan, skeleton: &Skeleton) {
    for (file, target) in skeleton.image().files.iter().zip(skeleton.files()) {
        let source = File::open(plan.source.data_directory.join(&file.path)).expect("open");
        let mut content = vec![0; usize::try_from(file.size_bytes).expect("small")];
        source.read_exact_at(&mut content, 0).expect("read");
        target.write_all_at(&content, 0).expect("written");
    }
}

fn marker(plan: &Plan) -> Marker {
    Marker::of(plan, Path::new("/run/onecopy/test"))
}

/// A clone of a server that is written to, made from an image that is frozen while the server is stopped. Not finished,
/// not started.
async fn clone_frozen(source: &Server, plan: &Plan, mode: Mode) -> Vec<InheritedDescriptor> {
    let location = CloneLocation::of(plan).expect("a location");
    let load = Load::begin(source).await;
    let begun = begin(&plan.source, std::slice::from_ref(&plan.slot), plan.recovery).await.expect("begun");
    assert_eq!(begun.mode(), mode);
    let early = Arc::new(Image::scan(&plan.source.data_directory).expect("scanned").image);
    let mut skeleton = Skeleton::make(location.clone(), early, &marker(plan)).expect("made");
    // Files come and go meanwhile.
    load.go_on(4).await;
    {
        let _frozen = Frozen::server(source.process_id().expect("runs"));
        let scan = Image::scan(&plan.source.data_directory).expect("scanned");
        skeleton.reconcile(Arc::new(scan.image)).expect("reconciled");
        let small = scan.small.into_iter().map(|entry| SmallFile {
            content: std::fs::read(plan.source.data_directory.join(&entry.path)).expect("read"),
            path: entry.path,
            mode: entry.mode,
        });
        skeleton.write_small(&small.collect::<Vec<_>>()).expect("written");
        fill(plan, &skeleton);
    }
    let point = begun.end().await.expect("ended");
    point.write(&location).expect("written");
    load.end().await;
    let guard = VersionGuard::new(location, point.major_version);
    guard.install().expect("laid");
    vec![guard.descriptor().expect("a descriptor")]
}

#[tokio::test]
async fn a_clone_after_a_crash_is_guarded_until_it_is_finished() {
    let directory = TestDirectory::new().expect("a directory");
    let source = primary(directory.path(), &Settings::new()).await;
    let plan = plan_for(&source, directory.path(), "clone", Recovery::Auto);
    let inherited = clone_frozen(&source, &plan, Mode::Crash).await;
    let location = CloneLocation::of(&plan).expect("a location");
    let control = ControlFile::read(&plan.target).expect("readable");
    assert_eq!(control.state, ClusterState::ShutDownInRecovery);
    assert!(control.min_recovery_point >= control.checkpoint_redo);

    let clone = Arc::new(open_clone(&source, &plan, inherited).await);
    let supervisor = Supervisor::spawn(clone.clone());
    supervisor.wait_running().await.expect("follows");
    let refusal = start_by_hand(&source, &plan.target);
    assert!(refusal.contains("PG_VERSION"), "{refusal}");
    assert_same_rows(&source, &clone).await;
    // Every later postmaster gets what the first one got.
    let first = clone.process_id().expect("runs");
    assert!(process::send(first, Signal::KILL));
    until_async("another postmaster runs", async || clone.process_id().is_some_and(|process_id| process_id != first))
        .await;
    supervisor.wait_running().await.expect("follows again");
    assert_same_rows(&source, &clone).await;
    assert!(start_by_hand(&source, &plan.target).contains("PG_VERSION"));

    assert!(Marker::read(&plan.target).expect("readable").is_some());
    finish(&location, 15).expect("finished");
    finish(&location, 15).expect("finished already");
    assert!(!VersionGuard::is_installed(&plan.target) && Marker::read(&plan.target).expect("readable").is_none());
    assert_eq!(std::fs::read_to_string(plan.target.join("PG_VERSION")).expect("read"), "15\n");
    assert_eq!(badly_owned(&source, &plan.target), Vec::<&Path>::new());
    supervisor.stop(StopMode::Fast).await.expect("stops");
    clone.set_inherited(Vec::new());
    clone.start().await.expect("needs nothing of us");
    prove(&source, &clone).await;
}

#[tokio::test]
async fn a_clone_as_from_a_backup_is_a_standby_without_full_page_writes() {
    let directory = TestDirectory::new().expect("a directory");
    let mut settings = Settings::new();
    settings.set("full_page_writes", "off");
    let source = primary(directory.path(), &settings).await;
    let plan = plan_for(&source, directory.path(), "clone", Recovery::Auto);
    let inherited = clone_frozen(&source, &plan, Mode::Backup).await;
    assert!(std::fs::read_to_string(plan.target.join("backup_label")).expect("a label").contains("START WAL LOCATION"));
    let clone = open_clone(&source, &plan, inherited).await;
    clone.start().await.expect("follows");
    assert_same_rows(&source, &clone).await;
    finish(&CloneLocation::of(&plan).expect("a location"), 15).expect("finished");
    prove(&source, &clone).await;

    let error = begin(&plan.source, &[], Recovery::Crash).await.err().expect("refused").to_string();
    assert!(error.contains("full_page_writes is off"), "{error}");
}

#[tokio::test]
async fn a_standby_is_cloned_in_both_modes_and_so_is_what_was_promoted() {
    let directory = TestDirectory::new().expect("a directory");
    let source = primary(directory.path(), &Settings::new()).await;
    let plan = plan_for(&source, directory.path(), "middle", Recovery::Crash);
    let inherited = clone_frozen(&source, &plan, Mode::Crash).await;
    let middle = open_clone(&source, &plan, inherited).await;
    middle.start().await.expect("follows");
    finish(&CloneLocation::of(&plan).expect("a location"), 15).expect("finished");

    let mut clones = Vec::new();
    for (name, recovery, mode) in
        [("by_crash", Recovery::Crash, Mode::Crash), ("by_backup", Recovery::Backup, Mode::Backup)]
    {
        let plan = plan_for(&middle, directory.path(), name, recovery);
        let inherited = clone_idle_standby(&source, &middle, &plan, mode).await;
        let clone = open_clone(&middle, &plan, inherited).await;
        clone.start().await.expect("follows the standby");
        finish(&CloneLocation::of(&plan).expect("a location"), 15).expect("finished");
        assert_same_rows(&source, &clone).await;
        clone.stop(StopMode::Fast).await.expect("stops");
        check_pages(&clone);
        clones.push(clone);
    }
    // A new timeline: the clones must learn how it came about.
    source.stop(StopMode::Fast).await.expect("stops");
    middle.promote(WAIT_MAX).await.expect("promoted");
    let plan = plan_for(&middle, directory.path(), "late", Recovery::Crash);
    let inherited = clone_frozen(&middle, &plan, Mode::Crash).await;
    assert!(plan.target.join("pg_wal/00000002.history").exists());
    let late = open_clone(&middle, &plan, inherited).await;
    late.start().await.expect("follows on the second timeline");
    finish(&CloneLocation::of(&plan).expect("a location"), 15).expect("finished");
    assert_same_rows(&middle, &late).await;
    clones[0].start().await.expect("follows over the switch");
    assert_same_rows(&middle, &clones[0]).await;
}

/// A clone of a standby, while its primary is written to.
async fn clone_idle_standby(source: &Server, standby: &Server, plan: &Plan, mode: Mode) -> Vec<InheritedDescriptor> {
    let location = CloneLocation::of(plan).expect("a location");
    let load = Load::begin(source).await;
    let begun = begin(&plan.source, std::slice::from_ref(&plan.slot), plan.recovery).await.expect("begun");
    assert_eq!(begun.mode(), mode);
    let skeleton = {
        let _frozen = Frozen::server(standby.process_id().expect("runs"));
        let scan = Image::scan(&plan.source.data_directory).expect("scanned");
        let skeleton = Skeleton::make(location.clone(), Arc::new(scan.image), &marker(plan)).expect("made");
        for entry in scan.small {
            let content = std::fs::read(plan.source.data_directory.join(&entry.path)).expect("read");
            skeleton.write_small(&[SmallFile { path: entry.path, mode: entry.mode, content }]).expect("written");
        }
        fill(plan, &skeleton);
        skeleton
    };
    let point = begun.end().await.expect("ended");
    assert!(point.consistent_at > Lsn::INVALID && point.redo > Lsn::INVALID);
    point.write(&location).expect("written");
    load.end().await;
    drop(skeleton);
    let guard = VersionGuard::new(location, point.major_version);
    guard.install().expect("laid");
    vec![guard.descriptor().expect("a descriptor")]
}

async fn execute(server: &Server, statement: &str) -> Client {
    let client = server.connection().connect_as_client().await.expect("connected");
    client.batch_execute(statement).await.expect(statement);
    client
}

/// What the source lacks is named, and no slot is left.
///
/// Spec: L4
#[tokio::test]
async fn refusals_name_what_the_source_lacks_and_leave_no_slot() {
    let directory = TestDirectory::new().expect("a directory");
    let mut settings = Settings::new();
    settings.set("max_replication_slots", 2);
    let source = primary(directory.path(), &settings).await;
    let names = |count: u32| (0..count).map(|number| format!("clone_{number}")).collect::<Vec<_>>();
    let wanted = source_of(&source);
    let refused = async |source, slots: Vec<String>| {
        let error = begin(&source, &slots, Recovery::Auto).await.err().expect("refused");
        assert!(matches!(error, CloneError::Unsuitable { .. }), "{error}");
        error.to_string()
    };
    let error = refused(wanted.clone(), names(3)).await;
    assert!(error.contains("max_replication_slots = 2"), "{error}");
    let client = execute(&source, "SELECT pg_create_physical_replication_slot('of_another')").await;
    let error = refused(wanted.clone(), names(2)).await;
    assert!(error.contains("max_replication_slots = 2"), "{error}");
    let error = refused(wanted.clone(), names(17)).await;
    assert!(error.contains("max_wal_senders = 16"), "{error}");

    client.batch_execute("CREATE ROLE weak LOGIN PASSWORD 'weak'").await.expect("made");
    let mut weak = wanted.clone();
    weak.connection.user = "weak".to_owned();
    weak.connection.password = Some("weak".to_owned());
    let error = refused(weak, names(1)).await;
    assert!(error.contains("no superuser"), "{error}");

    let other =
        Server::create(server::options(directory.join("other"), onecopy_postgres::Role::Leader)).await.expect("made");
    let mut elsewhere = wanted.clone();
    elsewhere.data_directory = other.data_directory().to_owned();
    let error = refused(elsewhere, names(1)).await;
    assert!(error.contains("not its own"), "{error}");
    assert_eq!(slots(&source).await, ["of_another"]);

    let begun = begin(&wanted, &names(1), Recovery::Backup).await.expect("begun");
    assert_eq!(slots(&source).await, ["clone_0", "of_another"]);
    begun.abandon().await;
    assert_eq!(slots(&source).await, ["of_another"]);

    let mut settings = source.settings();
    settings.set("wal_level", "minimal").set("max_wal_senders", 0);
    client.batch_execute("SELECT pg_drop_replication_slot('of_another')").await.expect("dropped");
    source.set_settings(settings);
    source.restart(StopMode::Fast).await.expect("restarts");
    let error = refused(wanted, names(1)).await;
    assert!(error.contains("wal_level is minimal"), "{error}");
}

/// A replication slot that is there is never replaced by a clone's, whatever its name and whether its standby is there
/// or away, and what is dropped with a clone is physical and was not there when the clone was written down.
///
/// Spec: C6
#[tokio::test]
async fn k26_a_slot_that_is_there_is_neither_replaced_nor_dropped() {
    let directory = TestDirectory::new().expect("a directory");
    let mut settings = Settings::new();
    settings.set("wal_level", "logical");
    let source = primary(directory.path(), &settings).await;
    let plan = plan_for(&source, directory.path(), "clone", Recovery::Auto);
    let made = [
        ("SELECT pg_create_physical_replication_slot('clone', true)", true),
        ("SELECT pg_create_logical_replication_slot('clone', 'pgoutput')", false),
    ];
    for (make, is_physical) in made {
        execute(&source, make).await;
        let copy = Copy { binaries: source.options().binaries.clone() };
        let refusals = [
            check_free(&plan.source, &plan.slot).await.expect_err("it is there"),
            begin(&plan.source, std::slice::from_ref(&plan.slot), plan.recovery).await.err().expect("it is there"),
            copy.make(std::slice::from_ref(&plan), &|_, _| ()).await.remove(0).expect_err("it is there"),
        ];
        for refused in refusals {
            assert!(matches!(refused, CloneError::Unsuitable { .. }), "{refused}");
            assert!(refused.to_string().contains("--slot"), "{refused}");
        }
        assert!(!plan.target.exists());
        assert_eq!(slots(&source).await, ["clone"]);
        // No clone's slot is for logical replication, whatever a list of clones says.
        onecopy_clone::recovery::slot::drop(&source.socket_connection(), "clone").await;
        assert_eq!(slots(&source).await.is_empty(), is_physical);
    }
}

/// Adopting a source makes a checkpoint, which under load takes seconds.
#[tokio::test]
async fn a_checkpoint_that_is_made_meanwhile_is_not_made_again() {
    let directory = TestDirectory::new().expect("a directory");
    let source = primary(directory.path(), &Settings::new()).await;
    // Further from the last redo point than a clone replays.
    let client = execute(&source, "SELECT pg_logical_emit_message(false, 'x', repeat('x', 80000000))").await;
    let redo = async || -> String {
        client.query_one("SELECT redo_lsn::text FROM pg_control_checkpoint()", &[]).await.expect("asked").get(0)
    };
    let (far, name, mut made) = (redo().await, "around".to_owned(), String::new());
    let checkpoint = async {
        assert_eq!(slots(&source).await, ["around"], "what it makes superfluous is kept for the clone");
        client.batch_execute("CHECKPOINT").await.expect("made");
        made = redo().await;
        Ok(())
    };
    let wanted = Recovery::Crash;
    let begun =
        begin_around(&source_of(&source), std::slice::from_ref(&name), wanted, checkpoint).await.expect("begun");
    assert_ne!(made, far);
    assert_eq!(redo().await, made, "no other one is made");
    begun.abandon().await;

    // Nor one for what is given up anyway.
    client.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 80000000))", &[]).await.expect("written");
    let failed = std::future::ready(Err(CloneError::FreezeUnderWay));
    let refused = begin_around(&source_of(&source), std::slice::from_ref(&name), wanted, failed).await;
    assert!(matches!(refused, Err(CloneError::FreezeUnderWay)));
    assert_eq!(redo().await, made);
    assert_eq!(slots(&source).await, Vec::<String>::new());
}

/// Spec: A5
#[tokio::test]
async fn a_slot_is_watched_until_it_is_of_no_use() {
    let directory = TestDirectory::new().expect("a directory");
    let mut settings = Settings::new();
    settings.set("max_slot_wal_keep_size", "16MB").set("max_wal_size", "48MB").set("min_wal_size", "32MB");
    let source = primary(directory.path(), &settings).await;
    let name = "watched".to_owned();
    let begun = begin(&source_of(&source), std::slice::from_ref(&name), Recovery::Auto).await.expect("begun");
    begun.end().await.expect("ended");
    let client = execute(&source, "CREATE TABLE filler (content text)").await;
    let SlotState::Keeping { retained_bytes } = watch(&client, &name, 1 << 30).await.expect("watched") else {
        panic!("useless from the beginning");
    };
    assert!(retained_bytes > 0);
    let reason = |state| match state {
        SlotState::Useless { reason } => reason,
        SlotState::Keeping { retained_bytes } => panic!("keeps {retained_bytes} bytes"),
    };
    let too_far = reason(watch(&client, &name, retained_bytes - 1).await.expect("watched"));
    assert!(too_far.contains("bytes of log"), "{too_far}");

    for _ in 0..6 {
        let fill = "INSERT INTO filler SELECT repeat(md5(n::text), 30) FROM generate_series(1, 20000) AS n; \
                    SELECT pg_switch_wal(); CHECKPOINT";
        client.batch_execute(fill).await.expect("written");
    }
    let lost = reason(watch(&client, &name, 1 << 40).await.expect("watched"));
    assert!(lost.contains("max_slot_wal_keep_size"), "{lost}");
    onecopy_clone::recovery::slot::drop(&source.socket_connection(), &name).await;
    onecopy_clone::recovery::slot::drop(&source.socket_connection(), &name).await;
    let dropped = reason(watch(&client, &name, 1 << 40).await.expect("watched"));
    assert!(dropped.contains("was dropped"), "{dropped}");
}

#[tokio::test]
async fn a_prepared_directory_is_moved_reshaped_and_removed() {
    let directory = TestDirectory::new().expect("a directory");
    let source = primary(directory.path(), &Settings::new()).await;
    let plan = plan_for(&source, directory.path(), "spare", Recovery::Auto);
    let spare = CloneLocation::of(&plan).expect("a location");
    let scan = || Arc::new(Image::scan(source.data_directory()).expect("scanned").image);
    let mut skeleton = Skeleton::make(spare.clone(), scan(), &marker(&plan)).expect("made");
    execute(&source, "CREATE TABLE later AS SELECT generate_series(1, 10000) AS n; DROP TABLE placed").await;
    let target = directory.join("target");
    skeleton.move_to(&target.join("data"), &target.join("tablespaces")).expect("moved");
    skeleton.reconcile(scan()).expect("reconciled");
    let moved = skeleton.location().clone();
    assert!(!spare.directory.exists() && !spare.tablespaces.exists() && moved.directory.join(MARKER_FILE).exists());
    for (file, open) in skeleton.image().files.iter().zip(skeleton.files()) {
        let metadata = std::fs::metadata(moved.directory.join(&file.path)).expect("there");
        assert_eq!(metadata.len(), file.size_bytes, "{file:?}");
        assert_eq!(open.metadata().expect("open").len(), file.size_bytes, "{file:?}");
    }
    drop(skeleton);
    remove(&moved).expect("removed");
    remove(&moved).expect("removed already");
    assert_eq!(std::fs::read_dir(&target).expect("its parent stays").count(), 0);
}

#[tokio::test]
async fn a_slot_that_the_dead_were_making_is_dropped_when_it_is_there() {
    let directory = TestDirectory::new().expect("a directory");
    let source = primary(directory.path(), &Settings::new()).await;
    let dead = source.socket_connection().connect_as_client().await.expect("connected");
    claim(&dead, "clone").await.expect("claimed");
    let connection = source.socket_connection();
    let dropping = tokio::spawn(async move { onecopy_clone::recovery::slot::drop(&connection, "clone").await });
    // Its last statement comes to its end although nobody waits for it.
    dead.execute("SELECT pg_create_physical_replication_slot('clone', true)", &[]).await.expect("made");
    assert!(!dropping.is_finished());
    drop(dead);
    dropping.await.expect("it comes to an end");
    assert!(slots(&source).await.is_empty());
    // Who has made one lets others have it.
    let plan = plan_for(&source, directory.path(), "clone", Recovery::Auto);
    let begun = begin(&plan.source, std::slice::from_ref(&plan.slot), plan.recovery).await.expect("begun");
    claim(&source.socket_connection().connect_as_client().await.expect("connected"), &plan.slot)
        .await
        .expect("claimed");
    begun.abandon().await;
    assert!(slots(&source).await.is_empty());
}
