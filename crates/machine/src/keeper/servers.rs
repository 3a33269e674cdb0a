//! The processes beside a machine's QEMU: started again when they die, and ended with it.

use std::convert::Infallible;

use super::role::Role;
use super::server::{Server, ServerEvent};
use super::state::Keeper;
use super::{memory, network};
use crate::MachineHome;

/// Those of one machine.
pub(super) struct Servers {
    /// Its disk's.
    pub(super) disk: Server,
    /// Its memory's; none where the memory is QEMU's own.
    pub(super) memory: Option<Server>,
    /// Its network's; none where the network is QEMU's own.
    pub(super) network: Option<Server>,
}

impl Servers {
    /// Starts again what dies, and has the keeper tell of it. May be given up at any await and begun again.
    ///
    /// While the machine only waits for what comes from elsewhere a memory whose server dies is of no use: who has it
    /// mapped, or writes there, gets an error instead of waiting, and what was to begin does not.
    pub(super) async fn look_after(&mut self, keeper: &Keeper, is_waiting: bool) -> Infallible {
        loop {
            let (role, event) = tokio::select! {
                event = self.disk.next() => (Role::Disk, event),
                event = next_of(&mut self.memory) => (Role::Memory, event),
                event = next_of(&mut self.network) => (Role::Network, event),
            };
            match event {
                ServerEvent::Died(reason) if role == Role::Memory && is_waiting => {
                    tracing::error!(reason, "the memory server has died, and what was to begin does not");
                    // With the kernel's end of it, which nobody else has any more.
                    self.memory = None;
                }
                ServerEvent::Died(reason) if role == Role::Memory && self.is_last_of_memory() => {
                    tracing::error!(
                        reason,
                        "the memory server has died while the memory's copy was being closed: the machine ends when it \
                         touches a page that the host has not"
                    );
                    keeper.change(|status| status.memory_process_id = None);
                    self.memory = None;
                }
                ServerEvent::Died(reason) => {
                    tracing::warn!(reason, "the {role} has died and is started again");
                    keeper.change(|status| match role {
                        Role::Disk => status.disk_process_id = None,
                        Role::Memory => status.memory_process_id = None,
                        Role::Network => status.network_process_id = None,
                    });
                }
                ServerEvent::Serves => {
                    let number = self.process_id(role);
                    keeper.change(|status| {
                        let (process_id, restarts) = match role {
                            Role::Disk => (&mut status.disk_process_id, &mut status.disk_restarts),
                            Role::Memory => (&mut status.memory_process_id, &mut status.memory_restarts),
                            Role::Network => (&mut status.network_process_id, &mut status.network_restarts),
                        };
                        *process_id = number;
                        *restarts += 1;
                    });
                }
                // What stands in the way may pass; the guest waits.
                ServerEvent::Failed(reason) => tracing::error!(reason, "there is no {role}"),
            }
        }
    }

    fn is_last_of_memory(&self) -> bool {
        self.memory.as_ref().is_some_and(Server::is_last)
    }

    fn process_id(&self, role: Role) -> Option<u32> {
        match role {
            Role::Disk => self.disk.process_id(),
            Role::Memory => self.memory.as_ref().and_then(Server::process_id),
            Role::Network => self.network.as_ref().and_then(Server::process_id),
        }
    }

    /// Ends them, once nothing of the machine runs.
    pub(super) async fn close(self, home: &MachineHome) {
        self.disk.close().await;
        network::close(home, self.network).await;
        memory::close(home, self.memory).await;
    }
}

/// What happens next to a server; nothing ever where there is none.
async fn next_of(server: &mut Option<Server>) -> ServerEvent {
    match server {
        Some(server) => server.next().await,
        None => std::future::pending().await,
    }
}
