//! What a keeper does first: the servers that a machine needs, and then its QEMU, started or taken over from a keeper
//! that has died.

use std::sync::Arc;
use std::time::Duration;

use onecopy_checkpoint::memory::{Descriptors, GuestMemory};
use onecopy_hypervisor::Machine;
use onecopy_postgres::ServiceUser;
use rustix::process::Signal;
use tokio::sync::watch;

use super::launch::Launch;
use super::processes::end_left_server;
use super::restore::{self, Restored};
use super::role::Role;
use super::server::Server;
use super::servers::Servers;
use super::start::{Begun, start};
use super::state::Keeper;
use super::verdict::failed;
use super::{arrive, arriving_disk, backup_copy, end_left_servers, guest, memory, network, verdict};
use crate::configuration::refuse_memory_elsewhere;
use crate::desired_state::{self, Takeover};
use crate::migration::{Arrival, ArrivalState};
use crate::{MachineError, MachineHome};

/// The time between attempts to reach a machine that runs and does not answer.
const ADOPT_INTERVAL: Duration = Duration::from_secs(1);

/// Starts a machine's servers, or takes over those of one that is there; with what it begins from that does not boot.
pub(super) async fn servers(
    home: &MachineHome,
    user: &ServiceUser,
    keeper: &Arc<Keeper>,
    is_there: bool,
) -> Result<(Servers, Option<Begun>), MachineError> {
    let (memory, begun) = match is_there {
        true => (memory::take_over(home).await, None),
        false => memory_of(home, user, keeper).await?,
    };
    keeper.change(|status| status.memory_process_id = memory.as_ref().and_then(Server::process_id));
    // One that comes just now leads its disk there itself.
    let come = arrival_of(home).filter(|record| !record.is_whole && (is_there || record.state == ArrivalState::Here));
    if let Some(record) = come {
        if let Err(error) = arriving_disk::serve_source(home, user, &record, watch::channel(true).1) {
            tracing::error!(%error, "what is not here yet of the disk cannot be read");
        }
        if !desired_state::is_arriving(home) {
            tokio::spawn(arriving_disk::look_after_disk(home.clone(), record));
        }
    }
    let network = match is_there {
        true => Ok(network::take_over(home).await),
        false => network::begin(home).await,
    };
    let network = match network {
        Ok(network) => network,
        Err(error) => return Err(give_up(home, begun, (memory, None), error).await),
    };
    keeper.change(|status| status.network_process_id = network.as_ref().and_then(Server::process_id));
    let disk = match Server::start(home, Launch::Disk(user.clone())).await {
        Ok(disk) => disk,
        // It waits for its disk, and needs the others.
        Err(reason) if is_there => {
            tracing::error!(reason, "the machine runs, and its disk is not served");
            Server::resume(home, Launch::Disk(user.clone()))
        }
        Err(reason) => {
            let error = MachineError::Ended { machine: home.name().to_string(), reason };
            return Err(give_up(home, begun, (memory, network), error).await);
        }
    };
    keeper.change(|status| status.disk_process_id = disk.process_id());
    Ok((Servers { disk, memory, network }, begun))
}

/// The memory of a machine of which nothing runs. One that was protected elsewhere does not start before it is known
/// that it does not run there.
async fn memory_of(
    home: &MachineHome,
    user: &ServiceUser,
    keeper: &Arc<Keeper>,
) -> Result<(Option<Server>, Option<Begun>), MachineError> {
    backup_copy::check_start(home, user).await?;
    let Some(record) = arrive::expected(home)? else {
        let (server, restored) = begin_memory(home, user).await?;
        return Ok((server, restored.map(Begun::Restored)));
    };
    match arrive::begin(home, user, keeper, record).await {
        Ok((server, arriving)) => Ok((Some(server), Some(Begun::Arriving(Box::new(arriving))))),
        Err(error) => {
            memory::close(home, None).await;
            Err(error)
        }
    }
}

/// Ends the servers of a machine that does not begin because of this error, which whoever sends it hears.
async fn give_up(
    home: &MachineHome,
    begun: Option<Begun>,
    (memory, network): (Option<Server>, Option<Server>),
    error: MachineError,
) -> MachineError {
    if let Some(begun) = begun {
        begun.refuse(home, &error).await;
    }
    network::close(home, network).await;
    memory::close(home, memory).await;
    error
}

/// Starts a machine over its servers, or takes over the one that was there, once it is known that it runs here; with
/// what is to be done first. It may stand by for long, for a machine elsewhere.
pub(super) async fn machine(
    home: &MachineHome,
    user: &ServiceUser,
    keeper: &Arc<Keeper>,
    servers: &mut Servers,
    begun: Option<Begun>,
    is_there: bool,
) -> Result<(Machine, Takeover), MachineError> {
    let is_arriving = matches!(begun, Some(Begun::Arriving(_)));
    let begun = async {
        match is_there {
            true => adopt(home, user).await,
            false => start(home, user, begun).await.map(|machine| (machine, Takeover::Leave)),
        }
    };
    let (machine, care) = tokio::select! {
        begun = begun => begun?,
        never = servers.look_after(keeper, is_arriving) => match never {},
    };
    // Its keeper has died before it was known where it goes on. Where that record is broken it stands.
    let decided = match arrival_of(home).filter(|_| desired_state::is_arriving(home)) {
        Some(record) => tokio::select! {
            decided = verdict::decide(home, user, &machine, keeper, &record, None) => decided,
            never = servers.look_after(keeper, false) => match never {},
        },
        None => Ok(()),
    };
    if let Err(error) = decided {
        machine.kill();
        let _ = machine.wait_killed().await;
        return Err(error);
    }
    Ok((machine, care))
}

/// Takes over the machine that was there. It needs its disk: it is not given up, however long its monitor does not
/// answer.
async fn adopt(home: &MachineHome, user: &ServiceUser) -> Result<(Machine, Takeover), MachineError> {
    loop {
        let error = match guest::adopt(home, user).await {
            Ok(Some(adopted)) => return Ok(adopted),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if let Ok(None) = home.find_process() {
            return Err(has_ended(home, user, error).await);
        }
        tracing::error!(error = error.map(tracing::field::display), "the machine runs and cannot be reached");
        tokio::time::sleep(ADOPT_INTERVAL).await;
    }
}

/// Ends what served a machine of which nothing runs, and whose keeper has died.
pub(super) async fn close_left(home: &MachineHome) {
    let own = home.clone();
    if let Err(error) = tokio::task::spawn_blocking(move || end_left_servers(&own, Signal::TERM)).await {
        tracing::warn!(%error, "what served the machine may be left");
    }
    network::close(home, None).await;
    memory::close(home, None).await;
}

/// How a machine has ended that somebody came to look after, where nothing better is known. Where it has died its copy
/// goes on.
pub(super) async fn has_ended(home: &MachineHome, user: &ServiceUser, known: Option<MachineError>) -> MachineError {
    let name = home.name().clone();
    match (backup_copy::check_start(home, user).await, known, arrive::expected(home)) {
        (Err(error), ..) | (Ok(()), Some(error), _) | (Ok(()), None, Err(error)) => error,
        (Ok(()), None, Ok(Some(_))) => failed(home, arrive::BROKEN_OFF),
        (Ok(()), None, Ok(None)) if desired_state::is_migrated(home) => MachineError::Moved { name },
        (Ok(()), None, Ok(None)) => {
            let reason = format!("it ended while nobody looked after it; start it again with: onecopy vm start {name}");
            MachineError::Ended { machine: name.to_string(), reason }
        }
    }
}

/// What is written down of its coming: who looks after a machine that runs goes on without a record that is broken.
pub(super) fn arrival_of(home: &MachineHome) -> Option<Arrival> {
    Arrival::of(home).unwrap_or_else(|error| {
        tracing::error!(%error, "it is not known whether the machine has come from another host");
        None
    })
}

/// Before a machine is started: its memory's file and its server, where it shall have one. What an earlier run left is
/// gone.
async fn begin_memory(
    home: &MachineHome,
    user: &ServiceUser,
) -> Result<(Option<Server>, Option<Restored>), MachineError> {
    let (own, user) = (home.clone(), user.clone());
    let prepared = tokio::task::spawn_blocking(move || prepare_memory(&own, &user)).await;
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
        memory::close(home, None).await;
    }
    begun
}

fn prepare_memory(
    home: &MachineHome,
    user: &ServiceUser,
) -> Result<(Option<Descriptors>, Option<Restored>), MachineError> {
    memory::clear(home)?;
    restore::forget(home)?;
    let (configuration, start_point) = (home.configuration()?, restore::start_point(home)?);
    if !configuration.checkpoints {
        let reason = "its machine.toml does not say `checkpoints = true`".to_owned();
        let machine = home.name().to_string();
        return start_point.map_or(Ok((None, None)), |_| Err(MachineError::Checkpoint { machine, reason }));
    }
    refuse_memory_elsewhere()?;
    let mut options = memory::options(&configuration, user);
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
