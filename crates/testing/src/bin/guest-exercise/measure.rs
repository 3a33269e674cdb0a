//! How many requests a second: random ones, each waited for, as many at a time as there are threads.

use super::buffer::Buffer;
use super::device::Device;
use super::options::{Direction, Options};
use super::sector::{Stamp, fill, next_random};
use serde::Serialize;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// What was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    operations: u64,
    seconds: f64,
    operations_per_second: f64,
    /// Half of the requests took no longer, in microseconds.
    median_us: f64,
    /// 99 of 100 took no longer.
    p99_us: f64,
}

pub(crate) fn measure(options: &Options, direction: Direction) -> io::Result<Measured> {
    let device = Device::open(&options.device)?;
    let span_bytes = options.span_bytes.min(device.size_bytes);
    let begin = Instant::now();
    let deadline = begin + Duration::from_secs(options.seconds);
    let results: Vec<io::Result<Vec<u32>>> = thread::scope(|scope| {
        let (device, block_bytes) = (&device, options.block_bytes);
        let threads: Vec<_> = (0..options.depth)
            .map(|index| {
                let random = options.seed.wrapping_mul(1_000_003).wrapping_add(index);
                scope.spawn(move || requests(device, direction, span_bytes, block_bytes, random, deadline))
            })
            .collect();
        let failed = |_| Err(io::Error::other("a thread of the measurement failed"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(failed)).collect()
    });
    let seconds = begin.elapsed().as_secs_f64();
    let mut times_ns: Vec<u32> = results.into_iter().collect::<io::Result<Vec<_>>>()?.concat();
    times_ns.sort_unstable();
    let at =
        |share: f64| times_ns.get((times_ns.len() as f64 * share) as usize).map_or(0.0, |&ns| f64::from(ns) / 1000.0);
    Ok(Measured {
        operations: times_ns.len() as u64,
        seconds,
        operations_per_second: times_ns.len() as f64 / seconds,
        median_us: at(0.5),
        p99_us: at(0.99),
    })
}

/// One thread's requests; how long each took, in nanoseconds.
fn requests(
    device: &Device,
    direction: Direction,
    span_bytes: u64,
    block_bytes: u64,
    mut random: u64,
    deadline: Instant,
) -> io::Result<Vec<u32>> {
    let blocks = (span_bytes / block_bytes).max(1);
    let mut buffer = Buffer::new(block_bytes as usize);
    let bytes = buffer.first(block_bytes as usize);
    let mut times_ns = Vec::new();
    let mut now = Instant::now();
    while now < deadline {
        let offset = next_random(&mut random) % blocks * block_bytes;
        match direction {
            Direction::Read => device.read(offset, bytes)?,
            Direction::Write => {
                // Contents that differ, as a database's do; one sector of them, so that filling is not what is
                // measured.
                fill(
                    &mut bytes[..512],
                    Stamp { seed: random, sector: offset / 512, generation: times_ns.len() as u64 },
                );
                device.write(offset, bytes)?;
            }
        }
        let end = Instant::now();
        times_ns.push(u32::try_from((end - now).as_nanos()).unwrap_or(u32::MAX));
        now = end;
    }
    Ok(times_ns)
}
