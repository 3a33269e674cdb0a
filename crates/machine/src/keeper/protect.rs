//! The primary's side of a protection: a checkpoint after the other, each of which the backup holds before what the
//! machine has sent until then leaves this host.
//!
//! ```text
//!  all of it, while it runs ──> hold output ──> take ──> send ──> the backup has it ──> release output ──┐
//!                                                ^────────────────── period ────────────────────────────┘
//!  the backup is lost:       its copy is void (written down) ──> release output ──> it runs alone, and is copied anew
//!  the machine has died:     it is handed over (written down) ──> the backup goes on from what it has
//!  its keeper has died:      the next one does as if the backup were lost
//!  its host has died:        a person or a fence says so at the backup; no start here before that has been asked
//!  they lost each other:     etcd decides, where it is asked to; until it has, output is held
//! ```

use std::fs;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use onecopy_directory::atomic_file;
use onecopy_hypervisor::Machine;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::admission::{check_runs, check_sendable};
use super::backup_copy::{forget_left, left, run_alone};
use super::link::carried;
use super::primary::{Ended, Run};
use super::protection::{
    Durability, LOOK_INTERVAL, Protecting, ProtectionOrder, ProtectionRole, ProtectionState, ProtectionStatus,
    check_detection,
};
use super::state::Keeper;
use super::words;
use super::work::Work;
use super::{MigrationOrder, checkpoint, conclude, disk_epochs, receive_order};
use crate::desired_state;
use crate::files::absent_is_fine;
use crate::machine::CHECKPOINT_TIMEOUT;
use crate::migration::{Departure, DepartureState, ReceiveOrder};
use crate::{Etcd, MachineError, MachineHome};

/// How long it takes until a machine that lost its backup is copied anew; twice as long each time that this comes to
/// nothing.
const RETRY_MIN: Duration = Duration::from_secs(5);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// How often what is written down is read that cannot be.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// The protection that is wanted of a machine.
pub(crate) fn wanted(home: &MachineHome) -> Result<Option<ProtectionOrder>, MachineError> {
    let path = home.protection_file();
    let text = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(MachineError::file("read", &path))?,
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| MachineError::file("read", &path)(error.into()))
}

/// None is wanted any more.
pub(crate) fn forget_wanted(home: &MachineHome) -> Result<(), MachineError> {
    let path = home.protection_file();
    absent_is_fine(fs::remove_file(&path)).map_err(MachineError::file("remove", &path))
}

fn failed(home: &MachineHome, order: &ProtectionOrder, reason: impl ToString) -> MachineError {
    MachineError::Protection { machine: home.name().to_string(), to: order.to.clone(), reason: reason.to_string() }
}

fn as_migration(order: &ProtectionOrder) -> MigrationOrder {
    MigrationOrder {
        to: order.to.clone(),
        keys: order.keys.clone(),
        origin: order.origin.clone(),
        downtime_ms: 0,
        bytes_per_second: order.bytes_per_second,
        timeout_s: 0,
        goes_on_timeout: true,
        throttles: false,
        is_only_tried: false,
        bridge: order.bridge.clone(),
    }
}

/// Protects a machine from now on, whoever looks after it.
pub(super) fn begin(keeper: &Arc<Keeper>, machine: &Machine, order: &ProtectionOrder) -> Result<(), MachineError> {
    let home = keeper.home();
    let failed = |reason: String| failed(home, order, reason);
    let already = || failed(format!("it is protected already: onecopy vm unprotect {} ends that", home.name()));
    if keeper.is_protected() {
        return Err(already());
    }
    // Behind that: one that is protected stands again and again.
    check_runs(home, machine)?;
    let configuration = home.configuration()?;
    check_sendable(&configuration, order.bytes_per_second).map_err(failed)?;
    receive_order::network(keeper, &configuration, &as_migration(order)).map_err(failed)?;
    if configuration.network.is_none() && order.durability == Durability::Output {
        let reason = "its network is QEMU's own, of which nothing can be held back: a machine on a bridge can be \
                      protected so (`onecopy vm create --network`); with --durability periodic what was sent since the \
                      last checkpoint is lost";
        return Err(failed(reason.to_owned()));
    }
    if !order.etcd.is_empty() && order.durability == Durability::Periodic {
        let reason = "etcd decides where it goes on only where what it sends waits for its copy: cut off, it would be \
                      heard beside that; leave out --etcd or --durability periodic";
        return Err(failed(reason.to_owned()));
    }
    check_detection(order.detection_s).map_err(failed)?;
    let protecting = keeper.begin_protection().ok_or_else(already)?;
    keeper.gives_copy_up.store(false, Ordering::Release);
    let text = serde_json::to_vec(order).expect("texts and numbers");
    if let Err(error) = atomic_file::write(&home.protection_file(), 0o600, &text) {
        keeper.end_protection();
        return Err(error.into());
    }
    tell(keeper, order);
    tokio::spawn(keep_protected(Arc::clone(keeper), machine.clone(), order.clone(), protecting));
    Ok(())
}

/// From here on its status has it.
fn tell(keeper: &Keeper, order: &ProtectionOrder) {
    let mut status = ProtectionStatus::new(ProtectionRole::Primary, order.to.clone());
    status.durability = Some(order.durability);
    keeper.change(|told| told.protection = Some(status));
}

/// Sees to what is left here of a machine that was given away, where it is not known whether it runs there.
pub(super) fn if_given(keeper: &Arc<Keeper>, machine: &Machine) {
    if desired_state::is_migrated(keeper.home()) && machine.state().ending().is_none() {
        tokio::spawn(conclude(Arc::clone(keeper), machine.clone()));
    }
}

/// Concludes a migration, and protects again what goes on here after it.
pub(super) async fn conclude(keeper: Arc<Keeper>, machine: Machine) {
    if conclude::conclude(&keeper, &machine).await {
        resume(&keeper, &machine);
    }
}

/// A keeper that takes a machine over goes on with what is wanted; what an earlier one has copied is void, which is
/// written down before what it has held is let go. So it is of one that was taken back.
pub(super) fn resume(keeper: &Arc<Keeper>, machine: &Machine) {
    let home = keeper.home();
    let order = wanted(home).unwrap_or_else(|error| {
        tracing::error!(%error, "whether the machine shall be protected is not known");
        None
    });
    let left = left(home);
    if desired_state::is_migrated(home) || order.is_none() && left.is_none() {
        return;
    }
    let Some(protecting) = keeper.begin_protection() else { return };
    match (&order, &left) {
        (Some(order), _) => tell(keeper, order),
        // What it sends is held until that has come to an end.
        (None, Some(left)) => {
            let status = ProtectionStatus::new(ProtectionRole::Primary, left.to.clone());
            keeper.change(|told| told.protection = Some(status));
        }
        (None, None) => {}
    }
    let (keeper, machine) = (Arc::clone(keeper), machine.clone());
    tokio::spawn(async move {
        if let Some(left) = left {
            let _alone = keeper.alone_in_turn().await;
            if let Err(reason) = run_alone(&keeper, &machine, &left).await {
                tracing::error!(reason, "what it was protected by is not void");
                keeper.change(|told| told.protection = None);
                keeper.end_protection();
                return if_given(&keeper, &machine);
            }
        }
        match order {
            Some(order) => keep_protected(keeper, machine, order, protecting).await,
            None => {
                keeper.change(|told| told.protection = None);
                keeper.end_protection();
            }
        }
    });
}

/// Copies it, again and again, until that is wanted no more, or it ends, or is elsewhere.
async fn keep_protected(keeper: Arc<Keeper>, machine: Machine, order: ProtectionOrder, protecting: Arc<Protecting>) {
    let home = keeper.home();
    let is_wanted = || {
        let is_here = machine.state().ending().is_none() && !desired_state::is_migrated(home);
        is_here && !keeper.is_stopping() && !protecting.is_cancelled.load(Ordering::Acquire)
    };
    let mut pause = RETRY_MIN;
    while is_wanted() {
        let epochs = keeper.epochs_protected();
        // Nobody waits any more for what was asked of the copy of before.
        protecting.is_to_yield.store(false, Ordering::Release);
        let ended = match keeper.alone() {
            Ok(_alone) => session(&keeper, &machine, &order, &protecting).await,
            Err(_) => Err("a checkpoint is being made of it".to_owned()),
        };
        let Err(reason) = ended else { break };
        if !is_wanted() {
            break;
        }
        tracing::warn!(reason, "the machine is not protected");
        keeper.change_protection(|status| {
            (status.state, status.reason) = (ProtectionState::Unprotected, Some(reason));
        });
        if keeper.epochs_protected() > epochs {
            pause = RETRY_MIN;
        }
        let again = Instant::now() + pause;
        pause = (pause * 2).min(RETRY_MAX);
        while is_wanted() && Instant::now() < again {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
    keeper.change(|told| told.protection = None);
    keeper.end_protection();
    if_given(&keeper, &machine);
}

/// Copies it, and protects it until that ends. An error: why it runs alone.
async fn session(
    keeper: &Arc<Keeper>,
    machine: &Machine,
    order: &ProtectionOrder,
    protecting: &Arc<Protecting>,
) -> Result<(), String> {
    let home = keeper.home();
    forget_left(keeper, machine).await?;
    if protecting.is_cancelled.load(Ordering::Acquire) {
        return Err("it was cancelled".to_owned());
    }
    let migration = as_migration(order);
    let configuration = home.configuration().map_err(words)?;
    check_runs(home, machine).map_err(words)?;
    checkpoint::prepare(keeper, machine, Instant::now() + CHECKPOINT_TIMEOUT).await.map_err(words)?;
    let departure = Departure {
        token: format!("{:032x}", rand::random::<u128>()),
        to: order.to.clone(),
        keys: order.keys.clone(),
        disk: home.disk_name(),
        snapshot: String::new(),
        state: DepartureState::Begun,
        is_whole: false,
        result: None,
        protects: true,
        fences: false,
        etcd: order.etcd.clone(),
    };
    if let Some(etcd) = Etcd::of(&order.etcd, &order.keys) {
        etcd.introduce(&departure.token).await?;
    }
    let network = receive_order::network(keeper, &configuration, &migration)?;
    let receive = receive_order::of(home, &migration, &departure).map_err(words)?;
    let receive = ReceiveOrder {
        network,
        detection_s: order.detection_s,
        compares_disk: !order.sends_all,
        asks_etcd: !order.etcd.is_empty(),
        ..receive
    };
    departure.begin(home).map_err(words)?;
    let opened = receive_order::send(home, &migration, receive).await;
    let handle = Handle::current();
    let outcome = match opened.and_then(|far| carried(&handle, far).map_err(words)) {
        Ok(stream) => {
            let work = Work::new(keeper, machine, migration, Arc::clone(&protecting.is_cancelled), mpsc::channel(1).0);
            let (order, protecting, departure) = (order.clone(), Arc::clone(protecting), departure.clone());
            let disk = (keeper.user().user_id(), configuration.disk_bytes);
            let run = Run { work, order, protecting, departure, disk };
            let ran = tokio::task::spawn_blocking(move || run.run(stream)).await;
            ran.unwrap_or_else(|error| Err(format!("it ended in its middle: {error}")))
        }
        Err(reason) => Err(reason),
    };
    if let Err(error) = checkpoint::release(home).await {
        tracing::warn!(error, "the memory's epochs are let go before the next checkpoint");
    }
    let disk = home.clone();
    let released = tokio::task::spawn_blocking(move || disk_epochs::release(&disk, u64::MAX).map_err(words)).await;
    if let Ok(Err(error)) = released {
        tracing::debug!(error, "the disk's epochs are let go with its server");
    }
    if let Ok(Ended::Gone) = outcome {
        if let Err(error) = machine.quit().await {
            tracing::error!(%error, "what is left of the machine does not end");
        }
        return Ok(());
    }
    if let Err(reason) = &outcome {
        keeper.change_protection(|status| {
            (status.state, status.reason) = (ProtectionState::Unprotected, Some(reason.clone()));
        });
    }
    conclude::let_go_standing(keeper, machine).await;
    // As it is written down by now: whether its copy may be whole, and fences this host.
    let known = loop {
        match Departure::of(home) {
            Ok(known) => break known.filter(|known| known.token == departure.token),
            Err(error) => {
                tracing::error!(%error, "what the machine sends is held: whether its copy may go on is not known");
            }
        }
        tokio::time::sleep(READ_INTERVAL).await;
    };
    run_alone(keeper, machine, &known.unwrap_or(departure)).await?;
    outcome.map(|_| ())
}
