//! Followers that come: started, taken into the router, watched until they are as good as the others.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_clone::methods::MethodName;
use onecopy_clone::service::{CloneState, Service};
use onecopy_clone::warm::Prewarming;
use onecopy_postgres::{ConnectionParameters, InheritedDescriptor, Instance, StopMode, Supervisor};
use tokio::sync::watch;

use super::{Member, Membership};
use crate::change::{Change, CloneOptions};
use crate::state::ServerState;
use crate::{CloneStatus, Event, HostError, Progress, roles};

/// How long a follower that runs may take to answer through the router: it replays what was written since its image.
const ANSWERING_TIMEOUT: Duration = Duration::from_secs(120);

/// How often it is asked.
const ANSWERING_INTERVAL: Duration = Duration::from_millis(20);

/// How often is told how far clones are.
const TELLING_INTERVAL: Duration = Duration::from_millis(250);

/// How long a service that does not answer is left alone.
const SERVICE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A follower whose data directory can be started.
pub(super) struct Startable {
    /// Which.
    pub follower: ServerState,
    /// How it was made.
    pub method: MethodName,
    /// What its postmaster inherits while data is missing; empty when all is there.
    pub inherited: Vec<InheritedDescriptor>,
    /// Who fills it; none when all is there.
    pub filled_by: Option<Service>,
    /// The leader's hot pages, if it shall begin with them.
    pub prewarming: Option<Prewarming>,
}

impl Membership {
    /// Starts a follower, lets its supervisor watch it and the router read from it; returns when it answers a client.
    /// From the start on it is a follower like any other: also one for which this fails comes when it can.
    pub(super) async fn admit(
        self: &Arc<Self>,
        startable: Startable,
        begun: Instant,
        progress: &dyn Progress,
    ) -> Result<(), HostError> {
        let Startable { follower, method, inherited, filled_by, prewarming } = startable;
        let (name, filling) = (follower.name.clone(), filled_by.is_some());
        self.remember(|state| state.note_made(&name, filling, method.to_string()))?;
        let leader = self.remembered().leader().clone();
        let server = self.provisioner.open_new_follower(&leader, &follower, prewarming.as_ref()).await?;
        if let Some(server) = Arc::clone(&server).into_process() {
            server.set_inherited(inherited);
        }
        let status = CloneStatus { whole: !filling, ..CloneStatus::whole(&method.to_string()) };
        let (sender, clone) = watch::channel(status);
        let supervisor = Supervisor::spawn(server);
        let member = Member { name: name.clone(), supervisor, clone: Some(clone) };
        let observed = member.observed();
        self.insert(member);
        if let Some(service) = filled_by {
            self.spawn(Arc::clone(self).watch_filling(follower.clone(), service, sender));
        }
        let running = observed.wait_running().await;
        // Also one that does not run yet: its supervisor tries again, and nobody else would take it in then.
        self.take_into_router(&follower)?;
        running?;
        self.wait_answering(&name).await?;
        let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        progress.report(Event::Answering { server: name, elapsed_ms });
        Ok(())
    }

    /// From now on reads go there, as many as it is good for.
    fn take_into_router(self: &Arc<Self>, follower: &ServerState) -> Result<(), HostError> {
        self.router.add_follower(self.provisioner.routed(follower))?;
        self.warm(&follower.name)
    }

    /// Asks a client's question until this follower has answered it.
    async fn wait_answering(&self, name: &str) -> Result<(), HostError> {
        let address = self.router.local_address();
        let router = ConnectionParameters {
            host: address.ip().to_string(),
            port: address.port(),
            user: roles::SUPERUSER.to_owned(),
            password: Some(self.provisioner.secrets.superuser.clone()),
            database: roles::DATABASE.to_owned(),
            application_name: Some("onecopy".to_owned()),
        };
        let begun = Instant::now();
        while begun.elapsed() < ANSWERING_TIMEOUT {
            match ask(&router, name).await {
                Ok(()) if self.has_answered(name) => return Ok(()),
                Ok(()) => {}
                Err(error) => tracing::debug!(follower = name, %error, "does not answer yet"),
            }
            tokio::time::sleep(ANSWERING_INTERVAL).await;
        }
        Err(HostError::NotAnswering { follower: name.to_owned(), seconds: ANSWERING_TIMEOUT.as_secs() })
    }

    /// Whether the router had an answer from it: where it does not get one, it asks the leader.
    fn has_answered(&self, name: &str) -> bool {
        self.router.status().servers.iter().any(|server| server.name == name && server.reads > 0)
    }

    pub(super) fn insert(&self, member: Member) {
        // The state is never locked inside the members.
        let order: Vec<String> =
            self.remembered().topology.followers.into_iter().map(|follower| follower.name).collect();
        let mut members = self.members();
        members.push(member);
        members.sort_by_key(|member| order.iter().position(|name| *name == member.name));
    }

    /// Watches a clone until it is whole or given up.
    pub(super) async fn watch_filling(
        self: Arc<Self>,
        follower: ServerState,
        service: Service,
        sender: watch::Sender<CloneStatus>,
    ) {
        let mut watching = service.watch(&self.provisioner.data_directory(&follower));
        loop {
            let progress = match watching.next().await {
                Ok(Some(progress)) => progress,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(follower = %follower.name, %error, "nobody tells how far it is");
                    tokio::time::sleep(SERVICE_RETRY_INTERVAL).await;
                    continue;
                }
            };
            match progress.state {
                CloneState::Whole => return self.become_whole(&follower.name, &sender),
                CloneState::Discarded { reason } => {
                    // What the service itself gives up has a reason that stays; when it is gone, another one may do
                    // better.
                    let told_by_service = !progress.slot.is_empty();
                    return self.give_up(&follower, &reason, told_by_service).await;
                }
                _ => sender.send_modify(|status| {
                    status.filled_bytes = progress.filled_bytes;
                    status.total_bytes = progress.total_bytes;
                    status.rate_bytes_per_second = progress.rate_bytes_per_second;
                    status.left_seconds = progress.seconds_left;
                    status.demand_faults = progress.demand_faults;
                }),
            }
        }
    }

    /// An ordinary follower from now on: it needs nothing inherited any more.
    fn become_whole(&self, name: &str, sender: &watch::Sender<CloneStatus>) {
        let forgotten = self.remember(|state| state.note_whole(name));
        if let Err(error) = forgotten {
            // The next `up` finds a whole directory and comes to the same end.
            tracing::warn!(follower = name, %error, "it is whole, which could not be written down");
        }
        if let Some(server) = self.instance(name).and_then(Instance::into_process) {
            server.set_inherited(Vec::new());
        }
        tracing::info!(follower = name, "all its data is there");
        sender.send_modify(|status| {
            status.whole = true;
            (status.filled_bytes, status.rate_bytes_per_second) = (status.total_bytes, 0);
            status.left_seconds = None;
        });
    }

    /// A clone that never becomes whole is no follower.
    async fn give_up(self: &Arc<Self>, follower: &ServerState, reason: &str, is_final: bool) {
        let name = &follower.name;
        tracing::error!(follower = %name, reason, "its data cannot be completed; it is given up");
        if let Err(error) = self.discard(follower).await {
            tracing::error!(follower = %name, %error, "it is not cleared away");
        }
        let remedy = format!("its data could not be completed ({reason}); make it again with: onecopy reinit {name}");
        self.set_problem(name, Some(remedy));
        if !is_final {
            let progress: Arc<dyn Progress> = Arc::new(|_: Event| ());
            if let Err(error) = self.begin(Change::Resume, CloneOptions::default(), false, progress) {
                tracing::warn!(follower = %name, %error, "it is not made again now");
            }
        }
    }

    async fn discard(&self, follower: &ServerState) -> Result<(), HostError> {
        self.remember(|state| {
            if let Some(server) = state.server_mut(&follower.name) {
                server.mark_unmade();
            }
        })?;
        self.remove_from_router(&follower.name).await?;
        if let Some(member) = self.remove(&follower.name) {
            // It waits for data that never comes: nothing there can be shut down in peace.
            let _ = member.supervisor.stop(StopMode::Immediate).await;
        }
        self.remove_server(follower, &|_| ()).await
    }

    pub(super) fn instance(&self, name: &str) -> Option<Arc<dyn Instance>> {
        let members = self.members();
        members.iter().find(|member| member.name == name).map(|member| Arc::clone(member.supervisor.instance()))
    }

    /// Tells how far clones are, again and again.
    pub(super) async fn tell_filling(&self, progress: &dyn Progress) -> Infallible {
        let mut interval = tokio::time::interval(TELLING_INTERVAL);
        let mut filling: Vec<String> = Vec::new();
        loop {
            interval.tick().await;
            let router = self.router.status();
            let clones: Vec<(String, CloneStatus)> = {
                let members = self.members();
                members.iter().filter_map(|member| Some((member.name.clone(), member.clone_status()?))).collect()
            };
            for (server, clone) in clones {
                let known = filling.iter().position(|name| *name == server);
                if clone.whole {
                    if let Some(known) = known {
                        filling.remove(known);
                        progress.report(Event::Whole { server });
                    }
                    continue;
                }
                if known.is_none() {
                    filling.push(server.clone());
                }
                let routed = router.servers.iter().find(|routed| routed.name == server);
                let replay_lag_bytes = routed.map(|routed| routed.replay_lag_bytes);
                progress.report(Event::Filling { server, clone, replay_lag_bytes });
            }
        }
    }

    /// Waits until no clone lacks data.
    pub(super) async fn wait_whole(&self) -> Result<(), HostError> {
        loop {
            let state = self.remembered();
            if let Some(lost) = state.followers().iter().find(|follower| !follower.made) {
                let problems = self.problems.lock().expect("nothing panics while it holds this lock");
                let reason = problems.get(&lost.name).cloned().unwrap_or_else(|| "it is being made again".to_owned());
                return Err(HostError::Daemon(format!("{}: {reason}", lost.name)));
            }
            if state.followers().iter().all(|follower| !follower.filling) {
                // The last word about each is told before the answer ends.
                tokio::time::sleep(2 * TELLING_INTERVAL).await;
                return Ok(());
            }
            tokio::time::sleep(TELLING_INTERVAL).await;
        }
    }
}

/// A client's read that this follower shall answer. It goes by the settings of clients: nothing in it is found by them.
async fn ask(router: &ConnectionParameters, name: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let client = router.connect_as_client().await?;
    client.batch_execute(&format!("SET onecopy.server = '{name}'")).await?;
    client.query_one("SELECT FROM pg_catalog.pg_namespace LIMIT 1", &[]).await?;
    Ok(())
}
