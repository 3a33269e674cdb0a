//! On which server a read runs, and what follows from its failure there: choices by what is known of the servers,
//! without any I/O.

use std::sync::Arc;

use crate::epoch::EpochSnapshot;
use crate::servers::{Health, Server};
use crate::topology::Role;
use crate::topology::Topology;
use crate::wire::sqlstate;

/// The server of this name, if it may be read on and its epoch is open there.
pub(super) fn named<'a>(snapshots: &'a [EpochSnapshot], name: &str) -> Option<&'a Arc<Server>> {
    snapshots.iter().map(|snapshot| &snapshot.server).find(|server| server.is_open_for_reads() && server.name == name)
}

/// The least busy of the servers on which an epoch is open, of those whose turn it is; none when all are closed, or to
/// be avoided, or take no reads.
pub(super) fn least_busy<'a>(snapshots: &'a [EpochSnapshot], avoid: &[u64], turn: usize) -> Option<&'a Arc<Server>> {
    let count = snapshots.len();
    let open = |server: &&Arc<Server>| server.is_open_for_reads() && !avoid.contains(&server.number);
    let servers = || (0..count).map(|step| &snapshots[turn.wrapping_add(step) % count].server).filter(open);
    let in_turn = servers().filter(|server| server.read_share.takes_part(server.number, turn));
    in_turn.min_by_key(|server| server.load()).or_else(|| {
        // Those whose turn it is are down: better one out of turn than none.
        servers().filter(|server| !server.read_share.is_none()).min_by_key(|server| server.load())
    })
}

/// Whether the leader is no busier than all servers are on average. A follower counts by its share;
/// one that is still catching up does not count.
pub(super) fn leader_is_less_busy(topology: &Topology<Arc<Server>>) -> bool {
    let leader = &topology.leader;
    let with = topology.servers().filter(|server| server.has_caught_up() && !server.read_share.is_none());
    let (load, weight) =
        with.fold((0, 0.0), |(load, weight), server| (load + server.load(), weight + server.read_share.ratio()));
    leader.health() == Health::Up && leader.load() as f64 * weight <= load as f64
}

/// What to do about a read that has failed on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterFailure {
    /// PostgreSQL says that it was a write after all: it is one from now on.
    IsUpdate,
    /// Only the leader can answer it.
    AskLeader,
    /// Another server may answer it.
    Elsewhere,
    /// It would fail anywhere: the client is told.
    Tell,
}

/// What follows from SQLSTATE `code` on a server of this role.
pub(super) fn after_failure(code: &str, role: Role) -> AfterFailure {
    match code {
        sqlstate::READ_ONLY_SQL_TRANSACTION => AfterFailure::IsUpdate,
        // Unlogged and temporary tables cannot be read on a standby.
        sqlstate::FEATURE_NOT_SUPPORTED if role == Role::Follower => AfterFailure::AskLeader,
        // A conflict with recovery, or a server that goes down.
        sqlstate::SERIALIZATION_FAILURE | "40P01" | "57P01" | "57P02" | "57P03" | "57P05" => AfterFailure::Elsewhere,
        _ => AfterFailure::Tell,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;
    use crate::config::ServerConfiguration;

    /// The leader and so many followers, all up and caught up.
    fn servers(followers: u64) -> Vec<Arc<Server>> {
        let server = |number: u64| {
            let configuration = ServerConfiguration::unconnected(&format!("server-{number}"));
            let role = if number == 0 { Role::Leader } else { Role::Follower };
            let server = Server::new(number, role, &configuration).unwrap();
            server.set_health(Health::Up);
            server.has_caught_up.store(true, SeqCst);
            server
        };
        (0..=followers).map(server).collect()
    }

    fn snapshots(servers: &[Arc<Server>]) -> Vec<EpochSnapshot> {
        servers.iter().map(|server| EpochSnapshot { server: server.clone(), snapshot: server.name.clone() }).collect()
    }

    fn chosen(snapshots: &[EpochSnapshot], avoid: &[u64], turn: usize) -> Option<u64> {
        least_busy(snapshots, avoid, turn).map(|server| server.number)
    }

    /// Readers never get a server that is removed, down or unresponsive, nor one that has failed them just now;
    /// whatever the turn, they get one as long as one is left, and only one on which the epoch is open.
    #[test]
    fn a_read_goes_to_an_open_server_of_its_epoch_and_to_no_other() {
        let servers = servers(3);
        // The epoch is not open on the third follower.
        let snapshots = snapshots(&servers[..3]);
        for closed in 0..8_u64 {
            for avoided in 0..8_u64 {
                for (number, server) in servers[..3].iter().enumerate() {
                    let health = [Health::Down, Health::Unresponsive, Health::Down][number];
                    server.set_health(if (closed >> number) & 1 == 1 { health } else { Health::Up });
                }
                let avoid: Vec<u64> = (0..3).filter(|number| (avoided >> number) & 1 == 1).collect();
                for turn in 0..6 {
                    let chosen = chosen(&snapshots, &avoid, turn);
                    let may = (0..3).filter(|number| ((closed | avoided) >> number) & 1 == 0).collect::<Vec<u64>>();
                    assert_eq!(chosen.is_none(), may.is_empty(), "{closed:b} {avoided:b} {turn}");
                    assert!(chosen.is_none_or(|number| may.contains(&number)), "{closed:b} {avoided:b} {turn}");
                }
            }
        }
        assert_eq!(chosen(&[], &[], 5), None, "an epoch that is open nowhere");
    }

    #[test]
    fn the_least_busy_server_answers_and_equals_take_turns() {
        let servers = servers(2);
        let snapshots = snapshots(&servers);
        let turns: Vec<_> = (0..6).map(|turn| chosen(&snapshots, &[], turn)).collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2].map(Some));
        servers[0].updates_in_flight.store(2, SeqCst);
        servers[1].reads_in_flight.store(1, SeqCst);
        assert!((0..6).all(|turn| chosen(&snapshots, &[], turn) == Some(2)));
        servers[2].reads_in_flight.store(3, SeqCst);
        assert!((0..6).all(|turn| chosen(&snapshots, &[], turn) == Some(1)), "updates count as well");
        assert_eq!(chosen(&snapshots, &[], usize::MAX), Some(1), "turns begin anew after the last");
    }

    /// A server without a share gets no reads, not even when all others are closed; one out of turn does.
    #[test]
    fn a_share_of_nothing_is_nothing() {
        let servers = servers(1);
        let snapshots = snapshots(&servers);
        assert!(servers[0].read_share.set(0.0) && servers[1].read_share.set(0.01));
        assert!((0..1000).all(|turn| chosen(&snapshots, &[], turn) == Some(1)));
        servers[1].set_health(Health::Down);
        assert_eq!(chosen(&snapshots, &[], 0), None, "the leader is asked as such, not as a reader");
    }

    /// The server that a session has chosen answers or nobody does.
    #[test]
    fn a_chosen_server_must_be_open() {
        let servers = servers(2);
        let snapshots = snapshots(&servers[..2]);
        let number = |name| named(&snapshots, name).map(|server| server.number);
        assert_eq!((number("server-1"), number("server-2"), number("nobody")), (Some(1), None, None));
        servers[1].set_health(Health::Unresponsive);
        assert_eq!(number("server-1"), None);
        servers[1].set_health(Health::Up);
        servers[1].is_removed.store(true, SeqCst);
        assert_eq!(number("server-1"), None);
        assert_eq!(chosen(&snapshots, &[], 1), Some(0), "nothing begins on a removed server");
    }

    /// A read that would wait for a gate goes to the leader only when that is up and no busier than the others.
    #[test]
    fn the_leader_takes_reads_while_it_is_no_busier_than_the_others() {
        let servers = servers(2);
        let topology = Topology::new(servers[0].clone(), servers[1..].to_vec());
        let leader_is_less_busy = || leader_is_less_busy(&topology);
        assert!(leader_is_less_busy(), "all are idle");
        servers[0].updates_in_flight.store(1, SeqCst);
        assert!(!leader_is_less_busy());
        servers[1].reads_in_flight.store(1, SeqCst);
        servers[2].reads_in_flight.store(1, SeqCst);
        assert!(leader_is_less_busy());
        for number in [1, 2] {
            servers[number].has_caught_up.store(false, SeqCst);
        }
        assert!(leader_is_less_busy(), "it is alone");
        servers[1].has_caught_up.store(true, SeqCst);
        servers[1].reads_in_flight.store(0, SeqCst);
        assert!(!leader_is_less_busy());
        assert!(servers[1].read_share.set(0.0));
        assert!(leader_is_less_busy(), "the other takes no reads");
        for health in [Health::Unknown, Health::Down, Health::Unresponsive] {
            servers[0].set_health(health);
            assert!(!leader_is_less_busy(), "{health:?}");
        }
    }

    /// Only what another server may answer otherwise is tried again, and what was a write is never tried on a replica.
    #[test]
    fn a_failed_read_is_tried_again_only_where_it_may_succeed() {
        for role in [Role::Leader, Role::Follower] {
            assert_eq!(after_failure("25006", role), AfterFailure::IsUpdate);
            for code in ["40001", "40P01", "57P01", "57P02", "57P03", "57P05"] {
                assert_eq!(after_failure(code, role), AfterFailure::Elsewhere, "{code}");
            }
            for code in ["57014", "42P01", "22012", "XX000", "53300", "25P02", ""] {
                assert_eq!(after_failure(code, role), AfterFailure::Tell, "{code}");
            }
        }
        assert_eq!(after_failure("0A000", Role::Follower), AfterFailure::AskLeader);
        assert_eq!(after_failure("0A000", Role::Leader), AfterFailure::Tell);
    }
}
