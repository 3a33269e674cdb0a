//! A real primary and its standby: copied, following, promoted.

mod server;

use std::sync::Mutex;
use std::time::Duration;

use onecopy_postgres::{
    BaseBackup, ClusterState, FollowerMaker, PostgresError, Progress, ReplicationState, Role, Server, StandbyOptions,
    StopMode,
};
use onecopy_testing::{TestDirectory, WAIT_MAX, until_async};

const SLOT: &str = "follower_1";

async fn count(server: &Server) -> i64 {
    let client = server.connection().connect_as_client().await.expect("connected");
    client.query_one("SELECT count(*) FROM items", &[]).await.expect("counted").get(0)
}

async fn slots(server: &Server) -> Vec<String> {
    let client = server.connection().connect_as_client().await.expect("connected");
    let rows = client.query("SELECT slot_name::text FROM pg_replication_slots ORDER BY 1", &[]).await.expect("read");
    rows.iter().map(|row| row.get(0)).collect()
}

/// Copies the leader and starts the copy as its standby.
async fn follower_of(directory: &TestDirectory, leader: &Server) -> Server {
    let options = server::options(directory.join("follower"), Role::Follower);
    let maker = BaseBackup { binaries: options.binaries.clone(), user: options.user.clone(), slot: SLOT.to_owned() };
    let reports = Mutex::new(Vec::new());
    let report = |progress: Progress| reports.lock().expect("unpoisoned").push(progress);
    maker.make(&leader.connection(), &options.data_directory(), &report).await.expect("copied");
    let reports = reports.into_inner().expect("unpoisoned");
    let last = reports.last().expect("reported");
    assert!(last.done_bytes == last.total_bytes && last.total_bytes > 1 << 20, "{reports:?}");
    assert!(reports.is_sorted_by_key(|progress| progress.done_bytes), "{reports:?}");

    let follower = Server::open(options).await.expect("a data directory");
    let primary = leader.connection().with_application_name("follower 'one'");
    follower.make_standby(&StandbyOptions { primary, slot: Some(SLOT.to_owned()) }).expect("a standby");
    follower.start().await.expect("follows");
    follower
}

/// Spec: D1
#[tokio::test]
async fn a_standby_follows_survives_and_takes_over() {
    let directory = TestDirectory::new().expect("a directory");
    let leader = server::leader(&directory).await;
    leader.start().await.expect("starts");
    let client = leader.connection().connect_as_client().await.expect("connected");
    client.batch_execute("CREATE TABLE items (n int); INSERT INTO items VALUES (1)").await.expect("written");
    let follower = follower_of(&directory, &leader).await;
    assert_eq!(slots(&leader).await, [SLOT]);

    client.batch_execute("SET synchronous_commit = on; INSERT INTO items VALUES (2)").await.expect("written");
    until_async("the second row is there", async || count(&follower).await == 2).await;
    until_async("the standby has caught up", async || {
        let ReplicationState::Primary { standbys, timeline: 1, current } =
            leader.replication_state().await.expect("asked")
        else {
            panic!("the leader is no primary");
        };
        // The senders of the copy may be about to go still.
        standbys.iter().filter(|standby| standby.name == "follower 'one'").any(|standby| {
            assert_eq!(standby.sync_state, "async");
            standby.state == "streaming" && standby.replayed.is_some_and(|replayed| replayed >= current)
        })
    })
    .await;
    // The leader logs a little now and then by itself.
    until_async("the standby has replayed what it has received", async || {
        match follower.replication_state().await.expect("asked") {
            ReplicationState::Standby { received, replayed, lag_bytes, receiver_status, replayed_commit_age } => {
                assert!(received.is_some() && replayed.is_some() && replayed_commit_age.is_some());
                (lag_bytes, receiver_status.as_deref()) == (0, Some("streaming"))
            }
            other => panic!("no standby: {other:?}"),
        }
    })
    .await;
    let in_use = leader.drop_slot(SLOT).await.expect_err("a standby uses it");
    assert!(matches!(in_use, PostgresError::Sql { .. }), "{in_use}");

    // It stays a standby over a stop, and over being opened anew without being told.
    follower.stop(StopMode::Fast).await.expect("stops");
    assert_eq!(follower.control_file().expect("readable").state, ClusterState::ShutDownInRecovery);
    client.batch_execute("INSERT INTO items VALUES (3)").await.expect("written");
    let follower = Server::open(follower.options().clone()).await.expect("opened again");
    follower.start().await.expect("follows again");
    until_async("the third row is there", async || count(&follower).await == 3).await;

    let identifier = leader.control_file().expect("readable").system_identifier;
    leader.crash_stop().await.expect("crashed");
    let switch = follower.promote(WAIT_MAX).await.expect("promoted");
    let ReplicationState::Primary { current, timeline, standbys } = follower.replication_state().await.expect("asked")
    else {
        panic!("still a standby");
    };
    assert!(current >= switch && switch.0 > 0, "{current} {switch}");
    assert_eq!((timeline, standbys.len()), (2, 0));
    let client = follower.connection().connect_as_client().await.expect("connected");
    client.batch_execute("INSERT INTO items VALUES (4)").await.expect("takes updates");
    follower.restart(StopMode::Fast).await.expect("still a primary");
    assert_eq!(count(&follower).await, 4);
    let control = follower.control_file().expect("readable");
    assert_eq!((control.system_identifier, control.timeline), (identifier, 2));
    assert!(follower.promote(Duration::from_secs(1)).await.is_err(), "a primary cannot be promoted");
    follower.stop(StopMode::Fast).await.expect("stops");
}

/// Spec: A3
#[tokio::test]
async fn a_copy_that_fails_leaves_nothing() {
    let directory = TestDirectory::new().expect("a directory");
    let leader = server::leader(&directory).await;
    let options = server::options(directory.join("follower"), Role::Follower);
    let target = options.data_directory();
    let maker = BaseBackup { binaries: options.binaries.clone(), user: options.user.clone(), slot: SLOT.to_owned() };

    let not_running = maker.make(&leader.connection(), &target, &|_| ()).await.expect_err("nobody answers");
    assert!(matches!(not_running, PostgresError::Connect { .. }), "{not_running}");

    // No sender is left for the copy: the program fails after everything was prepared.
    let mut settings = leader.settings();
    settings.set("max_wal_senders", 0);
    leader.set_settings(settings);
    leader.start().await.expect("starts");
    let failed = maker.make(&leader.connection(), &target, &|_| ()).await.expect_err("no sender").to_string();
    assert!(failed.contains("pg_basebackup") && failed.contains("max_wal_senders"), "{failed}");
    assert!(!target.exists());
    let left: Vec<_> = std::fs::read_dir(target.parent().expect("a home")).expect("readable").collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(slots(&leader).await, Vec::<String>::new());

    // A slot that an interrupted copy left does not stand in the way.
    let mut settings = server::options(directory.join("leader"), Role::Leader).settings;
    settings.set("wal_level", "logical");
    leader.set_settings(settings);
    leader.restart(StopMode::Fast).await.expect("restarts");
    leader.create_slot(SLOT).await.expect("made");
    leader.create_slot(SLOT).await.expect("there already");
    maker.make(&leader.connection(), &target, &|_| ()).await.expect("copied");
    let occupied = maker.make(&leader.connection(), &target, &|_| ()).await.expect_err("there is one already");
    assert!(matches!(occupied, PostgresError::DataDirectoryNotEmpty { .. }), "{occupied}");
    // The copy's sender lets go of it a moment after the program has ended.
    until_async("the slot can be dropped", async || leader.drop_slot(SLOT).await.is_ok()).await;
    leader.drop_slot(SLOT).await.expect("dropped already");
    // One for logical replication is somebody else's.
    let client = leader.connection().connect_as_client().await.expect("connected");
    let make = "SELECT pg_create_logical_replication_slot($1, 'pgoutput')";
    client.query(make, &[&SLOT]).await.expect("made");
    leader.drop_slot(SLOT).await.expect("none of ours");
    assert_eq!(slots(&leader).await, [SLOT]);
    leader.stop(StopMode::Fast).await.expect("stops");
}
