//! Servers that write on, and what is kept of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use onecopy_clone::CloneError;
use onecopy_clone::image::Image;
use onecopy_clone::plan::SourceServer;
use onecopy_postgres::{
    BaseBackup, FollowerMaker, Role, Server, ServerOptions, Settings, StandbyOptions, StopMode, kill_processes_of,
};
use onecopy_testing::{TestDirectory, until_async};

use crate::frozen::{change_everything, freeze, freeze_and_follow, new_source};
use crate::harness::{Load, primary, server, source_of};

/// A running server that we did not start is adopted without a restart: every descriptor of a relation is proven to be
/// armed, a standby's through its leader.
///
/// Spec: D2
#[tokio::test]
async fn the_image_of_a_real_server_is_what_its_clone_needs() {
    let directory = TestDirectory::new().expect("a directory");
    let server = primary(directory.path(), &Settings::new()).await;
    let client = server.connection().connect_as_client().await.expect("connected");
    client.batch_execute("CREATE TEMPORARY TABLE fleeting AS SELECT 1 AS n").await.expect("made");
    let path = async |relation: &str| -> String {
        client.query_one("SELECT pg_relation_filepath($1::text::regclass)", &[&relation]).await.expect("asked").get(0)
    };
    let scan = Image::scan(server.data_directory()).expect("listed");
    let files: BTreeSet<&str> = scan.image.files.iter().map(|file| file.path.to_str().expect("UTF-8")).collect();
    for relation in ["items", "items_pkey", "placed", "pg_class", "pg_database"] {
        assert!(files.contains(path(relation).await.as_str()), "{relation} is filled");
    }
    let scratch = path("scratch").await;
    assert!(files.contains(format!("{scratch}_init").as_str()) && !files.contains(scratch.as_str()));
    let fleeting = path("fleeting").await;
    assert!(server.data_directory().join(&fleeting).exists() && !files.contains(fleeting.as_str()), "{fleeting}");
    assert!(files.contains("pg_xact/0000") && !files.contains("global/pg_control"));

    let elsewhere = std::fs::canonicalize(directory.join("elsewhere")).expect("there");
    let [tablespace] = scan.image.tablespaces.as_slice() else { panic!("{:?}", scan.image.tablespaces) };
    assert_eq!(tablespace.location, elsewhere);
    let databases =
        scan.image.directories.iter().filter(|directory| directory.path.parent() == Some(Path::new("base")));
    assert_eq!(databases.count(), 4, "template0, template1, postgres, archive");
    let small: BTreeSet<&str> = scan.small.iter().map(|file| file.path.to_str().expect("UTF-8")).collect();
    assert!(small.contains("postgresql.conf") && small.contains("base/1/pg_filenode.map"), "{small:?}");
    assert!(!small.contains("postmaster.pid") && !small.iter().any(|path| path.starts_with("pg_wal")), "{small:?}");
}

/// Spec: D2
#[tokio::test(flavor = "multi_thread")]
async fn what_is_frozen_is_kept_while_the_source_goes_on() {
    let directory = TestDirectory::new().expect("a directory");
    let server = primary(directory.path(), &Settings::new()).await;
    let load = Load::begin(&server).await;
    load.go_on(1).await;
    let source = new_source(&server).await;
    assert!(!source.probe().expect("probed").is_empty(), "files were open before");
    assert!(matches!(freeze(&source).await, Err(CloneError::NewDirectory { .. })), "nothing is proven");
    let adoption = source.adopt(&source_of(&server)).await.expect("adopted");
    assert!(adoption.unarmed > 0 && adoption.barriers > 0, "{adoption:?}");
    assert_eq!(source.probe().expect("probed"), []);
    assert_eq!(source.adopt(&source_of(&server)).await.expect("adopted").barriers, 0, "once is enough");

    let freezing = freeze(&source).await.expect("frozen");
    assert!(matches!(freeze(&source).await, Err(CloneError::FreezeUnderWay)));
    assert!(
        freezing.small_files().iter().any(|file| file.path.ends_with("postgresql.conf") && !file.content.is_empty())
    );
    drop(freezing);
    let first = freeze_and_follow(&source).await;
    change_everything(&server).await;

    // Another freeze beside the first one.
    source.adopt(&source_of(&server)).await.expect("adopted");
    let second = freeze_and_follow(&source).await;
    assert_eq!(source.followers(), 2);
    change_everything(&server).await;
    let metrics = source.metrics();
    assert!(metrics.saves > 0 && metrics.accesses >= metrics.saves && !metrics.pause.is_zero(), "{metrics:?}");
    let (first_filling, second_filling) = (Arc::clone(&first.filling), Arc::clone(&second.filling));
    first.assert_frozen().await;
    second.assert_frozen().await;

    // All is taken: hot files become ignored while both still follow. A third freeze watches them again.
    change_everything(&server).await;
    source.adopt(&source_of(&server)).await.expect("adopted");
    let third = freeze_and_follow(&source).await;
    source.unfollow(&first_filling);
    source.unfollow(&second_filling);
    change_everything(&server).await;
    let third_filling = Arc::clone(&third.filling);
    third.assert_frozen().await;
    load.end().await;

    // Nobody follows: nothing is asked.
    source.unfollow(&third_filling);
    assert_eq!(source.followers(), 0);
    // What was asked before is still on its way.
    let accesses = || source.metrics().accesses;
    until_async("the last accesses are counted", async || {
        let before = accesses();
        tokio::time::sleep(Duration::from_secs(3)).await;
        accesses() == before
    })
    .await;
    let before = accesses();
    change_everything(&server).await;
    assert_eq!(accesses(), before);
    assert_eq!(source.probe().expect("probed"), [], "ignored, and armed all the same");
}

/// A server in a PID namespace of its own. Killed when this is dropped.
struct Confined {
    child: Child,
    options: ServerOptions,
}

impl Confined {
    fn start(server: &Server) -> Confined {
        let options = server.options().clone();
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "setpriv", "--clear-groups"]);
        command.arg(format!("--reuid={}", options.user.user_id())).arg(format!("--regid={}", options.user.group_id()));
        command.arg(options.binaries.program("postgres")).arg("-D").arg(server.data_directory());
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Confined { child: command.spawn().expect("util-linux"), options }
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        let _ = kill_processes_of(&self.options.data_directory(), &self.options.user);
        let _ = self.child.wait();
    }
}

/// A source whose processes cannot be seen (another PID namespace, another name of its program) is refused with the
/// remedy; one in a PID namespace below ours is adopted.
///
/// Spec: C4
#[tokio::test(flavor = "multi_thread")]
async fn k28_a_source_is_adopted_only_where_its_processes_are_seen() {
    let directory = TestDirectory::new().expect("a directory");
    let server = primary(directory.path(), &Settings::new()).await;
    // Somebody serves this directory whose processes are nowhere: nothing open is found, and nothing is proven by that.
    let other = Server::create(server::options(directory.join("other"), Role::Leader)).await.expect("made");
    std::fs::write(other.data_directory().join("postmaster.pid"), "1\n").expect("written");
    other.options().user.own(&other.data_directory().join("postmaster.pid")).expect("given");
    let unseen = SourceServer { data_directory: other.data_directory().to_owned(), ..source_of(&server) };
    let refused = new_source(&other).await.adopt(&unseen).await.expect_err("they are not seen").to_string();
    for word in ["cannot be seen", "PID namespace", "--mode copy"] {
        assert!(refused.contains(word), "{refused}");
    }

    // By the numbers that they have there.
    server.stop(StopMode::Fast).await.expect("stops");
    let _confined = Confined::start(&server);
    let connection = server.connection();
    until_async("it answers", async || connection.connect_as_client().await.is_ok()).await;
    let client = connection.connect_as_client().await.expect("connected");
    client.query_one("SELECT count(*) FROM items", &[]).await.expect("read");
    let source = new_source(&server).await;
    let adoption = source.adopt(&source_of(&server)).await.expect("adopted");
    assert!(adoption.unarmed > 0 && adoption.barriers > 0, "{adoption:?}");
    assert_eq!(source.probe().expect("probed"), []);
}

/// Spec: D2
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_is_adopted_by_a_barrier_on_its_leader() {
    let directory = TestDirectory::new().expect("a directory");
    let leader = server::leader(&directory).await;
    leader.start().await.expect("starts");
    let client = leader.connection().connect_as_client().await.expect("connected");
    client.batch_execute("CREATE TABLE items AS SELECT n FROM generate_series(1, 20000) AS n").await.expect("made");
    let options = server::options(directory.join("follower"), Role::Follower);
    let maker = BaseBackup { binaries: options.binaries.clone(), user: options.user.clone(), slot: "one".to_owned() };
    maker.make(&leader.connection(), &options.data_directory(), &|_| ()).await.expect("copied");
    let standby = Server::open(options).await.expect("a data directory");
    let primary = leader.connection();
    standby.make_standby(&StandbyOptions { primary, slot: Some("one".to_owned()) }).expect("a standby");
    standby.start().await.expect("follows");
    // A session that stays has files open.
    let reader = standby.connection().connect_as_client().await.expect("connected");
    reader.query_one("SELECT count(*) FROM items", &[]).await.expect("read");

    let source = new_source(&standby).await;
    let alone = source_of(&standby);
    assert!(
        matches!(source.adopt(&alone).await, Err(CloneError::CannotClone { .. })),
        "nobody tells it to close files"
    );
    let known = SourceServer { leader: Some(leader.connection()), ..alone };
    assert!(source.adopt(&known).await.expect("adopted").barriers > 0);
    assert_eq!(source.probe().expect("probed"), []);
    let kept = freeze_and_follow(&source).await;
    client.batch_execute("UPDATE items SET n = n + 1; TRUNCATE items; CHECKPOINT").await.expect("written");
    until_async("the standby has replayed", async || {
        reader.query_one("SELECT count(*) = 0 FROM items", &[]).await.expect("read").get(0)
    })
    .await;
    kept.assert_frozen().await;
}
