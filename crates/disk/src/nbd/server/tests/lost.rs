//! Clients that go, are cut off, or stall.

use super::super::replies::REQUESTS_MAX;
use super::*;

/// Spec: D5
#[test]
fn b60_what_a_lost_client_had_asked_for_changes_nothing_any_more() {
    let base = Gated::closed();
    let served = TestServer::of_a_disk_over(Some(Arc::clone(&base) as _));
    // Somebody else has the disk, too: it stays open when the client goes.
    let disk = served.attachment.attach().unwrap();
    let mut client = served.client();
    // Parts of blocks: they wait for the base. The last one waits for its turn.
    for block in 0..=REQUESTS_MAX as u64 {
        client.send(command::WRITE, 0, block * 4096..block * 4096 + 512, &[1; 512]);
    }
    served.wait_for_requests(REQUESTS_MAX as u64 + 1);
    drop(client);
    // Its connection ends while the base is away.
    served.wait_for_connections(0);
    let mut client = served.client();
    client.ask(command::WRITE, 0, 0..4096, &[2; 4096]).unwrap();
    base.let_through();
    until_seen("nothing is pending", || disk.statistics(), |seen| seen.pending_requests == 0);
    assert_eq!(client.ask(command::READ, 0, 0..8192, &[]).unwrap(), [[2; 4096], [5; 4096]].concat());
    drop(disk);
    served.attachment.detach().unwrap();
}

/// Spec: D5
#[test]
fn b60_a_server_that_closes_lets_go_of_what_waits_for_a_base_and_gives_the_disk_back() {
    let base = Gated::closed();
    let mut served = TestServer::of_a_disk_over(Some(Arc::clone(&base) as _));
    let mut client = served.client();
    client.send(command::WRITE, 0, 0..512, &[1; 512]);
    served.wait_for_requests(1);
    assert!(!served.server.take().unwrap().stop(Duration::from_millis(50)));
    until("the disk is closed", || served.attachment.current().is_none());
    // No answer, least of all an error: a client that comes again asks anew.
    assert_eq!(client.stream.read(&mut [0; 64]).unwrap(), 0);
    base.let_through();
}

/// Clients that open nothing keep nobody out; one that has is not ended for another one.
///
/// Spec: C5
#[test]
fn b64_who_opens_nothing_keeps_nobody_out() {
    let source = Gated::closed();
    source.let_through();
    let served = server_of(&source, 3);
    let mut first = served.client_of("gated", true);
    for round in 0..20 {
        let idle = [(); 3].map(|()| UnixStream::connect(&served.socket).unwrap());
        let last = served.client_of("gated", true);
        assert_eq!(first.ask(command::READ, 0, 0..512, &[]), Ok(vec![5; 512]), "{round}");
        drop((idle, last));
        served.wait_for_connections(1);
    }
    let _others = [(); 2].map(|()| served.client_of("gated", true));
    // All have opened something: the next one is sent away.
    let mut beyond = UnixStream::connect(&served.socket).unwrap();
    assert_eq!(beyond.read(&mut [0; 64]).unwrap(), 0);
}

/// A write whose data had not come when the server closed gets no answer.
///
/// Spec: D5
#[test]
fn b60_a_write_that_is_half_there_as_the_server_closes_gets_no_answer() {
    let mut served = TestServer::of_a_disk();
    let mut client = served.client();
    client.send(command::WRITE, 0, 0..8192, &[1; 4096]);
    served.wait_for_requests(1);
    assert!(served.server.take().unwrap().stop(Duration::from_secs(60)));
    assert_eq!(client.stream.read(&mut [0; 64]).unwrap(), 0);
}

/// A client that reads a snapshot reads on when the disk is given back by its last user.
///
/// Spec: D5
#[test]
fn b60_a_snapshot_is_read_on_when_its_disk_is_closed_and_opened() {
    let served = TestServer::of_a_disk();
    let disk = served.attachment.attach().unwrap();
    disk.write(0, &[3; 4096], &[]).unwrap();
    disk.snapshot("kept").unwrap();
    let mut reader = served.client_of("snapshot/kept", true);
    assert_eq!(reader.ask(command::READ, 0, 0..4096, &[]).unwrap(), [3; 4096]);
    disk.write(0, &[4; 4096], &[]).unwrap();
    assert!(disk.delete_snapshot("kept").is_err(), "it is read");
    drop(disk);
    served.attachment.detach().unwrap();
    assert_eq!(reader.ask(command::READ, 0, 0..8192, &[]).unwrap(), [[3; 4096], [0; 4096]].concat());
    let disk = served.attachment.attach().unwrap();
    assert_eq!(reader.ask(command::READ, 0, 0..4096, &[]).unwrap(), [3; 4096]);
    drop(reader);
    served.wait_for_connections(0);
    until("nobody reads it", || disk.delete_snapshot("kept").is_ok());
    drop(disk);
    served.attachment.detach().unwrap();
}

/// Spec: C5
#[test]
fn b22_what_a_lost_client_had_asked_a_source_keeps_its_place_until_it_returns_and_no_memory() {
    let source = Gated::closed();
    let served = server_of(&source, 1);
    let budget = Arc::clone(&served.server().shared.budget);
    let (length, reads) = (128_u64 << 10, || source.reads.load(Ordering::SeqCst));
    let mut client = served.client_of("gated", true);
    for _ in 0..32 {
        client.send(command::READ, 0, 0..length, &[]);
    }
    // As many as there are threads wait for the source, and what they hold is the connection's own.
    let holds = |(reads, bytes): &(u64, u64)| *reads >= 8 && *bytes >= 24 * length;
    until_seen("the source is read by all and the rest waits", || (reads(), budget.taken_bytes()), holds);
    drop(client);
    until("its connection has ended", || served.server().shared.connections().is_empty());
    assert_eq!((budget.taken_bytes(), served.server().statistics().connections), (0, 1));
    let mut next = UnixStream::connect(&served.socket).unwrap();
    assert_eq!(next.read(&mut [0; 18]).unwrap(), 0, "there is no place");
    source.let_through();
    served.wait_for_connections(0);
    assert_eq!(served.client_of("gated", true).ask(command::READ, 0, 0..512, &[]).unwrap(), [5; 512]);
    // What waited in the queue was never read.
    assert_eq!(reads(), 9);
}

/// An NBD client that stalls, sending or taking, on memory that others wait for is cut off; one that nobody waits for
/// may take its time.
///
/// Spec: L1
#[test]
fn b64_clients_that_stall_give_way_to_those_that_wait() {
    let source = Gated::closed();
    let served = server_of(&source, 128);
    let budget = Arc::clone(&served.server().shared.budget);
    let (mib, length) = (1_u64 << 20, 32_u64 << 20);
    // One takes no replies, and others do not send what they promise: together they hold all.
    let mut idle = served.client_of("gated", true);
    let read = |cookie| RequestHeader { flags: 0, command: command::READ, cookie, offset: 0, length: 1 << 20 };
    let requests: Vec<u8> = (1..=64).flat_map(|cookie| read(cookie).encode()).collect();
    idle.stream.write_all(&requests).unwrap();
    let hold = |bytes: u64| {
        until_seen(&format!("{bytes} bytes are taken"), || budget.taken_bytes(), |taken| *taken >= bytes);
    };
    // Before the first reply is there: who has one to send, and nobody who takes it, reads no further request.
    hold(62 * mib);
    source.let_through();
    let mut promising: Vec<Client> = (0..6).map(|_| served.client_of("gated", true)).collect();
    for client in &mut promising {
        client.send(command::WRITE, 0, 0..length, &[]);
    }
    hold(254 * mib);
    // As long as nobody wants what they hold they may take their time.
    let mut modest = served.client_of("gated", true);
    assert_eq!(modest.ask(command::READ, 0, 0..512, &[]).unwrap(), [5; 512]);
    assert_eq!(served.server().statistics().connections, 8);
    assert_eq!(modest.ask(command::READ, 0, 0..3 * mib, &[]).unwrap().len() as u64, 3 * mib);
    // The one that has stalled for longest is gone: it gets what was sent before, and the end.
    let mut rest = Vec::new();
    let outcome = idle.stream.read_to_end(&mut rest);
    assert!(outcome.is_err() || (rest.len() as u64) < 64 * mib, "all {} bytes were sent", rest.len());
    drop(promising);
    served.wait_for_connections(1);
}
