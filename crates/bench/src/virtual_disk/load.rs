//! What is asked of a disk.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

/// Bytes of the disk that are used: all of them are in the host's cache.
pub const SPAN_BYTES: u64 = 256 << 20;

/// The order of requests is the same for each way.
const SEED: u64 = 1;

/// A load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// 4 KiB anywhere, 16 at a time.
    RandomRead,
    /// The same, written.
    RandomWrite,
    /// 128 KiB one after the other, 4 at a time.
    SequentialRead,
    /// The same, written.
    SequentialWrite,
}

/// A request.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// Whether they are written.
    pub is_write: bool,
}

/// What came of a load.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Measured {
    /// Requests a second.
    pub per_second: f64,
    /// Megabytes a second.
    pub megabytes_per_second: f64,
    /// Processor time of the back end for a request, in microseconds.
    pub processor_us: f64,
}

/// Something that does requests, several at a time.
pub trait Client {
    /// Begins a request; one that it cannot take now is not begun.
    fn begin(&mut self, ask: Ask) -> anyhow::Result<bool>;

    /// Waits until at least one has ended; how many have.
    fn wait(&mut self) -> anyhow::Result<u32>;
}

impl Load {
    /// In the order in which they run.
    pub const ALL: [Load; 4] = [Load::RandomRead, Load::RandomWrite, Load::SequentialRead, Load::SequentialWrite];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Load::RandomRead => "4 KiB random read",
            Load::RandomWrite => "4 KiB random write",
            Load::SequentialRead => "128 KiB sequential read",
            Load::SequentialWrite => "128 KiB sequential write",
        }
    }

    fn length(self) -> u32 {
        match self {
            Load::RandomRead | Load::RandomWrite => 4 << 10,
            Load::SequentialRead | Load::SequentialWrite => 128 << 10,
        }
    }

    fn depth(self) -> u32 {
        match self {
            Load::RandomRead | Load::RandomWrite => 16,
            Load::SequentialRead | Load::SequentialWrite => 4,
        }
    }

    fn asks(self) -> impl FnMut() -> Ask {
        let (length, places) = (self.length(), SPAN_BYTES / u64::from(self.length()));
        let mut random = StdRng::seed_from_u64(SEED);
        let mut next = 0;
        move || {
            let place = match self {
                Load::RandomRead | Load::RandomWrite => random.random_range(0..places),
                Load::SequentialRead | Load::SequentialWrite => {
                    next += 1;
                    next % places
                }
            };
            let is_write = matches!(self, Load::RandomWrite | Load::SequentialWrite);
            Ask { offset: place * u64::from(length), length, is_write }
        }
    }

    /// Keeps a client busy for so long. `processor` tells how much processor time the back end has used.
    pub fn run(
        self,
        client: &mut dyn Client,
        length: Duration,
        processor: impl Fn() -> anyhow::Result<Duration>,
    ) -> anyhow::Result<Measured> {
        let mut asks = self.asks();
        let (begin, used_before) = (Instant::now(), processor()?);
        let (mut under_way, mut done) = (0, 0_u64);
        while begin.elapsed() < length {
            while under_way < self.depth() && client.begin(asks())? {
                under_way += 1;
            }
            let ended = client.wait()?;
            under_way -= ended;
            done += u64::from(ended);
        }
        let (elapsed, used) = (begin.elapsed(), processor()?.saturating_sub(used_before));
        while under_way > 0 {
            under_way -= client.wait()?;
        }
        let per_second = done as f64 / elapsed.as_secs_f64();
        Ok(Measured {
            per_second,
            megabytes_per_second: per_second * f64::from(self.length()) / 1e6,
            processor_us: used.as_secs_f64() * 1e6 / done.max(1) as f64,
        })
    }
}
