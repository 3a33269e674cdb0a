//! Followers that go: out of the router, stopped, and nothing of them is left.

use onecopy_postgres::StopMode;
use onecopy_router::RouterError;

use super::{Member, Membership};
use crate::state::{ClusterState, ServerState};
use crate::steps::{self, FollowerRemover, StepFuture};
use crate::{HostError, Progress};

impl Membership {
    /// Takes a follower out of the router and stops it; one that is not there is out already.
    pub(super) async fn take_out(&self, name: &str, progress: &dyn Progress) -> Result<(), HostError> {
        self.remove_from_router(name).await?;
        if let Some(member) = self.remove(name) {
            progress.step(format!("stopping {name}"));
            // What does not stop in peace is killed when it is removed: its data is a copy.
            if let Err(error) = member.supervisor.stop(StopMode::Fast).await {
                progress.notice(format!("{name} does not stop and is killed: {error}"));
            }
        }
        Ok(())
    }

    /// No read goes there any more.
    pub(super) async fn remove_from_router(&self, name: &str) -> Result<(), HostError> {
        match self.router.remove_follower(name).await {
            // It was not taken in yet.
            Err(RouterError::UnknownFollower(_)) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Nobody looks at it any more, but its supervisor.
    pub(super) fn remove(&self, name: &str) -> Option<Member> {
        let mut members = self.members();
        let place = members.iter().position(|member| member.name == name)?;
        Some(members.remove(place))
    }

    /// Removes everything of a follower that nobody watches: processes, slot, files.
    pub(super) async fn remove_server(&self, follower: &ServerState, progress: &dyn Progress) -> Result<(), HostError> {
        if self.provisioner.home_of(follower).exists() {
            progress.step(format!("removing what there is of {}", follower.name));
        }
        self.provisioner.remove_server(&self.remembered().leader().clone(), follower).await
    }

    /// Removes and forgets followers that are leaving.
    pub(super) async fn remove_leaving(&self, progress: &dyn Progress) -> Result<(), HostError> {
        steps::remove_leaving(&Removing { membership: self, progress }).await
    }

    /// After a change that failed: followers that were not there before and were not made are not wanted any more.
    pub(super) async fn forget_unmade(&self, before: &[String]) -> Result<(), HostError> {
        self.remember(|state| state.remove_unmade(before))?;
        self.remove_leaving(&|_| ()).await
    }
}

/// Followers that go, and who is told.
struct Removing<'a> {
    membership: &'a Membership,
    progress: &'a dyn Progress,
}

impl FollowerRemover for Removing<'_> {
    fn remembered(&self) -> ClusterState {
        self.membership.remembered()
    }

    fn remove<'a>(&'a self, follower: &'a ServerState) -> StepFuture<'a, ()> {
        Box::pin(async move {
            self.membership.take_out(&follower.name, self.progress).await?;
            self.membership.remove_server(follower, self.progress).await
        })
    }

    fn forget(&self, follower: &ServerState) -> Result<(), HostError> {
        self.membership.remember(|state| state.forget(&follower.name))?;
        self.membership.set_problem(&follower.name, None);
        Ok(())
    }
}
