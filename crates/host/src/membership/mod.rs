//! The followers of a running cluster, and the one place where they change.
//!
//! ```text
//!                made                answers              whole
//!   missing ────────────> starting ───────────> serving ─────────> ordinary follower
//!      ▲        (a clone is filling from here ..        .. to here)      │
//!      │ reinit, or its data is lost                                     │ scale, down to fewer
//!      └──────────────────────────── out of the router, stopped <────────┘
//!                                            └──> leaving ──> forgotten
//! ```
//!
//! `cluster.toml` says what is wanted before anything is done, and what is there after it was done. So a change that is
//! broken off at any moment is one that [`Membership::reconcile`] has not finished: the next `up` calls it again.

mod admission;
mod in_machines;
mod member;
mod reconciling;
mod removal;
mod returning;
mod share;
mod warming;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use onecopy_clone::methods::MethodName;
use onecopy_postgres::StopMode;
use onecopy_router::Router;
use tokio::task::JoinSet;

use member::Member;
pub(crate) use returning::Returned;

use crate::change::{Change, CloneOptions};
use crate::observed_server::ObservedServer;
use crate::provisioning::Provisioner;
use crate::state::{ClusterState, REPLICAS_MAX, ServerState};
use crate::{HostError, Progress};
use onecopy_machine::{Machine, MachineError};

/// How often followers that an earlier change wanted are tried; no other change can be made meanwhile.
const RESUME_ATTEMPTS_MAX: u32 = 3;
/// The time between two attempts.
const RESUME_PAUSE: Duration = Duration::from_secs(2);

/// How followers are made where servers run in machines.
const IN_MACHINES: [MethodName; 2] = [MethodName::Fork, MethodName::Copy];

/// The followers of one running cluster.
pub(crate) struct Membership {
    provisioner: Provisioner,
    router: Arc<Router>,
    leader: ObservedServer,
    /// What `cluster.toml` holds.
    state: Mutex<ClusterState>,
    /// Followers that are watched, in order of their numbers.
    members: Mutex<Vec<Member>>,
    /// The change that is going on.
    changing: Mutex<Option<String>>,
    /// Why a follower that is wanted is not there.
    problems: Mutex<BTreeMap<String, String>>,
    /// Changes and what looks after new followers; they end with the cluster.
    tasks: Mutex<JoinSet<()>>,
}

/// The right to change the followers, until it is dropped.
struct Claim(Arc<Membership>);

impl Drop for Claim {
    fn drop(&mut self) {
        *self.0.changing.lock().expect("nothing panics while it holds this lock") = None;
    }
}

/// A follower as it can be looked at.
pub(crate) enum Seen {
    /// It is watched.
    Member {
        /// Its server.
        observed: ObservedServer,
        /// How it was cloned, and how far that is.
        clone: Option<crate::CloneStatus>,
        /// It shall stay as it is: it is not being removed or made anew.
        stays: bool,
    },
    /// It is not there, or not any more.
    Absent {
        /// What it will be, or was.
        state: ServerState,
        /// Why not.
        problem: Option<String>,
    },
}

impl Membership {
    pub(crate) fn new(
        provisioner: Provisioner,
        state: ClusterState,
        leader: ObservedServer,
        router: Arc<Router>,
    ) -> Arc<Membership> {
        let (members, changing, problems, tasks) = Default::default();
        let state = Mutex::new(state);
        Arc::new(Membership { provisioner, router, leader, state, members, changing, problems, tasks })
    }

    /// The leader.
    pub(crate) fn leader(&self) -> &ObservedServer {
        &self.leader
    }

    /// All followers, in order of their numbers.
    pub(crate) fn followers(&self) -> Vec<Seen> {
        let state = self.state();
        let members = self.members();
        let problems = self.problems.lock().expect("nothing panics while it holds this lock");
        let seen = |follower: &ServerState| match members.iter().find(|member| member.name == follower.name) {
            Some(member) => Seen::Member {
                observed: member.observed(),
                clone: member.clone_status(),
                stays: follower.made && !follower.leaving,
            },
            None => Seen::Absent { state: follower.clone(), problem: problems.get(&follower.name).cloned() },
        };
        state.followers().iter().map(seen).collect()
    }

    /// Begins a change, which goes on whoever stops looking at it. With `wait` it ends when the new followers are
    /// whole, else when they answer.
    ///
    /// # Errors
    /// At once: [`HostError::ChangeRunning`], [`HostError::TooManyReplicas`], [`HostError::NoSuchFollower`]. Later, to
    /// `outcome`.
    pub(crate) fn begin(
        self: &Arc<Self>,
        change: Change,
        options: CloneOptions,
        wait: bool,
        progress: Arc<dyn Progress>,
    ) -> Result<tokio::sync::oneshot::Receiver<Result<Vec<String>, HostError>>, HostError> {
        self.check(&change, &options)?;
        let claim = self.claim(change.to_string())?;
        let (sender, outcome) = tokio::sync::oneshot::channel();
        let membership = Arc::clone(self);
        self.spawn(async move {
            let result = membership.change(change, &options, wait, claim, &progress).await;
            if let Err(error) = &result {
                tracing::error!(%error, "a change of the followers failed");
            }
            // Whoever asked may be gone: the log has it.
            let _ = sender.send(result);
        });
        Ok(outcome)
    }

    fn check(&self, change: &Change, options: &CloneOptions) -> Result<(), HostError> {
        if self.provisioner.machines.is_some() && options.mode.is_some_and(|mode| !IN_MACHINES.contains(&mode)) {
            return Err(MachineError::OnlyForksAndCopies.into());
        }
        match change {
            Change::Scale { replicas } if *replicas > REPLICAS_MAX => {
                Err(HostError::TooManyReplicas { wanted: *replicas, maximum: REPLICAS_MAX })
            }
            Change::Reinit { follower } => {
                let followers = self.names();
                if followers.contains(follower) {
                    return Ok(());
                }
                Err(HostError::NoSuchFollower { follower: follower.clone(), followers })
            }
            _ => Ok(()),
        }
    }

    fn claim(self: &Arc<Self>, change: String) -> Result<Claim, HostError> {
        let mut changing = self.changing.lock().expect("nothing panics while it holds this lock");
        if let Some(change) = &*changing {
            return Err(HostError::ChangeRunning { change: change.clone() });
        }
        *changing = Some(change);
        Ok(Claim(Arc::clone(self)))
    }

    async fn change(
        self: &Arc<Self>,
        change: Change,
        options: &CloneOptions,
        wait: bool,
        claim: Claim,
        progress: &Arc<dyn Progress>,
    ) -> Result<Vec<String>, HostError> {
        let begun = Instant::now();
        tracing::info!(%change, "the followers change");
        let before = self.names();
        self.want(&change)?;
        let telling = self.tell_filling(&**progress);
        tokio::pin!(telling);
        let mut attempts = 1;
        let reconciled = loop {
            let reconciled = tokio::select! {
                reconciled = self.reconcile(options, begun, progress) => reconciled,
                never = &mut telling => match never {},
            };
            match (&reconciled, &change) {
                // Nobody who could ask once more waits for it.
                (Err(error), Change::Resume) if attempts < RESUME_ATTEMPTS_MAX => {
                    tracing::warn!(%error, attempts, "followers that are wanted are not made yet");
                    tokio::time::sleep(RESUME_PAUSE).await;
                    attempts += 1;
                }
                _ => break reconciled,
            }
        };
        let reconciled = match (reconciled, &change) {
            // What it has not made is not wanted any more; what it has made serves already, and stays.
            (Err(error), Change::Scale { .. }) => {
                if let Err(error) = self.forget_unmade(&before).await {
                    tracing::error!(%error, "followers that could not be made are still wanted");
                }
                Err(error.after_change(&before, self.names()))
            }
            (reconciled, _) => reconciled,
        };
        reconciled?;
        drop(claim);
        if wait {
            tokio::select! {
                whole = self.wait_whole() => whole?,
                never = &mut telling => match never {},
            }
        }
        Ok(self.names())
    }

    /// Writes down what is wanted; nothing is done yet.
    fn want(&self, change: &Change) -> Result<(), HostError> {
        self.remember(|state| state.want(change))
    }

    /// Ends everything that changes or watches followers. What was being made stays unmade.
    pub(crate) async fn end_tasks(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock().expect("nothing panics while it holds this lock"));
        tasks.shutdown().await;
    }

    /// Stops the followers.
    ///
    /// # Errors
    /// [`HostError::Server`] of the first server that does not stop; the others are stopped all the same.
    pub(crate) async fn stop(&self, progress: &dyn Progress) -> Result<(), HostError> {
        let members = std::mem::take(&mut *self.members());
        progress.step(format!("stopping {} followers", members.len()));
        let mut stops = JoinSet::new();
        for member in members {
            let name = member.name.clone();
            stops.spawn(async move { member.supervisor.stop(StopMode::Fast).await.map_err(HostError::server(&name)) });
        }
        stops.join_all().await.into_iter().collect::<Result<Vec<()>, HostError>>().map(|_| ())
    }

    /// What `cluster.toml` holds, now.
    pub(crate) fn remembered(&self) -> ClusterState {
        self.state().clone()
    }

    /// Changes what is remembered: in the file first.
    fn remember<T>(&self, change: impl FnOnce(&mut ClusterState) -> T) -> Result<T, HostError> {
        let mut state = self.state();
        let mut changed = state.clone();
        let outcome = change(&mut changed);
        changed.write(&self.provisioner.directory.state_file())?;
        *state = changed;
        Ok(outcome)
    }

    /// The machine of a server, where servers have machines.
    pub(crate) fn machine(&self, server: &str) -> Option<Machine> {
        let state = self.state().topology.servers().find(|state| state.name == server).cloned()?;
        self.provisioner.machine(&state)
    }

    fn names(&self) -> Vec<String> {
        let state = self.state();
        let staying = state.followers().iter().filter(|follower| !follower.leaving);
        staying.map(|follower| follower.name.clone()).collect()
    }

    fn set_problem(&self, follower: &str, problem: Option<String>) {
        let mut problems = self.problems.lock().expect("nothing panics while it holds this lock");
        match problem {
            Some(problem) => problems.insert(follower.to_owned(), problem),
            None => problems.remove(follower),
        };
    }

    /// Runs `work` until it is done or the cluster stops.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().expect("nothing panics while it holds this lock");
        while tasks.try_join_next().is_some() {}
        tasks.spawn(work);
    }

    fn state(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock().expect("nothing panics while it holds this lock")
    }

    fn members(&self) -> MutexGuard<'_, Vec<Member>> {
        self.members.lock().expect("nothing panics while it holds this lock")
    }
}
