//! A person's own machines, beside those of the cluster in the same directory: what `onecopy vm` does.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use onecopy_guest_agent::protocol::{Answer, Bytes, Command, Execute, Executed};
use onecopy_hypervisor::Qemu;
use onecopy_machine::{
    END_TIMEOUT, Forward, GUEST_PORT, GuestImage, GuestServer, GuestServerOptions, Machine, MachineEnd, MachineError,
    MachineHome, MachineName, MachineOverrides, MachineStatus, hypervisor_failed,
};
use onecopy_postgres::{ConnectionParameters, Instance, Role, ServiceUser, recommended_settings};
use rand::RngExt;
use rand::distr::Alphanumeric;
use serde::Serialize;

use super::runtime::free_port;
use super::serving::pool_setting;
use crate::state::{ClusterState, Runtime};
use crate::{Directory, HostError, Progress};

/// Letters and digits of a password, as with a cluster's.
const PASSWORD_CHARACTERS: usize = 32;

/// How long a guest that boots, or whose keeper was killed, is waited for before a program runs in it.
const EXECUTE_PATIENCE: Duration = Duration::from_secs(60);

/// The machines of a directory.
#[derive(Debug, Clone)]
pub struct Machines {
    directory: Directory,
    user: ServiceUser,
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
        Ok(Machines { directory, user: ServiceUser::resolve(None)? })
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
        let machines = MachineHome::names(&self.directory.machines())?.iter().map(ToString::to_string).collect();
        let (name, directory) = (name.to_string(), self.directory.root().to_owned());
        Err(MachineError::NotThere { name, directory, machines }.into())
    }

    /// All, in the order of their names.
    ///
    /// # Errors
    /// [`HostError::File`], [`MachineError::InvalidFile`].
    pub async fn list(&self) -> Result<Vec<MachineSummary>, HostError> {
        let mut list = Vec::new();
        for name in MachineHome::names(&self.directory.machines())? {
            let machine = Machine::new(MachineHome::of(&self.directory.machines(), &name), self.user.clone());
            // What is being made or removed just now is none.
            let Some(status) = machine.observe().await else { continue };
            let configuration = machine.home().configuration()?;
            list.push(MachineSummary {
                of_cluster: self.is_of_cluster(&name)?,
                postgresql: configuration.postgresql,
                forwards: configuration.forwards,
                machine: status,
                end: machine.home().end(),
                name,
            });
        }
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
        Qemu::find().map_err(|error| hypervisor_failed(&new.name, error))?;
        let template = new.overrides.applied_to(None)?;
        if new.postgresql && GuestImage::find(Some(&template.image))?.postgresql_major.is_none() {
            let (directory, reason) = (template.image, "it has no PostgreSQL".to_owned());
            return Err(MachineError::NoImage { directory, reason }.into());
        }
        let configuration = template.configuration(self.ports(new)?, new.postgresql);
        configuration.check()?;
        self.directory.make_root()?;
        self.directory.make_machines()?;
        let password = new.postgresql.then(new_password);
        let (user, made) = (self.user.clone(), home.clone());
        let made = tokio::task::spawn_blocking(move || made.make(&configuration, password.as_deref(), &user)).await;
        made.unwrap_or_else(|error| Err(MachineError::Task(format!("making a machine ended: {error}"))))?;
        Ok(Machine::new(home, self.user.clone()))
    }

    /// The ports as they shall be: any free one where that was asked for, and one to the server, if there shall be one.
    fn ports(&self, new: &NewMachine) -> Result<Vec<Forward>, HostError> {
        let mut forwards = new.forwards.clone();
        if new.postgresql && !forwards.iter().any(|forward| forward.guest_port == GUEST_PORT) {
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

    /// Removes a machine that does not run, with its disk.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], [`MachineError::Runs`], [`HostError::File`].
    pub async fn delete(&self, name: &MachineName) -> Result<(), HostError> {
        let machine = self.get(name)?;
        self.refuse_clusters(
            name,
            "have fewer followers with `onecopy scale`, or make one anew with `onecopy reinit`",
        )?;
        if machine.process_id().is_some() || machine.home().has_keeper() {
            return Err(MachineError::Runs { name: name.clone() }.into());
        }
        let home = machine.home().clone();
        let removed = tokio::task::spawn_blocking(move || home.remove()).await;
        Ok(removed.unwrap_or_else(|error| Err(MachineError::Task(format!("removing a machine ended: {error}"))))?)
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
        machine.wait_answering(EXECUTE_PATIENCE).await?;
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
        let port = configuration.host_port(GUEST_PORT).filter(|_| configuration.postgresql);
        let Some(port) = port.filter(|_| machine.home().password_file().exists()) else { return Ok(None) };
        let path = machine.home().password_file();
        let password = fs::read_to_string(&path).map_err(HostError::file("read", &path))?;
        Ok(Some(ConnectionParameters {
            host: "127.0.0.1".to_owned(),
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
        Ok(state.is_some_and(|state| state.servers.iter().any(|server| server.name == name.as_str())))
    }

    fn refuse_clusters(&self, name: &MachineName, remedy: &str) -> Result<(), HostError> {
        if !self.is_of_cluster(name)? {
            return Ok(());
        }
        let (directory, remedy) = (self.directory.root().to_owned(), remedy.to_owned());
        Err(MachineError::OfCluster { name: name.clone(), directory, remedy }.into())
    }
}

fn new_password() -> String {
    rand::rng().sample_iter(Alphanumeric).take(PASSWORD_CHARACTERS).map(char::from).collect()
}
