//! The client against our own server, and against servers that break off, lie and change.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use onecopy_testing::{WAIT_MAX, until, until_seen};

use super::*;
use crate::format::header::SIZE_BYTES_MAX;
use crate::nbd::protocol::handshake::{Information, OptionHeader, answer, answer_message, greeting, option};
use crate::nbd::protocol::reply::{self, ReplyHeader};
use crate::nbd::protocol::request::RequestHeader;
use crate::nbd::protocol::transmission_flag::{HAS_FLAGS, READ_ONLY};
use crate::nbd::{Address, Server, ServerOptions, SourceExports};
use crate::source::RawFile;

const SIZE_BYTES: u64 = 3 << 20;

fn image(directory: &Path) -> Vec<u8> {
    let bytes: Vec<u8> = (0..SIZE_BYTES).map(|at| if at < 1 << 20 { (at / 512 % 251) as u8 } else { 0 }).collect();
    fs::write(directory.join("image"), &bytes[..1 << 20]).unwrap();
    fs::File::options().write(true).open(directory.join("image")).unwrap().set_len(SIZE_BYTES).unwrap();
    bytes
}

fn serve_disk(directory: &Path) -> Server {
    let image: Arc<dyn Source> = Arc::new(RawFile::open(&directory.join("image")).unwrap());
    let exports = Arc::new(SourceExports::new([("image".to_owned(), image)]));
    Server::start(&ServerOptions::at(Address::Unix(directory.join("socket"))), exports).unwrap()
}

fn url(directory: &Path, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", directory.join("socket").display())
}

fn quick() -> NbdClientOptions {
    NbdClientOptions { connect_timeout: WAIT_MAX, ..NbdClientOptions::default() }
}

#[test]
fn an_export_reads_as_what_is_behind_it_also_over_breaks() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = image(directory.path());
    let server = Mutex::new(Some(serve_disk(directory.path())));
    let client = NbdClient::connect(&url(directory.path(), "image"), quick()).unwrap();
    assert_eq!(client.size_bytes(), SIZE_BYTES);
    assert!(client.identity().is_some_and(|identity| identity.ends_with("/image")));
    let extents = client.extents(0..SIZE_BYTES + 4096).unwrap();
    assert_eq!(
        extents,
        [Extent { range: 0..1 << 20, is_zero: false }, Extent { range: 1 << 20..SIZE_BYTES + 4096, is_zero: true }]
    );
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..4_u64 {
            let (client, bytes, is_over) = (&client, &bytes, &is_over);
            scope.spawn(move || {
                let mut step = reader;
                while !is_over.load(Ordering::SeqCst) {
                    step += 1;
                    let at = (step * 7919 * 513 % (SIZE_BYTES - 100_000)) as usize;
                    let mut into = vec![1; 1 + at % 90_000];
                    client.read(at as u64, &mut into).unwrap();
                    assert!(into == bytes[at..at + into.len()], "at {at}");
                }
            });
        }
        for round in 0..6 {
            std::thread::sleep(Duration::from_millis(80));
            let old = server.lock().unwrap().take().unwrap();
            // In order, and in the middle of everything.
            if round % 2 == 0 {
                drop(old)
            } else {
                assert!(old.stop(WAIT_MAX))
            }
            *server.lock().unwrap() = Some(serve_disk(directory.path()));
        }
        is_over.store(true, Ordering::SeqCst);
    });
    let mut past_end = [1; 1000];
    client.read(SIZE_BYTES - 500, &mut past_end).unwrap();
    assert_eq!(past_end, [0; 1000]);
}

#[test]
fn a_server_that_is_away_is_waited_for_or_not_as_is_asked() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = image(directory.path());
    let remembered = Remembered { size_bytes: SIZE_BYTES, identity: None };
    let options = NbdClientOptions { source_timeout: Some(Duration::from_millis(200)), ..quick() };
    let client = NbdClient::resume(&url(directory.path(), "image"), options, &remembered).unwrap();
    let is_away = |told: &str| told.contains("No such file or directory");
    until("it is told that the server is away", || client.trouble().is_some_and(|told| is_away(&told)));
    let error = client.read(0, &mut [0; 512]).unwrap_err();
    assert!(is_away(&error.reason), "{error}");
    let client = NbdClient::resume(&url(directory.path(), "image"), quick(), &remembered).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut into = [0; 4096];
            client.read(8192, &mut into).map(|()| into)
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waiting.is_finished());
        let _server = serve_disk(directory.path());
        assert_eq!(waiting.join().unwrap().unwrap(), bytes[8192..12288]);
        assert_eq!(client.trouble(), None);
    });
    // And waiting ends when it is closed.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.read(0, &mut [0; 512]));
        std::thread::sleep(Duration::from_millis(100));
        client.close();
        assert_eq!(waiting.join().unwrap().unwrap_err().reason, "closed");
    });
}

#[test]
fn what_is_not_there_is_told_at_once() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path());
    let _server = serve_disk(directory.path());
    let error = NbdClient::connect(&url(directory.path(), "other"), quick()).map(|_| "connected").unwrap_err();
    assert!(error.to_string().contains("no such export"), "{error}");
    for (url, options) in [
        ("nbds://localhost/", quick()),
        ("nbd://localhost/", NbdClientOptions { tls: Some(TlsFiles::of_host(directory.path())), ..quick() }),
        ("http://localhost/", quick()),
    ] {
        assert!(NbdClient::connect(url, options).is_err(), "{url}");
    }
}

/// Spec: C6
#[test]
fn b24_another_image_under_the_same_name_is_not_taken_for_the_first() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path());
    let first = serve_disk(directory.path());
    let options = NbdClientOptions { source_timeout: Some(Duration::from_secs(2)), ..quick() };
    let client = NbdClient::connect(&url(directory.path(), "image"), options).unwrap();
    client.read(0, &mut [0; 512]).unwrap();
    drop(first);
    fs::write(directory.path().join("image"), [1; 8192]).unwrap();
    let _second = serve_disk(directory.path());
    // A read may be over before the new server has answered.
    let read = || client.read(0, &mut [0; 512]).unwrap_err().to_string();
    until_seen("the other image is refused", read, |error| error.contains("8192 bytes and had"));
}

/// A server that negotiates in order and then answers the first request of each connection with `answer`.
struct Liar {
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

type Lie = Box<dyn Fn(&RequestHeader) -> Vec<u8> + Send>;

impl Liar {
    fn start(directory: &Path, flags: u16, lie: Lie) -> Liar {
        Liar::telling(directory, SIZE_BYTES, flags, lie)
    }

    fn telling(directory: &Path, size_bytes: u64, flags: u16, lie: Lie) -> Liar {
        let socket = directory.join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                // A client that goes away in the middle is no failure of the test.
                let _ = Liar::serve(stream, size_bytes, flags, &lie);
            }
        });
        Liar { socket, thread: Some(thread), stop }
    }

    fn serve(mut stream: UnixStream, size_bytes: u64, flags: u16, lie: &Lie) -> io::Result<()> {
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(&greeting())?;
        stream.read_exact(&mut [0; 4])?;
        loop {
            let mut head = [0; OptionHeader::BYTES];
            stream.read_exact(&mut head)?;
            let header = OptionHeader::parse(&head)?;
            stream.read_exact(&mut vec![0; header.length as usize])?;
            if header.option == option::GO {
                let size = Information::Export { size_bytes, flags: HAS_FLAGS | flags };
                stream.write_all(&answer_message(option::GO, answer::INFO, &size.encode()))?;
            }
            if header.option == option::SET_META_CONTEXT {
                stream.write_all(&answer_message(header.option, answer::UNSUPPORTED, &[]))?;
                continue;
            }
            stream.write_all(&answer_message(header.option, answer::ACK, &[]))?;
            if header.option == option::GO {
                break;
            }
        }
        let mut head = [0; RequestHeader::BYTES];
        stream.read_exact(&mut head)?;
        stream.write_all(&lie(&RequestHeader::parse(&head)?))?;
        // Until the client goes.
        stream.read_exact(&mut [0; 4096])
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.socket);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// No answer of a server is taken for data that is not all of what was asked for; one that breaks off is asked for
/// again, and no longer than was allowed; a size that no disk can have is refused.
///
/// Spec: C5
#[test]
fn b28_no_answer_of_a_server_is_believed_that_is_none() {
    let half =
        |request: &RequestHeader, offset: u64| [reply::data_head(request.cookie, offset, 256), vec![7; 256]].concat();
    let lies: Vec<(&str, Lie)> = vec![
        ("nothing", Box::new(|_| vec![])),
        ("noise", Box::new(|_| vec![0xa5; 64])),
        ("a simple reply", Box::new(|request| [reply::simple(0, request.cookie), vec![1; 512]].concat())),
        ("another's cookie", Box::new(|request| reply::hole(request.cookie ^ 1, request.offset, request.length))),
        ("no data", Box::new(|request| reply::nothing(request.cookie))),
        ("half of the data", Box::new(move |request| half(request, request.offset))),
        ("before the range", Box::new(|request| reply::hole(request.cookie, request.offset - 512, request.length))),
        ("behind the range", Box::new(|request| reply::hole(request.cookie, request.offset, request.length + 1))),
        ("around all numbers", Box::new(|request| reply::hole(request.cookie, u64::MAX, u32::MAX))),
        ("states", Box::new(|request| reply::status(request.cookie, 0, &[(512, 0)]))),
        (
            "a huge chunk",
            Box::new(|request| {
                let mut bytes = reply::failure(request.cookie, 5, "");
                bytes[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
                bytes
            }),
        ),
        (
            "the same twice",
            Box::new(|request| {
                let mut once = reply::hole(request.cookie, request.offset, request.length);
                once[5] = 0;
                once.repeat(2)
            }),
        ),
    ];
    for (name, lie) in lies {
        let directory = tempfile::tempdir().unwrap();
        let _liar = Liar::start(directory.path(), READ_ONLY, lie);
        let options = NbdClientOptions { source_timeout: Some(Duration::from_millis(400)), ..quick() };
        let client = NbdClient::connect(&url(directory.path(), ""), options).unwrap();
        assert!(client.read(4096, &mut [0; 512]).is_err(), "{name}");
    }
}

/// Spec: C5
#[test]
fn b28_an_answer_cut_off_in_its_data_is_asked_for_again_without_any_time_out() {
    let directory = tempfile::tempdir().unwrap();
    // Each connection answers one request: the first in half, and the client is sent away.
    let answers = Mutex::new(0);
    let lie: Lie = Box::new(move |request| {
        let mut answers = answers.lock().unwrap();
        *answers += 1;
        let whole = [reply::data_head(request.cookie, request.offset, request.length as usize), vec![6; 512]].concat();
        if *answers < 3 { whole[..ReplyHeader::CHUNK_BYTES + 8 + 256].to_vec() } else { whole }
    });
    let _liar = Liar::start(directory.path(), READ_ONLY, lie);
    let client = NbdClient::connect(&url(directory.path(), ""), quick()).unwrap();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut into = [0; 512];
            client.read(4096, &mut into).map(|()| into)
        });
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(300));
            for link in client.shared.state().links.iter().flatten() {
                link.cut();
            }
        }
        assert_eq!(reading.join().unwrap().unwrap(), [6; 512]);
    });
}

/// Why there is no connection. The time for one may be over before the server has answered: then once more.
fn refusal(url: &str, options: &NbdClientOptions, due: &str) -> String {
    let connect = || NbdClient::connect(url, options.clone()).map(|_| "connected").unwrap_err().to_string();
    until_seen("it is refused", connect, |error| error.contains(due) || !error.contains("does not answer"))
}

/// Spec: C6
#[test]
fn b24_an_export_that_can_be_written_to_is_no_base() {
    let directory = tempfile::tempdir().unwrap();
    let _liar = Liar::start(directory.path(), 0, Box::new(|_| vec![]));
    let options = NbdClientOptions { connect_timeout: Duration::from_millis(500), ..quick() };
    let error = refusal(&url(directory.path(), ""), &options, "read only");
    assert!(error.contains("read only"), "{error}");
}

/// Spec: C5
#[test]
fn b28_a_size_that_no_disk_can_have_is_refused() {
    for size_bytes in [SIZE_BYTES_MAX + 1, u64::MAX] {
        let directory = tempfile::tempdir().unwrap();
        let _liar = Liar::telling(directory.path(), size_bytes, READ_ONLY, Box::new(|_| vec![]));
        let error =
            NbdClient::connect(&url(directory.path(), ""), quick()).map(|_| "connected").unwrap_err().to_string();
        assert!(error.contains("8 TiB"), "{error}");
    }
}

/// Spec: C5
#[test]
fn b28_a_read_ends_in_time_also_while_connections_come_and_break() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path());
    let _server = serve_disk(directory.path());
    let client = NbdClient::connect(&url(directory.path(), "image"), quick()).unwrap();
    assert!(client.shared.link(Some(Instant::now() + WAIT_MAX)).is_ok());
    // With a connection always there, only the time that is over ends the asking.
    assert!(client.shared.link(Some(Instant::now())).is_err());
}

/// Spec: C5
#[test]
fn b28_a_server_that_takes_nothing_more_holds_no_asker_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
    let socket = Address::Unix(directory.path().join("socket")).dial(WAIT_MAX).unwrap();
    let (_silent, _) = listener.accept().unwrap();
    socket.set_send_timeout(Duration::from_millis(50)).unwrap();
    // As much as no kernel keeps for a peer that reads nothing.
    let outcome = (&socket).write_all(&vec![0; 64 << 20]);
    assert_eq!(outcome.map_err(|error| error.kind()), Err(io::ErrorKind::WouldBlock));
}

/// Spec: C4
#[test]
fn b28_a_process_of_another_account_is_no_server() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path());
    let _server = serve_disk(directory.path());
    let own = rustix::process::geteuid().as_raw();
    let connect = |account| {
        let options = NbdClientOptions { account: Some(account), connect_timeout: WAIT_MAX, ..quick() };
        NbdClient::connect(&url(directory.path(), "image"), options)
    };
    assert!(connect(own).is_ok());
    let options = NbdClientOptions { account: Some(own + 1), connect_timeout: Duration::from_millis(500), ..quick() };
    let due = format!("not one of {}", own + 1);
    let error = refusal(&url(directory.path(), "image"), &options, &due);
    assert!(error.contains(&due), "{error}");
}

#[test]
fn errors_of_the_server_reach_the_reader_with_their_words() {
    let directory = tempfile::tempdir().unwrap();
    let fails: Lie = Box::new(|request| {
        // One connection answers one request of this test's server; enough for all that the client tries.
        reply::failure(request.cookie, libc::EIO as u32, "the platter is scratched")
    });
    let _liar = Liar::start(directory.path(), READ_ONLY, fails);
    let client =
        NbdClient::connect(&url(directory.path(), ""), NbdClientOptions { source_timeout: Some(WAIT_MAX), ..quick() });
    let client = client.unwrap();
    let reader = std::thread::scope(|scope| {
        let reading = scope.spawn(|| client.read(0, &mut [0; 512]));
        // The server answers one request a connection: break it so that the next try gets a new one.
        while !reading.is_finished() {
            std::thread::sleep(Duration::from_millis(100));
            for link in client.shared.state().links.iter().flatten() {
                link.cut();
            }
        }
        reading.join().unwrap()
    });
    let error = reader.unwrap_err().to_string();
    assert!(error.contains("the platter is scratched"), "{error}");
}
