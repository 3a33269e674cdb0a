//! What a machine's keeper is asked and answers: JSON, one object a line, over the socket `keeper.sock`; one request a
//! connection.
//!
//! ```text
//! {"status":{}}                                        -> {"status":{"state":"running","process_id":4711,..}}
//! {"agent":{"command":{"health":{}},"timeout_ms":5000}} -> {"progress":{..}} any number of them, then {"agent":{"health":{..}}}
//! {"pause":{}}, {"resume":{}}                           -> {"done":{}}
//! {"checkpoint":{"keep":5}}                             -> {"checkpoint":{"number":7,"pause_us":6100,..}}
//! {"forget":{"number":7}}, {"connect":{}}                        -> {"done":{}}
//! {"stop":{"force":false,"timeout_ms":60000}}          -> {"stopped":{}}
//! ```
//!
//! Who closes the connection gives up what it has asked for: a program in the guest is ended. A stop goes on.
//!
//! The keeper is the only one that speaks to QEMU and to the guest's agent, whose sockets take one client each.

use onecopy_guest_agent::protocol::{Answer, Command, FailureKind, Progress};
use serde::{Deserialize, Serialize};

use super::CheckpointTaken;

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
    /// Forget what no checkpoint names: frozen memory, and snapshots of its disk that nobody's disk lies over.
    Forget {
        /// Before that the last checkpoint, where it is this one.
        number: Option<u64>,
    },
    /// Put the cable into its network card, which a fork begins without.
    Connect {},
    /// End the machine.
    Stop {
        /// At once, as a power cut would.
        force: bool,
        /// How long the guest may take to end by itself, in milliseconds; then it is ended.
        timeout_ms: u64,
    },
}

/// What a keeper answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeeperReply {
    /// The guest's agent is at work; more replies follow.
    Progress(Progress),
    /// To `status`.
    Status(KeeperStatus),
    /// To `agent`: it is done.
    Agent(Answer),
    /// To `pause`, `resume`, `forget` and `connect`: it is so.
    Done {},
    /// To `checkpoint`: it is durable.
    Checkpoint(CheckpointTaken),
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
    /// The keeper.
    pub keeper_process_id: u32,
    /// The guest's kernel, when its agent has told.
    pub kernel: Option<String>,
}
