//! Serializable transactions on the leader, counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use crate::servers::Server;

/// PostgreSQL's pool of serializable transactions holds ten for each back end (`predicate.c`); the router stops
/// trusting it at this share.
const SERIALIZABLE_POOL_SHARE_PERCENT: u64 = 80;

/// The pool's size while the leader has not been asked: that of PostgreSQL's default settings.
const SERIALIZABLE_POOL_DEFAULT: u64 = 10 * 100;

/// Serializable transactions on the leader, counted, because PostgreSQL forgets what one has read when too many others
/// have run during its life.
#[derive(Debug, Clone)]
pub struct SerializableTransactions {
    begun: Arc<AtomicU64>,
    limit: Arc<AtomicU64>,
}

impl Default for SerializableTransactions {
    fn default() -> Self {
        SerializableTransactions {
            begun: Arc::default(),
            limit: Arc::new(AtomicU64::new(SERIALIZABLE_POOL_DEFAULT * SERIALIZABLE_POOL_SHARE_PERCENT / 100)),
        }
    }
}

impl SerializableTransactions {
    /// Counts one more.
    pub fn begin(&self, leader: &Arc<Server>) -> SerializableTransaction {
        leader.updates_in_flight.fetch_add(1, Relaxed);
        let begun_at = self.begun.fetch_add(1, SeqCst);
        SerializableTransaction {
            begun_at,
            begun: self.begun.clone(),
            limit: self.limit.clone(),
            leader: leader.clone(),
        }
    }

    /// Counts one that is over at once.
    pub fn note_short(&self) {
        self.begun.fetch_add(1, SeqCst);
    }

    /// Notes for how many transactions the leader has room.
    pub fn set_pool_size(&self, transactions: u64) {
        self.limit.store(transactions * SERIALIZABLE_POOL_SHARE_PERCENT / 100, SeqCst);
    }
}

/// One of them, while it is open.
#[derive(Debug)]
pub struct SerializableTransaction {
    begun_at: u64,
    begun: Arc<AtomicU64>,
    limit: Arc<AtomicU64>,
    leader: Arc<Server>,
}

impl SerializableTransaction {
    /// Whether so many others have begun since that PostgreSQL may have forgotten what this one has read.
    pub fn may_be_forgotten(&self) -> bool {
        self.begun.load(SeqCst) - self.begun_at > self.limit.load(SeqCst)
    }
}

impl Drop for SerializableTransaction {
    fn drop(&mut self) {
        self.leader.updates_in_flight.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{RouterConfiguration, RouterSettings, ServerConfiguration};
    use crate::membership::Servers;

    #[test]
    fn a_transaction_is_forgotten_only_after_the_pool_could_have_overflowed() {
        let leader = ServerConfiguration::unconnected("leader");
        let settings = RouterSettings::default();
        let servers =
            Servers::of(&RouterConfiguration { router: settings, leader, followers: vec![] }).expect("one server");
        let transactions = SerializableTransactions::default();
        transactions.set_pool_size(100);
        let oldest = transactions.begin(servers.leader());
        // It counts itself as well.
        for _ in 0..79 {
            drop(transactions.begin(servers.leader()));
        }
        assert!(!oldest.may_be_forgotten());
        drop(transactions.begin(servers.leader()));
        assert!(oldest.may_be_forgotten());
        drop(oldest);
        assert_eq!(servers.leader().updates_in_flight.load(Relaxed), 0);
    }
}
