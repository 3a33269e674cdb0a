//! Waiting for what must happen.

use std::convert::Infallible;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// What has not happened by then never does, on a busy machine, too. The product waits longer for a few things that are
/// large, like a base backup, and no test has.
pub const WAIT_MAX: Duration = Duration::from_secs(180);

/// The first looks follow one another quickly, the later ones cost a busy machine little.
const LOOK_INTERVAL_MIN: Duration = Duration::from_millis(1);
const LOOK_INTERVAL_MAX: Duration = Duration::from_millis(20);

/// Waits until `holds`. Where an event tells (the end of a process, a line of a pipe), wait for that instead.
///
/// # Panics
///
/// After [`WAIT_MAX`].
#[track_caller]
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    until_within(WAIT_MAX, what, holds);
}

/// Waits until `holds`, as [`until`], where something is rightly slower, like a guest that boots on an emulated
/// processor.
///
/// # Panics
///
/// After `wait_max`.
#[track_caller]
pub fn until_within(wait_max: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    let mut interval = LOOK_INTERVAL_MIN;
    while !holds() {
        assert!(begun.elapsed() < wait_max, "waited in vain until {what}");
        std::thread::sleep(interval);
        interval = (interval * 2).min(LOOK_INTERVAL_MAX);
    }
}

/// Looks until what is seen `holds`, as [`until`], and gives that.
///
/// # Panics
///
/// After [`WAIT_MAX`], with what was seen last.
#[track_caller]
pub fn until_seen<T: Debug>(what: &str, mut look: impl FnMut() -> T, holds: impl Fn(&T) -> bool) -> T {
    let begun = Instant::now();
    let mut interval = LOOK_INTERVAL_MIN;
    loop {
        let seen = look();
        if holds(&seen) {
            return seen;
        }
        assert!(begun.elapsed() < WAIT_MAX, "waited in vain until {what}: {seen:?}");
        std::thread::sleep(interval);
        interval = (interval * 2).min(LOOK_INTERVAL_MAX);
    }
}

/// Waits until `holds`, as [`until`]; a single look that never ends is a failure as well.
///
/// # Panics
///
/// After [`WAIT_MAX`].
pub async fn until_async(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let looks = look_until(async || Ok::<_, Infallible>(holds().await));
    assert!(tokio::time::timeout(WAIT_MAX, looks).await.is_ok(), "waited in vain until {what}");
}

/// Looks until what is seen `holds`, as [`until_async`], and gives that.
///
/// # Errors
/// That of a look; what was seen last, after [`WAIT_MAX`].
pub async fn try_until_async<T: Debug>(
    what: &str,
    mut look: impl AsyncFnMut() -> anyhow::Result<T>,
    holds: impl Fn(&T) -> bool,
) -> anyhow::Result<T> {
    let mut last = None;
    let looks = look_until(async || {
        let seen = last.insert(look().await?);
        anyhow::Ok(holds(seen))
    });
    match tokio::time::timeout(WAIT_MAX, looks).await {
        Ok(ended) => ended?,
        Err(_) => bail!("waited in vain until {what}: {last:?}"),
    }
    last.context("the last look saw something")
}

/// Looks until `holds`, or without end.
///
/// # Errors
/// That of a look.
pub async fn look_until<E>(mut holds: impl AsyncFnMut() -> Result<bool, E>) -> Result<(), E> {
    let mut interval = LOOK_INTERVAL_MIN;
    while !holds().await? {
        tokio::time::sleep(interval).await;
        interval = (interval * 2).min(LOOK_INTERVAL_MAX);
    }
    Ok(())
}
