//! A cluster's directory of one test, and the program run on it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Far beyond what anything here takes; a test that waits longer has failed.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Stops the cluster and removes the directory when dropped, also by a failing test.
pub struct TestDirectory {
    path: PathBuf,
    // Dropped after `drop` below has stopped the servers in it; none inside another one's.
    _temporary: Option<tempfile::TempDir>,
}

/// What a run of the program did.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    fn from(output: Output) -> Ran {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Its output, when it succeeded.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.stdout
    }

    /// What it complained, when it ended with `code`.
    #[track_caller]
    pub fn refused(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        self.stderr
    }
}

impl TestDirectory {
    pub fn new() -> TestDirectory {
        TestDirectory::named("data")
    }

    pub fn named(name: &str) -> TestDirectory {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        // The servers' account must pass.
        std::fs::set_permissions(temporary.path(), std::fs::Permissions::from_mode(0o755)).expect("set the mode");
        TestDirectory { path: temporary.path().join(name), _temporary: Some(temporary) }
    }

    pub fn inside(outer: &TestDirectory, name: &str) -> TestDirectory {
        TestDirectory { path: outer.path().join(name), _temporary: None }
    }

    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_onecopy"));
        command.args(arguments).env("ONECOPY_DIR", self.path()).stdin(Stdio::null());
        command
    }

    /// Runs the program on this directory.
    pub fn run(&self, arguments: &[&str]) -> Ran {
        Ran::from(self.command(arguments).output().expect("run onecopy"))
    }

    /// `up --detach` of a new cluster with `replicas`.
    #[track_caller]
    pub fn up(&self, replicas: usize) {
        self.run(&["up", "--detach", "--port=0", &format!("--replicas={replicas}")]).ok();
    }

    /// `up --json` in the foreground, as a child whose events can be read.
    pub fn spawn_up(&self, replicas: usize) -> Foreground {
        let replicas = format!("--replicas={replicas}");
        let mut command = self.command(&["up", "--json", "--port=0", &replicas]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("spawn onecopy");
        let events = BufReader::new(child.stdout.take().expect("piped"));
        Foreground { child, events }
    }

    /// One value of `psql -At`.
    #[track_caller]
    pub fn sql(&self, statement: &str) -> String {
        self.run(&["psql", "--", "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", statement]).ok().trim().to_owned()
    }

    #[track_caller]
    pub fn status(&self) -> Value {
        serde_json::from_str(&self.run(&["status", "--json"]).ok()).expect("a JSON document")
    }

    /// Postmasters by server, from the servers' own files.
    pub fn postmasters(&self) -> Vec<(String, u32)> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(self.path()).into_iter().flatten().flatten() {
            let file = entry.path().join("data/postmaster.pid");
            let number = std::fs::read_to_string(file).ok().and_then(|text| text.lines().next()?.parse().ok());
            found.extend(
                number
                    .filter(|number| lives(*number))
                    .map(|number| (entry.file_name().to_string_lossy().into_owned(), number)),
            );
        }
        found.sort();
        found
    }

    /// The daemon's process, from the lock.
    pub fn daemon(&self) -> u32 {
        std::fs::read_to_string(self.path().join("lock")).expect("a lock").trim().parse().expect("a number")
    }

    /// Kills the daemon as a crash would, and waits until it is gone.
    pub fn kill_daemon(&self) {
        let daemon = self.daemon();
        send("KILL", daemon);
        wait_until("the daemon is gone", || !lives(daemon));
    }

    /// The answer of the daemon's page over TCP: status line and body.
    pub fn page(&self, path: &str) -> (String, String) {
        let state = std::fs::read_to_string(self.path().join("cluster.toml")).expect("a state");
        let port = state.lines().find_map(|line| line.strip_prefix("metrics_port = ")).expect("a port for metrics");
        page_of(&format!("127.0.0.1:{port}"), path)
    }
}

/// The answer of a page: status line and body.
pub fn page_of(address: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("connect");
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").expect("ask");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let ran = self.run(&["down"]);
        // 3: there was no cluster. What does not stop in peace must not outlive the test.
        if !matches!(ran.code, Some(0 | 3)) {
            eprintln!("down: {ran:?}");
        }
        for (_, postmaster) in self.postmasters() {
            send("QUIT", postmaster);
        }
    }
}

/// `onecopy up` in the foreground.
pub struct Foreground {
    pub child: Child,
    events: BufReader<std::process::ChildStdout>,
}

impl Foreground {
    /// Reads events until one has `text` in it; false when the program ends before.
    pub fn read_until(&mut self, text: &str) -> bool {
        self.events.by_ref().lines().map_while(Result::ok).any(|line| line.contains(text))
    }

    /// Sends a signal and waits for the end; none: the signal killed it.
    pub fn end_by(&mut self, signal: &str) -> Option<i32> {
        send(signal, self.child.id());
        self.child.wait().expect("wait for onecopy").code()
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn lives(process: u32) -> bool {
    // A zombie is dead: only its parent has not looked yet.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

/// The processes that `parent` has started and that live.
pub fn children_of(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").expect("the list of processes").flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
    // Source: proc_pid_stat(5); behind the name in brackets come the state and the parent.
    let parent_of = |process: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        stat.rsplit(") ").next()?.split(' ').nth(1)?.parse::<u32>().ok()
    };
    numbers.filter(|process| parent_of(*process) == Some(parent)).collect()
}

pub fn send(signal: &str, process: u32) {
    let status = Command::new("kill").args([format!("-{signal}"), process.to_string()]).status();
    assert!(status.expect("run kill").success(), "kill -{signal} {process}");
}

#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < WAIT_MAX, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
