//! Taking: memory, devices and disk of one instant, with the shortest pause.
//!
//! ```text
//!  guest runs │ record: taking                       durable: who finds the machine standing knows why
//!             │ flush disk, synchronize memory       again and again, so that little is left for the pause
//!  ───────────┼ stop
//!     stands  │ drain the network, save the devices, synchronize memory
//!             │ cut disk, network and memory         one instant: nothing ran since the stop
//!  ───────────┼ cont, or stay
//!  guest runs │ record: none
//! ```
//!
//! A take that fails or whose process dies is **void**: no part of it is shown to anybody, the machine goes on if it
//! ran, and what was cut belongs to the next one
//! ([`GuestMemory::changed_since`](crate::memory::GuestMemory::changed_since)). So there is one rule for every step at
//! which that may happen, and [`recover`] follows it.

mod record;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::{Duration, Instant};

use crate::memory::Cut;
pub use record::{RecordFile, Taking};

/// What a guest writes while a flush takes no longer than this is little enough for the pause.
const FLUSH_SHORT: Duration = Duration::from_millis(2);

/// Flushes before the stop at most: a guest may write as fast as its disk does.
const FLUSHES_MAX: u32 = 5;

/// Why a part of a machine could not do its step.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The machine's processors and devices. Every call ends in bounded time.
pub trait Machine {
    /// Whether its processors run.
    ///
    /// # Errors
    /// It does not answer.
    fn is_running(&mut self) -> Result<bool, Cause>;
    /// Its processors stand when this returns, and its devices write to memory no more.
    ///
    /// # Errors
    /// It may run or stand.
    fn stop(&mut self) -> Result<(), Cause>;
    /// The state of its devices, as QEMU writes it. It stands.
    ///
    /// # Errors
    /// There is none.
    fn save_devices(&mut self) -> Result<Vec<u8>, Cause>;
    /// Its processors run.
    ///
    /// # Errors
    /// It may run or stand.
    fn cont(&mut self) -> Result<(), Cause>;
}

/// The machine's memory.
pub trait Memory {
    /// All that the machine has written by now is with the server when this returns.
    ///
    /// # Errors
    /// A page was not kept.
    fn synchronize(&mut self) -> Result<(), Cause>;
    /// Ends the open epoch. It is the last part that is cut.
    ///
    /// # Errors
    /// Something is not kept.
    fn cut(&mut self) -> Result<Cut, Cause>;
}

/// The machine's disks, all of them.
pub trait Disk {
    /// What is acknowledged is durable.
    ///
    /// # Errors
    /// It may not be.
    fn flush(&mut self) -> Result<(), Cause>;
    /// Ends the open epoch; the disk's name of it. The machine's requests have ended.
    ///
    /// # Errors
    /// There is no such epoch.
    fn cut(&mut self) -> Result<String, Cause>;
}

/// What goes to and from the machine's network cards.
pub trait Network {
    /// Takes what the machine has sent, up to the end of a frame. It stands.
    ///
    /// # Errors
    /// There is no end of a frame.
    fn drain(&mut self) -> Result<(), Cause>;
    /// What comes from now on was sent after this instant.
    ///
    /// # Errors
    /// What was sent before cannot be told from what will be.
    fn cut(&mut self) -> Result<(), Cause>;
}

/// A machine whose network nobody holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoNetwork;

impl Network for NoNetwork {
    fn drain(&mut self) -> Result<(), Cause> {
        Ok(())
    }

    fn cut(&mut self) -> Result<(), Cause> {
        Ok(())
    }
}

/// Where it is written down that a machine stands only for a moment.
pub trait Record {
    /// What an earlier process has left.
    ///
    /// # Errors
    /// It cannot be read: the machine must not be touched.
    fn read(&mut self) -> Result<Option<Taking>, Cause>;
    /// Durable when this returns.
    ///
    /// # Errors
    /// It may be there or not.
    fn write(&mut self, taking: Option<Taking>) -> Result<(), Cause>;
}

/// All parts of a machine.
pub struct Parts<'a> {
    /// Processors and devices.
    pub machine: &'a mut dyn Machine,
    /// Memory.
    pub memory: &'a mut dyn Memory,
    /// Disks.
    pub disk: &'a mut dyn Disk,
    /// Network cards.
    pub network: &'a mut dyn Network,
    /// The record.
    pub record: &'a mut dyn Record,
}

/// What the machine does after a take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It goes on, if it ran.
    GoOn,
    /// It stays as it is, the record with it: it goes on elsewhere, or [`recover`] lets it go on here.
    Stay,
}

/// One instant of a machine. Memory and disk keep their parts until they are released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The state of its devices.
    pub devices: Vec<u8>,
    /// The memory's epoch.
    pub memory: Cut,
    /// The disk's name of its epoch.
    pub disk: String,
    /// Whether it ran.
    pub was_running: bool,
}

/// A step of a take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The record is read or written.
    Record,
    /// The machine is asked what it does.
    Look,
    /// The disk is flushed.
    Flush,
    /// Memory is synchronized.
    Synchronize,
    /// The machine is stopped.
    Stop,
    /// The network is drained.
    Drain,
    /// The devices are saved.
    Save,
    /// Memory, disk or network is cut.
    Cut,
    /// The machine is let go.
    Cont,
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Step::Record => "its record",
            Step::Look => "asking what it does",
            Step::Flush => "flushing its disk",
            Step::Synchronize => "synchronizing its memory",
            Step::Stop => "stopping it",
            Step::Drain => "draining its network",
            Step::Save => "saving its devices",
            Step::Cut => "cutting an epoch",
            Step::Cont => "letting it go on",
        })
    }
}

/// A take that is void.
#[derive(Debug, thiserror::Error)]
#[error("no checkpoint of the machine: {step} failed: {cause}")]
pub struct TakeError {
    /// At which step.
    pub step: Step,
    /// Why.
    pub cause: Cause,
    /// The machine may stand although it ran: [`recover`] is to be called until it succeeds.
    pub needs_recovery: bool,
}

trait At<T> {
    fn at(self, step: Step) -> Result<T, TakeError>;
}

impl<T> At<T> for Result<T, Cause> {
    fn at(self, step: Step) -> Result<T, TakeError> {
        self.map_err(|cause| TakeError { step, cause, needs_recovery: false })
    }
}

/// Takes a checkpoint. An earlier take's record must have been seen to by [`recover`].
///
/// # Errors
/// The take is void. The machine goes on if it ran, unless the error says that it may not.
pub fn take(parts: &mut Parts<'_>, after: After) -> Result<Taken, TakeError> {
    let was_running = parts.machine.is_running().at(Step::Look)?;
    let recorded = parts.record.write(Some(Taking { was_running })).at(Step::Record);
    if recorded.is_ok()
        && let Err(error) = flush(parts, after)
    {
        // Nothing was stopped: who stands meanwhile does so for a reason of its own.
        return Err(TakeError { needs_recovery: parts.record.write(None).is_err(), ..error });
    }
    match recorded.and_then(|()| instant(parts, was_running)) {
        Ok(taken) if after == After::Stay => Ok(taken),
        Ok(taken) => {
            let gone_on = go_on(parts, was_running);
            gone_on.map_err(|error| TakeError { needs_recovery: true, ..error })?;
            Ok(taken)
        }
        Err(error) => Err(TakeError { needs_recovery: recover(parts).is_err(), ..error }),
    }
}

/// Flushes what the machine has written while it runs on: each time that is what it wrote during the last one. Where it
/// stays, all that it writes meanwhile travels while it stands: once is enough.
fn flush(parts: &mut Parts<'_>, after: After) -> Result<(), TakeError> {
    let flushes = if after == After::GoOn { FLUSHES_MAX } else { 1 };
    for _ in 0..flushes {
        let begun = Instant::now();
        parts.disk.flush().at(Step::Flush)?;
        parts.memory.synchronize().at(Step::Synchronize)?;
        if begun.elapsed() <= FLUSH_SHORT {
            break;
        }
    }
    Ok(())
}

/// From the stop to the cuts. Nothing is cut before all that was written is with the memory's server. The memory is cut
/// last: it keeps few epochs, and none for a take that another part makes void.
fn instant(parts: &mut Parts<'_>, was_running: bool) -> Result<Taken, TakeError> {
    parts.machine.stop().at(Step::Stop)?;
    parts.network.drain().at(Step::Drain)?;
    let devices = parts.machine.save_devices().at(Step::Save)?;
    parts.memory.synchronize().at(Step::Synchronize)?;
    let disk = parts.disk.cut().at(Step::Cut)?;
    parts.network.cut().at(Step::Cut)?;
    let memory = parts.memory.cut().at(Step::Cut)?;
    Ok(Taken { devices, memory, disk, was_running })
}

fn go_on(parts: &mut Parts<'_>, was_running: bool) -> Result<(), TakeError> {
    if was_running {
        parts.machine.cont().at(Step::Cont)?;
    }
    parts.record.write(None).at(Step::Record)
}

/// What a new keeper does first, and who took after an error: a machine that stands for a take that nobody goes on with
/// is let go. One that stands without a record was meant to, and one that has moved has none either: its record is for
/// the mover to remove before it runs elsewhere. True: a take was void.
///
/// # Errors
/// It may still stand.
pub fn recover(parts: &mut Parts<'_>) -> Result<bool, TakeError> {
    let again = |error| TakeError { needs_recovery: true, ..error };
    let Some(Taking { was_running }) = parts.record.read().at(Step::Record).map_err(again)? else { return Ok(false) };
    // No take's synchronization is under way when the machine runs. What it could not keep the next cut tells.
    if let Err(error) = parts.memory.synchronize() {
        tracing::warn!(error, "a machine's memory is not all kept");
    }
    go_on(parts, was_running).map_err(again)?;
    Ok(true)
}
