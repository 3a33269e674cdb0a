//! A running cluster: brought up, and taken down.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_control::socket;
use onecopy_postgres::{Binaries, Instance, Role, ServiceUser, StopMode, Supervisor};
use onecopy_router::Router;
use onecopy_router::config::{Freshness, RouterConfiguration, RouterSettings};
use tokio::net::{TcpListener, UnixListener};

use crate::change::{Change, CloneOptions};
use crate::http::Page;
use crate::machines;
use crate::membership::{Membership, Returned};
use crate::memory::{self, MemoryConfiguration, MemoryService, ServersMemory};
use crate::observation::Observation;
use crate::observed_server::ObservedServer;
use crate::ports::free_port;
use crate::provisioning::{Provisioner, ReportingMaker};
use crate::secret::Secrets;
use crate::state::{ClusterState, REPLICAS_MAX, Runtime};
use crate::stop::{discard_incomplete, stop_servers};
use crate::{ClusterStatus, Directory, HostError, Progress, Summary, UpOptions, control, roles, steps};
use onecopy_directory::{DirectoryLock, LockState};

/// Followers of a new cluster.
pub const REPLICAS_DEFAULT: usize = 2;

/// Port of the router of a new cluster.
pub const PORT_DEFAULT: u16 = 6432;

/// How long supervisors of a start that has failed may take to let go, and how often it is looked whether they have.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(10);
const LET_GO_LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// A cluster that serves clients. Dropped without [`Cluster::down`], its servers run on.
pub struct Cluster {
    summary: Summary,
    observation: Arc<Observation>,
    pages: Vec<Page>,
    router: Arc<Router>,
    membership: Arc<Membership>,
    memory: Arc<MemoryService>,
    provisioner: Provisioner,
    leader: Supervisor,
    /// Given back last: until then nobody else may touch the servers.
    _lock: Arc<DirectoryLock>,
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
        let lock = match DirectoryLock::take_after_death(&directory.lock()).await? {
            LockState::Taken(lock) => Arc::new(lock),
            LockState::HeldBy(process_id) => {
                return Err(HostError::Locked { directory: directory.root().to_owned(), process_id });
            }
        };
        let mut state = wanted_state(&options)?;
        let metrics_listener = take_ports(&mut state).await?;
        let provisioner = prepare(&directory, &state, options.memory, progress)?;
        match start(&provisioner, &mut state, metrics_listener, &lock, progress).await {
            Ok(started) => Ok(Cluster::new(provisioner, &state, started, lock)),
            Err(error) => {
                wait_until_nothing_is_started(&lock).await;
                // The servers would run on without anybody who watches them.
                if let Err(also) = stop_servers(&provisioner, &mut state, progress).await {
                    progress.notice(format!("not everything is stopped again: {also}"));
                }
                Err(error)
            }
        }
    }

    fn new(provisioner: Provisioner, state: &ClusterState, started: Started, lock: Arc<DirectoryLock>) -> Cluster {
        let Started { leader, membership, memory, router, observation, pages } = started;
        let localhost = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let summary = Summary {
            directory: provisioner.directory.root().to_owned(),
            process_id: std::process::id(),
            router: localhost(state.port),
            metrics: localhost(state.metrics_port),
            servers: state.topology.servers().filter(|server| server.made).map(|server| server.name.clone()).collect(),
            postgres_version: provisioner.postgres_version(),
        };
        Cluster { summary, observation, pages, router, membership, memory, provisioner, leader, _lock: lock }
    }

    /// What a user must know of it.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// How it is, now.
    pub async fn status(&self) -> ClusterStatus {
        self.observation.status().await
    }

    /// Makes or removes followers until there are `replicas`; returns their names when the new ones answer through the
    /// router. The change goes on when this is dropped.
    ///
    /// # Errors
    /// [`HostError::TooManyReplicas`], [`HostError::ChangeRunning`]; what stopped it, then new ones that were not made
    /// are gone again.
    pub async fn scale(
        &self,
        replicas: usize,
        options: CloneOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Vec<String>, HostError> {
        self.change(Change::Scale { replicas }, options, progress).await
    }

    /// Throws a follower away and makes it anew under its name; returns when it answers through the router. The change
    /// goes on when this is dropped.
    ///
    /// # Errors
    /// [`HostError::NoSuchFollower`], [`HostError::ChangeRunning`]; what stopped it, then the next `up` tries again.
    pub async fn reinit(
        &self,
        follower: &str,
        options: CloneOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Vec<String>, HostError> {
        self.change(Change::Reinit { follower: follower.to_owned() }, options, progress).await
    }

    async fn change(
        &self,
        change: Change,
        options: CloneOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Vec<String>, HostError> {
        let outcome = self.membership.begin(change, options, false, progress)?;
        outcome.await.unwrap_or_else(|_| Err(HostError::Daemon("the cluster is being stopped".to_owned())))
    }

    /// Stops the router, the followers and the leader, in this order, each cleanly. Clones that are not whole are given
    /// up.
    ///
    /// # Errors
    /// [`HostError::Server`] of the first server that does not stop; the others are stopped all the same.
    pub async fn down(self, progress: &dyn Progress) -> Result<(), HostError> {
        let Cluster { observation, pages, router, membership, memory, provisioner, leader, _lock, .. } = self;
        drop(pages);
        let _ = std::fs::remove_file(observation.directory.daemon_socket());
        memory.end().await;
        membership.end_tasks().await;
        progress.step("stopping the router".to_owned());
        router.shutdown().await;
        let mut state = membership.remembered();
        let stopped = membership.stop(progress).await;
        let discarded = discard_incomplete(&provisioner, &mut state, progress).await;
        progress.step("stopping the leader".to_owned());
        leader.stop(StopMode::Fast).await.map_err(HostError::server(&state.leader().name))?;
        // What a change that was broken off has started is watched by nobody.
        let others = stop_servers(&provisioner, &mut state, progress).await;
        stopped.and(discarded).and(others)
    }
}

/// The remembered state, changed as `options` ask.
pub(crate) fn wanted_state(options: &UpOptions) -> Result<ClusterState, HostError> {
    let remembered = ClusterState::read(&options.directory.state_file())?;
    let wanted = options.replicas.unwrap_or(REPLICAS_DEFAULT);
    if wanted > REPLICAS_MAX {
        return Err(HostError::TooManyReplicas { wanted, maximum: REPLICAS_MAX });
    }
    options.memory.check_names().map_err(HostError::InvalidMemory)?;
    let mut state = match remembered {
        Some(mut state) => {
            let existing = state.followers().iter().filter(|follower| !follower.leaving).count();
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
    state.spare = options.spare.unwrap_or(state.spare);
    machines::choose_runtime(options, &mut state)?;
    if let Some(file) = &options.configuration_file {
        state.configuration_file = Some(std::path::absolute(file).map_err(HostError::file("resolve", file))?);
    }
    if let Some(pg_bindir) = &options.pg_bindir {
        state.pg_bindir = Some(std::path::absolute(pg_bindir).map_err(HostError::file("resolve", pg_bindir))?);
    }
    Ok(state)
}

/// Finds or makes everything that servers need, and no server yet.
fn prepare(
    directory: &Directory,
    state: &ClusterState,
    memory: MemoryConfiguration,
    progress: &dyn Progress,
) -> Result<Provisioner, HostError> {
    let binaries = Binaries::find(state.pg_bindir.as_deref())?;
    let user = ServiceUser::resolve(None)?;
    if let Some(short) = directory.make_inside(&user)? {
        let reason = "the path of the cluster's directory is too long for the kernel";
        progress.notice(format!("Unix sockets are in {}: {reason}", short.display()));
    }
    let secrets = Secrets::read_or_make(&directory.secrets())?;
    let memory = Arc::new(match state.runtime {
        Runtime::Process => ServersMemory::choose(memory, &binaries)?,
        // The memory of a server in a machine is the machine's.
        Runtime::Vm => ServersMemory::of_others(memory)?,
    });
    memory.tell_missing(progress);
    let machines = state.machine.clone();
    let provisioner = Provisioner { directory: directory.clone(), binaries, user, secrets, memory, machines };
    provisioner.check_machines()?;
    for server in state.topology.servers() {
        let limit = provisioner.memory.limit_of(&server.name, &provisioner.data_directory(server));
        limit.map_err(HostError::InvalidMemory)?;
    }
    let missing = state.topology.servers().filter(|server| !server.made).count();
    if missing > 0 && state.founding {
        provisioner.check_space(missing, 0)?;
    }
    Ok(provisioner)
}

async fn start_leader(
    provisioner: &Provisioner,
    state: &mut ClusterState,
    lock: &Arc<DirectoryLock>,
    progress: &dyn Progress,
) -> Result<Supervisor, HostError> {
    let leader = state.leader().clone();
    let server =
        steps::bring_leader(&ReportingMaker { provisioner, progress }, state, &provisioner.directory.state_file())
            .await?;
    progress.step("starting the leader".to_owned());
    let takes_over = provisioner.is_any_running(&state.topology).await;
    let process = Arc::clone(&server).into_process();
    if let Some(process) = &process {
        provisioner.memory.tell_hindrance(&leader.name, process.data_directory(), progress);
    }
    let supervisor = Supervisor::spawn_holding(Arc::clone(&server), lock.clone());
    supervisor.wait_running().await.map_err(HostError::server(&leader.name))?;
    roles::make_missing(&leader.name, &*server, &provisioner.secrets).await?;
    note_system(&*server, state, progress).await?;
    if let Some(process) = process {
        provisioner.memory.group(&leader.name, &process, progress).await?;
        provisioner.memory.make_functions(&leader.name, &process, takes_over, progress).await?;
    }
    Ok(supervisor)
}

/// Remembers of which database system the leader is, and tells when its data was replaced by another one's.
async fn note_system(
    server: &dyn Instance,
    state: &mut ClusterState,
    progress: &dyn Progress,
) -> Result<(), HostError> {
    const SYSTEM: &str = "SELECT system_identifier::text FROM pg_catalog.pg_control_system()";
    let name = state.leader().name.clone();
    let client = server.administration().connect().await.map_err(HostError::server(&name))?;
    let row = client.query_one(SYSTEM, &[]).await.map_err(HostError::sql(&name, "ask for the system identifier"))?;
    let known = state.topology.system_identifier.replace(row.get(0));
    if known.is_some() && known != state.topology.system_identifier {
        progress.notice(format!(
            "{name} holds another database system than before: followers that are copies of the one before take no \
             part; onecopy reinit makes them anew"
        ));
    }
    Ok(())
}

/// Starts the followers that are there. Those of a new cluster are copied first: its leader is still empty.
async fn start_followers(
    provisioner: &Provisioner,
    state: &mut ClusterState,
    lock: &Arc<DirectoryLock>,
    progress: &dyn Progress,
) -> Result<Vec<Returned>, HostError> {
    let maker = ReportingMaker { provisioner, progress };
    let mut followers = Vec::new();
    steps::fork_new(&maker, state, &provisioner.directory.state_file()).await?;
    for index in 0..state.followers().len() {
        if steps::bring_follower(&maker, state, index, &provisioner.directory.state_file()).await?
            && let Some(returned) = Returned::start(provisioner, state, index, lock, progress).await?
        {
            followers.push(returned);
        }
    }
    progress.step(format!("starting {} followers", followers.len()));
    for follower in &followers {
        // Clients are served without it: its supervisor goes on trying, and the router takes it in when it is there.
        if let Err(error) = follower.supervisor.wait_running().await {
            progress.notice(format!("{} does not start and is tried again: {error}", follower.state.name));
        }
        if let Some(server) = Arc::clone(follower.supervisor.instance()).into_process() {
            provisioner.memory.group(&follower.state.name, &server, progress).await?;
        }
    }
    Ok(followers)
}

/// Chooses the ports that may be any free ones, takes that of the page of metrics and looks whether that of the router
/// is free, before anything is made.
async fn take_ports(state: &mut ClusterState) -> Result<TcpListener, HostError> {
    let mut taken = BTreeSet::from([state.port, state.metrics_port]);
    for port in [&mut state.port, &mut state.metrics_port].into_iter().filter(|port| **port == 0) {
        // The kernel's choice, where none of ours is free, serves as well until it is at rest.
        *port = free_port(&taken).unwrap_or(0);
        taken.insert(*port);
    }
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, state.port));
    drop(TcpListener::bind(listen).await.map_err(|source| HostError::RouterListen { listen, source })?);
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, state.metrics_port));
    TcpListener::bind(listen).await.map_err(|source| HostError::MetricsListen { listen, source })
}

/// Waits until the supervisors that a failed start has dropped let go, which they do within moments: each of them holds
/// the lock while it may still start its server.
async fn wait_until_nothing_is_started(lock: &Arc<DirectoryLock>) {
    let begun = Instant::now();
    while Arc::strong_count(lock) > 1 && begun.elapsed() < LET_GO_TIMEOUT {
        tokio::time::sleep(LET_GO_LOOK_INTERVAL).await;
    }
}

/// What runs when a cluster is up.
struct Started {
    leader: Supervisor,
    membership: Arc<Membership>,
    memory: Arc<MemoryService>,
    observation: Arc<Observation>,
    pages: Vec<Page>,
    router: Arc<Router>,
}

/// Makes what is missing and starts everything; remembers the ports that were any free ones.
async fn start(
    provisioner: &Provisioner,
    state: &mut ClusterState,
    metrics_listener: TcpListener,
    lock: &Arc<DirectoryLock>,
    progress: &dyn Progress,
) -> Result<Started, HostError> {
    let directory = &provisioner.directory;
    state.write(&directory.state_file())?;
    let leader = start_leader(provisioner, state, lock, progress).await?;
    let followers = start_followers(provisioner, state, lock, progress).await?;
    progress.step("starting the router".to_owned());
    let router = Arc::new(Router::start(router_configuration(provisioner, state, &followers)).await?);
    let address = router.local_address();
    let metrics_address = metrics_listener.local_addr();
    state.port = address.port();
    state.metrics_port = metrics_address.map_err(HostError::file("ask for the port of", directory.root()))?.port();
    state.founding = false;
    state.write(&directory.state_file())?;
    let observed = ObservedServer::new(&state.leader().name, Role::Leader, &leader);
    let membership = Membership::new(provisioner.clone(), state.clone(), observed, Arc::clone(&router));
    let memory = MemoryService::start(Arc::clone(&provisioner.memory))?;
    let observation = Arc::new(Observation {
        directory: directory.clone(),
        membership: Arc::clone(&membership),
        memory: Arc::clone(&memory),
        address,
        router: Arc::clone(&router),
    });
    let pages = vec![
        Page::serve(metrics_listener, Arc::clone(&observation)),
        Page::serve_with(
            listen_locally(directory)?,
            Arc::clone(&observation),
            control::routes(Arc::clone(&membership)).merge(memory::routes(Arc::clone(&memory))),
        ),
    ];
    membership.take_over(followers);
    memory.follow_cluster(&membership);
    Ok(Started { leader, membership, memory, router, observation, pages })
}

fn router_configuration(
    provisioner: &Provisioner,
    state: &ClusterState,
    followers: &[Returned],
) -> RouterConfiguration {
    RouterConfiguration {
        router: RouterSettings {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, state.port)),
            freshness: state.freshness,
            ..RouterSettings::default()
        },
        leader: provisioner.routed(state.leader()),
        followers: followers.iter().map(|follower| provisioner.routed(&follower.state)).collect(),
    }
}

/// The socket in the directory; one that a killed daemon left is replaced, which the lock makes safe.
fn listen_locally(directory: &Directory) -> Result<UnixListener, HostError> {
    let path = directory.daemon_socket();
    let _ = std::fs::remove_file(&path);
    socket::listen(&path).map_err(HostError::file("listen on", path))
}
