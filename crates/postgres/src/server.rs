//! One server: its data directory and its postmaster.
//!
//! The postmaster is a direct child in a session of its own (Ctrl-C in a terminal does not reach it, nor does it reach
//! the terminal); when this process ends, it runs on, and the next [`Server::start`] takes it over by its
//! `postmaster.pid`.

use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio_postgres::error::SqlState;

use crate::beneath::Directory;
use crate::log_tail::LogFile;
use crate::postmaster::{self, PidFile, Status, StopMode};
use crate::process::lives;
use crate::processes::{self, ServerProcesses};
use crate::{
    ConnectionParameters, ControlFile, InheritedDescriptor, PostgresError, ServerOptions, Settings, StandbyOptions,
    configuration_files, inherited, initialize,
};

/// How often a starting or stopping server is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often a running server is looked at: how late its death is noticed, at most.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Children of a dead postmaster notice its death at once; those that do not are killed after this.
const ORPHANS_TIMEOUT: Duration = Duration::from_secs(5);
/// What is killed ends when the disk has done what it was asked for: that of a busy one may take so long.
const ORPHANS_END_TIMEOUT: Duration = Duration::from_secs(60);

/// What [`Server::start`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartOutcome {
    /// It started a postmaster.
    Started,
    /// One was running already and is taken over.
    Adopted,
}

/// A PostgreSQL server, running or not. All methods take `&self`: share it in an `Arc`.
#[derive(Debug)]
pub struct Server {
    options: ServerOptions,
    data_directory: PathBuf,
    log: LogFile,
    /// Locked for moments only, never over an await.
    changing: Mutex<Changing>,
    /// Held over a whole start or stop: they exclude each other.
    transition: tokio::sync::Mutex<()>,
}

/// What changes over a server's life.
#[derive(Debug)]
struct Changing {
    settings: Settings,
    /// The postmaster, if it is our child.
    child: Option<Child>,
    /// What every postmaster is given, the first one and those after it.
    inherited: Vec<InheritedDescriptor>,
}

/// What the data directory was made by. Where the top `PG_VERSION` is a link, only who inherits what it points to may
/// read it; and whoever else has a descriptor of that number would read something foreign: the control file tells then.
fn major_version(data_directory: &Path) -> Option<u32> {
    let path = data_directory.join("PG_VERSION");
    if std::fs::symlink_metadata(&path).ok()?.is_symlink() {
        return ControlFile::read(data_directory).ok().map(|control| control.major_version);
    }
    let read = Directory::open(data_directory).and_then(|directory| directory.read_to_string(Path::new("PG_VERSION")));
    read.ok()?.trim().parse().ok()
}

impl Server {
    /// Makes a new data directory (checksums, UTF-8, SCRAM); does not start.
    ///
    /// # Errors
    /// [`PostgresError::DataDirectoryNotEmpty`], [`PostgresError::NotReachable`], [`PostgresError::SocketPathTooLong`],
    /// [`PostgresError::InvalidSetting`] for a password that cannot be set, [`PostgresError::Program`] with what initdb
    /// said.
    pub async fn create(options: ServerOptions) -> Result<Server, PostgresError> {
        let options = options.checked()?;
        initialize::initialize(&options).await?;
        Server::open(options).await
    }

    /// Opens an existing data directory, running or not.
    ///
    /// # Errors
    /// [`PostgresError::NotADataDirectory`], [`PostgresError::VersionMismatch`], [`PostgresError::SocketPathTooLong`].
    pub async fn open(options: ServerOptions) -> Result<Server, PostgresError> {
        let options = options.checked()?;
        let data_directory = options.data_directory();
        let data = major_version(&data_directory)
            .ok_or_else(|| PostgresError::NotADataDirectory { path: data_directory.clone() })?;
        let programs = options.binaries.major_version();
        if data != programs {
            return Err(PostgresError::VersionMismatch { path: data_directory, data, programs });
        }
        Ok(Server {
            log: LogFile::new(options.home.join("server.log")),
            changing: Mutex::new(Changing { settings: options.settings.clone(), child: None, inherited: Vec::new() }),
            transition: tokio::sync::Mutex::new(()),
            data_directory,
            options,
        })
    }

    /// What it was made of; the settings may have changed since.
    pub fn options(&self) -> &ServerOptions {
        &self.options
    }

    /// The data directory.
    pub fn data_directory(&self) -> &Path {
        &self.data_directory
    }

    /// The server's log file.
    pub fn log_file(&self) -> &Path {
        self.log.path()
    }

    /// The last complaints in the server's log.
    pub fn log_complaints(&self) -> String {
        self.log_complaints_since(0)
    }

    /// The last complaints that came after the log had this length in bytes.
    pub(crate) fn log_complaints_since(&self, log_start: u64) -> String {
        self.log.complaints(log_start)
    }

    /// The length of the log in bytes.
    pub(crate) fn log_end(&self) -> u64 {
        self.log.end()
    }

    /// How its superuser reaches it over TCP, database `postgres`.
    pub fn connection(&self) -> ConnectionParameters {
        self.options.connection_at(self.options.listen_address.clone())
    }

    /// How its superuser reaches it over the Unix socket, database `postgres`.
    pub fn socket_connection(&self) -> ConnectionParameters {
        self.options.connection_at(self.options.socket_directory().to_string_lossy().into_owned())
    }

    /// The configured settings, without addresses, port and sockets.
    pub fn settings(&self) -> Settings {
        self.changing().settings.clone()
    }

    /// Replaces the settings; they count from the next start or [`Server::reload`].
    pub fn set_settings(&self, settings: Settings) {
        self.changing().settings = settings;
    }

    /// Gives these descriptors to every postmaster that is started from now on, also to those that a supervisor starts.
    /// They are held open until others are set.
    pub fn set_inherited(&self, descriptors: Vec<InheritedDescriptor>) {
        self.changing().inherited = descriptors;
    }

    /// Writes the configuration, starts the postmaster and waits until it accepts connections; or takes over one that
    /// runs.
    ///
    /// A server that is not ready in time goes on starting (it may be recovering): call it again to wait on.
    ///
    /// # Errors
    /// [`PostgresError::StartFailed`] and [`PostgresError::NotReady`] with the server's own words,
    /// [`PostgresError::RunningOnOtherPort`], [`PostgresError::Connect`] when the superuser cannot log in.
    pub async fn start(&self) -> Result<StartOutcome, PostgresError> {
        let _transition = self.transition.lock().await;
        let log_start = self.log.end();
        if self.is_running() {
            self.wait_accepting(self.options.start_timeout, log_start).await?;
            return Ok(StartOutcome::Adopted);
        }
        self.end_orphans().await?;
        self.remove_dead_locks()?;
        self.log.bound(&self.options.user)?;
        let log_start = self.log.end();
        self.spawn_postmaster()?;
        self.wait_accepting(self.options.start_timeout, log_start).await?;
        Ok(StartOutcome::Started)
    }

    fn remove_dead_locks(&self) -> Result<(), PostgresError> {
        let socket_lock = self.options.socket().with_added_extension("lock");
        for path in [self.data_directory.join("postmaster.pid"), socket_lock] {
            postmaster::remove_dead_lock(&path, &self.options.user).map_err(PostgresError::file("remove", path))?;
        }
        Ok(())
    }

    fn spawn_postmaster(&self) -> Result<(), PostgresError> {
        let user = &self.options.user;
        user.check_reachable(&self.data_directory)?;
        user.create_directory(&self.options.socket_directory())?;
        configuration_files::write(&self.options, &self.data_directory, &self.settings())?;
        let log = self.log.open(user)?;
        let copy = log.try_clone().map_err(PostgresError::file("open", self.log.path()))?;
        let program = self.options.binaries.program("postgres");
        let mut command = user.command(&program);
        // It goes there itself, later: so it is known for one of this server's from the first moment on.
        command.current_dir(&self.data_directory).arg(postmaster::DIRECTORY_OPTION).arg(&self.data_directory);
        command.stdout(copy).stderr(log);
        let not_spawned = |source| PostgresError::Spawn { program, source };
        let inherited = self.changing().inherited.clone();
        command.args(inherited::arguments(&inherited, self.options.binaries.major_version()));
        let child =
            inherited::hand_down(&mut command, &inherited).and_then(|()| command.spawn()).map_err(not_spawned)?;
        self.changing().child = Some(child);
        Ok(())
    }

    /// Waits until it accepts connections.
    ///
    /// # Errors
    /// [`PostgresError::NotReady`], [`PostgresError::StartFailed`] when it ends instead, [`PostgresError::Connect`]
    /// when the superuser cannot log in.
    pub async fn wait_ready(&self, timeout: Duration) -> Result<(), PostgresError> {
        self.wait_accepting(timeout, self.log.end()).await
    }

    async fn wait_accepting(&self, timeout: Duration, log_start: u64) -> Result<(), PostgresError> {
        let begin = Instant::now();
        let path = || self.data_directory.clone();
        loop {
            if let Some(ended) = self.ended() {
                let status = ended.map_or_else(|| "it is not running".to_owned(), |status| status.to_string());
                let log = self.log.complaints(log_start);
                return Err(PostgresError::StartFailed { path: path(), status, log });
            }
            let last = match PidFile::of_live_server(&self.data_directory) {
                Some(file) => {
                    self.check_port(&file)?;
                    match file.status {
                        Status::Ready | Status::Standby => match self.try_login().await? {
                            None => return Ok(()),
                            Some(refusal) => refusal,
                        },
                        Status::Starting => "it is starting".to_owned(),
                        Status::Stopping => "it is stopping".to_owned(),
                    }
                }
                None => "the postmaster has just begun".to_owned(),
            };
            if begin.elapsed() >= timeout {
                return Err(PostgresError::NotReady {
                    path: path(),
                    waited: timeout,
                    last,
                    log: self.log.complaints(log_start),
                });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Logs in once: none is success, a text is a refusal that may pass.
    async fn try_login(&self) -> Result<Option<String>, PostgresError> {
        match self.socket_connection().connect().await {
            Ok(_) => Ok(None),
            Err(PostgresError::Connect { target, source }) => match source.code() {
                // Full is a way of being ready.
                Some(code) if *code == SqlState::TOO_MANY_CONNECTIONS => Ok(None),
                Some(code) if *code != SqlState::CANNOT_CONNECT_NOW => Err(PostgresError::Connect { target, source }),
                _ => Ok(Some(PostgresError::Connect { target, source }.to_string())),
            },
            Err(passing) => Ok(Some(passing.to_string())),
        }
    }

    /// Nobody answers at the configured port when a server that is taken over has another one.
    fn check_port(&self, file: &PidFile) -> Result<(), PostgresError> {
        match file.port.filter(|found| *found != self.options.port) {
            Some(found) => Err(PostgresError::RunningOnOtherPort {
                path: self.data_directory.clone(),
                process_id: file.process_id,
                found,
                wanted: self.options.port,
            }),
            None => Ok(()),
        }
    }

    /// Stops it and waits until all its processes are gone, also when somebody else has begun it a moment ago; a server
    /// that does not run is stopped already.
    ///
    /// # Errors
    /// [`PostgresError::NotStopped`] after the stop timeout.
    pub async fn stop(&self, mode: StopMode) -> Result<(), PostgresError> {
        let _transition = self.transition.lock().await;
        if let Some(process_id) =
            self.process_id().or_else(|| postmaster::begun_in(&self.data_directory, &self.options.user))
        {
            self.signal_and_wait(process_id, mode.signal()).await?;
        }
        self.end_orphans().await
    }

    /// Stops and starts.
    ///
    /// # Errors
    /// Those of [`Server::stop`] and [`Server::start`].
    pub async fn restart(&self, mode: StopMode) -> Result<(), PostgresError> {
        self.stop(mode).await?;
        self.start().await.map(|_| ())
    }

    /// Kills the postmaster (SIGKILL) and waits until its children are gone, as a crash would leave it.
    ///
    /// # Errors
    /// [`PostgresError::NotRunning`], [`PostgresError::NotStopped`].
    pub async fn crash_stop(&self) -> Result<(), PostgresError> {
        let _transition = self.transition.lock().await;
        let not_running = || PostgresError::NotRunning { path: self.data_directory.clone() };
        let process_id = self.process_id().ok_or_else(not_running)?;
        self.signal_and_wait(process_id, Signal::KILL).await?;
        self.end_orphans().await
    }

    async fn signal_and_wait(&self, process_id: u32, signal: Signal) -> Result<(), PostgresError> {
        let log_start = self.log.end();
        let begin = Instant::now();
        self.signal(process_id, signal);
        while self.is_running() || lives(process_id) {
            if begin.elapsed() >= self.options.stop_timeout {
                return Err(self.not_stopped(process_id, self.options.stop_timeout, log_start));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Sends a signal to its postmaster, which may be gone meanwhile.
    fn signal(&self, process_id: u32, signal: Signal) {
        // Our own child is known by its number, wherever its directory has come to lie.
        if let Some(child) = self.changing().child.as_ref().filter(|child| child.id() == process_id) {
            return processes::signal_child(child, signal);
        }
        if let Some(server) = self.processes() {
            server.signal(process_id, signal);
        }
    }

    /// Its processes; none where its data directory cannot be opened or is not of its account.
    fn processes(&self) -> Option<ServerProcesses> {
        ServerProcesses::of_user(&self.data_directory, &self.options.user).ok()
    }

    /// Waits until nothing of a dead postmaster is left: a new one refuses to start while its shared memory is in use.
    async fn end_orphans(&self) -> Result<(), PostgresError> {
        let begin = Instant::now();
        loop {
            let Some(server) = self.processes() else { return Ok(()) };
            let orphans = server.all();
            let Some(first) = orphans.first() else { return Ok(()) };
            if begin.elapsed() >= ORPHANS_END_TIMEOUT {
                return Err(self.not_stopped(*first, ORPHANS_END_TIMEOUT, self.log.end()));
            }
            if begin.elapsed() >= ORPHANS_TIMEOUT {
                orphans.iter().for_each(|orphan| server.signal(*orphan, Signal::KILL));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn not_stopped(&self, process_id: u32, waited: Duration, log_start: u64) -> PostgresError {
        let log = self.log.complaints(log_start);
        PostgresError::NotStopped { path: self.data_directory.clone(), process_id, waited, log }
    }

    /// Writes the configuration and makes the server read it; what needs a restart waits for one.
    ///
    /// # Errors
    /// [`PostgresError::NotRunning`], [`PostgresError::File`].
    pub async fn reload(&self) -> Result<(), PostgresError> {
        let _transition = self.transition.lock().await;
        let not_running = || PostgresError::NotRunning { path: self.data_directory.clone() };
        let process_id = self.process_id().ok_or_else(not_running)?;
        configuration_files::write(&self.options, &self.data_directory, &self.settings())?;
        self.signal(process_id, Signal::HUP);
        Ok(())
    }

    /// Whether its postmaster runs.
    pub fn is_running(&self) -> bool {
        self.process_id().is_some()
    }

    /// The postmaster's process id, when it runs.
    pub fn process_id(&self) -> Option<u32> {
        match self.ended() {
            Some(_) => None,
            None => {
                let own = self.changing().child.as_ref().map(Child::id);
                own.or_else(|| PidFile::of_live_server(&self.data_directory).map(|file| file.process_id))
            }
        }
    }

    /// None while it runs; how it ended, if it was our child and that is known.
    fn ended(&self) -> Option<Option<ExitStatus>> {
        let mut changing = self.changing();
        if let Some(child) = &mut changing.child {
            match child.try_wait() {
                Ok(None) => return None,
                Ok(Some(status)) => {
                    changing.child = None;
                    return Some(Some(status));
                }
                // Somebody else has reaped it: its lock file tells.
                Err(_) => changing.child = None,
            }
        }
        PidFile::of_live_server(&self.data_directory).is_none().then_some(None)
    }

    /// Waits until its postmaster is gone, for whatever reason.
    pub async fn wait_exit(&self) {
        while self.is_running() {
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    }

    /// Cuts the log when it has become too long.
    pub(crate) fn bound_log(&self) -> Result<(), PostgresError> {
        self.log.bound(&self.options.user)
    }

    /// Reads its control file; also while it runs.
    ///
    /// # Errors
    /// [`PostgresError::File`], [`PostgresError::ControlFile`].
    pub fn control_file(&self) -> Result<ControlFile, PostgresError> {
        ControlFile::read(&self.data_directory)
    }

    /// Makes it a standby from its next start on (`standby.signal`, `primary_conninfo`, slot). A running standby
    /// follows another primary after this and [`Server::reload`].
    ///
    /// # Errors
    /// [`PostgresError::File`], [`PostgresError::InvalidSetting`].
    pub fn make_standby(&self, standby: &StandbyOptions) -> Result<(), PostgresError> {
        configuration_files::write_standby(&self.options, &self.data_directory, standby)
    }

    fn changing(&self) -> MutexGuard<'_, Changing> {
        self.changing.lock().expect("nothing panics while it holds this lock")
    }
}
