//! The source's side of a migration: rounds while the guest runs, the last one while it stands, and who goes on.
//!
//! | killed, or lost | what is written down | who goes on |
//! |---|---|---|
//! | before the last round | running | the source, at once |
//! | while it stands here | taking | the source: its next keeper lets it go |
//! | after *migrated*, before *go* came | migrated | the destination, which asks; `vm migrate --resume` says it again |
//! | after that | migrated | the destination |
//! | the destination, before it said *runs* | migrated | the source, once the destination has said that it never will |

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{Counts, Sizes};
use onecopy_checkpoint::image::Image;
use onecopy_checkpoint::memory::synchronize;
use onecopy_checkpoint::migration_policy::{FIXED, Next, OnTimeout, Policy, Round, Wanted};
use onecopy_checkpoint::take::{self, After, NoNetwork, Parts, Taken};
use onecopy_disk_server::DiskClient;
use onecopy_disk_server::protocol::Request as DiskRequest;
use onecopy_hypervisor::Machine;
use tokio::sync::mpsc;

use super::admission::{check_runs, check_sendable};
use super::brake::{Slowed, Turns, set_clock};
use super::link::{Answered, Said, carried};
use super::parts::{Disk, Memory, Processors, Record, recover};
use super::rounds::{Sender, Since};
use super::shared_disk::DiskPageMap;
use super::state::Keeper;
use super::unresponsive::unix_ms;
use super::work::Work;
use super::{
    KeeperReply, MigrationEvent, MigrationOrder, Prediction, checkpoint, conclude, protect, receive_order, words,
};
use crate::desired_state::{self, DesiredState};
use crate::hardware::Hardware;
use crate::machine::CHECKPOINT_TIMEOUT;
use crate::memory_server::Request;
use crate::migration::{self, Departure, DepartureState, Gone, MigrationResult, ReceiveOrder, SharedDisk};
use crate::network_holder::is_to_hold;
use crate::{Forward, MachineError, MachineHome};

/// Between the two cuts by which it is seen how much changes.
const LOOK_PERIOD: Duration = Duration::from_secs(1);

/// How long snapshots may be read that are of no use any more, and how often it is tried to forget them.
const FORGET_TIMEOUT: Duration = Duration::from_secs(60);
const FORGET_INTERVAL: Duration = Duration::from_secs(1);

/// How long a machine may stand that is not given away, or ten times as long as was asked for.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Sends a machine to another host, or tells what that would cost.
pub(super) async fn migrate(
    keeper: &Arc<Keeper>,
    machine: &Machine,
    order: MigrationOrder,
    is_cancelled: Arc<AtomicBool>,
    told: mpsc::Sender<KeeperReply>,
) -> Result<KeeperReply, MachineError> {
    let home = keeper.home();
    check_runs(home, machine)?;
    let failed =
        |reason: String| MachineError::Migration { machine: home.name().to_string(), to: order.to.clone(), reason };
    let configuration = home.configuration()?;
    check_sendable(&configuration, order.bytes_per_second).map_err(failed)?;
    let network = receive_order::network(keeper, &configuration, &order).map_err(failed)?;
    checkpoint::prepare(keeper, machine, Instant::now() + CHECKPOINT_TIMEOUT).await?;
    let work = Work::new(keeper, machine, order.clone(), is_cancelled, told);
    if order.is_only_tried {
        let tried = tokio::task::spawn_blocking(move || work.predict()).await;
        return tried.map_err(task)?.map(KeeperReply::Predicted).map_err(failed);
    }
    wanted(&order).check().map_err(failed)?;
    let departure = Departure {
        // Nobody guesses it.
        token: format!("{:032x}", rand::random::<u128>()),
        to: order.to.clone(),
        keys: order.keys.clone(),
        disk: home.disk_name(),
        snapshot: format!("{}{}-{}", migration::SNAPSHOT, unix_ms(), std::process::id()),
        state: DepartureState::Begun,
        is_whole: false,
        result: None,
        protects: false,
        fences: false,
        etcd: Vec::new(),
    };
    let receive = ReceiveOrder { network, ..receive_order::of(home, &order, &departure)? };
    let hydrated = home.disk();
    let whole = tokio::task::spawn_blocking(move || is_whole(&hydrated)).await.map_err(task)?;
    if !whole.map_err(failed)? {
        let reason = "its disk is not all here yet; `onecopy disk info` shows how far it is".to_owned();
        return Err(failed(reason));
    }
    departure.begin(home)?;
    let (own, begun) = (home.clone(), departure.shared_disk(home).begun);
    let page_map = tokio::task::spawn_blocking(move || DiskPageMap::begin(&own, &begun).map_err(words));
    let page_map = page_map.await.map_err(task)?.unwrap_or_else(|error| {
        tracing::warn!(error, "the disk has no snapshot for this migration: what memory holds of it travels");
        None
    });
    let shared_disk = page_map.as_ref().map(|_| departure.shared_disk(home));
    let opened = receive_order::send(home, &order, ReceiveOrder { shared_disk, ..receive }).await;
    let outcome = match opened.and_then(|far| carried(&work.handle, far).map_err(words)) {
        Ok(stream) => {
            let own = departure.clone();
            match tokio::task::spawn_blocking(move || work.run_to_its_end(stream, page_map, own)).await {
                Ok(outcome) => outcome,
                Err(error) => {
                    conclude::let_go_standing(keeper, machine).await;
                    Err(format!("it ended in its middle ({error}), and --status tells where it goes on"))
                }
            }
        }
        Err(reason) => Err(reason),
    };
    if let Err(error) = checkpoint::release(home).await {
        tracing::warn!(error, "the memory's epochs are let go before the next checkpoint");
    }
    match outcome {
        Ok(result) => Ok(KeeperReply::Migrated(result)),
        Err(reason) => {
            if let Err(error) = Departure::resolve(home) {
                tracing::error!(%error, "it is not written down that the machine stays");
            }
            if desired_state::is_migrated(home) {
                tokio::spawn(protect::conclude(Arc::clone(keeper), machine.clone()));
            } else {
                // Where whoever was to do it could not.
                conclude::let_go_standing(keeper, machine).await;
                forget_snapshots(home, &departure);
            }
            Err(failed(reason))
        }
    }
}

fn wanted(order: &MigrationOrder) -> Wanted {
    Wanted {
        downtime: Duration::from_millis(order.downtime_ms),
        timeout: Duration::from_secs(order.timeout_s),
        on_timeout: match (order.goes_on_timeout, order.throttles) {
            (true, _) => OnTimeout::Go,
            (false, true) => OnTimeout::Throttle,
            (false, false) => OnTimeout::Cancel,
        },
    }
}

fn task(error: tokio::task::JoinError) -> MachineError {
    MachineError::Task(format!("a migration ended: {error}"))
}

/// A keeper that takes a machine over ends what an earlier one had under way: it came to nothing, or was given away.
pub(super) async fn resolve(home: &MachineHome) -> Result<(), MachineError> {
    // Of one that is protected a copy may go on: that is seen to where it is protected again.
    let departure = Departure::of(home)?.filter(|departure| !departure.protects);
    let Some(departure) = departure else { return Ok(()) };
    Departure::resolve(home)?;
    if departure.state != DepartureState::Gone && !desired_state::is_migrated(home) {
        forget_snapshots(home, &departure);
    }
    Ok(())
}

/// Forgets the disk's snapshots of a migration that came to nothing, as soon as the other host reads them no more; what
/// is left then goes with the next checkpoint or keeper.
fn forget_snapshots(home: &MachineHome, departure: &Departure) {
    let SharedDisk { directory, begun, last, .. } = departure.shared_disk(home);
    let forget = move || {
        let mut client = DiskClient::connect(&directory).map_err(words)?;
        let snapshots = client.info().map_err(words)?.snapshots.unwrap_or_default();
        let mut failed = None;
        for name in snapshots.into_iter().map(|known| known.name).filter(|name| [&begun, &last].contains(&name)) {
            failed = client.ask::<()>(&DiskRequest::DeleteSnapshot { name }).err().map(words).or(failed);
        }
        failed.map_or(Ok(()), Err)
    };
    let until = Instant::now() + FORGET_TIMEOUT;
    tokio::spawn(async move {
        while let Ok(Err(error)) = tokio::task::spawn_blocking(forget.clone()).await {
            if Instant::now() >= until {
                return tracing::warn!(error, "a snapshot of the disk is left");
            }
            tokio::time::sleep(FORGET_INTERVAL).await;
        }
    });
}

/// Whether a disk needs no other host.
fn is_whole(disk: &std::path::Path) -> Result<bool, String> {
    let info = DiskClient::connect(disk).map_err(words)?.info().map_err(words)?;
    Ok(info.hydration.is_none_or(|hydration| hydration.is_whole))
}

/// What has travelled.
#[derive(Clone, Copy, Default)]
struct Total {
    rounds: u32,
    counts: Counts,
}

impl Total {
    fn add(&mut self, counts: &Counts) {
        self.rounds += 1;
        self.counts.add(counts);
    }

    /// Pages whose content the other side had in memory.
    fn known_pages(&self) -> u64 {
        self.counts.same + self.counts.held
    }

    /// Pages whose content was sent.
    fn data_pages(&self) -> u64 {
        self.counts.xor + self.counts.zstd + self.counts.literal
    }
}

impl Work {
    /// What it would cost, without another host.
    fn predict(&self) -> Result<Prediction, String> {
        let (first, began) = (self.cut()?, Instant::now());
        let memory_bytes = self.keeper.home().configuration().map_err(words)?.memory_bytes;
        let pages = self.count_used(memory_bytes, first.epoch)?;
        std::thread::sleep(LOOK_PERIOD);
        let second = self.cut()?;
        let pages_per_second = (second.pages as f64 / began.elapsed().as_secs_f64()) as u64;
        self.ask::<()>(Request::Release)?;
        let bytes = |pages: u64| pages * PAGE_BYTES as u64;
        let seconds = self.order.bytes_per_second.map(|rate| bytes(pages) as f64 / rate.max(1) as f64);
        let pause_ms = self.order.bytes_per_second.map(|rate| {
            // A round takes as long as what changed in the one before, until that is nothing.
            let ratio = (bytes(pages_per_second) as f64 / rate.max(1) as f64).min(1.0);
            let fixed = FIXED.as_millis() as u64;
            fixed + if ratio < 0.9 { 0 } else { (bytes(pages) as f64 / rate.max(1) as f64 * 1000.0) as u64 }
        });
        Ok(Prediction { memory_bytes: bytes(pages), pages_per_second, seconds, pause_ms })
    }

    fn run_to_its_end(
        &self,
        stream: UnixStream,
        page_map: Option<DiskPageMap>,
        departure: Departure,
    ) -> Result<MigrationResult, String> {
        let ran = self.run(stream, page_map, departure);
        let stays = ran.is_err() && !desired_state::is_migrated(self.keeper.home());
        if stays && self.has_stood.load(Ordering::Acquire) {
            set_clock(&self.keeper, &self.handle);
        }
        ran
    }

    fn run(
        &self,
        stream: UnixStream,
        page_map: Option<DiskPageMap>,
        departure: Departure,
    ) -> Result<MigrationResult, String> {
        let home = self.keeper.home();
        let begun = Instant::now();
        let image = Image::open(&home.checkpoints()).map_err(words)?;
        let disk_bytes = home.configuration().map_err(words)?.disk_bytes;
        let sizes = Sizes { memory_bytes: image.memory_bytes(), disk_bytes, disk_travels: false };
        let (rate, is_cancelled) = (self.order.bytes_per_second, Arc::clone(&self.is_cancelled));
        let mut sender = Sender::begin(stream, sizes, page_map, rate, is_cancelled)?;
        let (mut total, last) = {
            let wanted = wanted(&self.order);
            let watch = sender.watch(wanted.rounds_timeout())?;
            let mut policy = Policy::new(wanted);
            let rounds = self.rounds(&mut sender, &mut policy, &image, &departure, begun);
            // Who cancels it ends the connection, as does its time.
            self.check_wanted()?;
            if watch.has_ended() {
                return Err(format!("{}; it goes on here", policy.why()));
            }
            rounds?
        };
        let mut disk = Disk::new(home, departure.snapshot.clone());
        let give = &mut |sender: &mut Sender, taken: &Taken| self.give(sender, last, taken);
        let (counts, pause, forwards) = self.switch(&mut sender, &departure, (&mut disk, &mut NoNetwork), give)?;
        total.add(&counts);
        let result = MigrationResult {
            bytes: total.counts.bytes,
            zero_pages: total.counts.zero,
            known_pages: total.known_pages(),
            disk_pages: total.counts.block,
            data_pages: total.data_pages(),
            rounds: total.rounds,
            pause_us: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
            total_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
            forwards,
            shares_disk: sender.shares_disk(),
        };
        let gone = Departure { state: DepartureState::Gone, result: Some(result.clone()), ..departure };
        if let Err(error) = gone.conclude(home) {
            tracing::error!(%error, "it is not written down that the machine has gone");
        }
        Ok(result)
    }

    /// Sends the machine while it runs, until little is left; what was sent, and the last epoch that is there.
    fn rounds(
        &self,
        sender: &mut Sender,
        policy: &mut Policy,
        image: &Image,
        departure: &Departure,
        begun: Instant,
    ) -> Result<(Total, u64), String> {
        let hardware = Hardware::of_process(&self.machine)?;
        sender.say(&Said::Hello { token: departure.token.clone(), hardware })?;
        sender.send(image.prefix())?;
        // While the other side looks whether it could run there.
        let mut first = Some((self.cut()?, Instant::now(), self.ask_free_pages()));
        let answer = sender.answer()?;
        let Answered::Accepted { reads_disk, .. } = answer else { return Err(answer.instead_of("accepted")) };
        if !reads_disk {
            sender.forget_disk();
        }
        self.tell(MigrationEvent::Accepted { shares_disk: reads_disk, throttles: self.order.throttles });
        let (mut total, mut last) = (Total::default(), None);
        let mut slowed: Option<Slowed> = None;
        loop {
            self.check_wanted()?;
            let (ended, cut, told) = match first.take() {
                Some(first) => first,
                None => (self.cut()?, Instant::now(), None),
            };
            let since = last.map_or(Since::Nothing(told.as_ref()), Since::Epoch);
            let (stood, sent_from) = (slowed.as_ref().map(Slowed::stood), Instant::now());
            let counts = self.send(sender, ended.epoch, since, None, &[])?;
            let sending = sent_from.elapsed();
            self.ask::<()>(Request::Release)?;
            if last.replace(ended.epoch).is_none() {
                sender.say(&Said::Wait {})?;
                let answer = sender.answer()?;
                let Answered::Waiting {} = answer else { return Err(answer.instead_of("waiting")) };
                self.tell(MigrationEvent::Waiting);
            }
            total.add(&counts);
            let sent = Total { rounds: 1, counts };
            let pages = counts.zero + sent.known_pages() + counts.block + sent.data_pages();
            let round = Round { pages, bytes: counts.bytes, took: cut.elapsed(), sending };
            let next = policy.after(round, begun.elapsed());
            let expected = policy.expected();
            self.tell(MigrationEvent::Round {
                round: total.rounds,
                zero_pages: counts.zero,
                known_pages: sent.known_pages(),
                disk_pages: counts.block,
                data_pages: sent.data_pages(),
                bytes: counts.bytes,
                took_ms: u64::try_from(round.took.as_millis()).unwrap_or(u64::MAX),
                pages_per_second: expected.map(|expected| expected.pages_per_second as u64),
                expected_pause_ms: expected
                    .map(|expected| u64::try_from(expected.pause.as_millis()).unwrap_or(u64::MAX)),
                throttle_percent: stood.zip(slowed.as_ref()).map(|(before, slowed)| {
                    let stood = slowed.stood().saturating_sub(before);
                    // A stand counts when it has ended.
                    ((stood.as_secs_f64() / round.took.as_secs_f64() * 100.0) as u64).min(100)
                }),
            });
            match next {
                Next::Round => self.slow_down(&mut slowed, policy)?,
                Next::Switch => {
                    if slowed.is_some() {
                        // From here on it runs as fast as it can, until it stands: little is left to write then.
                        let home = self.keeper.home();
                        DiskClient::connect(&home.disk())
                            .map_err(words)?
                            .ask::<()>(&DiskRequest::Flush)
                            .map_err(words)?;
                        synchronize(&home.memory()).map_err(words)?;
                    }
                    return Ok((total, ended.epoch));
                }
                Next::GiveUp(why) => return Err(format!("{why}; it goes on here")),
            }
        }
    }

    /// Slows the machine down as much as it must be for the next round.
    fn slow_down(&self, slowed: &mut Option<Slowed>, policy: &Policy) -> Result<(), String> {
        let Some(throttle) = policy.throttle() else { return Ok(()) };
        self.has_stood.store(true, Ordering::Release);
        let (runs, stands) = throttle.turns(Duration::from_millis(self.order.downtime_ms));
        let turns = Turns { runs, stands };
        match slowed {
            Some(slowed) => slowed.set(turns),
            None => *slowed = Some(Slowed::begin(&self.keeper, &self.machine, &self.handle, turns).map_err(words)?),
        }
        Ok(())
    }

    /// The last round: it stands from here on, and goes on there. `give` sends what is left, and writes down that it
    /// was given away.
    pub(super) fn switch(
        &self,
        sender: &mut Sender,
        departure: &Departure,
        (disk, network): (&mut dyn take::Disk, &mut dyn take::Network),
        give: &mut dyn FnMut(&mut Sender, &Taken) -> Result<Counts, String>,
    ) -> Result<(Counts, Duration, Vec<Forward>), String> {
        let (home, handle) = (self.keeper.home(), &self.handle);
        let _alone = handle.block_on(self.keeper.no_take());
        self.check_wanted()?;
        check_runs(home, &self.machine).map_err(words)?;
        let mut processors = Processors::new(home, &self.machine, handle, None);
        let mut memory = Memory::new(home, handle);
        let mut record = Record { keeper: &self.keeper };
        let mut parts = Parts { machine: &mut processors, memory: &mut memory, disk, network, record: &mut record };
        let taken = take::take(&mut parts, After::Stay).map_err(|error| {
            if error.needs_recovery {
                recover(&mut parts, &self.machine);
            }
            error.to_string()
        })?;
        self.has_stood.store(true, Ordering::Release);
        self.tell(MigrationEvent::Stopped);
        // Ended, the connection lets it go on here, unless it was given away.
        let longest = Duration::from_millis(self.order.downtime_ms).saturating_mul(10).max(PAUSE_MAX);
        let given = sender.watch(Some(longest)).and_then(|_watch| give(sender, &taken));
        let given = given.map_err(|reason| self.check_wanted().err().unwrap_or(reason));
        let counts = match given {
            Ok(counts) => counts,
            // What could not be made durable may be written down all the same: then it was given away.
            Err(reason) if desired_state::is_migrated(home) => {
                tracing::error!(reason, "it was given away");
                Counts::default()
            }
            Err(reason) => {
                recover(&mut parts, &self.machine);
                return Err(format!("{reason}; it goes on here"));
            }
        };
        // From here on it goes on there alone.
        self.tell(MigrationEvent::Given);
        let said = sender.say(&Said::Go {}).and_then(|()| sender.answer());
        let gone = match said {
            Ok(Answered::Running { forwards }) => Gone::Running(forwards),
            Ok(_) | Err(_) => match self.handle.block_on(conclude::ask_to_go(home, departure)) {
                Some(asked) => asked?,
                None => Gone::Lost("it was taken back".to_owned()),
            },
        };
        match gone {
            Gone::Running(forwards) => {
                let pause = processors.stopped.map_or(Duration::ZERO, |stopped| stopped.elapsed());
                Ok((counts, pause, forwards))
            }
            Gone::Lost(reason) => {
                departure.take_back(home, self.keeper.user()).map_err(words)?;
                recover(&mut parts, &self.machine);
                Err(format!("it never ran there ({reason}), and goes on here"))
            }
        }
    }

    /// Sends what is left of a machine that stands, and writes down that it was given away once it stands there.
    fn give(&self, sender: &mut Sender, last: u64, taken: &Taken) -> Result<Counts, String> {
        let counts = self.send(sender, taken.memory.epoch.0, Since::Epoch(last), None, &taken.devices)?;
        let answer = sender.answer()?;
        let Answered::Loaded {} = answer else { return Err(answer.instead_of("loaded")) };
        self.tell(MigrationEvent::Loaded);
        self.check_wanted()?;
        if let Some(ending) = self.machine.state().ending() {
            return Err(format!("it has ended here: {ending}"));
        }
        if is_to_hold(self.keeper.home()) {
            return Err(receive_order::HELD.to_owned());
        }
        self.keeper.note(DesiredState::Migrated).map_err(words)?;
        Ok(counts)
    }
}
