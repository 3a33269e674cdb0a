use std::os::unix::net::UnixStream as Stream;
use std::path::PathBuf;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onecopy_testing::{TestDirectory, until};
use rustix::thread::UnshareFlags;

use super::*;
use crate::HardwareAddress;
use crate::state::{HELD_BYTES_MAX, HELD_FRAMES_MAX};

const OWN: HardwareAddress = HardwareAddress([0x52, 0x54, 0, 0, 0, 1]);
const OTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];
const SOON: Duration = Duration::from_secs(30);

/// A bridge in a namespace of this thread's own, a machine's card on it, and another station beside.
struct Network {
    directory: TestDirectory,
    far: Tap,
    remote: Remote,
    thread: Option<JoinHandle<Result<(), NetworkError>>>,
}

/// Whether a test cannot run on this machine.
fn is_left_out(name: &str) -> bool {
    let is_possible = rustix::process::geteuid().is_root() && std::fs::metadata("/dev/net/tun").is_ok();
    if !is_possible {
        onecopy_testing::skip(name, "it makes interfaces: it needs root and /dev/net/tun");
    }
    !is_possible
}

#[track_caller]
fn ip(arguments: &str) {
    let ran = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(ran.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&ran.stderr));
}

impl Network {
    fn new(is_filtered: bool) -> Network {
        // SAFETY: the namespace of this thread alone changes, and nothing of the old one is used.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        ip("link add br0 type bridge mcast_snooping 0");
        ip("link set br0 up");
        let (tap, far) = (Tap::create("near", "br0").unwrap(), Tap::create("far", "br0").unwrap());
        let directory = TestDirectory::new().unwrap();
        let listener = UnixListener::bind(directory.join("stream.sock")).unwrap();
        let state = State::create(OWN, is_filtered).unwrap();
        let (passer, remote) = Passer::new(tap, state, (listener, 0)).unwrap();
        let thread = Some(std::thread::spawn(move || passer.run()));
        Network { directory, far, remote, thread }
    }

    fn guarded() -> Network {
        Network::new(true)
    }

    fn connect(&self) -> Stream {
        let before = self.statistics().connections;
        let path: PathBuf = self.directory.join("stream.sock");
        let stream = Stream::connect(path).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        until("it is taken", || self.statistics().connections > before);
        stream
    }

    fn statistics(&self) -> Statistics {
        self.remote.statistics().unwrap()
    }

    /// The next frames of the machine that the other station sees, by their content.
    fn heard(&self, count: usize) -> Vec<u32> {
        let (mut heard, begun) = (Vec::new(), Instant::now());
        let mut frame = [0; 2000];
        while heard.len() < count && begun.elapsed() < SOON {
            match self.far.read(&mut frame) {
                Ok(bytes) if bytes >= 18 && frame[6..12] == OWN.0 => {
                    heard.push(u32::from_be_bytes(frame[14..18].try_into().unwrap()));
                }
                Ok(_) => {}
                Err(_) => {
                    let mut events = [PollFd::new(&self.far, PollFlags::IN)];
                    let _ = poll(&mut events, Some(&rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 }));
                }
            }
        }
        heard
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.remote.ask(|passer| passer.end());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A frame with a number in it, as QEMU sends it.
fn record_of(number: u32, bytes: usize) -> Vec<u8> {
    let mut frame = [&OTHER[..], &OWN.0, &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.resize(bytes.max(18), 0);
    [&u32::try_from(frame.len()).unwrap().to_be_bytes()[..], &frame].concat()
}

/// As when a machine is started right after the death of who had its interface.
#[test]
fn an_interface_that_goes_is_waited_for_and_one_that_stays_is_anothers() {
    if is_left_out("an_interface_that_goes_is_waited_for_and_one_that_stays_is_anothers") {
        return;
    }
    let _network = Network::guarded();
    let goes = Tap::create("third", "br0").unwrap();
    let going = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(goes);
    });
    let _stays = Tap::create("third", "br0").unwrap();
    going.join().unwrap();
    let refused = Tap::create("third", "br0").unwrap_err();
    let NetworkError::Io { source, .. } = &refused else { panic!("{refused:?}") };
    assert_eq!(source.raw_os_error(), Some(libc::EBUSY), "{refused}");
}

/// Spec: D7
#[test]
fn e4_frames_pass_both_ways_in_their_order() {
    if is_left_out("e4_frames_pass_both_ways_in_their_order") {
        return;
    }
    let network = Network::guarded();
    let mut qemu = network.connect();
    // In pieces that are no frames.
    let all: Vec<u8> = (0..500).flat_map(|number| record_of(number, 60 + number as usize * 2)).collect();
    let sender = std::thread::spawn(move || {
        for piece in all.chunks(777) {
            qemu.write_all(piece).unwrap();
        }
        qemu
    });
    assert_eq!(network.heard(500), (0..500).collect::<Vec<_>>());
    let mut qemu = sender.join().unwrap();
    let mut received = Vec::new();
    for number in 0..300u32 {
        let frame = [&OWN.0[..], &OTHER, &[0x88, 0xb5], &number.to_be_bytes(), &[0; 100]].concat();
        network.far.write(&frame).unwrap();
    }
    while received.len() < 300 {
        let mut length = [0; 4];
        qemu.read_exact(&mut length).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        qemu.read_exact(&mut frame).unwrap();
        if frame[12..14] == [0x88, 0xb5] {
            received.push(u32::from_be_bytes(frame[14..18].try_into().unwrap()));
        }
    }
    assert_eq!(received, (0..300).collect::<Vec<_>>());
    let told = network.statistics();
    assert_eq!((told.sent_frames, told.connections, told.connected), (500, 1, true));
    assert!(told.received_frames >= 300 && told.lost_frames == 0, "{told:?}");
}

/// Spec: C5
#[test]
fn e5_what_a_machine_must_not_send_goes_nowhere_and_is_counted() {
    if is_left_out("e5_what_a_machine_must_not_send_goes_nowhere_and_is_counted") {
        return;
    }
    let network = Network::guarded();
    let mut qemu = network.connect();
    let mut send = |frame: &[u8]| {
        qemu.write_all(&u32::try_from(frame.len()).unwrap().to_be_bytes()).unwrap();
        qemu.write_all(frame).unwrap();
    };
    for length in [0, 1, 13, FRAME_BYTES_MAX + 1, 65_536, crate::frame::RECORD_BYTES_MAX] {
        send(&vec![0; length]);
    }
    send(&[&OTHER[..], &OTHER, &[0x88, 0xb5, 0, 0, 0, 1]].concat());
    send(&[&[1, 0x80, 0xc2, 0, 0, 0][..], &OWN.0, &[0, 38, 0x42, 0x42, 3]].concat());
    qemu.write_all(&record_of(9, 60)).unwrap();
    assert_eq!(network.heard(1), [9]);
    let told = network.statistics();
    assert_eq!((told.malformed_frames, told.foreign_source_frames, told.for_bridge_frames), (6, 1, 1));
    // No frame has such a length, so nobody knows where the next one would begin.
    for (number, length) in [u32::MAX, 1 << 31, 69_633].into_iter().enumerate() {
        qemu.write_all(&length.to_be_bytes()).unwrap();
        until("it is hung up on", || network.statistics().broken_streams == number as u64 + 1);
        assert!(!network.statistics().connected);
        qemu = network.connect();
        qemu.write_all(&record_of(number as u32, 60)).unwrap();
        assert_eq!(network.heard(1), [number as u32]);
    }
}

/// Spec: D7
#[test]
fn e6_what_is_held_goes_in_order_when_its_epoch_is_released_and_input_does_not_wait() {
    if is_left_out("e6_what_is_held_goes_in_order_when_its_epoch_is_released_and_input_does_not_wait") {
        return;
    }
    let network = Network::guarded();
    let mut qemu = network.connect();
    network.remote.set_holding(true).unwrap();
    let mut sent = 0..;
    let mut send = |count: usize| {
        for number in sent.by_ref().take(count) {
            qemu.write_all(&record_of(number, 60)).unwrap();
        }
        network.remote.drain().unwrap();
    };
    send(10);
    assert_eq!(network.remote.cut().unwrap(), 1);
    send(10);
    let told = network.statistics();
    assert_eq!((told.held_frames, told.held_bytes, told.sent_frames), (20, 1200, 0));
    assert!(matches!(network.remote.release(2), Err(NetworkError::OpenEpoch { epoch: 2, open: 2 })));
    // Not behind what is held, and not counted as if it were.
    network.remote.announce(vec!["192.0.2.7".parse().unwrap()]).unwrap();
    let frame = [&OWN.0[..], &OTHER, &[0x88, 0xb5], &[7; 50]].concat();
    let before = network.statistics().received_frames;
    network.far.write(&frame).unwrap();
    until("input passes", || network.statistics().received_frames > before);
    network.remote.release(1).unwrap();
    // The announcement has no number; its hardware and protocol are in its place.
    assert_eq!(network.heard(11), [&[0x0001_0800][..], &(0..10).collect::<Vec<_>>()].concat());
    assert_eq!(network.statistics().held_frames, 10);
    assert_eq!(network.remote.cut().unwrap(), 2);
    network.remote.release(2).unwrap();
    assert_eq!(network.heard(10), (10..20).collect::<Vec<_>>());
    send(3);
    network.remote.set_holding(false).unwrap();
    send(3);
    assert_eq!(network.heard(6), (20..26).collect::<Vec<_>>());
    let told = network.statistics();
    assert_eq!((told.held_frames, told.freed_frames, told.holding), (0, 23, false));
    assert!(told.freed_wait_us >= told.freed_wait_us_max);
    // Half a frame: the machine cannot have been stopped there.
    let half = record_of(0, 60);
    qemu.write_all(&half[..30]).unwrap();
    assert!(matches!(network.remote.drain(), Err(NetworkError::NoFrameBorder { bytes: 30 })));
    qemu.write_all(&half[30..]).unwrap();
    network.remote.drain().unwrap();
}

/// Spec: D7, L1
#[test]
fn e7_a_machine_waits_at_the_bound_and_loses_nothing() {
    if is_left_out("e7_a_machine_waits_at_the_bound_and_loses_nothing") {
        return;
    }
    let network = Network::guarded();
    let mut qemu = network.connect();
    network.remote.set_holding(true).unwrap();
    let count = u32::try_from(HELD_FRAMES_MAX).unwrap() + 20_000;
    let sender = std::thread::spawn(move || {
        for first in (0..count).step_by(1000) {
            let all: Vec<u8> = (first..count.min(first + 1000)).flat_map(|number| record_of(number, 18)).collect();
            qemu.write_all(&all).unwrap();
        }
        qemu
    });
    until("it waits", || network.statistics().blocked);
    let told = network.statistics();
    assert!(told.held_frames <= HELD_FRAMES_MAX && told.held_bytes <= HELD_BYTES_MAX, "{told:?}");
    assert!(!sender.is_finished() && told.blocks == 1, "{told:?}");
    // A take needs its drain, whatever is held: the machine would stand, and this one has not sent more than fits.
    let _ = network.remote.drain();
    assert!(network.statistics().held_frames > HELD_FRAMES_MAX);
    let mut expected = 0;
    while expected < count {
        let epoch = network.remote.cut().unwrap();
        let far = &network.far;
        network.remote.release(epoch).unwrap();
        // The other station's queue has a thousand places, and drops what is too much: only the order is looked at.
        let mut frame = [0; 2000];
        while let Ok(bytes) = far.read(&mut frame) {
            if bytes >= 18 && frame[6..12] == OWN.0 {
                let number = u32::from_be_bytes(frame[14..18].try_into().unwrap());
                assert!(number >= expected, "{number} after {expected}");
                expected = number + 1;
            }
        }
        if sender.is_finished() && network.statistics().sent_frames == u64::from(count) {
            break;
        }
    }
    drop(sender.join().unwrap());
    let told = network.statistics();
    assert_eq!((told.sent_frames, told.freed_frames, told.held_frames), (u64::from(count), u64::from(count), 0));
}

/// Spec: D7
#[test]
fn e8_the_next_holder_finds_the_interface_and_what_is_held() {
    if is_left_out("e8_the_next_holder_finds_the_interface_and_what_is_held") {
        return;
    }
    let mut network = Network::guarded();
    let mut qemu = network.connect();
    network.remote.set_holding(true).unwrap();
    qemu.write_all(&[record_of(1, 60), record_of(2, 60)].concat()).unwrap();
    network.remote.drain().unwrap();
    let taken = network.remote.ask(|passer| (passer.tap.descriptor().unwrap(), passer.state.descriptor().unwrap()));
    let (tap, state) = taken.unwrap();
    network.remote.ask(|passer| passer.end()).unwrap();
    let _ = network.thread.take().unwrap().join();
    // QEMU sees that it has died, behind what it was sent before.
    let _ = qemu.read_to_end(&mut Vec::new());
    let path = network.directory.join("stream.sock");
    std::fs::remove_file(&path).unwrap();
    let (tap, state) = (Tap::adopt(tap).unwrap(), State::open(state).unwrap());
    assert_eq!(tap.name(), "near");
    let listener = UnixListener::bind(&path).unwrap();
    let (passer, remote) = Passer::new(tap, state, (listener, 0)).unwrap();
    network.thread = Some(std::thread::spawn(move || passer.run()));
    network.remote = remote;
    let mut qemu = network.connect();
    qemu.write_all(&record_of(3, 60)).unwrap();
    network.remote.drain().unwrap();
    assert_eq!((network.statistics().holder_restarts, network.statistics().held_frames), (1, 3));
    let epoch = network.remote.cut().unwrap();
    network.remote.release(epoch).unwrap();
    assert_eq!(network.heard(3), [1, 2, 3]);
    ip("link set near down");
    qemu.write_all(&record_of(4, 60)).unwrap();
    network.remote.drain().unwrap();
    network.remote.set_holding(false).unwrap();
    assert_eq!(network.statistics().not_taken_frames, 1, "a wire without an end");
    ip("link set near up");
    qemu.write_all(&record_of(5, 60)).unwrap();
    assert_eq!(network.heard(1), [5]);
    let error = Tap::create("near", "br0").unwrap_err().to_string();
    assert!(error.contains("near"), "{error}");
    let error = Tap::create("third", "br7").unwrap_err().to_string();
    assert!(error.contains("ip link add br7"), "{error}");
}
