//! Reads outside a transaction: at an epoch, on the least busy server.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use super::batch_traits::BatchTraits;
use super::ddl_in_progress::closed_by_ddl;
use super::outcome::{Outcome, Unfit};
use super::relay::{Ended, Hold, RelayError};
use super::request::Request;
use super::served_by::ServedBy;
use super::server_choice::{AfterFailure, after_failure, leader_is_less_busy, least_busy, named};
use super::simple::readable;
use super::{Session, SessionEnd};
use crate::backend::Backend;
use crate::epoch::{Demand, Epoch, Known};
use crate::servers::{Health, Server};
use crate::settings::Reach;
use crate::wire::{SqlError, sqlstate};

/// Tries of a read on different servers or epochs before the leader itself must answer it.
const EPOCH_TRIES_MAX: usize = 6;

/// How long a reader waits for an epoch that is fresh enough before it reads on the leader.
const EPOCH_WAIT: Duration = Duration::from_secs(1);

/// The same while the leader is known to be gone, so that no gate can close.
const EPOCH_WAIT_WITHOUT_LEADER: Duration = Duration::from_millis(100);

/// How long a read waits for the server that its session has chosen, and how often it looks.
const CHOSEN_SERVER_WAIT: Duration = Duration::from_secs(2);
const CHOSEN_SERVER_LOOK: Duration = Duration::from_millis(20);

/// Why a read was not answered at an epoch.
#[derive(Debug)]
pub(super) enum NotAtEpoch {
    /// The leader shall answer it.
    AskLeader,
    /// The server that the session has chosen is not in the epoch; it may come back.
    ChosenServerIsOut,
    /// The client shall get this error.
    Error(SqlError),
}

/// One read in flight on a server.
pub(super) struct InFlight(Arc<Server>);

impl InFlight {
    /// Counts one more; none when the router has given the server up.
    pub(super) fn on(server: &Arc<Server>) -> Option<InFlight> {
        server.reads_in_flight.fetch_add(1, SeqCst);
        let in_flight = InFlight(server.clone());
        // In this order: whoever removes the server sets the flag first and counts then, so one of the two sees the
        // other.
        (!server.is_removed()).then_some(in_flight)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.reads_in_flight.fetch_sub(1, SeqCst);
    }
}

/// What to do after one try of a read.
enum Tried {
    Done(Outcome),
    Again { avoid: Option<u64> },
    AskLeader,
}

impl Session {
    /// The demand of a read that arrives now.
    pub(super) fn demand(&self) -> Demand {
        let known = Known { before: self.commits_before, seen: self.commits_seen };
        Demand::of(self.freshness, &self.database.commit_barrier, known)
    }

    /// An epoch that meets `demand`, or the reason why there is none.
    async fn take_epoch(&self, demand: Demand) -> Result<Arc<Epoch>, NotAtEpoch> {
        if self.database.unsafe_without_epochs {
            return Ok(Arc::new(Epoch::unsafe_fake(&self.database.servers.current())));
        }
        let leader_is_gone = || matches!(self.database.servers.leader().health(), Health::Down | Health::Unresponsive);
        let wait = if leader_is_gone() { EPOCH_WAIT_WITHOUT_LEADER } else { EPOCH_WAIT };
        match self.database.epochs.take(demand, &self.database.commit_barrier, wait).await {
            Ok(epoch) => Ok(epoch),
            // Looked at again: it may have come back meanwhile.
            Err(_) if leader_is_gone() => Err(NotAtEpoch::Error(
                SqlError::error(
                    sqlstate::CANNOT_CONNECT_NOW,
                    format!(
                        "no epoch is fresh enough for {} reads, and the leader is not there to make one",
                        self.freshness
                    ),
                )
                .hint(
                    "Try again when the leader is back, or allow older reads: SET onecopy.freshness = 'bounded:60000'.",
                ),
            )),
            Err(_) => Err(NotAtEpoch::AskLeader),
        }
    }

    /// An epoch that meets `demand` and a server to read it on; the session's chosen server is waited for.
    pub(super) async fn choose(&self, demand: Demand, avoid: &[u64]) -> Result<(Arc<Epoch>, Arc<Server>), NotAtEpoch> {
        let deadline = Instant::now() + CHOSEN_SERVER_WAIT;
        loop {
            let epoch = self.take_epoch(demand).await?;
            match self.choose_server(&epoch, avoid) {
                Err(NotAtEpoch::ChosenServerIsOut) if Instant::now() < deadline => {
                    tokio::time::sleep(CHOSEN_SERVER_LOOK).await;
                }
                Err(NotAtEpoch::ChosenServerIsOut) => return Err(NotAtEpoch::Error(self.chosen_server_is_out())),
                Err(reason) => return Err(reason),
                Ok(server) => return Ok((epoch, server)),
            }
        }
    }

    fn chosen_server_is_out(&self) -> SqlError {
        let name = self.server_choice.as_deref().unwrap_or_default();
        SqlError::error(sqlstate::CANNOT_CONNECT_NOW, format!("server {name:?} is not in the current epoch"))
            .hint("Try again, or RESET onecopy.server.")
    }

    /// The server that the session has chosen, or the least busy one on which `epoch` is open.
    fn choose_server(&self, epoch: &Epoch, avoid: &[u64]) -> Result<Arc<Server>, NotAtEpoch> {
        if let Some(name) = &self.server_choice {
            return named(&epoch.snapshots, name).cloned().ok_or(NotAtEpoch::ChosenServerIsOut);
        }
        let turn = self.router.turn.fetch_add(1, Relaxed);
        least_busy(&epoch.snapshots, avoid, turn).cloned().ok_or(NotAtEpoch::AskLeader)
    }

    /// Whether the leader shall answer a read for which there is no epoch yet: it is no busier than the others, or will
    /// have answered before there is one.
    fn leader_is_better(&self, demand: Demand) -> bool {
        if self.server_choice.is_some()
            || self.is_in_doubt()
            || self.database.unsafe_without_epochs
            || self.database.epochs.is_ready(demand, &self.database.commit_barrier)
        {
            return false;
        }
        self.database.epochs.note_reader();
        let leader_is_up = self.database.servers.leader().health() == Health::Up;
        self.database.leader.has_room()
            && (leader_is_less_busy(&self.database.servers.current())
                || (leader_is_up && self.database.epochs.wait_times.leader_is_sooner(Instant::now())))
    }

    /// Runs reads at an epoch on some server; on the leader when that cannot be.
    pub(super) async fn run_at_epoch(
        &mut self,
        request: &Request,
        traits: &BatchTraits,
    ) -> Result<Outcome, SessionEnd> {
        if traits.text.as_ref().is_some_and(|text| self.database.is_remembered_update(&readable(text))) {
            let traits = BatchTraits { reads_only: false, writes: true, opaque: true, ..traits.clone() };
            return self.run_wrapped(request, &traits).await;
        }
        let demand = self.demand();
        if self.leader_is_better(demand) {
            return self.read_on_leader(request, traits).await;
        }
        let mut avoid = Vec::new();
        for _ in 0..EPOCH_TRIES_MAX {
            let change_counter = self.database.epochs.change_counter();
            let (epoch, server) = match self.choose(demand, &avoid).await {
                Ok(chosen) => chosen,
                Err(NotAtEpoch::AskLeader | NotAtEpoch::ChosenServerIsOut) => break,
                Err(NotAtEpoch::Error(error)) => {
                    self.fail(error);
                    return Ok(Outcome::Failed);
                }
            };
            match self.try_at_epoch(request, traits, &epoch, &server, change_counter).await? {
                Tried::Done(outcome) => return Ok(outcome),
                Tried::Again { avoid: index } => avoid.extend(index),
                Tried::AskLeader => break,
            }
            self.router.counters.read_retries.fetch_add(1, Relaxed);
        }
        self.read_on_leader(request, traits).await
    }

    async fn try_at_epoch(
        &mut self,
        request: &Request,
        traits: &BatchTraits,
        epoch: &Arc<Epoch>,
        server: &Arc<Server>,
        change_counter: u64,
    ) -> Result<Tried, SessionEnd> {
        let again = || Tried::Again { avoid: Some(server.number) };
        let (Some(_in_flight), Some(pool)) = (InFlight::on(server), self.database.readers.of(server)) else {
            return Ok(again());
        };
        let wait = self.database.backend_wait();
        let Ok(mut backend) = pool.take(&self.credentials, &self.settings, wait).await else {
            return Ok(again());
        };
        let own_transaction = traits.own_transaction || request.binds_named_portal();
        // A function that has settings of its own must not find what others have planned without them, and nobody after
        // it what it has planned under them.
        let has_own_settings = traits.local_settings != Reach::Nothing;
        backend.stale_plans |= has_own_settings;
        if let Err(unfit) = self.give_settings(&mut backend).await? {
            return Ok(self.reader_is_unfit(backend, unfit));
        }
        let mut expected = VecDeque::new();
        let guard = self.opening_of(epoch, &mut backend, own_transaction);
        request.encode_behind(&guard, &mut backend, &mut expected);
        backend.stale_plans |= has_own_settings;
        let start = self.client.output.len();
        let hold = if traits.own_transaction { Hold::TentativelyToItsEnd } else { Hold::Tentatively };
        let Ended { result, went_out, final_error, .. } = self.relay(&mut backend, expected, hold).await;
        self.statement_ended();
        let reusable = !std::mem::take(&mut self.may_be_cancelled_late);
        let relayed = match result {
            Ok(relayed) => relayed,
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) if went_out => {
                self.take_back(start, went_out);
                self.fail(self.server_lost(&server.name, &error, final_error));
                return Ok(Tried::Done(Outcome::Failed));
            }
            Err(_) => {
                self.take_back(start, false);
                return Ok(again());
            }
        };
        if own_transaction || relayed.status != b'T' {
            backend.epoch = None;
        }
        let failed_to_join = relayed.own_error.is_some();
        if reusable && !failed_to_join {
            self.database.readers.give_back(backend);
        }
        // What a read names itself was in the catalog before its epoch was taken; what code of users looks for was
        // perhaps not.
        let may_be_newer = traits.own_transaction && !went_out && !self.database.epochs.snapshot_stands(change_counter);
        if failed_to_join || epoch.is_doomed() || may_be_newer {
            return Ok(self.read_was_doomed(start, went_out));
        }
        if let Some(error) = relayed.error {
            return Ok(self.read_failed(&error.code, traits, server, start, went_out));
        }
        server.reads.fetch_add(1, Relaxed);
        self.served_by = Some(ServedBy::epoch(epoch, server));
        Ok(Tried::Done(Outcome::Done))
    }

    /// A follower may lack what the leader has, so the leader's refusal is the one that counts.
    fn reader_is_unfit(&mut self, backend: Backend, unfit: Unfit) -> Tried {
        let server = backend.server.number;
        if !unfit.is_whole {
            return Tried::Again { avoid: Some(server) };
        }
        self.give_back_reader(backend);
        if unfit.error.code == sqlstate::QUERY_CANCELED {
            self.fail(unfit.error);
            return Tried::Done(Outcome::Failed);
        }
        Tried::AskLeader
    }

    /// The epoch could not be opened there, or DDL has committed while the read ran: what it saw is not believed.
    fn read_was_doomed(&mut self, start: usize, went_out: bool) -> Tried {
        if !went_out {
            self.take_back(start, false);
            return Tried::Again { avoid: None };
        }
        self.take_back(start, went_out);
        self.fail(closed_by_ddl());
        Tried::Done(Outcome::Failed)
    }

    fn read_failed(
        &mut self,
        code: &str,
        traits: &BatchTraits,
        server: &Server,
        start: usize,
        went_out: bool,
    ) -> Tried {
        let again = match after_failure(code, server.role) {
            AfterFailure::IsUpdate => {
                if let Some(text) = &traits.text {
                    self.database.remember_update(&readable(text));
                }
                if !went_out {
                    self.router.counters.read_retries.fetch_add(1, Relaxed);
                }
                Some(Tried::AskLeader)
            }
            AfterFailure::AskLeader => Some(Tried::AskLeader),
            AfterFailure::Elsewhere => Some(Tried::Again { avoid: Some(server.number) }),
            AfterFailure::Tell => None,
        };
        match again {
            Some(again) if !went_out => {
                self.take_back(start, false);
                again
            }
            _ => {
                self.note_failure();
                Tried::Done(Outcome::Failed)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServerConfiguration;
    use crate::topology::Role;

    /// The same for reads as for connections: none begins behind the removal of its server, and each is counted.
    #[test]
    fn reads_are_counted_and_none_begins_on_a_removed_server() {
        let configuration = ServerConfiguration::unconnected("follower");
        let server = Server::new(1, Role::Follower, &configuration).unwrap();
        let read = InFlight::on(&server);
        assert!(read.is_some() && server.load() == 1);
        server.is_removed.store(true, SeqCst);
        assert!(InFlight::on(&server).is_none());
        assert_eq!(server.load(), 1, "who was refused is not counted");
        drop(read);
        assert_eq!(server.load(), 0);
    }
}
