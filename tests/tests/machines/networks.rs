//! Each kind of network carries frames both ways.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use onecopy_hypervisor::Agent;
use onecopy_hypervisor::configuration::{Forward, Network, NetworkEnd, SocketRole};

use onecopy_testing::free_port;
use onecopy_tests::guest::TestGuest;

/// How long a program in a guest may run; several guests may share the processors of a small host.
const TIMEOUT: Duration = Duration::from_secs(180);

/// The hardware address that the test's end of a network has.
const OURS: [u8; 6] = [0x52, 0x54, 0x00, 0xee, 0xee, 0xee];

/// User and stream networks carry frames both ways; a pulled cable is seen.
///
/// Spec: A7
#[tokio::test]
async fn v8_every_network_carries_frames_both_ways() {
    let sockets = TestGuest::directory().unwrap();
    let listener = sockets.path().join("stream.sock");
    let stream = UnixListener::bind(&listener).unwrap();
    let port = free_port();
    let ends = [
        NetworkEnd::User { forwards: vec![Forward::tcp(port, 7777)], restricted: false },
        NetworkEnd::Stream { path: listener, role: SocketRole::Connects { reconnect_ms: Some(200) } },
    ];
    let cards = ends.into_iter().enumerate().map(|(number, end)| Network {
        hardware_address: Some(format!("52:54:00:00:00:0{number}")),
        ..Network::new(format!("net{number}"), end)
    });
    let cards: Vec<Network> = cards.collect();
    let answering_stream = std::thread::spawn(move || answer_stream(&stream, Ipv4Addr::new(10, 77, 1, 1)));
    let guest = TestGuest::restored_with(|configuration, _| {
        configuration.networks = cards;
        Ok(())
    })
    .await
    .unwrap();
    let (machine, agent) = (guest.machine(), guest.agent());
    user(agent, port).await;
    let neighbour = neighbour(agent, "52:54:00:00:00:01", 1).await;
    assert!(neighbour.contains("52:54:00:ee:ee:ee"), "{neighbour}");
    // A cable that is pulled is seen by the guest.
    let device = configured(agent, "52:54:00:00:00:01", 1).await;
    machine.monitor().set_link("net1", false).await.unwrap();
    let carrier =
        format!("for i in $(seq 900); do grep -q 0 /sys/class/net/{device}/carrier && exit 0; sleep 0.1; done; exit 1");
    output(agent, &["sh", "-c", &carrier]).await;
    machine.quit().await.unwrap();
    answering_stream.join().expect("it ends with QEMU");
}

/// From the host to the guest by a forwarded port, and from the guest to the host's loopback.
async fn user(agent: &Agent, port: u16) {
    let serving =
        agent.execute(&["sh", "-c", "echo from the guest > /run/said; busybox nc -l -p 7777 < /run/said"], TIMEOUT);
    let asking = tokio::task::spawn_blocking(move || {
        // QEMU takes the connection also while nobody listens in the guest: then it ends without a word.
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            let mut said = String::new();
            if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                let _closed = stream
                    .shutdown(std::net::Shutdown::Write)
                    .and_then(|()| stream.read_to_string(&mut said).map(|_| ()));
            }
            if !said.is_empty() {
                return said;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        String::new()
    });
    let (served, said) = tokio::join!(serving, asking);
    served.expect("the agent answers");
    assert_eq!(said.expect("no panic"), "from the guest\n");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let host_port = listener.local_addr().expect("bound").port().to_string();
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the guest connects");
        stream.write_all(b"from the host\n").expect("sent");
    });
    let said = output(agent, &["busybox", "nc", "-w", "120", "10.0.2.2", &host_port]).await;
    assert_eq!(said, "from the host");
    serving.join().expect("it has served");
}

/// What a program of the guest prints; it must succeed.
async fn output(agent: &Agent, argv: &[&str]) -> String {
    let executed = agent.execute(argv, TIMEOUT).await.expect("the agent answers");
    assert_eq!(executed.status, Some(0), "{argv:?}: {}{}", executed.stdout.to_text(), executed.stderr.to_text());
    executed.stdout.to_text().trim().to_owned()
}

/// The guest's device of this hardware address, up and with an address in network `number`.
async fn configured(agent: &Agent, card: &str, number: u8) -> String {
    let script = format!(
        "for d in /sys/class/net/*; do grep -q {card} $d/address && break; done; d=${{d##*/}}; \
         ip link set $d up; ip address replace 10.77.{number}.2/24 dev $d; echo $d"
    );
    output(agent, &["sh", "-c", &script]).await
}

/// What the guest knows of its neighbour 10.77.`number`.1 after it has asked for it: request and answer were carried.
async fn neighbour(agent: &Agent, card: &str, number: u8) -> String {
    configured(agent, card, number).await;
    let script = format!(
        "for i in $(seq 90); do busybox ping -c 1 -W 1 10.77.{number}.1 >/dev/null; \
         ip neigh show 10.77.{number}.1 | grep lladdr && exit 0; done; ip neigh"
    );
    output(agent, &["sh", "-c", &script]).await
}

/// The answer to an ARP request for `address` (RFC 826); none for any other frame.
fn arp_answer(frame: &[u8], address: Ipv4Addr) -> Option<Vec<u8>> {
    // Ethernet: to, from, type; ARP: hardware, protocol, lengths, operation, sender's and target's addresses.
    let arp = frame.get(14..42)?;
    let asks = frame[12..14] == [0x08, 0x06] && arp[6..8] == [0, 1] && arp[24..28] == address.octets();
    if !asks {
        return None;
    }
    let sender = &arp[8..18];
    let mut answer =
        [&sender[..6], &OURS, &[0x08, 0x06], &arp[..6], &[0, 2], &OURS, &address.octets(), sender].concat();
    // The shortest frame of Ethernet.
    answer.resize(60, 0);
    Some(answer)
}

/// Until QEMU goes.
fn answer_stream(listener: &UnixListener, address: Ipv4Addr) {
    let (mut stream, _) = listener.accept().expect("QEMU connects");
    let mut length = [0; 4];
    while stream.read_exact(&mut length).is_ok() {
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        if stream.read_exact(&mut frame).is_err() {
            return;
        }
        if let Some(answer) = arp_answer(&frame, address) {
            let length = u32::try_from(answer.len()).expect("short").to_be_bytes();
            if stream.write_all(&[&length[..], &answer].concat()).is_err() {
                return;
            }
        }
    }
}
