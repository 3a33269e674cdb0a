//! Commands on the machine as a whole.

use serde::Deserialize;
use serde_json::{Value, json};

use super::Monitor;
use crate::HypervisorError;

/// What QEMU says of a machine's state.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// The processors run.
    pub running: bool,
    /// QEMU's state.
    #[serde(rename = "status")]
    pub state: RunState,
}

/// QEMU's states (`RunState` in qapi/run-state.json).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RunState {
    /// It stands before its first instruction.
    Prelaunch,
    /// It waits for the state of another machine.
    Inmigrate,
    /// It runs.
    Running,
    /// It was told to stand.
    Paused,
    /// Its state has gone to another one.
    Postmigrate,
    /// Its state goes to another one, the last part.
    FinishMigrate,
    /// Its state was read from a file and failed, or is about to be.
    RestoreVm,
    /// Its state is being written.
    SaveVm,
    /// It has switched itself off, and QEMU was told to stay.
    Shutdown,
    /// It sleeps (ACPI S3).
    Suspended,
    /// Its watchdog has barked.
    Watchdog,
    /// Its kernel has panicked.
    GuestPanicked,
    /// A disk has failed.
    IoError,
    /// The accelerator has failed.
    InternalError,
    /// A debugger holds it.
    Debug,
    /// Another one, of a newer QEMU.
    #[serde(other)]
    Other,
}

/// A virtual processor.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Processor {
    /// Its number.
    pub cpu_index: u32,
    /// The thread of the host that runs it.
    pub thread_id: i32,
}

impl Monitor {
    /// `query-status`.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::UnknownAnswer`].
    pub async fn status(&self) -> Result<Status, HypervisorError> {
        self.ask("query-status", json!({})).await
    }

    /// `query-name`: the machine's name, empty when it has none.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::UnknownAnswer`].
    pub async fn name(&self) -> Result<String, HypervisorError> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(default)]
            name: String,
        }
        let answer: Answer = self.ask("query-name", json!({})).await?;
        Ok(answer.name)
    }

    /// `stop`: the processors stand.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn stop(&self) -> Result<(), HypervisorError> {
        self.tell("stop", json!({})).await
    }

    /// `cont`: they run.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn cont(&self) -> Result<(), HypervisorError> {
        self.tell("cont", json!({})).await
    }

    /// `system_powerdown`: the button; what the guest makes of it is its business.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn power_down(&self) -> Result<(), HypervisorError> {
        self.tell("system_powerdown", json!({})).await
    }

    /// `system_reset`.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn reset(&self) -> Result<(), HypervisorError> {
        self.tell("system_reset", json!({})).await
    }

    /// `quit`: QEMU ends at once, as if the plug was pulled for the guest.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`]; a connection that is lost before the answer is the answer.
    pub async fn quit(&self) -> Result<(), HypervisorError> {
        match self.tell("quit", json!({})).await {
            Err(HypervisorError::MonitorLost { .. }) => Ok(()),
            other => other,
        }
    }

    /// `query-cpus-fast`.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::UnknownAnswer`].
    pub async fn processors(&self) -> Result<Vec<Processor>, HypervisorError> {
        self.ask("query-cpus-fast", json!({})).await
    }

    /// `query-kvm`: whether KVM executes the guest.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::UnknownAnswer`].
    pub async fn uses_kvm(&self) -> Result<bool, HypervisorError> {
        let answer = self.execute("query-kvm", json!({})).await?;
        answer.get("enabled").and_then(Value::as_bool).ok_or_else(|| HypervisorError::UnknownAnswer {
            command: "query-kvm".to_owned(),
            reason: answer.to_string(),
        })
    }

    /// `balloon`: asks the guest to make do with this much memory.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`]; [`HypervisorError::Refused`] without a balloon.
    pub async fn balloon(&self, target_bytes: u64) -> Result<(), HypervisorError> {
        self.tell("balloon", json!({ "value": target_bytes })).await
    }

    /// `query-balloon`: what the guest has, bytes.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::UnknownAnswer`].
    pub async fn balloon_bytes(&self) -> Result<u64, HypervisorError> {
        #[derive(Deserialize)]
        struct Answer {
            actual: u64,
        }
        let answer: Answer = self.ask("query-balloon", json!({})).await?;
        Ok(answer.actual)
    }

    /// `human-monitor-command`: a command of the monitor for people, and its text. For what has no other way.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`]; errors of the command itself are in the text.
    pub async fn human(&self, command: &str) -> Result<String, HypervisorError> {
        self.ask("human-monitor-command", json!({ "command-line": command })).await
    }
}
