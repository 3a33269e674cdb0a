//! A database before model servers: what is asked of them when it is opened, and afterwards.

use super::*;
use crate::config::{RouterConfiguration, RouterSettings};
use crate::epoch::Demand;
use crate::epoch::model_server::ModelServers;

/// Far beyond what anything here takes on a machine that has more to do.
const LONG: Duration = Duration::from_secs(120);

const LEADER: &str = "leader";

async fn open(models: &ModelServers) -> Result<Arc<Domain>, BackendError> {
    let settings = RouterSettings { gate_timeout_ms: 120_000, follower_timeout_ms: 120_000, ..Default::default() };
    let mut followers = models.configurations();
    let leader = followers.remove(0);
    let configuration = RouterConfiguration { router: settings.clone(), leader, followers };
    let servers = Arc::new(Servers::of(&configuration).unwrap());
    Domain::open("database", servers, Arc::new(settings), SerializableTransactions::default()).await
}

/// Only clients' transactions take places in PostgreSQL's pool of serializable transactions without asking for them; the
/// canary asks, and is counted.
#[tokio::test]
async fn the_routers_own_connections_are_not_serializable() {
    let models = ModelServers::start(1).await;
    let domain = open(&models).await.unwrap();
    domain.room.note_unsettled(77);
    let epoch = domain.epochs.take(Demand::Commits(0), &domain.room, LONG).await.unwrap();
    assert_eq!(epoch.id, 1);
    let credentials = Credentials::of_router(domain.servers.leader());
    let _session = domain.leader.take(1, &credentials, LONG).await.unwrap();
    for pool in domain.readers.all().iter() {
        pool.take(&credentials, &Settings::default(), LONG).await.unwrap();
    }
    let mut own: Vec<String> = Vec::new();
    for (application, level) in models.levels(LEADER) {
        assert_eq!(level == "serializable", application == "onecopy session", "{application}: {level}");
        own.push(application);
    }
    own.sort();
    own.dedup();
    let known = ["catalog", "epoch", "gate", "reader", "session"].map(|purpose| format!("onecopy {purpose}"));
    assert_eq!(own, known);
    assert!(models.levels("follower-1").iter().all(|(_, level)| level != "serializable"));
}

/// A database that is opened while its leader is gone gets its tripwire before the first canary all the same.
#[tokio::test]
async fn a_database_opened_without_its_leader_gets_its_tripwire_before_the_first_gate() {
    const MAKE: &str = "CREATE UNLOGGED TABLE IF NOT EXISTS onecopy_router.tripwire";
    let models = ModelServers::start(1).await;
    models.set_gone(LEADER, true);
    let domain = open(&models).await.unwrap();
    assert_eq!(models.when(LEADER, MAKE), None);
    models.set_gone(LEADER, false);
    domain.epochs.take(Demand::Commits(0), &domain.room, LONG).await.unwrap();
    let canary = models.when(LEADER, "SELECT 1 FROM onecopy_router.tripwire");
    assert!(models.when(LEADER, MAKE).is_some() && models.when(LEADER, MAKE) < canary);
}
