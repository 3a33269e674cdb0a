//! The order in which servers and what is remembered of them change.
//!
//! A server is made, then `cluster.toml` says so, then it is started; a follower is unwanted, then it is removed, then
//! it is forgotten. So what a kill leaves says of itself what it is: data that `cluster.toml` does not call made is a
//! half server, which was never started, and a follower that it names is wanted or has something left.

use std::path::{Path, PathBuf};
use std::pin::Pin;

use crate::HostError;
use crate::state::{ClusterState, ServerState};

/// What a step gives that takes its time.
pub(crate) type StepFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, HostError>> + Send + 'a>>;

/// Makes the servers of a start. It remembers nothing.
pub(crate) trait ServerMaker: Sync {
    /// A server that can be started.
    type Server: Send;

    /// Whether the data that `server` speaks of is there.
    fn is_there(&self, server: &ServerState) -> bool;

    /// Everything of a server is below this.
    fn home_of(&self, server: &ServerState) -> PathBuf;

    /// Opens the leader that is there.
    fn open_leader<'a>(&'a self, leader: &'a ServerState) -> StepFuture<'a, Self::Server>;

    /// Makes the leader; what a broken start left there is thrown away.
    fn make_leader<'a>(&'a self, leader: &'a ServerState) -> StepFuture<'a, Self::Server>;

    /// Copies the running leader to a follower; what a broken copy left there is thrown away.
    fn copy_leader<'a>(&'a self, leader: &'a ServerState, follower: &'a ServerState) -> StepFuture<'a, ()>;

    /// Forks the running leader to followers that nothing is left of, all at once; those that are made. None where that
    /// is not possible.
    fn fork_leader<'a>(
        &'a self,
        leader: &'a ServerState,
        followers: &'a [ServerState],
    ) -> StepFuture<'a, Vec<ServerState>>;

    /// The data of a follower that was made is gone.
    fn tell_gone(&self, follower: &ServerState);
}

/// Opens the leader, or makes that of a new cluster; `file` is `cluster.toml`. A leader that is lost is never replaced
/// by an empty one.
///
/// # Errors
/// [`HostError::LeaderMissing`], those of the maker, [`HostError::File`].
pub(crate) async fn bring_leader<M: ServerMaker>(
    maker: &M,
    state: &mut ClusterState,
    file: &Path,
) -> Result<M::Server, HostError> {
    let leader = state.leader().clone();
    if leader.made {
        if !maker.is_there(&leader) {
            return Err(HostError::LeaderMissing { path: maker.home_of(&leader) });
        }
        return maker.open_leader(&leader).await;
    }
    let server = maker.make_leader(&leader).await?;
    state.topology.leader.made = true;
    state.write(file)?;
    Ok(server)
}

/// Makes the followers of a new cluster that can be forks of its leader.
///
/// # Errors
/// Those of the maker, [`HostError::File`].
pub(crate) async fn fork_new<M: ServerMaker>(
    maker: &M,
    state: &mut ClusterState,
    file: &Path,
) -> Result<(), HostError> {
    let missing: Vec<ServerState> = state.missing().into_iter().filter(|follower| !follower.leaving).collect();
    if !state.founding || missing.is_empty() {
        return Ok(());
    }
    for follower in maker.fork_leader(&state.leader().clone(), &missing).await? {
        state.note_made(&follower.name, false, "fork".to_owned());
    }
    state.write(file)
}

/// Looks whether a follower can be started; that of a new cluster is copied first: its leader is still empty. One that
/// can not, and stays, is made while the cluster serves.
///
/// # Errors
/// Those of the maker, [`HostError::File`].
pub(crate) async fn bring_follower<M: ServerMaker>(
    maker: &M,
    state: &mut ClusterState,
    index: usize,
    file: &Path,
) -> Result<bool, HostError> {
    let (leader, follower) = (state.leader().clone(), state.followers()[index].clone());
    if follower.leaving {
        return Ok(false);
    }
    if follower.made && !maker.is_there(&follower) {
        maker.tell_gone(&follower);
        state.topology.followers[index].mark_unmade();
    }
    if !state.topology.followers[index].made && state.founding {
        maker.copy_leader(&leader, &follower).await?;
        state.topology.followers[index].made = true;
        state.write(file)?;
    }
    Ok(state.topology.followers[index].made)
}

/// Removes followers, and what is remembered of them.
pub(crate) trait FollowerRemover: Sync {
    /// What `cluster.toml` holds.
    fn remembered(&self) -> ClusterState;

    /// Takes a follower away from clients, stops it and removes everything of it; one that is not there is removed
    /// already.
    fn remove<'a>(&'a self, follower: &'a ServerState) -> StepFuture<'a, ()>;

    /// Forgets a follower, in the file first.
    ///
    /// # Errors
    /// [`HostError::File`].
    fn forget(&self, follower: &ServerState) -> Result<(), HostError>;
}

/// Removes and forgets followers that are leaving, the highest number first: names are numbered without a gap at any
/// moment.
///
/// # Errors
/// Those of the remover.
pub(crate) async fn remove_leaving<R: FollowerRemover>(remover: &R) -> Result<(), HostError> {
    for follower in remover.remembered().leaving() {
        remover.remove(&follower).await?;
        remover.forget(&follower)?;
    }
    Ok(())
}
