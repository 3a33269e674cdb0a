//! The memory of a machine that can be checkpointed: mounted before QEMU starts, and found again by the next keeper.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use onecopy_checkpoint::memory::{self, Descriptors, GuestMemory, MemoryOptions};
use onecopy_postgres::ServiceUser;
use rustix::process::{Resource, Rlimit, Signal};

use super::launch::Launch;
use super::processes::LOOK_INTERVAL;
use super::processes::{end_left_server, server_of};
use super::restore::{self, Restored};
use super::role::Role;
use super::server::{READY_TIMEOUT, Server};
use crate::home::absent_is_fine;
use crate::memory_server::{MemoryClient, Request, ServedMemory, descriptor_of};
use crate::{MachineConfiguration, MachineError, MachineHome};

/// Before a machine is started: its memory's file and its server, where it shall have one. What an earlier run left is
/// gone.
pub(super) async fn begin(
    home: &MachineHome,
    user: &ServiceUser,
) -> Result<(Option<Server>, Option<Restored>), MachineError> {
    let (own, user) = (home.clone(), user.clone());
    let prepared = tokio::task::spawn_blocking(move || prepare(&own, &user)).await;
    let prepared =
        prepared.unwrap_or_else(|error| Err(MachineError::Task(format!("mounting a memory ended: {error}"))));
    let begun = match prepared {
        Ok((Some(descriptors), restored)) => {
            let ended = |reason| MachineError::Ended { machine: home.name().to_string(), reason };
            let server = Server::start(home, Launch::Memory(descriptors)).await;
            server.map(|server| (Some(server), restored)).map_err(ended)
        }
        Ok((None, restored)) => Ok((None, restored)),
        Err(error) => Err(error),
    };
    if begun.is_err() {
        close(home, None).await;
    }
    begun
}

/// Where no machine runs: ends whatever serves its memory, and removes the file and what is kept beside.
pub(crate) fn clear(home: &MachineHome) -> Result<(), MachineError> {
    end_left_server(Role::Memory, home, Signal::TERM);
    memory::unmount_left(&home.memory()).map_err(home.memory_failed())?;
    for left in [home.memory_shadow(), home.memory_socket()] {
        absent_is_fine(fs::remove_file(&left)).map_err(MachineError::file("remove", &left))?;
    }
    Ok(())
}

fn prepare(home: &MachineHome, user: &ServiceUser) -> Result<(Option<Descriptors>, Option<Restored>), MachineError> {
    clear(home)?;
    restore::forget(home)?;
    let (configuration, start_point) = (home.configuration()?, restore::start_point(home)?);
    if !configuration.checkpoints {
        let reason = "its machine.toml does not say `checkpoints = true`".to_owned();
        let machine = home.name().to_string();
        return start_point.map_or(Ok((None, None)), |_| Err(MachineError::Checkpoint { machine, reason }));
    }
    refuse_elsewhere()?;
    let mut options = options(&configuration, user);
    let mut restored = None;
    if let Some(start_point) = start_point {
        end_left_server(Role::Disk, home, Signal::TERM);
        let prepared = restore::prepare(home, user, &start_point)?;
        if prepared.frozen.is_some() {
            return Ok((None, Some(prepared)));
        }
        restored = Some(prepared);
        options.drops = false;
    }
    let prepared = GuestMemory::prepare(&home.memory(), &home.memory_shadow(), &options);
    Ok((Some(prepared.map_err(home.memory_failed())?), restored))
}

/// Refuses where no memory can be mounted.
pub(crate) fn refuse_elsewhere() -> Result<(), MachineError> {
    let missing = |reason: &str| Err(MachineError::NoCheckpoints { reason: reason.to_owned() });
    if !rustix::process::geteuid().is_root() {
        return missing("is started by root alone, who may mount its memory");
    }
    match fs::metadata("/dev/fuse") {
        Ok(device) if device.rdev() != 0 => Ok(()),
        _ => missing("needs FUSE on its host (/dev/fuse is not there)"),
    }
}

/// Whether machines may lock their memory: the account of root can allow itself less than that in a container.
pub(super) fn may_be_locked() -> bool {
    let unlimited = Rlimit { current: None, maximum: None };
    rustix::process::setrlimit(Resource::Memlock, unlimited).is_ok()
}

/// Where the machine locks its memory what is written back is not kept until checkpoints are taken.
pub(super) fn options(configuration: &MachineConfiguration, user: &ServiceUser) -> MemoryOptions {
    MemoryOptions {
        size_bytes: configuration.memory_bytes,
        epochs_bytes_max: configuration.memory_bytes,
        user_id: user.user_id(),
        group_id: user.group_id(),
        drops: may_be_locked(),
    }
}

/// After a machine's end: [`clear`]s what served its memory, also what could not be taken over.
pub(super) async fn close(home: &MachineHome, served: Option<Server>) {
    if let Some(server) = served {
        server.close().await;
    }
    let own = home.clone();
    let cleared = tokio::task::spawn_blocking(move || clear(&own)).await;
    let cleared = cleared.unwrap_or_else(|error| Err(MachineError::Task(format!("clearing a memory ended: {error}"))));
    if let Err(error) = cleared {
        tracing::warn!(%error, "the machine's memory has left something; its next start clears it");
    }
}

/// The memory server of a machine that runs, taken over from a keeper that has died; none where its memory is QEMU's
/// own, or where nobody serves it any more.
pub(super) async fn take_over(home: &MachineHome) -> Option<Server> {
    match memory::is_mounted(&home.memory()) {
        Ok(true) => {}
        Ok(false) => {
            if is_mapped(home) {
                tracing::error!(
                    "the machine's memory is mounted where this keeper does not see it: nobody looks after its server, \
                     and no checkpoint can be taken"
                );
            }
            return None;
        }
        Err(error) => {
            tracing::error!(%error, "it is not known whether the machine's memory is served");
            return None;
        }
    }
    let taken = match descriptors(home).await {
        Ok(descriptors) => Server::start(home, Launch::Memory(descriptors)).await,
        Err(reason) => Err(reason),
    };
    // It is not ended: what the host's memory has of it is there, and nothing older is ever shown to it.
    taken
        .inspect_err(|reason| {
            tracing::error!(
                reason,
                "nobody looks after the machine's memory: without a server it ends when it touches a page that the \
                 host has not"
            );
        })
        .ok()
}

/// Whether QEMU was told to map the memory's file.
fn is_mapped(home: &MachineHome) -> bool {
    has_word(home, home.memory().as_os_str().as_encoded_bytes())
}

/// Whether its memory is a private view of what other forks have, too.
pub(crate) fn is_private(home: &MachineHome) -> bool {
    has_word(home, b"share=off,readonly=on")
}

/// Whether QEMU's command line has this in it.
fn has_word(home: &MachineHome, text: &[u8]) -> bool {
    let Some(process_id) = home.process_id() else { return false };
    let words = fs::read(format!("/proc/{process_id}/cmdline")).unwrap_or_default();
    words.windows(text.len()).any(|word| word == text)
}

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
