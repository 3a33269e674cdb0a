//! One machine, reached through its keeper.

mod checkpoints;
mod migrating;

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use onecopy_control::{JsonLines, socket};
use onecopy_guest_agent::protocol::{Answer, Command, FailureKind, Progress};
use onecopy_postgres::ServiceUser;
use rustix::process::Signal;

use super::files::absent_is_fine;
use super::fork::StartPoint;
use super::keeper::{
    CLOSE_TIMEOUT, KeeperReply, KeeperRequest, KeeperStatus, MachineState, Role, clear_memory, clear_network,
    end_left_servers, is_private, server_of,
};
use super::memory_server::ANSWER_TIMEOUT as RELEASE_TIMEOUT;
use super::{MachineConfiguration, MachineError, MachineHome};
use onecopy_directory::{DirectoryLock, LockState};

/// The subcommand of this program that is a keeper.
pub const KEEPER_COMMAND: &str = "machine-keeper";

/// What this command is told that shall begin no machine.
const TAKE_OVER_OPTION: &str = "--take-over";

/// The kernel's way to the file that a process runs, also when that has no name any more; see proc_pid_exe(5).
const OWN_PROGRAM: &str = "/proc/self/exe";

/// How long a guest may take until its agent answers: without hardware help, on a busy host, ten times the usual.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(180);

/// How long a guest may take to end by itself. Its agent gives the server 60 s to stop, and then 60 s more to stop at
/// once; the rest is for the guest.
pub const END_TIMEOUT: Duration = Duration::from_secs(180);

/// How long one may take that looks whether a lock is held.
const LOCK_LOOK_TIMEOUT: Duration = Duration::from_millis(200);

/// How long a keeper that was started may take to listen; also how long its disk server may take to close the disk.
const KEEPER_TIMEOUT: Duration = CLOSE_TIMEOUT.saturating_add(Duration::from_secs(30));

/// How often the lock is tried.
const LOCK_LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// How long a keeper may take to listen, and to say how its machine is.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a machine may take to stand, or to run again: QEMU has 30 s, and there are two ways to it.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(90);

/// How long a checkpoint may take until it is durable.
pub(crate) const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(600);

/// What is added to the time of a command for the way there and back.
const WAY_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked how far a machine is.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The longest reply: an agent's line, with its envelope.
const REPLY_BYTES_MAX: usize = 8 << 20;

/// The keeper's log is begun anew when it is longer; the old one is kept beside it.
const LOG_BYTES_MAX: u64 = 4 << 20;

/// What the guest's agent did not do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestRefusal {
    /// Why, for programs; none where it was not the agent that refused.
    pub kind: Option<FailureKind>,
    /// Why, for people.
    pub message: String,
}

/// One machine that was made.
#[derive(Debug, Clone)]
pub struct Machine {
    home: MachineHome,
    user: ServiceUser,
}

impl Machine {
    /// The machine in `home`; its processes run as `user`.
    pub fn new(home: MachineHome, user: ServiceUser) -> Machine {
        Machine { home, user }
    }

    /// Where it is.
    pub fn home(&self) -> &MachineHome {
        &self.home
    }

    /// Changes what it is made of, from its next start on.
    ///
    /// # Errors
    /// As [`MachineConfiguration::write`].
    pub fn write_configuration(&self, configuration: &MachineConfiguration) -> Result<(), MachineError> {
        configuration.write(&self.home.configuration_file())
    }

    /// Starts it, or takes over what runs of it, and waits until the guest's agent answers. Whether it had to be
    /// started.
    ///
    /// # Errors
    /// [`MachineError::Ended`] with its last words, [`MachineError::Keeper`], [`MachineError::Directory`].
    pub async fn start(&self) -> Result<bool, MachineError> {
        let begun = Instant::now();
        // Of one that has ended a keeper closes what served it: the next one begins.
        while begun.elapsed() < KEEPER_TIMEOUT
            && self.process_id().is_none()
            && matches!(self.status().await, Ok(KeeperStatus { state: MachineState::Stopping, .. }))
        {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        let is_new = self.process_id().is_none();
        self.spawn_missing_keeper(false).await?;
        self.wait_running(BOOT_TIMEOUT).await?;
        Ok(is_new)
    }

    /// Waits until the agent of a machine that runs answers; one that has ended is not begun.
    ///
    /// # Errors
    /// As [`Machine::start`].
    pub async fn wait_answering(&self, timeout: Duration) -> Result<(), MachineError> {
        self.spawn_missing_keeper(true).await?;
        self.wait_running(timeout).await
    }

    /// Waits for what its keeper, who was started, makes of it.
    async fn wait_running(&self, timeout: Duration) -> Result<(), MachineError> {
        let begun = Instant::now();
        loop {
            let seen = match self.status().await {
                Ok(KeeperStatus { state: MachineState::Running, .. }) => return Ok(()),
                // It would be waited for in vain.
                Ok(KeeperStatus { state: MachineState::Paused, .. }) => {
                    return Err(MachineError::Paused { name: self.home.name().clone() });
                }
                Ok(KeeperStatus { state: MachineState::Migrated, .. }) => {
                    return Err(MachineError::Moved { name: self.home.name().clone() });
                }
                Ok(status) => format!("has a guest that is {}", status.state.as_str()),
                // It is only beginning, or it has ended.
                Err(error) => {
                    if !self.home.has_keeper() {
                        return Err(self.ended(error));
                    }
                    "does not answer".to_owned()
                }
            };
            if begun.elapsed() >= timeout {
                return Err(self.keeper_failed(format!("{seen} after {} s", timeout.as_secs())));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Whether it runs with memory that checkpoints can be taken of: a file of ours, which it does not share.
    pub fn can_be_checkpointed(&self) -> bool {
        let is_wanted = self.home.configuration().is_ok_and(|configuration| configuration.checkpoints);
        is_wanted && self.process_id().is_some() && !is_private(&self.home)
    }

    /// Makes somebody look after a machine that runs; nothing happens where somebody does.
    ///
    /// # Errors
    /// [`MachineError::Directory`], [`MachineError::Keeper`].
    pub async fn ensure_keeper(&self) -> Result<(), MachineError> {
        let begun = Instant::now();
        self.spawn_missing_keeper(true).await?;
        while !self.is_kept().await {
            if !self.home.has_keeper() {
                return Err(self.ended(self.keeper_failed("ended as soon as it was started".to_owned())));
            }
            if begun.elapsed() >= ANSWER_TIMEOUT {
                return Err(self.keeper_failed("does not answer".to_owned()));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    /// Makes its processors stand, or run again; what it shall do is remembered, whoever looks after it next.
    ///
    /// # Errors
    /// [`MachineError::DoesNotRun`], [`MachineError::Keeper`] with what QEMU says, or that it must not run any more.
    pub async fn set_paused(&self, is_wanted: bool) -> Result<(), MachineError> {
        if self.process_id().is_none() {
            return Err(MachineError::DoesNotRun { name: self.home.name().clone() });
        }
        self.ensure_keeper().await?;
        let begun = Instant::now();
        while self.status().await?.process_id.is_none() {
            if begun.elapsed() >= KEEPER_TIMEOUT {
                return Err(self.keeper_failed("does not reach the machine".to_owned()));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        let request = if is_wanted { KeeperRequest::Pause {} } else { KeeperRequest::Resume {} };
        self.done(&request, PAUSE_TIMEOUT).await
    }

    /// Ends it cleanly (the guest stops its server, and switches off), or at once with `force`. One that does not run
    /// has ended already.
    ///
    /// # Errors
    /// [`MachineError::Keeper`], [`MachineError::Directory`].
    pub async fn stop(&self, force: bool, timeout: Duration) -> Result<(), MachineError> {
        if !self.wait_kept_or_gone().await? {
            if !self.home.root().exists() {
                return Ok(());
            }
            // Held: nobody starts it meanwhile.
            if let Some(_lock) = self.take_keeper_lock().await?
                && self.home.find_process()?.is_none()
            {
                return self.end_left_servers().await;
            }
            // Somebody must write back what the disk has not got yet.
            match self.ensure_keeper().await {
                Err(_) if self.process_id().is_none() => return self.wait_gone().await,
                kept => kept?,
            }
        }
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let request = KeeperRequest::Stop { force, timeout_ms };
        let reply = self.ask(&request, timeout + ANSWER_TIMEOUT + WAY_TIMEOUT, &|_| ()).await;
        match reply {
            Ok(KeeperReply::Stopped {}) => self.wait_gone().await,
            Ok(KeeperReply::Error { message, .. }) => Err(self.keeper_failed(message)),
            Ok(other) => Err(self.keeper_failed(format!("answered {other:?}"))),
            // It has ended meanwhile, with its machine.
            Err(_) if !self.is_kept().await && self.process_id().is_none() => self.wait_gone().await,
            Err(error) => Err(error),
        }
    }

    /// Puts the cable into the network card of a fork that began without.
    ///
    /// # Errors
    /// [`MachineError::Keeper`].
    pub async fn connect(&self) -> Result<(), MachineError> {
        self.done(&KeeperRequest::Connect {}, PAUSE_TIMEOUT).await
    }

    async fn done(&self, request: &KeeperRequest, timeout: Duration) -> Result<(), MachineError> {
        match self.ask(request, timeout, &|_| ()).await? {
            KeeperReply::Done {} => Ok(()),
            KeeperReply::Error { message, .. } => Err(self.keeper_failed(message)),
            other => Err(self.keeper_failed(format!("answered {other:?}"))),
        }
    }

    /// Whether a keeper listens: one that is beginning is waited for, and one that is ending until it has ended.
    async fn wait_kept_or_gone(&self) -> Result<bool, MachineError> {
        let begun = Instant::now();
        loop {
            if self.is_kept().await {
                return Ok(true);
            }
            if !self.home.has_keeper() {
                return Ok(false);
            }
            if begun.elapsed() >= KEEPER_TIMEOUT {
                return Err(self.keeper_failed("neither listens nor ends".to_owned()));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Ends the servers of disk and memory whose keeper and machine are dead.
    async fn end_left_servers(&self) -> Result<(), MachineError> {
        let home = self.home.clone();
        let ended = tokio::task::spawn_blocking(move || {
            end_left_servers(&home, Signal::TERM);
            match Role::ALL.into_iter().find_map(|role| Some((role, server_of(role, &home)?))) {
                Some(left) => Ok(Some(left)),
                None => clear_network(&home).and_then(|()| clear_memory(&home)).map(|()| None),
            }
        });
        match ended.await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some((role, left)))) => {
                Err(self.keeper_failed(format!("is gone, and its {role} (process {left}) does not end")))
            }
            Ok(Err(error)) => Err(error),
            Err(error) => Err(MachineError::Task(format!("ending a machine's servers ended: {error}"))),
        }
    }

    /// The keeper ends after its last answer; the machine can only be started again, or removed, without it.
    async fn wait_gone(&self) -> Result<(), MachineError> {
        let begun = Instant::now();
        while self.home.has_keeper() {
            if begun.elapsed() >= ANSWER_TIMEOUT {
                return Err(self.keeper_failed("does not end".to_owned()));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    /// How it is, as its keeper says.
    ///
    /// # Errors
    /// [`MachineError::Keeper`] when nobody listens or the answer is strange.
    pub async fn status(&self) -> Result<KeeperStatus, MachineError> {
        match self.ask(&KeeperRequest::Status {}, ANSWER_TIMEOUT, &|_| ()).await? {
            KeeperReply::Status(status) => Ok(status),
            other => Err(self.keeper_failed(format!("answered {other:?}"))),
        }
    }

    /// Lets the guest's agent do something.
    ///
    /// # Errors
    /// [`MachineError::DoesNotRun`], [`MachineError::Keeper`]; a refusal of the agent is the inner result.
    pub async fn agent(
        &self,
        command: Command,
        timeout: Duration,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Result<Answer, GuestRefusal>, MachineError> {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let request = KeeperRequest::Agent { command, timeout_ms };
        match self.ask(&request, timeout.saturating_add(WAY_TIMEOUT), progress).await? {
            KeeperReply::Agent(answer) => Ok(Ok(answer)),
            KeeperReply::Error { kind, message } => Ok(Err(GuestRefusal { kind, message })),
            other => Err(self.keeper_failed(format!("answered {other:?}"))),
        }
    }

    /// The same, where a refusal is an error; `action` says what it was for.
    ///
    /// # Errors
    /// [`MachineError::Guest`] with the agent's words, and as [`Machine::agent`].
    pub async fn ask_agent(
        &self,
        action: &str,
        command: Command,
        timeout: Duration,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Answer, MachineError> {
        let answer = self.agent(command, timeout, progress).await?;
        answer.map_err(|refusal| {
            let (machine, action, reason) = (self.home.name().to_string(), action.to_owned(), refusal.message);
            MachineError::Guest { machine, action, reason }
        })
    }

    /// Whether somebody looks after it.
    pub async fn is_kept(&self) -> bool {
        socket::connect(&self.home.keeper_socket()).await.is_ok()
    }

    /// QEMU's process, while it runs, also without a keeper.
    pub fn process_id(&self) -> Option<u32> {
        self.home.process_id()
    }

    /// Holds the keeper's lock from before there is one, and hands it down: whoever looks sees that somebody is about
    /// to look after it. With `takes_over` that keeper begins no machine.
    async fn spawn_missing_keeper(&self, takes_over: bool) -> Result<(), MachineError> {
        let Some(lock) = self.take_keeper_lock().await? else { return Ok(()) };
        // The start point of a command that was killed before anybody took it is none of this start; but a fork that
        // has never begun has nothing else to begin with: what disks there are, are of others before it.
        let has_own_disk = self.home.disk().exists() && !self.home.layers_file().exists();
        let begins_as_fork = match StartPoint::of(&self.home) {
            Err(_) if has_own_disk => false,
            start_point => matches!(start_point?, Some(StartPoint { parent: Some(_), .. })),
        };
        if self.home.disk().exists() && !begins_as_fork {
            let start_point = self.home.restore_file();
            absent_is_fine(fs::remove_file(&start_point)).map_err(MachineError::file("remove", &start_point))?;
        }
        self.spawn_keeper(&lock, takes_over)
    }

    fn spawn_keeper(&self, lock: &DirectoryLock, takes_over: bool) -> Result<(), MachineError> {
        self.home.make_run(&self.user)?;
        let log_path = self.home.keeper_log();
        if fs::metadata(&log_path).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
            let old = log_path.with_extension("log.1");
            fs::rename(&log_path, &old).map_err(MachineError::file("rename", &log_path))?;
        }
        let log = OpenOptions::new().create(true).append(true).mode(0o644).open(&log_path);
        let log = log.map_err(MachineError::file("open", &log_path))?;
        // As this account: it gives QEMU the devices that only it may open, and lets QEMU run as another one.
        let mut command = tokio::process::Command::new(OWN_PROGRAM);
        command
            .current_dir("/")
            .arg(KEEPER_COMMAND)
            .args(takes_over.then_some(TAKE_OVER_OPTION))
            .arg(self.home.root())
            .stdin(lock.for_standard_input().map_err(MachineError::file("hand down", self.home.keeper_lock()))?)
            .stdout(Stdio::null())
            .stderr(log);
        // Dropped, it goes on; tokio looks after its end.
        command.spawn().map_err(MachineError::file("run the keeper", Path::new(OWN_PROGRAM))).map(|_| ())
    }

    /// The keeper's lock; none when there is a keeper.
    async fn take_keeper_lock(&self) -> Result<Option<DirectoryLock>, MachineError> {
        let begun = Instant::now();
        loop {
            match DirectoryLock::take(&self.home.keeper_lock())? {
                LockState::Taken(lock) => return Ok(Some(lock)),
                LockState::HeldBy(_) if begun.elapsed() >= LOCK_LOOK_TIMEOUT => return Ok(None),
                LockState::HeldBy(_) if self.is_kept().await => return Ok(None),
                // Perhaps only by somebody who looks.
                LockState::HeldBy(_) => tokio::time::sleep(LOCK_LOOK_INTERVAL).await,
            }
        }
    }

    /// Sends a request and returns the last reply.
    async fn ask(
        &self,
        request: &KeeperRequest,
        timeout: Duration,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<KeeperReply, MachineError> {
        let conversation = async {
            let stream = socket::connect(&self.home.keeper_socket()).await?;
            let mut lines = JsonLines::new(stream, REPLY_BYTES_MAX);
            lines.send(request).await?;
            loop {
                let reply = lines.receive().await?;
                match reply.ok_or_else(|| io::Error::other("it ended in the middle of its answer"))?? {
                    KeeperReply::Progress(told) => progress(told),
                    last => return Ok::<_, io::Error>(last),
                }
            }
        };
        match tokio::time::timeout(timeout, conversation).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(_)) if self.process_id().is_none() => {
                Err(MachineError::DoesNotRun { name: self.home.name().clone() })
            }
            Ok(Err(reason)) => Err(self.keeper_failed(format!("does not answer ({reason})"))),
            Err(_) => Err(self.keeper_failed(format!("has not answered within {} s", timeout.as_secs()))),
        }
    }

    /// What to say of a machine that is gone: what was noted of its end, or else what was seen.
    fn ended(&self, seen: MachineError) -> MachineError {
        match self.home.end() {
            Some(end) => {
                MachineError::Ended { machine: self.home.name().to_string(), reason: end.reason.trim().to_owned() }
            }
            None => seen,
        }
    }

    fn keeper_failed(&self, reason: String) -> MachineError {
        let (machine, log) = (self.home.name().to_string(), self.home.keeper_log());
        MachineError::Keeper { machine, reason, log }
    }
}
