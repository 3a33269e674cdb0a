//! A running cluster: brought up, and taken down.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use onecopy_postgres::{Binaries, Role, Server, ServiceUser, StopMode, Supervisor};
use onecopy_router::Router;
use onecopy_router::config::{Freshness, RouterConfiguration, RouterSettings, ServerConfiguration};
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;

use crate::http::Page;
use crate::lock::{DirectoryLock, LockState};
use crate::making::Workshop;
use crate::observation::{Observation, ObservedServer};
use crate::secret::Secrets;
use crate::state::{ClusterState, REPLICAS_MAX, ServerState};
use crate::stop::stop_servers;
use crate::{ClusterStatus, Directory, HostError, Progress, roles};

/// Followers of a new cluster.
pub const REPLICAS_DEFAULT: usize = 2;

/// Port of the router of a new cluster.
pub const PORT_DEFAULT: u16 = 6432;

/// What [`Cluster::up`] is asked for; what is left out stays as it was, or gets its default in a new cluster.
#[derive(Debug, Clone)]
pub struct UpOptions {
    /// Where the cluster lies.
    pub directory: Directory,
    /// Followers.
    pub replicas: Option<usize>,
    /// Port of the router on 127.0.0.1; 0 for any free one.
    pub port: Option<u16>,
    /// Port of the page of metrics; left out in a new cluster, the one after `port`.
    pub metrics_port: Option<u16>,
    /// How fresh reads are when a session does not say.
    pub freshness: Option<Freshness>,
    /// Where PostgreSQL's programs are.
    pub pg_bindir: Option<PathBuf>,
}

impl UpOptions {
    /// Everything as it was, or by default.
    pub fn new(directory: Directory) -> UpOptions {
        UpOptions { directory, replicas: None, port: None, metrics_port: None, freshness: None, pg_bindir: None }
    }
}

/// What a user must know of a cluster that is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Its directory.
    pub directory: PathBuf,
    /// The daemon.
    pub process_id: u32,
    /// Where clients connect.
    pub router: SocketAddr,
    /// Where `/metrics`, `/status` and `/healthz` are.
    pub metrics: SocketAddr,
    /// Names of the servers, the leader first.
    pub servers: Vec<String>,
    /// Version of PostgreSQL.
    pub postgres_version: String,
}

/// A cluster that serves clients. Dropped without [`Cluster::down`], its servers run on.
pub struct Cluster {
    summary: Summary,
    observation: Arc<Observation>,
    pages: Vec<Page>,
    router: Arc<Router>,
    followers: Vec<Supervisor>,
    leader: Supervisor,
    /// Given back last: until then nobody else may touch the servers.
    _lock: DirectoryLock,
}

impl Cluster {
    /// Makes a cluster, or continues the one in the directory, and returns when it serves clients.
    ///
    /// Broken off at any moment, the next call goes on; servers that run already are taken over. Dropped before it
    /// returns, it leaves what it has started running: [`crate::down`] stops it.
    ///
    /// # Errors
    /// [`HostError`]; what was started is stopped again.
    pub async fn up(options: UpOptions, progress: &dyn Progress) -> Result<Cluster, HostError> {
        let directory = options.directory.clone();
        directory.make_root()?;
        let lock = match DirectoryLock::take(&directory.lock())? {
            LockState::Taken(lock) => lock,
            LockState::HeldBy(process_id) => {
                return Err(HostError::Locked { directory: directory.root().to_owned(), process_id });
            }
        };
        let mut state = wanted_state(&options)?;
        let metrics_listener = take_ports(&state).await?;
        let workshop = prepare(&directory, &state, progress)?;
        match start(&workshop, &mut state, metrics_listener, progress).await {
            Ok(started) => Ok(Cluster::new(&workshop, &state, started, lock)),
            Err(error) => {
                // The servers would run on without anybody who watches them.
                if let Err(also) = stop_servers(&workshop, &state, progress).await {
                    progress.notice(format!("not everything is stopped again: {also}"));
                }
                Err(error)
            }
        }
    }

    fn new(workshop: &Workshop, state: &ClusterState, started: Started, lock: DirectoryLock) -> Cluster {
        let Started { leader, followers, router, observation, pages } = started;
        let localhost = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let summary = Summary {
            directory: workshop.directory.root().to_owned(),
            process_id: std::process::id(),
            router: localhost(state.port),
            metrics: localhost(state.metrics_port),
            servers: state.servers.iter().map(|server| server.name.clone()).collect(),
            postgres_version: workshop.binaries.version().to_owned(),
        };
        Cluster { summary, observation, pages, router, followers, leader, _lock: lock }
    }

    /// What a user must know of it.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// How it is, now.
    pub async fn status(&self) -> ClusterStatus {
        self.observation.status().await
    }

    /// Stops the router, the followers and the leader, in this order, each cleanly.
    ///
    /// # Errors
    /// [`HostError::Server`] of the first server that does not stop; the others are stopped all the same.
    pub async fn down(self, progress: &dyn Progress) -> Result<(), HostError> {
        let Cluster { observation, pages, router, followers, leader, _lock, .. } = self;
        drop(pages);
        let _ = std::fs::remove_file(observation.directory.daemon_socket());
        progress.step("stopping the router".to_owned());
        router.shutdown().await;
        progress.step(format!("stopping {} followers", followers.len()));
        let mut stops = JoinSet::new();
        for (supervisor, server) in followers.into_iter().zip(&observation.servers[1..]) {
            let name = server.name.clone();
            stops.spawn(async move { supervisor.stop(StopMode::Fast).await.map_err(HostError::server(&name)) });
        }
        let stopped = stops.join_all().await.into_iter().collect::<Result<Vec<()>, HostError>>();
        progress.step("stopping the leader".to_owned());
        leader.stop(StopMode::Fast).await.map_err(HostError::server(&observation.servers[0].name))?;
        stopped.map(|_| ())
    }
}

/// The remembered state, changed as `options` ask.
fn wanted_state(options: &UpOptions) -> Result<ClusterState, HostError> {
    let remembered = ClusterState::read(&options.directory.state_file())?;
    let wanted = options.replicas.unwrap_or(REPLICAS_DEFAULT);
    if wanted > REPLICAS_MAX {
        return Err(HostError::TooManyReplicas { wanted, maximum: REPLICAS_MAX });
    }
    let mut state = match remembered {
        Some(mut state) => {
            let existing = state.followers().len();
            if options.replicas.is_some() && wanted < existing {
                return Err(HostError::FewerReplicas { wanted, existing });
            }
            state.add_followers(options.replicas.unwrap_or(existing));
            state.port = options.port.unwrap_or(state.port);
            state
        }
        None => {
            let port = options.port.unwrap_or(PORT_DEFAULT);
            // Beside the router's port; where that is any free one, or the last one, any free one.
            let metrics_port = if port == 0 { 0 } else { port.checked_add(1).unwrap_or(0) };
            let mut state = ClusterState::new(port, metrics_port, Freshness::Session);
            state.add_followers(wanted);
            state
        }
    };
    state.metrics_port = options.metrics_port.unwrap_or(state.metrics_port);
    state.freshness = options.freshness.unwrap_or(state.freshness);
    if let Some(pg_bindir) = &options.pg_bindir {
        state.pg_bindir = Some(std::path::absolute(pg_bindir).map_err(HostError::file("resolve", pg_bindir))?);
    }
    Ok(state)
}

/// Finds or makes everything that servers need, and no server yet.
fn prepare(directory: &Directory, state: &ClusterState, progress: &dyn Progress) -> Result<Workshop, HostError> {
    let binaries = Binaries::find(state.pg_bindir.as_deref())?;
    let user = ServiceUser::resolve(None)?;
    if let Some(short) = directory.make_inside(&user)? {
        let reason = "the path of the cluster's directory is too long for the kernel";
        progress.notice(format!("Unix sockets are in {}: {reason}", short.display()));
    }
    let secrets = Secrets::read_or_make(&directory.secrets())?;
    let workshop = Workshop { directory: directory.clone(), binaries, user, secrets };
    let missing = state.servers.iter().filter(|server| !server.made).count();
    if missing > 0 {
        workshop.check_space(missing)?;
    }
    Ok(workshop)
}

async fn start_leader(
    workshop: &Workshop,
    state: &mut ClusterState,
    progress: &dyn Progress,
) -> Result<Supervisor, HostError> {
    let leader = state.leader().clone();
    let server = if leader.made {
        if !workshop.is_there(&leader) {
            return Err(HostError::LeaderMissing { path: workshop.directory.server_home(&leader.name) });
        }
        workshop.open(&leader, Role::Leader).await?
    } else {
        progress.step(format!("making the leader (PostgreSQL {})", workshop.binaries.version()));
        let server = workshop.make_leader(&leader).await?;
        state.servers[0].made = true;
        state.write(&workshop.directory.state_file())?;
        server
    };
    progress.step("starting the leader".to_owned());
    let supervisor = Supervisor::spawn(Arc::clone(&server));
    supervisor.wait_running().await.map_err(HostError::server(&leader.name))?;
    roles::make_missing(&leader.name, &server, &workshop.secrets).await?;
    Ok(supervisor)
}

async fn start_followers(
    workshop: &Workshop,
    state: &mut ClusterState,
    progress: &dyn Progress,
) -> Result<Vec<Supervisor>, HostError> {
    let leader = state.leader().clone();
    let mut supervisors = Vec::new();
    for index in 1..state.servers.len() {
        let follower = state.servers[index].clone();
        if follower.made && !workshop.is_there(&follower) {
            progress.notice(format!("the data of {} is gone; it is copied from the leader again", follower.name));
            state.servers[index].made = false;
        }
        if !state.servers[index].made {
            progress.step(format!("copying the leader to {}", follower.name));
            workshop.copy_leader(&leader, &follower, progress).await?;
            state.servers[index].made = true;
            state.write(&workshop.directory.state_file())?;
        }
        let server: Arc<Server> = workshop.open_follower(&leader, &follower).await?;
        supervisors.push(Supervisor::spawn(server));
    }
    progress.step(format!("starting {} followers", supervisors.len()));
    for (supervisor, follower) in supervisors.iter().zip(state.followers()) {
        // Clients are served without it: its supervisor goes on trying, and the router takes it in when it is there.
        if let Err(error) = supervisor.wait_running().await {
            progress.notice(format!("{} does not start and is tried again: {error}", follower.name));
        }
    }
    Ok(supervisors)
}

/// Takes the port of the page of metrics and looks whether that of the router is free, before anything is made.
async fn take_ports(state: &ClusterState) -> Result<TcpListener, HostError> {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, state.port));
    drop(TcpListener::bind(listen).await.map_err(|source| HostError::RouterListen { listen, source })?);
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, state.metrics_port));
    TcpListener::bind(listen).await.map_err(|source| HostError::MetricsListen { listen, source })
}

/// What runs when a cluster is up.
struct Started {
    leader: Supervisor,
    followers: Vec<Supervisor>,
    observation: Arc<Observation>,
    pages: Vec<Page>,
    router: Arc<Router>,
}

/// Makes what is missing and starts everything; remembers the ports that were any free ones.
async fn start(
    workshop: &Workshop,
    state: &mut ClusterState,
    metrics_listener: TcpListener,
    progress: &dyn Progress,
) -> Result<Started, HostError> {
    let directory = &workshop.directory;
    state.write(&directory.state_file())?;
    let leader = start_leader(workshop, state, progress).await?;
    let followers = start_followers(workshop, state, progress).await?;
    progress.step("starting the router".to_owned());
    let router = Arc::new(Router::start(router_configuration(workshop, state)).await?);
    let address = router.local_address();
    let metrics_address = metrics_listener.local_addr();
    state.port = address.port();
    state.metrics_port = metrics_address.map_err(HostError::file("ask for the port of", directory.root()))?.port();
    state.write(&directory.state_file())?;
    let servers = observed(state, &leader, &followers);
    let observation =
        Arc::new(Observation { directory: directory.clone(), servers, address, router: Arc::clone(&router) });
    let pages = vec![
        Page::serve(metrics_listener, Arc::clone(&observation)),
        Page::serve(listen_locally(directory)?, Arc::clone(&observation)),
    ];
    Ok(Started { leader, followers, router, observation, pages })
}

fn router_configuration(workshop: &Workshop, state: &ClusterState) -> RouterConfiguration {
    let server = |server: &ServerState| ServerConfiguration {
        name: server.name.clone(),
        host: workshop.directory.sockets().to_string_lossy().into_owned(),
        port: server.socket_number,
        user: roles::SUPERUSER.to_owned(),
        password: Some(workshop.secrets.superuser.clone()),
        password_file: None,
        database: roles::DATABASE.to_owned(),
    };
    RouterConfiguration {
        router: RouterSettings {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, state.port)),
            freshness: state.freshness,
            ..RouterSettings::default()
        },
        leader: server(state.leader()),
        followers: state.followers().iter().map(server).collect(),
    }
}

fn observed(state: &ClusterState, leader: &Supervisor, followers: &[Supervisor]) -> Vec<ObservedServer> {
    let mut servers = vec![ObservedServer::new(&state.leader().name, Role::Leader, leader)];
    for (follower, supervisor) in state.followers().iter().zip(followers) {
        servers.push(ObservedServer::new(&follower.name, Role::Follower, supervisor));
    }
    servers
}

/// The socket in the directory; one that a killed daemon left is replaced, which the lock makes safe.
fn listen_locally(directory: &Directory) -> Result<UnixListener, HostError> {
    let path = directory.daemon_socket();
    let _ = std::fs::remove_file(&path);
    UnixListener::bind(&path).map_err(HostError::file("listen on", path))
}
