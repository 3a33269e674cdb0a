//! Followers that go on from where another server of the cluster is: forks of its machine, all of one checkpoint.
//!
//! ```text
//!  slots on the leader ──> checkpoint, the parent's server held ──┬──> a machine without a network, its server held
//!                                                                 │      │ leader's: ended as by a crash
//!                                                                 │      │ named anew, told whom it follows and its slot
//!                                                                 │      └──> cable in ──> goes on, or starts ──> streams
//!                                                                 └──> ..                                          │ made
//! ```
//!
//! A server that is held does nothing, also not when whoever has begun this is killed: it is reached by nobody and
//! follows nobody, until the files say that it is a standby. What is not called made is removed by the next change, so
//! that no fork of a leader ever leads.

use std::time::{Duration, Instant};

use onecopy_guest_agent::protocol::{Command, Identity};
use onecopy_machine::{Machine, MachineConfiguration, MachineError, MachineHome};
use onecopy_postgres::Role;
use tokio::task::JoinSet;

use super::fork_memory;
use super::registry::blocking;
use super::runtime::machine_of;
use crate::provisioning::{Provisioner, slot_name};
use crate::state::ServerState;
use crate::{HostError, Progress};

/// How long is waited until the leader's server has written what it has changed.
const SERVER_CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a guest may take to be told its name.
const NAME_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a fork may take until the leader sends it its log.
const STREAMING_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is looked whether it does.
const STREAMING_INTERVAL: Duration = Duration::from_millis(20);

/// A disk lies over so many others at most: each is one more place where a block may be.
const DEPTH_MAX: usize = 8;

/// What became of each of several forks.
pub(crate) type Forked = Vec<(ServerState, Result<(), HostError>)>;

impl Provisioner {
    /// Why the machine of a server cannot be forked, in words that follow a colon; none where it can.
    pub(crate) fn fork_obstacle(&self, parent: &ServerState) -> Option<String> {
        let Some(machine) = self.machine(parent) else { return Some("servers have no machines".to_owned()) };
        let is_wanted = self.machines.as_ref().is_some_and(|template| template.checkpoints);
        let depth = machine.home().depth();
        match (machine.can_be_checkpointed(), depth) {
            (false, _) if is_wanted => {
                Some("its memory is QEMU's own, or shared with other forks, until its next start".to_owned())
            }
            (false, _) => {
                Some("its memory is QEMU's own; `onecopy up --vm-checkpoints on` counts from the next start".to_owned())
            }
            (true, Ok(depth)) if depth < DEPTH_MAX => None,
            (true, Ok(depth)) => Some(format!("its disk lies over {depth} others, which is as deep as it may be")),
            (true, Err(error)) => Some(error.to_string()),
        }
    }

    /// Makes followers that nothing is left of, with ports, as forks of the machine of `parent`, which runs: the
    /// leader, or a follower that has what the leader had a moment ago. Of one that could not be made nothing is left.
    ///
    /// # Errors
    /// Of what stands in the way of all, of which nothing is left then: those of
    /// [`Machine::checkpoint_of_held_server`]; [`HostError::NotForked`], [`HostError::Server`].
    pub(crate) async fn fork_followers(
        &self,
        leader: &ServerState,
        parent: &ServerState,
        followers: &[ServerState],
        progress: &dyn Progress,
    ) -> Result<Forked, HostError> {
        // Of an attempt that was broken off.
        self.forget_checkpoint(parent).await;
        let outcome = self.fork_all(leader, parent, followers, progress).await;
        for follower in followers {
            let is_made =
                |(made, result): &(ServerState, Result<(), HostError>)| made.name == follower.name && result.is_ok();
            if !outcome.as_ref().is_ok_and(|forked| forked.iter().any(is_made)) {
                self.give_up_fork(leader, follower).await;
            }
        }
        // Now that nobody begins there any more.
        self.forget_checkpoint(parent).await;
        outcome
    }

    async fn give_up_fork(&self, leader: &ServerState, follower: &ServerState) {
        if let Err(error) = self.remove_server(leader, follower).await {
            tracing::warn!(follower = %follower.name, %error, "what there is of a fork is removed by the next change");
        }
    }

    async fn fork_all(
        &self,
        leader: &ServerState,
        parent: &ServerState,
        followers: &[ServerState],
        progress: &dyn Progress,
    ) -> Result<Forked, HostError> {
        if let Some(reason) = self.fork_obstacle(parent) {
            return Err(HostError::NotForked { parent: parent.name.clone(), reason });
        }
        let machine = self.machine(parent).ok_or(MachineError::NoMachines)?;
        let footprint = machine.observe().await.map(|status| status.footprint).unwrap_or_default();
        let wanted = fork_memory::Wanted { count: followers.len(), shares: true };
        fork_memory::check(machine.home().name(), &machine.home().configuration()?, wanted, &footprint)?;
        for follower in followers {
            self.remove_machine(follower).await?;
        }
        if parent.name == leader.name {
            // A fork of it recovers as after a crash, from the last one on: the sooner the better.
            progress.step(format!("{} writes what it has changed", leader.name));
            let made = tokio::time::timeout(SERVER_CHECKPOINT_TIMEOUT, self.make_server_checkpoint(leader)).await;
            if !matches!(made, Ok(Ok(()))) {
                tracing::warn!(?made, "the forks of the leader recover from an older checkpoint of its server");
            }
        }
        // Before the machine's checkpoint: from then on the leader keeps the log that the forks need.
        self.make_slots(leader, followers).await?;
        if parent.name != leader.name {
            self.check_has_slots(leader, parent, followers).await?;
        }
        let home = machine.home().clone();
        let started = self.leader_started(leader).await?;
        let kept = blocking("keeping a checkpoint", move || home.keep_for_forks()).await?;
        progress.step(format!("taking a checkpoint of {}", parent.name));
        let taken = machine.checkpoint_of_held_server().await?;
        let pause_ms = taken.pause_us as f64 / 1000.0;
        let names = followers.iter().map(|follower| follower.name.as_str()).collect::<Vec<_>>().join(", ");
        progress.step(format!("{} stood {pause_ms:.1} ms; {names} go on from there", parent.name));
        let mut making = JoinSet::new();
        for follower in followers {
            let (provisioner, leader, follower) = (self.clone(), leader.clone(), follower.clone());
            let (parents, was_leader) = (machine.home().clone(), parent.name == leader.name);
            let started = started.clone();
            making.spawn(async move {
                let made = provisioner.fork(&leader, &parents, (taken.number, was_leader), &follower).await;
                let made = match made {
                    Ok(()) => provisioner.check_lost_nothing(&leader, &started, &follower).await,
                    failed => failed,
                };
                (follower, made)
            });
        }
        let mut forked = Forked::new();
        while let Some(made) = making.join_next().await {
            forked.push(made.map_err(|error| HostError::Daemon(format!("making a fork ended: {error}")))?);
        }
        forked.sort_by_key(|(follower, _)| followers.iter().position(|other| other.name == follower.name));
        drop(kept);
        Ok(forked)
    }

    async fn make_server_checkpoint(&self, leader: &ServerState) -> Result<(), HostError> {
        let client = self.administration(leader).connect().await.map_err(HostError::server(&leader.name))?;
        let made = client.batch_execute("CHECKPOINT").await;
        made.map_err(HostError::sql(&leader.name, "write what it has changed"))
    }

    async fn make_slots(&self, leader: &ServerState, followers: &[ServerState]) -> Result<(), HostError> {
        let server = self.open(leader, Role::Leader).await?;
        for follower in followers {
            let slot = slot_name(&follower.name);
            // One that is there keeps an older log, or none any more.
            self.free_slot(leader, &slot).await?;
            server.drop_slot(&slot).await.map_err(HostError::server(&leader.name))?;
            server.create_slot(&slot).await.map_err(HostError::server(&leader.name))?;
        }
        Ok(())
    }

    /// Refuses a parent that has not got yet where the slots begin: its fork would ask for what is gone.
    async fn check_has_slots(
        &self,
        leader: &ServerState,
        parent: &ServerState,
        followers: &[ServerState],
    ) -> Result<(), HostError> {
        const BEGIN: &str =
            "SELECT max(restart_lsn)::text FROM pg_catalog.pg_replication_slots WHERE slot_name = ANY($1)";
        const HAS: &str = "SELECT coalesce(pg_catalog.pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)";
        let slots: Vec<String> = followers.iter().map(|follower| slot_name(&follower.name)).collect();
        let client = self.administration(leader).connect().await.map_err(HostError::server(&leader.name))?;
        let begin = client.query_one(BEGIN, &[&slots]).await.map_err(HostError::sql(&leader.name, "look at slots"))?;
        let begin: Option<String> = begin.get(0);
        let client = self.administration(parent).connect().await.map_err(HostError::server(&parent.name))?;
        let has = client.query_one(HAS, &[&begin.unwrap_or_default()]).await;
        match has.map_err(HostError::sql(&parent.name, "ask what it has"))?.get(0) {
            true => Ok(()),
            false => {
                let reason = "it has not got what the leader wrote before its last checkpoint".to_owned();
                Err(HostError::NotForked { parent: parent.name.clone(), reason })
            }
        }
    }

    /// One of them.
    async fn fork(
        &self,
        leader: &ServerState,
        parents: &MachineHome,
        (number, was_leader): (u64, bool),
        follower: &ServerState,
    ) -> Result<(), HostError> {
        let no_machines = || HostError::from(MachineError::NoMachines);
        let (template, home) = self.machines.as_ref().zip(self.machine_home(follower)).ok_or_else(no_machines)?;
        let forwards = machine_of(template, follower).forwards;
        let configuration = MachineConfiguration { forwards, ..parents.configuration()? };
        let (made, from, user) = (home.clone(), parents.clone(), self.user.clone());
        let make = move || made.make_fork(&from, &configuration, (number, true), true, &user);
        blocking("making a machine", make).await?;
        let machine = Machine::new(home, self.user.clone());
        machine.begin_as_fork(parents, number, true).await?;
        let machine_id = Some(format!("{:032x}", rand::random::<u128>()));
        let identity = Identity { hostname: Some(follower.name.clone()), machine_id, ..Identity::default() };
        machine.ask_agent("take its name", Command::SetIdentity(identity), NAME_TIMEOUT, &|_| ()).await?;
        let server = self.server_in_machine(follower, Role::Follower, Some(leader))?.ok_or_else(no_machines)?;
        server.become_follower(was_leader).await?;
        self.wait_streaming(leader, follower).await
    }

    /// Waits until the leader sends its log there: then it has nothing that the leader has not.
    async fn wait_streaming(&self, leader: &ServerState, follower: &ServerState) -> Result<(), HostError> {
        const STREAMS: &str = "SELECT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s \
             JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid \
             WHERE s.slot_name = $1 AND r.state IN ('streaming', 'catchup'))";
        let client = self.administration(leader).connect().await.map_err(HostError::server(&leader.name))?;
        let (slot, begun) = (slot_name(&follower.name), Instant::now());
        while begun.elapsed() < STREAMING_TIMEOUT {
            let streams = client.query_one(STREAMS, &[&slot]).await;
            if streams.map_err(HostError::sql(&leader.name, "look at its standbys"))?.get(0) {
                return Ok(());
            }
            tokio::time::sleep(STREAMING_INTERVAL).await;
        }
        let reason = format!("it does not follow the leader within {} s", STREAMING_TIMEOUT.as_secs());
        Err(HostError::ForkGivenUp { fork: follower.name.clone(), reason })
    }

    async fn leader_started(&self, leader: &ServerState) -> Result<String, HostError> {
        const STARTED: &str = "SELECT extract(epoch FROM pg_catalog.pg_postmaster_start_time())::text";
        let client = self.administration(leader).connect().await.map_err(HostError::server(&leader.name))?;
        let started = client.query_one(STARTED, &[]).await;
        Ok(started.map_err(HostError::sql(&leader.name, "ask when it started"))?.get(0))
    }

    /// Refuses a fork that may have log which the leader has lost: it had what the leader had written, also what was
    /// not durable there.
    async fn check_lost_nothing(
        &self,
        leader: &ServerState,
        started: &str,
        follower: &ServerState,
    ) -> Result<(), HostError> {
        const HAS: &str = "SELECT greatest(pg_catalog.pg_last_wal_replay_lsn(), \
             pg_catalog.pg_last_wal_receive_lsn())::text";
        const KEEPS: &str = "SELECT coalesce(pg_catalog.pg_current_wal_flush_lsn() >= $1::text::pg_lsn, false)";
        let refused = |reason: &str| HostError::ForkGivenUp { fork: follower.name.clone(), reason: reason.to_owned() };
        let client = self.administration(follower).connect().await.map_err(HostError::server(&follower.name))?;
        let has = client.query_one(HAS, &[]).await.map_err(HostError::sql(&follower.name, "ask what it has"))?;
        let has: Option<String> = has.get(0);
        let has = has.ok_or_else(|| refused("it is no standby"))?;
        let client = self.administration(leader).connect().await.map_err(HostError::server(&leader.name))?;
        let begun = Instant::now();
        loop {
            if self.leader_started(leader).await? != started {
                return Err(refused("the leader has started anew meanwhile, and may have lost what the fork has"));
            }
            let keeps = client.query_one(KEEPS, &[&has]).await;
            if keeps.map_err(HostError::sql(&leader.name, "ask what it has"))?.get(0) {
                return Ok(());
            }
            if begun.elapsed() >= STREAMING_TIMEOUT {
                return Err(refused("the leader has not made durable what the fork has"));
            }
            tokio::time::sleep(STREAMING_INTERVAL).await;
        }
    }

    /// Forgets the checkpoint that forks were made of, where there is one, and what of the machine's disk and memory is
    /// kept for nobody any more. What stays, because a fork is being made or the machine does not run, is forgotten the
    /// next time.
    pub(crate) async fn forget_checkpoint(&self, parent: &ServerState) {
        let Some(machine) = self.machine(parent) else { return };
        if let Err(error) = machine.forget_checkpoint().await {
            tracing::warn!(machine = %parent.name, %error, "what forks were made of is kept");
        }
    }
}
