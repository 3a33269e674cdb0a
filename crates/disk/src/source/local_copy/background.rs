//! The background of a copy: what nobody reads is fetched in order, all is made durable each second, and at the end all
//! is read back.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::Shared;
use super::fill::Claim;
use super::header::CLUSTER_BYTES;
use super::map::Cluster;

/// Steps under way at one time: with a megabyte each they fill a link of 1 Gbit/s over 60 ms.
const THREADS: usize = 8;

/// How often what came is made durable: at most so much is copied again after a crash. A test says itself when.
const PERSIST_INTERVAL: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 1 });

/// After a failure of the source or of the copy's file.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The source is asked which of so many bytes are zeros.
const SURVEY_BYTES: u64 = 1 << 30;

/// Starts the threads; they end by themselves when the copy is whole, or when it is closed.
pub(super) fn start(shared: &Arc<Shared>, is_copying: bool) -> io::Result<Vec<JoinHandle<()>>> {
    let persisting = Arc::clone(shared);
    let mut threads = vec![thread::Builder::new().name("copy-sync".into()).spawn(move || persist(&persisting))?];
    if is_copying {
        let copying = Arc::clone(shared);
        match thread::Builder::new().name("copy".into()).spawn(move || copy(&copying)) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                shared.pace.close();
                return Err(error);
            }
        }
    }
    Ok(threads)
}

/// Makes durable what came, and tells how fast it came.
fn persist(shared: &Shared) {
    let (mut before, mut at) = (0, Instant::now());
    while shared.pace.rest(PERSIST_INTERVAL) && !shared.map.is_whole() {
        shared.persist();
        let (now, fetched) = (Instant::now(), shared.fetched_bytes.load(Ordering::Relaxed));
        let rate = (fetched - before) as f64 / (now - at).as_secs_f64();
        // The last four seconds or so.
        let smoothed = (3 * shared.rate_bytes_per_second.load(Ordering::Relaxed) + rate as u64) / 4;
        shared.rate_bytes_per_second.store(smoothed, Ordering::Relaxed);
        (before, at) = (fetched, now);
    }
    shared.rate_bytes_per_second.store(0, Ordering::Relaxed);
}

/// Copies until all is here and right.
fn copy(shared: &Shared) {
    loop {
        let cursor = Mutex::new(Cursor::default());
        thread::scope(|scope| {
            for number in 1..THREADS {
                let cursor = &cursor;
                // With fewer threads it takes longer, no more.
                let thread = thread::Builder::new().name("copy-fetch".into());
                if let Err(error) = thread.spawn_scoped(scope, move || fetch_all(shared, cursor, false)) {
                    debug!(%error, number, "one thread fewer copies");
                }
            }
            fetch_all(shared, &cursor, true);
        });
        if shared.pace.is_closed() || shared.is_broken() {
            return;
        }
        if shared.map.has_absent() {
            // Readers fetch the last ones now, or failed to.
            shared.pace.rest(Duration::from_millis(50));
            continue;
        }
        shared.persist();
        match wrong_clusters(shared) {
            Ok(_) if shared.pace.is_closed() || shared.is_broken() => return,
            Ok(0) => match shared.map.finish(|| shared.data.sync_data()) {
                Ok(false) => {}
                Ok(true) => {
                    info!(file = shared.data_name, "the copy of the base is whole");
                    return shared.leave_source();
                }
                Err(error) => *shared.trouble() = Some(format!("{}: {error}", shared.data_name)),
            },
            Ok(count) => warn!(file = shared.data_name, count, "parts of the copy are not what came; they come again"),
            Err(error) => *shared.trouble() = Some(format!("{}: {error}", shared.data_name)),
        }
        if !shared.pace.rest(RETRY_PAUSE) {
            return;
        }
    }
}

/// How far the background is.
#[derive(Default)]
struct Cursor {
    cluster: u64,
    surveyed_bytes: u64,
}

/// What a thread does next.
enum Step<'a> {
    Survey(u64),
    Fetch(Claim<'a>),
}

fn lock(cursor: &Mutex<Cursor>) -> MutexGuard<'_, Cursor> {
    cursor.lock().unwrap_or_else(PoisonError::into_inner)
}

fn next<'a>(shared: &'a Shared, cursor: &Mutex<Cursor>) -> Option<Step<'a>> {
    let mut cursor = lock(cursor);
    let claim = shared.claim_absent(cursor.cluster, shared.pace.run_clusters())?;
    let at = claim.range().start;
    if at >= cursor.surveyed_bytes {
        let begin = at / SURVEY_BYTES * SURVEY_BYTES;
        cursor.surveyed_bytes = begin + SURVEY_BYTES;
        return Some(Step::Survey(begin));
    }
    cursor.cluster = claim.clusters.end;
    Some(Step::Fetch(claim))
}

/// One thread of the background.
fn fetch_all(shared: &Shared, cursor: &Mutex<Cursor>, is_first: bool) {
    while shared.pace.begin_step(is_first) && !shared.is_broken() {
        match next(shared, cursor) {
            None => return,
            Some(Step::Survey(begin)) => survey(shared, begin),
            Some(Step::Fetch(claim)) => {
                if fetch(shared, &claim) {
                    continue;
                }
                // It is still to be done, by whoever comes by.
                let mut cursor = lock(cursor);
                cursor.cluster = cursor.cluster.min(claim.clusters.start);
                drop(cursor);
                drop(claim);
                if !shared.pace.rest(RETRY_PAUSE) {
                    return;
                }
            }
        }
    }
}

/// Fetches what was claimed, unless nothing needs it; says whether it needs to be done no more.
fn fetch(shared: &Shared, claim: &Claim<'_>) -> bool {
    let needed = shared.needed.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if needed.is_some_and(|needed| !needed(claim.range())) {
        claim.note(Cluster::Unneeded);
        return true;
    }
    let range = claim.range();
    shared.pace.book(range.end - range.start);
    match claim.fetch() {
        Ok(_) => shared.map.get(claim.clusters.end - 1) != Cluster::Absent,
        Err(error) => {
            if !shared.pace.is_closed() {
                *shared.trouble() = Some(error.to_string());
                debug!(%error, "a step of a copy failed");
            }
            false
        }
    }
}

/// Notes which clusters of a range the source knows to be zeros: they need not come over.
fn survey(shared: &Shared, begin: u64) {
    let Some(remote) = shared.remote() else { return };
    let size_bytes = shared.map.size_bytes();
    let extents = match remote.extents(begin..(begin + SURVEY_BYTES).min(size_bytes)) {
        Ok(extents) => extents,
        Err(error) => return debug!(%error, "the source cannot tell what is zero"),
    };
    for extent in extents.into_iter().filter(|extent| extent.is_zero) {
        // Only whole clusters; the last one is whole at the source's end.
        let end = if extent.range.end >= size_bytes { shared.map.clusters() } else { extent.range.end / CLUSTER_BYTES };
        for cluster in extent.range.start.div_ceil(CLUSTER_BYTES)..end {
            if shared.map.get(cluster) == Cluster::Absent {
                shared.map.set(cluster, Cluster::Zero);
            }
        }
    }
}

/// Reads the copy back and forgets clusters that are not what came; says how many.
fn wrong_clusters(shared: &Shared) -> io::Result<u64> {
    let mut bytes = vec![0; CLUSTER_BYTES as usize];
    let mut count = 0;
    for cluster in 0..shared.map.clusters() {
        if shared.pace.is_closed() {
            break;
        }
        let state = shared.map.get(cluster);
        if !matches!(state, Cluster::Here(_)) {
            continue;
        }
        let range = shared.map.range(cluster);
        let bytes = &mut bytes[..(range.end - range.start) as usize];
        shared.data.read_exact_at(bytes, range.start)?;
        if Cluster::with(bytes) != state {
            shared.map.set(cluster, Cluster::Absent);
            count += 1;
        }
    }
    Ok(count)
}
