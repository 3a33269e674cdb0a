//! Rings that stop while answers are kept back or requests wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use super::super::drain::StopReason;
use super::*;
use crate::Request;
use crate::engine::workers::{QUEUE_MAX, REMOTE_THREADS_MAX};
use crate::source::{Source, SourceError};

/// A base that does not answer until it is told to.
#[derive(Default)]
struct Silent(AtomicBool);

impl Source for Silent {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }

    fn read(&self, _offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        while !self.0.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(5));
        }
        into.fill(7);
        Ok(())
    }

    fn try_read(&self, _offset: u64, _into: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }

    fn is_local(&self, _offset: u64, _length: u64) -> bool {
        false
    }

    fn close(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn describe(&self) -> String {
        "a silent base".into()
    }
}

/// A base whose first reader waits until it is told to go on; others have their answer at once.
#[derive(Default)]
struct Stuck {
    is_asked: AtomicBool,
    goes_on: AtomicBool,
}

impl Source for Stuck {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }

    fn read(&self, _offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let is_first = !self.is_asked.swap(true, Ordering::AcqRel);
        while is_first && !self.goes_on.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(5));
        }
        into.fill(7);
        Ok(())
    }

    fn is_local(&self, _offset: u64, _length: u64) -> bool {
        false
    }

    fn close(&self) {
        self.goes_on.store(true, Ordering::Release);
    }

    fn describe(&self) -> String {
        "a base that is stuck".into()
    }
}

/// A disk whose base does not answer.
fn silent_fixture(queues: u16) -> Fixture {
    let options = VhostUserOptions { queues, ..VhostUserOptions::default() };
    Fixture::over(options, || OpenOptions { base: Some(Arc::new(Silent::default())), ..OpenOptions::default() })
}

fn submit(driver: &mut Driver, queue: u16, ask: Ask<'_>) {
    driver.submit(queue, ask).unwrap().unwrap();
    driver.kick(queue).unwrap();
}

/// Spec: D5
#[test]
fn b37_a_flush_that_ends_after_the_ring_began_to_stop_is_answered() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    write(&mut driver, 0, &pattern(1, 4096));
    fixture.backend.hold(CompletionHold::Flushes);
    // Flushes are done by one thread: while somebody's completion keeps it, the driver's flush is not done.
    let (let_go, kept) = mpsc::channel::<()>();
    let disk = fixture.attachment.current().unwrap();
    disk.submit(Request::Flush, Box::new(move |_| assert!(kept.recv().is_err(), "nothing is sent")));
    submit(&mut driver, 0, Ask::Flush);
    until("the flush waits", || fixture.backend.statistics().waited == 1);
    drop(disk);
    // The deadline is far away: a stop that ends has waited for nothing but the flush.
    let (ring, (told, ended)) = (fixture.backend.shared.rings[0].clone(), mpsc::channel());
    let stopping = ring.clone();
    std::thread::spawn(move || told.send(stopping.stop(StopReason::Requested, Instant::now() + 10 * WAIT_MAX)));
    until("the ring stops", || ring.lets_answers_go());
    drop(let_go);
    ended.recv_timeout(WAIT_MAX).expect("the stop waited for an answer that was kept back");
    assert_eq!(driver.wait(0, WAIT_MAX).unwrap().status, 0);
}

/// Spec: D5
#[test]
fn b37_answers_kept_back_from_a_front_end_that_goes_stay_in_flight() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    fixture.backend.hold(CompletionHold::Changes);
    let data = pattern(5, 4096);
    submit(&mut driver, 0, Ask::Write { sector: 0, data: &data });
    until("the write is kept back", || fixture.backend.statistics().held == 1);
    // Breaks the connection, as a lost one is, and comes again.
    driver.reconnect(&fixture.socket()).unwrap();
    assert!(driver.wait(0, Duration::from_millis(200)).is_err(), "an answer was let go that nobody released");
    driver.start(0).unwrap();
    until("the write is done again, and kept back again", || fixture.backend.statistics().held == 1);
    assert!(driver.wait(0, Duration::from_millis(100)).is_err());
    fixture.backend.release(fixture.attachment.current().unwrap().epoch());
    assert_eq!(driver.wait(0, WAIT_MAX).unwrap().status, 0);
    assert!(driver.wait(0, Duration::from_millis(100)).is_err(), "it is answered once");
    assert_eq!(read(&mut driver, 0, 4096), data);
}

/// Spec: D5
#[test]
fn b37_rings_whose_requests_wait_stop_within_one_time() {
    let fixture = silent_fixture(4);
    let mut driver = fixture.driver(DriverOptions { queues: 4, track_in_flight: false, ..DriverOptions::default() });
    for queue in 0..4 {
        submit(&mut driver, queue, Ask::Read { sector: 0, length: 4096 });
    }
    until("all wait", || fixture.backend.statistics().waited == 4);
    let mut deadlines = Vec::new();
    for queue in 0..4 {
        driver.stop(queue).unwrap();
        // What waits still at the deadline fails: there is no record for it to stay in.
        assert_eq!(driver.wait(queue, WAIT_MAX).unwrap().status, 1);
        deadlines.push(fixture.backend.shared.drain.last_deadline().expect("a ring has stopped"));
    }
    deadlines.dedup();
    assert_eq!(deadlines.len(), 1, "the rings waited one after the other: {deadlines:?}");
}

/// Spec: D5
#[test]
fn b37_a_ring_takes_no_more_than_may_wait() {
    let fixture = silent_fixture(1);
    let mut driver = fixture.driver(DriverOptions { ring_size: 512, slot_bytes: 4096, ..DriverOptions::default() });
    for _ in 0..150 {
        driver.submit(0, Ask::Read { sector: 0, length: 4096 }).unwrap().unwrap();
    }
    driver.kick(0).unwrap();
    let limit = super::super::progress::WAITING_MAX as u16;
    until("as many wait as may", || fixture.backend.statistics().waited == u64::from(limit));
    // Those that were not begun are as if they had never been taken.
    assert_eq!(driver.stop(0).unwrap(), limit);
    assert_eq!(fixture.backend.statistics().waited, u64::from(limit));
}

/// Spec: D5
#[test]
fn b37_requests_that_wait_when_the_front_end_goes_are_done_by_the_next_back_end() {
    let fixture = silent_fixture(1);
    let mut driver = fixture.driver(DriverOptions::default());
    submit(&mut driver, 0, Ask::Read { sector: 0, length: 4096 });
    until("it waits", || fixture.backend.statistics().waited == 1);
    fixture.backend.stop();
    assert!(driver.wait(0, Duration::from_millis(200)).is_err(), "a request failed that the next back end can do");
    let answering = || {
        let base = Silent(AtomicBool::new(true));
        OpenOptions { base: Some(Arc::new(base)), ..OpenOptions::default() }
    };
    let attachment = Arc::new(Attachment::new(fixture.attachment.directory(), answering));
    let _next = VhostUserBackend::serve(attachment, &fixture.socket(), VhostUserOptions::default()).unwrap();
    driver.reconnect(&fixture.socket()).unwrap();
    driver.start(0).unwrap();
    let finished = driver.wait(0, WAIT_MAX).unwrap();
    assert_eq!((finished.status, finished.length), (0, 4097));
    let mut bytes = vec![0; 4096];
    driver.get(driver.data_address(0, finished.slot), &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4096]);
}

/// What a ring that stopped, or a client that was lost or cut off, had asked for and has no answer changes neither
/// guest memory nor the disk any more, also while the disk is open for others and when a base comes back late.
///
/// Spec: D5
#[test]
fn b60_what_a_stopped_ring_had_asked_for_changes_nothing_any_more() {
    for is_lost in [false, true] {
        let base = Arc::new(Stuck::default());
        let below: Arc<dyn Source> = base.clone();
        let open = move || OpenOptions { base: Some(below.clone()), ..OpenOptions::default() };
        let fixture = Fixture::over(VhostUserOptions::default(), open);
        // Another back end has the disk, too: it stays open when the ring stops.
        let disk = fixture.attachment.attach().unwrap();
        let mut driver = fixture.driver(DriverOptions::default());
        submit(&mut driver, 0, Ask::Write { sector: 0, data: &pattern(1, 512) });
        until("the write waits for the base", || base.is_asked.load(Ordering::Acquire));
        if is_lost {
            driver.reconnect(&fixture.socket()).unwrap();
        } else {
            driver.stop(0).unwrap();
        }
        driver.start(0).unwrap();
        assert_eq!(driver.wait(0, WAIT_MAX).unwrap().status, 0, "it is done again");
        write(&mut driver, 0, &pattern(2, 512));
        base.goes_on.store(true, Ordering::Release);
        until("nothing is left of the first life", || disk.statistics().pending_requests == 0);
        assert_eq!(read(&mut driver, 0, 512), pattern(2, 512), "lost: {is_lost}");
        drop(disk);
        fixture.attachment.detach().unwrap();
    }
}

/// A request that waits for a base longer than a stop may take does not fail: the ring's next life does it, here or at
/// the next back end. It fails where no record of it follows: for a front end that keeps none, and when the machine
/// moves.
///
/// Spec: D5
#[test]
fn b61_a_stop_leaves_what_waits_for_a_base_to_the_rings_next_life() {
    let fixture = silent_fixture(1);
    let mut driver = fixture.driver(DriverOptions::default());
    submit(&mut driver, 0, Ask::Read { sector: 0, length: 4096 });
    until("it waits", || fixture.backend.statistics().waited == 1);
    assert_eq!(driver.stop(0).unwrap(), 1);
    assert!(fixture.attachment.current().is_none(), "the last ring's stop gives the disk back");
    assert!(driver.wait(0, Duration::from_millis(100)).is_err(), "a request failed that can still be done");
    // The disk is opened anew, and its base is away still.
    driver.share_again().unwrap();
    driver.start_at(0, 1).unwrap();
    until("it waits again", || fixture.backend.statistics().waited == 2);
    // Now the machine moves: nobody at its next place would know of the request.
    driver.log().unwrap();
    assert_eq!(driver.stop(0).unwrap(), 1);
    assert_eq!(driver.wait(0, WAIT_MAX).unwrap().status, 1);
}

/// When the machine moves, a flush that takes longer than a stop is waited for: it would fail in the guest for nothing.
///
/// Spec: D5
#[test]
fn b61_a_machine_that_moves_waits_for_what_its_own_disk_does() {
    let fixture = silent_fixture(1);
    let mut driver = fixture.driver(DriverOptions::default());
    let (let_go, kept) = mpsc::channel::<()>();
    let disk = fixture.attachment.current().unwrap();
    disk.submit(Request::Flush, Box::new(move |_| assert!(kept.recv().is_err(), "nothing is sent")));
    submit(&mut driver, 0, Ask::Flush);
    submit(&mut driver, 0, Ask::Read { sector: 0, length: 4096 });
    until("both wait", || fixture.backend.statistics().waited == 2);
    drop(disk);
    driver.log().unwrap();
    let rings = fixture.backend.shared.rings.clone();
    let stopped = std::thread::spawn(move || {
        // The deadline has passed: what waits for the base fails.
        rings[0].stop(StopReason::Migrated, Instant::now())
    });
    until("the ring stops", || fixture.backend.shared.rings[0].lets_answers_go());
    std::thread::sleep(Duration::from_millis(100));
    assert!(!stopped.is_finished());
    drop(let_go);
    assert_eq!(stopped.join().unwrap(), 2);
    let statuses = [(); 2].map(|()| driver.wait(0, WAIT_MAX).unwrap().status);
    assert_eq!(statuses, [0, 1]);
}

/// When the machine moves, all has its answer that a dead back end had taken and the next one has not begun.
///
/// Spec: D5
#[test]
fn b61_a_machine_that_moves_has_an_answer_to_all_that_a_dead_back_end_had_taken() {
    const REQUESTS: u16 = 150;
    let base = |answers| {
        move || {
            let base = Silent(AtomicBool::new(answers));
            OpenOptions { base: Some(Arc::new(base)), ..OpenOptions::default() }
        }
    };
    for answers in [false, true] {
        let fixture = Fixture::over(VhostUserOptions::default(), base(true));
        let options = DriverOptions { ring_size: 512, slot_bytes: 4096, ..DriverOptions::default() };
        let mut driver = fixture.driver(options);
        fixture.backend.hold(CompletionHold::Changes);
        for number in 0..REQUESTS {
            // A part of a block needs the base.
            let ask = Ask::Write { sector: u64::from(number % 8) * 8, data: &pattern(number as u8, 512) };
            driver.submit(0, ask).unwrap().unwrap();
        }
        driver.kick(0).unwrap();
        until("all are kept back", || fixture.backend.statistics().held == u64::from(REQUESTS));
        fixture.backend.stop();
        // Another disk, on which nothing was written: it needs the base again.
        let other = Fixture::new(1);
        let attachment = Arc::new(Attachment::new(other.attachment.directory(), base(answers)));
        let next = VhostUserBackend::serve(attachment, &fixture.socket(), VhostUserOptions::default()).unwrap();
        driver.reconnect(&fixture.socket()).unwrap();
        driver.log().unwrap();
        driver.start(0).unwrap();
        assert_eq!(driver.stop(0).unwrap(), REQUESTS);
        for number in 0..REQUESTS {
            let status = driver.wait(0, WAIT_MAX).unwrap_or_else(|error| panic!("{number}: {error:#}")).status;
            assert_eq!(status, u8::from(!answers), "{number}");
        }
        drop(next);
    }
}

/// Spec: D5
#[test]
fn b37_a_ring_stops_in_time_also_when_others_fill_the_disks_queue() {
    let fixture = silent_fixture(1);
    let disk = fixture.attachment.attach().unwrap();
    let mut driver = fixture.driver(DriverOptions::default());
    // One waits behind them: the queue is full.
    let filling = disk.clone();
    std::thread::spawn(move || {
        for _ in 0..=QUEUE_MAX + REMOTE_THREADS_MAX {
            let request = Request::Read { offset: 0, length: 4096, segments: Vec::new() };
            filling.submit(request, Box::new(|_| {}));
        }
    });
    let most = (QUEUE_MAX + REMOTE_THREADS_MAX) as u64;
    until("the queue is full", || disk.statistics().pending_requests == most);
    submit(&mut driver, 0, Ask::Read { sector: 0, length: 4096 });
    until("the ring waits, too", || fixture.backend.statistics().waited == 1);
    assert_eq!(driver.stop(0).unwrap(), 1);
    assert_eq!(disk.statistics().pending_requests, most);
    drop(disk);
    fixture.attachment.detach().unwrap();
}
