//! The server against clients that do what they may, what they may not, and nothing at all.

mod client;
mod lost;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use onecopy_testing::{seed, until, until_seen};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use client::Client;

use super::*;
use crate::nbd::protocol::handshake::{
    AnswerHeader, ContextRequest, Information, InformationRequest, answer, option, option_message,
};
use crate::nbd::protocol::reply::{Payload, ReplyHeader, chunk};
use crate::nbd::protocol::request::{RequestHeader, command, command_flag};
use crate::nbd::protocol::{BASE_ALLOCATION, transmission_flag};
use crate::{Attachment, CreateOptions, Disk, Extent, OpenOptions, Source, SourceError};

const SIZE_BYTES: u64 = 4 << 20;

/// A server of a new disk and to what else is exported, in a directory of its own.
struct TestServer {
    server: Option<Server>,
    socket: PathBuf,
    attachment: Arc<Attachment>,
    _directory: tempfile::TempDir,
}

impl TestServer {
    fn of_a_disk() -> TestServer {
        TestServer::of_a_disk_over(None)
    }

    fn of_a_disk_over(base: Option<Arc<dyn Source>>) -> TestServer {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disk");
        Disk::create(&disk, &CreateOptions { size_bytes: SIZE_BYTES, base: None, copy_base: false }).unwrap();
        let options = move || OpenOptions { base: base.clone(), ..OpenOptions::default() };
        let attachment = Arc::new(Attachment::new(disk, options));
        let exports = Arc::new(DiskExports::new(Arc::clone(&attachment)));
        TestServer::open(directory, attachment, exports, 128)
    }

    fn open(
        directory: tempfile::TempDir,
        attachment: Arc<Attachment>,
        exports: Arc<dyn Exports>,
        connections_max: usize,
    ) -> TestServer {
        let socket = directory.path().join("nbd.sock");
        let options = ServerOptions { connections_max, ..ServerOptions::at(Address::Unix(socket.clone())) };
        let server = Some(Server::start(&options, exports).unwrap());
        TestServer { server, socket, attachment, _directory: directory }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    /// A client that has chosen the export "", with structured replies.
    fn client(&self) -> Client {
        self.client_of("", true)
    }

    fn client_of(&self, export: &str, is_structured: bool) -> Client {
        let mut client = Client::greeted(&self.socket);
        if is_structured {
            assert_eq!(client.option(option::STRUCTURED_REPLY, &[]), [(answer::ACK, vec![])]);
            let contexts = ContextRequest { name: export.into(), queries: vec![BASE_ALLOCATION.into()] };
            assert_eq!(client.option(option::SET_META_CONTEXT, &contexts.encode()).len(), 2);
        }
        let request = InformationRequest { name: export.into(), wanted: vec![Information::BLOCK_SIZE] };
        let answers = client.option(option::GO, &request.encode());
        assert_eq!(answers.last().unwrap().0, answer::ACK, "{answers:?}");
        client
    }

    /// Waits until as many clients are connected; they leave on their own threads.
    fn wait_for_connections(&self, count: u64) {
        let what = format!("{count} are connected");
        until_seen(&what, || self.server().statistics(), |seen| seen.connections == count);
    }

    /// Waits until it has taken as many requests.
    fn wait_for_requests(&self, count: u64) {
        let what = format!("{count} requests are taken");
        until_seen(&what, || self.server().statistics(), |seen| seen.requests >= count);
    }
}

#[test]
fn what_is_written_is_read_and_what_is_trimmed_is_zero() {
    let served = TestServer::of_a_disk();
    for is_structured in [true, false] {
        let mut client = served.client_of("", is_structured);
        // Without structured replies a read's data stands behind a simple reply: read by length.
        client.ask(command::WRITE, 0, 4096..12288, &[7; 8192]).unwrap();
        client.ask(command::FLUSH, 0, 0..0, &[]).unwrap();
        if is_structured {
            assert_eq!(client.ask(command::READ, 0, 8192..16384, &[]).unwrap(), [[7; 4096], [0; 4096]].concat());
            assert_eq!(client.ask(command::READ, command_flag::DF, 512..1024, &[]).unwrap(), [0; 512]);
        } else {
            client.send(command::READ, 0, 8192..16384, &[]);
            assert_eq!(client.receive().1, Ok(vec![]));
            let mut data = vec![0; 8192];
            client.stream.read_exact(&mut data).unwrap();
            assert_eq!(data, [[7; 4096], [0; 4096]].concat());
        }
        client.ask(command::TRIM, 0, 4096..8192, &[]).unwrap();
        client.ask(command::WRITE_ZEROES, command_flag::NO_HOLE, 8192..10240, &[]).unwrap();
        client.ask(command::WRITE_ZEROES, command_flag::FAST_ZERO | command_flag::FUA, 10240..12288, &[]).unwrap();
        if is_structured {
            assert_eq!(client.ask(command::READ, 0, 0..16384, &[]).unwrap(), [0; 16384]);
        }
    }
    let statistics = served.server().statistics();
    assert_eq!((statistics.written_bytes, statistics.errors), (16384, 0));
    assert_eq!(statistics.connections_total, 2);
}

/// Spec: C5
#[test]
fn b22_requests_that_cannot_be_done_are_refused_one_by_one() {
    let served = TestServer::of_a_disk();
    let mut client = served.client();
    let end = SIZE_BYTES;
    let (einval, enospc) = (libc::EINVAL as u32, libc::ENOSPC as u32);
    /// Command, flags, bytes, payload, and the error that it gets.
    type Case<'a> = (u16, u16, Range<u64>, &'a [u8], u32);
    let cases: [Case<'_>; 10] = [
        (command::READ, 0, end..end + 512, &[], einval),
        (command::READ, 0, u64::MAX - 511..u64::MAX, &[], einval),
        (command::READ, 0, 1..513, &[], einval),
        (command::READ, command_flag::NO_HOLE, 0..512, &[], einval),
        (command::WRITE, 0, end - 512..end + 512, &[1; 1024], enospc),
        (command::WRITE, 0, 0..100, &[1; 100], einval),
        (command::TRIM, 0, end..end + 4096, &[], einval),
        (command::WRITE_ZEROES, command_flag::FAST_ZERO | command_flag::NO_HOLE, 0..512, &[], libc::ENOTSUP as u32),
        (command::BLOCK_STATUS, 0, 0..0, &[], einval),
        (77, 0, 0..512, &[], einval),
    ];
    for (command, flags, range, data, errno) in cases {
        assert_eq!(client.ask(command, flags, range.clone(), data), Err(errno), "{command} {range:?}");
    }
    assert_eq!(client.ask(command::READ, 0, 0..512, &[]).unwrap(), [0; 512]);
    assert_eq!(served.server().statistics().errors, 10);
    // What no server has to read: the client goes.
    client.send(command::WRITE, 0, 0..(64 << 20), &[]);
    assert_eq!(client.stream.read(&mut [0]).unwrap(), 0);
    served.wait_for_connections(0);
}

#[test]
fn options_are_answered_and_the_unknown_refused() {
    let served = TestServer::of_a_disk();
    let mut client = Client::greeted(&served.socket);
    let names = client.option(option::LIST, &[]);
    assert_eq!(names, [(answer::SERVER, vec![0; 4]), (answer::ACK, vec![])]);
    for (option, data, expected) in [
        (option::LIST, vec![1], answer::INVALID),
        (99, vec![1, 2], answer::UNSUPPORTED),
        (option::STARTTLS, vec![], answer::UNSUPPORTED),
        (option::GO, vec![0, 0], answer::INVALID),
        (option::SET_META_CONTEXT, vec![], answer::INVALID),
        (option::GO, InformationRequest { name: "x".into(), wanted: vec![] }.encode(), answer::UNKNOWN),
        (option::GO, InformationRequest { name: "snapshot/x".into(), wanted: vec![] }.encode(), answer::UNKNOWN),
    ] {
        assert_eq!(client.option(option, &data).last().unwrap().0, expected, "{option}");
    }
    let request = InformationRequest { name: String::new(), wanted: vec![Information::DESCRIPTION] };
    let answers = client.option(option::INFO, &request.encode());
    let facts: Vec<_> = answers.iter().filter(|entry| entry.0 == answer::INFO).collect();
    let Information::Export { size_bytes, flags } = Information::parse(&facts[0].1).unwrap() else {
        panic!("{facts:?}")
    };
    assert_eq!((size_bytes, flags & transmission_flag::READ_ONLY), (SIZE_BYTES, 0));
    assert!(matches!(Information::parse(&facts[1].1), Ok(Information::Description(text)) if text.starts_with("disk ")));
    // To know of the disk it need not be attached.
    assert!(served.attachment.current().is_none());
    assert_eq!(client.option(option::ABORT, &[]), [(answer::ACK, vec![])]);
    served.wait_for_connections(0);
}

#[test]
fn the_disk_is_attached_while_clients_have_it_open() {
    let served = TestServer::of_a_disk();
    let (mut one, mut other) = (served.client(), served.client());
    one.ask(command::WRITE, command_flag::FUA, 0..4096, &[9; 4096]).unwrap();
    assert!(served.attachment.current().is_some());
    one.send(command::DISCONNECT, 0, 0..0, &[]);
    served.wait_for_connections(1);
    assert_eq!(other.ask(command::READ, 0, 0..4096, &[]).unwrap(), [9; 4096]);
    drop(other);
    served.wait_for_connections(0);
    assert!(served.attachment.current().is_none());
    assert_eq!(served.client().ask(command::READ, 0, 0..4096, &[]).unwrap(), [9; 4096]);
}

/// Whatever a client sends, or does not read, the server goes on for the others; a request that cannot be done is
/// refused alone; what is in flight is answered before the server closes.
///
/// Spec: C5
#[test]
fn b22_no_bytes_bring_the_server_down() {
    let served = TestServer::of_a_disk();
    let mut random = SmallRng::seed_from_u64(seed());
    let mut witness = served.client();
    witness.ask(command::WRITE, 0, 0..4096, &[3; 4096]).unwrap();
    for round in 0..200 {
        let mut stream = match round % 3 {
            0 => UnixStream::connect(&served.socket).unwrap(),
            1 => Client::greeted(&served.socket).stream,
            _ => served.client().stream,
        };
        for _ in 0..random.random_range(1..6) {
            let mut bytes: Vec<u8> = (0..random.random_range(0..300)).map(|_| random.random()).collect();
            // Often something that begins well.
            if random.random_bool(0.7) {
                let head = match round % 3 {
                    2 => RequestHeader {
                        flags: random.random_range(0..4),
                        command: random.random_range(0..9),
                        cookie: random.random(),
                        offset: random.random_range(0..SIZE_BYTES / 512) * 512,
                        length: random.random_range(0..20) * 512,
                    }
                    .encode()
                    .to_vec(),
                    _ => option_message(random.random_range(0..12), &bytes),
                };
                bytes = [head, bytes].concat();
            }
            if stream.write_all(&bytes).is_err() {
                break;
            }
        }
        if random.random_bool(0.5) {
            // Writes of random bytes may have been taken as such; their client goes away in the middle.
            stream.shutdown(Shutdown::Write).unwrap();
            let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
            let _ = stream.read(&mut [0; 4096]);
        }
        // Those that leave may take their time, and there are places for so many only.
        if round % 50 == 49 {
            drop(stream);
            served.wait_for_connections(1);
        }
    }
    assert_eq!(witness.ask(command::READ, 0, 0..512, &[]).map(|data| data.len()), Ok(512));
    served.wait_for_connections(1);
}

/// A source whose reads wait until they are let through.
struct Gated {
    open: Mutex<bool>,
    changed: Condvar,
    /// Reads ever.
    reads: AtomicU64,
}

impl Gated {
    fn closed() -> Arc<Gated> {
        Arc::new(Gated { open: Mutex::new(false), changed: Condvar::new(), reads: AtomicU64::new(0) })
    }

    fn let_through(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl Source for Gated {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }

    fn read(&self, _offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        drop(self.changed.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
        into.fill(5);
        Ok(())
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
        let middle = range.start.midpoint(range.end);
        Ok(vec![
            Extent { range: range.start..middle, is_zero: true },
            Extent { range: middle..range.end, is_zero: false },
        ])
    }

    fn describe(&self) -> String {
        "gated".into()
    }
}

fn server_of(source: &Arc<Gated>, connections_max: usize) -> TestServer {
    let directory = tempfile::tempdir().unwrap();
    let source: Arc<dyn Source> = Arc::clone(source) as _;
    let exports = Arc::new(SourceExports::new([("gated".to_owned(), source)]));
    let attachment = Arc::new(Attachment::new(directory.path(), OpenOptions::default));
    TestServer::open(directory, attachment, exports, connections_max)
}

#[test]
fn a_read_only_export_is_read_and_says_where_it_is_zero() {
    let source = Gated::closed();
    source.let_through();
    let served = server_of(&source, 8);
    let mut client = served.client_of("gated", true);
    assert_eq!(client.ask(command::READ, 0, 0..65536, &[]).unwrap(), [5; 65536]);
    let states = client.ask(command::BLOCK_STATUS, 0, 0..65536, &[]).unwrap();
    let words: Vec<u32> = states.as_chunks::<4>().0.iter().map(|word| u32::from_be_bytes(*word)).collect();
    assert_eq!(words, [32768, 3, 32768, 0]);
    let states = client.ask(command::BLOCK_STATUS, command_flag::REQ_ONE, 0..65536, &[]).unwrap();
    assert_eq!(states.len(), 8);
    for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        let data: &[u8] = if command == command::WRITE { &[1; 512] } else { &[] };
        assert_eq!(client.ask(command, 0, 0..512, data), Err(libc::EPERM as u32));
    }
    client.ask(command::FLUSH, 0, 0..0, &[]).unwrap();
}

/// Spec: C5
#[test]
fn b22_what_is_in_flight_is_answered_before_the_server_closes() {
    let source = Gated::closed();
    let mut served = server_of(&source, 8);
    let mut client = served.client_of("gated", true);
    let asked: Vec<u64> = (0..5).map(|at| client.send(command::READ, 0, at * 4096..(at + 1) * 4096, &[])).collect();
    served.wait_for_requests(5);
    let server = served.server.take().unwrap();
    let stopping = thread::spawn(move || server.stop(Duration::from_secs(120)));
    until("it lets nobody in any more", || !served.socket.exists());
    assert!(!stopping.is_finished());
    source.let_through();
    let mut answered: Vec<u64> = (0..5)
        .map(|_| {
            let (cookie, outcome) = client.receive();
            assert_eq!(outcome, Ok(vec![5; 4096]));
            cookie
        })
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, asked);
    assert!(stopping.join().unwrap());
    assert_eq!(client.stream.read(&mut [0]).unwrap(), 0);
    assert!(!served.socket.exists());
}

#[test]
fn a_server_that_is_not_given_time_says_so() {
    let source = Gated::closed();
    let mut served = server_of(&source, 8);
    let mut client = served.client_of("gated", true);
    client.send(command::READ, 0, 0..512, &[]);
    served.wait_for_requests(1);
    assert!(!served.server.take().unwrap().stop(Duration::from_millis(50)));
    source.let_through();
    assert!(client.stream.read(&mut [0; 64]).is_ok_and(|count| count == 0));
}

/// Spec: C5
#[test]
fn b22_a_client_that_only_asks_is_held_at_its_bounds_and_others_go_on() {
    let source = Gated::closed();
    source.let_through();
    let served = server_of(&source, 8);
    let greedy = served.client_of("gated", true);
    greedy.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut asked = 0_u64;
    // It never reads. At some point its requests are not taken any more.
    let header = RequestHeader { flags: 0, command: command::READ, cookie: 1, offset: 0, length: 1 << 20 };
    while (&greedy.stream).write_all(&header.encode()).is_ok() {
        asked += 1;
        assert!(asked < 1_000_000, "a server that takes everything");
    }
    assert!(
        served.server().statistics().requests <= 1 + (64 << 20) / (1 << 20) + 2,
        "{:?}",
        served.server().statistics()
    );
    let mut modest = served.client_of("gated", true);
    assert_eq!(modest.ask(command::READ, 0, 0..512, &[]).unwrap(), [5; 512]);
    drop(greedy);
    served.wait_for_connections(1);
}

/// Spec: C5
#[test]
fn b22_one_client_too_many_is_turned_away() {
    let source = Gated::closed();
    let served = server_of(&source, 2);
    let (_one, two) = (served.client_of("gated", true), served.client_of("gated", true));
    let mut third = UnixStream::connect(&served.socket).unwrap();
    assert_eq!(third.read(&mut [0; 18]).unwrap(), 0);
    drop(two);
    served.wait_for_connections(1);
    served.client_of("gated", true);
}

/// Spec: C5
#[test]
fn b22_clients_that_promise_data_are_held_at_the_servers_bound_and_small_requests_go_on() {
    let served = TestServer::of_a_disk();
    let budget = Arc::clone(&served.server().shared.budget);
    let length = 32_u64 << 20;
    let wait_for = |bytes: u64| {
        until_seen(&format!("{bytes} bytes are taken"), || budget.taken_bytes(), |taken| *taken == bytes);
    };
    let mut promising: Vec<Client> = (0..8).map(|_| served.client()).collect();
    for client in &mut promising {
        // The request's head, and nothing of its data.
        client.send(command::WRITE, 0, 0..length, &[]);
    }
    wait_for(8 * length);
    let mut client = served.client();
    client.ask(command::WRITE, 0, 0..4096, &[7; 4096]).unwrap();
    assert_eq!(budget.taken_bytes(), 8 * length);
    drop(promising);
    wait_for(0);
    served.wait_for_connections(1);
}
