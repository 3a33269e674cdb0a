//! A directory with disks, and servers that end with it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use onecopy_testing::process::send;
use onecopy_testing::{TestDirectory, until};
use rustix::process::Signal;
use serde_json::Value;

/// The directory. The servers work in it.
pub struct DiskDirectory(TestDirectory);

impl DiskDirectory {
    pub fn new() -> DiskDirectory {
        DiskDirectory(TestDirectory::new().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Runs `onecopy disk` with these words, in the directory.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command("disk", arguments).output().unwrap()
    }

    /// The same, which must succeed; what it said.
    pub fn done(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    /// The same, which must fail so; what it complained.
    pub fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// What `onecopy disk info --json` tells.
    pub fn info(&self, disk: &str) -> Value {
        serde_json::from_str(&self.done(&["info", disk, "--json"])).unwrap()
    }

    /// Serves a disk over NBD at `NAME.sock`, with more words.
    pub fn serve(&self, disk: &str, more: &[&str]) -> Server {
        let address = format!("unix:{}", self.socket(disk).display());
        let arguments = [&[disk, "--nbd", &address], more].concat();
        let mut command = self.command("disk-server", &arguments);
        let child = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap();
        let server = Server(child);
        until("it is served", || self.info(disk)["served"]["process_id"] == server.id());
        server
    }

    /// Lets a snapshot of a disk be read over NBD at `NAME.sock`, beside whoever has the disk.
    pub fn serve_snapshot(&self, disk: &str, snapshot: &str, name: &str) -> Server {
        let address = format!("unix:{}", self.socket(name).display());
        let mut command = self.command("snapshot-server", &[disk, snapshot, "--nbd", &address]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap();
        until("it listens", || std::os::unix::net::UnixStream::connect(self.socket(name)).is_ok());
        Server(child)
    }

    /// The same, and nothing outside of a directory is read: its server, or its complaint.
    pub fn serve_confined(&self, disk: &str, snapshot: &str, beneath: &str, name: &str) -> Result<Server, String> {
        let address = format!("unix:{}", self.socket(name).display());
        let arguments = ["--only-beneath", beneath, "--nbd", &address, "--", disk, snapshot];
        let mut command = self.command("snapshot-server", &arguments);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let listens = || std::os::unix::net::UnixStream::connect(self.socket(name)).is_ok();
        until("it listens, or has ended", || listens() || child.try_wait().unwrap().is_some());
        if child.try_wait().unwrap().is_none() {
            return Ok(Server(child));
        }
        Err(String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap())
    }

    /// The socket of a served disk.
    pub fn socket(&self, disk: &str) -> PathBuf {
        self.path(&format!("{disk}.sock"))
    }

    /// Does something with a served disk by QEMU's client.
    pub fn io(&self, disk: &str, commands: &[&str]) {
        let url = format!("nbd+unix:///?socket={}", self.socket(disk).display());
        let mut program = Command::new("qemu-io");
        program.args(["-f", "raw", &url]);
        commands.iter().for_each(|command| {
            program.args(["-c", command]);
        });
        let output = program.output().expect("qemu-io is there: make setup");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && !said.contains("failed"), "{commands:?}: {output:?}");
    }

    fn command(&self, command: &str, arguments: &[&str]) -> Command {
        let mut program = Command::new(env!("CARGO_BIN_EXE_onecopy"));
        program.arg(command).args(arguments).current_dir(self.0.path()).stdin(Stdio::null());
        program
    }
}

/// A server's process.
pub struct Server(Child);

impl Server {
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Kills it: nothing of what it has in memory is written.
    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Asks it to end, and waits for that.
    pub fn terminate(self) {
        send(self.id(), Signal::TERM);
        self.ends();
    }

    /// Waits for its end, which somebody else has asked for.
    pub fn ends(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

/// Whether two files hold the same bytes.
pub fn are_equal(one: &Path, other: &Path) -> bool {
    Command::new("cmp").args([one, other]).status().unwrap().success()
}
