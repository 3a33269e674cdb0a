//! A PostgreSQL server in a machine of its own, as its supervisor needs it.
//!
//! Its data is in the guest, in `/var/lib/onecopy/data`. Its configuration here is the truth, as with servers that are
//! processes: it is written into the guest before each start.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use onecopy_guest_agent::protocol::{
    self, Answer, BaseBackup, Bytes, Command, FailureKind, Initialize, PostgresState, PostgresStatus, WriteFile,
};
use onecopy_hypervisor::printable;
use onecopy_postgres::{ConnectionParameters, Instance, InstanceFuture, PostgresError, StartOutcome, StopMode};

use super::guest_options::{GuestServerOptions, INCLUDES};
use super::machine::END_TIMEOUT;
use super::{Machine, MachineError};

/// The data directory in a guest.
const DATA_DIRECTORY: &str = "/var/lib/onecopy/data";

/// The account of the server in a guest.
const ACCOUNT: &str = "postgres";

/// How long initdb may take without hardware help.
const INITIALIZE_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a base backup may take.
const COPY_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// How long a start may take, recovery included.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a stop may take.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a guest that does not answer is waited for before it is stopped without being asked.
const ANSWERING_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a small question may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a server that says that it is ready may refuse to let anybody in.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);

/// How often it is tried.
const LOGIN_INTERVAL: Duration = Duration::from_millis(50);

/// How often a running server is looked at: how late the death of a server in a living guest is noticed, at most.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// How often its machine is.
const MACHINE_INTERVAL: Duration = Duration::from_millis(100);

/// Lines of a guest's log that are told.
const LOG_LINES_SHOWN: &str = "20";

/// And as many bytes of them, the last ones.
const LOG_BYTES_SHOWN: usize = 4096;

/// A PostgreSQL server in a machine.
#[derive(Debug)]
pub struct GuestServer {
    machine: Machine,
    options: GuestServerOptions,
    /// Why it does not run any more.
    last_words: Mutex<String>,
    /// Held over a whole start or stop: they exclude each other.
    transition: tokio::sync::Mutex<()>,
}

impl GuestServer {
    /// The server in `machine`, which is made.
    pub fn new(machine: Machine, options: GuestServerOptions) -> GuestServer {
        GuestServer { machine, options, last_words: Mutex::default(), transition: tokio::sync::Mutex::default() }
    }

    /// Starts the machine, without its server, as its configuration is now; whether it did not run.
    pub async fn boot(&self) -> Result<bool, MachineError> {
        if self.machine.process_id().is_none() {
            let made = self.machine.home().configuration()?;
            let mut wanted = self.options.configuration.clone();
            // This is said in its own file only.
            (wanted.silent_after_s, wanted.end_when_silent) = (made.silent_after_s, made.end_when_silent);
            wanted.merge_equal_pages = made.merge_equal_pages;
            wanted.transport = made.transport;
            wanted.network.clone_from(&made.network);
            if made != wanted {
                self.machine.write_configuration(&wanted)?;
            }
        }
        self.machine.start().await
    }

    /// Makes a new server in the machine, which runs; it does not start.
    pub async fn initialize(&self) -> Result<(), MachineError> {
        let initialize = Initialize {
            options: self.options.initdb_options(),
            password: self.options.administration.password.clone(),
            settings: INCLUDES.to_owned(),
            host_based_authentication: Some(self.options.access_rules()?),
        };
        let command = Command::Postgres(protocol::Postgres::Initialize(initialize));
        self.machine.ask_agent("make a server", command, INITIALIZE_TIMEOUT, &|_| ()).await.map(|_| ())
    }

    /// Copies the server that it shall follow into the machine, which runs; it does not start.
    pub async fn copy_primary(&self, progress: &(dyn Fn(u64, u64) + Send + Sync)) -> Result<(), MachineError> {
        let Some(primary) = &self.options.primary else { return Ok(()) };
        let copy = BaseBackup {
            source: primary.primary.to_dsn(),
            slot: primary.slot.clone(),
            settings: String::new(),
            host_based_authentication: Some(self.options.access_rules()?),
            timeout_ms: milliseconds(COPY_TIMEOUT),
        };
        let command = Command::Postgres(protocol::Postgres::BaseBackup(copy));
        let report = |told: protocol::Progress| {
            if let Some(done_bytes) = told.done_bytes {
                progress(done_bytes, told.total_bytes.unwrap_or(0));
            }
        };
        self.machine.ask_agent("copy the leader", command, COPY_TIMEOUT, &report).await.map(|_| ())
    }

    /// Makes the server of a fork, which is held and which nobody reaches, one that follows whom it shall follow, and
    /// lets it go on, or start, then: what it was before does nothing more. `was_leader`: its log goes on where its
    /// leader's did, so it is ended as by a crash, and recovers as a standby.
    ///
    /// # Errors
    /// [`MachineError::Guest`], [`MachineError::Keeper`]; it follows nobody else then.
    pub async fn become_follower(&self, was_leader: bool) -> Result<(), MachineError> {
        let tell = |action, command| async move {
            let command = Command::Postgres(command);
            self.machine.ask_agent(action, command, ANSWER_TIMEOUT, &|_| ()).await.map(|_| ())
        };
        if was_leader {
            tell("end its parent's server", protocol::Postgres::Kill {}).await?;
            // Nobody would ever read the log that these keep here.
            self.execute_as_server(&["find", &format!("{DATA_DIRECTORY}/pg_replslot"), "-mindepth", "1", "-delete"])
                .await?;
            self.write_files().await?;
            self.machine.connect().await?;
            let start = protocol::Postgres::Start { timeout_ms: milliseconds(START_TIMEOUT) };
            let started = self.machine.ask_agent("start its server", Command::Postgres(start), START_TIMEOUT, &|_| ());
            return match started.await {
                Ok(_) => Ok(self.wait_login().await?),
                Err(MachineError::Guest { machine, action, reason }) => {
                    let reason = format!("{reason}\n{}", self.log().await);
                    Err(MachineError::Guest { machine, action, reason })
                }
                Err(error) => Err(error),
            };
        }
        self.write_files().await?;
        // It hears of that first when it goes on.
        tell("read its configuration again", protocol::Postgres::Reload {}).await?;
        self.machine.connect().await?;
        tell("let its server go on", protocol::Postgres::Thaw {}).await?;
        self.wait_login().await?;
        self.end_sessions().await
    }

    /// Ends the sessions of its parent's clients, whom it has not: what they hold would be held for long.
    async fn end_sessions(&self) -> Result<(), MachineError> {
        const END: &str = "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity \
            WHERE backend_type = 'client backend' AND pid <> pg_catalog.pg_backend_pid()";
        let client = self.options.administration.connect().await?;
        client.batch_execute(END).await.map_err(PostgresError::sql("end its parent's sessions"))?;
        Ok(())
    }

    /// Whether there is no server in the machine, which runs.
    pub async fn is_absent(&self) -> Result<bool, MachineError> {
        Ok(self.status().await?.state == PostgresState::Absent)
    }

    async fn status(&self) -> Result<PostgresStatus, MachineError> {
        let command = Command::Postgres(protocol::Postgres::Status {});
        match self.machine.ask_agent("tell of its server", command, ANSWER_TIMEOUT, &|_| ()).await? {
            Answer::Postgres(status) => Ok(status),
            other => Err(self.invalid_reply("tell of its server", &other)),
        }
    }

    fn invalid_reply(&self, action: &str, answer: &Answer) -> MachineError {
        let (machine, action) = (self.machine.home().name().to_string(), action.to_owned());
        MachineError::Guest { machine, action, reason: format!("it answered {answer:?}") }
    }

    async fn start_all(&self) -> Result<StartOutcome, MachineError> {
        let is_new = self.boot().await?;
        let state = self.status().await?.state;
        let was_running = !is_new && (state.is_ready() || state == PostgresState::Starting);
        if !state.is_ready() && state != PostgresState::Starting {
            self.write_files().await?;
        } else if self.options.primary.is_some() {
            self.follow().await?;
        }
        let command = Command::Postgres(protocol::Postgres::Start { timeout_ms: milliseconds(START_TIMEOUT) });
        match self.machine.agent(command, START_TIMEOUT, &|_| ()).await? {
            Ok(_) => {}
            Err(refusal) => {
                let is_late = refusal.kind == Some(FailureKind::Timeout);
                let reason =
                    if is_late { refusal.message } else { format!("{}\n{}", refusal.message, self.log().await) };
                let (machine, action) = (self.machine.home().name().to_string(), "start its server".to_owned());
                return Err(MachineError::Guest { machine, action, reason });
            }
        }
        self.wait_login().await?;
        Ok(if was_running { StartOutcome::Adopted } else { StartOutcome::Started })
    }

    /// Writes the configuration as it shall be now.
    async fn write_files(&self) -> Result<(), MachineError> {
        for (name, text) in self.options.files()? {
            self.write_file(name, text).await?;
        }
        if self.options.primary.is_none() {
            return Ok(());
        }
        // What the copy wrote there would count more than what is known now.
        let automatic = format!("{DATA_DIRECTORY}/postgresql.auto.conf");
        let argv = ["sed", "-i", "-e", "/^primary_conninfo/d", "-e", "/^primary_slot_name/d", &automatic];
        self.execute_as_server(&argv).await.map(|_| ())
    }

    /// Lets a standby that runs follow whom it shall follow now: the leader's address or password may be another one
    /// than when it was started.
    async fn follow(&self) -> Result<(), MachineError> {
        let Some((name, wanted)) = self.options.standby_file()? else { return Ok(()) };
        let path = format!("{DATA_DIRECTORY}/{name}");
        let found = self.execute_as_server(&["cat", &path]).await;
        if found.is_ok_and(|found| found == wanted) {
            return Ok(());
        }
        self.write_file(name, wanted).await?;
        let reload = Command::Postgres(protocol::Postgres::Reload {});
        self.machine.ask_agent("read its configuration again", reload, ANSWER_TIMEOUT, &|_| ()).await.map(|_| ())
    }

    async fn write_file(&self, name: &str, text: String) -> Result<(), MachineError> {
        let file = WriteFile {
            path: format!("{DATA_DIRECTORY}/{name}"),
            mode: 0o600,
            owner: Some(ACCOUNT.to_owned()),
            content: Bytes(text.into_bytes()),
        };
        let action = format!("write {name}");
        self.machine.ask_agent(&action, Command::WriteFile(file), ANSWER_TIMEOUT, &|_| ()).await.map(|_| ())
    }

    async fn execute_as_server(&self, argv: &[&str]) -> Result<String, MachineError> {
        let execute = protocol::Execute {
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            user: Some(ACCOUNT.to_owned()),
            stdin: Bytes::default(),
            timeout_ms: milliseconds(ANSWER_TIMEOUT),
        };
        match self.machine.ask_agent(argv[0], Command::Execute(execute), ANSWER_TIMEOUT, &|_| ()).await? {
            Answer::Executed(executed) if executed.status == Some(0) => Ok(executed.stdout.to_text()),
            other => Err(self.invalid_reply(argv[0], &other)),
        }
    }

    /// The last lines of the server's log, as far as the guest gives them.
    async fn log(&self) -> String {
        let Ok(status) = self.status().await else { return String::new() };
        // A guest's word: it goes to a terminal.
        let log = self.execute_as_server(&["tail", "-n", LOG_LINES_SHOWN, &status.log]).await.unwrap_or_default();
        printable_end(&log, LOG_BYTES_SHOWN)
    }

    /// Waits until its superuser can log in through the forwarded port.
    async fn wait_login(&self) -> Result<(), PostgresError> {
        let begun = Instant::now();
        loop {
            match self.options.administration.connect().await {
                Ok(_) => return Ok(()),
                Err(error) if begun.elapsed() >= LOGIN_TIMEOUT => return Err(error),
                Err(_) => tokio::time::sleep(LOGIN_INTERVAL).await,
            }
        }
    }

    async fn stop_all(&self, mode: StopMode) -> Result<(), MachineError> {
        if mode == StopMode::Immediate {
            return self.machine.stop(true, STOP_TIMEOUT).await;
        }
        if self.machine.process_id().is_some() {
            if let Err(error) = self.machine.wait_answering(ANSWERING_TIMEOUT).await {
                tracing::warn!(%error, "the guest is unresponsive");
            }
            let mode = if mode == StopMode::Smart { protocol::StopMode::Smart } else { protocol::StopMode::Fast };
            let command = Command::Postgres(protocol::Postgres::Stop { mode, timeout_ms: milliseconds(STOP_TIMEOUT) });
            let stopped = self.machine.ask_agent("stop its server", command, STOP_TIMEOUT, &|_| ()).await;
            if let Err(error) = stopped {
                // The guest stops it, too, before it switches off; and where it does not, the next start recovers.
                tracing::warn!(%error, "the server is stopped with its machine");
            }
        }
        self.machine.stop(false, END_TIMEOUT).await
    }

    /// Returns when the server does not run any more, with the reason.
    async fn watch(&self) -> String {
        let mut asked = Instant::now();
        loop {
            tokio::time::sleep(MACHINE_INTERVAL).await;
            if self.machine.process_id().is_none() {
                // Its keeper notes why, unless it has ended, too.
                tokio::time::sleep(MACHINE_INTERVAL).await;
                let end = self.machine.home().end();
                return end.map_or_else(|| "its machine has ended".to_owned(), |end| end.reason);
            }
            if asked.elapsed() < WATCH_INTERVAL {
                continue;
            }
            asked = Instant::now();
            if !self.machine.is_kept().await {
                if let Err(error) = self.machine.ensure_keeper().await {
                    tracing::warn!(%error, "nobody looks after a machine that runs");
                }
                continue;
            }
            match self.status().await {
                Ok(status) if matches!(status.state, PostgresState::Stopped | PostgresState::Absent) => {
                    return format!("the server in the guest has ended; its log says:\n{}", self.log().await);
                }
                Ok(_) => {}
                // A guest that is unresponsive may be busy: whoever asks its server sees what follows from that.
                Err(error) => tracing::debug!(%error, "the guest does not tell of its server"),
            }
        }
    }
}

/// The last bytes of a text, from a whole character on, without what terminals take for a command.
fn printable_end(text: &str, bytes_max: usize) -> String {
    let text = printable(text);
    text[text.ceil_char_boundary(text.len().saturating_sub(bytes_max))..].to_owned()
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The same error where a server's own kind is wanted.
fn of_machine(error: MachineError) -> PostgresError {
    match error {
        MachineError::Postgres(error) => error,
        other => PostgresError::Machine { reason: other.to_string() },
    }
}

impl Instance for GuestServer {
    fn place(&self) -> String {
        format!("machine {}", self.machine.home().name())
    }

    fn start(&self) -> InstanceFuture<'_, Result<StartOutcome, PostgresError>> {
        Box::pin(async {
            let _transition = self.transition.lock().await;
            self.start_all().await.map_err(of_machine)
        })
    }

    fn stop(&self, mode: StopMode) -> InstanceFuture<'_, Result<(), PostgresError>> {
        Box::pin(async move {
            let _transition = self.transition.lock().await;
            self.stop_all(mode).await.map_err(of_machine)
        })
    }

    fn wait_exit(&self) -> InstanceFuture<'_, ()> {
        Box::pin(async {
            let reason = self.watch().await;
            *self.last_words.lock().unwrap_or_else(PoisonError::into_inner) = reason;
        })
    }

    fn process_id(&self) -> Option<u32> {
        self.machine.process_id()
    }

    fn administration(&self) -> ConnectionParameters {
        self.options.administration.clone()
    }

    fn log_end(&self) -> u64 {
        0
    }

    fn last_words(&self, _: u64) -> String {
        self.last_words.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn bound_log(&self) -> Result<(), PostgresError> {
        // The guest's own log lies on the guest's own disk: its agent cuts it (guest/agent/src/agent/postgres/log.rs).
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_logs_is_bounded_and_cannot_command_a_terminal() {
        assert_eq!(printable_end("a\u{1b}[2J\u{7}b\nc", 100), "ab\nc");
        assert_eq!(printable_end("xä", 2), "ä");
        assert_eq!(printable_end("xä", 1), "");
        assert_eq!(printable_end(&"y".repeat(10_000), LOG_BYTES_SHOWN).len(), LOG_BYTES_SHOWN);
    }
}
