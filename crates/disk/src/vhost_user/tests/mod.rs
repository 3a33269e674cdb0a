//! The back end, tried by a driver without a guest.

mod hostile;
mod stopping;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_testing::vhost_driver::{Ask, Driver, DriverOptions, Finished, GUEST_BASE};
use onecopy_testing::{WAIT_MAX, until};
use tempfile::TempDir;

use super::inflight::InflightArea;
use super::{CompletionHold, VhostUserBackend, VhostUserOptions};
use crate::{Attachment, CreateOptions, Disk, OpenOptions};

const SIZE_BYTES: u64 = 64 << 20;

/// A disk behind a back end.
struct Fixture {
    directory: TempDir,
    attachment: Arc<Attachment>,
    backend: VhostUserBackend,
}

impl Fixture {
    fn new(queues: u16) -> Fixture {
        Fixture::with(VhostUserOptions { queues, serial: "serial-number".into(), ..VhostUserOptions::default() })
    }

    fn with(options: VhostUserOptions) -> Fixture {
        Fixture::over(options, OpenOptions::default)
    }

    fn over(options: VhostUserOptions, open: impl Fn() -> OpenOptions + Send + Sync + 'static) -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disk");
        Disk::create(&disk, &CreateOptions { size_bytes: SIZE_BYTES, base: None, copy_base: false }).unwrap();
        let attachment = Arc::new(Attachment::new(&disk, open));
        let backend =
            VhostUserBackend::serve(attachment.clone(), &directory.path().join("vhost.sock"), options).unwrap();
        Fixture { directory, attachment, backend }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("vhost.sock")
    }

    fn driver(&self, options: DriverOptions) -> Driver {
        let mut driver = Driver::connect(&self.socket(), options).unwrap();
        for queue in 0..options.queues {
            driver.start(queue).unwrap();
        }
        driver
    }
}

fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|place| (place as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn read(driver: &mut Driver, sector: u64, length: u32) -> Vec<u8> {
    let finished = driver.request(0, Ask::Read { sector, length }, WAIT_MAX).unwrap();
    assert_eq!((finished.status, finished.length), (0, length + 1));
    let mut bytes = vec![0; length as usize];
    driver.get(driver.data_address(0, finished.slot), &mut bytes).unwrap();
    bytes
}

fn write(driver: &mut Driver, sector: u64, data: &[u8]) {
    let finished = driver.request(0, Ask::Write { sector, data }, WAIT_MAX).unwrap();
    assert_eq!((finished.status, finished.length), (0, 1));
}

/// Nothing is in the ring of what was asked before: a read that is asked now is its only answer.
#[track_caller]
fn assert_none_answered_before(driver: &mut Driver) {
    let slot = driver.submit(0, Ask::Read { sector: 64, length: 512 }).unwrap().unwrap();
    driver.kick(0).unwrap();
    assert_eq!(driver.wait(0, WAIT_MAX).unwrap().slot, slot, "an answer was let go that was to be held");
    assert!(driver.finished(0).unwrap().is_none(), "an answer was let go that was to be held");
}

fn status(driver: &mut Driver, ask: Ask<'_>) -> u8 {
    driver.request(0, ask, WAIT_MAX).unwrap().status
}

/// What is written through the vhost-user-blk back end is read again, with event indexes and without.
///
/// Spec: D5
#[test]
fn b30_what_is_written_through_the_back_end_is_read_again() {
    for event_index in [true, false] {
        let fixture = Fixture::new(1);
        let mut driver = fixture.driver(DriverOptions { event_index, ..DriverOptions::default() });
        for (place, length) in [512, 4096, 65536, 1024].into_iter().enumerate() {
            write(&mut driver, 1000 * place as u64 + 3, &pattern(place as u8, length));
        }
        assert_eq!(status(&mut driver, Ask::Flush), 0);
        for (place, length) in [512, 4096, 65536, 1024].into_iter().enumerate() {
            assert_eq!(read(&mut driver, 1000 * place as u64 + 3, length), pattern(place as u8, length as usize));
        }
        assert_eq!(read(&mut driver, 90_000, 4096), vec![0; 4096]);
        let statistics = fixture.backend.statistics();
        assert_eq!((statistics.writes, statistics.reads, statistics.flushes), (4, 5, 1));
        assert_eq!(statistics.written_bytes, 512 + 4096 + 65536 + 1024);
    }
}

/// A driver that has its calls come by another descriptor hears there of what was told by the one before.
///
/// Spec: D5
#[test]
fn b30_a_call_that_is_lost_with_its_descriptor_is_made_again() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    driver.submit(0, Ask::Read { sector: 0, length: 512 }).unwrap().unwrap();
    driver.kick(0).unwrap();
    until("it is answered", || driver.finished(0).unwrap().is_some());
    driver.move_call(0).unwrap();
    assert!(driver.is_called(0, WAIT_MAX).unwrap());
}

/// The device tells its size, blocks, queues, limits and serial number.
///
/// Spec: D5
#[test]
fn b31_the_device_tells_what_it_is() {
    let fixture = Fixture::new(4);
    let mut driver = fixture.driver(DriverOptions { queues: 4, ..DriverOptions::default() });
    let space = driver.config(60).unwrap();
    let number = |offset: usize| u32::from_le_bytes(space[offset..offset + 4].try_into().unwrap());
    assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), SIZE_BYTES / 512);
    assert_eq!((number(20), space[24], space[32]), (512, 3, 1));
    assert_eq!(u16::from_le_bytes([space[34], space[35]]), 4);
    assert!(number(36) > 0 && number(48) > 0);
    assert_eq!((number(40), number(44), number(52), space[56]), (1, 8, 1, 1));
    let finished = driver.request(0, Ask::Identify, WAIT_MAX).unwrap();
    let mut serial = [0xff; 20];
    driver.get(driver.data_address(0, finished.slot), &mut serial).unwrap();
    assert_eq!(&serial, b"serial-number\0\0\0\0\0\0\0");
}

/// Discarded and zeroed sectors read as zeros, their neighbours stay.
///
/// Spec: D5
#[test]
fn b32_discards_and_zeroes_read_as_zeros() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    write(&mut driver, 0, &pattern(7, 32768));
    assert_eq!(status(&mut driver, Ask::Discard { sector: 8, sectors: 8 }), 0);
    assert_eq!(status(&mut driver, Ask::WriteZeroes { sector: 32, sectors: 4, may_unmap: true }), 0);
    assert_eq!(status(&mut driver, Ask::WriteZeroes { sector: 40, sectors: 8, may_unmap: false }), 0);
    let mut expected = pattern(7, 32768);
    for (from, sectors) in [(8, 8), (32, 4), (40, 8)] {
        expected[from * 512..(from + sectors) * 512].fill(0);
    }
    assert_eq!(read(&mut driver, 0, 32768), expected);
}

/// Spec: D5
#[test]
fn b32_what_a_driver_changes_that_knows_no_flush_is_durable_when_it_is_answered() {
    let fixture = Fixture::new(1);
    for flushes in [true, false] {
        let mut driver = fixture.driver(DriverOptions { flushes, ..DriverOptions::default() });
        let flushed = || fixture.attachment.current().unwrap().statistics().flushes;
        let mut before = flushed();
        for ask in [
            Ask::Write { sector: 8, data: &pattern(1, 4096) },
            Ask::Write { sector: 17, data: &pattern(2, 512) },
            Ask::WriteZeroes { sector: 8, sectors: 8, may_unmap: false },
            Ask::Discard { sector: 16, sectors: 8 },
        ] {
            assert_eq!(status(&mut driver, ask), 0, "{ask:?}");
            assert_eq!(flushed() > before, !flushes, "{ask:?}");
            before = flushed();
        }
        assert_eq!(read(&mut driver, 8, 4096), [0; 4096]);
        assert_eq!(flushed(), before, "a read");
        // Its answer is that of a flush, and kept back with those.
        fixture.backend.hold(CompletionHold::Flushes);
        driver.submit(0, Ask::Write { sector: 8, data: &pattern(3, 512) }).unwrap().unwrap();
        driver.kick(0).unwrap();
        if !flushes {
            until("it is kept back", || fixture.backend.statistics().held == 1);
            driver.stop(0).unwrap();
        }
        assert_eq!(driver.wait(0, WAIT_MAX).unwrap().status, 0);
        fixture.backend.hold(CompletionHold::Nothing);
    }
}

/// A request beyond the disk's end, or of broken sectors, fails; the ring goes on.
///
/// Spec: C5
#[test]
fn b33_requests_beyond_the_end_fail_and_the_ring_goes_on() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    let end = SIZE_BYTES / 512;
    let data = pattern(1, 1024);
    for ask in [
        Ask::Read { sector: end, length: 512 },
        Ask::Read { sector: end - 1, length: 1024 },
        Ask::Read { sector: u64::MAX, length: 512 },
        Ask::Read { sector: u64::MAX / 512, length: 512 },
        Ask::Read { sector: 0, length: 100 },
        Ask::Write { sector: end - 1, data: &data },
        Ask::Write { sector: 1 << 60, data: &data },
        Ask::Write { sector: 0, data: &data[..700] },
        Ask::Discard { sector: end - 1, sectors: 2 },
        Ask::Discard { sector: 0, sectors: 0 },
        Ask::Discard { sector: 0, sectors: u32::MAX },
        Ask::WriteZeroes { sector: u64::MAX - 7, sectors: 8, may_unmap: true },
    ] {
        assert_eq!(status(&mut driver, ask), 1, "{ask:?}");
    }
    assert_eq!(fixture.backend.statistics().failed, 12);
    assert_eq!(read(&mut driver, end - 1, 512), vec![0; 512]);
}

/// A ring that stops and starts goes on where it was; the last ring's stop gives the disk back, the first one's start
/// takes it.
///
/// Spec: D5
#[test]
fn b34_a_ring_that_stops_and_starts_goes_on_where_it_was() {
    let fixture = Fixture::new(2);
    let mut driver = fixture.driver(DriverOptions { queues: 2, ..DriverOptions::default() });
    for round in 0..5_u8 {
        write(&mut driver, u64::from(round) * 8, &pattern(round, 4096));
        assert_eq!(driver.stop(0).unwrap(), u16::from(round) + 1);
        assert!(fixture.attachment.current().is_some(), "the second ring runs still");
        driver.start(0).unwrap();
    }
    driver.stop(0).unwrap();
    driver.stop(1).unwrap();
    assert!(fixture.attachment.current().is_none(), "the last ring's stop gives the disk back");
    driver.start(0).unwrap();
    for round in 0..5_u8 {
        assert_eq!(read(&mut driver, u64::from(round) * 8, 4096), pattern(round, 4096));
    }
}

/// A front end that goes gives the disk back, and another may come; a back end takes a dead one's socket and no other
/// file.
///
/// Spec: D5
#[test]
fn b35_a_front_end_that_goes_gives_the_disk_back_and_another_may_come() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    write(&mut driver, 0, &pattern(1, 4096));
    drop(driver);
    let mut driver = fixture.driver(DriverOptions::default());
    assert_eq!(read(&mut driver, 0, 4096), pattern(1, 4096));
    drop(driver);
    until("the disk is given back", || fixture.attachment.current().is_none());
    assert_eq!(fixture.backend.statistics().connections, 2);
}

/// Every page of guest memory that the device writes, and no other, is marked while a machine migrates; without marking
/// they are missed.
///
/// Spec: D5
#[test]
fn b36_every_page_that_the_device_writes_is_marked_while_a_machine_migrates() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    write(&mut driver, 0, &pattern(1, 65536));
    assert!(driver.logged_pages().is_empty());
    driver.log().unwrap();
    let finished = driver.request(0, Ask::Read { sector: 0, length: 65536 }, WAIT_MAX).unwrap();
    let data = driver.data_address(0, finished.slot);
    let marked = driver.logged_pages();
    let mut expected: Vec<u64> = (data / 4096..=(data + 65535) / 4096).map(|page| page * 4096).collect();
    // The status, and the used ring.
    expected.push((data_status(&driver, finished)) / 4096 * 4096);
    expected.push((driver.ring_address(0) + (48 << 10)) / 4096 * 4096);
    for page in &expected {
        assert!(marked.contains(page), "{page:#x} of {marked:x?}");
    }
    expected.sort_unstable();
    expected.dedup();
    assert_eq!(marked, expected);
    assert_eq!(read(&mut driver, 0, 65536), pattern(1, 65536));
}

fn data_status(driver: &Driver, finished: Finished) -> u64 {
    driver.slot_address(0, finished.slot) + 16
}

/// Spec: D5
#[test]
fn b36_without_dirty_marking_the_pages_are_missed() {
    let fixture = Fixture::with(VhostUserOptions { log_dirty: false, ..VhostUserOptions::default() });
    let mut driver = fixture.driver(DriverOptions::default());
    driver.log().unwrap();
    assert_eq!(read(&mut driver, 0, 4096), vec![0; 4096]);
    assert!(driver.logged_pages().is_empty());
}

/// Answers are held until their epoch is released, from the first one on where that is asked, and let go when the front
/// end stops the ring; those of a front end that goes stay in flight for the next back end, as do requests that wait
/// then. Rings that are stopped share one deadline, and a ring takes no more than may wait.
///
/// Spec: D5
#[test]
fn b37_answers_are_held_until_their_epoch_is_released_or_the_ring_stops() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    fixture.backend.hold(CompletionHold::Flushes);
    write(&mut driver, 0, &pattern(3, 4096));
    assert_eq!(read(&mut driver, 0, 4096), pattern(3, 4096));
    let disk = fixture.attachment.current().unwrap();
    driver.submit(0, Ask::Flush).unwrap().unwrap();
    driver.kick(0).unwrap();
    until("the first flush is kept back", || fixture.backend.statistics().held == 1);
    assert_none_answered_before(&mut driver);
    let ended = disk.cut().unwrap();
    driver.submit(0, Ask::Flush).unwrap().unwrap();
    driver.kick(0).unwrap();
    until("the second flush is kept back", || fixture.backend.statistics().held == 2);
    assert_none_answered_before(&mut driver);
    fixture.backend.release(ended);
    assert_eq!(driver.wait(0, WAIT_MAX).unwrap().status, 0);
    assert_none_answered_before(&mut driver);
    driver.stop(0).unwrap();
    assert_eq!(driver.wait(0, WAIT_MAX).unwrap().status, 0, "a stop must not wait for a release");
}

/// Spec: D5
#[test]
fn b37_a_back_end_can_hold_answers_from_the_first_one_on() {
    let fixture = Fixture::with(VhostUserOptions { hold: CompletionHold::Changes, ..VhostUserOptions::default() });
    let mut driver = fixture.driver(DriverOptions::default());
    driver.submit(0, Ask::Flush).unwrap().unwrap();
    driver.kick(0).unwrap();
    until("the flush is kept back", || fixture.backend.statistics().held == 1);
    assert_none_answered_before(&mut driver);
    driver.stop(0).unwrap();
}

/// Spec: D5
#[test]
fn b35_a_back_end_takes_the_place_of_a_dead_one_and_of_no_file() {
    let fixture = Fixture::new(1);
    let serve =
        |path: &std::path::Path| VhostUserBackend::serve(fixture.attachment.clone(), path, VhostUserOptions::default());
    let data = fixture.attachment.directory().join("data");
    assert!(serve(&data).is_err());
    assert!(data.is_file(), "the disk's data was taken for a dead back end's socket");
    assert!(serve(&fixture.socket()).is_err(), "a back end that lives keeps its place");
    let dead = fixture.directory.path().join("dead.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    serve(&dead).unwrap();
}

/// A new table of guest memory while rings run changes nothing, and the dirty log outlives it.
///
/// Spec: D5
#[test]
fn b38_a_new_table_of_memory_while_rings_run_changes_nothing() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    driver.log().unwrap();
    for round in 0..20_u8 {
        driver.share_again().unwrap();
        write(&mut driver, 8, &pattern(round, 4096));
        assert_eq!(read(&mut driver, 8, 4096), pattern(round, 4096));
    }
    assert!(!driver.logged_pages().is_empty(), "the log outlives the table");
}

/// Spec: D5
#[test]
fn b39_many_requests_at_once_on_many_rings_all_come_back() {
    let fixture = Fixture::new(3);
    let mut driver = fixture.driver(DriverOptions { queues: 3, slot_bytes: 4096, ..DriverOptions::default() });
    let mut outstanding = [0_u32; 3];
    let (mut asked, mut answered) = (0_u64, 0_u64);
    while answered < 6000 {
        for queue in 0..3_u16 {
            while asked < 6000 {
                let data = pattern((asked / 3 % 64) as u8, 4096);
                let ask = Ask::Write { sector: asked / 3 % 64 * 8 + u64::from(queue) * 512, data: &data };
                if driver.submit(queue, ask).unwrap().is_none() {
                    break;
                }
                asked += 1;
                outstanding[usize::from(queue)] += 1;
                if asked % 7 == 0 {
                    break;
                }
            }
            driver.kick(queue).unwrap();
            if outstanding[usize::from(queue)] > 0 {
                assert_eq!(driver.wait(queue, WAIT_MAX).unwrap().status, 0);
                outstanding[usize::from(queue)] -= 1;
                answered += 1;
            }
        }
    }
    assert_eq!(fixture.backend.statistics().writes, 6000);
    assert!(driver.end_address() > GUEST_BASE);
}

/// Requests under way when the back end dies are done by the next one, in order, and those told already are not.
///
/// Spec: D5
#[test]
fn b42_requests_in_flight_are_done_by_the_next_back_end() {
    let fixture = Fixture::new(1);
    let mut driver = Driver::connect(&fixture.socket(), DriverOptions::default()).unwrap();
    let (file, size_bytes) = driver.in_flight().expect("requests in flight are tracked");
    let area = InflightArea::map(file.try_clone().unwrap(), 0, size_bytes, (1, 128)).unwrap();
    let area = Arc::new(area).queue(0, 128).unwrap();
    assert!(area.recover(0).is_none(), "a new area knows nothing");
    // An earlier back end took the first two and died; the third it never saw. Both write one block: the order is
    // theirs.
    let slots: Vec<u16> = (1..=3_u8)
        .map(|seed| {
            let sector = if seed == 3 { 64 } else { 0 };
            driver.submit(0, Ask::Write { sector, data: &pattern(seed, 4096) }).unwrap().unwrap()
        })
        .collect();
    area.begin(3 * slots[0], 7);
    area.begin(3 * slots[1], 8);
    driver.start(0).unwrap();
    driver.kick(0).unwrap();
    let mut ended: Vec<u16> = (0..3).map(|_| driver.wait(0, WAIT_MAX).unwrap().slot).collect();
    ended.sort_unstable();
    let mut expected = slots.clone();
    expected.sort_unstable();
    assert_eq!(ended, expected);
    assert!(driver.wait(0, Duration::from_millis(100)).is_err(), "none is done twice");
    assert_eq!(read(&mut driver, 0, 4096), pattern(2, 4096));
    assert_eq!(read(&mut driver, 64, 4096), pattern(3, 4096));
    driver.stop(0).unwrap();
    assert_eq!(area.recover(5).unwrap().heads, [0; 0]);
}

/// Spec: D5
#[test]
fn b42_a_batch_told_but_not_cleared_is_not_done_again() {
    let (file, size_bytes) = InflightArea::create(2, 16).unwrap();
    let area = Arc::new(InflightArea::map(file, 0, size_bytes, (2, 16)).unwrap());
    let queue = area.queue(1, 16).unwrap();
    assert!(queue.recover(0xffff).is_none());
    for (counter, head) in [3, 7, 5, 1].into_iter().enumerate() {
        queue.begin(head, counter as u64);
    }
    // Told of two, across the counter's end, and killed before their marks were cleared.
    queue.link(3);
    queue.link(5);
    let recovered = queue.recover(1).unwrap();
    assert_eq!((recovered.heads.as_slice(), recovered.counter), (&[7, 1][..], 4));
    // Linked, and killed before the driver was told: all are done again.
    queue.link(7);
    assert_eq!(queue.recover(1).unwrap().heads, [7, 1]);
    assert!(area.queue(0, 16).unwrap().recover(0).is_none(), "the other queue is untouched");
    assert!(area.queue(2, 16).is_none());
    assert!(area.queue(1, 32).is_none());
}
