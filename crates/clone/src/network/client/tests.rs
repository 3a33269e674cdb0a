use std::os::fd::AsFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::sync_channel;
use std::thread;

use onecopy_testing::{seed, until};
use tempfile::TempDir;

use super::*;
use crate::CHUNK_BYTES;
use crate::fill::Layout;
use crate::network::protocol::{VERSION, read_message};
use crate::network::server::Ended;
use crate::network::server::tests::{HOT, Numbers, SourceHost, Wire, WireDialler};

const LONG: Duration = Duration::from_secs(600);

fn host(sizes: &[u64], seed: u64) -> (SourceHost, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    (SourceHost::new(sizes, seed, directory.path(), LONG), directory)
}

fn open(host: &SourceHost, wire: Wire) -> (RemoteOrigin, Arc<WireDialler>) {
    let dialler = host.dialler(wire);
    let (origin, opening) = RemoteOrigin::open(Arc::<WireDialler>::clone(&dialler), &host.plan()).unwrap();
    assert_eq!(opening.manifest.image, **host.image_store.image());
    assert_eq!(opening.small_files[0].content, b"of a server");
    (origin, dialler)
}

/// Everything, a random piece after the other, as the filling of a clone reads.
fn read_all(origin: &RemoteOrigin, sizes: &[u64], seed: u64) -> Result<Vec<Vec<u8>>, OriginError> {
    let mut numbers = Numbers(seed);
    let mut copy: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size as usize]).collect();
    let mut runs: Vec<(usize, u64, u64)> = Vec::new();
    for (file, size) in sizes.iter().enumerate() {
        let mut at = 0;
        while at < *size {
            let end = (at + CHUNK_BYTES * (1 + numbers.below(32))).min(*size);
            runs.push((file, at, end));
            at = end;
        }
    }
    while !runs.is_empty() {
        let (file, start, end) = runs.swap_remove(numbers.below(runs.len() as u64) as usize);
        let (number, buffer) = (FileNumber(file as u32), &mut copy[file][start as usize..end as usize]);
        match numbers.below(3) {
            0 => origin.read(number, start, buffer)?,
            1 => origin.read_unhurried(number, start, buffer)?,
            _ => {
                origin.prefetch(number, start, end - start);
                origin.read_unhurried(number, start, buffer)?;
            }
        }
    }
    Ok(copy)
}

/// Reads everything while the source goes on writing, which asks before it writes, or does not.
fn copy_while_written(seed: u64, wire: Wire, writer_asks: bool) -> (bool, NetworkCounters) {
    let sizes = [8192 * 150, 8192 * 40 + 100, 1, 0, 8192 * 90];
    let (host, _directory) = host(&sizes, seed);
    let (origin, _dialler) = open(&host, wire);
    let done = AtomicBool::new(false);
    let copy = thread::scope(|scope| {
        for writer in 0..2 {
            let (host, done) = (&host, &done);
            scope.spawn(move || {
                let mut numbers = Numbers(seed ^ (0xabc + writer));
                while !done.load(SeqCst) {
                    let file = [0, 1, 4][numbers.below(3) as usize];
                    let chunk = numbers.below(sizes[file].div_ceil(CHUNK_BYTES));
                    let asked = writer_asks.then_some(&*host.image_store);
                    host.live.write(asked, file, chunk, numbers.below(256) as u8);
                    thread::sleep(Duration::from_micros(200));
                }
            });
        }
        let copy = read_all(&origin, &sizes, seed);
        done.store(true, SeqCst);
        copy.unwrap()
    });
    (copy == host.frozen, origin.counters())
}

#[test]
fn content_is_frozen_whatever_the_source_writes() {
    let first = seed();
    for number in 0..3 {
        let seed = first.wrapping_add(number);
        let (is_same, counters) = copy_while_written(seed, Wire::default(), true);
        assert!(is_same, "seed {seed}");
        assert_eq!((counters.reconnects, counters.damaged), (0, 0));
        assert!(counters.received_bytes > 0 && counters.sent_bytes > 0, "{counters:?}");
    }
}

#[test]
fn a_source_that_does_not_ask_is_found_out() {
    assert!(!copy_while_written(7, Wire::default(), false).0, "the comparison would see nothing");
}

#[test]
fn broken_and_damaged_connections_cost_only_time() {
    let wire = Wire { breaks_after_bytes: Some(600_000), damages_one_in: Some(20) };
    let (mut reconnects, mut damaged) = (0, 0);
    // Which connection carries what depends on the threads, too.
    let first = seed();
    for number in 0..20 {
        let seed = first.wrapping_add(number);
        let (is_same, counters) = copy_while_written(seed, wire, true);
        assert!(is_same, "seed {seed}");
        (reconnects, damaged) = (reconnects + counters.reconnects, damaged + counters.damaged);
        if reconnects > 0 && damaged > 0 {
            return;
        }
    }
    panic!("{reconnects} connections were made anew, {damaged} blocks were damaged");
}

#[test]
fn a_wire_that_always_damages_loses_the_image() {
    let (host, _directory) = host(&[8192 * 4], 3);
    let (origin, _dialler) = open(&host, Wire { damages_one_in: Some(1), ..Wire::default() });
    // One of four chunks is not zero, with this seed: only bytes that travel can be damaged.
    let error = read_all(&origin, &[8192 * 4], 1).unwrap_err();
    assert!(error.to_string().contains("damaged 3 times"), "{error}");
    assert!(origin.lost().unwrap().contains("damaged"));
    let again = origin.read(FileNumber(0), 0, &mut [0; 8192]).unwrap_err();
    assert!(matches!(again, OriginError::Lost(_)), "{again}");
}

#[test]
fn what_somebody_waits_for_passes_the_background() {
    let (host, _directory) = host(&[8192 * 200, 8192 * 8], 5);
    let (origin, _dialler) = open(&host, Wire::default());
    // The source's disk does not answer for file 0, which the background reads.
    host.live.set_gate(false);
    thread::scope(|scope| {
        let (started, begins) = sync_channel(1);
        let (origin, host) = (&origin, &host);
        scope.spawn(move || {
            started.send(()).unwrap();
            origin.read_unhurried(FileNumber(0), 0, &mut vec![0; 8192 * 200]).unwrap();
        });
        begins.recv().unwrap();
        until("as many wait as may", || host.live.waiting.load(SeqCst) == BACKGROUND_WINDOW_BYTES / PIECE_BYTES);
        let mut buffer = vec![0; 8192 * 8];
        origin.read(FileNumber(1), 0, &mut buffer).unwrap();
        assert!(buffer == host.frozen[1]);
        host.live.set_gate(true);
    });
    assert_eq!(host.live.waiting_most.load(SeqCst), BACKGROUND_WINDOW_BYTES / PIECE_BYTES);
}

#[test]
fn the_source_learns_what_the_clone_has_and_of_its_end() {
    let sizes = [8192 * 100, 8192 * 3 + 5];
    let (host, _directory) = host(&sizes, 13);
    let (origin, _dialler) = open(&host, Wire::default());
    let image = Arc::clone(host.image_store.image());
    let filled = SharedBitmap::create(&image).unwrap();
    origin.acknowledge(&filled).unwrap();
    for chunk in 0..50 {
        host.live.write(Some(&host.image_store), 0, chunk, 1);
    }
    assert_eq!(host.image_store.progress().saved_bytes, 8192 * 50);
    let own = Layout::new(&image);
    own.chunks(FileNumber(0), ByteRange::new(0, 8192 * 80)).for_each(|chunk| {
        filled.set(chunk);
    });
    until("all is delivered", || host.image_store.progress().delivered_bytes == 8192 * 80);
    assert_eq!(host.image_store.progress().saved_bytes, 0, "what is delivered is not kept");
    assert_eq!(host.sessions.all().len(), 1);
    origin.end(true);
    until("it has ended", || !host.ended.lock().unwrap().is_empty());
    assert_eq!(*host.ended.lock().unwrap(), [Ended::Whole]);
    assert!(host.sessions.all().is_empty());
}

#[test]
fn what_is_on_its_way_is_not_sent_twice() {
    let (host, _directory) = host(&[8192 * 32], 41);
    let (origin, _dialler) = open(&host, Wire::default());
    host.live.set_gate(false);
    thread::scope(|scope| {
        let origin = &origin;
        scope.spawn(move || origin.prefetch(FileNumber(0), 0, 8192 * 32));
        until("as many wait as may", || host.live.waiting.load(SeqCst) == BACKGROUND_WINDOW_BYTES / PIECE_BYTES);
        let reader = scope.spawn(move || {
            let mut buffer = vec![0; 8192 * 4];
            origin.read(FileNumber(0), 8192 * 3, &mut buffer).unwrap();
            buffer
        });
        // Time for a second request, were there one.
        thread::sleep(Duration::from_millis(200));
        assert_eq!(host.live.waiting_most.load(SeqCst), BACKGROUND_WINDOW_BYTES / PIECE_BYTES);
        host.live.set_gate(true);
        assert!(reader.join().unwrap()[..] == host.frozen[0][8192 * 3..8192 * 7]);
    });
}

#[test]
fn what_is_hot_is_told_also_over_connections_that_break() {
    let (host, _directory) = host(&[8192 * 64], 43);
    let wires = [Wire::default(), Wire { breaks_after_bytes: Some(20_000), ..Wire::default() }];
    for (sessions, wire) in (1..).zip(wires) {
        let (origin, _dialler) = open(&host, wire);
        let told = host.runtime.block_on(origin.hot_ranges());
        let hot = HOT.map(|(file, start, end)| (FileNumber(file), ByteRange::from(start..end)));
        assert_eq!(told, hot);
        assert_eq!(host.runtime.block_on(origin.hot_ranges()), hot, "asked again");
        // Over whichever connection: a session costs its source one query.
        assert_eq!(host.hot_asked.load(SeqCst), sessions);
    }
}

#[test]
fn bringing_ahead_what_was_delivered_meanwhile_loses_nothing() {
    let (host, _directory) = host(&[8192 * 64], 37);
    let (origin, _dialler) = open(&host, Wire::default());
    let image = Arc::clone(host.image_store.image());
    let filled = SharedBitmap::create(&image).unwrap();
    origin.acknowledge(&filled).unwrap();
    Layout::new(&image).chunks(FileNumber(0), ByteRange::new(8192 * 8, 8192 * 8)).for_each(|chunk| {
        filled.set(chunk);
    });
    until("all is delivered", || host.image_store.progress().delivered_bytes == 8192 * 8);
    origin.prefetch(FileNumber(0), 0, 8192 * 32);
    let mut buffer = vec![0; 8192 * 8];
    origin.read_unhurried(FileNumber(0), 0, &mut buffer).unwrap();
    assert!(buffer[..] == host.frozen[0][..8192 * 8]);
    assert_eq!(origin.lost(), None);
    let needed = origin.read(FileNumber(0), 8192 * 8, &mut buffer).unwrap_err();
    assert!(needed.to_string().contains("delivered"), "{needed}");
    assert!(origin.lost().is_some(), "what is needed is lost");
}

#[test]
fn another_process_goes_on_and_tells_again_what_it_has() {
    let sizes = [8192 * 64];
    let (host, _directory) = host(&sizes, 17);
    let (origin, dialler) = open(&host, Wire::default());
    let (session, image) = (origin.session(), Arc::clone(host.image_store.image()));
    drop(origin);
    assert_eq!(host.sessions.all().len(), 1, "it may come back");
    let origin = RemoteOrigin::resume(dialler, session, Arc::clone(&image)).unwrap();
    let filled = SharedBitmap::create(&image).unwrap();
    filled.set(Layout::new(&image).chunks(FileNumber(0), ByteRange::WHOLE).start);
    let kept = SharedBitmap::open(filled.as_fd().try_clone_to_owned().unwrap()).unwrap();
    origin.acknowledge(&kept).unwrap();
    let mut buffer = vec![0; 8192 * 63];
    origin.read(FileNumber(0), 8192, &mut buffer).unwrap();
    assert!(buffer[..] == host.frozen[0][8192..]);
    until("all is delivered", || host.image_store.progress().delivered_bytes == 8192);
    origin.end(false);
    until("it has ended", || !host.ended.lock().unwrap().is_empty());
    assert_eq!(*host.ended.lock().unwrap(), [Ended::GivenUp]);
}

#[test]
fn after_the_lease_both_sides_give_up() {
    let directory = tempfile::tempdir().unwrap();
    let host = SourceHost::new(&[8192 * 64], 19, directory.path(), Duration::from_secs(1));
    let (origin, dialler) = open(&host, Wire { breaks_after_bytes: Some(10_000), ..Wire::default() });
    *dialler.is_cut.lock().unwrap() = true;
    // The first connection breaks in the middle; there is no other.
    let error = read_all(&origin, &[8192 * 64], 1).unwrap_err();
    assert!(error.to_string().contains("no connection for 1 s"), "{error}");
    drop(origin);
    until("the session has ended", || {
        host.sessions.expire();
        !host.ended.lock().unwrap().is_empty()
    });
    assert_eq!(*host.ended.lock().unwrap(), [Ended::Deserted]);
    assert!(host.image_store.failure().is_some(), "the source need not ask any more");
    let (gone, image) = (SessionId::generate().unwrap(), Arc::clone(host.image_store.image()));
    *dialler.is_cut.lock().unwrap() = false;
    let origin = RemoteOrigin::resume(dialler, gone, image).unwrap();
    let error = origin.read(FileNumber(0), 0, &mut [0; 8192]).unwrap_err();
    assert!(error.to_string().contains("the image is gone"), "{error}");
}

#[test]
fn a_source_that_cannot_be_frozen_says_why() {
    let (host, _directory) = host(&[8192], 23);
    let dialler = host.dialler(Wire::default());
    let plan = Plan { slot: "refuse".to_owned(), ..host.plan() };
    let error = RemoteOrigin::open(Arc::<WireDialler>::clone(&dialler), &plan).unwrap_err();
    assert!(error.to_string().contains("wal_level is minimal"), "{error}");
    *dialler.is_cut.lock().unwrap() = true;
    let error = RemoteOrigin::open(dialler, &plan).unwrap_err();
    assert!(error.to_string().contains("no route"), "{error}");
}

#[test]
fn an_image_that_fails_at_its_source_is_lost_here() {
    let (host, _directory) = host(&[8192 * 4], 29);
    let (origin, _dialler) = open(&host, Wire::default());
    host.image_store.fail("the disk is full");
    let error = origin.read(FileNumber(0), 0, &mut [0; 8192]).unwrap_err();
    assert!(matches!(&error, OriginError::Lost(reason) if reason.contains("the disk is full")), "{error}");
    // It is told that nobody reads any more, or finds out itself.
    until("no session is left, and its end is told", || {
        host.sessions.expire();
        host.sessions.all().is_empty() && !host.ended.lock().unwrap().is_empty()
    });
    let ended = host.ended.lock().unwrap().clone();
    assert!(ended == [Ended::Failed("the disk is full".to_owned())] || ended == [Ended::GivenUp], "{ended:?}");
}

#[test]
fn many_threads_share_the_two_connections() {
    let sizes = [8192 * 128, 8192 * 128];
    let (host, _directory) = host(&sizes, 31);
    let (origin, _dialler) = open(&host, Wire { breaks_after_bytes: Some(400_000), ..Wire::default() });
    let same = AtomicU64::new(0);
    thread::scope(|scope| {
        for seed in 0..6 {
            let (origin, host, same) = (&origin, &host, &same);
            scope
                .spawn(move || same.fetch_add((read_all(origin, &sizes, seed).unwrap() == host.frozen).into(), SeqCst));
        }
    });
    assert_eq!(same.load(SeqCst), 6);
}

/// A host that says that it lives, and answers nothing.
#[derive(Default)]
struct MuteHost {
    /// Reads that it was asked for.
    reads: Arc<AtomicU64>,
}

impl Dial for MuteHost {
    fn dial(&self) -> Dialling<'_> {
        let reads = Arc::clone(&self.reads);
        Box::pin(async move {
            let (clone_end, source_end) = tokio::io::duplex(1 << 16);
            tokio::spawn(async move {
                let (mut reader, mut writer) = tokio::io::split(source_end);
                let mut buffer = Vec::new();
                let Ok(Message::Hello { session: Some(session), .. }) = read_message(&mut reader, &mut buffer).await
                else {
                    return;
                };
                let welcome = Message::Welcome { version: VERSION, session, lease_seconds: 1 };
                let hears = async {
                    while let Ok(message) = read_message(&mut reader, &mut buffer).await {
                        reads.fetch_add(u64::from(matches!(message, Message::Read(_))), SeqCst);
                    }
                };
                let mut buffer = Vec::new();
                let lives = async {
                    let _ = write_message(&mut writer, &welcome, &mut buffer).await;
                    while write_message(&mut writer, &Message::KeepAlive, &mut buffer).await.is_ok() {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                };
                tokio::join!(hears, lives);
            });
            Ok(Box::new(clone_end) as Box<dyn Stream>)
        })
    }

    fn peer(&self) -> String {
        "mute".to_owned()
    }
}

fn read_from_a_mute_host(lease: Duration) -> (RemoteOrigin, Arc<AtomicU64>) {
    let (host, _directory) = host(&[8192 * 4], 37);
    let mute = Arc::new(MuteHost::default());
    let reads = Arc::clone(&mute.reads);
    let link = Link::new(mute, SessionId::generate().unwrap(), lease, Arc::clone(host.image_store.image()));
    (RemoteOrigin::start(link, runtime().unwrap(), None), reads)
}

/// Who reads from a host that lives and answers nothing is let go in the end.
///
/// Spec: C3
#[test]
fn a_host_that_answers_no_read_loses_its_clone() {
    let lease = Duration::from_millis(200);
    let (origin, reads) = read_from_a_mute_host(lease);
    let begin = std::time::Instant::now();
    let error = origin.read(FileNumber(0), 0, &mut [0; 8192]).unwrap_err();
    assert!(matches!(&error, OriginError::Lost(reason) if reason.contains("has not answered a read")), "{error}");
    assert!(begin.elapsed() > lease * 2 && reads.load(SeqCst) > 0, "{:?}", begin.elapsed());
    let error = origin.read_unhurried(FileNumber(0), 0, &mut [0; 8192]).unwrap_err();
    assert!(error.to_string().contains("has not answered a read"), "{error}");
}

/// A clone that is given up lets go who waits for such a host.
///
/// Spec: C3
#[test]
fn who_waits_for_a_host_that_answers_no_read_is_let_go_at_the_clones_end() {
    let (origin, reads) = read_from_a_mute_host(LONG);
    thread::scope(|scope| {
        let demand = scope.spawn(|| origin.read(FileNumber(0), 0, &mut [0; 8192]));
        let background = scope.spawn(|| origin.read_unhurried(FileNumber(0), 8192, &mut [0; 8192]));
        until("both are asked for", || reads.load(SeqCst) >= 2);
        assert!(!demand.is_finished() && !background.is_finished());
        origin.let_readers_go("discarded by hand");
        for waited in [demand, background] {
            let error = waited.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("discarded by hand"), "{error}");
        }
    });
}
