//! Bringing the followers to what is wanted: from any state, so also from one that a killed daemon left.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use onecopy_clone::CloneError;
use onecopy_clone::methods::{CloneMethod, Copy, MethodName, Reflink, choose};
use onecopy_clone::plan::{Plan, Warm};
use onecopy_clone::service::{MakingEvent, ReadyClone};
use onecopy_clone::warm::Prewarming;
use onecopy_machine::MachineError;
use tokio::task::JoinSet;

use super::Membership;
use super::admission::Startable;
use crate::change::CloneOptions;
use crate::state::ServerState;
use crate::{Event, HostError, Progress};

/// Followers that are being started and taken in.
type Admissions = JoinSet<Result<(), HostError>>;

impl Membership {
    /// Removes followers that are leaving and makes those that are missing; returns when the new ones answer through
    /// the router.
    pub(super) async fn reconcile(
        self: &Arc<Self>,
        options: &CloneOptions,
        begun: Instant,
        progress: &Arc<dyn Progress>,
    ) -> Result<(), HostError> {
        self.remove_leaving(&**progress).await?;
        let missing = self.remembered().missing();
        if missing.is_empty() {
            return self.provisioner.forget_layers(&self.remembered().topology).await;
        }
        let made = self.make_all(&missing, options, begun, progress).await;
        let remembered = self.remembered();
        for follower in remembered.followers().iter().filter(|follower| !follower.made) {
            self.set_problem(&follower.name, made.as_ref().err().map(ToString::to_string));
        }
        made
    }

    async fn make_all(
        self: &Arc<Self>,
        missing: &[ServerState],
        options: &CloneOptions,
        begun: Instant,
        progress: &Arc<dyn Progress>,
    ) -> Result<(), HostError> {
        for follower in missing {
            self.set_problem(&follower.name, None);
            self.take_out(&follower.name, &**progress).await?;
            self.remove_server(follower, &**progress).await?;
        }
        self.provisioner.forget_layers(&self.remembered().topology).await?;
        if self.provisioner.machines.is_some() {
            let making = Making { missing, begun, progress, prewarming: None, admissions: JoinSet::new() };
            return self.make_in_machines(options, making).await;
        }
        let leader = self.remembered().leader().clone();
        let mut plans = Vec::new();
        for follower in missing {
            plans.push(self.provisioner.plan(&leader, follower, options)?);
        }
        let choice = choose(options.mode, &plans[0]).map_err(failed(missing))?;
        progress.report(Event::Way { way: choice.name.to_string(), reason: choice.reason });
        let prewarming =
            (options.warm == Warm::Full).then(|| Prewarming::begin(self.provisioner.source(&leader).connection));
        let making = Making { missing, begun, progress, prewarming, admissions: JoinSet::new() };
        let mut admissions = match choice.name {
            MethodName::Lazy => self.fill_all(plans, making).await?,
            MethodName::Copy => {
                let method = Copy { binaries: self.provisioner.binaries.clone() };
                // One after the other: two at once would only take the disk from each other.
                self.make_whole(&method, plans.chunks(1), making).await?
            }
            MethodName::Reflink => self.make_whole(&Reflink, plans.chunks(plans.len()), making).await?,
            // It is refused for servers that are processes.
            MethodName::Fork => return Err(MachineError::NoMachines.into()),
        };
        all_admitted(&mut admissions).await
    }

    /// By a method that ends with all data there.
    async fn make_whole(
        self: &Arc<Self>,
        method: &dyn CloneMethod,
        batches: std::slice::Chunks<'_, Plan>,
        mut making: Making<'_>,
    ) -> Result<Admissions, HostError> {
        if method.name() == MethodName::Copy {
            self.check_space(making.missing.len()).await?;
        }
        for batch in batches {
            making.progress.step(format!("copying the leader to {}", making.names(batch)));
            let report = |plan: &Plan, copied: onecopy_postgres::Progress| {
                let (done_bytes, total_bytes) = (copied.done_bytes, copied.total_bytes);
                let server = making.names(std::slice::from_ref(plan));
                making.progress.report(Event::Copying { server, done_bytes, total_bytes });
            };
            let made = method.make(batch, &report).await;
            for made in made {
                let made = made.map_err(failed(making.missing))?;
                let follower = making.follower_of(&made.plan.target)?;
                let prewarming = making.prewarming.clone();
                let (method, inherited) = (method.name(), made.inherited);
                let startable = Startable { follower, method, inherited, filled_by: None, prewarming };
                self.start_admission(startable, &mut making);
            }
        }
        Ok(making.admissions)
    }

    /// Through the process that fills clones on demand: all of one freeze.
    async fn fill_all(self: &Arc<Self>, plans: Vec<Plan>, mut making: Making<'_>) -> Result<Admissions, HostError> {
        self.check_space(making.missing.len()).await?;
        making.progress.step(format!("cloning the leader to {}", making.names(&plans)));
        let leader = self.remembered().leader().clone();
        let service = self.provisioner.clone_service(&leader).await.map_err(failed(making.missing))?;
        let mut events = service.clone_all(plans).await.map_err(failed(making.missing))?;
        let (mut failure, mut told_pause) = (None, None);
        while let Some(event) = events.next().await.map_err(failed(making.missing))? {
            match event {
                MakingEvent::Preparing => {}
                // Each clone of a freeze is told of it.
                MakingEvent::Frozen { pause } if told_pause == Some(pause) => {}
                MakingEvent::Frozen { pause } => {
                    told_pause = Some(pause);
                    let pause_ms = pause.as_secs_f64() * 1000.0;
                    making.progress.step(format!("the image is taken; the leader's accesses waited {pause_ms:.1} ms"));
                }
                MakingEvent::Ready(ReadyClone { target, descriptors, .. }) => {
                    let follower = making.follower_of(&target)?;
                    let (inherited, prewarming) = (descriptors.into_inherited(), making.prewarming.clone());
                    let filled_by = Some(service.clone());
                    let startable = Startable { follower, method: MethodName::Lazy, inherited, filled_by, prewarming };
                    self.start_admission(startable, &mut making);
                }
                MakingEvent::Failed { target, reason } => {
                    let which = match target {
                        Some(target) => making.follower_of(&target)?.name,
                        None => names(making.missing),
                    };
                    failure = Some(HostError::Daemon(format!("{which} cannot be cloned: {reason}")));
                }
            }
        }
        failure.map_or(Ok(making.admissions), Err)
    }

    /// Starts one and takes it in, while others are still made.
    pub(super) fn start_admission(self: &Arc<Self>, startable: Startable, making: &mut Making<'_>) {
        let (membership, progress, begun) = (Arc::clone(self), Arc::clone(making.progress), making.begun);
        making.admissions.spawn(async move { membership.admit(startable, begun, &*progress).await });
    }

    /// Refuses what would fill the disk when it is whole.
    pub(super) async fn check_space(&self, servers: usize) -> Result<(), HostError> {
        let leader = &self.leader;
        let client = leader.instance.administration().connect().await.map_err(HostError::server(&leader.name))?;
        let sizes = "SELECT sum(pg_catalog.pg_tablespace_size(oid))::int8 FROM pg_catalog.pg_tablespace";
        let row = client.query_one(sizes, &[]).await.map_err(HostError::sql(&leader.name, "ask for its size"))?;
        let size_bytes = u64::try_from(row.get::<_, i64>(0)).unwrap_or(0);
        self.provisioner.check_space(servers, size_bytes)
    }
}

/// Waits until all are taken in.
pub(super) async fn all_admitted(admissions: &mut Admissions) -> Result<(), HostError> {
    while let Some(admitted) = admissions.join_next().await {
        admitted.unwrap_or_else(|error| Err(HostError::Daemon(format!("an admission ended: {error}"))))?;
    }
    Ok(())
}

/// What is known while followers are made.
pub(super) struct Making<'a> {
    pub(super) missing: &'a [ServerState],
    begun: Instant,
    pub(super) progress: &'a Arc<dyn Progress>,
    prewarming: Option<Prewarming>,
    pub(super) admissions: Admissions,
}

impl Making<'_> {
    /// The follower whose data directory this is.
    fn follower_of(&self, target: &Path) -> Result<ServerState, HostError> {
        let found =
            self.missing.iter().find(|follower| target.parent().is_some_and(|home| home.ends_with(&follower.name)));
        found.cloned().ok_or_else(|| HostError::Daemon(format!("{} is nobody's data directory", target.display())))
    }

    fn names(&self, plans: &[Plan]) -> String {
        let followers = plans.iter().filter_map(|plan| self.follower_of(&plan.target).ok());
        names(&followers.collect::<Vec<ServerState>>())
    }
}

fn names(followers: &[ServerState]) -> String {
    followers.iter().map(|follower| follower.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// For `map_err`: these could not be made.
fn failed(followers: &[ServerState]) -> impl FnOnce(CloneError) -> HostError {
    let follower = names(followers);
    move |source| HostError::Clone { follower, source }
}
