//! Programs that the host asks for.

use super::process::{Program, run};
use super::replies::{Reporter, Result, malformed};
use crate::protocol::{Execute, Executed};
use std::time::Duration;

/// A day: longer than any command that is waited for.
pub(crate) const TIMEOUT_MS_MAX: u64 = 24 * 60 * 60 * 1000;

/// That time, when it is one.
pub(crate) fn timeout(timeout_ms: u64) -> Result<Duration> {
    if !(1..=TIMEOUT_MS_MAX).contains(&timeout_ms) {
        return Err(malformed(format!("timeout_ms is {timeout_ms}: from 1 to {TIMEOUT_MS_MAX} can be had")));
    }
    Ok(Duration::from_millis(timeout_ms))
}

pub(crate) fn execute(execute: &Execute, reporter: &Reporter<'_>) -> Result<Executed> {
    let timeout = timeout(execute.timeout_ms)?;
    let mut program = Program::of(execute.argv.clone()).reading(execute.stdin.0.clone()).until(reporter.cancelled());
    if let Some(user) = &execute.user {
        program = program.run_by(user)?;
    }
    run(&program, timeout)
}
