//! Reading a router's `/metrics`: Prometheus' text form, as far as counters, gauges and histograms go.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use onecopy_control::http;
use tokio::net::TcpStream;

/// Largest page that is read, in bytes.
const PAGE_BYTES_MAX: usize = 4 << 20;

/// How long a page may take.
const PAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// All samples of a page at one moment, by name and labels as they are written.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples(BTreeMap<String, f64>);

/// Fetches and reads `/metrics`.
pub async fn fetch(address: SocketAddr) -> anyhow::Result<Samples> {
    let page = tokio::time::timeout(PAGE_TIMEOUT, async {
        let response = http::request(TcpStream::connect(address).await?, ("GET", "/metrics"), None).await?;
        Ok::<_, std::io::Error>((response.status, response.body(PAGE_BYTES_MAX).await?))
    })
    .await
    .with_context(|| format!("no metrics from {address} in time"))?;
    match page.with_context(|| format!("no metrics from {address}"))? {
        (200, page) => Ok(Samples::parse(&String::from_utf8_lossy(&page))),
        (status, _) => bail!("{address} answers {status} for /metrics"),
    }
}

impl Samples {
    /// Reads a page; lines that are no samples are passed over.
    pub fn parse(page: &str) -> Samples {
        let samples = page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            // A label's value may hold spaces; the number stands after the last one (no timestamps are written).
            let (series, value) = line.trim().rsplit_once(' ')?;
            Some((series.trim().to_owned(), value.parse().ok()?))
        });
        Samples(samples.collect())
    }

    /// What counters and histograms have gained since `earlier`.
    pub fn since(&self, earlier: &Samples) -> Samples {
        let gain =
            |(series, value): (&String, &f64)| (series.clone(), value - earlier.0.get(series).copied().unwrap_or(0.0));
        Samples(self.0.iter().map(gain).collect())
    }

    /// The sum over all series of this name, whatever their labels; none when there is no such series.
    pub fn total(&self, name: &str) -> Option<f64> {
        let mut matching = self.0.iter().filter(|(series, _)| base_name(series) == name).peekable();
        matching.peek()?;
        Some(matching.map(|(_, value)| value).sum())
    }

    /// The largest over all series of this name.
    pub fn largest(&self, name: &str) -> Option<f64> {
        self.0.iter().filter(|(series, _)| base_name(series) == name).map(|(_, value)| *value).reduce(f64::max)
    }

    /// A quantile of a histogram, over all its labels, linear within a bucket as Prometheus' `histogram_quantile`;
    /// none when nothing was counted.
    pub fn quantile(&self, histogram: &str, quantile: f64) -> Option<f64> {
        let bucket_name = format!("{histogram}_bucket");
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for (series, count) in self.0.iter().filter(|(series, _)| base_name(series) == bucket_name) {
            let bound = upper_bound(series)?;
            match buckets.iter_mut().find(|bucket| bucket.0 == bound) {
                Some(bucket) => bucket.1 += count,
                None => buckets.push((bound, *count)),
            }
        }
        buckets.sort_by(|left, right| left.0.total_cmp(&right.0));
        let total = buckets.last()?.1;
        if total <= 0.0 {
            return None;
        }
        let rank = quantile * total;
        let (mut bound_before, mut count_before) = (0.0, 0.0);
        for (bound, count) in buckets {
            if count >= rank {
                // Beyond the last finite bound nothing is known but that bound.
                if bound.is_infinite() {
                    return Some(bound_before);
                }
                let part = if count > count_before { (rank - count_before) / (count - count_before) } else { 1.0 };
                return Some(bound_before + (bound - bound_before) * part);
            }
            (bound_before, count_before) = (bound, count);
        }
        None
    }
}

fn base_name(series: &str) -> &str {
    series.split('{').next().unwrap_or(series)
}

fn upper_bound(series: &str) -> Option<f64> {
    let text = series.split_once("le=\"")?.1.split('"').next()?;
    if text == "+Inf" { Some(f64::INFINITY) } else { text.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP gate how long\n# TYPE gate histogram\n\
        gate_bucket{database=\"a b\",le=\"0.001\"} 5\ngate_bucket{database=\"a b\",le=\"0.002\"} 9\n\
        gate_bucket{database=\"a b\",le=\"+Inf\"} 10\ngate_sum 0.012\ngate_count 10\n\
        reads_total{server=\"leader\"} 3\nreads_total{server=\"follower-1\"} 4\nnonsense\n";

    #[test]
    fn totals_and_gains() {
        let page = Samples::parse(PAGE);
        assert_eq!(page.total("reads_total"), Some(7.0));
        assert_eq!(page.largest("reads_total"), Some(4.0));
        assert_eq!(page.total("reads"), None);
        assert_eq!(page.since(&page).total("reads_total"), Some(0.0));
        assert_eq!(page.since(&Samples::default()), page);
    }

    #[test]
    fn quantiles() {
        let page = Samples::parse(PAGE);
        assert_eq!(page.quantile("gate", 0.5), Some(0.001));
        assert_eq!(page.quantile("gate", 0.25), Some(0.0005));
        assert_eq!(page.quantile("gate", 0.99), Some(0.002));
        assert_eq!(page.since(&page).quantile("gate", 0.5), None);
        assert_eq!(page.quantile("absent", 0.5), None);
    }
}
