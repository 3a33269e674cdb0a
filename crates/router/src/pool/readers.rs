//! The pools of readers of one database: one for each server that the router has now.

use std::sync::{Arc, RwLock};

use super::ReaderPool;
use crate::backend::Backend;
use crate::config::LiveSettings;
use crate::membership::Servers;
use crate::servers::Server;

/// Pools that follow the list of servers by themselves.
#[derive(Debug)]
pub struct ReaderPools {
    servers: Arc<Servers>,
    database: Arc<str>,
    settings: LiveSettings,
    known: RwLock<Known>,
}

/// The pools for one version of the list of servers.
#[derive(Debug)]
struct Known {
    version: u64,
    pools: Arc<[Arc<ReaderPool>]>,
}

impl ReaderPools {
    /// Pools of `database`, each with `reader_backends_max` back ends at the most.
    pub fn new(servers: Arc<Servers>, database: Arc<str>, settings: LiveSettings) -> ReaderPools {
        let version = servers.version();
        let of_server =
            |server: &Arc<Server>| Arc::new(ReaderPool::new(server.clone(), database.clone(), settings.clone()));
        let pools = servers.current().servers().map(of_server).collect();
        ReaderPools { known: RwLock::new(Known { version, pools }), servers, database, settings }
    }

    /// The pools of now.
    pub fn all(&self) -> Arc<[Arc<ReaderPool>]> {
        {
            let known = self.known.read().expect("no code panics while it holds this lock");
            if known.version == self.servers.version() {
                return known.pools.clone();
            }
        }
        self.renew()
    }

    /// The pool of `server`; none when the router has given it up.
    pub fn of(&self, server: &Server) -> Option<Arc<ReaderPool>> {
        self.all().iter().find(|pool| pool.server.number == server.number).cloned()
    }

    /// Takes a back end back; one on a server that was given up is closed.
    pub fn give_back(&self, backend: Backend) {
        if let Some(pool) = self.of(&backend.server) {
            pool.give_back(backend);
        }
    }

    /// How many back ends on `server` are idle.
    pub fn idle_count(&self, server: &Server) -> usize {
        self.of(server).map_or(0, |pool| pool.idle_count())
    }

    /// Closes all idle back ends.
    pub fn clear(&self) {
        self.all().iter().for_each(|pool| pool.clear());
    }

    /// Keeps the pools of servers that are still there, makes those of new ones, and drops the others: whoever still
    /// waits at a dropped one finds its server removed.
    fn renew(&self) -> Arc<[Arc<ReaderPool>]> {
        let mut known = self.known.write().expect("no code panics while it holds this lock");
        // In this order the list is at least as new as the version; one that is newer is looked at once more.
        let version = self.servers.version();
        let pool_of = |server: &Arc<Server>| {
            let kept = known.pools.iter().find(|pool| pool.server.number == server.number).cloned();
            kept.unwrap_or_else(|| {
                Arc::new(ReaderPool::new(server.clone(), self.database.clone(), self.settings.clone()))
            })
        };
        let pools: Arc<[Arc<ReaderPool>]> = self.servers.current().servers().map(pool_of).collect();
        *known = Known { version, pools: pools.clone() };
        pools
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{RouterConfiguration, RouterSettings, ServerConfiguration};

    /// A pool is one server's for ever: it stays while the server does, and is not the one of a server of the same name
    /// that comes later.
    #[test]
    fn pools_follow_the_servers_and_are_never_passed_on() {
        let followers = ["one", "two"].map(ServerConfiguration::unconnected).to_vec();
        let leader = ServerConfiguration::unconnected("leader");
        let router = RouterConfiguration { router: RouterSettings::default(), leader, followers };
        let servers = Arc::new(Servers::of(&router).unwrap());
        let pools = ReaderPools::new(
            servers.clone(),
            "database".into(),
            tokio::sync::watch::Sender::new(Arc::default()).subscribe(),
        );
        let before = pools.all();
        assert!(Arc::ptr_eq(&before, &pools.all()), "nothing has changed");
        let removed = servers.remove("one").unwrap();
        assert!(pools.of(&removed).is_none());
        let again = servers.prepare(&ServerConfiguration::unconnected("one")).unwrap();
        servers.add(again.clone()).unwrap();
        let names: Vec<String> = pools.all().iter().map(|pool| pool.server.name.clone()).collect();
        assert_eq!(names, ["leader", "two", "one"]);
        let of = |server: &Server| pools.of(server).unwrap();
        assert!(Arc::ptr_eq(&of(servers.leader()), &before[0]));
        assert!(Arc::ptr_eq(&pools.all()[1], &before[2]), "the pool of two is kept");
        assert!(before.iter().all(|pool| !Arc::ptr_eq(pool, &of(&again))));
    }
}
