//! What a host asks for.

use super::Bytes;
use serde::{Deserialize, Serialize};

/// One line from the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the host; the answer carries it.
    pub id: u64,
    /// What is to be done.
    pub command: Command,
}

/// All that an agent can be asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Agree on a version. Answered by [`super::Answer::Hello`].
    Hello(Hello),
    /// Is the guest well? Answered by [`super::Answer::Health`].
    Health {},
    /// Which pages of the guest's memory are free? Answered by [`super::Answer::FreePages`].
    FreePages {},
    /// Run a program. Answered by [`super::Answer::Executed`], whatever its status.
    Execute(Execute),
    /// Set the guest's clock, which stands still while the guest is saved or paused.
    SetClock {
        /// Nanoseconds since 1970 in UTC.
        unix_ns: u64,
    },
    /// Make a copy of a guest a guest of its own.
    SetIdentity(Identity),
    /// Write a file whole: beside its name first, then renamed.
    WriteFile(WriteFile),
    /// See to the guest's PostgreSQL.
    Postgres(Postgres),
    /// Nobody waits for that request any more: the program that it runs (of `execute` and `base_backup`; others go on)
    /// is killed with what it started. Answered at once, also when nothing of that id is under way.
    Cancel {
        /// The request's.
        id: u64,
    },
    /// Stop the server, unmount, switch off. Answered before it happens.
    PowerOff {},
}

impl Command {
    /// Looks at the guest, or stops its server: such a command has places of its own ([`super::URGENT_COMMANDS_MAX`]),
    /// so that programs that take hours are in nobody's way.
    pub fn is_urgent(&self) -> bool {
        use Postgres::{Freeze, Kill, Status, Stop, Thaw};
        matches!(self, Command::Health {} | Command::Postgres(Status {} | Stop { .. } | Freeze {} | Thaw {} | Kill {}))
    }
}

/// The versions that a host understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The oldest.
    pub oldest: u32,
    /// The newest.
    pub newest: u32,
}

/// A program to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execute {
    /// The program (looked up in the usual directories) and its arguments.
    pub argv: Vec<String>,
    /// Runs as this user; root when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What it reads.
    #[serde(default)]
    pub stdin: Bytes,
    /// It is killed, with what it started, after this many milliseconds; then the answer is an error of kind `timeout`.
    pub timeout_ms: u64,
}

/// Who a guest is. What is absent stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its name, also in `/etc/hostname`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// 32 hexadecimal digits, `/etc/machine-id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// The hardware address of its first network card, six numbers in hexadecimal digits with colons between them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The address of its first network card, `10.0.2.15/24`: the card is brought up with this one only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Where packets for other networks go; with `address` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteFile {
    /// Absolute. Its directory must be there.
    pub path: String,
    /// Permissions, like 0o640.
    pub mode: u32,
    /// A user's name; root when absent. Its group goes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The file's content.
    pub content: Bytes,
}

/// What can be done with the guest's PostgreSQL. There is one, in `/var/lib/onecopy/data`, run by the user `postgres`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Postgres {
    /// Make a new, empty cluster. An error when there is one.
    Initialize(Initialize),
    /// Copy another server's cluster by `pg_basebackup`, and be its standby. An error when there is one already.
    BaseBackup(BaseBackup),
    /// Start the server; done when it accepts connections. Nothing happens when it runs.
    Start {
        /// An error of kind `timeout` after this; the server goes on starting.
        timeout_ms: u64,
    },
    /// Stop the server. Nothing happens when none runs.
    Stop {
        /// How.
        mode: StopMode,
        /// An error of kind `timeout` after this; the server goes on stopping.
        timeout_ms: u64,
    },
    /// Read the configuration files again.
    Reload {},
    /// Hold all of its processes where they are. Who has asked sees to it that they go on: nothing else does.
    Freeze {},
    /// Let them go on. Nothing happens when they are not held.
    Thaw {},
    /// End all of its processes, which are held, as a crash would: none does anything more. An error when they run.
    Kill {},
    /// Answered by [`super::Answer::Postgres`].
    Status {},
}

/// How a new cluster is made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Initialize {
    /// Options of `initdb`, besides the data directory's.
    #[serde(default)]
    pub options: Vec<String>,
    /// The superuser `postgres` gets this password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// Lines at the end of `postgresql.conf`.
    #[serde(default)]
    pub settings: String,
    /// The whole of `pg_hba.conf`; `initdb`'s own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_based_authentication: Option<String>,
}

/// Where a cluster is copied from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseBackup {
    /// The other server's connection string: keywords and values, no address (`postgresql://`). Its password does not
    /// get onto a command line.
    pub source: String,
    /// A replication slot there, which exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<String>,
    /// Lines at the end of `postgresql.conf`.
    #[serde(default)]
    pub settings: String,
    /// The whole of `pg_hba.conf`; the source's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_based_authentication: Option<String>,
    /// The copy is given up after this many milliseconds.
    pub timeout_ms: u64,
}

/// PostgreSQL's own three ways of stopping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopMode {
    /// Wait for all clients.
    Smart,
    /// Cancel what runs, then stop cleanly.
    Fast,
    /// Stop at once; the next start recovers.
    Immediate,
}
