//! Followers that were there before this daemon: started again, or taken over with what still fills them.

use std::sync::Arc;

use onecopy_clone::service::{CloneState, Service, state_without_service};
use onecopy_postgres::{InheritedDescriptor, Supervisor};
use tokio::sync::watch;

use super::{Member, Membership};
use crate::change::{Change, CloneOptions};
use crate::provisioning::Provisioner;
use crate::state::{ClusterState, ServerState};
use crate::{CloneStatus, Event, HostError, Progress};
use onecopy_directory::DirectoryLock;

/// A follower that is being started again.
pub(crate) struct Returned {
    /// Which.
    pub state: ServerState,
    /// What keeps it running.
    pub supervisor: Supervisor,
    /// What still fills it.
    filled_by: Option<Service>,
}

/// What has become of a clone that was not whole when the daemon ended.
enum Found {
    /// It has all its data by now.
    Whole,
    /// It is being filled.
    Filling(Service, Vec<InheritedDescriptor>),
    /// Nobody can complete it.
    Lost(String),
}

impl Returned {
    /// Starts a follower that is made, or takes over its server; none when it must be made again, which is written
    /// down.
    ///
    /// # Errors
    /// [`HostError::Server`], [`HostError::File`].
    pub async fn start(
        provisioner: &Provisioner,
        state: &mut ClusterState,
        index: usize,
        lock: &Arc<DirectoryLock>,
        progress: &dyn Progress,
    ) -> Result<Option<Returned>, HostError> {
        let leader = state.leader().clone();
        let (filled_by, inherited) = Returned::who_fills(provisioner, state, index, progress).await?;
        let follower = state.followers()[index].clone();
        if !follower.made {
            return Ok(None);
        }
        let server = provisioner.open_follower(&leader, &follower).await?;
        if let Some(server) = Arc::clone(&server).into_process() {
            server.set_inherited(inherited);
        }
        Ok(Some(Returned { state: follower, supervisor: Supervisor::spawn_holding(server, lock.clone()), filled_by }))
    }

    /// Whether a follower that was not whole when that was written down is so by now.
    pub async fn is_whole(provisioner: &Provisioner, leader: &ServerState, follower: &ServerState) -> bool {
        matches!(look_at_clone(provisioner, leader, follower).await, Found::Whole)
    }

    /// Who still fills a follower that was not whole, and what its server inherits from there; what has become of it is
    /// written down.
    ///
    /// # Errors
    /// [`HostError::File`].
    pub async fn who_fills(
        provisioner: &Provisioner,
        state: &mut ClusterState,
        index: usize,
        progress: &dyn Progress,
    ) -> Result<(Option<Service>, Vec<InheritedDescriptor>), HostError> {
        let (mut filled_by, mut inherited) = (None, Vec::new());
        if state.followers()[index].filling {
            let name = state.followers()[index].name.clone();
            match look_at_clone(provisioner, state.leader(), &state.followers()[index]).await {
                Found::Whole => state.topology.followers[index].filling = false,
                Found::Filling(service, descriptors) => (filled_by, inherited) = (Some(service), descriptors),
                Found::Lost(reason) => {
                    progress.notice(format!("{name} cannot be completed ({reason}); it is made again"));
                    state.topology.followers[index].mark_unmade();
                }
            }
            state.write(&provisioner.directory.state_file())?;
        }
        Ok((filled_by, inherited))
    }
}

async fn look_at_clone(provisioner: &Provisioner, leader: &ServerState, follower: &ServerState) -> Found {
    let target = provisioner.data_directory(follower);
    let without_service = || match state_without_service(&target) {
        CloneState::Whole => Found::Whole,
        CloneState::Discarded { reason } => Found::Lost(reason),
        other => Found::Lost(format!("{other:?}")),
    };
    let service = match provisioner.running_clone_service(leader).await {
        Ok(Some(service)) => service,
        Ok(None) => return without_service(),
        Err(error) => return Found::Lost(error.to_string()),
    };
    match service.descriptors(&target).await {
        Ok(descriptors) => Found::Filling(service, descriptors.into_inherited()),
        // It has become whole meanwhile, or is not known there.
        Err(error) => match without_service() {
            Found::Lost(_) => Found::Lost(error.to_string()),
            other => other,
        },
    }
}

impl Membership {
    /// Watches the followers that were there before, and goes on with what a broken off change has left.
    pub(crate) fn take_over(self: &Arc<Self>, followers: Vec<Returned>) {
        for Returned { state, supervisor, filled_by } in followers {
            let Some(service) = filled_by else {
                self.insert(Member::whole(&state.name, supervisor, state.way.as_deref()));
                continue;
            };
            let way = state.way.clone().unwrap_or_default();
            let (sender, clone) = watch::channel(CloneStatus { way, ..CloneStatus::default() });
            self.insert(Member { name: state.name.clone(), supervisor, clone: Some(clone) });
            if let Err(error) = self.warm(&state.name) {
                tracing::warn!(follower = %state.name, %error, "it takes a full share of reads");
            }
            self.spawn(Arc::clone(self).watch_filling(state, service, sender));
        }
        let remembered = self.remembered();
        if remembered.spare {
            self.spawn(Arc::clone(self).keep_spare());
        }
        if remembered.followers().iter().any(|follower| !follower.made || follower.leaving) {
            let progress: Arc<dyn Progress> = Arc::new(|_: Event| ());
            if let Err(error) = self.begin(Change::Resume, CloneOptions::default(), false, progress) {
                tracing::error!(%error, "followers that are wanted are not made");
            }
        }
    }

    /// Keeps the files of one more follower ready, where clones are filled on demand: the next one is then there
    /// sooner.
    async fn keep_spare(self: Arc<Self>) {
        match self.provisioner.keep_spare(self.remembered().leader()).await {
            Ok(true) => tracing::info!("the files of one more follower are kept ready"),
            Ok(false) => {}
            // Followers come without it, a little later.
            Err(error) => tracing::warn!(%error, "no files are kept ready for the next follower"),
        }
    }
}
