//! The link between the hosts: what is sent over it comes later, and no faster than its rate.
//!
//! A relay of TCP connections, because a kernel without `netem` delays nothing. Each direction is a queue of its own.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::channel;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

/// Bytes that are read at once.
const CHUNK_BYTES: usize = 16 << 10;
/// Chunks of a direction that are on their way: 4 MiB, more than the longest link has.
const CHUNKS: usize = 256;

/// How fast and how long a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LinkShape {
    /// Millions of bits a second, in each direction; 0: not bounded.
    pub mbit: u64,
    /// There and back, milliseconds.
    pub round_trip_ms: u64,
}

impl LinkShape {
    /// That of the machine.
    pub const UNBOUNDED: LinkShape = LinkShape { mbit: 0, round_trip_ms: 0 };

    /// For people.
    pub fn name(self) -> String {
        format!("{} Mbit/s, {} ms", self.mbit, self.round_trip_ms)
    }
}

impl std::str::FromStr for LinkShape {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<LinkShape> {
        let (mbit, ms) = text.split_once(':').context("a link is MBIT:MILLISECONDS, as 100:20")?;
        let (mbit, round_trip_ms) = (mbit.parse()?, ms.parse()?);
        anyhow::ensure!((1..=100_000).contains(&mbit), "a link has 1 to 100000 Mbit/s");
        anyhow::ensure!(round_trip_ms <= 1000, "a round trip takes 1000 ms at most");
        Ok(LinkShape { mbit, round_trip_ms })
    }
}

/// What all relays of one link have in common.
#[derive(Debug, Default)]
pub struct Link {
    bits_per_us: AtomicU64,
    one_way_us: AtomicU64,
    /// By direction: when it is free.
    free: [Mutex<Option<Instant>>; 2],
    bytes: AtomicU64,
}

impl Link {
    /// Sets its shape, of what comes from now on.
    pub fn set(&self, shape: LinkShape) {
        self.bits_per_us.store(shape.mbit, Relaxed);
        self.one_way_us.store(shape.round_trip_ms * 500, Relaxed);
    }

    /// Bytes that were sent towards where relays lead.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// When so many bytes are there that are sent now.
    fn there_at(&self, direction: usize, bytes: usize) -> Instant {
        let rate = self.bits_per_us.load(Relaxed);
        let mut free = self.free[direction].lock().unwrap_or_else(PoisonError::into_inner);
        let begin = free.unwrap_or_else(Instant::now).max(Instant::now());
        let took = Duration::from_nanos((bytes as u64 * 8000).checked_div(rate).unwrap_or(0));
        *free = Some(begin + took);
        begin + took + Duration::from_micros(self.one_way_us.load(Relaxed))
    }
}

/// A relay to an address, over a link.
#[derive(Debug)]
pub struct Relay {
    /// Where it listens.
    pub address: String,
    accepting: JoinHandle<()>,
}

impl Relay {
    /// Begins with it.
    ///
    /// # Errors
    /// There is no port.
    pub async fn begin(link: &Arc<Link>, to: &str) -> anyhow::Result<Relay> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, link, to) = (listener.local_addr()?.to_string(), Arc::clone(link), to.to_owned());
        let accepting = tokio::spawn(async move {
            // They end with the relay.
            let mut connections = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let (link, to) = (Arc::clone(&link), to.clone());
                connections.spawn(async move {
                    // Who cannot be reached is found by the one who connects.
                    let Ok(far) = TcpStream::connect(to).await else { return };
                    let _ = near.set_nodelay(true).and_then(|()| far.set_nodelay(true));
                    let ((near_from, near_to), (far_from, far_to)) = (near.into_split(), far.into_split());
                    tokio::join!(carry(&link, 0, near_from, far_to), carry(&link, 1, far_from, near_to));
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Relay { address, accepting })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Carries one direction until either end is closed.
async fn carry(link: &Link, direction: usize, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let (queue, mut queued) = channel::<(Instant, Vec<u8>)>(CHUNKS);
    let reading = async move {
        let mut chunk = vec![0; CHUNK_BYTES];
        while let Ok(read @ 1..) = from.read(&mut chunk).await {
            let there_at = link.there_at(direction, read);
            if queue.send((there_at, chunk[..read].to_vec())).await.is_err() {
                return;
            }
            if direction == 0 {
                link.bytes.fetch_add(read as u64, Relaxed);
            }
        }
    };
    let writing = async move {
        while let Some((there_at, chunk)) = queued.recv().await {
            tokio::time::sleep_until(there_at).await;
            if to.write_all(&chunk).await.is_err() {
                return;
            }
        }
        // The other end hears that this one has closed.
        let _ = to.shutdown().await;
    };
    tokio::join!(reading, writing);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_sent_comes_later_and_no_faster_than_the_links_rate() {
        let echo = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = Arc::new(Link::default());
        let relay = Relay::begin(&link, &echo.local_addr().unwrap().to_string()).await.unwrap();
        link.set(LinkShape { mbit: 80, round_trip_ms: 100 });
        let mut near = TcpStream::connect(&relay.address).await.unwrap();
        let (mut far, _) = echo.accept().await.unwrap();
        let begun = Instant::now();
        near.write_all(&[7; 1_000_000]).await.unwrap();
        let mut came = vec![0; 1_000_000];
        far.read_exact(&mut came).await.unwrap();
        // 100 ms by its rate, and 50 ms by its length.
        assert!(begun.elapsed() >= Duration::from_millis(150), "{:?}", begun.elapsed());
        assert!(came.iter().all(|byte| *byte == 7));
        assert_eq!(link.bytes(), 1_000_000);
        let begun = Instant::now();
        far.write_all(&[1]).await.unwrap();
        near.read_exact(&mut [0; 1]).await.unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(50), "{:?}", begun.elapsed());
        drop(near);
        assert_eq!(far.read(&mut [0; 1]).await.unwrap(), 0);
        for text in ["100", "0:1", "100:1001", "x:1"] {
            assert!(text.parse::<LinkShape>().is_err(), "{text}");
        }
        assert_eq!("100:20".parse::<LinkShape>().unwrap(), LinkShape { mbit: 100, round_trip_ms: 20 });
    }
}
