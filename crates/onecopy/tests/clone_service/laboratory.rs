//! A primary, a load, and clones of it, through the service of this very program.

#[path = "../../../../tests/src/ports.rs"]
mod ports;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onecopy_clone::plan::{FillOptions, Plan, Recovery, SourceServer, Warm};
use onecopy_clone::service::{CloneState, MakingEvent, Progress, ReadyClone, Service};
use onecopy_postgres::{
    Binaries, PostgresError, Server, ServerOptions, ServiceUser, StandbyOptions, StopMode, processes_of,
};
use tokio_postgres::Client;

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_onecopy");
/// Whatever is waited for is there by then, or never.
pub const DEADLINE: Duration = Duration::from_secs(180);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A primary with data. Everything is ended and removed when this is dropped.
pub struct Laboratory {
    pub primary: Server,
    pub directory: tempfile::TempDir,
    clones: Vec<PathBuf>,
}

impl Laboratory {
    /// With a table of `rows` rows, about 140 bytes each.
    pub async fn start(rows: u32) -> Laboratory {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).expect("its mode");
        let primary = Server::create(options(&directory.path().join("primary"))).await.expect("a primary");
        let laboratory = Laboratory { primary, directory, clones: Vec::new() };
        laboratory.primary.start().await.expect("started");
        let client = laboratory.client().await;
        let create = format!(
            "CREATE TABLE item AS SELECT number, repeat('x', 100) AS filler FROM generate_series(1, {rows}) AS number;
             CREATE TABLE removed AS SELECT * FROM item LIMIT {rows} / 10;
             CREATE INDEX ON item (number); CHECKPOINT"
        );
        client.batch_execute(&create).await.expect("data");
        laboratory
    }

    pub async fn client(&self) -> Client {
        connect(&self.primary).await
    }

    /// The plan of a clone of this name; slow, so that much happens before it is whole.
    pub fn plan(&mut self, name: &str, limit_bytes_per_second: Option<u64>) -> Plan {
        let target = self.directory.path().join(name).join("data");
        self.clones.push(target.clone());
        Plan {
            source: SourceServer {
                connection: self.primary.socket_connection(),
                data_directory: self.primary.data_directory().to_owned(),
                leader: None,
                replication: None,
            },
            tablespaces: self.directory.path().join(name).join("tablespaces"),
            target,
            user_name: "postgres".to_owned(),
            slot: name.to_owned(),
            recovery: Recovery::Auto,
            fill: FillOptions { limit_bytes_per_second, warm: Warm::Off },
            wal_keep_bytes_max: 1 << 30,
        }
    }

    pub async fn service(&self) -> Service {
        Service::reach(Path::new(PROGRAM), self.primary.data_directory()).await.expect("a service")
    }

    /// Makes clones, all ready.
    pub async fn make(&self, service: &Service, plans: Vec<Plan>) -> Vec<ReadyClone> {
        let (ready, failed) = make(service, plans).await;
        assert!(failed.is_empty(), "{failed:?}\n{}", self.log(service));
        ready
    }

    /// Starts a clone's server as a standby.
    pub async fn run(&self, ready: ReadyClone) -> Server {
        let mut options = options(ready.target.parent().expect("in a directory of its own"));
        options.password = self.primary.options().password.clone();
        let server = Server::open(options).await.expect("opened");
        let primary = self.primary.connection().with_application_name(&ready.slot);
        server.make_standby(&StandbyOptions { primary, slot: Some(ready.slot) }).expect("a standby");
        server.set_inherited(ready.descriptors.into_inherited());
        server.start().await.expect("started");
        server
    }

    /// The log of a service, which can be read also when its directory is gone.
    pub fn open_log(&self, service: &Service) -> std::fs::File {
        std::fs::File::open(service.rendezvous().log()).expect("a log")
    }

    /// What the service said.
    pub fn log(&self, service: &Service) -> String {
        std::fs::read_to_string(service.rendezvous().log()).unwrap_or_default()
    }

    /// Waits until a standby has replayed all that the primary has written so far, and tells whether both hold the same rows.
    pub async fn assert_same(&self, standby: &Server) {
        let (source, clone) = (self.client().await, connect(standby).await);
        let row = source.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.expect("a position");
        let position: String = row.get(0);
        let begin = Instant::now();
        let query = format!("SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn");
        while !clone.query_one(&query, &[]).await.expect("asked").get::<_, Option<bool>>(0).unwrap_or(false) {
            assert!(begin.elapsed() < DEADLINE, "the clone does not catch up");
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        let tables = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
            ORDER BY relname";
        let tables = source.query(tables, &[]).await.expect("tables");
        assert!(!tables.is_empty());
        for table in tables {
            let table: String = table.get(0);
            let content = |row: tokio_postgres::Row| (row.get::<_, i64>(0), row.get::<_, Option<String>>(1));
            let (wanted, found) = (
                content(source.query_one(&content_query(&table), &[]).await.expect("the primary's rows")),
                content(clone.query_one(&content_query(&table), &[]).await.expect("the clone's rows")),
            );
            assert_eq!(found, wanted, "table {table}");
        }
    }
}

fn content_query(table: &str) -> String {
    format!("SELECT count(*), md5(string_agg(md5(t::text || ctid::text), '' ORDER BY ctid)) FROM {table} t")
}

/// Connects to a server, which may wait for a service that is away: until another one has begun in its place.
pub async fn connect(server: &Server) -> Client {
    let begin = Instant::now();
    loop {
        match server.socket_connection().connect().await {
            Err(PostgresError::ConnectTimeout { .. }) if begin.elapsed() < DEADLINE => {}
            connected => return connected.expect("a connection"),
        }
    }
}

/// Makes clones: those that are ready, and reasons of those that failed.
pub async fn make(service: &Service, plans: Vec<Plan>) -> (Vec<ReadyClone>, Vec<String>) {
    let mut making = service.clone_all(plans).await.expect("accepted");
    let (mut ready, mut failed) = (Vec::new(), Vec::new());
    while let Some(event) = making.next().await.expect("the service lives") {
        match event {
            MakingEvent::Ready(clone) => ready.push(clone),
            MakingEvent::Failed { reason, .. } => failed.push(reason),
            MakingEvent::Preparing | MakingEvent::Frozen { .. } => {}
        }
    }
    (ready, failed)
}

/// Watches a clone to its end.
pub async fn watch(service: &Service, target: &Path) -> Progress {
    let mut watching = service.watch(target);
    let watch = async {
        let mut last = None;
        while let Some(progress) = watching.next().await.expect("the service answers") {
            last = Some(progress);
        }
        last.expect("at least the end is told")
    };
    tokio::time::timeout(DEADLINE, watch).await.expect("it ends")
}

/// Waits until a service has gone, with its directory.
pub async fn wait_gone(service: &Service) {
    let begin = Instant::now();
    while service.rendezvous().directory().exists() || service.rendezvous().is_held() {
        assert!(begin.elapsed() < DEADLINE, "the service stays");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Processes of this program that serve this service: `clone-keeper` or `clone-hydrator`.
pub fn processes(service: &Service, command: &str) -> Vec<i32> {
    processes_with_words(service, command).into_iter().map(|(number, _)| number).collect()
}

/// The same, with the words of their command lines.
pub fn processes_with_words(service: &Service, command: &str) -> Vec<(i32, Vec<String>)> {
    let entries = std::fs::read_dir("/proc").expect("proc").flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let directory = service.rendezvous().directory().to_str().expect("UTF-8").to_owned();
    let found = numbers.filter_map(|number| {
        let words = std::fs::read(format!("/proc/{number}/cmdline")).ok()?;
        let words: Vec<String> = String::from_utf8_lossy(&words).split('\0').map(str::to_owned).collect();
        (words.iter().any(|word| word == command) && words.contains(&directory)).then_some((number, words))
    });
    let found: Vec<_> = found.collect();
    let numbers: Vec<i32> = found.iter().map(|(number, _)| *number).collect();
    // A program that one of them starts has its words for a moment.
    let is_other_s_child = |number: i32| parent_of(number).is_some_and(|parent| !numbers.contains(&parent));
    found.into_iter().filter(|(number, _)| is_other_s_child(*number)).collect()
}

fn parent_of(process: i32) -> Option<i32> {
    // Source: proc_pid_stat(5); behind the name in brackets come the state and the parent.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()
}

/// Whether there was such a process.
pub fn kill(process: i32, signal: rustix::process::Signal) -> bool {
    let process = rustix::process::Pid::from_raw(process).expect("a process");
    rustix::process::kill_process(process, signal).is_ok()
}

/// Sends a signal to the process of this command, as soon as there is exactly one; its number. On a busy machine a hydrator is taken for dead
/// now and then, and another one is about to begin.
pub async fn signal(service: &Service, command: &str, signal: rustix::process::Signal) -> i32 {
    let begin = Instant::now();
    loop {
        let found = processes(service, command);
        if let [process] = found[..]
            && kill(process, signal)
        {
            return process;
        }
        assert!(begin.elapsed() < DEADLINE, "not one {command}: {found:?}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

fn options(home: &Path) -> ServerOptions {
    let (binaries, user) = (Binaries::find(None).expect("PostgreSQL"), ServiceUser::resolve(None).expect("an account"));
    let mut options = ServerOptions::new(
        binaries,
        user,
        home.to_owned(),
        ports::free_port().expect("a free port"),
        "a secret of the tests".to_owned(),
    );
    options.settings.set("fsync", "off").set("shared_buffers", "16MB").set("max_wal_senders", "10");
    // A query in a clone may wait for long.
    options.settings.set("max_standby_streaming_delay", "-1");
    options.start_timeout = DEADLINE;
    options
}

/// A load on the primary: updates, a table that comes and goes, checkpoints.
pub struct Load {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<u64>,
}

impl Load {
    pub async fn start(laboratory: &Laboratory) -> Load {
        let client = laboratory.client().await;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let mut rounds = 0_u64;
            while !stopped.load(Ordering::Relaxed) {
                let key = rounds * 7919 % 20_000;
                let update =
                    format!("UPDATE item SET filler = md5('{rounds}') WHERE number BETWEEN {key} AND {key} + 20");
                client.batch_execute(&update).await.expect("updated");
                if rounds.is_multiple_of(20) {
                    let other =
                        "DROP TABLE IF EXISTS other; CREATE TABLE other AS SELECT * FROM item LIMIT 500; CHECKPOINT";
                    client.batch_execute(other).await.expect("made anew");
                }
                rounds += 1;
            }
            rounds
        });
        Load { stop, task }
    }

    /// Ends it; the rounds that it has made.
    pub async fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.expect("no statement failed")
    }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        // Clones first: as long as one is filled, its service lives.
        for directory in self.clones.iter().map(PathBuf::as_path).chain([self.primary.data_directory()]) {
            for _ in 0..500 {
                let processes = processes_of(directory);
                if processes.is_empty() {
                    break;
                }
                for process in
                    processes.iter().filter_map(|number| rustix::process::Pid::from_raw(number.cast_signed()))
                {
                    let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let Ok(rendezvous) = onecopy_clone::service::Rendezvous::of_source(self.primary.data_directory()) else {
            return;
        };
        if std::thread::panicking() {
            eprintln!("the service said:\n{}", std::fs::read_to_string(rendezvous.log()).unwrap_or_default());
        }
        let directory = rendezvous.directory().to_owned();
        for process in all_processes_with(&directory) {
            let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        }
        let _ = std::fs::remove_dir_all(directory);
    }
}

fn all_processes_with(directory: &Path) -> Vec<rustix::process::Pid> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let name = directory.to_string_lossy().into_owned();
    let of_it = numbers.filter(|number| {
        let words = std::fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).split('\0').any(|word| word == name)
    });
    of_it.filter_map(rustix::process::Pid::from_raw).collect()
}

/// Stops a server that must be whole by now and starts it from its plain directory, without anything of ours.
pub async fn restart_plainly(server: &Server) {
    server.stop(StopMode::Fast).await.expect("stopped");
    server.set_inherited(Vec::new());
    server.start().await.expect("an ordinary directory");
}

/// Asserts that a clone is an ordinary directory.
pub fn assert_ordinary(progress: &Progress) {
    assert_eq!(progress.state, CloneState::Whole, "{progress:?}");
    let target = &progress.target;
    assert!(std::fs::symlink_metadata(target.join("PG_VERSION")).expect("a version").is_file());
    assert!(!target.join("onecopy.incomplete").exists());
}
