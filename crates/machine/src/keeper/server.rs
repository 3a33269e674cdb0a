//! A process that serves a machine's disk or memory, or passes its frames: started, taken over, started again when it
//! dies.
//!
//! ```text
//!   start ──> Serving ──died──> Resting ──back-off over──> Beginning ──listens──> Serving
//!                                  ^                           |
//!                                  └── died, or not started ───┘
//! ```

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use tokio::process::Child;

use super::launch::Launch;
use super::memory_descriptors::descriptors;
use super::memory_file::MemoryOpen;
use super::processes::{
    CLOSE_TIMEOUT, KILL_TIMEOUT, LOOK_INTERVAL, READY_TIMEOUT, process_of, servers_of, serves, signal_if_it_serves,
};
use super::role::Role;
use crate::MachineHome;

/// How often one is looked at that is not our child.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// Delay before the first restart; it doubles with each one that does not last.
const BACK_OFF_MIN: Duration = Duration::from_millis(50);

/// The longest delay: the guest's requests wait meanwhile.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

/// One that has served for so long was well.
const HEALTHY_PERIOD: Duration = Duration::from_secs(30);

/// The process that serves a machine's disk or memory, or passes its frames.
#[derive(Debug)]
pub(super) struct Server {
    home: MachineHome,
    launch: Launch,
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
pub(super) enum ServerEvent {
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

impl Process {
    fn number(&self) -> Option<u32> {
        match self {
            Process::Child(child) => child.id(),
            Process::Adopted(number) => Some(*number),
        }
    }
}

impl Server {
    /// Takes over the one that runs, or starts one, and waits until it serves.
    pub(super) async fn start(home: &MachineHome, launch: Launch) -> Result<Server, String> {
        let role = launch.role();
        let found = servers_of(role, home).map_err(|error| format!("it is not known whether one runs: {error}"))?;
        if found.len() > 1 {
            return Err(format!("there is more than one {role}: the processes {found:?}"));
        }
        let process = found.first().copied().map(Process::Adopted);
        let (home, begun) = (home.clone(), Instant::now());
        let mut server = Server { home, launch, process, phase: Phase::Serving, begun, back_off: BACK_OFF_MIN };
        if server.process.is_some() {
            match server.wait_ready().await {
                Ok(()) => return Ok(server),
                // It died before it listened, or was about to end: then one more.
                Err(reason) if server.process.is_none() => tracing::warn!(reason, "the {role} of before is gone"),
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

    /// The same of a memory that this process opens now: it lets go of what a server needs until that is closed.
    pub(super) fn once_closed(mut self, open: &MemoryOpen) -> Server {
        self.launch = Launch::OnceClosed(Arc::clone(open));
        self
    }

    /// Whether no other one can be started when it dies.
    pub(super) fn is_last(&self) -> bool {
        matches!(self.launch, Launch::OnceClosed(_))
    }

    /// Waits until its memory is closed here, and takes what a server needs from this one.
    async fn take_back(home: MachineHome, open: MemoryOpen) -> Launch {
        loop {
            drop(open.write().await);
            match descriptors(&home).await {
                Ok(descriptors) => return Launch::Memory(descriptors),
                Err(reason) => tracing::error!(reason, "a memory server that dies is not started again"),
            }
            tokio::time::sleep(HEALTHY_PERIOD).await;
        }
    }

    /// The one of a machine that is there, which waits for it: it serves once [`Server::next`] says so.
    pub(super) fn resume(home: &MachineHome, launch: Launch) -> Server {
        let begun = Instant::now();
        let phase = Phase::Resting { until: begun + BACK_OFF_MIN };
        Server { home: home.clone(), launch, process: None, phase, begun, back_off: BACK_OFF_MIN }
    }

    /// The process of a disk that somebody else has started. An error: it is not known, or there is more than one.
    fn found(&self) -> Result<Option<Process>, String> {
        match (self.launch.role(), servers_of(self.launch.role(), &self.home)) {
            // Of the others one may be dead that is not gone.
            (Role::Memory | Role::Network, _) => Ok(None),
            (role, Ok(found)) if found.len() > 1 => Err(format!("there is more than one {role}: {found:?}")),
            (_, Ok(found)) => Ok(found.first().copied().map(Process::Adopted)),
            (_, Err(error)) => Err(format!("it is not known whether one runs: {error}")),
        }
    }

    /// Its process, while it runs.
    pub(super) fn process_id(&self) -> Option<u32> {
        self.process.as_ref().and_then(Process::number)
    }

    /// Waits for what happens to it next, and starts it again when it has died. May be given up at any await and asked
    /// again: nobody who has something else to do has to wait for a disk that does not come.
    pub(super) async fn next(&mut self) -> ServerEvent {
        loop {
            match self.phase {
                Phase::Serving => {
                    let reason = match &self.launch {
                        Launch::OnceClosed(open) => {
                            let taken = Server::take_back(self.home.clone(), Arc::clone(open));
                            tokio::select! {
                                reason = self.wait_died() => reason,
                                launch = taken => {
                                    self.launch = launch;
                                    continue;
                                }
                            }
                        }
                        _ => self.wait_died().await,
                    };
                    self.rest();
                    return ServerEvent::Died(reason);
                }
                Phase::Resting { until } => {
                    tokio::time::sleep_until(until.into()).await;
                    self.begun = Instant::now();
                    self.phase = Phase::Beginning;
                    let begun = self.found().and_then(|found| match found {
                        Some(process) => {
                            self.process = Some(process);
                            Ok(())
                        }
                        None => self.spawn(),
                    });
                    if let Err(reason) = begun {
                        self.rest();
                        return ServerEvent::Failed(reason);
                    }
                }
                Phase::Beginning => match self.wait_ready().await {
                    Ok(()) => {
                        self.phase = Phase::Serving;
                        return ServerEvent::Serves;
                    }
                    Err(reason) => {
                        // One that only takes long is waited for.
                        match self.process {
                            Some(_) => self.begun = Instant::now(),
                            None => self.rest(),
                        }
                        return ServerEvent::Failed(reason);
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
            Some(Process::Child(child)) if self.launch.role() != Role::Memory => {
                let ended = child.wait().await;
                self.process = None;
                ended.map_or_else(|error| error.to_string(), |status| status.to_string())
            }
            // Of a memory server a thread may wait for the file, and that for the next server: it is dead before it is
            // gone.
            Some(process) => {
                let Some(number) = process.number() else { return "it is gone".to_owned() };
                while serves(number, self.launch.role(), &self.home) {
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
        self.signal(Signal::TERM);
        if tokio::time::timeout(CLOSE_TIMEOUT, self.wait_died()).await.is_err() {
            tracing::warn!(process = number, "the {} does not end and is killed", self.launch.role());
            self.signal(Signal::KILL);
            let _ = tokio::time::timeout(KILL_TIMEOUT, self.wait_died()).await;
        }
        let _ = fs::remove_file(self.launch.role().process_file(&self.home));
    }

    fn signal(&self, signal: Signal) {
        match &self.process {
            // Nobody else gets its number before we have asked how it ended.
            Some(Process::Child(child)) => {
                if let Some(process) = child.id().and_then(process_of) {
                    let _ = kill_process(process, signal);
                }
            }
            Some(Process::Adopted(number)) => signal_if_it_serves(*number, self.launch.role(), &self.home, signal),
            None => {}
        }
    }

    fn spawn(&mut self) -> Result<(), String> {
        let role = self.launch.role();
        // Its being there tells that it can be connected to.
        let _ = fs::remove_file(role.socket(&self.home));
        let log_path = role.log(&self.home);
        let log = fs::OpenOptions::new().create(true).append(true).mode(0o644).open(&log_path);
        let log = log.map_err(|error| format!("{}: {error}", log_path.display()))?;
        let mut command = self.launch.command(&self.home)?;
        command.stdout(Stdio::null()).stderr(log);
        let child = tokio::process::Command::from(command).spawn().map_err(|error| error.to_string())?;
        let number = child.id().unwrap_or_default();
        self.process = Some(Process::Child(child));
        // It is for people, and the process is there: a failure would have another one started beside it.
        if let Err(error) = fs::write(role.process_file(&self.home), format!("{number}\n")) {
            tracing::warn!(%error, process = number, "the number of the {role} is not written down");
        }
        Ok(())
    }

    async fn wait_ready(&mut self) -> Result<(), String> {
        let role = self.launch.role();
        let socket = role.socket(&self.home);
        while !socket.exists() {
            let status = match &mut self.process {
                Some(Process::Child(child)) => child.try_wait().ok().flatten().map(|status| status.to_string()),
                Some(Process::Adopted(number)) if serves(*number, role, &self.home) => None,
                Some(Process::Adopted(_)) | None => Some("it is gone".to_owned()),
            };
            if let Some(status) = status {
                self.process = None;
                return Err(format!("the {role} ended ({status}): {}", self.last_words()));
            }
            if self.begun.elapsed() >= READY_TIMEOUT {
                return Err(format!("the {role} does not listen within {} s", READY_TIMEOUT.as_secs()));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        onecopy_hypervisor::Console::new(self.launch.role().log(&self.home)).tail(5)
    }
}

#[cfg(test)]
mod tests {
    use onecopy_postgres::ServiceUser;
    use onecopy_testing::until;

    use super::*;
    use crate::MachineHome;
    use crate::keeper::memory_file::MemoryOpen;
    use crate::keeper::role::{DISK_SERVER_COMMAND, MEMORY_SERVER_COMMAND};

    #[tokio::test]
    async fn a_wait_for_the_disk_may_be_given_up_and_goes_on_where_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("web");
        std::fs::create_dir(&root).unwrap();
        let (home, user) = (MachineHome::at(&root).unwrap(), ServiceUser::resolve(None).unwrap());
        let (process, phase, begun, back_off) = (None, Phase::Serving, Instant::now(), BACK_OFF_MIN);
        let mut server = Server { home, launch: Launch::Disk(user), process, phase, begun, back_off };
        assert!(matches!(server.next().await, ServerEvent::Died(_)));
        assert!(matches!(server.phase, Phase::Resting { .. }));
        let long = Phase::Resting { until: Instant::now() + READY_TIMEOUT };
        server.phase = long;
        assert!(tokio::time::timeout(LOOK_INTERVAL, server.next()).await.is_err());
        assert_eq!(server.phase, long, "who gives up does not make it take longer");
        server.phase = Phase::Resting { until: Instant::now() };
        // This test's own program serves no disk.
        assert!(matches!(server.next().await, ServerEvent::Failed(_)));
        assert!(matches!(server.phase, Phase::Resting { .. }));
        assert_eq!(server.back_off, 4 * BACK_OFF_MIN, "each try that fails makes the next one wait longer");
        server.close().await;
    }

    #[tokio::test]
    async fn a_disks_server_that_runs_is_taken_over_and_none_of_two() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        std::fs::create_dir_all(home.disk()).unwrap();
        let server = Server::resume(&home, Launch::Disk(ServiceUser::resolve(None).unwrap()));
        assert!(matches!(server.found(), Ok(None)));
        let begin = || {
            let mut command = std::process::Command::new("/bin/sh");
            command.args(["-c", "read _", DISK_SERVER_COMMAND]).arg(home.disk()).stdin(Stdio::piped());
            let process = command.spawn().unwrap();
            // The kernel lets a parent go on a moment before the child's command line can be read.
            let shown = format!("/proc/{}/cmdline", process.id());
            until("its command line is read", || fs::read(&shown).unwrap().ends_with(b"disk\0"));
            process
        };
        let mut processes = vec![begin()];
        let found = server.found().unwrap().and_then(|process| process.number());
        assert_eq!(found, Some(processes[0].id()));
        processes.push(begin());
        let reason = server.found().unwrap_err();
        assert!(reason.contains("more than one"), "{reason}");
        for mut process in processes {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        assert!(matches!(server.found(), Ok(None)));
    }

    /// Who waits for it gives up now and then; nothing is taken back before the memory is closed.
    ///
    /// Spec: D8
    #[tokio::test]
    async fn a_server_whose_memory_is_open_here_is_the_last_one() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        fs::create_dir(home.root()).unwrap();
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", "read _", MEMORY_SERVER_COMMAND]).arg(home.root()).stdin(Stdio::piped());
        let mut process = command.spawn().unwrap();
        until("it is found", || servers_of(Role::Memory, &home).unwrap() == [process.id()]);
        let open = MemoryOpen::default();
        let is_open = Arc::clone(&open).read_owned().await;
        let (launch, phase) = (Launch::OnceClosed(open), Phase::Serving);
        let (adopted, begun) = (Some(Process::Adopted(process.id())), Instant::now());
        let mut server = Server { home, launch, process: adopted, phase, begun, back_off: BACK_OFF_MIN };
        for _ in 0..2 {
            assert!(tokio::time::timeout(WATCH_INTERVAL, server.next()).await.is_err());
            assert!(server.is_last() && server.process_id() == Some(process.id()));
        }
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(matches!(server.next().await, ServerEvent::Died(_)));
        drop(is_open);
        let event = server.next().await;
        assert!(matches!(&event, ServerEvent::Failed(reason) if reason.contains("nobody has")), "{event:?}");
    }

    #[tokio::test]
    async fn a_server_that_was_started_is_known_also_where_its_number_cannot_be_written_down() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        std::fs::create_dir_all(Role::Disk.process_file(&home)).unwrap();
        let launch = Launch::Disk(ServiceUser::resolve(None).unwrap());
        let (process, phase, begun, back_off) = (None, Phase::Serving, Instant::now(), BACK_OFF_MIN);
        let mut server = Server { home, launch, process, phase, begun, back_off };
        server.spawn().unwrap();
        assert!(server.process_id().is_some());
        server.close().await;
    }
}
