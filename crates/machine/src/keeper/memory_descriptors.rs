//! What the server of a machine's memory holds, which must outlive it.

use std::time::{Duration, Instant};

use onecopy_checkpoint::memory::Descriptors;

use super::processes::{LOOK_INTERVAL, READY_TIMEOUT, server_of};
use super::role::Role;
use crate::MachineHome;
use crate::memory_server::{MemoryClient, Request, ServedMemory, descriptor_of};

/// The process that serves it, and what that says of itself. One that is beginning is waited for.
async fn served(home: &MachineHome, patience: Duration) -> Result<(u32, ServedMemory), String> {
    let begun = Instant::now();
    loop {
        let process_id = server_of(Role::Memory, home).ok_or("its server has died with its keeper")?;
        let told = async { MemoryClient::connect(home).await?.ask::<ServedMemory>(Request::Info).await };
        match told.await {
            Ok(told) if told.process_id == process_id => return Ok((process_id, told)),
            Ok(told) => return Err(format!("process {} answers, and not {process_id}", told.process_id)),
            Err(reason) if begun.elapsed() >= patience => return Err(reason),
            Err(_) => tokio::time::sleep(LOOK_INTERVAL).await,
        }
    }
}

/// What its server holds, here.
pub(super) async fn descriptors(home: &MachineHome) -> Result<Descriptors, String> {
    let (process_id, told) = served(home, READY_TIMEOUT).await?;
    let taken = |number| descriptor_of(process_id, number).map_err(|error| format!("its descriptors: {error}"));
    Ok(Descriptors { device: taken(told.device_descriptor)?, state: taken(told.state_descriptor)? })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use onecopy_testing::until;

    use super::*;

    /// Spec: D6
    #[tokio::test]
    async fn a_server_that_does_not_answer_yet_is_asked_again_and_a_dead_one_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        fs::create_dir(home.root()).unwrap();
        // Nobody would wait so long.
        let patience = Duration::from_secs(3600);
        let reason = served(&home, patience).await.unwrap_err();
        assert!(reason.contains("has died with its keeper"), "{reason}");
        let script = "while :; do sleep 0.05; done";
        let mut beginning = Command::new("sh").args(["-c", script, "memory-server"]).arg(home.root()).spawn().unwrap();
        until("it is found", || server_of(Role::Memory, &home) == Some(beginning.id()));
        let asked = tokio::spawn({
            let home = home.clone();
            async move { served(&home, patience).await }
        });
        let refused = served(&home, LOOK_INTERVAL).await.unwrap_err();
        assert!(!refused.contains("has died"), "{refused}");
        assert!(!asked.is_finished(), "it may answer still");
        beginning.kill().unwrap();
        beginning.wait().unwrap();
        let reason = asked.await.unwrap().unwrap_err();
        assert!(reason.contains("has died with its keeper"), "{reason}");
    }
}
