//! The requests by their names.

use std::time::{Duration, SystemTime};

use onecopy_guest_agent::protocol::{
    Answer, Bytes, Command, Execute, Executed, Failure, FailureKind, Health, Identity, Postgres, PostgresStatus,
    Progress, StopMode, WriteFile,
};

use super::{Agent, REQUEST_TIMEOUT};
use crate::HypervisorError;

/// An agent ends what takes too long by itself and says so; the host waits that much longer for its word.
const GRACE: Duration = Duration::from_secs(15);

/// A command's name for errors.
pub(super) fn name(command: &Command) -> &'static str {
    match command {
        Command::Hello(_) => "hello",
        Command::Health {} => "health",
        Command::FreePages {} => "free_pages",
        Command::Execute(_) => "execute",
        Command::SetClock { .. } => "set_clock",
        Command::SetIdentity(_) => "set_identity",
        Command::WriteFile(_) => "write_file",
        Command::Postgres(Postgres::Initialize(_)) => "postgres initialize",
        Command::Postgres(Postgres::BaseBackup(_)) => "postgres base_backup",
        Command::Postgres(Postgres::Start { .. }) => "postgres start",
        Command::Postgres(Postgres::Stop { .. }) => "postgres stop",
        Command::Postgres(Postgres::Reload {}) => "postgres reload",
        Command::Postgres(Postgres::Status {}) => "postgres status",
        Command::Postgres(Postgres::Freeze {}) => "postgres freeze",
        Command::Postgres(Postgres::Thaw {}) => "postgres thaw",
        Command::Postgres(Postgres::Kill {}) => "postgres kill",
        Command::Cancel { .. } => "cancel",
        Command::PowerOff {} => "power_off",
    }
}

/// An answer of another kind than the request's.
fn unexpected(command: &str, answer: &Answer) -> HypervisorError {
    let failure = Failure { kind: FailureKind::Malformed, message: format!("it answered {answer:?}") };
    HypervisorError::Agent { command: command.to_owned(), failure }
}

/// Milliseconds for the wire.
fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Agent {
    async fn done(&self, command: Command, timeout: Duration) -> Result<(), HypervisorError> {
        let name = name(&command);
        match self.request(command, timeout).await? {
            Answer::Done {} => Ok(()),
            other => Err(unexpected(name, &other)),
        }
    }

    /// How the guest is.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn health(&self) -> Result<Health, HypervisorError> {
        match self.request(Command::Health {}, REQUEST_TIMEOUT).await? {
            Answer::Health(health) => Ok(health),
            other => Err(unexpected("health", &other)),
        }
    }

    /// Runs a program in the guest, whatever its status; as root, without input. It is killed after `timeout`.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn execute(&self, argv: &[&str], timeout: Duration) -> Result<Executed, HypervisorError> {
        let argv = argv.iter().map(|argument| (*argument).to_owned()).collect();
        self.execute_as(Execute { argv, timeout_ms: milliseconds(timeout), ..Execute::default() }).await
    }

    /// Runs a program as another user, or with input.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn execute_as(&self, execute: Execute) -> Result<Executed, HypervisorError> {
        let timeout = Duration::from_millis(execute.timeout_ms).saturating_add(GRACE);
        match self.request(Command::Execute(execute), timeout).await? {
            Answer::Executed(executed) => Ok(executed),
            other => Err(unexpected("execute", &other)),
        }
    }

    /// Sets the guest's clock to the host's.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn set_clock(&self) -> Result<(), HypervisorError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let unix_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        self.done(Command::SetClock { unix_ns }, REQUEST_TIMEOUT).await
    }

    /// Makes a copy of a guest a guest of its own.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn set_identity(&self, identity: Identity) -> Result<(), HypervisorError> {
        self.done(Command::SetIdentity(identity), REQUEST_TIMEOUT).await
    }

    /// Writes a file of the guest whole.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn write_file(
        &self,
        path: &str,
        mode: u32,
        owner: Option<&str>,
        content: &[u8],
    ) -> Result<(), HypervisorError> {
        let owner = owner.map(str::to_owned);
        let file = WriteFile { path: path.to_owned(), mode, owner, content: Bytes::from(content.to_vec()) };
        self.done(Command::WriteFile(file), REQUEST_TIMEOUT).await
    }

    /// Something that is done to the guest's PostgreSQL, with its progress. `timeout` bounds the host's waiting;
    /// commands with a time-out of their own should have a shorter one.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn postgres(
        &self,
        postgres: Postgres,
        timeout: Duration,
        told: impl FnMut(Progress),
    ) -> Result<(), HypervisorError> {
        let command = Command::Postgres(postgres);
        let name = name(&command);
        match self.request_with_progress(command, timeout, told).await? {
            Answer::Done {} => Ok(()),
            other => Err(unexpected(name, &other)),
        }
    }

    /// Starts the guest's PostgreSQL and waits until it accepts connections.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn start_postgres(&self, timeout: Duration) -> Result<(), HypervisorError> {
        let start = Postgres::Start { timeout_ms: milliseconds(timeout) };
        self.postgres(start, timeout.saturating_add(GRACE), |_| {}).await
    }

    /// Stops the guest's PostgreSQL.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn stop_postgres(&self, mode: StopMode, timeout: Duration) -> Result<(), HypervisorError> {
        let stop = Postgres::Stop { mode, timeout_ms: milliseconds(timeout) };
        self.postgres(stop, timeout.saturating_add(GRACE), |_| {}).await
    }

    /// What the guest's PostgreSQL does.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn postgres_status(&self) -> Result<PostgresStatus, HypervisorError> {
        match self.request(Command::Postgres(Postgres::Status {}), REQUEST_TIMEOUT).await? {
            Answer::Postgres(status) => Ok(status),
            other => Err(unexpected("postgres status", &other)),
        }
    }

    /// Switches the guest off; [`crate::Machine::wait_ended`] tells when it is.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn power_off(&self) -> Result<(), HypervisorError> {
        self.done(Command::PowerOff {}, REQUEST_TIMEOUT).await
    }
}
