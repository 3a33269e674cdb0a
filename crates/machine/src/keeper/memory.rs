//! The memory of a machine that can be checkpointed: mounted before QEMU starts, and found again by the next keeper.

use std::fs;

use onecopy_checkpoint::memory::{self, MemoryOptions};
use onecopy_postgres::ServiceUser;
use rustix::process::{Resource, Rlimit, Signal};

use super::launch::Launch;
use super::memory_descriptors::descriptors;
use super::processes::end_left_server;
use super::role::Role;
use super::server::Server;
use crate::files::absent_is_fine;
use crate::{MachineConfiguration, MachineError, MachineHome};

/// Where no machine runs: ends whatever serves its memory, and removes the file and what is kept beside.
pub(crate) fn clear(home: &MachineHome) -> Result<(), MachineError> {
    end_left_server(Role::Memory, home, Signal::TERM);
    memory::unmount_left(&home.memory()).map_err(home.memory_failed())?;
    for left in [home.memory_shadow(), home.memory_socket()] {
        absent_is_fine(fs::remove_file(&left)).map_err(MachineError::file("remove", &left))?;
    }
    Ok(())
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
