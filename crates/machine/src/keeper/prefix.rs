//! What QEMU tells of a machine once, before its first checkpoint.

use std::fs;
use std::time::{Duration, Instant};

use onecopy_checkpoint::restore::{PREFIX_BYTES_MAX, Prefix};
use onecopy_hypervisor::Machine;
use onecopy_hypervisor::monitor::{MigrationStatus, MigrationTarget};

use super::admission::check_runs;
use super::parts::{GO_ON_INTERVAL, read};
use super::state::Keeper;
use crate::desired_state::{self, DesiredState};
use crate::{MachineError, hypervisor_failed};

/// How often it is looked whether the prefix has come.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// And how long it may take.
const PREFIX_TIMEOUT: Duration = Duration::from_secs(30);

/// What a restore needs beside memory and devices, read once; the machine stands for some milliseconds, and for how
/// long.
pub(super) async fn prefix(keeper: &Keeper, machine: &Machine) -> Result<(Vec<u8>, Duration), MachineError> {
    let home = keeper.home();
    let failed = |error: onecopy_hypervisor::HypervisorError| MachineError::Checkpoint {
        machine: home.name().to_string(),
        reason: error.to_string(),
    };
    let (monitor, path) = (machine.monitor(), home.in_run("prefix"));
    let _ = fs::remove_file(&path);
    let alone = keeper.no_take().await;
    check_runs(home, machine)?;
    keeper.note(DesiredState::Taking)?;
    let sent = async {
        monitor.set_migration_capabilities(&[("x-ignore-shared", true)]).await?;
        monitor.stop().await?;
        monitor.migrate(&MigrationTarget::File { path: path.clone(), offset_bytes: 0 }).await?;
        let begun = Instant::now();
        while !monitor.migration().await?.status.is_some_and(MigrationStatus::is_final)
            && begun.elapsed() < PREFIX_TIMEOUT
        {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(monitor.migration().await?.status)
    };
    let stopped = Instant::now();
    let sent = sent.await;
    while let Err(error) = go_on(keeper, machine).await {
        // One that runs and cannot be noted is noted by the next take, or taken over as it is.
        if monitor.status().await.is_ok_and(|status| status.running) {
            break;
        }
        tracing::error!(%error, "the machine may stand for its first checkpoint");
        // Somebody else has let it go, or it has ended.
        if machine.state().ending().is_some() || matches!(desired_state::is_taking(home), Ok(false)) {
            return Err(error);
        }
        tokio::time::sleep(GO_ON_INTERVAL).await;
    }
    let stood = stopped.elapsed();
    drop(alone);
    let status = sent.map_err(failed)?;
    let bytes = read(&path, PREFIX_BYTES_MAX)?;
    let _ = fs::remove_file(&path);
    let wrong = |reason: String| MachineError::Checkpoint { machine: home.name().to_string(), reason };
    if status != Some(MigrationStatus::Completed) {
        return Err(wrong(format!("QEMU does not tell of itself: {status:?}")));
    }
    Prefix::parse(&bytes).map_err(|error| wrong(format!("what QEMU tells of itself is not understood: {error}")))?;
    Ok((bytes, stood))
}

/// Lets a machine go that stands for what QEMU tells of itself, whether or not that has come.
async fn go_on(keeper: &Keeper, machine: &Machine) -> Result<(), MachineError> {
    let monitor = machine.monitor();
    // Of one that has ended nothing is cancelled.
    if let Err(error) = monitor.cancel_migration().await {
        tracing::warn!(%error, "what QEMU tells of itself may be still under way");
    }
    monitor.cont().await.map_err(|error| hypervisor_failed(keeper.home().name(), error))?;
    // A migration that is being cancelled refuses that; the next one sets it itself.
    if let Err(error) = monitor.set_migration_capabilities(&[("x-ignore-shared", false)]).await {
        tracing::warn!(%error, "what was set for telling of itself is not unset");
    }
    keeper.note_taken()
}
