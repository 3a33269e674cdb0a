//! Analytical queries after the pool has shrunk, against a server that was started with so much.

use std::time::Instant;

use serde::Serialize;

use super::MIB;
use super::shrink::resize;
use super::site::{self, Site, Start};
use super::tables::{QUERIES, RELATIONS};

/// The pool before: all tables fit.
const POOL_BYTES: u64 = 512 * MIB;
/// The paper shrinks to half and to a quarter of 16 GB.
pub const SIZES_BYTES: [u64; 2] = [256 * MIB, 128 * MIB];
/// Each query is run so often; the first time is not counted.
const RUNS: usize = 4;

/// All queries on one server.
#[derive(Debug, Clone, Serialize)]
pub struct Analysis {
    /// In which round, from 1.
    pub round: u32,
    /// The pool, in bytes.
    pub pool_bytes: u64,
    /// Whether it was larger before.
    pub has_shrunk: bool,
    /// Seconds of each query, in the order of the queries: the median of its runs.
    pub seconds: Vec<f64>,
    /// Share of the pages found in the pool.
    pub hit_ratio: f64,
}

/// Both, the one that has shrunk first in odd rounds.
pub async fn measure(site: &Site, bytes: u64, round: u32) -> anyhow::Result<Vec<Analysis>> {
    let mut both = Vec::new();
    for has_shrunk in [!round.is_multiple_of(2), round.is_multiple_of(2)] {
        if has_shrunk {
            site.start(Start::with_extension(POOL_BYTES)).await?;
            site.warm(&RELATIONS).await?;
            run(site).await?;
            resize(&site.client().await?, bytes).await?;
        } else {
            site.start(Start::plain(bytes)).await?;
            site.warm(&RELATIONS).await?;
        }
        let before = site::counts(&site.client().await?).await?;
        let seconds = run(site).await?;
        let after = site::counts(&site.client().await?).await?;
        let (hits, reads) = (after.0 - before.0, after.1 - before.1);
        let hit_ratio = hits as f64 / (hits + reads).max(1) as f64;
        both.push(Analysis { round, pool_bytes: bytes, has_shrunk, seconds, hit_ratio });
    }
    Ok(both)
}

/// Every query some times; the median of each.
async fn run(site: &Site) -> anyhow::Result<Vec<f64>> {
    let client = site.client().await?;
    let mut seconds = vec![Vec::new(); QUERIES.len()];
    for turn in 0..RUNS {
        for (times, (_, query)) in seconds.iter_mut().zip(QUERIES) {
            let began = Instant::now();
            client.query(query, &[]).await?;
            if turn > 0 {
                times.push(began.elapsed().as_secs_f64());
            }
        }
    }
    Ok(seconds
        .into_iter()
        .map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect())
}
