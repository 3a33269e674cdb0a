//! A cluster's directory of one test, and the program run on it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use onecopy_testing::TestDirectory;
use onecopy_testing::process::{kill, lives, send};
use rustix::process::Signal;
use serde_json::Value;

/// Stops the cluster when dropped, also by a failing test; then what still works there is killed, and all is removed.
pub struct ClusterDirectory {
    path: PathBuf,
    _outer: TestDirectory,
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

impl ClusterDirectory {
    pub fn new() -> ClusterDirectory {
        ClusterDirectory::named("data")
    }

    pub fn named(name: &str) -> ClusterDirectory {
        let outer = TestDirectory::new().expect("a directory");
        ClusterDirectory { path: outer.join(name), _outer: outer }
    }

    pub fn within(place: &Path) -> ClusterDirectory {
        let outer = TestDirectory::within(place).expect("a directory");
        ClusterDirectory { path: outer.join("data"), _outer: outer }
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

    /// The same in a control group.
    #[allow(dead_code, reason = "not every test program that has this module bounds it")]
    pub fn run_in(&self, group: &Path, arguments: &[&str]) -> Ran {
        let whole = self.command(arguments);
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > $0/cgroup.procs && exec \"$@\""]).arg(group).arg(whole.get_program());
        command.args(whole.get_args()).env("ONECOPY_DIR", self.path()).stdin(Stdio::null());
        Ran::from(command.output().expect("run onecopy"))
    }

    /// The same with this as its standard input.
    #[allow(dead_code, reason = "not every test program that has this module gives input")]
    pub fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> Ran {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("spawn onecopy");
        // It may have refused meanwhile, and reads no more.
        let _ = child.stdin.take().expect("piped").write_all(input);
        Ran::from(child.wait_with_output().expect("run onecopy"))
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
        let described = state
            .split("[topology.leader]")
            .flat_map(|part| part.split("[[topology.follower]]"))
            .find(|part| part.contains(&format!("name = \"{server}\"")));
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

    /// The postmaster of one server, which runs.
    #[track_caller]
    pub fn postmaster(&self, server: &str) -> u32 {
        let found = self.postmasters().into_iter().find(|(name, _)| name == server);
        found.unwrap_or_else(|| panic!("{server} does not run")).1
    }

    /// The daemon's process, from the lock.
    pub fn daemon(&self) -> u32 {
        std::fs::read_to_string(self.path().join("lock")).expect("a lock").trim().parse().expect("a number")
    }

    /// Kills the daemon as a crash would, and waits until it is gone.
    pub fn kill_daemon(&self) {
        kill(self.daemon());
    }

    /// The answer of the daemon's page over TCP: status line and body.
    pub fn page(&self, path: &str) -> (String, String) {
        page_of(&self.page_address(), path)
    }

    /// The status line of the answer to something posted there.
    pub fn post_to_page(&self, path: &str, body: &str) -> String {
        let length = body.len();
        let head = format!("POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {length}");
        ask_page(&self.page_address(), &format!("{head}\r\n\r\n{body}")).0
    }

    fn page_address(&self) -> String {
        let state = std::fs::read_to_string(self.path().join("cluster.toml")).expect("a state");
        let port = state.lines().find_map(|line| line.strip_prefix("metrics_port = ")).expect("a port for metrics");
        format!("127.0.0.1:{port}")
    }
}

/// The answer of a page: status line and body.
pub fn page_of(address: &str, path: &str) -> (String, String) {
    ask_page(address, &format!("GET {path} HTTP/1.0\r\n\r\n"))
}

fn ask_page(address: &str, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.write_all(request.as_bytes()).expect("ask");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

impl Drop for ClusterDirectory {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.path().join("onecopy.log")).unwrap_or_default();
            eprintln!("the daemon said:\n{log}\nits status: {:?}", self.run(&["status", "--json"]));
        }
        let ran = self.run(&["down"]);
        // 3: there was no cluster.
        if !matches!(ran.code, Some(0 | 3)) {
            eprintln!("down: {ran:?}");
        }
    }
}

/// The program in the foreground: killed when dropped.
pub struct Foreground {
    child: Child,
    events: BufReader<std::process::ChildStdout>,
}

impl Foreground {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next line that it says, without its end.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.events.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    /// Reads events until one has `text` in it; false when the program ends before.
    pub fn read_until(&mut self, text: &str) -> bool {
        self.events.by_ref().lines().map_while(Result::ok).any(|line| line.contains(text))
    }

    /// Sends a signal and waits for the end; none: the signal killed it.
    pub fn end_by(&mut self, signal: Signal) -> Option<i32> {
        send(self.id(), signal);
        self.child.wait().expect("wait for onecopy").code()
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
