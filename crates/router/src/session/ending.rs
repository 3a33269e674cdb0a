//! Sessions that somebody ends on purpose, by `pg_terminate_backend`.
//!
//! A session outlives its back end on the leader: it gets another one. When a client has asked for the end of a server
//! process through the router, the session that it worked for shall end, as on one server. So such statements are
//! noticed, and the sessions look after them whether it was theirs.

use std::sync::Arc;
use std::time::Duration;

use super::batch_traits::BatchTraits;
use super::relay::{Ended, RelayError};
use super::{Session, SessionEnd};
use crate::backend::{Backend, BackendError};
use crate::servers::Server;
use crate::sql::contains_ignoring_case;
use crate::topology::Role;
use crate::wire::{ErrorFields, SqlError, sqlstate};

/// A parked back end must say within this that it is there; one that does not is closed.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// What ends server processes, by its name in a statement; hidden in code of users it is not noticed.
const FUNCTION: &[u8] = b"pg_terminate_backend";

/// While it lives server processes may be ended on purpose.
pub(super) struct Ending(Arc<Server>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.note_ending();
    }
}

fn ends_processes(traits: &BatchTraits) -> bool {
    !traits.reads_only && traits.text.as_ref().is_some_and(|text| contains_ignoring_case(text, FUNCTION))
}

pub(super) fn terminated() -> SqlError {
    SqlError::fatal(sqlstate::ADMIN_SHUTDOWN, "terminating connection due to administrator command")
}

impl Session {
    /// To be held while `traits` runs.
    pub(super) fn ending_around(&mut self, traits: &BatchTraits) -> Option<Ending> {
        self.ends_processes = ends_processes(traits);
        self.ends_processes.then(|| {
            let leader = self.database.servers.leader().clone();
            leader.note_ending();
            Ending(leader)
        })
    }

    /// Looks, when processes may have been ended, whether the one was that this session left on the leader. One in its
    /// hands is found out by what runs there.
    pub(super) async fn look_for_ending(&mut self) -> Result<(), SessionEnd> {
        self.endings.mark_unchanged();
        if self.cancel.is_ended() {
            return Err(SessionEnd::Fatal(terminated()));
        }
        let Some(mut backend) = self.database.leader.take_parked(self.number) else { return Ok(()) };
        match tokio::time::timeout(LOOK_TIMEOUT, backend.rows("")).await {
            Ok(Ok(_)) => self.database.leader.park(self.number, backend),
            Ok(Err(BackendError::Lost { .. })) => return Err(SessionEnd::Fatal(terminated())),
            _ => {}
        }
        Ok(())
    }

    /// What the client is told when the server process that has just answered was ended on purpose.
    pub(super) fn ended_on_purpose(&self, backend: &Backend, ended: &Ended) -> Option<SqlError> {
        if self.cancel.is_ended() {
            return Some(terminated());
        }
        let server = &backend.server;
        let is_told = |words: &ErrorFields| words.severity == "FATAL" && words.code == sqlstate::ADMIN_SHUTDOWN;
        let is_ended = matches!(ended.result, Err(RelayError::Server(_)))
            && server.role == Role::Leader
            && (self.ends_processes || server.endings() != backend.endings)
            && ended.final_error.as_ref().is_some_and(is_told);
        is_ended.then(terminated)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    /// Spec: I4
    #[test]
    fn a_statement_that_ends_processes_is_known_by_its_function() {
        let traits = |reads_only: bool, text: &'static str| BatchTraits {
            reads_only,
            text: Some(Bytes::from_static(text.as_bytes())),
            ..BatchTraits::default()
        };
        assert!(ends_processes(&traits(false, "SELECT PG_Terminate_Backend(7)")));
        assert!(ends_processes(&traits(false, "SELECT pg_catalog.pg_terminate_backend($1)")));
        assert!(!ends_processes(&traits(false, "SELECT pg_cancel_backend(7)")));
        assert!(!ends_processes(&traits(true, "SELECT 'pg_terminate_backend'")));
        assert!(!ends_processes(&BatchTraits::default()));
    }
}
