//! Cancel requests: each hits the statement that runs when it comes, or nothing. One server runs what the router may
//! still be reading or classifying, so what comes then hits that.
//!
//! A server passes a request on some time after it has got it, and closes the connection then. Whoever ends a statement
//! waits for the requests that are on their way to its back end, so that they find nothing else there; who sends one
//! hears of its end only then.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::backend::{CancelKey, Credentials};
use crate::settings::Settings;

/// A cancel request that has not reached its server within this is not waited for; the back end then serves nobody
/// else.
const CANCEL_LANDS_WITHIN: Duration = Duration::from_secs(5);

/// The smallest number of a session.
const FIRST_NUMBER: u32 = 1 << 30;

/// What cancel requests hit, by the number of a session and its secret.
pub(crate) type CancelKeys = HashMap<(u32, u32), Weak<CancelSlot>>;

/// What a cancel request of this client hits.
#[derive(Debug, Default)]
pub struct CancelSlot {
    running: Mutex<Running>,
    /// A request has reached its server, or was given up.
    landed: Notify,
    /// Somebody has ended the session on purpose.
    is_ended: AtomicBool,
    /// Whose session it is; none before that is known.
    owner: Option<Owner>,
}

#[derive(Debug)]
struct Owner {
    database: Arc<str>,
    credentials: Arc<Credentials>,
    address: Option<SocketAddr>,
    since: Instant,
}

#[derive(Debug, Default)]
struct Running {
    key: Option<Arc<CancelKey>>,
    /// Requests on their way to the server.
    under_way: usize,
    /// One was given up on its way, so nobody knows when it comes.
    may_come_late: bool,
    /// The router works on what the client has said.
    at_work: bool,
    /// One has come while it did, and nothing ran on a server.
    is_wanted: bool,
    /// The session's settings when its client was last waited for; none while it logs in.
    settings: Option<Arc<Settings>>,
    /// Whether a transaction was open then.
    in_transaction: bool,
}

/// A cancel request on its way.
#[derive(Debug)]
pub struct Cancelling<'a> {
    slot: &'a CancelSlot,
    key: Arc<CancelKey>,
    has_landed: bool,
}

impl Cancelling<'_> {
    /// Sends it, and waits until it can hit nothing that begins later; longer than [`CANCEL_LANDS_WITHIN`] it is not
    /// waited for.
    pub async fn send(mut self) {
        match tokio::time::timeout(CANCEL_LANDS_WITHIN, self.key.send()).await {
            Ok(Ok(())) => self.has_landed = true,
            Ok(Err(error)) => tracing::debug!(%error, "a cancel request did not reach its server"),
            Err(_) => tracing::debug!("a server does not take a cancel request"),
        }
    }
}

impl Drop for Cancelling<'_> {
    fn drop(&mut self) {
        {
            let mut running = self.slot.running();
            running.under_way -= 1;
            running.may_come_late |= !self.has_landed;
        }
        self.slot.landed.notify_one();
    }
}

impl CancelSlot {
    fn running(&self) -> std::sync::MutexGuard<'_, Running> {
        self.running.lock().expect("no code panics while it holds this lock")
    }

    /// The slot of a session in `database` that has logged in with these, from `address`.
    pub(super) fn of(database: Arc<str>, credentials: Arc<Credentials>, address: Option<SocketAddr>) -> CancelSlot {
        let owner = Owner { database, credentials, address, since: Instant::now() };
        CancelSlot { owner: Some(owner), ..CancelSlot::default() }
    }

    /// In which database its session is, and with what it has logged in; none while it logs in.
    pub(super) fn owner(&self) -> Option<(Arc<str>, Arc<Credentials>)> {
        self.owner.as_ref().map(|owner| (owner.database.clone(), owner.credentials.clone()))
    }

    /// What is known of its session, which its client knows by `process_id`; none before it is known whose it is.
    pub(crate) fn status(&self, process_id: u32) -> Option<ClientStatus> {
        let owner = self.owner.as_ref()?;
        let running = self.running();
        let state = match &running.settings {
            None => "login",
            Some(_) if running.at_work => "active",
            Some(_) if running.in_transaction => "idle in transaction",
            Some(_) => "idle",
        };
        let application_name = running.settings.as_ref().and_then(|settings| settings.get("application_name"));
        Some(ClientStatus {
            process_id,
            user: owner.credentials.user.clone(),
            database: owner.database.to_string(),
            application_name: application_name.map(str::to_owned),
            address: owner.address,
            state,
            connected: owner.since.elapsed(),
        })
    }

    /// Its session shall end: at once when it waits for its client, else with what is running.
    pub(super) fn end_session(&self) {
        self.is_ended.store(true, SeqCst);
    }

    /// Whether its session shall end.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(SeqCst)
    }

    pub(super) fn begin(&self, key: Arc<CancelKey>) {
        self.running().key = Some(key);
    }

    /// The statement has ended. Waits for cancel requests that are on their way to its back end, so that they hit
    /// nothing that is begun there afterwards; false when one may still come.
    pub(super) async fn end(&self) -> bool {
        let has_landed = || {
            let mut running = self.running();
            running.key = None;
            (running.under_way == 0).then(|| !std::mem::take(&mut running.may_come_late))
        };
        loop {
            if let Some(has_landed) = has_landed() {
                return has_landed;
            }
            // It is sent, or given up, within its bound.
            self.landed.notified().await;
        }
    }

    /// The client has said something that may run: a request that comes from now on is meant for it.
    pub(super) fn begin_work(&self) {
        let mut running = self.running();
        (running.at_work, running.is_wanted) = (true, false);
    }

    /// Nothing is left of what the client has said; its session has these settings now.
    pub(super) fn end_work(&self, settings: &Arc<Settings>, in_transaction: bool) {
        let mut running = self.running();
        (running.at_work, running.in_transaction) = (false, in_transaction);
        if !running.settings.as_ref().is_some_and(|known| Arc::ptr_eq(known, settings)) {
            running.settings = Some(settings.clone());
        }
    }

    /// Whether a request has come for what was not sent to a server yet.
    pub(super) fn take_wanted(&self) -> bool {
        std::mem::take(&mut self.running().is_wanted)
    }

    /// Cancels what is running now, if anything is.
    pub fn cancel(&self) -> Option<Cancelling<'_>> {
        let mut running = self.running();
        let Some(key) = running.key.clone() else {
            running.is_wanted |= running.at_work;
            return None;
        };
        running.under_way += 1;
        Some(Cancelling { slot: self, key, has_landed: false })
    }
}

/// By which number a client knows its session, in `BackendKeyData` and in notifications: beyond those of all server
/// processes (Linux has at most 2^22), so that nobody who ends or cancels a process by it means another one.
pub(super) fn process_id(session: u64) -> u32 {
    let first = u64::from(FIRST_NUMBER);
    u32::try_from(first | (session % first)).expect("it has 31 bits")
}

/// Whether this is by its size the number of a session.
pub(super) fn is_sessions(number: u32) -> bool {
    (FIRST_NUMBER..2 * FIRST_NUMBER).contains(&number)
}

/// One client's session, for the admin console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClientStatus {
    /// By which number the client knows its session.
    pub process_id: u32,
    /// As whom it has logged in.
    pub user: String,
    /// In which database it is.
    pub database: String,
    /// What it calls itself, as of its newest message that is answered.
    pub application_name: Option<String>,
    /// Where it comes from.
    pub address: Option<SocketAddr>,
    /// What it does: `login`, `active`, `idle` or `idle in transaction`.
    pub state: &'static str,
    /// Since it was let in.
    pub connected: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: I4
    #[test]
    fn a_request_is_meant_for_what_the_router_works_on_and_for_nothing_later() {
        let slot = CancelSlot::default();
        assert!(slot.cancel().is_none() && !slot.take_wanted(), "nothing was said");
        slot.begin_work();
        assert!(slot.cancel().is_none() && slot.take_wanted() && !slot.take_wanted());
        assert!(slot.cancel().is_none());
        slot.begin_work();
        assert!(!slot.take_wanted(), "it was meant for what came before");
        slot.end_work(&Arc::default(), false);
        assert!(slot.cancel().is_none() && !slot.take_wanted(), "nothing is left");
    }
}
