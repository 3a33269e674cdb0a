//! A ring of the device: what the front end says of it, and its life.
//!
//! ```text
//!                 addresses, kick descriptor, enabled
//!    Stopped ------------------------------------------> Running ---- driver breaks a rule ----> Broken
//!       ^                                                   |                                       |
//!       +------- GET_VRING_BASE, or the front end goes -----+---------------------------------------+
//! ```
//! A running ring has a thread ([`worker`]); answers also come from the disk's workers. Both meet in the
//! ring's lock, which is held for moments only. A broken ring takes nothing more and tells the front end by the error
//! descriptor; requests under way end as usual.

mod worker;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::chain::Chain;
use super::config::feature;
use super::counters::Counters;
use super::drain::StopReason;
use super::inflight::InflightArea;
use super::memory::Memory;
use super::pending::{CompletionHold, Kind};
use super::progress::{Progress, RingError, call};
use super::request::{Call, status};
use super::split::Split;
use crate::{Disk, DiskError, Epoch, Requester};
pub(super) use worker::put_answer;

/// How long a ring that has no next life waits, behind its deadline, for what this host's disk does: a flush of all
/// that a slow one has not written yet.
const LOCAL_TIMEOUT: Duration = Duration::from_secs(300);
/// How often it is looked whether it does something.
const LOCAL_LOOK: Duration = Duration::from_millis(50);

/// Addresses of a ring's parts, in the front end's address space.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
}

/// What a finished request leaves to tell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) head: u16,
    /// Bytes written into the guest's buffers.
    pub(super) length: u32,
    pub(super) kind: Kind,
}

#[derive(Default)]
enum Run {
    #[default]
    Stopped,
    Running {
        progress: Box<Progress>,
        disk: Disk,
        /// This life, as the disk's workers know it.
        requester: Requester,
        thread: Option<JoinHandle<()>>,
        broken: bool,
        /// Why it takes nothing any more.
        stopping: Option<StopReason>,
    },
}

#[derive(Default)]
struct State {
    size: u16,
    base: u16,
    addresses: Option<Addresses>,
    call: Option<Arc<File>>,
    kick: Option<Arc<File>>,
    error: Option<Arc<File>>,
    enabled: bool,
    hold: CompletionHold,
    /// Grows with each start: an answer to a request of an earlier life is dropped.
    life: u64,
    run: Run,
}

/// One ring.
pub(super) struct Ring {
    pub(super) index: u16,
    pub(super) counters: Arc<Counters>,
    pub(super) serial: String,
    state: Mutex<State>,
    /// Told when requests under way get fewer.
    fewer: Condvar,
    /// Wakes the ring's thread.
    pub(super) wake: OwnedFd,
}

/// What a ring's thread is told of the life that it serves.
pub(super) struct Life {
    /// Answers to requests of another life are dropped.
    pub(super) number: u64,
    pub(super) disk: Disk,
    pub(super) requester: Requester,
    /// The driver knows no flush: what it changes is durable before it is answered (VIRTIO 1.2, 5.2.6.2).
    pub(super) is_write_through: bool,
}

/// What a ring's thread does next.
pub(super) enum Next {
    /// These chains are in the caller's list: do them.
    Work {
        memory: Arc<Memory>,
        split: Split,
    },
    /// Nothing to do until a kick or a wake.
    Sleep,
    Stop,
}

impl Ring {
    pub(super) fn new(index: u16, counters: Arc<Counters>, serial: String) -> std::io::Result<Ring> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags)?;
        Ok(Ring { index, counters, serial, state: Mutex::default(), fewer: Condvar::new(), wake })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_size(&self, size: u16) {
        self.state().size = size;
    }

    pub(super) fn set_base(&self, base: u16) {
        self.state().base = base;
    }

    /// Where the ring runs the driver is called there at once: QEMU has another descriptor when the guest masks an
    /// interrupt or lets it through, and looks at the one before without waiting for us, so a call in between is lost.
    pub(super) fn set_call(&self, file: Option<File>) {
        let mut state = self.state();
        state.call = file.map(Arc::new);
        if matches!(state.run, Run::Running { .. }) {
            call(state.call.as_ref());
        }
    }

    pub(super) fn set_kick(&self, file: Option<File>) {
        self.state().kick = file.map(Arc::new);
    }

    pub(super) fn set_error(&self, file: Option<File>) {
        self.state().error = file.map(Arc::new);
    }

    pub(super) fn set_hold(&self, policy: CompletionHold) {
        self.state().hold = policy;
    }

    pub(super) fn enable(&self, enabled: bool) {
        self.state().enabled = enabled;
        self.wake();
    }

    fn wake(&self) {
        // A full counter wakes, too.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.state().run, Run::Running { .. })
    }

    /// Whether all is there that a start needs.
    pub(super) fn wants_to_start(&self) -> bool {
        let state = self.state();
        let ready = state.enabled && state.kick.is_some() && state.addresses.is_some() && state.size > 0;
        ready && matches!(state.run, Run::Stopped)
    }

    /// Takes the ring's addresses. A running ring goes on at them: the front end sends them again when logging begins.
    pub(super) fn set_addresses(&self, addresses: Addresses, memory: &Arc<Memory>) -> Result<(), RingError> {
        let mut state = self.state();
        state.addresses = Some(addresses);
        let State { run: Run::Running { progress, .. }, .. } = &mut *state else { return Ok(()) };
        let split = translate(addresses, memory, progress.split().size, progress.split().event_index)?;
        progress.move_to(split, memory.clone())
    }

    /// Takes a new table of guest memory; a running ring goes on in it.
    pub(super) fn set_memory(&self, memory: &Arc<Memory>) -> Result<(), RingError> {
        match &mut self.state().run {
            Run::Running { progress, .. } => progress.move_to(*progress.split(), memory.clone()),
            Run::Stopped => Ok(()),
        }
    }

    /// Begins to serve. The driver is called once: an answer of an earlier process may have been told without a call,
    /// and the guest would wait for good.
    pub(super) fn start(
        self: &Arc<Self>,
        memory: Arc<Memory>,
        features: u64,
        inflight: Option<&Arc<InflightArea>>,
        disk: Disk,
    ) -> Result<(), RingError> {
        let mut state = self.state();
        let (Some(addresses), Some(kick)) = (state.addresses, state.kick.clone()) else { return Ok(()) };
        let split = translate(addresses, &memory, state.size, features & feature::EVENT_IDX != 0)?;
        let queue = |area: &Arc<InflightArea>| area.queue(self.index, split.size).ok_or(RingError::Inflight);
        let inflight = inflight.map(queue).transpose()?;
        let progress = Progress::begin(split, memory, state.base, inflight)?;
        state.life += 1;
        let requester = Requester::default();
        let life = Life {
            number: state.life,
            disk: disk.clone(),
            requester: requester.clone(),
            is_write_through: features & feature::FLUSH == 0,
        };
        let ring = self.clone();
        let thread = std::thread::Builder::new()
            .name(format!("vhost-ring-{}", self.index))
            .spawn(move || worker::run(&ring, &life, &kick))
            .map_err(|error| RingError::Memory(vm_memory::GuestMemoryError::IOError(error)))?;
        let (progress, thread) = (Box::new(progress), Some(thread));
        state.run = Run::Running { progress, disk, requester, thread, broken: false, stopping: None };
        call(state.call.as_ref());
        Ok(())
    }

    /// Takes no more, from now on. A ring without a record of what is in flight answers all in any case.
    pub(super) fn begin_stop(&self, reason: StopReason) {
        if let Run::Running { stopping, progress, .. } = &mut self.state().run {
            *stopping = Some(if progress.is_tracked() { reason } else { StopReason::Migrated });
        }
        self.wake();
    }

    /// Ends serving: takes no more, and waits for what is under way until the deadline. What has no answer then is
    /// withdrawn from the disk. Gives the index at which the ring goes on.
    pub(super) fn stop(&self, reason: StopReason, deadline: Instant) -> u16 {
        self.begin_stop(reason);
        let under_way = match &mut self.state().run {
            Run::Running { thread, disk, requester, .. } => Some((thread.take(), disk.clone(), requester.clone())),
            Run::Stopped => None,
        };
        let Some((thread, disk, requester)) = under_way else { return self.end(self.state()) };
        if self.lets_answers_go() {
            self.release(None);
        }
        if let Run::Running { progress, stopping: Some(StopReason::Migrated), .. } =
            &mut self.drained(self.state(), deadline).run
        {
            progress.give_up_taken_before();
        }
        // The thread may wait until it may take them.
        self.wake();
        // The ring's next life, here or elsewhere, may write in the same places.
        disk.withdraw(&requester);
        // Only now: the thread may have waited for room in the disk's queue, which others can fill.
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(ring = self.index, "the ring's thread panicked");
        }
        self.end(self.state())
    }

    /// Whether the ring stops, and keeps no answer back any more.
    pub(super) fn lets_answers_go(&self) -> bool {
        matches!(self.state().run, Run::Running { stopping: Some(StopReason::Requested | StopReason::Migrated), .. })
    }

    /// Waits until nothing is under way that this stop waits for, or too long.
    fn drained<'a>(&'a self, mut state: MutexGuard<'a, State>, deadline: Instant) -> MutexGuard<'a, State> {
        let under_way = |progress: &Progress, stopping, broken: bool| match stopping {
            Some(StopReason::Disconnected) => progress.waiting(),
            // No record of them comes along.
            Some(StopReason::Migrated) if !broken => progress.outstanding() + progress.taken_before(),
            _ => progress.outstanding(),
        };
        let last = deadline + LOCAL_TIMEOUT;
        while let Run::Running { progress, stopping, broken, disk, requester, .. } = &state.run
            && under_way(progress, *stopping, *broken) > 0
        {
            let now = Instant::now();
            let left = match deadline.checked_duration_since(now) {
                Some(left) => left,
                // It would fail for nothing: the disk is given back only when it is done.
                None if *stopping == Some(StopReason::Migrated) && now < last && disk.has_local(requester) => {
                    LOCAL_LOOK
                }
                None => break,
            };
            (state, _) = self.fewer.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    fn end(&self, mut state: MutexGuard<'_, State>) -> u16 {
        if let Run::Running { mut progress, stopping, .. } = std::mem::take(&mut state.run) {
            // Else whoever goes on finds in flight what has no answer.
            if stopping == Some(StopReason::Migrated) {
                // Its thread may have put some back as it ended.
                progress.give_up_taken_before();
                self.give_up(&mut progress, state.call.as_ref());
            }
            state.base = progress.base();
        }
        // The next life's descriptor comes with its start.
        state.kick = None;
        state.life += 1;
        state.base
    }

    /// Lets requests fail that wait still.
    fn give_up(&self, progress: &mut Progress, descriptor: Option<&Arc<File>>) {
        let given_up = progress.give_up();
        if !given_up.is_empty() {
            tracing::warn!(ring = self.index, requests = given_up.len(), "requests that wait for a source fail");
        }
        let mut answers: Vec<(u16, u32)> = given_up
            .into_iter()
            .filter(|(_, address)| progress.memory().write(*address, &[status::IO_ERROR]).is_ok())
            .map(|(head, _)| (head, 1))
            .collect();
        for head in progress.given_up() {
            let (memory, split, mut chain) = (progress.memory(), progress.split(), Chain::default());
            let walked = chain.walk(memory, split.descriptors, split.size, head);
            let address = walked.and_then(|()| Call::decode(memory, head, &mut chain)).map(|call| call.status_address);
            let is_told = address.is_ok_and(|address| memory.write(address, &[status::IO_ERROR]).is_ok());
            answers.push((head, u32::from(is_told)));
        }
        match progress.tell(&answers) {
            Ok(false) => {}
            Ok(true) => call(descriptor),
            Err(error) => tracing::warn!(ring = self.index, %error, "a stopped ring could not be told"),
        }
    }

    /// What the ring's thread does next; chains to do are put into `heads`.
    pub(super) fn next(&self, heads: &mut Vec<u16>, limit: usize) -> Next {
        let mut state = self.state();
        let State { run, enabled, error, .. } = &mut *state;
        let Run::Running { progress, broken, stopping, .. } = run else { return Next::Stop };
        let taken = match stopping {
            None if *broken || !*enabled || progress.is_full() => return Next::Sleep,
            None => progress.take(heads, limit),
            // No record of what was taken before comes along: it is done here.
            Some(StopReason::Migrated) if progress.taken_before() > 0 && !*broken && !progress.gives_up() => {
                match progress.is_full() {
                    true => return Next::Sleep,
                    false => progress.take_again(heads, limit),
                }
            }
            Some(_) => return Next::Stop,
        };
        if let Err(failure) = taken {
            tracing::warn!(
                ring = self.index,
                error = %failure,
                "the driver broke its ring: it is not served until it is reset"
            );
            self.counters.broken_rings.add(1);
            *broken = true;
            call(error.as_ref());
            self.fewer.notify_all();
        }
        match heads.is_empty() {
            true => Next::Sleep,
            false => Next::Work { memory: progress.memory().clone(), split: *progress.split() },
        }
    }

    /// A request goes to the disk's own workers. Whether so much waits now that none may follow.
    pub(super) fn wait_for(&self, request: &Call) -> bool {
        let Run::Running { progress, .. } = &mut self.state().run else { return true };
        progress.wait_for(request.head, request.status_address, request.data_bytes());
        progress.is_full()
    }

    /// Gives back the last requests taken, of which none was begun.
    pub(super) fn postpone(&self, heads: &[u16]) {
        if let Run::Running { progress, .. } = &mut self.state().run {
            progress.postpone(heads);
        }
    }

    /// Answers a request that the disk did in its own time, from any thread.
    pub(super) fn answer(&self, life: u64, request: &Call, outcome: Result<Vec<u8>, DiskError>) {
        let mut state = self.state();
        if state.life != life {
            return;
        }
        let Run::Running { progress, .. } = &mut state.run else { return };
        let was_full = progress.is_full();
        progress.waited_for(request.head);
        // Under the lock: once a ring has stopped, nobody may write into the guest's memory.
        let done = put_answer(progress.memory(), request, outcome.as_deref(), &self.counters);
        let wake = was_full && !progress.is_full();
        self.tell_locked(state, &[done]);
        if wake {
            self.wake();
        }
    }

    /// Tells the driver of finished requests, or keeps their answers back.
    pub(super) fn tell(&self, finished: &[Done]) {
        if !finished.is_empty() {
            self.tell_locked(self.state(), finished);
        }
    }

    fn tell_locked(&self, mut state: MutexGuard<'_, State>, finished: &[Done]) {
        let policy = state.hold;
        let Run::Running { progress, disk, stopping, .. } = &mut state.run else { return };
        // Who asks a ring to stop waits for its answers, QEMU's main loop with it: none is kept back any more.
        let holds = policy != CompletionHold::Nothing && matches!(stopping, None | Some(StopReason::Disconnected));
        // The epoch now is the request's or a later one: never too early.
        let epoch = holds.then(|| disk.epoch());
        let mut free = Vec::with_capacity(finished.len());
        for done in finished {
            match epoch {
                Some(epoch) if policy.holds(done.kind) => progress.hold(epoch, done.head, done.length),
                _ => free.push((done.head, done.length)),
            }
        }
        self.tell_driver(state, &free);
    }

    fn tell_driver(&self, mut state: MutexGuard<'_, State>, answers: &[(u16, u32)]) {
        let Run::Running { progress, broken, .. } = &mut state.run else { return };
        let wants_call = match progress.tell(answers) {
            Ok(wants_call) => wants_call,
            Err(error) => {
                tracing::warn!(ring = self.index, %error, "the driver took its ring away");
                self.counters.broken_rings.add(1);
                *broken = true;
                false
            }
        };
        let descriptor = wants_call.then(|| state.call.clone()).flatten();
        drop(state);
        self.fewer.notify_all();
        if descriptor.is_some() {
            self.counters.calls.add(1);
        }
        call(descriptor.as_ref());
    }

    /// Lets go answers held for epochs up to this one, or all.
    pub(super) fn release(&self, upto: Option<Epoch>) {
        let mut state = self.state();
        let Run::Running { progress, .. } = &mut state.run else { return };
        let answers = progress.let_go(upto);
        if !answers.is_empty() {
            self.tell_driver(state, &answers);
        }
    }

    /// Answers kept back now.
    pub(super) fn held(&self) -> usize {
        match &self.state().run {
            Run::Running { progress, .. } => progress.held(),
            Run::Stopped => 0,
        }
    }
}

/// The ring's place in guest physical addresses.
fn translate(addresses: Addresses, memory: &Memory, size: u16, event_index: bool) -> Result<Split, RingError> {
    let at = |user| memory.guest_address(user).ok_or(RingError::Layout);
    Ok(Split {
        size,
        descriptors: at(addresses.descriptors)?,
        available: at(addresses.available)?,
        used: at(addresses.used)?,
        event_index,
    })
}
