//! A cluster's directory of one test, and the program run on it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Far beyond what anything here takes; a test that waits longer has failed.
pub const WAIT_MAX: Duration = Duration::from_secs(180);

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

    /// `up --detach` by a copy of the program that is gone afterwards, as an upgrade's predecessor is.
    #[track_caller]
    pub fn up_by_a_program_that_goes(&self) {
        let program = self.path().with_file_name("onecopy-of-before");
        std::fs::copy(env!("CARGO_BIN_EXE_onecopy"), &program).expect("copy the program");
        let mut command = Command::new(&program);
        command.args(["up", "--detach", "--port=0", "--replicas=0", "--spare=off"]).env("ONECOPY_DIR", self.path());
        Ran::from(command.stdin(Stdio::null()).output().expect("run the copy")).ok();
        std::fs::remove_file(program).expect("remove the copy");
    }

    /// `up --detach` of a new cluster with `replicas`.
    #[track_caller]
    pub fn up(&self, replicas: usize) {
        self.run(&["up", "--detach", "--port=0", &format!("--replicas={replicas}")]).ok();
    }

    /// `up --json` in the foreground, as a child whose events can be read.
    pub fn spawn_up(&self, replicas: usize) -> Foreground {
        self.spawn(&["up", "--json", "--port=0", &format!("--replicas={replicas}")])
    }

    /// A command that tells events, as a child.
    pub fn spawn(&self, arguments: &[&str]) -> Foreground {
        let mut command = self.command(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("spawn onecopy");
        let events = BufReader::new(child.stdout.take().expect("piped"));
        Foreground { child, events }
    }

    /// A command whose outputs are pipes that nobody reads.
    pub fn spawn_unheard(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("spawn onecopy");
        drop((child.stdout.take(), child.stderr.take()));
        child
    }

    /// One value of `psql -At`.
    #[track_caller]
    pub fn sql(&self, statement: &str) -> String {
        self.run(&["psql", "--", "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", statement]).ok().trim().to_owned()
    }

    /// One value of a superuser's question to one server, past the router.
    #[track_caller]
    pub fn superuser_sql(&self, server: &str, statement: &str) -> String {
        let state = std::fs::read_to_string(self.path().join("cluster.toml")).expect("a state");
        let described = state.split("[[server]]").find(|part| part.contains(&format!("name = \"{server}\"")));
        let number = described.and_then(|part| part.lines().find_map(|line| line.strip_prefix("socket_number = ")));
        let number = number.expect("the server and its number");
        let password = std::fs::read_to_string(self.path().join("secrets/superuser")).expect("a password");
        let sockets = self.path().join("run");
        let program = onecopy_postgres::Binaries::find(None).expect("PostgreSQL").directory().join("psql");
        let mut command = Command::new(program);
        command.args([
            "-XAtq",
            "-v",
            "ON_ERROR_STOP=1",
            "-U",
            "postgres",
            "-d",
            "postgres",
            "-p",
            number,
            "-c",
            statement,
        ]);
        command.arg("-h").arg(sockets).env("PGPASSWORD", password.trim()).stdin(Stdio::null());
        Ran::from(command.output().expect("run psql")).ok().trim().to_owned()
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
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.path().join("onecopy.log")).unwrap_or_default();
            eprintln!("the daemon said:\n{log}");
        }
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

    /// The first of these texts that an event has in it; none when the program ends before.
    pub fn read_until_one<'a>(&mut self, texts: &[&'a str]) -> Option<&'a str> {
        let mut lines = self.events.by_ref().lines().map_while(Result::ok);
        lines.find_map(|line| texts.iter().copied().find(|text| line.contains(text)))
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
    // A zombie is dead: only its parent has not looked yet. But it may have threads that end a moment later, and until then its files,
    // sockets and locks are there.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let is_zombie = stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'));
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count);
    threads > usize::from(is_zombie)
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

/// Stops a process and waits until it stands still: it comes back first from what it has asked the kernel for.
pub fn stop(process: u32) {
    send("STOP", process);
    wait_until("the process stands still", || {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't', 'Z']))
    });
}

/// Processes that stand still; they go on when this is dropped, so that a failing test can stop its cluster.
pub struct Frozen(pub Vec<u32>);

impl Frozen {
    /// All of a server.
    pub fn new(postmaster: u32) -> Frozen {
        // The postmaster first: it makes no more children then.
        let mut frozen = Frozen(vec![postmaster]);
        stop(postmaster);
        for child in children_of(postmaster) {
            frozen.0.push(child);
            stop(child);
        }
        frozen
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        for process in self.0.iter().rev() {
            // One that has ended meanwhile needs none: not a reason to leave the others standing.
            let _ = Command::new("kill").args(["-CONT", &process.to_string()]).status();
        }
    }
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
