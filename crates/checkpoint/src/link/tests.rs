//! Two ends of a connection, and what passes between them.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;

use super::frame::{self, HEAD_BYTES, Kind, RUNS_MAX};
use super::*;
use crate::PAGE_BYTES;
use crate::delta::{
    BlockAt, Blocks, Changed, Decoder, Destination, Different, Encoder, Epoch, HeldEpoch, Known, NoBlocks,
    NothingKnown, Options, Piece, Sizes, Source, Space, Version, Wanted,
};
use crate::take::Cause;

const PAGES: u64 = 600;
/// Far beyond what an answer takes on a busy machine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
const SIZES: Sizes = Sizes { memory_bytes: PAGES << 12, disk_bytes: PAGES << 12, disk_travels: false };

/// Memory whose pages are all of one byte and their number, and theirs, written in place.
struct Own(u8);

impl Source for Own {
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
        into.fill(self.0);
        into[..8].copy_from_slice(&number.to_le_bytes());
        Ok(())
    }

    fn read_acknowledged(&self, _: u64, _: &mut Piece) -> Result<bool, Cause> {
        Ok(false)
    }
}

struct Theirs(Mutex<Vec<u8>>);

impl Theirs {
    fn new() -> Theirs {
        Theirs(Mutex::new(vec![0; SIZES.memory_bytes as usize]))
    }

    fn holds(&self, byte: u8) -> bool {
        let own = self.0.lock().unwrap();
        let mut page = [0; PAGE_BYTES];
        (0..).zip(own.as_chunks().0).all(|(number, held)| {
            Own(byte).read(number, &mut page).unwrap();
            page == *held
        })
    }
}

impl Destination for Theirs {
    fn begin(&self, _: u64, _: HeldEpoch, _: &[Version]) -> Result<(), Cause> {
        Ok(())
    }

    fn read(&self, _: Space, first: u64, into: &mut [u8]) -> Result<(), Cause> {
        into.copy_from_slice(&self.0.lock().unwrap()[first as usize * PAGE_BYTES..][..into.len()]);
        Ok(())
    }

    fn write(&self, _: Space, first: u64, content: &[u8]) -> Result<(), Cause> {
        self.0.lock().unwrap()[first as usize * PAGE_BYTES..][..content.len()].copy_from_slice(content);
        Ok(())
    }

    fn zero(&self, _: Space, _: Range<u64>) -> Result<(), Cause> {
        unreachable!("no page is zeros")
    }
}

fn streams() -> (UnixStream, UnixStream) {
    let (one, other) = UnixStream::pair().unwrap();
    for stream in [&one, &other] {
        stream.set_read_timeout(Some(HEARTBEAT * 5)).unwrap();
        stream.set_write_timeout(Some(HEARTBEAT * 5)).unwrap();
    }
    (one, other)
}

fn send(stream: &UnixStream, session: Session) -> (Sending<UnixStream, UnixStream>, HeldEpoch) {
    let halves = [stream, stream].map(|half| half.try_clone().unwrap());
    let [from, to] = halves;
    Sending::begin(session, SIZES, from, to, Arc::new(Pace::new(None)), ANSWER_TIMEOUT).unwrap()
}

fn accept(stream: &UnixStream) -> Receiving<UnixStream, UnixStream> {
    Receiving::accept(stream.try_clone().unwrap(), stream.try_clone().unwrap()).unwrap()
}

/// Spec: D6
#[test]
fn who_shows_that_it_lives_and_answers_nothing_is_given_up() {
    let (here, there) = streams();
    let (from, to) = (here.try_clone().unwrap(), here);
    let accepted = thread::spawn(move || accept(&there));
    let begun = Sending::begin(Session::new(), SIZES, from, to, Arc::new(Pace::new(None)), Duration::ZERO);
    assert!(matches!(begun, Err(LinkError::Unanswered(Duration::ZERO))));
    drop(accepted.join().unwrap());
}

/// Of a machine whose disk does not travel, no block is ever told to differ: numbers that nobody sent take no memory.
///
/// Spec: D6
#[test]
fn what_differs_is_of_what_travels() {
    let block = [1, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut different = crate::delta::Different::default();
    frame::parse_different(&block, &SIZES, &mut different).unwrap_err();
    let travels = Sizes { disk_travels: true, ..SIZES };
    assert!(frame::parse_different(&block, &travels, &mut different).unwrap());
    assert_eq!(different.blocks, [0]);
}

fn epoch<'a>(number: u64, numbers: &'a [u64], source: &'a Own, versions: &'a [Version]) -> Epoch<'a> {
    Epoch { number, versions, memory: Changed { numbers, source }, disk: None, devices: b"devices" }
}

/// Spec: D6
#[test]
fn epochs_travel_and_a_new_connection_goes_on_from_the_last_one_that_was_acknowledged() {
    let numbers: Vec<u64> = (0..PAGES).collect();
    let (theirs, session) = (Theirs::new(), Session::new());
    let mut encoder = Encoder::new(SIZES, Options::new(1)).unwrap();
    let mut decoder = Decoder::new(SIZES);
    // The first connection brings one epoch, and breaks behind the second one, before it is acknowledged.
    let (here, there) = streams();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut receiving = accept(&there);
            assert_eq!((receiving.session() == session, receiving.sizes()), (true, SIZES));
            receiving.welcome(decoder.held()).unwrap();
            assert_eq!(receiving.receive(&mut decoder, &theirs, &NoBlocks).unwrap(), Received::Message(b"hi".into()));
            let Received::Epoch(held) = receiving.receive(&mut decoder, &theirs, &NoBlocks).unwrap() else { panic!() };
            receiving.say(b"and you").unwrap();
            receiving.acknowledge(held).unwrap();
            receiving.acknowledge(held).unwrap_err();
            assert!(theirs.holds(1));
            receiving.receive(&mut decoder, &theirs, &NoBlocks).unwrap();
            there.shutdown(Shutdown::Both).unwrap();
        });
        let (mut sending, held) = send(&here, session);
        assert!(!encoder.resume(held).unwrap());
        sending.say(b"hi").unwrap();
        let sent = sending.epoch(&mut encoder, &epoch(1, &numbers, &Own(1), &[]), &mut NothingKnown).unwrap();
        assert_eq!((sent.held, sent.repaired.bytes), (encoder.acknowledged(), 0));
        assert_eq!(sending.hear().unwrap(), b"and you");
        let broken = sending.epoch(&mut encoder, &epoch(2, &numbers, &Own(2), &[]), &mut NothingKnown).unwrap_err();
        assert!(matches!(broken, LinkError::Connection(_)), "{broken}");
    });
    assert_eq!((encoder.acknowledged().epoch, decoder.held().epoch), (1, 2));
    // The second one tells that it had come.
    let (here, there) = streams();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut receiving = accept(&there);
            receiving.welcome(decoder.held()).unwrap();
            let Received::Epoch(held) = receiving.receive(&mut decoder, &theirs, &NoBlocks).unwrap() else { panic!() };
            receiving.acknowledge(held).unwrap();
        });
        let (mut sending, held) = send(&here, session);
        assert!(encoder.resume(held).unwrap());
        assert_eq!(encoder.acknowledged().epoch, 2);
        sending.epoch(&mut encoder, &epoch(3, &numbers[..9], &Own(2), &[]), &mut NothingKnown).unwrap();
    });
    assert!(theirs.holds(2));
}

/// Its blocks are not what they were.
struct Rewritten;

impl Known for Rewritten {
    fn find_many(&mut self, wanted: &[Wanted], found: &mut Vec<Option<BlockAt>>) -> Result<(), Cause> {
        found.extend(wanted.iter().map(|wanted| Some(BlockAt { version: 0, block: wanted.page })));
        Ok(())
    }
}

impl Blocks for Rewritten {
    fn read_many(&self, _: &Version, blocks: &[u64], into: &mut [u8]) -> Result<(), Cause> {
        for (block, into) in blocks.iter().zip(into.as_chunks_mut().0) {
            Own(if block % 2 == 0 { 1 } else { 9 }).read(*block, into)?;
        }
        Ok(())
    }
}

/// Spec: D6
#[test]
fn what_differs_is_asked_for_and_comes_before_the_epoch_counts() {
    let numbers: Vec<u64> = (0..PAGES).collect();
    let (theirs, versions) = (Theirs::new(), [Version::Epoch(1)]);
    let (here, there) = streams();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut receiving = accept(&there);
            receiving.welcome(HeldEpoch::NOTHING).unwrap();
            let mut decoder = Decoder::new(SIZES);
            let Received::Epoch(held) = receiving.receive(&mut decoder, &theirs, &Rewritten).unwrap() else { panic!() };
            receiving.acknowledge(held).unwrap();
        });
        let mut encoder = Encoder::new(SIZES, Options::new(1)).unwrap();
        let (mut sending, _) = send(&here, Session::new());
        let sent = sending.epoch(&mut encoder, &epoch(1, &numbers, &Own(1), &versions), &mut Rewritten).unwrap();
        assert_eq!((sent.counts.block, sent.repaired.pieces()), (PAGES, PAGES));
    });
    assert!(theirs.holds(1));
}

#[test]
fn a_side_that_gives_up_says_why() {
    let (here, there) = streams();
    let refused = thread::spawn(move || accept(&there).failure_sender().fail("no such machine"));
    let halves = [here.try_clone().unwrap(), here];
    let [from, to] = halves;
    let begun = Sending::begin(Session::new(), SIZES, from, to, Arc::new(Pace::new(None)), ANSWER_TIMEOUT);
    let Err(LinkError::Refused { reason }) = begun else { panic!("it was welcomed") };
    assert_eq!(reason, "no such machine");
    refused.join().unwrap().unwrap();
}

/// Each side lives as long as it says so, and no longer.
#[test]
fn a_side_that_waits_is_not_silent_and_one_that_hangs_is() {
    hears_one_that_waits(&[]);
}

/// What is on its way to it may take longer than the other side waits.
#[test]
fn a_side_that_waits_for_the_rest_of_an_epoch_is_not_silent() {
    hears_one_that_waits(&[1]);
}

/// `begun`: what comes of an epoch.
fn hears_one_that_waits(begun: &[u8]) {
    let (here, there) = streams();
    here.set_read_timeout(None).unwrap();
    there.set_read_timeout(Some(HEARTBEAT * 3)).unwrap();
    let session = Session::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut receiving = accept(&there);
            receiving.welcome(HeldEpoch::NOTHING).unwrap();
            let received = receiving.receive(&mut Decoder::new(SIZES), &Theirs::new(), &NoBlocks);
            there.shutdown(Shutdown::Both).unwrap();
            assert!(matches!(received, Err(LinkError::Silent)), "{received:?}");
        });
        // It hangs once it has begun, and hears the other one until that gives up.
        let hello = frame::hello(&SIZES);
        (&here).write_all(&[&frame::head(Kind::Hello, session, 0, &hello)[..], &hello].concat()).unwrap();
        if !begun.is_empty() {
            (&here).write_all(&[&frame::head(Kind::Data, session, 1, begun)[..], begun].concat()).unwrap();
        }
        let mut heard = Vec::new();
        while let Ok(frame) = frame::read(&mut &here) {
            heard.push(frame.kind);
        }
        assert_eq!(heard[0], Kind::Welcome);
        assert!(heard.len() > 1 && heard[1..].iter().all(|kind| *kind == Kind::Heartbeat), "{heard:?}");
    });
}

/// What was written, and when nobody may write any more.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_epoch_is_cut_into_frames_that_its_pace_allows_and_ends_where_one_does() {
    let session = Session::new();
    // Far more than it takes: nothing waits here.
    let pace = Arc::new(Pace::new(Some(1_200_000)));
    let written = Written::default();
    let outgoing = outgoing::Outgoing::new(written.clone(), session, pace);
    let mut data = outgoing.data(7);
    data.write_all(&[5; 60_100]).unwrap();
    data.flush().unwrap();
    assert_eq!(data.bytes, 60_100);
    let bytes = written.0.lock().unwrap().clone();
    assert_eq!(bytes.len(), 60_100 + 2 * HEAD_BYTES, "60 000 bytes are 50 ms of it");
    for behind in [0, 1] {
        let mut incoming = incoming::Incoming::new(&bytes[..], session, None);
        let first = incoming.next().unwrap();
        let mut data = incoming.data(first);
        let mut into = vec![0; 60_100 - behind];
        data.read_exact(&mut into).unwrap();
        assert_eq!(data.end().is_ok(), behind == 0);
    }
    incoming::Incoming::new(&bytes[..], Session::new(), None).next().map(|_| ()).unwrap_err();
}

#[test]
fn what_differs_is_told_in_as_many_frames_as_it_takes() {
    let sizes = Sizes { memory_bytes: 1 << 40, disk_bytes: 1 << 40, disk_travels: true };
    for count in [0, 1, RUNS_MAX, RUNS_MAX * 2 + 5] {
        let different = Different {
            pages: (0..count as u64).map(|number| number * 2).collect(),
            blocks: vec![1, 2, 3, 1 << 27],
            devices: count == 1,
        };
        let (payloads, mut read) = (frame::different(&different), Different::default());
        let last: Vec<bool> =
            payloads.iter().map(|payload| frame::parse_different(payload, &sizes, &mut read).unwrap()).collect();
        assert_eq!(read, different);
        assert_eq!(last.iter().position(|is_last| *is_last), Some(payloads.len() - 1));
        assert!(payloads.iter().all(|payload| payload.len() <= 2 + RUNS_MAX * 16));
        // Of a smaller machine, or told twice.
        frame::parse_different(&payloads[payloads.len() - 1], &SIZES, &mut Different::default()).unwrap_err();
        frame::parse_different(&payloads[payloads.len() - 1], &sizes, &mut read).unwrap_err();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Spec: C3
    #[test]
    fn frames_of_any_bytes_are_bounded(
        kind in 0_u8..10,
        length in prop_oneof![0_u32..100, any::<u32>()],
        payload in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let mut bytes = frame::head(Kind::Heartbeat, Session([3; 16]), 5, &[]).to_vec();
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes.extend(&payload);
        if let Ok(read) = frame::read(&mut &bytes[..]) {
            prop_assert_eq!(&read.payload[..], &payload[..length as usize]);
            let mut different = Different::default();
            let _ = frame::parse_different(&read.payload, &SIZES, &mut different);
            prop_assert!(different.pages.iter().chain(&different.blocks).all(|number| *number < PAGES));
            let _ = (frame::parse_hello(&read.payload), frame::parse_held(&read.payload));
        }
    }
}

#[test]
fn a_hello_is_read_as_it_was_written() {
    assert_eq!(frame::parse_hello(&frame::hello(&SIZES)).unwrap(), SIZES);
    frame::parse_hello(&frame::hello(&SIZES)[1..]).unwrap_err();
    let mut other = frame::hello(&SIZES);
    other[0] = 2;
    frame::parse_hello(&other).unwrap_err();
}
