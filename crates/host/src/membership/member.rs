//! One follower that is watched.

use onecopy_postgres::{Role, Supervisor};
use tokio::sync::watch;

use crate::CloneStatus;
use crate::observed_server::ObservedServer;

/// A follower that its supervisor keeps running.
pub(super) struct Member {
    /// Its name.
    pub name: String,
    /// What keeps it running.
    pub supervisor: Supervisor,
    /// How it was cloned and how far that is; none for one that was copied before clients were served.
    pub clone: Option<watch::Receiver<CloneStatus>>,
}

impl Member {
    /// One that has all its data since its `way` was gone.
    pub fn whole(name: &str, supervisor: Supervisor, way: Option<&str>) -> Member {
        let clone = way.map(|way| watch::channel(CloneStatus::whole(way)).1);
        Member { name: name.to_owned(), supervisor, clone }
    }

    /// What can be looked at without stopping it.
    pub fn observed(&self) -> ObservedServer {
        ObservedServer::new(&self.name, Role::Follower, &self.supervisor)
    }

    /// How far it is.
    pub fn clone_status(&self) -> Option<CloneStatus> {
        self.clone.as_ref().map(|clone| clone.borrow().clone())
    }
}
