//! The process that serves a machine's disk: started, taken over, started again when it dies.
//!
//! ```text
//!   start ──> Serving ──died──> Resting ──back-off over──> Beginning ──listens──> Serving
//!                                  ^                           |
//!                                  └── died, or not started ───┘
//! ```

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use onecopy_disk::vhost_user::QUEUES_MAX;
use onecopy_postgres::ServiceUser;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Child;

use crate::MachineHome;

/// The subcommand of this program that serves a disk.
const DISK_SERVER_COMMAND: &str = "disk-server";

/// The kernel's way to the file that a process runs; see proc_pid_exe(5).
const OWN_PROGRAM: &str = "/proc/self/exe";

/// How long it may take until the machine can connect: it recovers first.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long it may take to write back what its files have not got yet.
pub(crate) const DISK_CLOSE_TIMEOUT: Duration = Duration::from_secs(60);

/// A killed process is gone within this.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How often one is looked at that is not our child.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// Delay before the first restart; it doubles with each one that does not last.
const BACK_OFF_MIN: Duration = Duration::from_millis(50);

/// The longest delay: the guest's requests wait meanwhile.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

/// One that has served for so long was well.
const HEALTHY_PERIOD: Duration = Duration::from_secs(30);

/// The process that serves a machine's disk.
#[derive(Debug)]
pub(super) struct DiskServer {
    home: MachineHome,
    user: ServiceUser,
    process: Option<Process>,
    phase: Phase,
    begun: Instant,
    back_off: Duration,
}

/// What is waited for; the module's documentation draws it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Its death.
    Serving,
    /// The end of the back-off.
    Resting { until: Instant },
    /// That the machine can connect.
    Beginning,
}

/// What has happened to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DiskEvent {
    /// It has died, in this way; it will be started again.
    Died(String),
    /// It was started again, and the machine can connect.
    Serves,
    /// It was not, for this reason; it is tried again.
    Failed(String),
}

#[derive(Debug)]
enum Process {
    Child(Child),
    /// Of a keeper that has died.
    Adopted(u32),
}

impl DiskServer {
    /// Takes over the one that runs, or starts one, and waits until the machine can connect.
    pub(super) async fn start(home: &MachineHome, user: &ServiceUser) -> Result<DiskServer, String> {
        let process = disk_server_of(home).map(Process::Adopted);
        let (home, user, begun) = (home.clone(), user.clone(), Instant::now());
        let mut server = DiskServer { home, user, process, phase: Phase::Serving, begun, back_off: BACK_OFF_MIN };
        if server.process.is_some() {
            match server.wait_ready().await {
                Ok(()) => return Ok(server),
                // It died before it listened, or was about to end: then one more.
                Err(reason) if server.process.is_none() => tracing::warn!(reason, "the disk server of before is gone"),
                Err(reason) => return Err(reason),
            }
        }
        server.begun = Instant::now();
        server.spawn()?;
        match server.wait_ready().await {
            Ok(()) => Ok(server),
            Err(reason) => {
                server.close().await;
                Err(reason)
            }
        }
    }

    /// The socket that the machine connects to.
    pub(super) fn socket(home: &MachineHome) -> PathBuf {
        home.in_run("vhost.sock")
    }

    /// Its process, while it runs.
    pub(super) fn process_id(&self) -> Option<u32> {
        match &self.process {
            Some(Process::Child(child)) => child.id(),
            Some(Process::Adopted(number)) => Some(*number),
            None => None,
        }
    }

    /// Waits for what happens to it next, and starts it again when it has died. May be given up at any await and asked
    /// again: nobody who has something else to do has to wait for a disk that does not come.
    pub(super) async fn next(&mut self) -> DiskEvent {
        loop {
            match self.phase {
                Phase::Serving => {
                    let reason = self.wait_died().await;
                    self.rest();
                    return DiskEvent::Died(reason);
                }
                Phase::Resting { until } => {
                    tokio::time::sleep_until(until.into()).await;
                    self.begun = Instant::now();
                    self.phase = Phase::Beginning;
                    if let Err(reason) = self.spawn() {
                        self.rest();
                        return DiskEvent::Failed(reason);
                    }
                }
                Phase::Beginning => match self.wait_ready().await {
                    Ok(()) => {
                        self.phase = Phase::Serving;
                        return DiskEvent::Serves;
                    }
                    Err(reason) => {
                        // One that only takes long is waited for.
                        match self.process {
                            Some(_) => self.begun = Instant::now(),
                            None => self.rest(),
                        }
                        return DiskEvent::Failed(reason);
                    }
                },
            }
        }
    }

    /// Waits a little before the next start, longer where the last one has not lasted.
    fn rest(&mut self) {
        if self.begun.elapsed() >= HEALTHY_PERIOD && self.phase == Phase::Serving {
            self.back_off = BACK_OFF_MIN;
        }
        self.phase = Phase::Resting { until: Instant::now() + self.back_off };
        self.back_off = (self.back_off * 2).min(BACK_OFF_MAX);
    }

    async fn wait_died(&mut self) -> String {
        match &mut self.process {
            Some(Process::Child(child)) => {
                let ended = child.wait().await;
                self.process = None;
                ended.map_or_else(|error| error.to_string(), |status| status.to_string())
            }
            Some(Process::Adopted(number)) => {
                while serves(*number, &self.home) {
                    tokio::time::sleep(WATCH_INTERVAL).await;
                }
                self.process = None;
                "it is gone".to_owned()
            }
            None => "it does not run".to_owned(),
        }
    }

    /// Ends it in peace; what it does not write back in time is written back when the disk is opened again.
    pub(super) async fn close(mut self) {
        let Some(number) = self.process_id() else { return };
        send(number, Signal::TERM);
        if tokio::time::timeout(DISK_CLOSE_TIMEOUT, self.wait_died()).await.is_err() {
            tracing::warn!(process = number, "the disk server does not end and is killed");
            send(number, Signal::KILL);
            let _ = tokio::time::timeout(KILL_TIMEOUT, self.wait_died()).await;
        }
        let _ = fs::remove_file(self.home.disk_process_file());
    }

    fn spawn(&mut self) -> Result<(), String> {
        let socket = DiskServer::socket(&self.home);
        // Its being there tells that it can be connected to.
        let _ = fs::remove_file(&socket);
        let log_path = self.home.disk_log();
        let log = fs::OpenOptions::new().create(true).append(true).mode(0o644).open(&log_path);
        let log = log.map_err(|error| format!("{}: {error}", log_path.display()))?;
        let mut command = self.user.command(OWN_PROGRAM);
        command.envs(std::env::vars_os().filter(|(name, _)| name == "RUST_LOG"));
        command.args(arguments(&self.home));
        command.stdout(Stdio::null()).stderr(log);
        let child = tokio::process::Command::from(command).spawn().map_err(|error| error.to_string())?;
        let number = child.id().unwrap_or_default();
        self.process = Some(Process::Child(child));
        fs::write(self.home.disk_process_file(), format!("{number}\n")).map_err(|error| error.to_string())
    }

    async fn wait_ready(&mut self) -> Result<(), String> {
        let socket = DiskServer::socket(&self.home);
        while !socket.exists() {
            let status = match &mut self.process {
                Some(Process::Child(child)) => child.try_wait().ok().flatten().map(|status| status.to_string()),
                Some(Process::Adopted(number)) if serves(*number, &self.home) => None,
                Some(Process::Adopted(_)) | None => Some("it is gone".to_owned()),
            };
            if let Some(status) = status {
                self.process = None;
                return Err(format!("the disk server ended ({status}): {}", self.last_words()));
            }
            if self.begun.elapsed() >= READY_TIMEOUT {
                return Err(format!("the disk server does not listen within {} s", READY_TIMEOUT.as_secs()));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        onecopy_hypervisor::Console::new(self.home.disk_log()).tail(5)
    }
}

/// What it is told. It offers as many queues as a back end can have: QEMU takes those that it was started with, and
/// goes on with them when the server is another one and `machine.toml` says something else by then.
pub(super) fn arguments(home: &MachineHome) -> Vec<OsString> {
    let (socket, queues) = (DiskServer::socket(home), QUEUES_MAX.to_string());
    let options = ["--vhost".into(), socket.into(), "--queues".into(), queues.into()];
    [DISK_SERVER_COMMAND.into(), home.disk().into()].into_iter().chain(options).collect()
}

/// The process that serves a machine's disk, whoever has started it. All processes are looked at: a keeper can die
/// before it has noted whom it started.
pub(crate) fn disk_server_of(home: &MachineHome) -> Option<u32> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let mut numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.find(|number| serves(*number, home))
}

/// Ends the disk server of a machine that nobody looks after, first by `signal`. Blocks until it is gone, or cannot be
/// ended.
pub(crate) fn end_left_disk_server(home: &MachineHome, signal: Signal) {
    for (signal, patience) in [(signal, DISK_CLOSE_TIMEOUT), (Signal::KILL, KILL_TIMEOUT)] {
        let Some(number) = disk_server_of(home) else { return };
        send(number, signal);
        let begun = Instant::now();
        while serves(number, home) && begun.elapsed() < patience {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// Whether a living process has this disk on its command line: numbers are given again.
fn serves(process_id: u32, home: &MachineHome) -> bool {
    // A dead one whose parent has not looked yet has no command line.
    let Ok(arguments) = fs::read(format!("/proc/{process_id}/cmdline")) else { return false };
    let disk = home.disk();
    let arguments = String::from_utf8_lossy(&arguments);
    let mut arguments = arguments.split('\0');
    arguments.any(|argument| argument == DISK_SERVER_COMMAND) && arguments.any(|argument| disk.as_os_str() == argument)
}

fn send(process_id: u32, signal: Signal) {
    if let Some(process) = i32::try_from(process_id).ok().and_then(Pid::from_raw) {
        // One that has ended meanwhile is what is wanted.
        let _ = kill_process(process, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MachineHome;

    #[tokio::test]
    async fn a_wait_for_the_disk_may_be_given_up_and_goes_on_where_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("web");
        std::fs::create_dir(&root).unwrap();
        let (home, user) = (MachineHome::at(&root).unwrap(), ServiceUser::resolve(None).unwrap());
        let (process, phase, begun, back_off) = (None, Phase::Serving, Instant::now(), BACK_OFF_MIN);
        let mut server = DiskServer { home, user, process, phase, begun, back_off };
        assert!(matches!(server.next().await, DiskEvent::Died(_)));
        assert!(matches!(server.phase, Phase::Resting { .. }));
        let long = Phase::Resting { until: Instant::now() + READY_TIMEOUT };
        server.phase = long;
        assert!(tokio::time::timeout(LOOK_INTERVAL, server.next()).await.is_err());
        assert_eq!(server.phase, long, "who gives up does not make it take longer");
        server.phase = Phase::Resting { until: Instant::now() };
        // This test's own program serves no disk.
        assert!(matches!(server.next().await, DiskEvent::Failed(_)));
        assert!(matches!(server.phase, Phase::Resting { .. }));
        assert_eq!(server.back_off, 4 * BACK_OFF_MIN, "each try that fails makes the next one wait longer");
        server.close().await;
    }
}
