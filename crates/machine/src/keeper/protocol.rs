//! What a machine's keeper is asked and answers: JSON, one object a line, over the socket `keeper.sock`; one request a
//! connection.
//!
//! ```text
//! {"status":{}}                                        -> {"status":{"state":"running","process_id":4711,..}}
//! {"agent":{"command":{"health":{}},"timeout_ms":5000}} -> {"progress":{..}} any number of them, then {"agent":{"health":{..}}}
//! {"pause":{}}, {"resume":{}}                           -> {"done":{}}
//! {"checkpoint":{"keep":5}}                             -> {"checkpoint":{"number":7,"pause_us":6100,..}}
//! {"forget":{}}, {"connect":{}}                         -> {"done":{}}
//! {"forget_checkpoints":{"numbers":[3,7]}}              -> {"done":{}}
//! {"migrate":{"to":"10.0.0.2:6440",..}}                 -> {"migration":{"event":"round",..}} .., {"migrated":{"pause_us":41000,..}}
//! {"cancel_migration":{}}                               -> {"done":{}}
//! {"protect":{"to":"10.0.0.2:6440",..}}                 -> {"done":{}}; `status` tells how far it is
//! {"unprotect":{}}, {"yield":{"token":".."}}             -> {"done":{}}
//! {"receive":{}}                                        -> {"done":{}}, and the two keepers speak
//! {"decide":{"token":"..","goes":true}}                 -> {"done":{}}
//! {"stop":{"force":false,"timeout_ms":60000}}          -> {"stopped":{}}
//! ```
//!
//! Who closes the connection gives up what it has asked for: a program in the guest is ended. A stop goes on.
//!
//! The keeper is the only one that speaks to QEMU and to the guest's agent, whose sockets take one client each.

use std::path::PathBuf;

use onecopy_guest_agent::protocol::{Answer, Command, FailureKind, Progress};
use serde::{Deserialize, Serialize};

use super::{ProtectionOrder, ProtectionStatus};
use crate::migration::MigrationResult;

/// What a keeper is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeeperRequest {
    /// How is the machine?
    Status {},
    /// The guest's agent shall do this.
    Agent {
        /// What.
        command: Command,
        /// How long it may take, in milliseconds.
        timeout_ms: u64,
    },
    /// Its processors shall stand, also when another keeper comes.
    Pause {},
    /// They shall run again.
    Resume {},
    /// Take a checkpoint.
    Checkpoint {
        /// Forget the oldest, where more than so many are there then.
        keep: Option<u64>,
        /// The guest's server is held for the instant, and does nothing in what goes on from the checkpoint.
        #[serde(default)]
        holds_server: bool,
    },
    /// Forget the checkpoint of a held server, and what no checkpoint names: frozen memory, and snapshots of its disk
    /// that nobody's disk lies over.
    Forget {},
    /// Forget these checkpoints, too.
    ForgetCheckpoints {
        /// Their numbers.
        numbers: Vec<u64>,
    },
    /// Put the cable into its network card, which a fork begins without.
    Connect {},
    /// Send the machine to another host: what happens follows.
    Migrate(MigrationOrder),
    /// It stays: a migration that is under way comes to nothing.
    CancelMigration {},
    /// Copy the machine to another host, again and again, until that is wanted no more: [`KeeperStatus::protection`]
    /// tells how far that is.
    Protect(ProtectionOrder),
    /// It is protected no more.
    Unprotect {
        /// Nobody is asked whether its copy goes on.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
    /// It goes on at the host that protects it.
    Yield {
        /// By which protection.
        token: String,
    },
    /// A machine is sent over this connection, once this is answered.
    Receive {},
    /// A machine that has come: it goes on here, or never will.
    Decide {
        /// By which migration it has come.
        token: String,
        /// It goes on.
        goes: bool,
    },
    /// End the machine.
    Stop {
        /// At once, as a power cut would.
        force: bool,
        /// How long the guest may take to end by itself, in milliseconds; then it is ended.
        timeout_ms: u64,
    },
}

/// What a keeper answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeeperReply {
    /// The guest's agent is at work; more replies follow.
    Progress(Progress),
    /// To `status`.
    Status(KeeperStatus),
    /// To `agent`: it is done.
    Agent(Answer),
    /// To `pause`, `resume`, `forget`, `connect`, `unprotect` and `yield`: it is so; to `protect`: it begins.
    Done {},
    /// To `checkpoint`: it is durable.
    Checkpoint(CheckpointTaken),
    /// To `migrate`: this has happened; more replies follow.
    Migration(MigrationEvent),
    /// To `migrate`: it runs there.
    Migrated(MigrationResult),
    /// To `migrate` that was only to be tried: this is expected.
    Predicted(Prediction),
    /// To `stop`: nothing of the machine runs but the keeper, which ends now.
    Stopped {},
    /// It is not done.
    Error {
        /// What a program decides by; none where it was not the agent that refused.
        kind: Option<FailureKind>,
        /// What a person reads.
        message: String,
    },
}

/// A machine shall go to another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationOrder {
    /// `HOST:PORT` of the other host.
    pub to: String,
    /// This host's keys.
    pub keys: PathBuf,
    /// `HOST:PORT` of this host's `onecopy host`, as the other one reaches it.
    pub origin: String,
    /// The longest pause, milliseconds.
    pub downtime_ms: u64,
    /// Bytes a second that are sent at most.
    pub bytes_per_second: Option<u64>,
    /// How long it may take until the last round begins, seconds.
    pub timeout_s: u64,
    /// It goes then with a longer pause; else it stays.
    pub goes_on_timeout: bool,
    /// It is slowed down then, as far as it must, for as long again; and stays if that does not do.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub throttles: bool,
    /// Only what it would cost is asked for.
    pub is_only_tried: bool,
    /// The other host's bridge for its card; none: the one of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
}

/// What happens while a machine goes to another host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum MigrationEvent {
    /// The other host has taken the order.
    Accepted {
        /// It reads the machine's disk on storage that both hosts have; a keeper of an earlier build does not say.
        #[serde(default)]
        shares_disk: bool,
        /// It slows the machine down, where that was asked for; a keeper of an earlier build does not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        throttles: bool,
    },
    /// A round was sent.
    Round {
        /// Its number.
        round: u32,
        /// Pages that were zeros.
        zero_pages: u64,
        /// Pages whose content the other host had already.
        known_pages: u64,
        /// Pages that the other host reads from the disk.
        #[serde(default)]
        disk_pages: u64,
        /// Pages whose content was sent.
        data_pages: u64,
        /// Bytes that went over the connection.
        bytes: u64,
        /// How long it took, milliseconds.
        took_ms: u64,
        /// Pages that change a second.
        pages_per_second: Option<u64>,
        /// How long it would stand if the next round were the last, milliseconds.
        expected_pause_ms: Option<u64>,
        /// For how much of the time it stood meanwhile, in percent, because it changes too fast.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        throttle_percent: Option<u64>,
    },
    /// A QEMU waits there for the last round.
    Waiting,
    /// It stands here; the last round goes over.
    Stopped,
    /// It stands there, and could run.
    Loaded,
    /// It goes on there, whatever happens here.
    Given,
}

/// What a migration would cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Bytes of memory that would be sent once, before they are compressed.
    pub memory_bytes: u64,
    /// Pages that change a second.
    pub pages_per_second: u64,
    /// How long it would take at the rate that was given, seconds; none where none was given.
    pub seconds: Option<f64>,
    /// How long it would stand then, milliseconds.
    pub pause_ms: Option<u64>,
}

/// What a machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// It boots: the guest's agent has not answered yet.
    Starting,
    /// The guest's agent answers.
    Running,
    /// The guest's agent answered once and does not answer now, though the guest runs.
    Unresponsive,
    /// Its processors stand, because somebody wanted that.
    Paused,
    /// Its processors stand for good: its disk has gone on without it.
    Migrated,
    /// Its processors stand, because a disk or QEMU's accelerator has failed.
    Failed,
    /// It is being ended.
    Stopping,
    /// It does not run.
    Stopped,
}

impl MachineState {
    /// The word for it, as in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            MachineState::Starting => "starting",
            MachineState::Running => "running",
            MachineState::Unresponsive => "unresponsive",
            MachineState::Paused => "paused",
            MachineState::Migrated => "migrated",
            MachineState::Failed => "failed",
            MachineState::Stopping => "stopping",
            MachineState::Stopped => "stopped",
        }
    }
}

/// How a machine is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeeperStatus {
    /// What it does.
    pub state: MachineState,
    /// Since when the guest has been unresponsive, in milliseconds since 1970.
    #[serde(default)]
    pub unresponsive_since_unix_ms: Option<u64>,
    /// QEMU's process, while it runs.
    pub process_id: Option<u32>,
    /// The process that serves the disk, while it runs.
    pub disk_process_id: Option<u32>,
    /// How often the process that serves the disk was started again.
    pub disk_restarts: u64,
    /// The process that serves the memory, while it runs; none where the memory is QEMU's own.
    #[serde(default)]
    pub memory_process_id: Option<u32>,
    /// How often the process that serves the memory was started again.
    #[serde(default)]
    pub memory_restarts: u64,
    /// The process that passes its frames, while it runs; none where the network is QEMU's own.
    #[serde(default)]
    pub network_process_id: Option<u32>,
    /// How often the process that passes its frames was started again.
    #[serde(default)]
    pub network_restarts: u64,
    /// Why the guest has not got its addresses, or a fork its name.
    #[serde(default)]
    pub network_failure: Option<String>,
    /// It stands for a migration, and it is not known here on which host it goes on.
    #[serde(default)]
    pub in_doubt: bool,
    /// How it is protected, where that is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<ProtectionStatus>,
    /// The keeper.
    pub keeper_process_id: u32,
    /// The guest's kernel, when its agent has told.
    pub kernel: Option<String>,
}

/// What a checkpoint was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointTaken {
    /// Its number.
    pub number: u64,
    /// The one that it holds the changes since; none: it is whole.
    pub since: Option<u64>,
    /// How long the machine stood, microseconds.
    pub pause_us: u64,
    /// What for, the telling of itself before the first one left out.
    pub parts: PauseParts,
    /// Bytes of memory that it tells of itself.
    pub memory_bytes: u64,
    /// How long it took until it was durable, milliseconds.
    pub total_ms: u64,
    /// The epoch of the network that it has ended, where what the machine sends is held: what may go once nothing of
    /// the checkpoint can be lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_epoch: Option<u64>,
}

/// What a machine stands for while a checkpoint is taken, microseconds. QEMU's own are `stop`, `devices` and `cont`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseParts {
    /// QEMU stops its processors, and waits for the requests that are under way.
    pub stop_us: u64,
    /// QEMU saves its devices, and the keeper reads that.
    pub devices_us: u64,
    /// What was written to memory since it was synchronized before the stop goes to the memory server.
    pub synchronize_us: u64,
    /// The disk is cut.
    pub disk_us: u64,
    /// The memory is cut.
    pub memory_us: u64,
    /// QEMU lets its processors go.
    pub cont_us: u64,
}
