//! Which servers the router has now: its leader, and followers that come and go.
//!
//! Readers take the topology as it is at a moment. A server that was given up stays an object for whoever still has
//! it in his hands: an epoch of before, a back end. It is never taken for another, since its number is its own for
//! ever; and its flag says that nothing new is to begin there.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, RwLock, RwLockWriteGuard};

use crate::config::{RouterConfiguration, ServerConfiguration};
use crate::error::RouterError;
use crate::servers::Server;
use crate::topology::Role;
use crate::topology::Topology;

/// The leader and the followers of now.
#[derive(Debug)]
pub struct Servers {
    leader: Arc<Server>,
    current: RwLock<Arc<Topology<Arc<Server>>>>,
    /// Grows by one with each change.
    version: AtomicU64,
    /// Numbers are given once; there are enough for a new follower each nanosecond of five hundred years.
    next_number: AtomicU64,
}

impl Servers {
    /// The servers of a router that starts.
    ///
    /// # Errors
    /// Two servers of one name; a password file that cannot be read.
    pub fn of(configuration: &RouterConfiguration) -> Result<Servers, RouterError> {
        let leader = Server::new(0, Role::Leader, &configuration.leader)?;
        let servers = Servers {
            current: RwLock::new(Arc::new(Topology::new(leader.clone(), Vec::new()))),
            leader,
            version: AtomicU64::new(0),
            next_number: AtomicU64::new(1),
        };
        for follower in &configuration.followers {
            let follower = servers.prepare(follower)?;
            // It was a standby before the router came, so it is not made anew for this router.
            follower.has_caught_up.store(true, SeqCst);
            servers.add(follower)?;
        }
        Ok(servers)
    }

    /// The leader.
    pub fn leader(&self) -> &Arc<Server> {
        &self.leader
    }

    /// All of them, as they are now.
    pub fn current(&self) -> Arc<Topology<Arc<Server>>> {
        self.current.read().expect("no code panics while it holds this lock").clone()
    }

    /// Another number than before when the list has changed since; read it before the list.
    pub fn version(&self) -> u64 {
        self.version.load(SeqCst)
    }

    /// The server called `name`.
    pub fn named(&self, name: &str) -> Option<Arc<Server>> {
        self.current().servers().find(|server| server.name == name).cloned()
    }

    /// The follower called `name`.
    ///
    /// # Errors
    /// [`RouterError::UnknownFollower`].
    pub fn follower(&self, name: &str) -> Result<Arc<Server>, RouterError> {
        let follower = self.current().followers.iter().find(|server| server.name == name).cloned();
        follower.ok_or_else(|| RouterError::UnknownFollower(name.to_owned()))
    }

    /// A follower with a number of its own, for [`Servers::add`].
    ///
    /// # Errors
    /// A password file that cannot be read.
    pub fn prepare(&self, follower: &ServerConfiguration) -> Result<Arc<Server>, RouterError> {
        Ok(Server::new(self.next_number.fetch_add(1, SeqCst), Role::Follower, follower)?)
    }

    /// Takes a follower that was prepared here.
    ///
    /// # Errors
    /// [`RouterError::DuplicateServer`].
    pub fn add(&self, follower: Arc<Server>) -> Result<(), RouterError> {
        let mut current = self.write();
        if current.servers().any(|known| known.name == follower.name) {
            return Err(RouterError::DuplicateServer(follower.name.clone()));
        }
        Arc::make_mut(&mut *current).followers.push(follower);
        self.version.fetch_add(1, SeqCst);
        Ok(())
    }

    /// Gives a follower up: nothing begins there any more.
    ///
    /// # Errors
    /// [`RouterError::UnknownFollower`].
    pub fn remove(&self, name: &str) -> Result<Arc<Server>, RouterError> {
        let mut current = self.write();
        let place = current.followers.iter().position(|server| server.name == name);
        let place = place.ok_or_else(|| RouterError::UnknownFollower(name.to_owned()))?;
        let follower = Arc::make_mut(&mut *current).followers.remove(place);
        follower.is_removed.store(true, SeqCst);
        self.version.fetch_add(1, SeqCst);
        Ok(follower)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Arc<Topology<Arc<Server>>>> {
        self.current.write().expect("no code panics while it holds this lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RouterSettings;

    fn servers(followers: &[&str]) -> Result<Servers, RouterError> {
        let followers = followers.iter().map(|name| ServerConfiguration::unconnected(name)).collect();
        Servers::of(&RouterConfiguration {
            router: RouterSettings::default(),
            leader: ServerConfiguration::unconnected("leader"),
            followers,
        })
    }

    fn add(servers: &Servers, name: &str) -> Result<Arc<Server>, RouterError> {
        let follower = servers.prepare(&ServerConfiguration::unconnected(name))?;
        servers.add(follower.clone())?;
        Ok(follower)
    }

    fn names(servers: &Servers) -> Vec<String> {
        servers.current().servers().map(|server| server.name.clone()).collect()
    }

    #[test]
    fn a_name_comes_back_and_a_number_never_does() {
        let servers = servers(&["one", "two"]).unwrap();
        let list_of_before = servers.current();
        let first = servers.remove("one").unwrap();
        assert!(first.is_removed.load(SeqCst));
        assert_eq!(names(&servers), ["leader", "two"]);
        let again = add(&servers, "one").unwrap();
        assert_eq!(names(&servers), ["leader", "two", "one"]);
        assert!(list_of_before.servers().all(|server| server.number != again.number));
        assert!(!again.is_removed.load(SeqCst));
        assert_eq!(list_of_before.followers.len(), 2);
    }

    #[test]
    fn every_change_and_nothing_else_changes_the_version() {
        let servers = servers(&["one"]).unwrap();
        let version = servers.version();
        assert!(matches!(add(&servers, "one"), Err(RouterError::DuplicateServer(name)) if name == "one"));
        assert!(matches!(servers.remove("two"), Err(RouterError::UnknownFollower(name)) if name == "two"));
        assert_eq!(servers.version(), version);
        add(&servers, "two").unwrap();
        assert_ne!(servers.version(), version);
    }

    #[test]
    fn the_leader_is_no_follower_and_names_are_unique() {
        let with_one = servers(&["one"]).unwrap();
        assert!(matches!(with_one.remove("leader"), Err(RouterError::UnknownFollower(_))));
        assert!(matches!(with_one.follower("leader"), Err(RouterError::UnknownFollower(_))));
        assert!(matches!(servers(&["one", "one"]), Err(RouterError::DuplicateServer(_))));
        assert!(matches!(servers(&["leader"]), Err(RouterError::DuplicateServer(_))));
    }
}
