//! A router as an object: started, asked, reloaded, stopped.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::{AbortHandle, JoinSet};

use crate::backend::{Backend, BackendError, Credentials, Purpose};
use crate::config::{RouterConfiguration, ServerConfiguration};
use crate::drain;
use crate::error::RouterError;
use crate::health;
use crate::malloc_trim;
use crate::membership::Servers;
use crate::metrics;
use crate::orphaned_transactions;
use crate::servers::Server;
use crate::session;
use crate::state::RouterState;
use crate::status::RouterStatus;
use crate::wire::Listener;

/// A client takes two descriptors, and a back end one; a shell's default of 1024 is fewer than `clients_max` needs.
const DESCRIPTORS_WANTED: u64 = 65_536;

/// The leader must be looked at within this; else it counts as not there yet.
const LOOK_TIMEOUT: Duration = Duration::from_secs(20);

/// Between two looks at a leader that was not there when the router started.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// How long sessions may go on after a stop was asked for.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// What the router must know of the leader before it serves: standby or not, the role's power, and the settings from
/// which PostgreSQL computes the size of its pool of serializable transactions (`InitPredicateLocks`).
const LOOK_AT_LEADER: &str = "SELECT pg_catalog.pg_is_in_recovery(), \
     (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER), \
     10 * (SELECT sum(setting::bigint) + 1 FROM pg_catalog.pg_settings WHERE name IN \
     ('max_connections', 'autovacuum_max_workers', 'max_worker_processes', 'max_wal_senders'))";

/// A running router.
pub struct Router {
    state: Arc<RouterState>,
    local_address: SocketAddr,
    tasks: std::sync::Mutex<JoinSet<()>>,
    /// What probes the followers, by their numbers.
    probes: std::sync::Mutex<HashMap<u64, AbortHandle>>,
    stop: tokio::sync::watch::Sender<bool>,
}

impl Router {
    /// Starts a router. It listens when this returns; a leader that is down is waited for while it serves.
    ///
    /// # Errors
    /// When the port cannot be had, or the leader answers and is not fit to lead.
    pub async fn start(configuration: RouterConfiguration) -> Result<Router, RouterError> {
        raise_descriptor_limit();
        let state = Arc::new(RouterState::new(&configuration)?);
        let is_looked_at = look_at_leader(&state).await?;
        state.servers.leader().is_held_back.store(!is_looked_at, SeqCst);
        let address = configuration.router.listen;
        let listen = |source| RouterError::Listen { address, source };
        let listener = Listener::bind(address).await.map_err(listen)?;
        let local_address = listener.local_address().map_err(listen)?;
        let stop = tokio::sync::watch::Sender::new(false);
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(state.clone(), listener, stop.subscribe()));
        if !is_looked_at {
            tasks.spawn(look_until_done(state.clone()));
        }
        tasks.spawn(state.clone().let_databases_rest());
        tasks.spawn(malloc_trim::trim_periodically());
        tracing::info!(%local_address, "listening");
        let router = Router { state, local_address, tasks: tasks.into(), probes: Default::default(), stop };
        for server in router.state.servers.current().servers() {
            router.probe(server);
        }
        Ok(router)
    }

    /// Asks after a server's health from now on.
    fn probe(&self, server: &Arc<Server>) {
        let mut tasks = lock(&self.tasks);
        while tasks.try_join_next().is_some() {}
        let probe = tasks.spawn(health::watch(server.clone(), self.state.live_settings()));
        lock(&self.probes).insert(server.number, probe);
        // Removed before its probe was known?
        if server.is_removed()
            && let Some(probe) = lock(&self.probes).remove(&server.number)
        {
            probe.abort();
        }
    }

    /// Where clients connect.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    /// What it does now.
    pub fn status(&self) -> RouterStatus {
        RouterStatus::of(&self.state)
    }

    /// The same as Prometheus text.
    pub fn metrics(&self) -> String {
        metrics::text(&self.status())
    }

    /// A handle for [`Router::status`] that outlives borrows of the router.
    pub fn observer(&self) -> RouterObserver {
        RouterObserver(self.state.clone())
    }

    /// Takes over the settings of `configuration` ([`RouterConfiguration::router`] says which hold at once), and its
    /// followers: those that came are added, those that went are removed, and one that is at another place or is logged
    /// in to in another way is removed and added. Returns when nothing is left on those that went, as
    /// [`Router::remove_follower`]. The address and the leader cannot change while the router runs; another leader is
    /// told in the log.
    ///
    /// # Errors
    /// Two servers of one name; a password file that cannot be read. Then nothing has changed.
    pub async fn reload(&self, configuration: &RouterConfiguration) -> Result<(), RouterError> {
        let servers = &self.state.servers;
        // Everything that can be wrong in it is found before anything changes.
        Servers::of(configuration)?;
        if let Some(clash) = configuration.followers.iter().find(|follower| follower.name == servers.leader().name) {
            return Err(RouterError::DuplicateServer(clash.name.clone()));
        }
        if !servers.leader().is_as_in(&configuration.leader)? {
            let leader = &servers.leader().name;
            tracing::warn!(leader, "the leader cannot change while the router runs: start it anew");
        }
        let (mut stay, mut came) = (HashSet::new(), Vec::new());
        for follower in &configuration.followers {
            match servers.follower(&follower.name) {
                Ok(known) if known.is_as_in(follower)? => drop(stay.insert(known.number)),
                _ => came.push(servers.prepare(follower)?),
            }
        }
        self.state.set_settings(configuration.router.clone());
        let mut gone = servers.current().followers.clone();
        gone.retain(|follower| !stay.contains(&follower.number));
        for server in &gone {
            self.take_out(&server.name)?;
        }
        for server in came {
            self.take_in(server)?;
        }
        for server in &gone {
            drain::drain(&self.state, server).await;
        }
        Ok(())
    }

    /// Takes a follower that is there from now on: it is probed at once, and each database takes it into its epochs as
    /// soon as it has replayed up to the newest gate. Nobody waits for it meanwhile. Must be called inside a runtime.
    ///
    /// # Errors
    /// [`RouterError::DuplicateServer`] when a server has this name; [`RouterError::PasswordFile`].
    pub fn add_follower(&self, follower: ServerConfiguration) -> Result<(), RouterError> {
        self.take_in(self.state.servers.prepare(&follower)?)
    }

    /// Gives a follower up: no new read goes there; reads that run there may end, for a bounded time; then every
    /// connection of the router's to it is closed. Its name is free at once.
    ///
    /// # Errors
    /// [`RouterError::UnknownFollower`].
    pub async fn remove_follower(&self, name: &str) -> Result<(), RouterError> {
        let server = self.take_out(name)?;
        drain::drain(&self.state, &server).await;
        Ok(())
    }

    /// Lets a follower take part in `share` (from 0.0 to 1.0, at first 1.0) of the choices of a server for a read. With
    /// 0 only sessions that ask for it by `onecopy.server` read there.
    ///
    /// # Errors
    /// [`RouterError::UnknownFollower`]; [`RouterError::ReadShare`] when `share` is not from 0 to 1.
    pub fn set_read_share(&self, name: &str, share: f64) -> Result<(), RouterError> {
        let server = self.state.servers.follower(name)?;
        if !server.read_share.set(share) {
            return Err(RouterError::ReadShare { server: name.to_owned(), share });
        }
        tracing::info!(server = server.name, share, "share of reads");
        Ok(())
    }

    fn take_in(&self, server: Arc<Server>) -> Result<(), RouterError> {
        self.state.servers.add(server.clone())?;
        tracing::info!(server = server.name, address = %server.address, "follower added");
        self.probe(&server);
        Ok(())
    }

    /// Takes a follower from the list and ends its probes: nothing begins there any more.
    fn take_out(&self, name: &str) -> Result<Arc<Server>, RouterError> {
        let server = self.state.servers.remove(name)?;
        if let Some(probe) = lock(&self.probes).remove(&server.number) {
            probe.abort();
        }
        Ok(server)
    }

    /// Stops listening and ends all sessions, each after the statement it is at (but not later than a bound).
    pub async fn shutdown(&self) {
        self.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *lock(&self.tasks));
        tasks.shutdown().await;
        self.state.end_sessions(STOP_TIMEOUT).await;
        for database in self.state.open_databases() {
            database.close();
        }
    }
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

/// Looks at a running router.
#[derive(Clone)]
pub struct RouterObserver(Arc<RouterState>);

impl std::fmt::Debug for RouterObserver {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("RouterObserver").finish()
    }
}

impl RouterObserver {
    /// What it does now.
    pub fn status(&self) -> RouterStatus {
        RouterStatus::of(&self.0)
    }

    /// The same as Prometheus text.
    pub fn metrics(&self) -> String {
        metrics::text(&self.status())
    }
}

/// Whether the leader was there to be looked at; then it is fit to lead and what an earlier router left has ended.
async fn look_at_leader(state: &RouterState) -> Result<bool, RouterError> {
    const STARTING: &str = crate::wire::sqlstate::CANNOT_CONNECT_NOW;
    let error = match tokio::time::timeout(LOOK_TIMEOUT, look(state)).await {
        Ok(Err(RouterError::Leader(error))) => error,
        Ok(result) => return result.map(|()| true),
        Err(_) => BackendError::TimedOut {
            server: state.servers.leader().name.clone(),
            milliseconds: LOOK_TIMEOUT.as_millis(),
        },
    };
    match error {
        BackendError::Connect { .. } | BackendError::TimedOut { .. } | BackendError::Lost { .. } => {}
        BackendError::Sql { ref fields, .. } if fields.code == STARTING => {}
        _ => return Err(error.into()),
    }
    tracing::debug!(%error, "the leader is not there yet");
    Ok(false)
}

/// Looks at a leader that comes later; until then nothing of clients runs there.
async fn look_until_done(state: Arc<RouterState>) {
    let leader = state.servers.leader();
    tracing::warn!(server = leader.name, "the leader is not there yet");
    let mut told = None;
    loop {
        match look_at_leader(&state).await {
            Ok(true) => break,
            Ok(false) => {}
            Err(error) => {
                let text = Some(error.to_string());
                if told != text {
                    tracing::warn!(%error, "the leader cannot be used");
                    told = text;
                }
            }
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    leader.is_held_back.store(false, SeqCst);
    tracing::info!(server = leader.name, "the leader is there");
}

async fn look(state: &RouterState) -> Result<(), RouterError> {
    let leader = state.servers.leader();
    let credentials = Credentials::of_router(leader);
    let mut backend = Backend::connect(leader, &state.maintenance_database, &credentials, Purpose::Start).await?;
    let rows = backend.rows(LOOK_AT_LEADER).await?;
    let value = |column: usize| rows.first().and_then(|row| row.get(column)?.as_deref());
    if value(0) == Some("t") {
        return Err(RouterError::LeaderInRecovery(leader.name.clone()));
    }
    if value(1) != Some("t") {
        return Err(RouterError::NotSuperuser { role: leader.user.clone(), server: leader.name.clone() });
    }
    if let Some(size) = value(2).and_then(|size| size.parse().ok()) {
        state.serializable.set_pool_size(size);
    }
    orphaned_transactions::end_transactions(&mut backend).await
}

async fn accept(state: Arc<RouterState>, listener: Listener, mut stop: tokio::sync::watch::Receiver<bool>) {
    loop {
        let socket = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => socket,
                Err(error) => {
                    // Usually no descriptor is free: clients wait in the kernel's queue until one is.
                    tracing::warn!(%error, "cannot accept a client");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            _ = stop.changed() => return,
        };
        state.start_session(session::serve(state.clone(), socket));
    }
}

/// Lets this process have as many descriptors as a router can need, as far as the hard limit goes.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(DESCRIPTORS_WANTED, |maximum| maximum.min(DESCRIPTORS_WANTED));
    if limit.current.is_some_and(|current| current < wanted)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit })
    {
        tracing::warn!(%error, "the limit of descriptors stays, and clients beyond it wait");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RouterSettings;
    use crate::epoch::model_server::ModelServers;

    const LEADER: &str = "leader";
    const END: &str = "pg_terminate_backend";

    /// A leader that is not there when the router starts is looked at before anything of a client runs there: what an
    /// earlier router has left on it ends first, however late it comes.
    ///
    /// Spec: I1
    #[tokio::test]
    async fn a_leader_that_comes_later_is_used_only_when_an_earlier_routers_transactions_have_ended() {
        let models = ModelServers::start(0).await;
        models.set_gone(LEADER, true);
        let leader = models.configurations().remove(0);
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let settings = RouterSettings { listen, ..RouterSettings::default() };
        let configuration = RouterConfiguration { router: settings, leader, followers: Vec::new() };
        let router = Router::start(configuration).await.unwrap();
        let leader = router.state.servers.leader();
        let connect = async |purpose| {
            Backend::connect(leader, "database", &Credentials::of_router(leader), purpose).await.map(drop)
        };
        models.set_running(1);
        models.set_gone(LEADER, false);
        models.hears(LEADER, END, 2).await;
        for purpose in [Purpose::Session, Purpose::Reader, Purpose::Epoch, Purpose::Gate, Purpose::Catalog] {
            let refused = connect(purpose).await;
            assert!(matches!(refused, Err(BackendError::HeldBack { .. })), "{purpose:?}: {refused:?}");
        }
        models.set_running(0);
        while leader.is_held_back.load(SeqCst) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        connect(Purpose::Session).await.unwrap();
        router.shutdown().await;
    }

    /// Spec: A2
    #[test]
    fn a_shells_default_of_descriptors_keeps_no_clients_out() {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
        raise_descriptor_limit();
        let raised = getrlimit(Resource::Nofile).current.unwrap();
        assert_eq!(raised, limit.maximum.unwrap_or(DESCRIPTORS_WANTED).min(DESCRIPTORS_WANTED));
    }
}
