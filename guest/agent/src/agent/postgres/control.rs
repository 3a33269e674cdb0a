//! The server started, stopped, and told to read its configuration.

use super::log::last_lines;
use super::{DATA, LOG, USER, needed_programs, status};
use crate::agent::execute::timeout;
use crate::agent::process::{Program, run};
use crate::agent::replies::{Reporter, Result, failed, failure};
use crate::protocol::{FailureKind, PostgresState, StopMode};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::read_to_string;
use std::time::{Duration, Instant};

/// The control group that the guest's first process makes and that the server runs in.
pub(super) const GROUP: &str = "/sys/fs/cgroup/postgresql";
/// How soon a change of state is seen.
const STATE_PAUSE: Duration = Duration::from_millis(50);
/// How often a host that waits is told that it still takes.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// How long pg_ctl may take when it does not wait.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the guest waits for the server when it is switched off, before it stops it without a checkpoint.
const SWITCH_OFF_TIMEOUT_MS: u64 = 60_000;

/// Starts the server and waits until it takes connections.
pub(super) fn start(timeout_ms: u64, reporter: &Reporter<'_>) -> Result<()> {
    let limit = timeout(timeout_ms)?;
    match status().state {
        PostgresState::Absent => return Err(failure(FailureKind::Failed, format!("there is no cluster in {DATA}"))),
        PostgresState::Stopped => launch()?,
        PostgresState::Starting | PostgresState::Primary | PostgresState::Standby => {}
        PostgresState::Stopping => return Err(failure(FailureKind::Failed, "the server is being stopped")),
    }
    wait(limit, "the server is starting", Some(reporter), |state| match state {
        state if state.is_ready() => Some(Ok(())),
        PostgresState::Starting => None,
        _ => Some(Err(failed("the server did not start", last_lines()))),
    })
}

/// `pg_ctl`, not waiting. The shell joins the control group first, or ends, so all that the server starts is in it.
fn launch() -> Result<()> {
    let programs = needed_programs()?;
    let script = "echo 0 >\"$1/cgroup.procs\" || exit; shift; \
                  exec setpriv --reuid=\"$1\" --regid=\"$1\" --init-groups \"${@:2}\"";
    let program = Program::new(&[
        "bash",
        "-c",
        script,
        "launch",
        GROUP,
        USER,
        &programs.path("pg_ctl"),
        "start",
        "--no-wait",
        "--silent",
        "--pgdata",
        DATA,
        "--log",
        LOG,
    ]);
    control(&program)?;
    // The server writes its file a moment after pg_ctl has gone; before that it would look as if it had failed.
    let deadline = Instant::now() + CONTROL_TIMEOUT;
    while status().state == PostgresState::Stopped && server_is_in_group() && Instant::now() < deadline {
        std::thread::sleep(STATE_PAUSE);
    }
    Ok(())
}

fn server_is_in_group() -> bool {
    read_to_string(format!("{GROUP}/cgroup.procs")).is_ok_and(|processes| !processes.trim().is_empty())
}

/// Stops the server and waits until it is gone.
pub(super) fn stop(mode: StopMode, timeout_ms: u64, reporter: &Reporter<'_>) -> Result<()> {
    stop_and(mode, timeout_ms, Some(reporter))
}

fn stop_and(mode: StopMode, timeout_ms: u64, reporter: Option<&Reporter<'_>>) -> Result<()> {
    let limit = timeout(timeout_ms)?;
    if matches!(status().state, PostgresState::Absent | PostgresState::Stopped) {
        return Ok(());
    }
    let mode = match mode {
        StopMode::Smart => "smart",
        StopMode::Fast => "fast",
        StopMode::Immediate => "immediate",
    };
    let programs = needed_programs()?;
    let program =
        Program::new(&[&programs.path("pg_ctl"), "stop", "--no-wait", "--silent", "--mode", mode, "--pgdata", DATA]);
    control(&program.run_by(USER)?)?;
    wait(limit, "the server is stopping", reporter, |state| match state {
        PostgresState::Absent | PostgresState::Stopped => Some(Ok(())),
        _ => None,
    })
}

/// Stops the server because the guest is switched off: cleanly when it does so in time.
pub(crate) fn stop_for_good() {
    if let Err(failure) = stop_and(StopMode::Fast, SWITCH_OFF_TIMEOUT_MS, None) {
        eprintln!("onecopy-guest: {failure}");
        if let Err(failure) = stop_and(StopMode::Immediate, SWITCH_OFF_TIMEOUT_MS, None) {
            eprintln!("onecopy-guest: {failure}");
        }
    }
}

/// Lets the server read its configuration again.
pub(super) fn reload() -> Result<()> {
    let pid = status().pid.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| failure(FailureKind::Failed, "no server runs"))?;
    kill_process(pid, Signal::HUP).map_err(|error| failed("telling the server", error))
}

fn control(program: &Program) -> Result<()> {
    let ended = run(program, CONTROL_TIMEOUT)?;
    if ended.status == Some(0) {
        return Ok(());
    }
    Err(failed("pg_ctl", format!("{}{}\n{}", ended.stdout.to_text(), ended.stderr.to_text(), last_lines())))
}

fn wait(
    limit: Duration,
    what: &str,
    reporter: Option<&Reporter<'_>>,
    mut judge: impl FnMut(PostgresState) -> Option<Result<()>>,
) -> Result<()> {
    let begin = Instant::now();
    let mut reported = begin;
    loop {
        if let Some(result) = judge(status().state) {
            return result;
        }
        if begin.elapsed() >= limit {
            let message = format!("{what}, but not done after {} ms\n{}", limit.as_millis(), last_lines());
            return Err(failure(FailureKind::Timeout, message));
        }
        if reported.elapsed() >= REPORT_INTERVAL {
            reported = Instant::now();
            if let Some(reporter) = reporter {
                reporter.say(&format!("{what}: {} s so far", begin.elapsed().as_secs()));
            }
        }
        std::thread::sleep(STATE_PAUSE);
    }
}
