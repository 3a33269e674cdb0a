//! Connections whose other side has not shown yet who it is: whoever says nothing keeps nobody out.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Unauthenticated at once; for a further one the oldest of the network that has most of them is sent away. An honest
/// one is through in moments.
const UNAUTHENTICATED_MAX: usize = 128;
/// Whoever has one IPv6 address has all of its network of 64 bits.
const NETWORK_MASK: u128 = u128::MAX << 64;

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Unauthenticated {
    waiting: Mutex<Waiting>,
}

/// The oldest first.
#[derive(Debug, Default)]
struct Waiting {
    last_number: u64,
    entries: VecDeque<Entry>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    network: IpAddr,
    /// Dropped: he is sent away.
    _stays: oneshot::Sender<Infallible>,
}

/// One of them; he is none any more when this is dropped.
#[derive(Debug)]
pub(super) struct UnauthenticatedConnection {
    number: u64,
    unauthenticated: Arc<Unauthenticated>,
    closed: oneshot::Receiver<Infallible>,
}

impl Unauthenticated {
    /// One more, from this address.
    pub(super) fn admit(self: &Arc<Unauthenticated>, address: IpAddr) -> UnauthenticatedConnection {
        let (stays, closed) = oneshot::channel();
        let mut waiting = self.lock();
        waiting.last_number += 1;
        let number = waiting.last_number;
        waiting.entries.push_back(Entry { number, network: network_of(address), _stays: stays });
        if waiting.entries.len() > UNAUTHENTICATED_MAX {
            waiting.send_one_away();
        }
        drop(waiting);
        UnauthenticatedConnection { number, unauthenticated: Arc::clone(self), closed }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn send_one_away(&mut self) {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        self.entries.iter().for_each(|entry| *counts.entry(entry.network).or_default() += 1);
        let most = counts.values().max().copied();
        let oldest = self.entries.iter().position(|entry| counts.get(&entry.network).copied() == most);
        oldest.and_then(|oldest| self.entries.remove(oldest));
    }
}

impl UnauthenticatedConnection {
    /// What his greeting comes to; none when he is sent away before.
    pub(super) async fn greet<T>(mut self, greeting: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            greeted = greeting => Some(greeted),
            _ = &mut self.closed => None,
        }
    }
}

impl Drop for UnauthenticatedConnection {
    fn drop(&mut self) {
        self.unauthenticated.lock().entries.retain(|entry| entry.number != self.number);
    }
}

fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & NETWORK_MASK).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use onecopy_clone::network::keys::make_host;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpSocket;

    use super::super::{Allowed, Listener, ping};
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Spec: C3
    #[tokio::test]
    async fn k29_the_oldest_of_the_network_that_has_most_is_sent_away() {
        let unauthenticated = Arc::new(Unauthenticated::default());
        let honest = unauthenticated.admit(address("192.0.2.1"));
        let mut greedy: Vec<_> = (1..UNAUTHENTICATED_MAX)
            .map(|number| unauthenticated.admit(address(&format!("2001:db8::{number:x}"))))
            .collect();
        // A network has two now, and one has most still.
        let second = unauthenticated.admit(address("192.0.2.1"));
        let stay: Vec<u64> = unauthenticated.lock().entries.iter().map(|entry| entry.number).collect();
        let all = greedy.iter().chain([&honest, &second]);
        let gone: Vec<u64> = all.map(|one| one.number).filter(|number| !stay.contains(number)).collect();
        assert_eq!(gone, [greedy[0].number]);
        assert_eq!(greedy.remove(0).greet(std::future::pending::<()>()).await, None);
        assert_eq!(honest.greet(std::future::ready(7)).await, Some(7));
        assert_eq!(second.greet(std::future::ready(8)).await, Some(8));
        assert_eq!(unauthenticated.lock().entries.len(), UNAUTHENTICATED_MAX - 2);
        drop(greedy);
        assert!(unauthenticated.lock().entries.is_empty());
    }

    /// Comes and says nothing, and comes again when it is sent away.
    async fn be_silent(listener: SocketAddr, have_come: Arc<AtomicUsize>) {
        let mut has_come = false;
        loop {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind((address("127.0.0.2"), 0).into()).unwrap();
            if let Ok(mut stream) = socket.connect(listener).await {
                if !std::mem::replace(&mut has_come, true) {
                    have_come.fetch_add(1, Ordering::Relaxed);
                }
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whoever connects to a host and says nothing, as often as he likes, keeps no other host out.
    ///
    /// Spec: C3
    #[tokio::test(flavor = "multi_thread")]
    async fn k29_who_says_nothing_keeps_nobody_out() {
        const SILENT: usize = 400;
        let directory = tempfile::tempdir().unwrap();
        let keys = make_host(directory.path(), "a", &["127.0.0.1".to_owned()]).unwrap();
        let listener = Listener::open("127.0.0.1:0", &keys, Allowed::default()).await.unwrap();
        let listening = listener.local_address().unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(async move { listener.serve().await });
        let have_come = Arc::new(AtomicUsize::new(0));
        for _ in 0..SILENT {
            tasks.spawn(be_silent(listening, Arc::clone(&have_come)));
        }
        while have_come.load(Ordering::Relaxed) < SILENT {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for _ in 0..5 {
            let version = ping(&listening.to_string(), &keys).await.expect("an honest host gets in");
            assert_eq!(version, env!("CARGO_PKG_VERSION"));
        }
    }
}
