//! A router as an object: started, asked, reloaded, stopped.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::backend::{Backend, Credentials};
use crate::config::RouterConfiguration;
use crate::error::RouterError;
use crate::health;
use crate::metrics;
use crate::predecessor;
use crate::state::RouterState;
use crate::status::RouterStatus;
use crate::wire::Listener;

/// How long sessions may go on after a stop was asked for.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// What the router must know of the leader before it serves: standby or not, the role's power, and the settings from which
/// PostgreSQL computes the size of its pool of serializable transactions (`InitPredicateLocks`).
const LOOK_AT_LEADER: &str = "SELECT pg_catalog.pg_is_in_recovery(), \
     (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER), \
     10 * (SELECT sum(setting::bigint) + 1 FROM pg_catalog.pg_settings WHERE name IN \
     ('max_connections', 'autovacuum_max_workers', 'max_worker_processes', 'max_wal_senders'))";

/// A running router.
pub struct Router {
    state: Arc<RouterState>,
    local_address: SocketAddr,
    tasks: std::sync::Mutex<JoinSet<()>>,
    stop: tokio::sync::watch::Sender<bool>,
}

impl Router {
    /// Starts a router. It listens when this returns; a leader that is down is waited for while it serves.
    ///
    /// # Errors
    /// When the port cannot be had, or the leader answers and is not fit to lead.
    pub async fn start(configuration: RouterConfiguration) -> Result<Router, RouterError> {
        let state = Arc::new(RouterState::new(&configuration)?);
        look_at_leader(&state, &configuration).await?;
        let address = configuration.router.listen;
        let listen = |source| RouterError::Listen { address, source };
        let listener = Listener::bind(address).await.map_err(listen)?;
        let local_address = listener.local_address().map_err(listen)?;
        let stop = tokio::sync::watch::Sender::new(false);
        let mut tasks = JoinSet::new();
        let timeout = Duration::from_millis(configuration.router.server_timeout_ms);
        let databases = std::iter::once(&configuration.leader).chain(&configuration.followers);
        for (server, configured) in state.servers.iter().zip(databases) {
            tasks.spawn(health::watch(server.clone(), configured.database.clone(), timeout));
        }
        tasks.spawn(accept(state.clone(), listener, stop.subscribe()));
        tracing::info!(%local_address, "listening");
        Ok(Router { state, local_address, tasks: tasks.into(), stop })
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

    /// Takes over the settings of `configuration` for databases and sessions that begin from now on. Servers and the
    /// address cannot change while the router runs.
    pub fn reload(&self, configuration: &RouterConfiguration) {
        self.state.set_settings(configuration.router.clone());
    }

    /// Stops listening and ends all sessions, each after the statement it is at (but not later than a bound).
    pub async fn shutdown(&self) {
        self.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock().expect("no code panics while it holds this lock"));
        tasks.shutdown().await;
        self.state.end_sessions(STOP_TIMEOUT).await;
        for domain in self.state.open_domains() {
            domain.close();
        }
    }
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

async fn look_at_leader(state: &RouterState, configuration: &RouterConfiguration) -> Result<(), RouterError> {
    let leader = &state.servers[0];
    let credentials = Credentials::of_router(leader);
    let mut backend = match Backend::connect(leader, &configuration.leader.database, &credentials, "onecopy start")
        .await
    {
        Ok(backend) => backend,
        Err(error @ (crate::backend::BackendError::Connect { .. } | crate::backend::BackendError::TimedOut { .. })) => {
            tracing::warn!(%error, "the leader is not there yet");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
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
    predecessor::end_transactions(&mut backend).await
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
        state.start_session(socket);
    }
}
