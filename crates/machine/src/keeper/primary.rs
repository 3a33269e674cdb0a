//! What the primary sends: all of its machine while it runs, then one epoch after the other, each of which the backup
//! holds before what the machine has sent until then leaves.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use onecopy_checkpoint::delta::{Counts, HeldEpoch, Sizes};
use onecopy_checkpoint::image::Image;
use onecopy_checkpoint::take::{self, After, Parts, Taken};
use onecopy_hypervisor::State;

use super::backup_copy::hold_no_more;
use super::disk_epochs::{self, EpochBlocks, EpochDisk};
use super::link::{Answered, Said};
use super::parts::{Memory, Processors, Record, recover};
use super::protection::{Durability, ProtectionOrder, ProtectionState};
use super::protection::{LOOK_INTERVAL, Protecting};
use super::rounds::{Sender, Since};
use super::shared_disk::DiskPageMap;
use super::unresponsive::unix_ms;
use super::words;
use super::work::Work;
use super::{brake, network};
use crate::desired_state::{self, DesiredState};
use crate::hardware::Hardware;
use crate::memory_server::Request;
use crate::migration::{Departure, DepartureState};
use crate::network_holder::{NetworkClient, Request as NetworkRequest, ServedNetwork};

/// How long a checkpoint may take until the backup has it: what the machine sends may wait for it. Less than
/// [`FENCE_WITHIN`](super::link::FENCE_WITHIN), which counts from the last one, and has the time of detection in it.
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

/// How a protection has ended that is none of a failure.
pub(super) enum Ended {
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
pub(super) struct Run {
    pub(super) work: Work,
    pub(super) order: ProtectionOrder,
    pub(super) protecting: Arc<Protecting>,
    pub(super) departure: Departure,
    /// The account of the disk's server, and the disk's bytes.
    pub(super) disk: (u32, u64),
}

impl Run {
    pub(super) fn run(mut self, stream: UnixStream) -> Result<Ended, String> {
        let home = self.work.keeper.home().clone();
        let image = Image::open(&home.checkpoints()).map_err(words)?;
        let sizes = Sizes { memory_bytes: image.memory_bytes(), disk_bytes: self.disk.1, disk_travels: true };
        let is_cancelled = Arc::clone(&self.protecting.is_cancelled);
        let page_map = DiskPageMap::of_copied(&home).map_err(words)?;
        let mut sender = Sender::begin(stream, sizes, page_map, self.order.bytes_per_second, is_cancelled)?;
        if self.order.sends_all {
            sender.send_all()?;
        }
        self.work.keeper.change_protection(|status| (status.state, status.reason) = (ProtectionState::Copying, None));
        let last = self.copy(&mut sender, &image)?;
        sender.set_protected(self.order.detection_s)?;
        if self.order.durability == Durability::Output {
            self.ask_network::<()>(NetworkRequest::Hold { enabled: true })?;
        }
        self.protect(&mut sender, last)
    }

    fn is_wanted(&self) -> bool {
        !self.protecting.is_cancelled.load(Ordering::Acquire)
    }

    fn ask_network<T: serde::de::DeserializeOwned>(&self, request: NetworkRequest) -> Result<T, String> {
        let home = self.work.keeper.home();
        self.work.handle.block_on(async { NetworkClient::connect(home).await?.ask(request).await })
    }

    /// Sends what has changed since another instant, or all; it is with the backup when this returns.
    fn send(&self, sender: &mut Sender, cut: Cut, since: Option<Cut>, devices: &[u8]) -> Result<Counts, String> {
        let home = self.work.keeper.home();
        let blocks = EpochBlocks::open(home, self.disk, cut.disk, since.map(|since| since.disk)).map_err(words)?;
        self.send_with(sender, cut, since, &blocks, devices)
    }

    /// The same, with these blocks of the disk.
    fn send_with(
        &self,
        sender: &mut Sender,
        cut: Cut,
        since: Option<Cut>,
        blocks: &EpochBlocks,
        devices: &[u8],
    ) -> Result<Counts, String> {
        let home = self.work.keeper.home();
        let told = if since.is_none() { self.work.ask_free_pages() } else { None };
        let earlier = since.map_or(Since::Nothing(told.as_ref()), |since| Since::Epoch(since.memory));
        let counts = self.work.send(sender, cut.memory, earlier, Some(blocks), devices)?;
        self.work.ask::<()>(Request::Release)?;
        if let Some(map) = &mut sender.page_map {
            map.set_epoch(cut.disk, cut.memory);
        }
        if let Some(since) = since {
            disk_epochs::release(home, since.disk).map_err(words)?;
        }
        self.work.keeper.change_protection(|status| {
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
        let home = &self.work.keeper.home().clone();
        let _watch = sender.watch(None)?;
        disk_epochs::release(home, u64::MAX).map_err(words)?;
        let hardware = Hardware::of_process(&self.work.machine)?;
        sender.say(&Said::Hello { token: self.departure.token.clone(), hardware })?;
        sender.send(image.prefix())?;
        let answer = sender.answer()?;
        let Answered::Accepted { fences, tells_disk, .. } = answer else { return Err(answer.instead_of("accepted")) };
        self.departure.fences = fences;
        let mut last = self.copy_all(sender, tells_disk)?;
        sender.say(&Said::Wait {})?;
        let answer = sender.answer()?;
        let Answered::Waiting {} = answer else { return Err(answer.instead_of("waiting")) };
        for copied in 2.. {
            let cut = Cut { disk: disk_epochs::cut(home).map_err(words)?, memory: self.work.cut()?.epoch };
            let longest = if copied < BRAKED_COPY { Duration::MAX } else { OUTPUT_BEHIND_MAX };
            let counts = self.braked(longest, || self.send(sender, cut, Some(last), &[]))?;
            last = cut;
            if counts.pieces() <= LITTLE_PIECES || copied >= COPIES_MAX {
                return Ok(cut);
            }
        }
        unreachable!("it is copied a few times at most")
    }

    /// Sends all of it, but what the backup tells that it has of the disk.
    fn copy_all(&self, sender: &mut Sender, tells_disk: bool) -> Result<Cut, String> {
        let home = self.work.keeper.home();
        let disk = disk_epochs::cut(home).map_err(words)?;
        let blocks = match tells_disk {
            true => {
                let (blocks, same) = EpochBlocks::open_compared(home, self.disk, disk, sender).map_err(words)?;
                self.work.keeper.change_protection(|status| status.same_blocks += same);
                if let Some(map) = &mut sender.page_map {
                    // What it has of the disk can be referred to.
                    map.set_epoch(disk, HeldEpoch::NOTHING.epoch);
                }
                blocks
            }
            false => EpochBlocks::open(home, self.disk, disk, None).map_err(words)?,
        };
        let cut = Cut { disk, memory: self.work.cut()?.epoch };
        self.send_with(sender, cut, None, &blocks, &[])?;
        Ok(cut)
    }

    /// Takes and sends checkpoints until something else is wanted.
    fn protect(&mut self, sender: &mut Sender, mut last: Cut) -> Result<Ended, String> {
        let period = Duration::from_millis(self.order.period_ms);
        let mut before: Option<Instant> = None;
        loop {
            // In this order: of one that has died, and is not wanted any more because of that, the backup is not told
            // to forget it.
            let is_wanted = self.is_wanted();
            if let Some(ending) = self.work.machine.state().ending() {
                return Err(format!("it has ended: {ending}"));
            }
            if !is_wanted {
                // Where it is not heard the connection's end is.
                let _ = sender.say(&Said::End {});
                return Ok(Ended::Unwanted);
            }
            if self.departure.is_whole && self.protecting.is_to_yield.swap(false, Ordering::AcqRel) {
                return self.switch(sender, last).map(|()| Ended::Gone);
            }
            // Somebody wants it to stand: nothing changes.
            if self.work.machine.state() != State::Running {
                if desired_state::is_taking(self.work.keeper.home()).map_err(words)? {
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
                self.departure.note_whole_copy(self.work.keeper.home()).map_err(words)?;
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
            self.work.keeper.change_protection(|status| {
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
        let keeper = &self.work.keeper;
        let (sent, stood) = brake::while_sent((keeper, &self.work.machine, &self.work.handle), longest, send);
        keeper.change_protection(|status| status.braked_us += microseconds(stood));
        sent
    }

    fn take(&self) -> Result<(Taken, Duration, Option<u64>), String> {
        let (keeper, machine, handle) = (&self.work.keeper, &self.work.machine, &self.work.handle);
        let home = keeper.home();
        let _alone = handle.block_on(keeper.no_take());
        let mut processors = Processors::new(home, machine, handle, None);
        let (mut memory, mut disk) = (Memory::new(home, handle), EpochDisk { home });
        let (mut network, mut record) = (network::of(home, handle)?, Record { keeper });
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
        let (keeper, handle) = (&self.work.keeper, &self.work.handle);
        let home = keeper.home();
        let (mut disk, mut network) = (EpochDisk { home }, network::of(home, handle)?);
        let give = &mut |sender: &mut Sender, taken: &Taken| {
            sender.say(&Said::Last {})?;
            let counts = self.send(sender, cut_of(taken)?, Some(last), &taken.devices)?;
            let answer = sender.answer()?;
            let Answered::Loaded {} = answer else { return Err(answer.instead_of("loaded")) };
            if !self.is_wanted() {
                return Err("it was cancelled".to_owned());
            }
            if let Some(ending) = self.work.machine.state().ending() {
                return Err(format!("it has ended here: {ending}"));
            }
            keeper.note(DesiredState::Migrated).map_err(words)?;
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
