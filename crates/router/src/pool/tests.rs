//! Pools before a model server: who gets which back end.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use onecopy_testing::until_async;
use tokio::sync::watch;

use super::*;
use crate::backend::{Backend, Credentials};
use crate::config::RouterSettings;
use crate::epoch::model_server::ModelServers;
use crate::servers::Server;
use crate::settings::Settings;
use crate::topology::Role;

/// Far beyond what anything here takes on a machine that has more to do.
const LONG: Duration = Duration::from_secs(120);

const LEADER: &str = "leader";
const CLEAN: &str = "DISCARD ALL";

async fn leader() -> (ModelServers, Arc<Server>) {
    let models = ModelServers::start(0).await;
    let server = Server::new(0, Role::Leader, &models.configurations()[0]).unwrap();
    (models, server)
}

/// Numbers of roles. The names are one: a role may be dropped and made anew, or renamed.
const ALICE: u32 = 16384;
const BOB: u32 = 16385;

fn credentials(models: &ModelServers, role: u32) -> Credentials {
    let server = Server::new(0, Role::Leader, &models.configurations()[0]).unwrap();
    let mut credentials = Credentials::of_router(&server);
    credentials.role = role;
    credentials
}

/// Settings that bound each pool by `limit`.
fn bounded_by(limit: usize) -> Arc<RouterSettings> {
    Arc::new(RouterSettings { leader_backends_max: limit, reader_backends_max: limit, ..RouterSettings::default() })
}

fn leader_pool(server: &Arc<Server>, limit: usize) -> Arc<LeaderPool> {
    let settings = watch::Sender::new(bounded_by(limit)).subscribe();
    Arc::new(LeaderPool::new(server.clone(), "database".into(), settings))
}

fn reader_pool(server: &Arc<Server>, limit: usize) -> ReaderPool {
    let settings = watch::Sender::new(bounded_by(limit)).subscribe();
    ReaderPool::new(server.clone(), "database".into(), settings)
}

async fn read(pool: &ReaderPool, credentials: &Credentials) -> Backend {
    pool.take(credentials, &Settings::default(), LONG).await.unwrap()
}

/// A session finds its back end as it left it; another session gets it only when everything was taken off it.
#[tokio::test]
async fn a_parked_back_end_is_its_sessions_or_clean() {
    let (models, server) = leader().await;
    let (pool, alice) = (leader_pool(&server, 1), credentials(&models, ALICE));
    let backend = pool.take(1, &alice, LONG).await.unwrap();
    let process = backend.process_id;
    pool.park(1, backend);
    let mut backend = pool.take(1, &alice, LONG).await.unwrap();
    assert_eq!((backend.process_id, models.when(LEADER, CLEAN)), (process, None));
    backend.stale_plans = true;
    pool.park(1, backend);
    let backend = pool.take(2, &alice, LONG).await.unwrap();
    assert_eq!(backend.process_id, process, "it was the only one");
    assert!(models.when(LEADER, CLEAN).is_some() && !backend.stale_plans);
    assert_eq!(pool.idle_count(), 0);
}

/// What one role has logged in with serves no other role: such a back end is closed to make room, parked or free.
#[tokio::test]
async fn a_back_end_on_the_leader_never_passes_to_another_role() {
    let (models, server) = leader().await;
    let (alice, bob) = (credentials(&models, ALICE), credentials(&models, BOB));
    let pool = leader_pool(&server, 1);
    let of_alice = pool.take(1, &alice, LONG).await.unwrap();
    let process = of_alice.process_id;
    pool.park(1, of_alice);
    let of_bob = pool.take(2, &bob, LONG).await.unwrap();
    assert_ne!(of_bob.process_id, process);
    assert_eq!((server.connections.load(SeqCst), models.when(LEADER, CLEAN)), (1, None));
    // The session ends: its back end is free for its role, and for that only.
    let process = of_bob.process_id;
    pool.park(2, of_bob);
    pool.forget(2);
    until_async("its back end is free", async || pool.idle_count() > 0).await;
    assert!(models.when(LEADER, CLEAN).is_some());
    let again = pool.take(3, &bob, LONG).await.unwrap();
    assert_eq!(again.process_id, process);
    pool.park(3, again);
    pool.forget(3);
    until_async("its back end is free", async || pool.idle_count() > 0).await;
    let of_alice = pool.take(1, &alice, LONG).await.unwrap();
    assert_ne!(of_alice.process_id, process);
    assert_eq!(server.connections.load(SeqCst), 1);
}

/// A pool has never more back ends than its bound, in whoever's hands; who gets none is told so in time, and one that
/// is closed makes room.
#[tokio::test]
async fn a_pool_keeps_its_bound() {
    let (models, server) = leader().await;
    let alice = credentials(&models, ALICE);
    let pool = leader_pool(&server, 2);
    let (one, two) = (pool.take(1, &alice, LONG).await.unwrap(), pool.take(2, &alice, LONG).await.unwrap());
    let refused = pool.take(3, &alice, Duration::ZERO).await;
    assert!(matches!(refused, Err(PoolError::Exhausted { limit: 2, .. })), "{refused:?}");
    assert!(!pool.has_room());
    assert_eq!(server.connections.load(SeqCst), 2);
    drop(one);
    assert!(pool.has_room());
    let three = pool.take(3, &alice, LONG).await.unwrap();
    assert!(!pool.has_room());
    assert_ne!(three.process_id, two.process_id);
    pool.park(2, two);
    assert!(pool.has_room(), "a parked one can be passed on");
    pool.clear();
    drop(three);

    let pool = reader_pool(&server, 1);
    let one = read(&pool, &alice).await;
    let refused = pool.take(&alice, &Settings::default(), Duration::ZERO).await;
    assert!(matches!(refused, Err(PoolError::Exhausted { limit: 1, .. })), "{refused:?}");
    let process = one.process_id;
    // Who waits gets what is given back.
    let giving = async {
        tokio::task::yield_now().await;
        pool.give_back(one);
    };
    let (next, ()) = tokio::join!(read(&pool, &alice), giving);
    assert_eq!(next.process_id, process);
    assert_eq!(server.connections.load(SeqCst), 1);
}

/// Another bound holds at once: who waits gets the place that is new, and what is too much is closed as it comes back,
/// or by the sweep where nobody has it.
///
/// Spec: A2
#[tokio::test]
async fn a_pool_follows_its_bound() {
    let (models, server) = leader().await;
    let alice = credentials(&models, ALICE);
    let connections = || server.connections.load(SeqCst);
    let settings = watch::Sender::new(bounded_by(1));
    let pool = Arc::new(LeaderPool::new(server.clone(), "database".into(), settings.subscribe()));
    let one = pool.take(1, &alice, LONG).await.unwrap();
    let raise = async {
        until_waiting(&pool.queue, 1).await;
        settings.send_replace(bounded_by(4));
    };
    let (two, ()) = tokio::join!(pool.take(2, &alice, LONG), raise);
    let (three, four) = (pool.take(3, &alice, LONG).await.unwrap(), pool.take(4, &alice, LONG).await.unwrap());
    pool.park(3, three);
    pool.park(4, four);
    settings.send_replace(bounded_by(2));
    assert!(matches!(pool.take(5, &alice, LONG).await, Ok(stolen) if stolen.idle_since.elapsed() < LONG));
    assert_eq!((pool.idle_count(), connections()), (1, 3), "that was closed, and one is parked");
    pool.sweep();
    assert_eq!((pool.idle_count(), connections()), (0, 2));
    pool.park(1, one);
    assert_eq!(pool.idle_count(), 1, "there may be two");
    settings.send_replace(bounded_by(1));
    pool.park(2, two.unwrap());
    assert_eq!((pool.idle_count(), connections()), (1, 1));
    drop(pool);

    let pool = ReaderPool::new(server.clone(), "database".into(), settings.subscribe());
    let one = read(&pool, &alice).await;
    let raise = async {
        until_waiting(&pool.queue, 1).await;
        settings.send_replace(bounded_by(3));
    };
    let (two, ()) = tokio::join!(read(&pool, &alice), raise);
    let three = read(&pool, &alice).await;
    pool.give_back(two);
    settings.send_replace(bounded_by(2));
    pool.give_back(three);
    assert_eq!((pool.idle_count(), connections()), (1, 2));
    settings.send_replace(bounded_by(1));
    pool.sweep(None).await;
    assert_eq!((pool.idle_count(), connections()), (0, 1));
    drop(one);
    assert_eq!(connections(), 0);
}

/// Readers of another role get no back end that is not theirs; an idle one gives way.
#[tokio::test]
async fn a_readers_back_end_never_passes_to_another_role() {
    let (models, server) = leader().await;
    let (alice, bob) = (credentials(&models, ALICE), credentials(&models, BOB));
    let pool = reader_pool(&server, 1);
    let of_alice = read(&pool, &alice).await;
    let process = of_alice.process_id;
    pool.give_back(of_alice);
    let of_bob = read(&pool, &bob).await;
    assert_ne!(of_bob.process_id, process);
    assert_eq!((pool.idle_count(), server.connections.load(SeqCst)), (0, 1));
}

/// Idle back ends hold no snapshot but the current epoch's: others' transactions are ended, and one whose epoch is not
/// known is among the others.
#[tokio::test]
async fn idle_readers_leave_epochs_of_before() {
    let (models, server) = leader().await;
    let alice = credentials(&models, ALICE);
    let pool = reader_pool(&server, 3);
    let mut backends = Vec::new();
    for epoch in [Some(1), Some(2), None] {
        let mut backend = read(&pool, &alice).await;
        (backend.epoch, backend.in_transaction) = (epoch, true);
        backends.push(backend);
    }
    let processes: Vec<u32> = backends.iter().map(|backend| backend.process_id).collect();
    backends.into_iter().for_each(|backend| pool.give_back(backend));
    pool.sweep(Some(2)).await;
    let ended = models.heard().iter().filter(|said| said.ends_with("ROLLBACK")).count();
    assert_eq!((ended, pool.idle_count()), (2, 3));
    for _ in 0..3 {
        let backend = read(&pool, &alice).await;
        let is_current = backend.process_id == processes[1];
        let expected = if is_current { (Some(2), true) } else { (None, false) };
        assert_eq!((backend.epoch, backend.in_transaction), expected);
    }
    let backend = read(&pool, &alice).await;
    assert!(!processes.contains(&backend.process_id), "those were closed by their readers");
}

/// Waits until so many are in the queue.
async fn until_waiting(queue: &queue::Queue, count: usize) {
    while queue.waiting() != count {
        tokio::task::yield_now().await;
    }
}

/// Nobody is overtaken: not by who comes later, and not by a session that gives its back end back and wants it again at
/// once. Who gives up keeps nobody's slot.
///
/// Spec: A2
#[tokio::test]
async fn those_who_wait_for_a_back_end_are_served_in_their_order() {
    let (models, server) = leader().await;
    let alice = Arc::new(credentials(&models, ALICE));
    let pool = leader_pool(&server, 1);
    let (served, mut order) = tokio::sync::mpsc::unbounded_channel();
    let wait = |session: u64, timeout: Duration| {
        let (pool, alice, served) = (pool.clone(), alice.clone(), served.clone());
        tokio::spawn(async move {
            let result = pool.take(session, &alice, timeout).await.map(|backend| {
                served.send(session).unwrap();
                pool.park(session, backend);
            });
            result.is_ok()
        })
    };
    let first = pool.take(1, &alice, LONG).await.unwrap();
    let process = first.process_id;
    let given_up = wait(2, LONG);
    until_waiting(&pool.queue, 1).await;
    let mut waiting = Vec::new();
    for session in 3..=6 {
        waiting.push(wait(session, LONG));
        until_waiting(&pool.queue, waiting.len() + 1).await;
    }
    assert!(!wait(7, Duration::ZERO).await.unwrap());
    given_up.abort();
    assert!(given_up.await.is_err());
    pool.park(1, first);
    waiting.push(wait(1, LONG));
    for (waiting, session) in waiting.into_iter().zip([3, 4, 5, 6, 1]) {
        assert!(waiting.await.unwrap());
        assert_eq!(order.recv().await, Some(session));
    }
    let last = pool.take(1, &alice, LONG).await.unwrap();
    assert_eq!((last.process_id, server.connections.load(SeqCst), pool.queue.waiting()), (process, 1, 0));
}

/// The same for readers; a slot that gets free because a back end was closed is given as one that is given back.
///
/// Spec: A2
#[tokio::test]
async fn readers_who_wait_are_served_in_their_order() {
    let (models, server) = leader().await;
    let (alice, bob) = (Arc::new(credentials(&models, ALICE)), Arc::new(credentials(&models, BOB)));
    let pool = Arc::new(reader_pool(&server, 1));
    let (served, mut order) = tokio::sync::mpsc::unbounded_channel();
    let first = read(&pool, &alice).await;
    let mut waiting = Vec::new();
    for reader in 1..=6 {
        let (pool, served) = (pool.clone(), served.clone());
        let credentials = if reader % 3 == 0 { bob.clone() } else { alice.clone() };
        waiting.push(tokio::spawn({
            let pool = pool.clone();
            async move {
                let backend = read(&pool, &credentials).await;
                served.send(reader).unwrap();
                if reader % 2 == 0 { drop(backend) } else { pool.give_back(backend) }
            }
        }));
        until_waiting(&pool.queue, waiting.len()).await;
    }
    drop(first);
    for reader in 1..=6 {
        assert_eq!(order.recv().await, Some(reader));
    }
    for waiting in waiting {
        waiting.await.unwrap();
    }
}

/// Of another role's idle back ends the one goes that was idle longest, wherever it stands.
#[tokio::test]
async fn room_is_made_by_the_reader_that_was_idle_longest() {
    let (models, server) = leader().await;
    let (alice, bob) = (credentials(&models, ALICE), credentials(&models, BOB));
    let pool = reader_pool(&server, 3);
    let backends = [read(&pool, &alice).await, read(&pool, &alice).await, read(&pool, &alice).await];
    let processes = backends.each_ref().map(|backend| backend.process_id);
    backends.into_iter().for_each(|backend| pool.give_back(backend));
    // Only the last is idle for long: it was looked at by the sweep.
    let now = std::time::Instant::now();
    for (process, idle) in processes.into_iter().zip([0, 0, 1]) {
        pool.set_idle_since(process, now.checked_sub(Duration::from_secs(idle)).unwrap());
    }
    let of_bob = read(&pool, &bob).await;
    let mut left = [read(&pool, &alice).await.process_id, read(&pool, &alice).await.process_id];
    left.sort_unstable();
    assert_eq!((left.as_slice(), pool.idle_count()), (&processes[..2], 0));
    drop(of_bob);
}
