//! Two hosts: this one, and a network namespace with a slow wire to it. Everything is ended and removed when they are
//! dropped.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onecopy_clone::network::keys::make_host;
use onecopy_clone::plan::{FillOptions, Recovery, Warm};
use onecopy_clone::service::{HYDRATOR_COMMAND, Rendezvous};
use onecopy_host::remote::CloneOrder;
use onecopy_postgres::{AccessRule, Binaries, ConnectionParameters, Server, Settings};
use onecopy_testing::process::{arguments, kill, kill_all, with_argument, working_in};
use onecopy_testing::{TestDirectory, create, server_options, until, until_async, wait_replayed};

use crate::network::Network;

const PROGRAM: &str = env!("CARGO_BIN_EXE_onecopy");
/// Between two updates: with whole pages after each checkpoint, some 4 MB of log a second, which a wire of
/// 100 Mbit/s carries beside the image.
const LOAD_PAUSE: Duration = Duration::from_millis(20);
pub const SOURCE_PORT: u16 = 6440;
const CLONE_PORT: u16 = 6441;
const CLONE_SERVER_PORT: u16 = 5499;

pub struct TwoHosts {
    pub directory: TestDirectory,
    primary: Server,
    pub network: Network,
    host_services: Mutex<Vec<Child>>,
}

/// A process that is killed when nobody needs it.
pub struct HostService {
    arguments: Vec<String>,
    process: u32,
}

impl TwoHosts {
    /// A primary here with a table of `rows` rows, about 140 bytes each, and `onecopy host` on each side.
    pub async fn start(rows: u32) -> TwoHosts {
        let network = Network::make();
        let directory = TestDirectory::new().expect("a directory");
        let clones = directory.join("clones");
        std::fs::create_dir(&clones).expect("a directory");
        std::fs::set_permissions(&clones, std::fs::Permissions::from_mode(0o755)).expect("its mode");
        for (name, host) in [("here", 1), ("there", 2), ("third", 3)] {
            make_host(&directory.join("keys"), name, &[network.address(host)]).expect("keys");
        }
        make_host(&directory.join("other-keys"), "here", &[]).expect("keys");
        let binaries = Binaries::find(None).expect("PostgreSQL");
        let mut options = server_options(binaries, directory.join("primary")).expect("an account");
        options.settings.set("full_page_writes", "on").set("shared_buffers", "16MB").set("max_wal_senders", "10");
        options.listen_address = network.address(1);
        options.access_rules.extend(AccessRule::by_password(&[&format!("{}/24", network.address(0))]));
        let primary = create(options).await.expect("a primary");
        let hosts = TwoHosts { directory, primary, network, host_services: Mutex::default() };
        hosts.primary.start().await.expect("started");
        let create = format!(
            "CREATE TABLE item AS SELECT number, repeat('x', 100) AS filler FROM generate_series(1, {rows}) AS number;
             CREATE INDEX ON item (number); CHECKPOINT"
        );
        let source = hosts.source_connection().connect_as_client().await.expect("connected");
        source.batch_execute(&create).await.expect("data");
        hosts.start_host_services();
        hosts.wait_answering().await;
        hosts
    }

    /// A table of so many rows of half a kilobyte that cannot be compressed; its bytes.
    pub async fn make_noise(&self, rows: u32) -> u64 {
        let hash = |part| format!("sha512(convert_to('{part} ' || number, 'UTF8'))");
        let hashes = (0..8).map(hash).collect::<Vec<String>>().join(" || ");
        let create = format!(
            "CREATE TABLE noise AS SELECT number, {hashes} AS bytes FROM generate_series(1, {rows}) AS number; \
             CHECKPOINT"
        );
        self.source_connection()
            .connect_as_client()
            .await
            .expect("connected")
            .batch_execute(&create)
            .await
            .expect("data");
        let size = query(&self.source_connection(), "SELECT pg_table_size('noise')").await;
        size.parse().expect("a number")
    }

    fn start_host_services(&self) {
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let source = [
            format!("--listen={}:{SOURCE_PORT}", self.network.address(1)),
            format!("--keys={}", path(self.keys("here"))),
            format!("--source={}", path(self.primary.data_directory().to_owned())),
        ];
        let source: Vec<String> = [PROGRAM.to_owned(), "host".to_owned()].into_iter().chain(source).collect();
        let there = [
            format!("--listen={}:{CLONE_PORT}", self.network.address(2)),
            format!("--keys={}", path(self.keys("there"))),
            format!("--target={}", path(self.directory.join("clones"))),
        ];
        let enter = ["ip", "netns", "exec", &self.network.space(), PROGRAM, "host"].map(str::to_owned);
        let there: Vec<String> = enter.into_iter().chain(there).collect();
        for arguments in [source, there] {
            self.spawn(&arguments);
        }
    }

    /// Starts `onecopy host`; its process.
    fn spawn(&self, arguments: &[String]) -> u32 {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.directory.join("host-services.log"));
        let mut command = Command::new(&arguments[0]);
        command.args(&arguments[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.expect("a log"));
        let child = command.spawn().expect("onecopy host starts");
        let process = child.id();
        self.lock_host_services().push(child);
        process
    }

    fn lock_host_services(&self) -> MutexGuard<'_, Vec<Child>> {
        self.host_services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one on the source's side.
    pub fn source_host_service(&self) -> HostService {
        let process = self.lock_host_services()[0].id();
        HostService { arguments: arguments(process), process }
    }

    /// Kills `onecopy host` and starts it again.
    pub fn restart(&self, host_service: HostService) -> HostService {
        kill(host_service.process);
        // Its address is free only when it is gone.
        if let Some(old) = self.lock_host_services().iter_mut().find(|old| old.id() == host_service.process) {
            let _ = old.wait();
        }
        HostService { process: self.spawn(&host_service.arguments), arguments: host_service.arguments }
    }

    async fn wait_answering(&self) {
        for (address, name) in [(self.source_address(), "there"), (self.clone_address(), "here")] {
            let keys = self.keys(name);
            let answers = async || onecopy_host::remote::ping(&address, &keys).await.is_ok();
            until_async(&format!("{address} answers"), answers).await;
        }
    }

    fn source_address(&self) -> String {
        format!("{}:{SOURCE_PORT}", self.network.address(1))
    }

    pub fn clone_address(&self) -> String {
        format!("{}:{CLONE_PORT}", self.network.address(2))
    }

    pub fn keys(&self, name: &str) -> PathBuf {
        self.directory.join("keys").join(name)
    }

    /// Keys of another authority.
    pub fn stranger_keys(&self) -> PathBuf {
        self.directory.join("other-keys/here")
    }

    pub fn source_connection(&self) -> ConnectionParameters {
        self.primary.socket_connection()
    }

    /// The clone's Unix socket: files are shared by both hosts, networks are not.
    pub fn clone_connection(&self, name: &str) -> ConnectionParameters {
        let home = format!("{}.server/run", self.order(name).target.display());
        ConnectionParameters { host: home, port: CLONE_SERVER_PORT, ..self.source_connection() }
    }

    pub fn order(&self, name: &str) -> CloneOrder {
        let target = self.directory.join("clones").join(name);
        let mut settings = Settings::new();
        settings.set("shared_buffers", "16MB").set("max_connections", "100").set("max_wal_senders", "10");
        CloneOrder {
            source: self.primary.data_directory().to_owned(),
            connection: self.source_connection(),
            leader: None,
            target,
            slot: name.to_owned(),
            recovery: Recovery::Auto,
            fill: FillOptions { limit_bytes_per_second: Some(2 << 20), warm: Warm::Cache },
            origin: self.source_address(),
            origin_port: self.source_connection().port,
            port: CLONE_SERVER_PORT,
            major_version: self.primary.options().binaries.major_version(),
            access_rules: Vec::new(),
            settings,
        }
    }

    /// Words that order the same on the command line, and where the clone will be.
    pub fn command_line(&self, name: &str) -> (PathBuf, CommandLine) {
        let target = self.order(name).target;
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let words = [
            "clone".to_owned(),
            path(self.primary.data_directory()),
            path(&target),
            format!("--to={}", self.clone_address()),
            format!("--keys={}", path(&self.keys("here"))),
            format!("--port={CLONE_SERVER_PORT}"),
            "--json".to_owned(),
        ];
        let password = self.primary.options().password.clone();
        (target, CommandLine { words: words.into(), password })
    }

    pub fn logs(&self) -> String {
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        let places = self.services(&self.order("clone").target);
        let services: Vec<String> = places.iter().map(|place| read(place.log())).collect();
        let server = read(self.directory.join("clones/clone.server/server.log"));
        format!("{}\n{}\n{server}", read(self.directory.join("host-services.log")), services.join("\n"))
    }

    /// Kills the process that saves the source's old content, and waits for its successor.
    pub fn kill_source_hydrator(&self) {
        kill_hydrator(&Rendezvous::of_source(self.primary.data_directory()).expect("a place"));
    }

    /// Kills the process that fills the clone, and waits for its successor.
    pub fn kill_clone_hydrator(&self, name: &str) {
        kill_hydrator(&Rendezvous::of_target(&self.order(name).target));
    }

    fn services(&self, target: &Path) -> Vec<Rendezvous> {
        let source = Rendezvous::of_source(self.primary.data_directory()).ok();
        source.into_iter().chain([Rendezvous::of_target(target)]).collect()
    }

    pub async fn wait_services_gone(&self, target: &Path) {
        for place in self.services(target) {
            until_async("the service is gone", async || !place.directory().exists() && !place.is_held()).await;
        }
    }

    /// Updates that go on until they are ended.
    pub async fn load(&self) -> Load {
        let client = self.source_connection().connect_as_client().await.expect("connected");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let mut rounds = 0_u64;
            while !stopped.load(Ordering::Relaxed) {
                let key = rounds * 7919 % 90_000;
                let update =
                    format!("UPDATE item SET filler = md5('{rounds}') WHERE number BETWEEN {key} AND {key} + 20");
                client.batch_execute(&update).await.expect("updated");
                if rounds.is_multiple_of(100) {
                    client.batch_execute("CHECKPOINT").await.expect("written");
                }
                rounds += 1;
                tokio::time::sleep(LOAD_PAUSE).await;
            }
        });
        Load { stop, task }
    }

    /// Bytes of log that the clone has received over its present connection; from the beginning of a file of the log
    /// on.
    pub async fn log_bytes(&self, name: &str) -> u64 {
        let received = "SELECT coalesce((SELECT written_lsn - receive_start_lsn FROM pg_stat_wal_receiver), 0)::bigint";
        query(&self.clone_connection(name), received).await.parse().expect("a number")
    }

    /// Waits until the clone has replayed all, and compares every row and its place.
    pub async fn assert_same(&self, name: &str) {
        let clone = self.clone_connection(name);
        let source = self.source_connection().connect_as_client().await.expect("connected");
        let standby = clone.connect_as_client().await.expect("connected");
        wait_replayed(&source, &standby).await.expect("it catches up");
        let tables = "SELECT string_agg(relname, ' ') FROM pg_class
            WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace";
        for table in query(&self.source_connection(), tables).await.split(' ') {
            let content = format!(
                "SELECT count(*) || coalesce(md5(string_agg(md5(t::text || ctid::text), '' ORDER BY ctid)), '') \
                 FROM {table} t"
            );
            assert_eq!(query(&clone, &content).await, query(&self.source_connection(), &content).await, "{table}");
        }
    }
}

pub struct CommandLine {
    words: Vec<String>,
    password: String,
}

impl CommandLine {
    pub fn into_command(self) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(&self.words).env("PGPASSWORD", &self.password);
        command
    }
}

pub struct Load {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl Load {
    pub async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.expect("no statement failed");
    }
}

/// The first column of the first row, as text.
pub async fn query(connection: &ConnectionParameters, statement: &str) -> String {
    let client = connection.connect_as_client().await.expect("connected");
    let messages = client.simple_query(statement).await.expect("answered");
    let row = messages.iter().find_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    row.expect("a row").to_owned()
}

/// Kills a hydrator and waits for its successor. On a busy machine one is taken for dead now and then, and another one
/// is about to begin.
fn kill_hydrator(place: &Rendezvous) {
    let hydrator = || {
        of_service(place).into_iter().find(|process| arguments(*process).iter().any(|word| word == HYDRATOR_COMMAND))
    };
    tokio::task::block_in_place(|| {
        let mut killed = None;
        until("somebody is at work", || {
            killed = hydrator();
            killed.is_some()
        });
        killed.into_iter().for_each(kill);
        until("it has a successor", || hydrator().is_some_and(|successor| Some(successor) != killed));
    });
}

/// The processes of a service: their command lines have its directory.
fn of_service(place: &Rendezvous) -> Vec<u32> {
    with_argument(&place.directory().to_string_lossy())
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        let places = self.services(&self.order("clone").target);
        // `onecopy host` first, also those that were started again.
        for mut host_service in self.lock_host_services().drain(..) {
            let _ = host_service.kill();
            let _ = host_service.wait();
        }
        kill_all(|| working_in(self.directory.path()));
        for place in places {
            kill_all(|| of_service(&place));
            let _ = std::fs::remove_dir_all(place.directory());
        }
    }
}
