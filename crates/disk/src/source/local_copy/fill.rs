//! Fetching clusters from the source: each once, however many wait for it.

use std::collections::HashSet;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::header::CLUSTER_BYTES;
use super::map::Cluster;
use super::{LOOK_AGAIN_INTERVAL, Role, Shared, SourceError};

/// Clusters that a reader fetches at a time.
const RUN_CLUSTERS_MAX: u64 = 16;

/// Clusters that somebody is fetching.
pub(super) type Claims = HashSet<u64>;

impl Shared {
    /// Reads a range of which nothing was here a moment ago.
    pub(super) fn fault(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let _reader = self.pace.reader();
        let (begun, mut run_clusters) = (Instant::now(), RUN_CLUSTERS_MAX);
        let (mut at, mut rest) = (offset, into);
        while !rest.is_empty() {
            let first = at / CLUSTER_BYTES;
            let end = (at + rest.len() as u64).div_ceil(CLUSTER_BYTES).min(first + run_clusters);
            let until = (end * CLUSTER_BYTES).min(at + rest.len() as u64);
            // What is absent behind a whole header is damage, and the source has it still.
            if !self.is_writer()
                && self.map.look_again(first).map_err(|error| self.error(error))?
                && !self.map.has_absent()
            {
                self.leave_source();
            }
            // Another one may have fetched the first of them meanwhile, or fetch some of them now.
            let Some(claim) = self.claim(first..end) else {
                let until = self.map.range(first).end.min(until);
                let (part, behind) = rest.split_at_mut((until - at) as usize);
                self.read_here(at, part)?;
                (at, rest) = (until, behind);
                continue;
            };
            let until = self.map.range(claim.clusters.end - 1).end.min(until);
            let asked = Instant::now();
            let bytes = match claim.fetch() {
                Ok(bytes) => bytes,
                Err(error) => {
                    // The writer may have got it, and may have finished, while the source was waited for.
                    let is_whole = match self.role {
                        Role::Writer => self.map.is_whole(),
                        Role::Beside { .. } => self.map.look_again(first).map_err(|error| self.error(error))?,
                    };
                    if self.map.get(first).is_here() {
                        continue;
                    }
                    if is_whole {
                        return Err(self.error(left_out(&claim.range())));
                    }
                    if !self.may_come_yet(asked, begun) {
                        return Err(error);
                    }
                    // Over a slow link less may come in time.
                    run_clusters = 1;
                    continue;
                }
            };
            let (part, behind) = rest.split_at_mut((until - at) as usize);
            let from = (at - first * CLUSTER_BYTES) as usize;
            part.copy_from_slice(&bytes[from..from + part.len()]);
            (at, rest) = (until, behind);
        }
        Ok(())
    }

    /// Whether what the source did not give may come yet, from it or from the copy's writer. An error at once is the
    /// source's answer; one after a while says that it is away.
    fn may_come_yet(&self, asked: Instant, begun: Instant) -> bool {
        let Role::Beside { patience } = self.role else { return false };
        let has_patience = patience.is_none_or(|patience| begun.elapsed() < patience);
        asked.elapsed() >= LOOK_AGAIN_INTERVAL && has_patience && !self.pace.is_closed()
    }

    /// Claims clusters from the first on, as far as they are neither here nor claimed; waits while the first is
    /// claimed. None when the first is here.
    fn claim(&self, clusters: Range<u64>) -> Option<Claim<'_>> {
        let is_claimed = |claims: &mut Claims| claims.contains(&clusters.start);
        let claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        let mut claims = self.fetched.wait_while(claims, is_claimed).unwrap_or_else(PoisonError::into_inner);
        if self.map.get(clusters.start).is_here() {
            return None;
        }
        let more = (clusters.start + 1..clusters.end)
            .take_while(|cluster| !self.map.get(*cluster).is_here() && !claims.contains(cluster));
        let clusters = clusters.start..clusters.start + 1 + more.count() as u64;
        claims.extend(clusters.clone());
        Some(Claim { shared: self, clusters })
    }

    /// Claims the next run of clusters that are absent and that nobody fetches, from a cluster on; none when there is
    /// none.
    pub(super) fn claim_absent(&self, from: u64, run_clusters: u64) -> Option<Claim<'_>> {
        let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        let is_open = |cluster: &u64| self.map.get(*cluster) == Cluster::Absent && !claims.contains(cluster);
        let first = (from..self.map.clusters()).find(is_open)?;
        let end = self.map.clusters().min(first + run_clusters);
        let more = (first + 1..end).take_while(is_open).count() as u64;
        let clusters = first..first + 1 + more;
        claims.extend(clusters.clone());
        Some(Claim { shared: self, clusters })
    }
}

/// Why a finished copy has not all.
fn left_out(range: &Range<u64>) -> String {
    let Range { start, end } = range;
    format!("bytes {start} to {end} of the base were not copied, since nothing needed them when the copy was finished")
}

/// Clusters that this thread fetches; given up when dropped.
pub(super) struct Claim<'a> {
    shared: &'a Shared,
    pub(super) clusters: Range<u64>,
}

impl Claim<'_> {
    /// Bytes of the source that they cover.
    pub(super) fn range(&self) -> Range<u64> {
        self.shared.map.range(self.clusters.start).start..self.shared.map.range(self.clusters.end - 1).end
    }

    /// Fetches them and keeps them; the bytes are right also when they could not be kept.
    pub(super) fn fetch(&self) -> Result<Vec<u8>, SourceError> {
        let shared = self.shared;
        let range = self.range();
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let Some(remote) = shared.remote() else {
            return Err(shared.error(left_out(&range)));
        };
        if shared.pace.is_closed() {
            return Err(shared.error("closed"));
        }
        remote.read(range.start, &mut bytes)?;
        shared.fetched_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if shared.is_writer() && !shared.is_broken() {
            self.keep(&bytes);
        }
        Ok(bytes)
    }

    fn keep(&self, bytes: &[u8]) {
        let shared = self.shared;
        for (cluster, bytes) in self.clusters.clone().zip(bytes.chunks(CLUSTER_BYTES as usize)) {
            let state = Cluster::with(bytes);
            if state != Cluster::Zero
                && let Err(error) = shared.data.write_all_at(bytes, cluster * CLUSTER_BYTES)
            {
                *shared.trouble() = Some(format!("{}: {error}", shared.data_name));
                return;
            }
            // After the data: whoever sees it here reads it from the file.
            shared.map.set(cluster, state);
        }
        if !shared.is_broken() {
            *shared.trouble() = None;
        }
    }

    /// Notes what they are without fetching them.
    pub(super) fn note(&self, state: Cluster) {
        for cluster in self.clusters.clone() {
            self.shared.map.set(cluster, state);
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut claims = self.shared.claims.lock().unwrap_or_else(PoisonError::into_inner);
        for cluster in self.clusters.clone() {
            claims.remove(&cluster);
        }
        drop(claims);
        self.shared.fetched.notify_all();
    }
}
