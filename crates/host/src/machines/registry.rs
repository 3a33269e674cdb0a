//! A person's own machines, beside those of the cluster in the same directory: what `onecopy vm` does.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::time::Duration;

use onecopy_guest_agent::protocol::{Answer, Bytes, Command, Execute, Executed};
use onecopy_hypervisor::Qemu;
use onecopy_machine::migration::{Departure, DepartureState};
use onecopy_machine::{
    BridgedNetwork, Checkpoint, CheckpointTaken, END_TIMEOUT, Endpoint, Forward, GUEST_PORT, GuestImage, GuestServer,
    GuestServerOptions, HardwareAddress, Machine, MachineConfiguration, MachineEnd, MachineError, MachineHome,
    MachineName, MachineOverrides, MachineStatus, Transport, hypervisor_failed,
};
use onecopy_postgres::{ConnectionParameters, Instance, Role, ServiceUser, recommended_settings};
use rand::RngExt;
use rand::distr::Alphanumeric;
use serde::Serialize;
use tokio::task::JoinSet;

use super::allowed_bridge::AllowedBridge;
use super::runtime::free_port;
use super::serving::pool_setting;
use crate::state::{ClusterState, Runtime};
use crate::{Directory, HostError, Progress};

/// Letters and digits of a password, as with a cluster's.
const PASSWORD_CHARACTERS: usize = 32;

/// How long a guest that boots, or whose keeper was killed, is waited for before a program runs in it.
const ANSWERING_TIMEOUT: Duration = Duration::from_secs(60);

/// Does what waits for files in a thread apart.
pub(super) async fn blocking<T: Send + 'static, E: From<MachineError> + Send + 'static>(
    what: &str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(MachineError::Task(format!("{what} ended: {error}")).into()))
}

/// Before a machine's directory is removed: no other one lies over it, and none will as long as this is held.
pub(super) fn keep_alone(home: &MachineHome) -> Result<File, MachineError> {
    let alone = home.keep_from_new_forks()?;
    let dependents = home.dependents()?;
    let mut machines: Vec<String> = dependents.iter().map(|dependent| dependent.machine.to_string()).collect();
    machines.dedup();
    match machines.is_empty() {
        true => Ok(alone),
        false => Err(MachineError::StoodOn { name: home.name().clone(), machines }),
    }
}

/// The machines of a directory.
#[derive(Debug, Clone)]
pub struct Machines {
    pub(super) directory: Directory,
    pub(super) user: ServiceUser,
    /// Directories on storage that other hosts have under the same paths.
    pub(super) shared_storage: Vec<PathBuf>,
    /// Bridges onto which machines of other hosts may come.
    pub(super) bridges: Vec<AllowedBridge>,
    /// What fences a host whose machines are protected here.
    pub(super) fence: Option<String>,
    /// Members of the etcd that decides on which host those go on whose orders name it.
    pub(super) etcd: Vec<Endpoint>,
}

/// What a new machine shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMachine {
    /// Its name.
    pub name: MachineName,
    /// What it is made of.
    pub overrides: MachineOverrides,
    /// Ports that lead into it; 0 on the host's side: any free one.
    pub forwards: Vec<Forward>,
    /// It runs a PostgreSQL server.
    pub postgresql: bool,
    /// Its memory is a file that checkpoints are taken of.
    pub checkpoints: bool,
    /// How its disk is attached.
    pub transport: Transport,
    /// Its card is on a bridge; none: QEMU's own network.
    pub network: Option<BridgedNetwork>,
}

/// A machine, for a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MachineSummary {
    /// Its name.
    pub name: MachineName,
    /// It is a server of the cluster in the same directory.
    pub of_cluster: bool,
    /// It runs a PostgreSQL server.
    pub postgresql: bool,
    /// Ports that lead into it.
    pub forwards: Vec<Forward>,
    /// How it is.
    #[serde(flatten)]
    pub machine: MachineStatus,
    /// How its last run ended.
    pub end: Option<MachineEnd>,
}

impl Machines {
    /// The machines of a directory, which may not be there.
    ///
    /// # Errors
    /// [`HostError::Postgres`] when there is no account to run them as.
    pub fn of(directory: Directory) -> Result<Machines, HostError> {
        Ok(Machines {
            directory,
            user: ServiceUser::resolve(None)?,
            shared_storage: Vec::new(),
            bridges: Vec::new(),
            fence: None,
            etcd: Vec::new(),
        })
    }

    /// Disks of machines that come are read in these directories, which are on storage that other hosts have under the
    /// same paths.
    ///
    /// # Errors
    /// [`HostError::File`]: one is not there.
    pub fn with_shared_storage(mut self, directories: &[PathBuf]) -> Result<Machines, HostError> {
        for directory in directories {
            let canonical = directory.canonicalize().map_err(HostError::file("find", directory))?;
            self.shared_storage.push(canonical);
        }
        Ok(self)
    }

    /// Machines of other hosts may come onto these bridges, which need not be there yet.
    #[must_use]
    pub fn with_bridges(mut self, bridges: &[AllowedBridge]) -> Machines {
        self.bridges.extend_from_slice(bridges);
        self
    }

    /// Machines that are protected here go on here by themselves, where their host cannot be reached and this command
    /// has fenced it.
    #[must_use]
    pub fn with_fence(self, fence: Option<String>) -> Machines {
        Machines { fence, ..self }
    }

    /// Machines that are protected here go on here by themselves where etcd, by these members, decides so; their own
    /// host has to ask the same etcd.
    #[must_use]
    pub fn with_etcd(self, etcd: &[Endpoint]) -> Machines {
        Machines { etcd: etcd.to_owned(), ..self }
    }

    /// The machine of this name.
    ///
    /// # Errors
    /// [`MachineError::NotThere`], with the names that are.
    pub fn get(&self, name: &MachineName) -> Result<Machine, HostError> {
        let home = MachineHome::of(&self.directory.machines(), name);
        if home.is_made() {
            return Ok(Machine::new(home, self.user.clone()));
        }
        let machines = self.directory.machines();
        let made = MachineHome::names(&machines)?.into_iter().filter(|name| MachineHome::of(&machines, name).is_made());
        let machines = made.map(|name| name.to_string()).collect();
        let (name, directory) = (name.to_string(), self.directory.root().to_owned());
        Err(MachineError::NotThere { name, directory, machines }.into())
    }

    /// All, in the order of their names.
    ///
    /// # Errors
    /// [`HostError::File`], [`MachineError::InvalidFile`].
    pub async fn list(&self) -> Result<Vec<MachineSummary>, HostError> {
        self.list_within(Duration::MAX).await
    }

    /// The same, without those whose keepers and guests do not answer so soon.
    ///
    /// # Errors
    /// As [`Machines::list`].
    pub(super) async fn list_within(&self, bound: Duration) -> Result<Vec<MachineSummary>, HostError> {
        let mut looks = JoinSet::new();
        for name in MachineHome::names(&self.directory.machines())? {
            let machine = Machine::new(MachineHome::of(&self.directory.machines(), &name), self.user.clone());
            looks.spawn(async move {
                let seen = tokio::time::timeout(bound, machine.observe()).await;
                let status = seen.inspect_err(|_| tracing::warn!(machine = %name, "it does not say how it is")).ok()?;
                // What is being made or removed just now is none.
                Some((name, machine.home().configuration().ok()?, machine.home().end(), status?))
            });
        }
        let mut list = Vec::new();
        for (name, configuration, end, machine) in looks.join_all().await.into_iter().flatten() {
            list.push(MachineSummary {
                of_cluster: self.is_of_cluster(&name)?,
                postgresql: configuration.postgresql,
                forwards: configuration.forwards,
                machine,
                end,
                name,
            });
        }
        list.sort_by(|one, other| one.name.as_str().cmp(other.name.as_str()));
        Ok(list)
    }

    /// Makes a machine, at rest.
    ///
    /// # Errors
    /// [`MachineError`] with what is not possible, and the remedy.
    pub async fn create(&self, new: &NewMachine) -> Result<Machine, HostError> {
        if new.name.is_of_clusters() {
            return Err(MachineError::NameOfClusters { name: new.name.clone() }.into());
        }
        let home = MachineHome::of(&self.directory.machines(), &new.name);
        if home.is_made() {
            return Err(MachineError::Exists { name: new.name.clone() }.into());
        }
        let qemu = Qemu::find().map_err(|error| hypervisor_failed(&new.name, error))?;
        if new.checkpoints {
            MachineConfiguration::check_checkpoints(qemu.version())?;
        }
        let template = new.overrides.applied_to(None)?;
        if new.postgresql && GuestImage::find(Some(&template.image))?.postgresql_major.is_none() {
            let (directory, reason) = (template.image, "it has no PostgreSQL".to_owned());
            return Err(MachineError::NoImage { directory, reason }.into());
        }
        self.directory.make_root()?;
        self.directory.make_machines()?;
        let _ports = self.lock_ports().await?;
        // A server on a bridge is reached by its address.
        let forwards = self.ports(new.forwards.clone(), new.postgresql && new.network.is_none())?;
        let configuration = template.configuration(forwards, new.postgresql);
        let (checkpoints, transport) = (new.checkpoints, Some(new.transport));
        let network = new.network.clone().map(with_card);
        let configuration = MachineConfiguration { checkpoints, transport, network, ..configuration };
        configuration.check()?;
        configuration.check_network(qemu.version())?;
        let password = new.postgresql.then(new_password);
        let (user, made) = (self.user.clone(), home.clone());
        blocking("making a machine", move || made.make(&configuration, password.as_deref(), &user)).await?;
        Ok(Machine::new(home, self.user.clone()))
    }

    /// While this is held, nobody else chooses ports for a machine of this directory.
    pub(super) async fn lock_ports(&self) -> Result<File, HostError> {
        let machines = self.directory.machines();
        blocking("waiting for another machine's ports", move || {
            let lock = File::open(&machines).and_then(|lock| lock.lock().map(|()| lock));
            lock.map_err(HostError::file("lock", &machines))
        })
        .await
    }

    /// The ports as they shall be: any free one where that was asked for, and one to the server, if there shall be one.
    pub(super) fn ports(&self, mut forwards: Vec<Forward>, postgresql: bool) -> Result<Vec<Forward>, HostError> {
        if postgresql && !forwards.iter().any(|forward| forward.guest_port == GUEST_PORT) {
            forwards.push(Forward { host_port: 0, guest_port: GUEST_PORT });
        }
        let mut taken: BTreeSet<u16> = forwards.iter().map(|forward| forward.host_port).collect();
        for name in MachineHome::names(&self.directory.machines())? {
            // One that cannot be read takes no port.
            let others = MachineHome::of(&self.directory.machines(), &name).configuration().map(|other| other.forwards);
            taken.extend(others.unwrap_or_default().iter().map(|forward| forward.host_port));
        }
        for forward in forwards.iter_mut().filter(|forward| forward.host_port == 0) {
            forward.host_port = free_port(&taken)?;
            taken.insert(forward.host_port);
        }
        Ok(forwards)
    }

    /// Starts a machine, and its server, if it has one; returns when that answers.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], and what keeps it from running.
    pub async fn start(&self, name: &MachineName, progress: &dyn Progress) -> Result<(), HostError> {
        let machine = self.get(name)?;
        self.refuse_clusters(name, "it is started with the cluster: onecopy up")?;
        progress.step(format!("starting {name}"));
        let Some(server) = self.server(&machine)? else { return Ok(machine.start().await.map(|_| ())?) };
        server.boot().await?;
        if server.is_absent().await? {
            progress.step(format!("making a PostgreSQL server in {name}"));
            server.initialize().await?;
        }
        progress.step(format!("starting PostgreSQL in {name}"));
        server.start().await.map(|_| ()).map_err(HostError::server(name.as_str()))
    }

    /// Stops a machine: its server, then the guest by itself; or at once with `force`. One that does not run is stopped
    /// already.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], [`MachineError::Keeper`].
    pub async fn stop(&self, name: &MachineName, force: bool) -> Result<(), HostError> {
        let machine = self.get(name)?;
        self.refuse_clusters(
            name,
            "stop the whole cluster with `onecopy down`, or have fewer followers with `onecopy scale`",
        )?;
        Ok(machine.stop(force, END_TIMEOUT).await?)
    }

    /// Makes a machine's processors stand, or run again. Those of a cluster's machine can only be let go.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], [`MachineError::DoesNotRun`], [`MachineError::Keeper`].
    pub async fn set_paused(&self, name: &MachineName, is_wanted: bool) -> Result<(), HostError> {
        let machine = self.get(name)?;
        if is_wanted {
            self.refuse_clusters(name, "its clients would wait for it; stop the cluster with `onecopy down`")?;
        }
        Ok(machine.set_paused(is_wanted).await?)
    }

    /// Takes a checkpoint of a machine that runs.
    ///
    /// # Errors
    /// [`MachineError::NotThere`], and those of [`Machine::checkpoint`].
    pub async fn checkpoint(&self, name: &MachineName, keep: Option<u64>) -> Result<CheckpointTaken, HostError> {
        Ok(self.get(name)?.checkpoint(keep).await?)
    }

    /// A machine's checkpoints, oldest first.
    ///
    /// # Errors
    /// [`MachineError::NotThere`], [`MachineError::Memory`].
    pub fn checkpoints(&self, name: &MachineName) -> Result<Vec<Checkpoint>, HostError> {
        Ok(self.get(name)?.checkpoints()?)
    }

    /// Forgets these checkpoints of a machine.
    ///
    /// # Errors
    /// [`MachineError::NotThere`], and those of [`Machine::forget_checkpoints`].
    pub async fn forget_checkpoints(&self, name: &MachineName, numbers: &[u64]) -> Result<(), HostError> {
        Ok(self.get(name)?.forget_checkpoints(numbers).await?)
    }

    /// Lets a machine that does not run go on from a checkpoint, the last one where none is named; its number.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], and those of [`Machine::restore`].
    pub async fn restore(&self, name: &MachineName, number: Option<u64>) -> Result<u64, HostError> {
        let machine = self.get(name)?;
        self.refuse_clusters(name, "its server would be behind what its clients have seen")?;
        Ok(machine.restore(number).await?)
    }

    /// Removes a machine that does not run, with its disk; also what a making or removal that was broken off has left.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], [`MachineError::Runs`], [`MachineError::StoodOn`], [`MachineError::Busy`],
    /// [`HostError::File`].
    pub async fn delete(&self, name: &MachineName) -> Result<(), HostError> {
        let left = MachineHome::of(&self.directory.machines(), name);
        if !left.is_made() && left.root().exists() && !name.is_of_clusters() {
            // Whoever makes one holds this.
            let _ports = self.lock_ports().await?;
            if !left.is_made() {
                return Ok(blocking("removing what is left of a machine", move || left.remove()).await?);
            }
        }
        let machine = self.get(name)?;
        self.refuse_clusters(
            name,
            "have fewer followers with `onecopy scale`, or make one anew with `onecopy reinit`",
        )?;
        if machine.process_id().is_some() || machine.home().has_keeper() {
            return Err(MachineError::Runs { name: name.clone() }.into());
        }
        if let Some(Departure { to, .. }) = Departure::protecting(machine.home())? {
            let reason = format!("its copy there may go on; give it up before: onecopy vm unprotect {name}");
            return Err(MachineError::Protection { machine: name.to_string(), to, reason }.into());
        }
        if Departure::is_needed(machine.home()) {
            let departure = Departure::of(machine.home())?;
            let has_gone = departure.as_ref().is_some_and(|departure| departure.state == DepartureState::Gone);
            let to = departure.map_or_else(|| "another host".to_owned(), |departure| departure.to);
            let reason = if has_gone {
                format!(
                    "that host reads its disk from here still; `onecopy disk info` there shows how much is missing, \
                     and where it needs nothing more: onecopy vm migrate {name} --abandon --force"
                )
            } else {
                format!(
                    "whether it runs there is not known, and this may be the only disk that it has; ask with: onecopy \
                     vm migrate {name} --resume"
                )
            };
            return Err(MachineError::Migration { machine: format!("what {name} has left"), to, reason }.into());
        }
        let home = machine.home().clone();
        let removed = blocking("removing a machine", move || {
            let _alone = keep_alone(&home)?;
            home.remove()
        })
        .await;
        Ok(removed?)
    }

    /// Runs a program in the guest.
    ///
    /// # Errors
    /// [`MachineError::DoesNotRun`], [`MachineError::Guest`] with the agent's words.
    pub async fn execute(
        &self,
        name: &MachineName,
        argv: Vec<String>,
        user: Option<String>,
        stdin: Vec<u8>,
        timeout: Duration,
    ) -> Result<Executed, HostError> {
        let machine = self.get(name)?;
        if machine.process_id().is_none() {
            return Err(MachineError::DoesNotRun { name: name.clone() }.into());
        }
        machine.wait_answering(ANSWERING_TIMEOUT).await?;
        let action = format!("run {}", argv.first().map_or("nothing", String::as_str));
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let command = Command::Execute(Execute { argv, user, stdin: Bytes(stdin), timeout_ms });
        match machine.ask_agent(&action, command, timeout, &|_| ()).await? {
            Answer::Executed(executed) => Ok(executed),
            other => {
                let (machine, reason) = (name.to_string(), format!("it answered {other:?}"));
                Err(MachineError::Guest { machine, action, reason }.into())
            }
        }
    }

    /// How the superuser reaches the server in a machine; none where it has none of its own.
    ///
    /// # Errors
    /// [`MachineError::NotThere`], [`HostError::File`].
    pub fn access(&self, name: &MachineName) -> Result<Option<ConnectionParameters>, HostError> {
        let machine = self.get(name)?;
        let configuration = machine.home().configuration()?;
        let place = configuration.server_place().filter(|_| configuration.postgresql);
        let Some((host, port)) = place.filter(|_| machine.home().password_file().exists()) else { return Ok(None) };
        let path = machine.home().password_file();
        let password = fs::read_to_string(&path).map_err(HostError::file("read", &path))?;
        Ok(Some(ConnectionParameters {
            host: host.to_string(),
            port,
            user: "postgres".to_owned(),
            password: Some(password.trim().to_owned()),
            database: "postgres".to_owned(),
            application_name: Some("onecopy".to_owned()),
        }))
    }

    fn server(&self, machine: &Machine) -> Result<Option<GuestServer>, HostError> {
        let Some(administration) = self.access(machine.home().name())? else { return Ok(None) };
        let configuration = machine.home().configuration()?;
        let mut settings = recommended_settings(Role::Leader, machine.home().name().as_str());
        settings.set("shared_buffers", pool_setting(&configuration));
        let major_version = GuestImage::find(Some(&machine.home().image()))?.postgresql_major;
        let options = GuestServerOptions { administration, settings, primary: None, configuration, major_version };
        Ok(Some(GuestServer::new(machine.clone(), options)))
    }

    fn is_of_cluster(&self, name: &MachineName) -> Result<bool, HostError> {
        let state = ClusterState::read(&self.directory.state_file())?;
        let state = state.filter(|state| state.runtime == Runtime::Vm);
        Ok(state.is_some_and(|state| state.topology.servers().any(|server| server.name == name.as_str())))
    }

    pub(super) fn refuse_clusters(&self, name: &MachineName, remedy: &str) -> Result<(), HostError> {
        if !self.is_of_cluster(name)? {
            return Ok(());
        }
        let (directory, remedy) = (self.directory.root().to_owned(), remedy.to_owned());
        Err(MachineError::OfCluster { name: name.clone(), directory, remedy }.into())
    }
}

/// A card of its own, where none was chosen: no other machine has it, on whatever host.
pub(super) fn with_card(network: BridgedNetwork) -> BridgedNetwork {
    let mac = network.mac.unwrap_or_else(|| HardwareAddress::local(rand::rng().random()));
    BridgedNetwork { mac: Some(mac), ..network }
}

fn new_password() -> String {
    rand::rng().sample_iter(Alphanumeric).take(PASSWORD_CHARACTERS).map(char::from).collect()
}
