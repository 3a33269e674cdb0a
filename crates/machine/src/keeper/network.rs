//! The network of a machine on a bridge: its interface made before QEMU starts and found again by the next keeper, the
//! guest's addresses, and its part of a checkpoint.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_checkpoint::take::{self, Cause};
use onecopy_guest_agent::protocol::Identity;
use onecopy_hypervisor::{Agent, Machine};
use onecopy_network::{State, Tap};
use rustix::process::Signal;
use tokio::runtime::Handle;

use super::launch::{Launch, NetworkDescriptors};
use super::processes::{LOOK_INTERVAL, READY_TIMEOUT, end_left_server, server_of};
use super::role::Role;
use super::server::Server;
use super::state::Keeper;
use crate::files::{absent_is_fine, synchronize, write_own_file};
use crate::memory_server::descriptor_of;
use crate::network::{BridgedNetwork, interface_name};
use crate::network_holder::{EndedEpoch, NetworkClient, Request, ServedNetwork, is_to_hold};
use crate::{MachineConfiguration, MachineError, MachineHome, hypervisor_failed};

/// The name of its card in QEMU.
pub(super) const CARD: &str = "net0";

/// The time between two attempts to give a guest its identity.
const IDENTITY_INTERVAL: Duration = Duration::from_secs(10);

/// A machine that has come is announced three times, after pauses: a frame may be lost.
const ANNOUNCE_AFTER: [Duration; 3] = [Duration::ZERO, Duration::from_millis(100), Duration::from_secs(1)];

/// Before a machine is started: its interface and its holder, where it is on a bridge. What an earlier run left goes.
pub(super) async fn begin(home: &MachineHome) -> Result<Option<Server>, MachineError> {
    let own = home.clone();
    let cleared = tokio::task::spawn_blocking(move || clear(&own)).await;
    cleared.unwrap_or_else(|error| Err(MachineError::Task(format!("clearing a network ended: {error}"))))?;
    let Some(network) = home.configuration()?.network else { return Ok(None) };
    BridgedNetwork::refuse_elsewhere()?;
    let ended = |reason| MachineError::Ended { machine: home.name().to_string(), reason };
    let launch = Launch::Network(make(home, network).await?);
    Server::start(home, launch).await.map(Some).map_err(ended)
}

/// A new interface on the bridge, and a state that holds nothing.
async fn make(home: &MachineHome, network: BridgedNetwork) -> Result<NetworkDescriptors, MachineError> {
    let (name, card, home) = (interface_name(home.root()), network.card(home.root()), home.clone());
    let made = tokio::task::spawn_blocking(move || {
        let tap = Tap::create(&name, &network.bridge).map_err(home.network_failed())?;
        let state = State::create(card, network.filter).map_err(home.network_failed())?;
        let opened = tap.descriptor().and_then(|tap| Ok(NetworkDescriptors { tap, state: state.descriptor()? }));
        opened.map_err(MachineError::file("open the interface of", home.root()))
    });
    made.await.unwrap_or_else(|error| Err(MachineError::Task(format!("making a network ended: {error}"))))
}

/// Where no machine runs: ends whatever passes its frames, with which its interface goes.
pub(crate) fn clear(home: &MachineHome) -> Result<(), MachineError> {
    end_left_server(Role::Network, home, Signal::TERM);
    for left in [home.network_socket(), home.holding_file(), home.identity_file()] {
        absent_is_fine(fs::remove_file(&left)).map_err(MachineError::file("remove", &left))?;
    }
    Ok(())
}

/// After a machine's end: [`clear`]s what passed its frames, also what could not be taken over.
pub(super) async fn close(home: &MachineHome, held: Option<Server>) {
    if let Some(server) = held {
        server.close().await;
    }
    let own = home.clone();
    let cleared = tokio::task::spawn_blocking(move || clear(&own)).await;
    if let Ok(Err(error)) = cleared {
        tracing::warn!(%error, "the machine's network has left something; its next start clears it");
    }
}

/// The network holder of a machine that runs, taken over from a keeper that has died; where it has died, too, another
/// one, with a new interface.
pub(super) async fn take_over(home: &MachineHome) -> Option<Server> {
    let taken = match server_of(Role::Network, home) {
        Some(process_id) => descriptors(home, process_id).await,
        None => match home.configuration() {
            Ok(MachineConfiguration { network: Some(network), .. }) => {
                tracing::warn!("keeper and network holder have died: what was held is lost, as on a wire");
                make(home, network).await.map_err(|error| error.to_string())
            }
            Ok(_) => return None,
            Err(error) => Err(error.to_string()),
        },
    };
    let started = match taken {
        Ok(descriptors) => Server::start(home, Launch::Network(descriptors)).await,
        Err(reason) => Err(reason),
    };
    // The machine runs on, as behind a wire that is pulled out.
    started.inspect_err(|reason| tracing::error!(reason, "nobody looks after the machine's network")).ok()
}

/// What a holder has, here. One that is beginning is waited for.
async fn descriptors(home: &MachineHome, process_id: u32) -> Result<NetworkDescriptors, String> {
    let begun = Instant::now();
    let told = loop {
        let told = async { NetworkClient::connect(home).await?.ask::<ServedNetwork>(Request::Info).await };
        match told.await {
            Ok(told) if told.process_id == process_id => break told,
            Ok(told) => return Err(format!("process {} answers, and not {process_id}", told.process_id)),
            Err(reason) if begun.elapsed() >= READY_TIMEOUT => return Err(reason),
            Err(_) => tokio::time::sleep(LOOK_INTERVAL).await,
        }
    };
    let taken = |number| descriptor_of(process_id, number).map_err(|error| format!("its descriptors: {error}"));
    Ok(NetworkDescriptors { tap: taken(told.tap_descriptor)?, state: taken(told.state_descriptor)? })
}

/// QEMU announces a card that it has just loaded, by the address that it was loaded with: a fork's is its parent's, and
/// a machine that comes from another host may yet go on there.
pub(super) async fn silence(home: &MachineHome, machine: &Machine) -> Result<(), MachineError> {
    if home.configuration()?.network.is_none() {
        return Ok(());
    }
    let none = [("announce-rounds".to_owned(), 0.into())].into_iter().collect();
    machine.monitor().set_migration_parameters(none).await.map_err(|error| hypervisor_failed(home.name(), error))
}

/// Gives a guest on a bridge that answers the addresses that it shall have, once for each boot and each start of QEMU,
/// and a fork its own name and machine id, once; plugs it in then. The daemon does that for forks in a cluster.
pub(super) async fn set_identity(keeper: &Keeper, machine: &Machine, agent: &Agent) {
    let home = keeper.home();
    let Ok(MachineConfiguration { network, .. }) = home.configuration() else { return };
    let is_fork = home.isolated_file().exists() && !home.name().is_of_clusters();
    if network.is_none() && !is_fork {
        return keeper.change(|status| status.network_failure = None);
    }
    let which = format!("{} {}\n", machine.process_id(), agent.greeting().boot_id);
    match fs::read_to_string(home.identity_file()) {
        Ok(known) if known == which => return,
        Ok(known) if known == arrived_word(machine) => {
            if let Err(error) = announce_own(home).await {
                // The next keeper does it.
                return tracing::warn!(error, "the network is not told where the machine is");
            }
            return note_identity(home, &which);
        }
        Ok(_) | Err(_) => {}
    }
    let address = network.as_ref().and_then(|network| network.address);
    let identity = Identity {
        hostname: is_fork.then(|| home.name().to_string()),
        machine_id: is_fork.then(|| format!("{:032x}", rand::random::<u128>())),
        mac: network.as_ref().map(|network| network.card(home.root()).to_string()),
        address: address.map(|address| address.to_string()),
        gateway: network.and_then(|network| network.gateway).map(|gateway| gateway.to_string()),
    };
    let plugged = match agent.set_identity(identity).await {
        Ok(()) => connect(home, machine).await,
        Err(error) => Err(hypervisor_failed(home.name(), error)),
    };
    let failure = plugged.err().map(|error| error.to_string());
    if let Some(failure) = &failure {
        tracing::error!(failure, "the guest has not got its identity; it is tried again");
    } else {
        note_identity(home, &which);
    }
    if let Some(address) = address.filter(|_| failure.is_none())
        && let Err(error) = announce(home, vec![address.address]).await
    {
        tracing::warn!(error, "the network is not told where the machine is");
    }
    keeper.change(|status| status.network_failure = failure);
}

/// Tries again and again to give a guest its identity that has not got it.
pub(super) async fn set_identity_again(keeper: Arc<Keeper>, machine: Machine, agent: Agent) {
    while keeper.network_failure().is_some() {
        tokio::time::sleep(IDENTITY_INTERVAL).await;
        set_identity(&keeper, &machine, &agent).await;
    }
}

/// Which guest has got its addresses.
fn note_identity(home: &MachineHome, which: &str) {
    if let Err(error) = write_own_file(&home.identity_file(), which.as_bytes(), 0o600) {
        tracing::warn!(%error, "the guest gets its addresses again from the next keeper");
    }
}

/// A guest that has its addresses, by QEMU's process: its agent has not said yet which boot it is.
fn arrived_word(machine: &Machine) -> String {
    format!("{} arrived\n", machine.process_id())
}

/// The guest of a machine that comes from another host has its addresses: it is not given them anew. Written down
/// before it runs, so that also the next keeper announces it.
pub(super) fn note_arriving(home: &MachineHome, machine: &Machine) -> Result<(), MachineError> {
    match home.configuration().is_ok_and(|configuration| configuration.network.is_some()) {
        true => write_own_file(&home.identity_file(), arrived_word(machine).as_bytes(), 0o600),
        false => Ok(()),
    }
}

/// A machine on a bridge runs here now, and did elsewhere: the network learns where it is.
pub(super) fn announce_often(home: &MachineHome) {
    let home = home.clone();
    tokio::spawn(async move {
        for pause in ANNOUNCE_AFTER {
            tokio::time::sleep(pause).await;
            if let Err(error) = announce_own(&home).await {
                tracing::warn!(error, "the network is not told where the machine is");
            }
        }
    });
}

/// Tells the network that the machine's card is here, where it is on a bridge, and its address, where that is known.
async fn announce_own(home: &MachineHome) -> Result<(), String> {
    match home.configuration().map_err(|error| error.to_string())?.network {
        Some(network) => announce(home, network.address.map(|own| own.address).into_iter().collect()).await,
        None => Ok(()),
    }
}

/// Tells the network that these addresses are at the machine's card, here.
pub(super) async fn announce(home: &MachineHome, addresses: Vec<std::net::IpAddr>) -> Result<(), String> {
    NetworkClient::connect(home).await?.ask(Request::Announce { addresses }).await
}

/// The network's part of a take: what a machine sends that is held.
pub(super) struct HeldOutput<'a> {
    home: &'a MachineHome,
    handle: &'a Handle,
    is_held: bool,
    /// The epoch that the take has ended.
    pub(super) epoch: Option<u64>,
}

/// Of a machine whose output is not held nothing is cut.
pub(super) fn of<'a>(home: &'a MachineHome, handle: &'a Handle) -> Result<HeldOutput<'a>, String> {
    let told = async { NetworkClient::connect(home).await?.ask::<ServedNetwork>(Request::Info).await };
    let is_held = match handle.block_on(told) {
        Ok(told) => told.statistics.holding,
        Err(reason) if is_to_hold(home) => return Err(reason),
        Err(_) => false,
    };
    Ok(HeldOutput { home, handle, is_held, epoch: None })
}

impl HeldOutput<'_> {
    fn ask<T: serde::de::DeserializeOwned>(&self, request: Request) -> Result<T, Cause> {
        let asked = async { NetworkClient::connect(self.home).await?.ask(request).await };
        Ok(self.handle.block_on(asked)?)
    }
}

impl take::Network for HeldOutput<'_> {
    fn drain(&mut self) -> Result<(), Cause> {
        if self.is_held { self.ask(Request::Drain) } else { Ok(()) }
    }

    fn cut(&mut self) -> Result<(), Cause> {
        if self.is_held {
            self.epoch = Some(self.ask::<EndedEpoch>(Request::Cut)?.epoch);
        }
        Ok(())
    }
}

/// Puts the cable into the card of a machine that began without.
pub(super) async fn connect(home: &MachineHome, machine: &Machine) -> Result<(), MachineError> {
    machine.monitor().set_link(CARD, true).await.map_err(|error| hypervisor_failed(home.name(), error))?;
    let path = home.isolated_file();
    absent_is_fine(fs::remove_file(&path)).map_err(MachineError::file("remove", &path))?;
    // Back after a power cut, it would unplug the card at each start, and nobody plugs it in again.
    synchronize(home.root())
}
