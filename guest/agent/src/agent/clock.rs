//! The guest's clock, which stands still while the guest is saved or paused.

use super::replies::{Result, failed, malformed};
use rustix::time::{ClockId, Timespec, clock_settime};

pub(crate) fn set(unix_ns: u64) -> Result<()> {
    let seconds = i64::try_from(unix_ns / 1_000_000_000).map_err(|_| malformed("no such time"))?;
    let nanoseconds = (unix_ns % 1_000_000_000) as i64;
    clock_settime(ClockId::Realtime, Timespec { tv_sec: seconds, tv_nsec: nanoseconds })
        .map_err(|error| failed("setting the clock", error))
}
