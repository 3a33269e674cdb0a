//! A gatekeeper before model servers, for tests of gates and of what is done between them.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use super::*;
use crate::config::{RouterConfiguration, ServerConfiguration};
use crate::epoch::manual_poll::Waiting;
pub(super) use crate::epoch::manual_poll::process;
use crate::epoch::model_server::ModelServers;

/// Far beyond what anything here takes on a machine that has more to do.
pub(super) const LONG_MS: u64 = 120_000;

pub(super) const LEADER: &str = "leader";
pub(super) const FOLLOWER: &str = "follower-1";

/// Parts of what the gatekeeper says.
pub(super) const MARK: &str = "pg_logical_emit_message";
pub(super) const CANARY: &str = "FROM onecopy_router.tripwire";
pub(super) const BEGIN_SNAPSHOT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ";
pub(super) const EXPORT: &str = "pg_export_snapshot";
pub(super) const REPLAYED: &str = "pg_last_wal_replay_lsn";
pub(super) const END_PROCESSES: &str = "pg_terminate_backend";

/// Sessions that kept gates from closing, with the kinds of their statements.
type BlockingCommits = Vec<(u64, Option<u64>)>;

pub(super) struct Harness {
    pub(super) models: ModelServers,
    pub(super) gatekeeper: Gatekeeper,
    pub(super) servers: Arc<Servers>,
    pub(super) barrier: Arc<CommitBarrier>,
    pub(super) epochs: Arc<Epochs>,
    pub(super) blocked: Arc<Mutex<BlockingCommits>>,
    pub(super) canaries: Arc<AtomicU64>,
    pub(super) settings: watch::Sender<Arc<RouterSettings>>,
}

/// A gatekeeper whose servers are all in, and who has said nothing else yet.
pub(super) async fn harness(followers: usize, change: impl FnOnce(&mut RouterSettings)) -> Harness {
    let models = ModelServers::start(followers).await;
    let mut harness = with(models, followers, change);
    join(&mut harness.gatekeeper).await;
    harness.models.forget();
    harness
}

/// A gatekeeper of the leader and so many of the followers, who has not begun.
pub(super) fn with(models: ModelServers, followers: usize, change: impl FnOnce(&mut RouterSettings)) -> Harness {
    let mut settings =
        RouterSettings { gate_timeout_ms: LONG_MS, follower_timeout_ms: LONG_MS, ..RouterSettings::default() };
    change(&mut settings);
    let mut configurations: Vec<ServerConfiguration> = models.configurations();
    configurations.truncate(followers + 1);
    let leader = configurations.remove(0);
    let configuration = RouterConfiguration { router: settings.clone(), leader, followers: configurations };
    let servers = Arc::new(Servers::of(&configuration).unwrap());
    let (barrier, epochs): (Arc<CommitBarrier>, Arc<Epochs>) = (Arc::default(), Arc::default());
    let (blocked, canaries): (Arc<Mutex<BlockingCommits>>, Arc<AtomicU64>) = (Arc::default(), Arc::default());
    let (heard, counted) = (blocked.clone(), canaries.clone());
    let hooks = GateHooks {
        on_blocked: Box::new(move |commits| {
            heard.lock().unwrap().extend(commits.iter().map(|commit| (commit.session, commit.statement)));
        }),
        on_canary: Box::new(move || {
            counted.fetch_add(1, SeqCst);
        }),
    };
    let settings = watch::Sender::new(Arc::new(settings));
    let gatekeeper =
        Gatekeeper::new(epochs.clone(), barrier.clone(), settings.subscribe(), servers.clone(), "database", hooks);
    Harness { models, gatekeeper, servers, barrier, epochs, blocked, canaries, settings }
}

/// Waits until every member is in.
pub(super) async fn join(gatekeeper: &mut Gatekeeper) {
    for member in gatekeeper.members.servers_mut() {
        while !member.is_in() {
            member.advance().await;
            member.joined().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Whether a gate waits for the commit barrier or has closed it.
pub(super) fn is_closed(barrier: &CommitBarrier) -> bool {
    // Without Tokio's budget, which a future that is polled by hand may find used up.
    match Waiting::new(tokio::task::unconstrained(barrier.enter_uncounted(99, process(99)))).advance() {
        Some(commit) => {
            commit.leave();
            false
        }
        None => true,
    }
}

pub(super) async fn commit(barrier: &CommitBarrier) -> u64 {
    barrier.enter(1, process(10), None).await.resolve()
}

pub(super) fn current(epochs: &Epochs) -> Option<(u64, u64)> {
    epochs.current().map(|epoch| (epoch.id, epoch.commits))
}

/// On which servers the newest epoch is open.
pub(super) fn open_on(epochs: &Epochs) -> Vec<String> {
    let epoch = epochs.current().expect("there is an epoch");
    epoch.snapshots.iter().map(|snapshot| snapshot.server.name.clone()).collect()
}

/// How to reach `server` once more.
pub(super) fn configuration_of(server: &crate::servers::Server) -> ServerConfiguration {
    let crate::wire::Address::Tcp(host, port) = server.address.clone() else { panic!("models listen on TCP") };
    ServerConfiguration {
        name: server.name.clone(),
        host,
        port,
        user: server.user.clone(),
        password: None,
        database: server.probe_database.clone(),
        password_file: None,
    }
}
