//! Looking at a machine, whoever looks after it.

use std::time::Duration;

use onecopy_guest_agent::protocol::{Answer, Command};
use onecopy_network::Statistics;
use serde::{Deserialize, Serialize};

use super::footprint::{self, DiskFootprint, MemoryFootprint, Processes};
use super::keeper::{MachineState, ProtectionStatus, unix_ms};
use super::migration::Departure;
use super::network_holder::{NetworkClient, Request, ServedNetwork};
use super::{BridgedNetwork, Machine, desired_state};

/// How long a guest may take to say how it is; one that boots or hangs does not.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// The state of a machine that runs without a keeper, which its supervisor, or the next command, gives it.
const UNKEPT: &str = "unkept";

/// A machine's network on a bridge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkStatus {
    /// What it is made of; the card's address among it.
    #[serde(flatten)]
    pub network: BridgedNetwork,
    /// The process that passes its frames, while it runs.
    pub process_id: Option<u32>,
    /// How often that was started again.
    pub restarts: u64,
    /// Why the guest has not got its addresses.
    pub failure: Option<String>,
    /// What has passed, while it runs.
    pub statistics: Option<Statistics>,
}

/// A server's machine, now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineStatus {
    /// `starting`, `running`, `unresponsive`, `paused`, `failed`, `stopping`, `stopped`; `unkept` when it runs and
    /// nobody looks after it.
    pub state: String,
    /// For how many seconds its guest has not answered, while it is unresponsive.
    pub unresponsive_s: Option<u64>,
    /// QEMU's process, while it runs.
    pub process_id: Option<u32>,
    /// The process that serves its disk, while that runs.
    pub disk_process_id: Option<u32>,
    /// How often the process that serves its disk was started again.
    pub disk_restarts: u64,
    /// The process that serves its memory, while that runs; none where the memory is QEMU's own.
    #[serde(default)]
    pub memory_process_id: Option<u32>,
    /// How often the process that serves its memory was started again.
    #[serde(default)]
    pub memory_restarts: u64,
    /// It stands for a migration, and it is not known here on which host it goes on.
    #[serde(default)]
    pub in_doubt: bool,
    /// How it is protected, where that is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<ProtectionStatus>,
    /// Its card on a bridge; none where the network is QEMU's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkStatus>,
    /// Its memory. Nobody resizes the server's pool in it.
    pub memory_bytes: u64,
    /// What programs in the guest could still have of it, when the guest has told.
    pub memory_available_bytes: Option<u64>,
    /// Size of its disk.
    pub disk_bytes: u64,
    /// What its disk takes of the host's.
    pub disk_used_bytes: u64,
    /// Processors.
    pub processors: u32,
    /// What it takes of the host's memory.
    #[serde(default)]
    pub footprint: MemoryFootprint,
    /// Its disk, and those that this lies over, whoever has them in common.
    #[serde(default)]
    pub disks: Vec<DiskFootprint>,
}

impl Machine {
    /// How it is; none where it is not made.
    pub async fn observe(&self) -> Option<MachineStatus> {
        let configuration = self.home().configuration().ok()?;
        let process_id = self.process_id();
        let kept = self.status().await.ok();
        let state = match (&kept, process_id) {
            (Some(kept), _) => kept.state.as_str(),
            (None, Some(_)) => UNKEPT,
            (None, None) if desired_state::is_migrated(self.home()) => MachineState::Migrated.as_str(),
            (None, None) => MachineState::Stopped.as_str(),
        };
        let is_up = kept.as_ref().is_some_and(|kept| kept.state == MachineState::Running);
        let memory_available_bytes = if is_up { self.memory_available_bytes().await } else { None };
        let processes = Processes {
            qemu: process_id,
            memory: kept.as_ref().and_then(|kept| kept.memory_process_id),
            others: [
                kept.as_ref().and_then(|kept| kept.disk_process_id),
                kept.as_ref().map(|kept| kept.keeper_process_id),
                kept.as_ref().and_then(|kept| kept.network_process_id),
            ],
        };
        let home = self.home().clone();
        let looked = move || (footprint::memory(&home, processes), footprint::disks(&home));
        let (footprint, disks) = tokio::task::spawn_blocking(looked).await.unwrap_or_default();
        let unresponsive_since = kept.as_ref().and_then(|kept| kept.unresponsive_since_unix_ms);
        let network = match configuration.network {
            Some(network) => {
                let mac = Some(network.card(self.home().root()));
                Some(NetworkStatus {
                    network: BridgedNetwork { mac, ..network },
                    process_id: kept.as_ref().and_then(|kept| kept.network_process_id),
                    restarts: kept.as_ref().map_or(0, |kept| kept.network_restarts),
                    failure: kept.as_ref().and_then(|kept| kept.network_failure.clone()),
                    statistics: self.network_statistics().await,
                })
            }
            None => None,
        };
        Some(MachineStatus {
            state: state.to_owned(),
            unresponsive_s: unresponsive_since.map(|since| unix_ms().saturating_sub(since) / 1000),
            process_id,
            disk_process_id: kept.as_ref().and_then(|kept| kept.disk_process_id),
            disk_restarts: kept.as_ref().map_or(0, |kept| kept.disk_restarts),
            memory_process_id: kept.as_ref().and_then(|kept| kept.memory_process_id),
            memory_restarts: kept.as_ref().map_or(0, |kept| kept.memory_restarts),
            in_doubt: match &kept {
                Some(kept) => kept.in_doubt,
                None => {
                    let may_have_come = process_id.is_some() && self.home().is_arriving();
                    may_have_come || Departure::is_in_doubt(self.home()) || self.is_undecided()
                }
            },
            protection: kept.as_ref().and_then(|kept| kept.protection.clone()),
            network,
            memory_bytes: configuration.memory_bytes,
            memory_available_bytes,
            disk_bytes: configuration.disk_bytes,
            disk_used_bytes: disks.first().map_or(0, |disk| disk.bytes),
            processors: configuration.processors,
            footprint,
            disks,
        })
    }

    async fn network_statistics(&self) -> Option<Statistics> {
        let holder = NetworkClient::connect(self.home()).await.ok()?;
        holder.ask::<ServedNetwork>(Request::Info).await.ok().map(|served| served.statistics)
    }

    async fn memory_available_bytes(&self) -> Option<u64> {
        match self.agent(Command::Health {}, HEALTH_TIMEOUT, &|_| ()).await {
            Ok(Ok(Answer::Health(health))) => Some(health.memory_available_bytes),
            _ => None,
        }
    }
}
