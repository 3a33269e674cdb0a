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
//! ```

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onecopy_checkpoint::delta::{Counts, Shape};
use onecopy_checkpoint::image::Image;
use onecopy_checkpoint::take::{self, After, Parts, Taken};
use onecopy_directory::atomic_file;
use onecopy_hypervisor::{EndCause, Ending, Machine, State};
use onecopy_postgres::ServiceUser;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::disk_epochs::{self, EpochBlocks, EpochDisk};
use super::link::{ALONE_AFTER, Answered, Said, carried};
use super::migrate::{RATE_MIN, Work, words};
use super::parts::{Memory, Processors, Record, recover};
use super::protection::{Durability, ProtectionOrder, ProtectionRole, ProtectionState, ProtectionStatus};
use super::rounds::Sender;
use super::service::Kept;
use super::shared_disk::DiskPageMap;
use super::unresponsive::unix_ms;
use super::{MigrationOrder, brake, checkpoint, conclude, network, receive_order};
use crate::desired_state::{self, DesiredState};
use crate::hardware::Hardware;
use crate::home::absent_is_fine;
use crate::machine::CHECKPOINT_TIMEOUT;
use crate::memory_server::Request;
use crate::migration::{self, Departure, DepartureState, Gone, HostOrder, ReceiveOrder};
use crate::network_holder::{NetworkClient, Request as NetworkRequest, ServedNetwork, is_to_hold};
use crate::{MachineError, MachineHome};

/// How long it takes until a machine that lost its backup is copied anew; twice as long each time that this comes to
/// nothing.
const RETRY_MIN: Duration = Duration::from_secs(5);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// How long a checkpoint may take until the backup has it: what the machine sends may wait for it. Less than
/// [`FENCE_WITHIN`](super::link::FENCE_WITHIN), which counts from the last one.
const EPOCH_TIMEOUT: Duration = Duration::from_secs(30);

/// A machine stands from then on until a checkpoint is there: where what it sends waits for that anyway, and where only
/// what would be lost grows.
const OUTPUT_BEHIND_MAX: Duration = Duration::from_millis(500);
const PERIODIC_BEHIND_MAX: Duration = Duration::from_secs(5);

/// A machine stands for a checkpoint for at most one in so many parts of the time.
const PAUSE_SHARE: u32 = 10;

/// From one checkpoint to the next at least, also where something waits for it.
const PERIOD_MIN: Duration = Duration::from_millis(20);

/// How often it is looked whether something waits.
const OUTPUT_LOOK: Duration = Duration::from_millis(5);

/// What is sent while it runs before it is protected: until this little is left, or so often.
const LITTLE_PIECES: u64 = 8192;
const COPIES_MAX: u32 = 5;
/// From this one on it stands for them as for a checkpoint: they become less.
const BRAKED_COPY: u32 = 3;

/// How often it is looked whether something else is wanted.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How long what copies a machine may take to see that it has ended.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// How often it is looked whether a machine whose monitor does not answer has ended.
const DEATH_LOOK: Duration = Duration::from_secs(1);

/// What is wanted of a protection that is under way.
#[derive(Debug, Default)]
pub(super) struct Protecting {
    /// It shall end: its connection, too.
    pub(super) is_cancelled: Arc<AtomicBool>,
    /// The machine shall go on at the backup.
    pub(super) is_to_yield: AtomicBool,
}

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
        is_only_tried: false,
        bridge: order.bridge.clone(),
    }
}

/// Protects a machine from now on, whoever looks after it.
pub(super) fn begin(kept: &Arc<Kept>, machine: &Machine, order: &ProtectionOrder) -> Result<(), MachineError> {
    let home = kept.home();
    let failed = |reason: String| failed(home, order, reason);
    let already = || failed(format!("it is protected already: onecopy vm unprotect {} ends that", home.name()));
    if kept.is_protected() {
        return Err(already());
    }
    // Behind that: one that is protected stands again and again.
    checkpoint::check_runs(home, machine)?;
    let configuration = home.configuration()?;
    if !configuration.checkpoints {
        let reason = "its memory is QEMU's own; set `checkpoints = true` in its machine.toml, then stop and start it";
        return Err(failed(reason.to_owned()));
    }
    receive_order::network(kept, &configuration, &as_migration(order)).map_err(failed)?;
    if configuration.network.is_none() && order.durability == Durability::Output {
        let reason = "its network is QEMU's own, of which nothing can be held back: a machine on a bridge can be \
                      protected so (`onecopy vm create --network`); with --durability periodic what was sent since the \
                      last checkpoint is lost";
        return Err(failed(reason.to_owned()));
    }
    if let Some(rate) = order.bytes_per_second.filter(|rate| *rate < RATE_MIN) {
        return Err(failed(format!("a bandwidth of {rate} bytes a second is too low: give {RATE_MIN} at least")));
    }
    let protecting = kept.begin_protection().ok_or_else(already)?;
    let text = serde_json::to_vec(order).expect("texts and numbers");
    if let Err(error) = atomic_file::write(&home.protection_file(), 0o600, &text) {
        kept.end_protection();
        return Err(error.into());
    }
    tell(kept, order);
    tokio::spawn(keep_protected(Arc::clone(kept), machine.clone(), order.clone(), protecting));
    Ok(())
}

/// From here on its status has it.
fn tell(kept: &Kept, order: &ProtectionOrder) {
    let status = ProtectionStatus::new(ProtectionRole::Primary, order.to.clone());
    kept.change(|told| told.protection = Some(status));
}

/// A keeper that takes a machine over goes on with what is wanted; what an earlier one has copied is void, which is
/// written down before what it has held is let go. So it is of one that was taken back.
pub(super) fn resume(kept: &Arc<Kept>, machine: &Machine) {
    let home = kept.home();
    let order = wanted(home).unwrap_or_else(|error| {
        tracing::error!(%error, "whether the machine shall be protected is not known");
        None
    });
    let left = left(home);
    if desired_state::is_migrated(home) || order.is_none() && left.is_none() {
        return;
    }
    let Some(protecting) = kept.begin_protection() else { return };
    if let Some(order) = &order {
        tell(kept, order);
    }
    let (kept, machine) = (Arc::clone(kept), machine.clone());
    tokio::spawn(async move {
        if let Some(left) = left {
            let _alone = kept.alone_in_turn().await;
            if let Err(reason) = run_alone(kept.home(), &machine, &left).await {
                tracing::error!(reason, "what it was protected by is not void");
                kept.change(|told| told.protection = None);
                return kept.end_protection();
            }
        }
        match order {
            Some(order) => keep_protected(kept, machine, order, protecting).await,
            None => kept.end_protection(),
        }
    });
}

/// A protection of which something is left: a copy that may go on, or output that is held.
fn left(home: &MachineHome) -> Option<Departure> {
    let known = Departure::of(home).unwrap_or_else(|error| {
        tracing::error!(%error, "whether a copy of the machine may go on is not known");
        None
    });
    let is_left = |known: &Departure| known.state == DepartureState::Begun || is_to_hold(home);
    known.filter(|known| known.protects && is_left(known) && !desired_state::is_migrated(home))
}

/// Makes void what is left of a protection that nobody looks after.
pub(super) async fn forget_left(home: &MachineHome, machine: &Machine) -> Result<(), String> {
    match left(home) {
        Some(left) => run_alone(home, machine, &left).await,
        None => Ok(()),
    }
}

/// Copies it, again and again, until that is wanted no more, or it ends, or is elsewhere.
async fn keep_protected(kept: Arc<Kept>, machine: Machine, order: ProtectionOrder, protecting: Arc<Protecting>) {
    let home = kept.home();
    let is_wanted = || {
        let is_here = machine.state().ending().is_none() && !desired_state::is_migrated(home);
        is_here && !kept.is_stopping() && !protecting.is_cancelled.load(Ordering::Acquire)
    };
    let mut pause = RETRY_MIN;
    while is_wanted() {
        let epochs = kept.epochs_protected();
        // Nobody waits any more for what was asked of the copy of before.
        protecting.is_to_yield.store(false, Ordering::Release);
        let ended = match kept.alone() {
            Ok(_alone) => session(&kept, &machine, &order, &protecting).await,
            Err(_) => Err("a checkpoint is being made of it".to_owned()),
        };
        let Err(reason) = ended else { break };
        if !is_wanted() {
            break;
        }
        tracing::warn!(reason, "the machine is not protected");
        kept.change_protection(|status| {
            (status.state, status.reason) = (ProtectionState::Unprotected, Some(reason));
        });
        if kept.epochs_protected() > epochs {
            pause = RETRY_MIN;
        }
        let again = Instant::now() + pause;
        pause = (pause * 2).min(RETRY_MAX);
        while is_wanted() && Instant::now() < again {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
    kept.change(|told| told.protection = None);
    kept.end_protection();
    if desired_state::is_migrated(home) && machine.state().ending().is_none() {
        // It was given away, and whether it runs there is not known.
        tokio::spawn(conclude::conclude(Arc::clone(&kept), machine));
    }
}

/// Copies it, and protects it until that ends. An error: why it runs alone.
async fn session(
    kept: &Arc<Kept>,
    machine: &Machine,
    order: &ProtectionOrder,
    protecting: &Arc<Protecting>,
) -> Result<(), String> {
    let home = kept.home();
    let migration = as_migration(order);
    let configuration = home.configuration().map_err(words)?;
    checkpoint::check_runs(home, machine).map_err(words)?;
    checkpoint::prepare(kept, machine, Instant::now() + CHECKPOINT_TIMEOUT).await.map_err(words)?;
    let departure = Departure {
        token: format!("{:032x}", rand::random::<u128>()),
        to: order.to.clone(),
        keys: order.keys.clone(),
        disk: home.disk().file_name().unwrap_or_default().to_string_lossy().into_owned(),
        snapshot: String::new(),
        state: DepartureState::Begun,
        is_whole: false,
        result: None,
        protects: true,
        fences: false,
    };
    let network = receive_order::network(kept, &configuration, &migration)?;
    let receive = ReceiveOrder { network, ..receive_order::of(home, &migration, &departure).map_err(words)? };
    departure.begin_protection(home).map_err(words)?;
    let opened = receive_order::send(&migration, receive).await;
    let handle = Handle::current();
    let outcome = match opened.and_then(|far| carried(&handle, far).map_err(words)) {
        Ok(stream) => {
            let work = Work::new(kept, machine, migration, Arc::clone(&protecting.is_cancelled), mpsc::channel(1).0);
            let (order, protecting, departure) = (order.clone(), Arc::clone(protecting), departure.clone());
            let disk = (kept.user().user_id(), configuration.disk_bytes);
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
        kept.change_protection(|status| {
            (status.state, status.reason) = (ProtectionState::Unprotected, Some(reason.clone()));
        });
    }
    conclude::let_go_standing(kept, machine).await;
    // As it is written down by now.
    let known = Departure::of(home).ok().flatten().filter(|known| known.token == departure.token);
    run_alone(home, machine, &known.unwrap_or(departure)).await?;
    outcome.map(|_| ())
}

/// Makes the copy void and lets go what was held. Where the machine has died that is for [`settle_end`] to decide.
async fn run_alone(home: &MachineHome, machine: &Machine, departure: &Departure) -> Result<(), String> {
    let may_be_fenced_until = Instant::now() + ALONE_AFTER;
    loop {
        if machine.monitor().status().await.is_err() {
            // It dies, or hangs: what it has sent waits until it answers again.
            if tokio::time::timeout(DEATH_LOOK, machine.wait_ended()).await.is_ok() {
                return Ok(());
            }
            continue;
        }
        if departure.is_whole && departure.fences && Instant::now() < may_be_fenced_until {
            let order = HostOrder::Discard(departure.which(home));
            let asked = migration::ask::<Gone>(&departure.to, &departure.keys, &order);
            match tokio::time::timeout_at(may_be_fenced_until.into(), asked).await {
                Ok(Ok(Gone::Lost(_))) => {}
                Ok(Ok(Gone::Running(_))) => {
                    let gone = Departure { state: DepartureState::Gone, ..departure.clone() };
                    let handed_over = departure.hand_over(home).and_then(|()| gone.conclude(home));
                    machine.kill();
                    handed_over.map_err(words)?;
                    return Err("it goes on at its backup, whose host has fenced this one".to_owned());
                }
                Err(_) => continue,
                Ok(Err(reason)) => {
                    tracing::warn!(%reason, "what the machine sends is held: its copy may go on");
                    tokio::time::sleep(DEATH_LOOK).await;
                    continue;
                }
            }
        }
        match departure.forget_copy(home) {
            Ok(()) => match hold_no_more(home).await {
                Ok(()) => return Ok(()),
                Err(error) => tracing::error!(error, "what the machine sends is held still"),
            },
            Err(error @ MachineError::Moved { .. }) => return Err(error.to_string()),
            Err(error) => tracing::error!(%error, "what the machine sends is held: its copy cannot be made void"),
        }
        tokio::time::sleep(DEATH_LOOK).await;
    }
}

async fn hold_no_more(home: &MachineHome) -> Result<(), String> {
    match is_to_hold(home) {
        true => NetworkClient::connect(home).await?.ask(NetworkRequest::Hold { enabled: false }).await,
        false => Ok(()),
    }
}

/// Decides where a machine that has ended goes on: where it has died, at its backup.
pub(super) async fn settle_end(kept: &Kept, ending: &Ending, was_asked: bool) {
    settle(kept, ending, was_asked).await;
    // Who copies it reads its memory: that is not ended before.
    kept.cancel_protection();
    let ended = async {
        while kept.is_protected() {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    };
    if tokio::time::timeout(END_TIMEOUT, ended).await.is_err() {
        tracing::warn!("the machine's protection does not end");
    }
}

async fn settle(kept: &Kept, ending: &Ending, was_asked: bool) {
    let home = kept.home();
    let departure = match Departure::of_copy(home) {
        Ok(Some(departure)) => departure,
        Ok(None) => return,
        Err(error) => return tracing::error!(%error, "whether its copy may go on is not known"),
    };
    // Nothing more goes over the connection: the backup asks, if it is not told before.
    kept.cancel_protection();
    let has_died = match ending.cause {
        EndCause::Killed { .. } | EndCause::Failed { .. } | EndCause::Terminated | EndCause::Unknown => !was_asked,
        EndCause::PoweredOff | EndCause::Quit | EndCause::Panicked => false,
    };
    let goes_on = has_died && departure.is_whole;
    let settled = if goes_on { departure.hand_over(home) } else { departure.forget_copy(home) };
    if let Err(error) = settled {
        return tracing::error!(%error, "it is not written down where the machine goes on");
    }
    if !goes_on {
        return;
    }
    tracing::warn!(to = departure.to, "the machine has died here, and goes on at its backup");
    match conclude::ask_to_go(home, &departure).await {
        Some(Ok(Gone::Running(_))) => {
            let gone = Departure { state: DepartureState::Gone, ..departure };
            if let Err(error) = gone.conclude(home) {
                tracing::error!(%error, "it is not written down that the machine has gone");
            }
        }
        Some(Ok(Gone::Lost(reason))) => {
            tracing::error!(reason, "its backup was lost, too: it begins here again, from its disk");
            if let Err(error) = departure.take_back(home, kept.user()) {
                tracing::error!(%error, "it is not written down that the machine is here");
            }
        }
        Some(Err(reason)) => tracing::error!(reason, "whether it runs there is not known"),
        None => {}
    }
}

/// Before a machine is started: nobody else goes on with it. One that has died goes on at its backup.
///
/// # Errors
/// [`MachineError::Moved`]: it runs there; [`MachineError::Protection`]: that is not known.
pub(crate) async fn check_start(home: &MachineHome, user: &ServiceUser) -> Result<(), MachineError> {
    let Some(departure) = Departure::protecting(home)? else { return Ok(()) };
    if !desired_state::was_to_run(home) {
        return forget_backup(home, user, &departure, false).await;
    }
    // It has died with its keeper: nothing that was answered is lost where the copy goes on.
    departure.hand_over(home)?;
    match conclude::ask_to_go(home, &departure).await {
        Some(Ok(Gone::Running(_))) => {
            Departure { state: DepartureState::Gone, ..departure }.conclude(home)?;
            Err(MachineError::Moved { name: home.name().clone() })
        }
        Some(Ok(Gone::Lost(reason))) => {
            tracing::error!(reason, "its backup was lost, too: it begins here again, from its disk");
            departure.take_back(home, user)
        }
        Some(Err(reason)) => Err(not_known(home, &departure, &reason)),
        None => Ok(()),
    }
}

fn not_known(home: &MachineHome, departure: &Departure, reason: &str) -> MachineError {
    MachineError::Protection {
        machine: home.name().to_string(),
        to: departure.to.clone(),
        reason: format!(
            "it was protected there and may run there, and that host does not say ({reason}); where it is certain that \
             it does not, and never will: onecopy vm unprotect {} --force",
            home.name()
        ),
    }
}

/// Has the backup forget its copy of a machine that does not run here, or was given away to it.
///
/// # Errors
/// [`MachineError::Moved`]: it runs there; [`MachineError::Protection`]: that is not known. With `force` a backup that
/// does not answer is taken for one that never runs it.
pub(crate) async fn forget_backup(
    home: &MachineHome,
    user: &ServiceUser,
    departure: &Departure,
    force: bool,
) -> Result<(), MachineError> {
    let order = HostOrder::Discard(departure.which(home));
    let forget = || match desired_state::is_migrated(home) {
        true => departure.take_back(home, user),
        false => departure.forget_copy(home),
    };
    match migration::ask::<Gone>(&departure.to, &departure.keys, &order).await {
        Ok(Gone::Lost(_)) => forget(),
        Ok(Gone::Running(_)) => {
            if !desired_state::is_migrated(home) {
                departure.hand_over(home)?;
            }
            Departure { state: DepartureState::Gone, ..departure.clone() }.conclude(home)?;
            Err(MachineError::Moved { name: home.name().clone() })
        }
        Err(_) if force => forget(),
        Err(reason) => Err(not_known(home, departure, &reason.to_string())),
    }
}

/// How a protection has ended that is none of a failure.
enum Ended {
    /// It is wanted no more.
    Unwanted,
    /// The machine goes on at the backup.
    Gone,
}

/// An instant of memory and disk that the backup holds, or is to.
#[derive(Clone, Copy)]
struct Cut {
    memory: u64,
    disk: u64,
}

/// One protection, in a thread that blocks.
struct Run {
    work: Work,
    order: ProtectionOrder,
    protecting: Arc<Protecting>,
    departure: Departure,
    /// The account of the disk's server, and the disk's bytes.
    disk: (u32, u64),
}

impl Run {
    fn run(mut self, stream: UnixStream) -> Result<Ended, String> {
        let home = self.work.kept.home().clone();
        let image = Image::open(&home.checkpoints()).map_err(words)?;
        let shape = Shape { memory_bytes: image.memory_bytes(), disk_bytes: self.disk.1, disk_travels: true };
        let is_cancelled = Arc::clone(&self.protecting.is_cancelled);
        let page_map = DiskPageMap::of_copied(&home).map_err(words)?;
        let mut sender = Sender::begin(stream, shape, page_map, self.order.bytes_per_second, is_cancelled)?;
        if self.order.sends_all {
            sender.send_all()?;
        }
        self.work.kept.change_protection(|status| (status.state, status.reason) = (ProtectionState::Copying, None));
        let last = self.copy(&mut sender, &image)?;
        sender.set_protected()?;
        if self.order.durability == Durability::Output {
            self.ask_network::<()>(NetworkRequest::Hold { enabled: true })?;
        }
        self.protect(&mut sender, last)
    }

    fn is_wanted(&self) -> bool {
        !self.protecting.is_cancelled.load(Ordering::Acquire)
    }

    fn ask_network<T: serde::de::DeserializeOwned>(&self, request: NetworkRequest) -> Result<T, String> {
        let home = self.work.kept.home();
        self.work.handle.block_on(async { NetworkClient::connect(home).await?.ask(request).await })
    }

    /// Sends what has changed since another instant, or all; it is with the backup when this returns.
    fn send(&self, sender: &mut Sender, cut: Cut, since: Option<Cut>, devices: &[u8]) -> Result<Counts, String> {
        let home = self.work.kept.home();
        let blocks = EpochBlocks::open(home, self.disk, cut.disk, since.map(|since| since.disk)).map_err(words)?;
        let counts = self.work.send(sender, cut.memory, since.map(|since| since.memory), Some(&blocks), devices)?;
        self.work.ask::<()>(Request::Release)?;
        if let Some(map) = &mut sender.page_map {
            map.set_epoch(cut.disk, cut.memory);
        }
        if let Some(since) = since {
            disk_epochs::release(home, since.disk).map_err(words)?;
        }
        self.work.kept.change_protection(|status| {
            status.bytes += counts.bytes;
            status.disk_bytes += counts.disk_bytes;
            status.data_pages += counts.data() - counts.disk_data;
            status.known_pages += counts.known() - counts.disk_known;
            status.data_blocks += counts.disk_data;
            status.known_blocks += counts.disk_known;
        });
        Ok(counts)
    }

    /// Copies all of it while it runs, until little is left.
    fn copy(&mut self, sender: &mut Sender, image: &Image) -> Result<Cut, String> {
        let home = &self.work.kept.home().clone();
        let _watch = sender.watch(None)?;
        disk_epochs::release(home, u64::MAX).map_err(words)?;
        let hardware = Hardware::of_process(&self.work.machine)?;
        sender.say(&Said::Hello { token: self.departure.token.clone(), hardware })?;
        sender.send(image.prefix())?;
        let Answered::Accepted { fences, .. } = sender.answer()? else {
            return Err("it answers something else".to_owned());
        };
        self.departure.fences = fences;
        let mut last = None;
        for copied in 1.. {
            let cut = Cut { disk: disk_epochs::cut(home).map_err(words)?, memory: self.work.cut()?.epoch };
            let longest = if copied < BRAKED_COPY { Duration::MAX } else { OUTPUT_BEHIND_MAX };
            let counts = self.braked(longest, || self.send(sender, cut, last, &[]))?;
            if last.replace(cut).is_none() {
                sender.say(&Said::Wait {})?;
                let Answered::Waiting {} = sender.answer()? else {
                    return Err("it answers something else".to_owned());
                };
            }
            if counts.pieces() <= LITTLE_PIECES || copied >= COPIES_MAX {
                return Ok(cut);
            }
        }
        unreachable!("it is copied a few times at most")
    }

    /// Takes and sends checkpoints until something else is wanted.
    fn protect(&mut self, sender: &mut Sender, mut last: Cut) -> Result<Ended, String> {
        let period = Duration::from_millis(self.order.period_ms);
        let mut before: Option<Instant> = None;
        loop {
            // First: of one that has died the backup is not told to forget it.
            if let Some(ending) = self.work.machine.state().ending() {
                return Err(format!("it has ended: {ending}"));
            }
            if !self.is_wanted() {
                // Where it is not heard the connection's end is.
                let _ = sender.say(&Said::End {});
                return Ok(Ended::Unwanted);
            }
            if self.departure.is_whole && self.protecting.is_to_yield.swap(false, Ordering::AcqRel) {
                return self.switch(sender, last).map(|()| Ended::Gone);
            }
            // Somebody wants it to stand: nothing changes.
            if self.work.machine.state() != State::Running {
                if desired_state::is_taking(self.work.kept.home()).map_err(words)? {
                    return Err("it stands for a checkpoint that has come to nothing".to_owned());
                }
                std::thread::sleep(LOOK_INTERVAL);
                continue;
            }
            let begun = Instant::now();
            let (taken, pause, network_epoch) = self.take()?;
            let cut = cut_of(&taken)?;
            if !self.departure.is_whole {
                // From here on it may go on there, whether or not it is heard that this has come.
                self.departure.is_whole = true;
                self.departure.note_whole_copy(self.work.kept.home()).map_err(words)?;
            }
            let behind_max = match self.order.durability {
                Durability::Output => OUTPUT_BEHIND_MAX,
                Durability::Periodic => PERIODIC_BEHIND_MAX,
            };
            self.braked(behind_max, || {
                let watch = sender.watch(Some(EPOCH_TIMEOUT))?;
                self.send(sender, cut, Some(last), &taken.devices)?;
                drop(watch);
                match network_epoch {
                    Some(epoch) => self.ask_network::<()>(NetworkRequest::Release { epoch }),
                    None => Ok(()),
                }
            })?;
            last = cut;
            let held = begun.elapsed();
            self.work.kept.change_protection(|status| {
                status.state = ProtectionState::Protected;
                status.epochs += 1;
                status.newest_unix_ms = Some(unix_ms().saturating_sub(milliseconds(held)));
                status.period_ms = before.map_or(self.order.period_ms, |before| milliseconds(begun - before));
                status.pause_us = microseconds(pause);
                status.pause_max_us = status.pause_max_us.max(status.pause_us);
                status.held_us = microseconds(held);
            });
            before = Some(begun);
            self.wait(begun + (pause * PAUSE_SHARE).max(PERIOD_MIN.min(period)), begun + period);
        }
    }

    /// Until the next checkpoint: not before `earliest`, and then at `latest` or once something waits for it.
    fn wait(&self, earliest: Instant, latest: Instant) {
        let latest = latest.max(earliest);
        while self.is_wanted() && !self.protecting.is_to_yield.load(Ordering::Acquire) {
            let now = Instant::now();
            if now >= latest || now >= earliest && self.has_output_waiting() {
                return;
            }
            let look = if self.order.durability == Durability::Output { OUTPUT_LOOK } else { LOOK_INTERVAL };
            let until = if now < earliest { earliest } else { latest };
            std::thread::sleep((until - now).min(look));
        }
    }

    /// Whether frames of the machine wait for the next checkpoint. One that cannot be asked has none.
    fn has_output_waiting(&self) -> bool {
        self.order.durability == Durability::Output
            && self.ask_network::<ServedNetwork>(NetworkRequest::Info).is_ok_and(|told| told.statistics.held_frames > 0)
    }

    /// Sends; the machine stands from `longest` on.
    fn braked<T>(&self, longest: Duration, send: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let kept = &self.work.kept;
        let (sent, stood) = brake::while_sent((kept, &self.work.machine, &self.work.handle), longest, send);
        kept.change_protection(|status| status.braked_us += microseconds(stood));
        sent
    }

    fn take(&self) -> Result<(Taken, Duration, Option<u64>), String> {
        let (kept, machine, handle) = (&self.work.kept, &self.work.machine, &self.work.handle);
        let home = kept.home();
        let _alone = handle.block_on(kept.no_take());
        let mut processors = Processors::new(home, machine, handle, None);
        let (mut memory, mut disk) = (Memory::new(home, handle), EpochDisk { home });
        let (mut network, mut record) = (network::of(home, handle)?, Record { kept });
        let mut parts = Parts {
            machine: &mut processors,
            memory: &mut memory,
            disk: &mut disk,
            network: &mut network,
            record: &mut record,
        };
        let taken = take::take(&mut parts, After::GoOn).map_err(|error| {
            if error.needs_recovery {
                recover(&mut parts, machine);
            }
            error.to_string()
        })?;
        Ok((taken, processors.pause, network.epoch))
    }

    /// Its last checkpoint here, from which it goes on at the backup; nothing that it has sent is lost.
    fn switch(&self, sender: &mut Sender, last: Cut) -> Result<(), String> {
        let (kept, handle) = (&self.work.kept, &self.work.handle);
        let home = kept.home();
        let (mut disk, mut network) = (EpochDisk { home }, network::of(home, handle)?);
        let give = &mut |sender: &mut Sender, taken: &Taken| {
            sender.say(&Said::Last {})?;
            let counts = self.send(sender, cut_of(taken)?, Some(last), &taken.devices)?;
            let Answered::Loaded {} = sender.answer()? else { return Err("it answers something else".to_owned()) };
            if !self.is_wanted() {
                return Err("it was cancelled".to_owned());
            }
            if let Some(ending) = self.work.machine.state().ending() {
                return Err(format!("it has ended here: {ending}"));
            }
            kept.note(DesiredState::Migrated).map_err(words)?;
            // It stands, and what it has sent is of what goes on there.
            if let Err(error) = handle.block_on(hold_no_more(home)) {
                tracing::error!(error, "what the machine has sent last is lost, as on a wire");
            }
            Ok(counts)
        };
        self.work.switch(sender, &self.departure, (&mut disk, &mut network), give)?;
        let gone = Departure { state: DepartureState::Gone, ..self.departure.clone() };
        if let Err(error) = gone.conclude(home) {
            tracing::error!(%error, "it is not written down that the machine has gone");
        }
        Ok(())
    }
}

fn cut_of(taken: &Taken) -> Result<Cut, String> {
    let disk = taken.disk.parse().map_err(|_| format!("the disk has cut {:?}, which is no epoch", taken.disk))?;
    Ok(Cut { memory: taken.memory.epoch.0, disk })
}

fn milliseconds(of: Duration) -> u64 {
    u64::try_from(of.as_millis()).unwrap_or(u64::MAX)
}

fn microseconds(of: Duration) -> u64 {
    u64::try_from(of.as_micros()).unwrap_or(u64::MAX)
}
