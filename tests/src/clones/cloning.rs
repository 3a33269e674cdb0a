//! Clones of the harness's servers, made by the product.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use onecopy_clone::methods::{CloneMethod, PreparedClone, Reflink};
use onecopy_clone::plan::{FillOptions, Plan, Recovery, SourceServer, Warm};
use onecopy_clone::service::{CloneState, MakingEvent, Progress, ReadyClone, Rendezvous, Service};
use onecopy_postgres::InheritedDescriptor;

use crate::clones::harness::Harness;
use crate::servers::TestServer;

/// What is not whole by then never is.
const WHOLE_DEADLINE: Duration = Duration::from_secs(400);
/// A clone may keep this much of its source's log.
const WAL_KEEP_BYTES_MAX: u64 = 4 << 30;

/// A clone that runs, and what makes it whole.
#[derive(Debug)]
pub struct Cloned {
    /// The standby.
    pub clone: TestServer,
    /// What it was made by.
    pub plan: Plan,
    /// How long the source's accesses waited.
    pub pause: Duration,
    service: Option<Service>,
}

/// The program whose processes make and fill clones: the one that was built beside this test.
///
/// # Errors
///
/// It was not built.
pub fn program() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let program = own.parent().and_then(Path::parent).map(|directory| directory.join("onecopy"));
    program
        .filter(|program| program.is_file())
        .with_context(|| format!("no onecopy beside {}: cargo build -p onecopy", own.display()))
}

impl Harness {
    /// The plan of a clone of `source`, as fast as it goes; `leader` is the primary of a source that is a standby
    /// itself.
    pub fn plan(&self, source: &TestServer, leader: Option<&TestServer>, name: &str) -> Plan {
        Plan {
            source: SourceServer {
                connection: source.server.connection(),
                data_directory: source.server.data_directory().to_owned(),
                leader: leader.map(|leader| leader.server.connection()),
                replication: None,
            },
            target: self.path(name).join("data"),
            tablespaces: self.path(name).join("tablespaces"),
            user_name: source.server.options().user.name().to_owned(),
            slot: name.replace('-', "_"),
            recovery: Recovery::Auto,
            fill: FillOptions { limit_bytes_per_second: None, warm: Warm::Off },
            wal_keep_bytes_max: WAL_KEEP_BYTES_MAX,
        }
    }

    /// The service of a source, started if need be.
    ///
    /// # Errors
    ///
    /// It does not begin.
    pub async fn service(&self, source: &TestServer) -> anyhow::Result<Service> {
        Ok(Service::reach(&program()?, source.server.data_directory()).await?)
    }

    /// Makes clones of one source that are filled while they run, all of one freeze, and starts them.
    ///
    /// # Errors
    ///
    /// A clone that fails, with the service's words.
    pub async fn clone_lazily(&self, source: &TestServer, plans: Vec<Plan>) -> anyhow::Result<Vec<Cloned>> {
        let service = self.service(source).await?;
        let (ready, pause) = make(&service, plans.clone()).await?;
        let mut cloned = Vec::new();
        for ready in ready {
            let plan = plans.iter().find(|plan| plan.target == ready.target).context("a clone nobody asked for")?;
            let clone = self.start_clone(source, plan, ready.descriptors.into_inherited()).await?;
            cloned.push(Cloned { clone, plan: plan.clone(), pause, service: Some(service.clone()) });
        }
        Ok(cloned)
    }

    /// Makes clones that share blocks with their source, and starts them.
    ///
    /// # Errors
    ///
    /// The method is not possible here; a clone that fails.
    pub async fn clone_by_reflink(&self, source: &TestServer, plans: Vec<Plan>) -> anyhow::Result<Vec<Cloned>> {
        for plan in &plans {
            ensure!(Reflink.obstacle(plan).is_none(), "{:?}", Reflink.obstacle(plan));
        }
        let mut cloned = Vec::new();
        for made in Reflink.make(&plans, &|_, _| ()).await {
            let PreparedClone { plan, pause, inherited, .. } = made?;
            let clone = self.start_clone(source, &plan, inherited).await?;
            cloned.push(Cloned { clone, plan, pause, service: None });
        }
        Ok(cloned)
    }

    async fn start_clone(
        &self,
        source: &TestServer,
        plan: &Plan,
        inherited: Vec<InheritedDescriptor>,
    ) -> anyhow::Result<TestServer> {
        let home = plan.target.parent().and_then(Path::file_name).and_then(|name| name.to_str());
        let name = home.context("a plan of this harness")?;
        let clone = self.open_standby(name, self.options(name)?, source, Some(plan.slot.clone())).await?;
        clone.server.set_inherited(inherited);
        clone.server.start().await?;
        Ok(clone)
    }
}

/// Lets a service make clones: all of them, or an error.
///
/// # Errors
///
/// The reason why one failed, and what the service has logged.
pub async fn make(service: &Service, plans: Vec<Plan>) -> anyhow::Result<(Vec<ReadyClone>, Duration)> {
    let wanted = plans.len();
    let mut making = service.clone_all(plans).await?;
    let (mut ready, mut frozen) = (Vec::new(), Duration::ZERO);
    while let Some(event) = making.next().await? {
        match event {
            MakingEvent::Preparing => {}
            MakingEvent::Frozen { pause } => frozen = pause,
            MakingEvent::Ready(clone) => ready.push(clone),
            MakingEvent::Failed { target, reason } => bail!("{target:?} failed: {reason}\n{}", log(service)),
        }
    }
    ensure!(ready.len() == wanted, "{} of {wanted} clones", ready.len());
    Ok((ready, frozen))
}

/// What a service has logged.
pub fn log(service: &Service) -> String {
    std::fs::read_to_string(service.rendezvous().log()).unwrap_or_default()
}

impl Cloned {
    /// How far it is; none when no service knows it any more.
    ///
    /// # Errors
    ///
    /// The service does not answer.
    pub async fn progress(&self) -> anyhow::Result<Option<Progress>> {
        let Some(service) = &self.service else { return Ok(None) };
        Ok(service.list().await?.into_iter().find(|progress| progress.target == self.plan.target))
    }

    /// Checks that content is missing still: what is proven now is proven while the clone is filled.
    ///
    /// # Errors
    ///
    /// It is whole already, or discarded.
    pub async fn ensure_filling(&self) -> anyhow::Result<()> {
        let progress = self.progress().await?.context("no service knows the clone any more")?;
        let is_filling = progress.state == CloneState::Filling && progress.filled_bytes < progress.total_bytes;
        ensure!(is_filling, "the clone should be filling: {progress:?}");
        Ok(())
    }

    /// Changes how fast it is filled; none is as fast as it goes.
    ///
    /// # Errors
    ///
    /// The service does not know it.
    pub async fn set_limit(&self, bytes_per_second: Option<u64>) -> anyhow::Result<()> {
        let service = self.service.as_ref().context("nothing is filled")?;
        Ok(service.set_limit(&self.plan.target, bytes_per_second).await?)
    }

    /// Watches it to its end, whole or discarded.
    ///
    /// # Errors
    ///
    /// It does not come.
    pub async fn end(&self) -> anyhow::Result<CloneState> {
        let Some(service) = &self.service else { return Ok(CloneState::Whole) };
        let mut watching = service.watch(&self.plan.target);
        let watch = async {
            let mut last = None;
            while let Some(progress) = watching.next().await? {
                last = Some(progress);
            }
            last.map(|progress| progress.state).context("nobody knows how it ended")
        };
        tokio::time::timeout(WHOLE_DEADLINE, watch).await.with_context(|| format!("no end: {}", log(service)))?
    }

    /// Waits until it is whole.
    ///
    /// # Errors
    ///
    /// It is discarded, or never whole; with what the service has logged.
    pub async fn wait_whole(&self) -> anyhow::Result<()> {
        let state = self.end().await?;
        let log = self.service.as_ref().map(log).unwrap_or_default();
        ensure!(state == CloneState::Whole, "{}: {state:?}\n{log}", self.clone.name);
        // From here on nothing of its beginning counts, also when it is started again.
        self.clone.server.set_inherited(Vec::new());
        Ok(())
    }

    /// Where its service is met.
    ///
    /// # Errors
    ///
    /// It has none.
    pub fn rendezvous(&self) -> anyhow::Result<&Rendezvous> {
        Ok(self.service.as_ref().context("no service")?.rendezvous())
    }
}
