//! A primary, a load, and clones of it, through the service of this very program.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onecopy_clone::plan::{FillOptions, Plan, Recovery, SourceServer, Warm};
use onecopy_clone::service::{CloneState, MakingEvent, Progress, ReadyClone, Rendezvous, Service};
use onecopy_postgres::{Binaries, PostgresError, Server, ServerOptions, StandbyOptions, StopMode};
use onecopy_testing::process::{arguments, kill_all, parent_of, send, with_argument, working_in};
use onecopy_testing::{TestDirectory, USER, WAIT_MAX, create, server_options, until_async, wait_replayed};
use rustix::process::Signal;
use tokio_postgres::Client;

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_onecopy");

/// A primary with data. Everything is ended and removed when this is dropped.
pub struct ClonedPrimary {
    pub server: Server,
    pub directory: TestDirectory,
}

impl ClonedPrimary {
    /// With a table of `rows` rows, about 140 bytes each.
    pub async fn start(rows: u32) -> ClonedPrimary {
        let directory = TestDirectory::new().expect("a directory");
        let home = directory.join("primary");
        ClonedPrimary::start_at(directory, &home, rows).await
    }

    /// The same, with the primary in this directory.
    pub async fn start_at(directory: TestDirectory, home: &Path, rows: u32) -> ClonedPrimary {
        let server = create(options(home)).await.expect("a primary");
        let primary = ClonedPrimary { server, directory };
        primary.server.start().await.expect("started");
        let client = primary.client().await;
        let create = format!(
            "CREATE TABLE item AS SELECT number, repeat('x', 100) AS filler FROM generate_series(1, {rows}) AS number;
             CREATE TABLE removed AS SELECT * FROM item LIMIT {rows} / 10;
             CREATE INDEX ON item (number); CHECKPOINT"
        );
        client.batch_execute(&create).await.expect("data");
        primary
    }

    pub async fn client(&self) -> Client {
        connect(&self.server).await
    }

    /// The plan of a clone of this name; slow, so that much happens before it is whole.
    pub fn plan(&self, name: &str, limit_bytes_per_second: Option<u64>) -> Plan {
        Plan {
            source: SourceServer {
                connection: self.server.socket_connection(),
                data_directory: self.server.data_directory().to_owned(),
                leader: None,
                replication: None,
            },
            tablespaces: self.directory.join(name).join("tablespaces"),
            target: self.directory.join(name).join("data"),
            user_name: USER.to_owned(),
            slot: name.to_owned(),
            recovery: Recovery::Auto,
            fill: FillOptions { limit_bytes_per_second, warm: Warm::Off },
            wal_keep_bytes_max: 1 << 30,
        }
    }

    pub async fn service(&self) -> Service {
        Service::reach(Path::new(PROGRAM), self.server.data_directory()).await.expect("a service")
    }

    /// Makes clones, all ready.
    pub async fn make(&self, service: &Service, plans: Vec<Plan>) -> Vec<ReadyClone> {
        let (ready, failed) = make(service, plans).await;
        assert!(failed.is_empty(), "{failed:?}\n{}", self.log(service));
        ready
    }

    /// Starts a clone's server as a standby.
    pub async fn run(&self, ready: ReadyClone) -> Server {
        let options = options(ready.target.parent().expect("in a directory of its own"));
        let server = Server::open(options).await.expect("opened");
        let primary = self.server.connection().with_application_name(&ready.slot);
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

    /// Waits until a standby has replayed all that the primary has written so far, and tells whether both hold the
    /// same rows.
    pub async fn assert_same(&self, standby: &Server) {
        let (source, clone) = (self.client().await, connect(standby).await);
        wait_replayed(&source, &clone).await.expect("it catches up");
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

/// A primary, its service, and a clone that runs and gets only what is read of it.
pub async fn begin_clone(rows: u32) -> (ClonedPrimary, Service, Plan, Server) {
    let primary = ClonedPrimary::start(rows).await;
    let service = primary.service().await;
    let plan = primary.plan("clone", Some(0));
    let ready = primary.make(&service, vec![plan.clone()]).await.remove(0);
    let clone = primary.run(ready).await;
    (primary, service, plan, clone)
}

/// The clone gets all the rest, is an ordinary standby and has what its primary has; then nothing of us is left.
pub async fn end_clone(primary: &ClonedPrimary, service: &Service, plan: &Plan, clone: &Server) {
    service.set_limit(&plan.target, None).await.expect("no limit");
    assert_ordinary(&watch(service, &plan.target).await);
    primary.assert_same(clone).await;
    wait_gone(service).await;
}

/// Connects to a server, which may wait for a service that is away: until another one has begun in its place.
pub async fn connect(server: &Server) -> Client {
    let connected = async {
        loop {
            match server.socket_connection().connect_as_client().await {
                Err(PostgresError::ConnectTimeout { .. }) => {}
                connected => return connected.expect("a connection"),
            }
        }
    };
    tokio::time::timeout(WAIT_MAX, connected).await.expect("it answers")
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
    tokio::time::timeout(WAIT_MAX, watch).await.expect("it ends")
}

/// Waits until a service has gone, with its directory.
pub async fn wait_gone(service: &Service) {
    let place = service.rendezvous();
    until_async("the service is gone", async || !place.directory().exists() && !place.is_held()).await;
}

/// Processes of this program that serve this service: `clone-keeper` or `clone-hydrator`.
pub fn processes(service: &Service, command: &str) -> Vec<u32> {
    let mut found = with_argument(&service.rendezvous().directory().to_string_lossy());
    found.retain(|process| arguments(*process).iter().any(|word| word == command));
    // A program that one of them starts has its words for a moment.
    let is_other_s_child = |process: &u32| parent_of(*process).is_some_and(|parent| !found.contains(&parent));
    found.iter().copied().filter(is_other_s_child).collect()
}

/// Sends a signal to the process of this command, as soon as there is exactly one; its number. On a busy machine a
/// hydrator is taken for dead now and then, and another one is about to begin.
pub async fn signal(service: &Service, command: &str, signal: Signal) -> u32 {
    let mut reached = 0;
    until_async(&format!("there is one {command}"), async || match processes(service, command)[..] {
        [process] => {
            reached = process;
            send(process, signal)
        }
        _ => false,
    })
    .await;
    reached
}

fn options(home: &Path) -> ServerOptions {
    let binaries = Binaries::find(None).expect("PostgreSQL");
    let mut options = server_options(binaries, home.to_owned()).expect("an account");
    options.settings.set("full_page_writes", "on").set("shared_buffers", "16MB").set("max_wal_senders", "10");
    // A query in a clone may wait for long.
    options.settings.set("max_standby_streaming_delay", "-1");
    options
}

/// A load on the primary: updates, a table that comes and goes, checkpoints.
pub struct Load {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<u64>,
}

impl Load {
    pub async fn start(primary: &ClonedPrimary) -> Load {
        let client = primary.client().await;
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

impl Drop for ClonedPrimary {
    fn drop(&mut self) {
        let rendezvous = Rendezvous::of_source(self.server.data_directory());
        // The servers first: as long as a clone is filled, its service lives.
        kill_all(|| working_in(self.directory.path()));
        let Ok(rendezvous) = rendezvous else { return };
        if std::thread::panicking() {
            eprintln!("the service said:\n{}", std::fs::read_to_string(rendezvous.log()).unwrap_or_default());
        }
        kill_all(|| with_argument(&rendezvous.directory().to_string_lossy()));
        let _ = std::fs::remove_dir_all(rendezvous.directory());
    }
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
