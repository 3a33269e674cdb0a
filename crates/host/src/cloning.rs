//! The cluster's side of clones that are filled on demand: their plans, and the process that fills them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onecopy_clone::CloneError;
use onecopy_clone::methods::{MethodName, choose};
use onecopy_clone::plan::{Plan, Recovery, SourceServer};
use onecopy_clone::service::{Rendezvous, Service, SpareWanted};

use crate::HostError;
use crate::change::CloneOptions;
use crate::provisioning::{Provisioner, slot_name};
use crate::state::ServerState;

/// A clone for which the leader would have to keep more of its log than this cannot catch up; as
/// `max_slot_wal_keep_size`.
const WAL_KEEP_BYTES_MAX: u64 = 4 << 30;

/// How long the process that fills clones may take to let go of one, and to end when it has nothing left to do.
const SERVICE_END_TIMEOUT: Duration = Duration::from_secs(30);

/// How often it is looked whether it has.
const SERVICE_LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The kernel's way to the file that a process runs, also when that has no name any more; see proc_pid_exe(5).
const OWN_PROGRAM: &str = "/proc/self/exe";

/// This program, which is also the one that fills clones. Where its file was replaced while the daemon runs, as an
/// upgrade does, it is the file that the daemon was started from: it still speaks the same way.
fn program() -> Result<PathBuf, CloneError> {
    let own = Path::new(OWN_PROGRAM);
    let file = std::env::current_exe().map_err(CloneError::file("find this program's own file behind", own))?;
    Ok(if file.exists() { file } else { own.to_owned() })
}

impl Provisioner {
    /// The leader as the source of clones.
    pub(crate) fn source(&self, leader: &ServerState) -> SourceServer {
        SourceServer {
            connection: self.administration(leader).with_application_name("onecopy clone"),
            data_directory: self.data_directory(leader),
            leader: None,
            replication: None,
        }
    }

    /// What a follower shall be.
    ///
    /// # Errors
    /// [`HostError::Postgres`] when its directory cannot be made.
    pub(crate) fn plan(
        &self,
        leader: &ServerState,
        follower: &ServerState,
        options: &CloneOptions,
    ) -> Result<Plan, HostError> {
        let home = self.directory.server_home(&follower.name);
        self.user.create_directory(&home)?;
        let replication = Some(self.replication_access(leader, follower));
        Ok(Plan {
            source: SourceServer { replication, ..self.source(leader) },
            target: self.data_directory(follower),
            tablespaces: home.join("tablespaces"),
            user_name: self.user.name().to_owned(),
            slot: slot_name(&follower.name),
            recovery: Recovery::Auto,
            fill: options.fill(),
            wal_keep_bytes_max: WAL_KEEP_BYTES_MAX,
        })
    }

    /// The process that fills the leader's clones; it is started when it is not there.
    ///
    /// # Errors
    /// Those of [`Service::reach`].
    pub(crate) async fn clone_service(&self, leader: &ServerState) -> Result<Service, CloneError> {
        Service::reach(&program()?, &self.data_directory(leader)).await
    }

    /// The same if it runs.
    ///
    /// # Errors
    /// Those of [`Service::find`].
    pub(crate) async fn running_clone_service(&self, leader: &ServerState) -> Result<Option<Service>, CloneError> {
        Service::find(&program()?, Rendezvous::of_source(&self.data_directory(leader))?).await
    }

    /// Makes the process that fills a follower let go of it, if there is one.
    pub(crate) async fn end_filling(&self, leader: &ServerState, follower: &ServerState) {
        let target = self.data_directory(follower);
        let ended = async {
            let Some(service) = self.running_clone_service(leader).await? else { return Ok(()) };
            // One that is only being prepared, for a daemon that was killed, lets go as soon as it can be started.
            let begun = Instant::now();
            while service.list().await?.iter().any(|clone| clone.target == target && !clone.state.is_final()) {
                match service.discard(&target).await {
                    Err(error) if begun.elapsed() >= SERVICE_END_TIMEOUT => return Err(error),
                    _ => tokio::time::sleep(SERVICE_LOOK_INTERVAL).await,
                }
            }
            Ok(())
        };
        if let Err(error) = ended.await {
            // Whatever it still does, its files go: the process notices that they are gone.
            tracing::warn!(follower = %follower.name, %error, "who fills it does not let go");
        }
    }

    /// Keeps the files of one more follower ready, where clones are filled on demand; whether that is so.
    ///
    /// # Errors
    /// Those of [`Service::set_spare`], [`HostError::File`].
    pub(crate) async fn keep_spare(&self, leader: &ServerState) -> Result<bool, HostError> {
        if self.machines.is_some() {
            return Ok(false);
        }
        let failed = |source| HostError::Clone { follower: "the next follower".to_owned(), source };
        let spare = ServerState::spare();
        if self.running_clone_service(leader).await.map_err(failed)?.is_none() {
            // Left by one that was killed.
            self.discard(leader, &spare).await?;
        }
        let plan = self.plan(leader, &spare, &CloneOptions::default())?;
        if !choose(None, &plan).is_ok_and(|choice| choice.name == MethodName::Lazy) {
            self.discard(leader, &spare).await?;
            return Ok(false);
        }
        let wanted = SpareWanted { directory: plan.target, user_name: plan.user_name, source: plan.source };
        let service = self.clone_service(leader).await.map_err(failed)?;
        service.set_spare(Some(wanted)).await.map_err(failed)?;
        Ok(true)
    }

    /// Ends the process that fills clones: nothing is kept ready any more, and no clone needs it.
    ///
    /// # Errors
    /// Those of [`Service::set_spare`], [`HostError::File`]; [`HostError::Daemon`] when it does not end.
    pub(crate) async fn end_clone_service(&self, leader: &ServerState) -> Result<(), HostError> {
        if self.machines.is_some() {
            return Ok(());
        }
        let failed = |source| HostError::Clone { follower: "the next follower".to_owned(), source };
        let service = self.running_clone_service(leader).await.map_err(failed)?;
        if let Some(service) = &service {
            service.set_spare(None).await.map_err(failed)?;
            if service.list().await.map_err(failed)?.iter().any(|clone| !clone.state.is_final()) {
                // Somebody else's clones of our leader: `onecopy clone` made them, and they are that command's to end.
                return Ok(());
            }
        }
        let begun = Instant::now();
        // Its lock tells: as long as it is spoken to it does not end.
        while service.as_ref().is_some_and(|service| service.rendezvous().is_held()) {
            if begun.elapsed() >= SERVICE_END_TIMEOUT {
                return Err(HostError::Daemon("the process that fills clones does not end".to_owned()));
            }
            tokio::time::sleep(SERVICE_LOOK_INTERVAL).await;
        }
        self.discard(leader, &ServerState::spare()).await
    }
}
