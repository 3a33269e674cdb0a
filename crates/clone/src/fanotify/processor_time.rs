//! How long a process has been on processors, asked of its own clock.
//!
//! Source: clock_getcpuclockid(3).

use std::time::Duration;

/// How long a process has executed since it began, on all processors; none when it is gone.
pub fn executed(process_id: u32) -> Option<Duration> {
    let process_id = libc::pid_t::try_from(process_id).ok()?;
    let mut clock = 0;
    // SAFETY: writes the one number that it is given.
    if unsafe { libc::clock_getcpuclockid(process_id, &raw mut clock) } != 0 {
        return None;
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the one value that it is given.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return None;
    }
    Some(Duration::new(time.tv_sec.try_into().ok()?, time.tv_nsec.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_process_goes_on_while_it_executes() {
        let before = executed(std::process::id()).expect("this process is there");
        while executed(std::process::id()).expect("this process is there") == before {}
        assert_eq!(executed(u32::MAX), None, "there is no such process");
    }
}
