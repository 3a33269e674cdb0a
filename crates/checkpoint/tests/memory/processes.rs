//! The keeper, and the processes that it talks to by lines.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::memory::{Descriptors, GuestMemory, MemoryOptions};
use onecopy_testing::{TestDirectory, skip, until};
use rustix::event::{PollFd, PollFlags, poll};

pub const PAGES: usize = 2048;
pub const SIZE: u64 = (PAGES * PAGE_BYTES) as u64;
/// What a process of a test is, and where it finds the others.
const ROLE: &str = "ONECOPY_TEST_ROLE";
const DIRECTORY: &str = "ONECOPY_TEST_DIRECTORY";
/// Where a server finds its state, and whether the memory was one that drops when that was lost.
const STATE: &str = "ONECOPY_TEST_STATE";

/// No test: the other processes.
#[test]
#[ignore = "run by other tests in processes of their own"]
fn child() {
    let role = std::env::var(ROLE).unwrap();
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).unwrap());
    let stream = UnixStream::connect(directory.join(format!("{role}.sock"))).unwrap();
    match role.as_str() {
        "server" => crate::server::run(&directory, &std::env::var(STATE).unwrap(), stream),
        _ => crate::mapper::run(&directory, stream),
    }
}

/// Answers each line with a line.
pub fn answer(stream: UnixStream, mut each: impl FnMut(&[&str]) -> String) {
    let mut output = stream.try_clone().unwrap();
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let answer = each(&words);
        writeln!(output, "{answer}").unwrap();
    }
}

/// A process that is asked by lines. It is killed when this is dropped.
pub struct Process {
    child: Child,
    stream: BufReader<UnixStream>,
}

impl Process {
    fn start(directory: &TestDirectory, role: &str, prepare: impl FnOnce(&mut Command)) -> Process {
        let socket = directory.join(format!("{role}.sock"));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::child", "--ignored", "--nocapture"]).env(ROLE, role);
        command.env(DIRECTORY, directory.path()).stdout(Stdio::null());
        prepare(&mut command);
        let child = command.spawn().unwrap();
        let (stream, _) = listener.accept().unwrap();
        Process { child, stream: BufReader::new(stream) }
    }

    /// Sends a command without waiting.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.stream.get_mut(), "{line}").unwrap();
    }

    /// Waits for an answer.
    #[track_caller]
    pub fn heard(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the process has ended");
        line.trim_end().to_owned()
    }

    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.heard()
    }

    #[track_caller]
    pub fn expect(&mut self, line: &str, answer: &str) {
        assert_eq!(self.ask(line), answer, "{line}");
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills it without waiting.
    pub fn begin_to_kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Waits until it has ended by itself.
    pub fn wait_ended(&mut self) {
        until("the process has ended", || self.child.try_wait().unwrap().is_some());
    }

    /// Kills it and waits until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Not waited for: it may wait for the file, which goes with the keeper.
        let _ = self.child.kill();
    }
}

/// A memory with a server and a mapper.
pub struct Memory {
    // Dropped in this order: who maps it last of all.
    pub server: Option<Process>,
    pub descriptors: Option<Descriptors>,
    pub mapper: Process,
    directory: TestDirectory,
}

impl Memory {
    /// None on a machine where the test is left out.
    pub fn new(test: &str, drops: bool) -> Option<Memory> {
        Memory::of(test, TestDirectory::new().unwrap(), drops)
    }

    /// One that holds at first what the file `shadow` of the directory does.
    pub fn of(test: &str, directory: TestDirectory, drops: bool) -> Option<Memory> {
        if !rustix::process::geteuid().is_root() || std::fs::metadata("/dev/fuse").is_err() {
            skip(test, "it mounts: it needs root and /dev/fuse");
            return None;
        }
        Some(Memory::over(directory, drops))
    }

    /// One that holds at first what the file `shadow` of its directory does.
    pub fn over(directory: TestDirectory, drops: bool) -> Memory {
        let (place, shadow) = (directory.join("ram"), directory.join("shadow"));
        let descriptors = GuestMemory::prepare(&place, &shadow, &options(drops)).unwrap();
        let mapper = Process::start(&directory, "mapper", |_| {});
        let mut memory = Memory { server: None, descriptors: Some(descriptors), mapper, directory };
        memory.serve();
        memory
    }

    /// Starts the next server.
    pub fn serve(&mut self) {
        let state = self.descriptors().state.as_raw_fd();
        self.serve_with(&format!("/proc/{}/fd/{state}", std::process::id()));
    }

    /// Starts one without the state.
    pub fn serve_without_state(&mut self, drops: bool) {
        self.serve_with(if drops { "lost, drops" } else { "lost" });
        // What the next ones go on with.
        let number = self.server().ask("descriptor");
        let path = format!("/proc/{}/fd/{number}", self.server().id());
        let state = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        self.descriptors.as_mut().unwrap().state = state.into();
    }

    fn serve_with(&mut self, state: &str) {
        let device = self.descriptors().device.try_clone().unwrap();
        let prepare = |command: &mut Command| {
            command.env(STATE, state).stdin(Stdio::from(device));
        };
        self.server = Some(Process::start(&self.directory, "server", prepare));
        self.server().expect("hello", "hello");
    }

    pub fn kill_server(&mut self) {
        self.server.take().unwrap().kill();
    }

    pub fn server(&mut self) -> &mut Process {
        self.server.as_mut().unwrap()
    }

    pub fn descriptors(&self) -> &Descriptors {
        self.descriptors.as_ref().unwrap()
    }

    pub fn device(&self) -> OwnedFd {
        self.descriptors().device.try_clone().unwrap()
    }

    /// Waits until somebody asks for something, while no server is there.
    pub fn wait_asked(&self) {
        let device = &self.descriptors().device;
        assert_eq!(poll(&mut [PollFd::new(device, PollFlags::IN)], None), Ok(1));
    }

    pub fn place(&self) -> PathBuf {
        self.directory.join("ram")
    }

    /// Ends the open epoch after all was written back.
    #[track_caller]
    pub fn take(&mut self) -> String {
        self.mapper.expect("synchronize", "done");
        self.server().ask("cut")
    }

    /// What each page held at the end of an epoch.
    #[track_caller]
    pub fn stamps(&mut self, epoch: &str) -> Vec<u64> {
        let told = self.server().ask(&format!("stamps {epoch}"));
        told.split(' ').map(|stamp| stamp.parse().unwrap_or_else(|_| panic!("{stamp:.200}"))).collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.server = None;
        self.descriptors = None;
        let _ = rustix::mount::unmount(self.place(), rustix::mount::UnmountFlags::DETACH);
    }
}

pub fn options(drops: bool) -> MemoryOptions {
    MemoryOptions { size_bytes: SIZE, epochs_bytes_max: 64 * SIZE, user_id: 0, group_id: 0, drops }
}
