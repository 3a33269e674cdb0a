//! One real server through its life: made, started, crashed, recovered, refused, supervised.

mod server;

use std::fs::OpenOptions;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{
    ClusterState, ControlFile, OWN_SETTINGS, PostgresError, Role, Server, StartOutcome, StopMode, Supervisor,
    SupervisorState, WalLevel, processes_of,
};
use onecopy_testing::{TestDirectory, WAIT_MAX, create, free_port, process, until_async};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getpgid, waitid};

/// What `pg_controldata` calls the state.
fn state_in_words(state: ClusterState) -> &'static str {
    match state {
        ClusterState::Startup => "starting up",
        ClusterState::ShutDown => "shut down",
        ClusterState::ShutDownInRecovery => "shut down in recovery",
        ClusterState::ShuttingDown => "shutting down",
        ClusterState::InCrashRecovery => "in crash recovery",
        ClusterState::InArchiveRecovery => "in archive recovery",
        ClusterState::InProduction => "in production",
    }
}

/// Compares every field of the control file with what PostgreSQL's own program says.
fn assert_like_pg_controldata(server: &Server) -> ControlFile {
    let control = server.control_file().expect("readable");
    let program = server.options().binaries.program("pg_controldata");
    let output = Command::new(program).env("LC_ALL", "C").arg(server.data_directory()).output().expect("runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let said = |label: &str| {
        let line =
            text.lines().find(|line| line.starts_with(label)).unwrap_or_else(|| panic!("no {label:?} in {text}"));
        line[label.len()..].trim().to_owned()
    };
    assert_eq!(control.system_identifier.to_string(), said("Database system identifier:"));
    assert_eq!(control.catalog_version.to_string(), said("Catalog version number:"));
    assert_eq!(state_in_words(control.state), said("Database cluster state:"));
    assert_eq!(control.checkpoint.to_string(), said("Latest checkpoint location:"));
    assert_eq!(control.checkpoint_redo.to_string(), said("Latest checkpoint's REDO location:"));
    assert_eq!(control.timeline.to_string(), said("Latest checkpoint's TimeLineID:"));
    assert_eq!(if control.full_page_writes { "on" } else { "off" }, said("Latest checkpoint's full_page_writes:"));
    assert_eq!(control.min_recovery_point.to_string(), said("Minimum recovery ending location:"));
    assert_eq!(control.min_recovery_timeline.to_string(), said("Min recovery ending loc's timeline:"));
    assert_eq!(control.backup_start.to_string(), said("Backup start location:"));
    assert_eq!(if control.wal_level == WalLevel::Replica { "replica" } else { "other" }, said("wal_level setting:"));
    assert_eq!(if control.wal_log_hints { "on" } else { "off" }, said("wal_log_hints setting:"));
    assert_eq!(control.block_bytes.to_string(), said("Database block size:"));
    assert_eq!(control.wal_segment_bytes.to_string(), said("Bytes per WAL segment:"));
    assert_eq!(u32::from(control.data_checksums).to_string(), said("Data page checksum version:"));
    control
}

/// Spec: D1
#[tokio::test]
async fn a_server_lives_crashes_and_recovers() {
    let directory = TestDirectory::new().expect("a directory");
    // Made by initdb and not from a template: what it is told is looked at here.
    let server = Server::create(server::options(directory.join("leader"), Role::Leader)).await.expect("made");
    assert!(!server.is_running());
    let before = assert_like_pg_controldata(&server);
    assert_eq!((before.state, before.data_checksums), (ClusterState::ShutDown, true));

    assert_eq!(server.start().await.expect("starts"), StartOutcome::Started);
    let client = server.connection().connect_as_client().await.expect("TCP with the password");
    client
        .batch_execute("CREATE TABLE kept (n int); INSERT INTO kept SELECT generate_series(1, 1000)")
        .await
        .expect("written");
    for (name, value) in [
        ("data_checksums", "on"),
        ("server_encoding", "UTF8"),
        ("max_pred_locks_per_transaction", "128"),
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("cluster_name", "it's \\ \"quoted\""),
    ] {
        let row = client.query_one("SELECT current_setting($1)", &[&name]).await.expect("a setting");
        assert_eq!(row.get::<_, String>(0), value, "{name}");
    }
    // Nobody gets in without the password.
    let mut stranger = server.connection();
    stranger.password = Some("wrong".to_owned());
    let refused = stranger.connect_as_client().await.expect_err("refused").to_string();
    assert!(refused.contains("28P01"), "{refused}");

    server.crash_stop().await.expect("crashed");
    assert!(!server.is_running());
    assert_eq!(assert_like_pg_controldata(&server).state, ClusterState::InProduction);
    assert!(matches!(server.crash_stop().await, Err(PostgresError::NotRunning { .. })));

    assert_eq!(server.start().await.expect("recovers"), StartOutcome::Started);
    let client = server.socket_connection().connect_as_client().await.expect("the socket with the password");
    let row = client.query_one("SELECT count(*) FROM kept", &[]).await.expect("counted");
    assert_eq!(row.get::<_, i64>(0), 1000);
    assert_like_pg_controldata(&server);

    // Another process would see it like this: not its child, and running.
    let second = Server::open(server.options().clone()).await.expect("opened again");
    assert_eq!(second.process_id(), server.process_id());
    assert_eq!(second.start().await.expect("taken over"), StartOutcome::Adopted);
    let mut elsewhere = server.options().clone();
    elsewhere.port = free_port();
    let elsewhere = Server::open(elsewhere).await.expect("opened again");
    let error = elsewhere.start().await.expect_err("it runs on another port");
    assert!(matches!(error, PostgresError::RunningOnOtherPort { .. }), "{error}");

    let mut settings = server.settings();
    settings.set("work_mem", "12MB");
    server.set_settings(settings);
    server.reload().await.expect("reloaded");
    until_async("the new work_mem is there", async || {
        let client = server.connection().connect_as_client().await.expect("connected");
        client.query_one("SHOW work_mem", &[]).await.expect("shown").get::<_, String>(0) == "12MB"
    })
    .await;

    second.stop(StopMode::Fast).await.expect("stopped by who took it over");
    assert!(!server.is_running());
    assert_eq!(assert_like_pg_controldata(&server).state, ClusterState::ShutDown);
    server.stop(StopMode::Fast).await.expect("stopped already");
}

/// Spec: L4
#[tokio::test]
async fn refusals_say_what_and_why() {
    let directory = TestDirectory::new().expect("a directory");
    let server = server::leader(&directory).await;

    // A port that somebody else has: the error holds the server's own line.
    let _occupant = TcpListener::bind(("127.0.0.1", server.options().port)).expect("the port was free");
    let error = server.start().await.expect_err("the port is busy");
    assert!(matches!(error, PostgresError::StartFailed { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("could not bind") && text.contains("Address already in use"), "{text}");
    assert!(!server.is_running());

    let again = Server::create(server.options().clone()).await.expect_err("there is one already");
    assert!(matches!(again, PostgresError::DataDirectoryNotEmpty { .. }), "{again}");

    let mut settings = server.settings();
    settings.set("shared_buffers", "many");
    server.set_settings(settings);
    let text = server.start().await.expect_err("no such value").to_string();
    assert!(text.contains("invalid value for parameter \"shared_buffers\""), "{text}");

    let mut options = server.options().clone();
    options.socket_directory = Some(directory.join("x".repeat(100)));
    let error = Server::open(options).await.expect_err("too long");
    assert!(matches!(error, PostgresError::SocketPathTooLong { length_max: 107, .. }), "{error}");

    let mut options = server.options().clone();
    options.home = directory.join("nothing");
    let error = Server::open(options).await.expect_err("nothing there");
    assert!(matches!(error, PostgresError::NotADataDirectory { .. }), "{error}");

    let data_directory = server.data_directory();
    std::fs::write(data_directory.join("PG_VERSION"), "14\n").expect("written");
    let error = Server::open(server.options().clone()).await.expect_err("version 14");
    assert!(matches!(error, PostgresError::VersionMismatch { data: 14, .. }), "{error}");
}

/// Spec: A1
#[tokio::test]
async fn a_supervised_server_comes_back_after_kill_9() {
    let directory = TestDirectory::new().expect("a directory");
    let server = Arc::new(server::leader(&directory).await);
    let supervisor = Supervisor::spawn(server.clone());
    supervisor.wait_running().await.expect("runs");
    let first = server.process_id().expect("runs");

    let mut state = supervisor.state();
    assert_eq!(*state.borrow_and_update(), SupervisorState::Running { process_id: first, restarts: 0 });
    assert!(process::send(first, Signal::KILL));
    let mut seen = Vec::new();
    let second = loop {
        state.changed().await.expect("supervised");
        let now = state.borrow_and_update().clone();
        seen.push(now.clone());
        if let SupervisorState::Running { process_id, restarts } = now {
            assert_eq!(restarts, 1);
            break process_id;
        }
    };
    assert_ne!(first, second);
    assert!(matches!(seen.first(), Some(SupervisorState::BackingOff { .. })), "{seen:?}");
    server.connection().connect_as_client().await.expect("serves again");

    supervisor.restart(StopMode::Fast).await.expect("restarted");
    let third = server.process_id().expect("runs");
    assert_ne!(second, third);
    supervisor.wait_running().await.expect("runs");

    supervisor.stop(StopMode::Fast).await.expect("stopped");
    assert_eq!(*state.borrow_and_update(), SupervisorState::Stopped { error: None });
    assert!(!server.is_running());
    assert_eq!(server.control_file().expect("readable").state, ClusterState::ShutDown);
}

/// Spec: A1
#[tokio::test]
async fn a_supervisor_says_why_and_can_be_stopped_while_it_backs_off() {
    let directory = TestDirectory::new().expect("a directory");
    let server = Arc::new(server::leader(&directory).await);
    let occupant = TcpListener::bind(("127.0.0.1", server.options().port)).expect("the port was free");
    let supervisor = Supervisor::spawn(server.clone());
    let error = supervisor.wait_running().await.expect_err("the port is busy").to_string();
    assert!(error.contains("Address already in use"), "{error}");
    drop(occupant);
    let mut state = supervisor.state();
    let running = state.wait_for(|state| matches!(state, SupervisorState::Running { .. }));
    let running = tokio::time::timeout(WAIT_MAX, running).await;
    running.expect("the port is free now").expect("supervised");
    supervisor.stop(StopMode::Immediate).await.expect("stopped");
    assert!(!server.is_running());

    // A supervisor that is dropped lets go: the server runs on, and the next one takes it over.
    let supervisor = Supervisor::spawn(server.clone());
    supervisor.wait_running().await.expect("runs");
    let process_id = server.process_id();
    let mut state = supervisor.state();
    drop(supervisor);
    while state.changed().await.is_ok() {}
    assert_eq!(server.process_id(), process_id);
    let supervisor = Supervisor::spawn(server.clone());
    supervisor.wait_running().await.expect("runs");
    assert_eq!(server.process_id(), process_id);
    supervisor.stop(StopMode::Fast).await.expect("stopped");
}

/// A server whose postmaster somebody else has just begun, and that has no lock file yet, is stopped like any other.
///
/// Spec: A3
#[tokio::test]
async fn a_postmaster_that_has_no_lock_file_yet_is_stopped() {
    let directory = TestDirectory::new().expect("a directory");
    let server = server::leader(&directory).await;
    let data_directory = server.data_directory();
    // The postmaster reads its settings before it writes the file, and nobody writes into this one.
    let settings = data_directory.join("postgresql.auto.conf");
    std::fs::remove_file(&settings).expect("removed");
    let made = std::process::Command::new("mkfifo").args(["-m", "666"]).arg(&settings).status().expect("mkfifo runs");
    assert!(made.success());
    let begun = until_async("a process works there", async || !processes_of(data_directory).is_empty());
    tokio::select! {
        result = server.start() => panic!("it cannot start: {result:?}"),
        () = begun => {}
    }
    assert!(!data_directory.join("postmaster.pid").exists());
    // As of somebody who has not begun it.
    let other = Server::open(server.options().clone()).await.expect("a server");
    let [postmaster] = processes_of(data_directory)[..] else { panic!("it has begun nobody yet") };
    // One that has come as far as its settings has signals blocked, and takes them when it has read this file to its
    // end.
    let end_of_settings = async {
        until_async("it is signalled", async || is_interrupted_or_gone(postmaster)).await;
        // An error says that nobody reads it yet, or any more.
        let end = || OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&settings).is_ok();
        until_async("it has read its settings, or is gone", async || {
            end() || !processes_of(data_directory).contains(&postmaster)
        })
        .await;
    };
    let ((), stopped) = tokio::join!(end_of_settings, other.stop(StopMode::Fast));
    stopped.expect("stopped");
    assert_eq!(processes_of(data_directory), Vec::<u32>::new());
    let ended = waitid(
        WaitId::Pid(Pid::from_raw(postmaster.cast_signed()).expect("a process")),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
    );
    let signal = ended.expect("a child").expect("it has ended").terminating_signal();
    assert_ne!(signal, Some(Signal::KILL.as_raw()), "it was taken for what a dead one has left");
}

/// Whether SIGINT waits for a process that has it blocked, or the process has ended.
fn is_interrupted_or_gone(process_id: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process_id}/status")).unwrap_or_default();
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let pending = field("ShdPnd:").map_or(0, |mask| u64::from_str_radix(mask, 16).expect("a mask"));
    field("State:").is_none_or(|state| state.starts_with('Z')) || pending & (1 << (Signal::INT.as_raw() - 1)) != 0
}

/// Spec: A3
#[tokio::test]
async fn what_an_interrupted_initdb_left_is_no_server() {
    let directory = TestDirectory::new().expect("a directory");
    let mut options = server::options(directory.join("leader"), Role::Leader);
    options.user.create_directory(&options.home.join("data.new").join("base")).expect("made");
    std::fs::write(options.home.join("data.new").join("PG_VERSION"), "15\n").expect("written");
    let error = Server::open(options.clone()).await.expect_err("not finished");
    assert!(matches!(error, PostgresError::NotADataDirectory { .. }), "{error}");

    let password = std::mem::replace(&mut options.password, "two\nlines".to_owned());
    let error = Server::create(options.clone()).await.expect_err("initdb would take the first line");
    assert!(matches!(error, PostgresError::InvalidSetting { .. }), "{error}");

    options.password = password;
    let server = Server::create(options.clone()).await.expect("made over the leftover");
    let mut left: Vec<_> =
        std::fs::read_dir(&options.home).expect("readable").map(|entry| entry.expect("entry").file_name()).collect();
    left.sort();
    assert_eq!(left, ["data"], "neither the leftover nor the password's file stays");
    assert_eq!(server.control_file().expect("readable").state, ClusterState::ShutDown);
}

/// Spec: A1
#[tokio::test]
async fn a_frozen_server_is_reported_and_can_be_killed() {
    let directory = TestDirectory::new().expect("a directory");
    let mut options = server::options(directory.join("leader"), Role::Leader);
    options.stop_timeout = Duration::from_secs(1);
    let server = create(options).await.expect("made");
    server.start().await.expect("starts");
    let process_id = server.process_id().expect("runs");
    let postmaster = Pid::from_raw(process_id.cast_signed()).expect("a process");
    // Ctrl-C in the terminal of this process must not reach it.
    assert_eq!(getpgid(Some(postmaster)).expect("lives"), postmaster);
    process::stop(process_id);
    let error = server.stop(StopMode::Fast).await.expect_err("it cannot hear");
    assert!(matches!(error, PostgresError::NotStopped { .. }), "{error}");
    assert!(server.is_running());
    // From here on it may take its time.
    let mut options = server.options().clone();
    options.stop_timeout = WAIT_MAX;
    let server = Server::open(options).await.expect("opened again");
    server.crash_stop().await.expect("killed");
    assert_eq!(server.start().await.expect("recovers"), StartOutcome::Started);
    server.stop(StopMode::Immediate).await.expect("stops");
}

/// A dead process of the server's account that nobody has reaped, as a killed postmaster is whose parent was killed,
/// too.
struct Zombie(std::process::Child);

impl Zombie {
    fn of(server: &Server) -> Zombie {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        let child = server.options().user.command("true").spawn().expect("runs");
        waitid(WaitId::Pid(Pid::from_child(&child)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).expect("ends");
        Zombie(child)
    }
}

impl Drop for Zombie {
    fn drop(&mut self) {
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn locks_of_a_postmaster_that_nobody_has_reaped_do_not_hinder_the_next() {
    let directory = TestDirectory::new().expect("a directory");
    let server = server::leader(&directory).await;
    let socket = server.options().socket_directory().join(format!(".s.PGSQL.{}.lock", server.options().port));
    server.options().user.create_directory(&server.options().socket_directory()).expect("a directory for the socket");
    let zombie = Zombie::of(&server);
    for lock in [server.data_directory().join("postmaster.pid"), socket.clone()] {
        std::fs::write(lock, format!("{}\n{}\n", zombie.0.id(), server.data_directory().display())).expect("written");
    }
    assert_eq!(server.start().await.expect("starts"), StartOutcome::Started);
    server.stop(StopMode::Fast).await.expect("stops");
    // One whose process lives is somebody's.
    let mut living = server.options().user.command("sleep").arg("600").spawn().expect("runs");
    std::fs::write(socket, format!("{}\n", living.id())).expect("written");
    let refused = server.start().await.expect_err("the socket is in use").to_string();
    living.kill().expect("killed");
    living.wait().expect("reaped");
    assert!(refused.contains(&format!("PID {}", living.id())), "{refused}");
}

/// A database's owner chooses its settings. In a session of a superuser's they would have his operators found, run as
/// the superuser, and what is made there belong to him.
///
/// Spec: C2
#[tokio::test]
async fn p12_a_session_of_our_own_goes_by_no_setting_of_a_databases_owner() {
    let directory = TestDirectory::new().expect("a directory");
    let server = server::leader(&directory).await;
    assert_eq!(server.start().await.expect("starts"), StartOutcome::Started);
    let superuser = server.connection();
    let client = superuser.connect_as_client().await.expect("connected");
    client.batch_execute("CREATE ROLE owner LOGIN PASSWORD 'owner'").await.expect("made");
    client.batch_execute("CREATE DATABASE owned OWNER owner").await.expect("made");
    let mut owner = superuser.with_database("owned");
    (owner.user, owner.password) = ("owner".to_owned(), Some("owner".to_owned()));
    let client = owner.connect_as_client().await.expect("connected");
    client
        .batch_execute(
            "CREATE SCHEMA his; \
             CREATE FUNCTION his.deceive(name, name) RETURNS boolean LANGUAGE sql AS 'SELECT false'; \
             CREATE OPERATOR his.= (LEFTARG = name, RIGHTARG = name, FUNCTION = his.deceive); \
             ALTER DATABASE owned SET search_path = his, pg_catalog; \
             ALTER DATABASE owned SET role = owner; \
             ALTER DATABASE owned SET standard_conforming_strings = off; \
             ALTER DATABASE owned SET DateStyle = German; \
             ALTER DATABASE owned SET default_transaction_isolation = serializable; \
             ALTER DATABASE owned SET default_transaction_deferrable = on; \
             ALTER DATABASE owned SET statement_timeout = '10min'; \
             ALTER DATABASE owned SET lock_timeout = '10min'; \
             ALTER DATABASE owned SET idle_in_transaction_session_timeout = '10min'; \
             ALTER DATABASE owned SET idle_session_timeout = '10min'; \
             ALTER DATABASE owned SET default_transaction_read_only = on",
        )
        .await
        .expect("the owner may");
    const FOUND: &str = "SELECT count(*), current_user::text FROM pg_catalog.pg_namespace \
        WHERE nspname = name 'pg_catalog' GROUP BY 2";
    let superuser = superuser.with_database("owned");
    // That the settings count otherwise.
    let client = superuser.connect_as_client().await.expect("connected");
    assert_eq!(client.query(FOUND, &[]).await.expect("asked").len(), 0);
    let client = superuser.connect().await.expect("connected");
    let row = client.query_one(FOUND, &[]).await.expect("asked");
    assert_eq!((row.get::<_, i64>(0), row.get::<_, &str>(1)), (1, superuser.user.as_str()));
    for (name, value) in OWN_SETTINGS {
        let row = client.query_one("SELECT current_setting($1)", &[&name]).await.expect("a setting");
        let shown: &str = row.get(0);
        // PostgreSQL shows the order of day and month behind the style.
        assert_eq!(shown.split(',').next(), Some(value), "{name}");
    }
    server.stop(StopMode::Fast).await.expect("stopped");
}
