//! The ways from a client to the leader that are compared, as data.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use onecopy_postgres::Server;
use onecopy_router::config::{RouterConfiguration, RouterSettings, ServerConfiguration};
use tokio::net::TcpStream;

use crate::cluster::{Cluster, DATABASE, PASSWORD, PLAIN_ROLE, SERIALIZABLE_ROLE, free_port, verifier};
use crate::pgbench::Protocol;
use crate::process_cpu::process_time;
use crate::process_memory::ProcessMemory;

/// How long a proxy may take until it accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a proxy may take to end after SIGTERM before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Where Debian and its kin install PgBouncer.
const PGBOUNCER_PLACES: [&str; 3] = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/usr/local/bin/pgbouncer"];

/// One way in.
pub struct Proxy {
    /// Its name in tables.
    pub name: &'static str,
    /// Its version, as it says itself.
    pub version: String,
    /// Port on 127.0.0.1 for clients.
    pub port: u16,
    /// Protocols that work through it.
    pub protocols: &'static [Protocol],
    /// Where it serves `/metrics`, when it does.
    pub metrics: Option<SocketAddr>,
    /// Its process; none when clients talk to the leader.
    process: Option<Child>,
    /// Where it writes its log.
    log: PathBuf,
}

/// Every protocol of pgbench.
const ALL_PROTOCOLS: &[Protocol] = &[Protocol::Simple, Protocol::Extended, Protocol::Prepared];

/// Named statements need a session of one's own until PgBouncer 1.21.
const POOLED_PROTOCOLS: &[Protocol] = &[Protocol::Simple, Protocol::Extended];

impl Proxy {
    /// No proxy: the physical limit of the machine.
    pub fn direct(cluster: &Cluster) -> Proxy {
        Proxy {
            name: "direct",
            version: format!("PostgreSQL {}", cluster.binaries.version()),
            port: cluster.leader().connection().port,
            protocols: ALL_PROTOCOLS,
            metrics: None,
            process: None,
            log: PathBuf::new(),
        }
    }

    /// PgBouncer with transaction pooling before the leader, with as many back ends as there are clients.
    pub async fn pgbouncer(cluster: &Cluster, directory: &Path, clients: usize) -> anyhow::Result<Proxy> {
        let program = PGBOUNCER_PLACES.iter().find(|place| Path::new(place).exists());
        let program =
            program.context("PgBouncer is not installed: run `make setup`, or install the package pgbouncer")?;
        let home = directory.join("pgbouncer");
        cluster.user.create_directory(&home)?;
        let (port, users, log) = (free_port()?, home.join("users.txt"), home.join("pgbouncer.log"));
        let verifier = verifier()?;
        // The account of PgBouncer reads these; the directory is closed to all others.
        fs::write(&users, format!("\"{PLAIN_ROLE}\" \"{verifier}\"\n\"{SERIALIZABLE_ROLE}\" \"{verifier}\"\n"))?;
        let configuration = home.join("pgbouncer.ini");
        let leader = cluster.leader().connection();
        fs::write(
            &configuration,
            format!(
                "[databases]\n{DATABASE} = host={} port={} dbname={DATABASE}\n\n\
                 [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
                 auth_type = scram-sha-256\nauth_file = {}\npool_mode = transaction\n\
                 default_pool_size = {clients}\nmax_client_conn = {}\nlog_connections = 0\nlog_disconnections = 0\n",
                leader.host,
                leader.port,
                users.display(),
                clients * 2 + 10,
            ),
        )?;
        let mut command = cluster.user.command(program);
        command.arg(&configuration);
        let version = Command::new(program).arg("--version").output().context("cannot run pgbouncer")?;
        Proxy {
            name: "pgbouncer",
            version: String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default().to_owned(),
            port,
            protocols: POOLED_PROTOCOLS,
            metrics: None,
            process: None,
            log,
        }
        .start(command)
        .await
    }

    /// Onecopy's router before the leader and its followers, with the settings of a fresh install.
    pub async fn onecopy(cluster: &Cluster, directory: &Path, program: &Path) -> anyhow::Result<Proxy> {
        let (port, metrics_port) = (free_port()?, free_port()?);
        let metrics = SocketAddr::from(([127, 0, 0, 1], metrics_port));
        let configuration = RouterConfiguration {
            router: RouterSettings {
                listen: SocketAddr::from(([127, 0, 0, 1], port)),
                metrics_listen: Some(metrics),
                ..RouterSettings::default()
            },
            leader: server_configuration("leader", cluster.leader()),
            followers: cluster
                .followers()
                .iter()
                .enumerate()
                .map(|(index, server)| server_configuration(&format!("follower-{}", index + 1), server))
                .collect(),
        };
        let path = directory.join("onecopy.toml");
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        std::io::Write::write_all(&mut file, toml::to_string(&configuration)?.as_bytes())?;
        let mut command = Command::new(program);
        command.arg("router").arg("--config").arg(&path);
        let version = Command::new(program)
            .arg("--version")
            .output()
            .with_context(|| format!("cannot run {}: run `cargo build --release -p onecopy`", program.display()))?;
        Proxy {
            name: "onecopy",
            version: String::from_utf8_lossy(&version.stdout).trim().to_owned(),
            port,
            protocols: ALL_PROTOCOLS,
            metrics: Some(metrics),
            process: None,
            log: directory.join("router.log"),
        }
        .start(command)
        .await
    }

    async fn start(mut self, mut command: Command) -> anyhow::Result<Proxy> {
        let log = fs::File::create(&self.log)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.process = Some(command.spawn().with_context(|| format!("cannot start {}", self.name))?);
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            let ended = match &mut self.process {
                Some(process) => process.try_wait()?,
                None => None,
            };
            if ended.is_some() || Instant::now() > deadline {
                bail!("{} does not come up: {}", self.name, self.last_words());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(self)
    }

    /// Processor time of the proxy itself since its start; none when there is no proxy.
    pub fn processor_time(&self) -> anyhow::Result<Option<Duration>> {
        self.process.as_ref().map(|process| process_time(process.id())).transpose()
    }

    /// Memory of the proxy itself; none when there is no proxy.
    pub fn memory(&self) -> Option<ProcessMemory> {
        self.process.as_ref().map(|process| ProcessMemory::of(process.id()))
    }

    /// The end of its log, for errors.
    pub fn last_words(&self) -> String {
        const LINES_MAX: usize = 10;
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES_MAX)..].join("\n")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let Some(process) = &mut self.process else { return };
        let terminate = process.id().try_into().map(nix::unistd::Pid::from_raw);
        if let Ok(pid) = terminate
            && nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).is_ok()
        {
            let deadline = Instant::now() + STOP_TIMEOUT;
            while Instant::now() < deadline {
                if !matches!(process.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // It may be gone already; then there is nothing left to do.
        let _ = process.kill();
        let _ = process.wait();
    }
}

fn server_configuration(name: &str, server: &Server) -> ServerConfiguration {
    let connection = server.connection();
    ServerConfiguration {
        name: name.to_owned(),
        host: connection.host,
        port: connection.port,
        user: connection.user,
        password: Some(PASSWORD.to_owned()),
        password_file: None,
        database: "postgres".to_owned(),
    }
}
