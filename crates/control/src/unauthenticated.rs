//! Connections whose other side has not shown yet who it is: whoever says nothing keeps nobody out.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Whoever has one IPv6 address has all of its network of 64 bits.
const NETWORK_MASK: u128 = u128::MAX << 64;

/// All of them. An honest one is through in moments.
#[derive(Debug, Default)]
pub struct Unauthenticated {
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
pub struct UnauthenticatedConnection {
    number: u64,
    unauthenticated: Arc<Unauthenticated>,
    closed: oneshot::Receiver<Infallible>,
}

impl Unauthenticated {
    /// One more, from this address; where there are more than `max` with it, the oldest of the network that has most of
    /// them is sent away.
    pub fn admit(self: &Arc<Unauthenticated>, address: IpAddr, max: usize) -> UnauthenticatedConnection {
        let (stays, closed) = oneshot::channel();
        let mut waiting = self.lock();
        waiting.last_number += 1;
        let number = waiting.last_number;
        waiting.entries.push_back(Entry { number, network: network_of(address), _stays: stays });
        if waiting.entries.len() > max {
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
    pub async fn greet<T>(mut self, greeting: impl Future<Output = T>) -> Option<T> {
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
    use super::*;

    const MAX: usize = 128;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Spec: C3
    #[tokio::test]
    async fn k29_the_oldest_of_the_network_that_has_most_is_sent_away() {
        let unauthenticated = Arc::new(Unauthenticated::default());
        let honest = unauthenticated.admit(address("192.0.2.1"), MAX);
        let mut greedy: Vec<_> =
            (1..MAX).map(|number| unauthenticated.admit(address(&format!("2001:db8::{number:x}")), MAX)).collect();
        // A network has two now, and one has most still.
        let second = unauthenticated.admit(address("192.0.2.1"), MAX);
        let stay: Vec<u64> = unauthenticated.lock().entries.iter().map(|entry| entry.number).collect();
        let all = greedy.iter().chain([&honest, &second]);
        let gone: Vec<u64> = all.map(|one| one.number).filter(|number| !stay.contains(number)).collect();
        assert_eq!(gone, [greedy[0].number]);
        assert_eq!(greedy.remove(0).greet(std::future::pending::<()>()).await, None);
        assert_eq!(honest.greet(std::future::ready(7)).await, Some(7));
        assert_eq!(second.greet(std::future::ready(8)).await, Some(8));
        assert_eq!(unauthenticated.lock().entries.len(), MAX - 2);
        drop(greedy);
        assert!(unauthenticated.lock().entries.is_empty());
    }
}
