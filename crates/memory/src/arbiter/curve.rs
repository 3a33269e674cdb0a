//! What a pool gains by being larger and loses by being smaller, in reads a second for each MiB.
//!
//! The gain is measured: ghost hits, or without them the reads there are, spread over what the pool could still become.
//! The loss is estimated from two sides, of which the higher counts. A gain that was measured, now or when the pool was
//! smaller, is the least that is lost below the size it was measured for, since pages are worth less the more of them
//! there are: each gain is a *lesson*. Below the working set it is the hits on it, spread over it. A pool whose clients
//! have gone has no hits and loses nothing, however full it is.

use crate::{Bytes, Observation};

use super::{MIB, Pace};

/// A server's counts of use age after ten seconds at the latest (`ROUNDS_TO_AGE` of the extension). With so many
/// accesses a second to each MiB of a pool, two to a page in that time, what is not in the working set is not come back
/// to.
const TELLING_ACCESSES_PER_MIB: f64 = 25.6;
/// A pool with fewer misses than this part of all accesses holds all that its load comes back to.
const MISSES_MAX: f64 = 0.01;

/// So many lessons are kept of one instance; of more, the ones about the smallest pools go.
const LESSONS_MAX: usize = 8;

/// What one MiB more is worth, and up to how much more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Gain {
    /// Reads a second saved by each MiB.
    pub(super) per_mib: f64,
    /// As far as it was measured.
    pub(super) larger_by_bytes: Bytes,
}

/// A gain that was measured: below this size, each MiB is worth at least so much.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Lesson {
    below_bytes: Bytes,
    per_mib: f64,
    /// What was asked of the pool at that time. When less is asked of it now, it is worth less.
    load: Load,
}

/// What clients ask of a pool.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Load {
    accesses_per_second: f64,
    /// What they come back to, where that is told.
    working_set_bytes: Option<Bytes>,
    pool_bytes: Bytes,
    /// The working set is all that its accesses come back to: they are many, and hardly any misses.
    is_known: bool,
}

impl Load {
    fn of(seen: &Observation) -> Load {
        let reads_per_second = rate(seen.reads_per_second);
        let accesses_per_second = hits_per_second(seen) + reads_per_second;
        // One that takes none of its pages for hot knows nothing of them.
        let tells_hot = seen.working_set_bytes.is_some_and(|bytes| bytes > 0);
        let is_known = tells_hot
            && accesses_per_second >= TELLING_ACCESSES_PER_MIB * mebibytes(seen.pool_bytes)
            && reads_per_second <= MISSES_MAX * accesses_per_second;
        let (working_set_bytes, pool_bytes) = (seen.working_set_bytes, seen.pool_bytes);
        Load { accesses_per_second, working_set_bytes, pool_bytes, is_known }
    }

    /// Which part of another load this one is, by accesses and by what they go to; at most 1. The other one gained by a
    /// pool of up to `needed_bytes`.
    fn share_of(&self, then: &Load, needed_bytes: Bytes) -> f64 {
        let accesses = if self.accesses_per_second >= then.accesses_per_second {
            1.0
        } else {
            self.accesses_per_second / then.accesses_per_second
        };
        let (Some(now_bytes), Some(then_bytes)) = (self.working_set_bytes, then.working_set_bytes) else {
            return accesses;
        };
        // A smaller pool has a smaller working set of the same load, and one of which pages were evicted before they
        // were used again, or that had just begun, told a smaller one; only much less is another load.
        let comparable_bytes = if self.is_known { needed_bytes } else { then_bytes }.min(self.pool_bytes);
        if now_bytes >= comparable_bytes / 2 {
            return accesses;
        }
        accesses * mebibytes(now_bytes) / mebibytes(comparable_bytes)
    }
}

/// A part of a pool: from the bottom of the part above it, or the pool's size, down to here.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Layer {
    pub(super) bottom_bytes: Bytes,
    /// Reads a second more for each MiB that is given of it; never less than that of the layer above.
    pub(super) loss_per_mib: f64,
}

/// What an instance gains by more memory; none when that is not worth it.
pub(super) fn gain(seen: &Observation, pace: &Pace) -> Option<Gain> {
    let measured = seen.ghost.iter().filter(|step| step.larger_by_bytes > 0);
    let gains: Vec<Gain> = measured
        .map(|step| Gain {
            per_mib: rate(step.hits_per_second) / mebibytes(step.larger_by_bytes),
            larger_by_bytes: step.larger_by_bytes,
        })
        .collect();
    if gains.is_empty() {
        let larger_by_bytes = seen.ceiling_bytes.saturating_sub(seen.pool_bytes);
        let gain = Gain { per_mib: rate(seen.reads_per_second) / mebibytes(larger_by_bytes), larger_by_bytes };
        return (larger_by_bytes > 0 && gain.per_mib >= pace.gain_per_mib_min).then_some(gain);
    }
    // The largest step that is about as good as the best one: a loop over a table gains nothing until all of it fits.
    let best = gains.iter().map(|gain| gain.per_mib).fold(0.0, f64::max);
    let worth = (best / 2.0).max(pace.gain_per_mib_min);
    gains.into_iter().filter(|gain| gain.per_mib >= worth).max_by_key(|gain| gain.larger_by_bytes)
}

/// The layers of a pool of `size_bytes`, from the top down to `floor_bytes`.
pub(super) fn layers(seen: &Observation, lessons: &[Lesson], size_bytes: Bytes, floor_bytes: Bytes) -> Vec<Layer> {
    let hot_bytes = seen.working_set_bytes.unwrap_or(seen.pool_bytes).min(seen.pool_bytes);
    let hot_per_mib = hits_per_second(seen) / mebibytes(hot_bytes);
    let load = Load::of(seen);

    let borders = lessons.iter().map(|lesson| lesson.below_bytes).chain([hot_bytes]);
    let mut tops: Vec<Bytes> = borders.filter(|border| *border > floor_bytes && *border < size_bytes).collect();
    tops.push(size_bytes);
    tops.sort_unstable_by(|one, other| other.cmp(one));
    tops.dedup();

    let mut loss_per_mib: f64 = 0.0;
    let mut layers = Vec::with_capacity(tops.len());
    for (at, top) in tops.iter().enumerate() {
        if *top <= hot_bytes {
            loss_per_mib = loss_per_mib.max(hot_per_mib);
        }
        for lesson in lessons.iter().filter(|lesson| *top <= lesson.below_bytes) {
            loss_per_mib = loss_per_mib.max(lesson.worth(&load));
        }
        layers.push(Layer { bottom_bytes: tops.get(at + 1).copied().unwrap_or(floor_bytes), loss_per_mib });
    }
    layers
}

/// Takes in what an observation says about the worth of memory at its size.
pub(super) fn learn(lessons: &mut Vec<Lesson>, seen: &Observation, pace: &Pace) {
    let gain = gain(seen, pace);
    let per_mib = gain.map_or(0.0, |gain| gain.per_mib);
    let load = Load::of(seen);
    for lesson in lessons.iter_mut().filter(|lesson| lesson.worth(&load) > per_mib) {
        // Just now memory above this size is worth less than it once was.
        lesson.below_bytes = lesson.below_bytes.min(seen.pool_bytes);
    }
    if let Some(gain) = gain {
        let below_bytes = seen.pool_bytes.saturating_add(gain.larger_by_bytes);
        lessons.push(Lesson { below_bytes, per_mib, load });
        lessons.retain(|lesson| {
            lesson.below_bytes > below_bytes
                || lesson.worth(&load) > per_mib
                || (lesson.below_bytes == below_bytes && lesson.per_mib == per_mib)
        });
    }
    lessons.retain(|lesson| lesson.below_bytes > seen.floor_bytes);
    let order = |one: &Lesson, other: &Lesson| {
        one.below_bytes.cmp(&other.below_bytes).then(other.per_mib.total_cmp(&one.per_mib))
    };
    lessons.sort_unstable_by(order);
    lessons.dedup_by_key(|lesson| lesson.below_bytes);
    let too_many = lessons.len().saturating_sub(LESSONS_MAX);
    lessons.drain(..too_many);
}

impl Lesson {
    fn worth(&self, now: &Load) -> f64 {
        self.per_mib * now.share_of(&self.load, self.below_bytes)
    }
}

/// Hits a second, as they are told or as the share of hits and the reads make them.
fn hits_per_second(seen: &Observation) -> f64 {
    let told = rate(seen.hits_per_second);
    if told > 0.0 {
        return told;
    }
    let share = seen.hit_ratio.filter(|share| (0.0..1.0).contains(share)).unwrap_or(0.0);
    rate(seen.reads_per_second) * share / (1.0 - share)
}

/// A rate that can be calculated with, whatever was told.
fn rate(told: f64) -> f64 {
    const RATE_MAX: f64 = 1e12;
    if told.is_nan() { 0.0 } else { told.clamp(0.0, RATE_MAX) }
}

/// Never 0.
fn mebibytes(bytes: Bytes) -> f64 {
    bytes.max(1) as f64 / MIB as f64
}
