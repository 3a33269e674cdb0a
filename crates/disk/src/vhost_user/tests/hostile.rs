//! What a hostile guest can hand over: a corpus of named cases, and random ones. The back end must answer or give up
//! the ring, and serve whoever comes next.

use onecopy_testing::until;
use onecopy_testing::vhost_driver::{Driver, DriverOptions};
use proptest::prelude::*;
use vhost::vhost_user::VhostUserBackendReqHandlerMut;

use super::super::connection::Connection;
use super::{Fixture, SIZE_BYTES, pattern, read, write};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// What becomes of a chain.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    /// It is given back without an answer.
    GivenBack,
    /// It gets this status.
    Answered(u8),
    /// The ring is served no more.
    RingBroken,
}

type Case = (&'static str, fn(&mut Driver), Fate);

/// Writes a request header and tells its address.
fn header(driver: &Driver, kind: u32, sector: u64) -> u64 {
    let address = driver.spare_address();
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    driver.put(address, &bytes).unwrap();
    driver.put(address + 16, &[0xff]).unwrap();
    address
}

/// Puts descriptors from number 0 on, and makes the first available.
fn chain(driver: &mut Driver, descriptors: &[(u64, u32, u16, u16)]) {
    let table = driver.ring_address(0);
    for (index, descriptor) in descriptors.iter().enumerate() {
        driver.put_descriptor(table, index as u16, *descriptor).unwrap();
    }
    driver.offer(0, 0).unwrap();
}

/// An indirect table in spare memory, and the descriptor that names it.
fn indirect(driver: &Driver, descriptors: &[(u64, u32, u16, u16)]) -> (u64, u32, u16, u16) {
    let table = driver.spare_address() + 8192;
    for (index, descriptor) in descriptors.iter().enumerate() {
        driver.put_descriptor(table, index as u16, *descriptor).unwrap();
    }
    (table, 16 * descriptors.len() as u32, INDIRECT, 0)
}

fn read_chain(driver: &Driver, data: (u64, u32)) -> [(u64, u32, u16, u16); 3] {
    let head = header(driver, 0, 0);
    [(head, 16, NEXT, 1), (data.0, data.1, NEXT | WRITE, 2), (head + 16, 1, WRITE, 0)]
}

const CORPUS: &[Case] = &[
    ("nothing", |driver| chain(driver, &[(0, 0, 0, 0)]), Fate::GivenBack),
    (
        "a header alone",
        |driver| {
            let head = header(driver, 0, 0);
            chain(driver, &[(head, 16, 0, 0)])
        },
        Fate::GivenBack,
    ),
    (
        "a status alone",
        |driver| {
            let head = header(driver, 0, 0);
            chain(driver, &[(head + 16, 1, WRITE, 0)])
        },
        Fate::GivenBack,
    ),
    (
        "half a header",
        |driver| {
            let head = header(driver, 4, 0);
            chain(driver, &[(head, 8, NEXT, 1), (head + 16, 1, WRITE, 0)]);
        },
        Fate::GivenBack,
    ),
    (
        "a header in three buffers",
        |driver| {
            let head = header(driver, 4, 0);
            chain(
                driver,
                &[(head, 1, NEXT, 1), (head + 1, 6, NEXT, 2), (head + 7, 9, NEXT, 3), (head + 16, 1, WRITE, 0)],
            );
        },
        Fate::Answered(0),
    ),
    (
        "header and data in one buffer",
        |driver| {
            let head = header(driver, 1, 0);
            let both = head + 4096;
            driver.put(both, &1_u64.to_le_bytes()).unwrap();
            chain(driver, &[(both, 16 + 512, NEXT, 1), (head + 16, 1, WRITE, 0)]);
        },
        Fate::Answered(0),
    ),
    (
        "data and status in one buffer",
        |driver| {
            let head = header(driver, 0, 0);
            chain(driver, &[(head, 16, NEXT, 1), (head + 4096 - 512 - 16, 513, WRITE, 0)]);
        },
        Fate::Answered(0),
    ),
    (
        "empty buffers between",
        |driver| {
            let head = header(driver, 0, 0);
            let data = driver.spare_address() + 4096;
            chain(
                driver,
                &[
                    (head, 0, NEXT, 1),
                    (head, 16, NEXT, 2),
                    (0, 0, NEXT | WRITE, 3),
                    (data, 512, NEXT | WRITE, 4),
                    (data, 0, NEXT | WRITE, 5),
                    (head + 16, 1, WRITE, 0),
                ],
            );
        },
        Fate::Answered(0),
    ),
    (
        "no data at all",
        |driver| {
            let head = header(driver, 0, 0);
            chain(driver, &[(head, 16, NEXT, 1), (head + 16, 1, WRITE, 0)]);
        },
        Fate::Answered(1),
    ),
    (
        "data at address 0",
        |driver| {
            let chained = read_chain(driver, (0, 4096));
            chain(driver, &chained)
        },
        Fate::GivenBack,
    ),
    (
        "data at the last address",
        |driver| {
            let chained = read_chain(driver, (u64::MAX - 100, 4096));
            chain(driver, &chained)
        },
        Fate::GivenBack,
    ),
    (
        "data across the memory's end",
        |driver| {
            let chained = read_chain(driver, (driver.end_address() - 2048, 4096));
            chain(driver, &chained);
        },
        Fate::GivenBack,
    ),
    (
        "data of 4 GiB",
        |driver| {
            let chained = read_chain(driver, (driver.spare_address(), u32::MAX));
            chain(driver, &chained)
        },
        Fate::GivenBack,
    ),
    (
        "a status outside memory",
        |driver| {
            let head = header(driver, 4, 0);
            chain(driver, &[(head, 16, NEXT, 1), (driver.end_address(), 1, WRITE, 0)]);
        },
        Fate::GivenBack,
    ),
    (
        "to read behind to write",
        |driver| {
            let head = header(driver, 1, 0);
            let data = driver.spare_address() + 4096;
            chain(driver, &[(head, 16, NEXT, 1), (head + 16, 1, NEXT | WRITE, 2), (data, 512, 0, 0)]);
        },
        Fate::GivenBack,
    ),
    (
        "a descriptor that follows itself",
        |driver| {
            let head = header(driver, 0, 0);
            chain(driver, &[(head, 16, NEXT, 0)])
        },
        Fate::GivenBack,
    ),
    (
        "a loop of three",
        |driver| {
            let head = header(driver, 0, 0);
            chain(driver, &[(head, 16, NEXT, 1), (head, 16, NEXT, 2), (head, 16, NEXT, 0)]);
        },
        Fate::GivenBack,
    ),
    (
        "a next beyond the table",
        |driver| {
            let head = header(driver, 0, 0);
            chain(driver, &[(head, 16, NEXT, 60_000)])
        },
        Fate::GivenBack,
    ),
    (
        "one request read many times over",
        |driver| {
            // The ring's whole length of descriptors, all of the same 64 KiB: far more bytes than memory.
            let head = header(driver, 1, 0);
            let mut descriptors = vec![(head, 16, NEXT, 1)];
            descriptors.extend((1..126).map(|index| (driver.spare_address(), 512 << 10, NEXT, index + 1)));
            descriptors.push((head + 16, 1, WRITE, 0));
            chain(driver, &descriptors);
        },
        Fate::GivenBack,
    ),
    (
        "an indirect table",
        |driver| {
            let chained = read_chain(driver, (driver.spare_address() + 4096, 512));
            let outer = indirect(driver, &chained);
            chain(driver, &[outer]);
        },
        Fate::Answered(0),
    ),
    (
        "an indirect table behind a direct descriptor",
        |driver| {
            let chained = read_chain(driver, (driver.spare_address() + 4096, 512));
            let outer = indirect(driver, &[(chained[1].0, 512, NEXT | WRITE, 1), (chained[2].0, 1, WRITE, 0)]);
            chain(driver, &[chained[0], outer]);
        },
        Fate::Answered(0),
    ),
    (
        "an indirect table followed by a descriptor",
        |driver| {
            let chained = read_chain(driver, (driver.spare_address() + 4096, 512));
            let outer = indirect(driver, &chained);
            chain(driver, &[(outer.0, outer.1, INDIRECT | NEXT, 1)]);
        },
        Fate::GivenBack,
    ),
    (
        "an indirect table in an indirect table",
        |driver| {
            let inner = indirect(driver, &[(driver.spare_address() + 8192, 16, INDIRECT, 0)]);
            chain(driver, &[inner]);
        },
        Fate::GivenBack,
    ),
    (
        "an indirect table of no bytes",
        |driver| chain(driver, &[(driver.spare_address(), 0, INDIRECT, 0)]),
        Fate::GivenBack,
    ),
    (
        "an indirect table of odd bytes",
        |driver| chain(driver, &[(driver.spare_address(), 17, INDIRECT, 0)]),
        Fate::GivenBack,
    ),
    (
        "an indirect table of 4 GiB",
        |driver| chain(driver, &[(driver.spare_address(), 0xffff_fff0, INDIRECT, 0)]),
        Fate::GivenBack,
    ),
    (
        "an indirect table outside memory",
        |driver| chain(driver, &[(driver.end_address(), 48, INDIRECT, 0)]),
        Fate::GivenBack,
    ),
    (
        "a loop in an indirect table",
        |driver| {
            let head = header(driver, 0, 0);
            let outer = indirect(driver, &[(head, 16, NEXT, 1), (head, 16, NEXT, 0)]);
            chain(driver, &[outer]);
        },
        Fate::GivenBack,
    ),
    (
        "an unknown type",
        |driver| {
            let head = header(driver, 77, 0);
            chain(driver, &[(head, 16, NEXT, 1), (head + 16, 1, WRITE, 0)]);
        },
        Fate::Answered(2),
    ),
    (
        "a write with nothing to write",
        |driver| {
            let head = header(driver, 1, 0);
            let data = driver.spare_address() + 4096;
            chain(driver, &[(head, 16, NEXT, 1), (data, 512, NEXT | WRITE, 2), (head + 16, 1, WRITE, 0)]);
        },
        Fate::Answered(1),
    ),
    (
        "a discard with an unknown flag",
        |driver| {
            let head = header(driver, 11, 0);
            driver.put(head + 32, &[0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0x10, 0, 0, 0]).unwrap();
            chain(driver, &[(head, 16, NEXT, 1), (head + 32, 16, NEXT, 2), (head + 16, 1, WRITE, 0)]);
        },
        Fate::Answered(2),
    ),
    (
        "a discard of two ranges",
        |driver| {
            let head = header(driver, 11, 0);
            chain(driver, &[(head, 16, NEXT, 1), (head + 32, 32, NEXT, 2), (head + 16, 1, WRITE, 0)]);
        },
        Fate::Answered(2),
    ),
    ("a head beyond the table", |driver| driver.offer(0, 4000).unwrap(), Fate::RingBroken),
    (
        "an available index far ahead",
        |driver| {
            let available = driver.ring_address(0) + (32 << 10);
            driver.put(available + 2, &9000_u16.to_le_bytes()).unwrap();
            driver.kick_anyway(0).unwrap();
        },
        Fate::RingBroken,
    ),
];

fn fate(driver: &mut Driver) -> Fate {
    let mut finished = None;
    until("the back end answers or gives up", || {
        finished = driver.finished(0).unwrap();
        finished.is_some() || driver.is_broken(0)
    });
    let Some(finished) = finished else { return Fate::RingBroken };
    let mut status = [0];
    driver.get(driver.spare_address() + 16, &mut status).unwrap();
    // A status of "data and status in one buffer" lies elsewhere: the length tells that there was one.
    match finished.length {
        0 => Fate::GivenBack,
        513 => Fate::Answered(0),
        _ => Fate::Answered(status[0]),
    }
}

fn is_served(fixture: &Fixture) {
    let mut driver = fixture.driver(DriverOptions::default());
    write(&mut driver, SIZE_BYTES / 512 - 8, &pattern(9, 4096));
    assert_eq!(read(&mut driver, SIZE_BYTES / 512 - 8, 4096), pattern(9, 4096));
}

/// Chains that break a rule get an error, are given back, or end their ring's service; never the process; the next
/// driver is served.
///
/// Spec: C5
#[test]
fn b40_hostile_chains_get_their_fate_and_the_next_driver_is_served() {
    let fixture = Fixture::new(1);
    for (name, play, expected) in CORPUS {
        let mut driver = fixture.driver(DriverOptions::default());
        play(&mut driver);
        assert_eq!(fate(&mut driver), *expected, "{name}");
        driver.stop(0).unwrap();
        drop(driver);
        is_served(&fixture);
    }
}

/// Spec: C5
#[test]
fn b40_a_ring_that_was_broken_works_after_its_reset() {
    let fixture = Fixture::new(1);
    let mut driver = fixture.driver(DriverOptions::default());
    driver.offer(0, 4000).unwrap();
    assert_eq!(fate(&mut driver), Fate::RingBroken);
    driver.stop(0).unwrap();
    drop(driver);
    assert_eq!(fixture.backend.statistics().broken_rings, 1);
    is_served(&fixture);
}

/// Addresses that a hostile guest would try: good ones, edges, nonsense.
fn address(choice: u8, driver: &Driver) -> u64 {
    let spare = driver.spare_address();
    match choice % 12 {
        0 => 0,
        1 => u64::MAX,
        2 => u64::MAX - 4095,
        3 => driver.end_address() - 1,
        4 => driver.end_address() - 512,
        5 => driver.ring_address(0),
        6 => driver.ring_address(0) + (48 << 10),
        7 => spare + 1,
        8 => spare + 16,
        9 => spare + 8192,
        _ => spare + 512 * u64::from(choice),
    }
}

fn length(choice: u8) -> u32 {
    [0, 1, 15, 16, 17, 48, 511, 512, 513, 4096, 32768, 65536, 33 << 20, u32::MAX][usize::from(choice) % 14]
}

/// Features of the vhost-user protocol that were not offered are refused.
///
/// Spec: C5
#[test]
fn b67_features_of_the_protocol_that_were_not_offered_are_refused() {
    let fixture = Fixture::new(1);
    let mut connection = Connection::new(fixture.backend.shared.clone());
    let offered = connection.get_protocol_features().unwrap().bits();
    connection.set_protocol_features(offered).unwrap();
    for bit in (0..u64::BITS).map(|bit| 1 << bit).filter(|bit| offered & bit == 0) {
        assert!(connection.set_protocol_features(offered | bit).is_err(), "{bit:#x} was never offered");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random descriptors, an indirect table, headers; random heads. Whatever happens, the ring can be stopped, and the
    /// memory that no descriptor names is as it was.
    ///
    /// Random chains neither kill nor hang the back end, nor touch memory that they do not name.
    ///
    /// Spec: C5
    #[test]
    fn b41_random_chains_neither_kill_nor_hang_the_back_end(
        descriptors in prop::collection::vec((any::<u8>(), any::<u8>(), 0_u16..8, 0_u16..20), 16),
        table in prop::collection::vec((any::<u8>(), any::<u8>(), 0_u16..8, 0_u16..20), 8),
        kinds in prop::collection::vec(0_u32..16, 4),
        heads in prop::collection::vec(0_u16..18, 1..12),
    ) {
        thread_local!(static FIXTURE: Fixture = Fixture::new(1));
        FIXTURE.with(|fixture| {
            let mut driver = fixture.driver(DriverOptions { slot_bytes: 4096, ..DriverOptions::default() });
            let spare = driver.spare_address();
            let canary = driver.data_address(0, 40);
            driver.put(canary, &pattern(77, 4096)).unwrap();
            for (place, kind) in kinds.iter().enumerate() {
                driver.put(spare + 512 * place as u64, &kind.to_le_bytes()).unwrap();
            }
            for (base, random) in [(driver.ring_address(0), &descriptors), (spare + 8192, &table)] {
                for (index, (place, size, flags, next)) in random.iter().enumerate() {
                    let descriptor = (address(*place, &driver), length(*size), *flags, *next);
                    driver.put_descriptor(base, index as u16, descriptor).unwrap();
                }
            }
            for head in &heads {
                driver.offer(0, *head).unwrap();
            }
            driver.stop(0).unwrap();
            let mut after = vec![0; 4096];
            driver.get(canary, &mut after).unwrap();
            assert_eq!(after, pattern(77, 4096));
            drop(driver);
            is_served(fixture);
        });
    }
}
