//! Followers in machines of their own: forks of a machine that runs, or base backups made in the guest.

use std::sync::Arc;
use std::time::Duration;

use onecopy_clone::methods::MethodName;
use onecopy_postgres::{Lsn, ReplicationState, SupervisorState};

use super::Membership;
use super::admission::Startable;
use super::reconciling::{Making, all_admitted};
use crate::change::CloneOptions;
use crate::observed_server::ObservedServer;
use crate::state::ServerState;
use crate::{Event, HostError, machines};

/// How long a server may take to say how far it is.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A follower that has less than this to replay is caught up: one segment.
const LAG_BYTES_MAX: u64 = 16 << 20;

impl Membership {
    /// Forks where that is possible and nothing else is wanted: all of one checkpoint. What could not be forked is
    /// copied, unless forks were asked for.
    pub(super) async fn make_in_machines(
        self: &Arc<Self>,
        options: &CloneOptions,
        mut making: Making<'_>,
    ) -> Result<(), HostError> {
        self.remember(|state| machines::assign_ports(&self.provisioner.directory, state))??;
        let is_missing = |follower: &&ServerState| making.missing.iter().any(|one| one.name == follower.name);
        let missing: Vec<ServerState> = self.remembered().followers().iter().filter(is_missing).cloned().collect();
        let (left, why_copies) = match options.mode {
            Some(MethodName::Copy) => (missing, "copy: it was asked for".to_owned()),
            mode => match (self.fork_all(&missing, &mut making).await, mode) {
                (Ok(left), _) if left.is_empty() => (Vec::new(), String::new()),
                (Ok(left), None) => {
                    let reasons: Vec<String> = left.iter().map(|(_, error)| why(error)).collect();
                    (left.into_iter().map(|(follower, _)| follower).collect(), format!("copy: {}", reasons.join("; ")))
                }
                // A copy needs more.
                (Err(error), None) if !error.is_no_memory() => (missing, format!("copy: {}", why(&error))),
                (outcome, _) => {
                    // Those that are made serve.
                    all_admitted(&mut making.admissions).await?;
                    let failed = match outcome {
                        Ok(left) => left.into_iter().next().map(|(_, error)| error),
                        Err(error) => Some(error),
                    };
                    return failed.map_or(Ok(()), Err);
                }
            },
        };
        if !left.is_empty() {
            making.progress.report(Event::Way { way: MethodName::Copy.to_string(), reason: why_copies });
            self.check_space(left.len()).await?;
        }
        let leader = self.remembered().leader().clone();
        for follower in left {
            let progress = Arc::clone(making.progress);
            progress.step(format!("making a machine for {} and copying the leader into it", follower.name));
            self.provisioner.copy_leader(&leader, &follower, &*progress).await?;
            self.admit_whole(follower, MethodName::Copy, &mut making);
        }
        all_admitted(&mut making.admissions).await
    }

    fn admit_whole(self: &Arc<Self>, follower: ServerState, method: MethodName, making: &mut Making<'_>) {
        let inherited = Vec::new();
        self.start_admission(Startable { follower, method, inherited, filled_by: None, prewarming: None }, making);
    }

    /// Begins to take in the forks that could be made; the others, and why not.
    async fn fork_all(
        self: &Arc<Self>,
        missing: &[ServerState],
        making: &mut Making<'_>,
    ) -> Result<Vec<(ServerState, HostError)>, HostError> {
        let leader = self.remembered().leader().clone();
        let mut parents = self.caught_up(missing).await;
        parents.push(leader.clone());
        let last = parents.len() - 1;
        for (index, parent) in parents.iter().enumerate() {
            let obstacle = self.provisioner.fork_obstacle(parent);
            if obstacle.is_none() {
                let reason = format!("fork: {} runs, with memory of which a checkpoint can be taken", parent.name);
                making.progress.report(Event::Way { way: MethodName::Fork.to_string(), reason });
            }
            let forked = self.provisioner.fork_followers(&leader, parent, missing, &**making.progress).await;
            match forked {
                Err(error) if index < last && !error.is_no_memory() => {
                    making.progress.notice(format!("{}; another server is forked", why(&error)));
                }
                Err(error) => return Err(error),
                Ok(forked) => {
                    let mut left = Vec::new();
                    for (follower, made) in forked {
                        match made {
                            Ok(()) => self.admit_whole(follower, MethodName::Fork, making),
                            Err(error) => left.push((follower, error)),
                        }
                    }
                    return Ok(left);
                }
            }
        }
        Ok(Vec::new())
    }

    /// Followers that can be forked and have all that the leader has, but for the last moment.
    async fn caught_up(&self, missing: &[ServerState]) -> Vec<ServerState> {
        let Some(ReplicationState::Primary { current, .. }) = replication(&self.leader).await else {
            return Vec::new();
        };
        let remembered = self.remembered();
        let stays = |follower: &&ServerState| {
            let is_missing = missing.iter().any(|one| one.name == follower.name);
            follower.made && !follower.leaving && !is_missing && self.provisioner.fork_obstacle(follower).is_none()
        };
        let mut found = Vec::new();
        for follower in remembered.followers().iter().filter(stays) {
            let observed = self.members().iter().find(|member| member.name == follower.name).map(|one| one.observed());
            let Some(observed) = observed else { continue };
            if let Some(ReplicationState::Standby { replayed: Some(replayed), .. }) = replication(&observed).await
                && is_near(replayed, current)
            {
                found.push(follower.clone());
            }
        }
        found
    }
}

/// Why not, without what to do where forks were asked for.
fn why(error: &HostError) -> String {
    match error {
        HostError::NotForked { parent, reason } => format!("{parent} cannot be forked: {reason}"),
        other => other.to_string(),
    }
}

fn is_near(replayed: Lsn, current: Lsn) -> bool {
    current.0.saturating_sub(replayed.0) < LAG_BYTES_MAX
}

/// A server's part in replication, while it runs and answers.
async fn replication(server: &ObservedServer) -> Option<ReplicationState> {
    if !matches!(&*server.state.borrow(), SupervisorState::Running { .. }) {
        return None;
    }
    tokio::time::timeout(ANSWER_TIMEOUT, server.instance.replication_state()).await.ok()?.ok()
}
