//! What a client is counted by, from its connection to its session; each ends with what holds it.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::cancel::{CancelSlot, process_id};
use crate::database::Database;
use crate::state::RouterState;
use crate::wire::{SqlError, sqlstate};

/// One of the clients that the router counts.
pub(super) struct ConnectionSlot(Arc<RouterState>);

impl ConnectionSlot {
    pub(super) fn take(router: &Arc<RouterState>) -> ConnectionSlot {
        router.clients.fetch_add(1, SeqCst);
        ConnectionSlot(router.clone())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, SeqCst);
    }
}

/// The place of one of `clients_max` that have shown who they are.
pub(super) struct Place(Arc<RouterState>);

impl Place {
    pub(super) fn take(router: &Arc<RouterState>) -> Result<Place, SqlError> {
        let before = router.authenticated.fetch_add(1, SeqCst);
        let place = Place(router.clone());
        if before < router.settings().clients_max { Ok(place) } else { Err(too_many_clients()) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.authenticated.fetch_sub(1, SeqCst);
    }
}

pub(super) fn too_many_clients() -> SqlError {
    let text = "sorry, too many clients already";
    SqlError::fatal(sqlstate::TOO_MANY_CONNECTIONS, text)
}

/// A client inside a database; leaves it, its back end and its cancel key when dropped.
pub(super) struct SessionRegistration {
    router: Arc<RouterState>,
    database: Arc<Database>,
    pub(super) number: u64,
    pub(super) secret: u32,
    is_template: bool,
}

impl SessionRegistration {
    pub(super) fn enter(
        router: &Arc<RouterState>,
        database: &Arc<Database>,
        cancel: &Arc<CancelSlot>,
        is_template: bool,
    ) -> SessionRegistration {
        database.enter(&router.serializable);
        let number = router.last_session.fetch_add(1, Relaxed) + 1;
        let secret = rand::random();
        router.cancels().insert((process_id(number), secret), Arc::downgrade(cancel));
        SessionRegistration { router: router.clone(), database: database.clone(), number, secret, is_template }
    }
}

impl Drop for SessionRegistration {
    fn drop(&mut self) {
        self.database.leave();
        self.database.leader.forget(self.number);
        self.router.cancels().remove(&(process_id(self.number), self.secret));
        if self.is_template && self.database.clients.load(SeqCst) == 0 {
            // Whoever copies it, through the router or not, needs it without connections.
            self.router.leave_database(&self.database);
        }
    }
}
