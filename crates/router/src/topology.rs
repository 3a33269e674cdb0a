//! Who leads a cluster and who follows: one value wherever servers are named.

use serde::{Deserialize, Serialize};

/// The servers of one cluster at one moment; `S` is what somebody knows of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound(deserialize = "S: Deserialize<'de>"))]
pub struct Topology<S> {
    /// Which leadership this is: 1 for the cluster's first leader, one more with each other leader.
    pub term: u64,
    /// What `initdb` has called the database system that all servers are copies of (`pg_control_system()`); none while
    /// nobody has asked the leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_identifier: Option<String>,
    /// The only server that executes and certifies updates.
    pub leader: S,
    /// Its standbys.
    #[serde(default, rename = "follower", skip_serializing_if = "Vec::is_empty")]
    pub followers: Vec<S>,
}

impl<S> Topology<S> {
    /// The first leadership of a cluster that nobody has asked for its system identifier yet.
    pub fn new(leader: S, followers: Vec<S>) -> Topology<S> {
        Topology { term: 1, system_identifier: None, leader, followers }
    }

    /// All of them, in the order in which they are shown: the leader, then the followers.
    pub fn servers(&self) -> impl DoubleEndedIterator<Item = &S> + Clone {
        std::iter::once(&self.leader).chain(&self.followers)
    }

    /// All of them, to be changed.
    pub fn servers_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut S> {
        std::iter::once(&mut self.leader).chain(&mut self.followers)
    }

    /// The same leadership, with what `of` makes of each server.
    pub fn map<'a, T>(&'a self, mut of: impl FnMut(&'a S) -> T) -> Topology<T> {
        Topology {
            term: self.term,
            system_identifier: self.system_identifier.clone(),
            leader: of(&self.leader),
            followers: self.followers.iter().map(of).collect(),
        }
    }
}

/// What a server is in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Executes and certifies updates.
    Leader,
    /// A hot standby of it.
    Follower,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leader_is_shown_first_and_stays_the_leader() {
        let mut topology = Topology { term: 3, ..Topology::new("a", vec!["b", "c"]) };
        topology.servers_mut().for_each(|server| *server = server.trim());
        assert_eq!(topology.servers().copied().collect::<String>(), "abc");
        assert_eq!(topology.servers().rev().copied().collect::<String>(), "cba");
        let lengths = topology.map(|server| server.len());
        assert_eq!((lengths.term, lengths.leader, lengths.followers), (3, 1, vec![1, 1]));
    }
}
