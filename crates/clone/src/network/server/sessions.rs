//! Who reads which image, and until when.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OnceCell, watch};

use crate::image::{FileNumber, SmallFile};
use crate::network::image_store::ImageStore;
use crate::network::manifest::Manifest;
use crate::network::protocol::SessionId;
use crate::plan::Plan;
use crate::{ByteRange, CloneError};

/// Images that are read at once; one more is refused.
pub const SESSIONS_MAX: usize = 64;

/// A frozen image that another host may read.
#[derive(Debug)]
pub struct Frozen {
    /// What is told of it.
    pub manifest: Manifest,
    /// What was copied at the freeze.
    pub small_files: Vec<SmallFile>,
    /// Its content.
    pub image_store: Arc<ImageStore>,
}

/// How a session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The clone has everything.
    Whole,
    /// The clone does not want it any more.
    GivenUp,
    /// Nobody has been there for the lease.
    Deserted,
    /// The content cannot be kept; why.
    Failed(String),
}

/// The freeze that comes of an order, or why there is none.
pub type Making<'a> = Pin<Box<dyn Future<Output = Result<Frozen, CloneError>> + Send + 'a>>;

/// Sessions whose clones cannot catch up, and why.
pub type Checking<'a> = Pin<Box<dyn Future<Output = Vec<(SessionId, String)>> + Send + 'a>>;

/// What a source uses most, hottest first.
pub type Finding<'a> = Pin<Box<dyn Future<Output = Vec<(FileNumber, ByteRange)>> + Send + 'a>>;

/// Freezes the source.
pub trait ImageMaker: Send + Sync + 'static {
    /// Freezes it for the clone elsewhere that `plan` describes; its target is a path of that host.
    fn freeze(&self, session: SessionId, plan: Plan) -> Making<'_>;

    /// A session is over: the source need not be followed for it, and its slot is dropped unless the clone is whole.
    fn ended(&self, session: SessionId, how: Ended);

    /// What the source uses most of this session's image; nothing when that cannot be found out soon.
    fn hot(&self, session: SessionId) -> Finding<'_>;

    /// For which clones the source does not keep its log any more.
    fn cannot_catch_up(&self) -> Checking<'_>;
}

/// The images of one source that are read from elsewhere.
pub struct Sessions {
    maker: Arc<dyn ImageMaker>,
    lease: Duration,
    sessions: Mutex<HashMap<SessionId, Arc<Session>>>,
    /// Freezes under way for sessions to come.
    opening: AtomicUsize,
}

/// A session that may come; it counts until this is dropped.
#[derive(Debug)]
pub(super) struct Admission<'a>(&'a AtomicUsize);

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

/// One image and those who read it.
#[derive(Debug)]
pub(super) struct Session {
    pub id: SessionId,
    pub image_store: Arc<ImageStore>,
    /// Closed when the session is over.
    pub over: watch::Sender<bool>,
    /// What is hot, found out once: it costs the source a query, and one session has any number of connections.
    pub hot: OnceCell<Vec<(FileNumber, ByteRange)>>,
    presence: Mutex<Presence>,
}

#[derive(Debug)]
struct Presence {
    connections: usize,
    left_at: Instant,
}

impl Sessions {
    /// None yet. An image is kept for `lease` without a connection.
    pub fn new(maker: Arc<dyn ImageMaker>, lease: Duration) -> Sessions {
        Sessions { maker, lease, sessions: Mutex::default(), opening: AtomicUsize::new(0) }
    }

    /// How long an image is kept without a connection.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// A session of an earlier process of this source, whose content is in `image_store`.
    pub fn resume(&self, id: SessionId, image_store: Arc<ImageStore>) {
        self.insert(id, image_store);
    }

    /// What is read at present: whose, and how far.
    pub fn all(&self) -> Vec<(SessionId, Arc<ImageStore>)> {
        self.lock().values().map(|session| (session.id, Arc::clone(&session.image_store))).collect()
    }

    /// Ends what nobody has read for the lease, and what cannot be kept. To be called every second or so.
    pub fn expire(&self) {
        let judge = |session: &Arc<Session>| {
            let failed = session.image_store.failure().map(|reason| Ended::Failed(reason.to_owned()));
            failed.or_else(|| session.is_deserted(self.lease).then_some(Ended::Deserted))
        };
        let over: Vec<_> = self.lock().values().filter_map(|session| Some((session.id, judge(session)?))).collect();
        for (id, how) in over {
            self.end(id, how);
        }
    }

    /// Ends those whose clones cannot catch up with the source. To be called every second or so.
    pub async fn end_useless(&self) {
        for (id, reason) in self.maker.cannot_catch_up().await {
            self.end(id, Ended::Failed(format!("the clone cannot catch up: {reason}")));
        }
    }

    /// Whether nobody reads, and nobody may come back.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Ends a session, for whatever reason.
    pub fn end(&self, id: SessionId, how: Ended) {
        let Some(session) = self.lock().remove(&id) else { return };
        tracing::info!(session = ?id, ?how, "a clone elsewhere needs this image no more");
        session.image_store.fail(match &how {
            Ended::Failed(reason) => reason,
            _ => "the session is over",
        });
        session.over.send_replace(true);
        self.maker.ended(id, how);
    }

    pub(super) fn maker(&self) -> &dyn ImageMaker {
        &*self.maker
    }

    /// Room for one more session; none when there are, or are to be, as many as may be.
    pub(super) fn admit(&self) -> Option<Admission<'_>> {
        let sessions = self.lock();
        let admission = Admission(&self.opening);
        let opening = self.opening.fetch_add(1, AcqRel);
        (sessions.len() + opening < SESSIONS_MAX).then_some(admission)
    }

    pub(super) fn get(&self, id: SessionId) -> Option<Arc<Session>> {
        self.lock().get(&id).cloned()
    }

    pub(super) fn insert(&self, id: SessionId, image_store: Arc<ImageStore>) -> Arc<Session> {
        let presence = Mutex::new(Presence { connections: 0, left_at: Instant::now() });
        let session =
            Arc::new(Session { id, image_store, over: watch::Sender::new(false), hot: OnceCell::new(), presence });
        self.lock().insert(id, Arc::clone(&session));
        session
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sessions").field("lease", &self.lease).field("sessions", &self.lock().len()).finish()
    }
}

impl Session {
    /// Somebody reads, until the guard is dropped.
    pub(super) fn supervise(self: &Arc<Session>) -> Attendance {
        self.presence().connections += 1;
        Attendance { session: Arc::clone(self) }
    }

    fn is_deserted(&self, lease: Duration) -> bool {
        let presence = self.presence();
        presence.connections == 0 && presence.left_at.elapsed() > lease
    }

    fn presence(&self) -> MutexGuard<'_, Presence> {
        self.presence.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody reads.
#[derive(Debug)]
pub(super) struct Attendance {
    session: Arc<Session>,
}

impl Drop for Attendance {
    fn drop(&mut self) {
        let mut presence = self.session.presence();
        presence.connections -= 1;
        presence.left_at = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::server::tests::SourceHost;

    /// Spec: C3
    #[test]
    fn k23_freezes_under_way_count_as_images() {
        let directory = tempfile::tempdir().unwrap();
        let host = SourceHost::new(&[1], 1, directory.path(), Duration::from_secs(1));
        let mut admitted: Vec<Admission<'_>> = (0..SESSIONS_MAX).map_while(|_| host.sessions.admit()).collect();
        assert_eq!(admitted.len(), SESSIONS_MAX);
        assert!(host.sessions.admit().is_none());
        admitted.pop();
        drop(host.sessions.admit().expect("one has ended"));
        host.sessions.insert(SessionId::generate().unwrap(), Arc::clone(&host.image_store));
        assert!(host.sessions.admit().is_none(), "63 under way and one image");
    }
}
