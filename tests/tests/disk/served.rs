//! A disk served by a process of its own, which can be killed and started again.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::Context;
use onecopy_disk::{CreateOptions, Disk};
use onecopy_hypervisor::configuration::{Disk as GuestDisk, DiskBackend};
use onecopy_testing::until_seen;

/// The flags of a socket that listens (`__SO_ACCEPTCON`, linux/net.h).
const LISTENS: &str = "00010000";

/// `onecopy disk-server` on a disk's directory.
pub struct Server {
    directory: PathBuf,
    socket: PathBuf,
    arguments: Vec<String>,
    process: Option<Child>,
}

/// The program that was built beside this test.
pub fn program() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let program = own.parent().and_then(Path::parent).map(|directory| directory.join("onecopy"));
    program.filter(|program| program.is_file()).with_context(|| "no onecopy beside the test: cargo build -p onecopy")
}

/// Makes an empty disk.
pub fn create(directory: &Path, size_bytes: u64) -> anyhow::Result<()> {
    Ok(Disk::create(directory, &CreateOptions { size_bytes, base: None, copy_base: false })?)
}

impl Server {
    /// Serves the disk at `directory` at a socket, with more arguments of `onecopy disk-server`.
    pub fn start(directory: &Path, socket: &Path, arguments: &[&str]) -> anyhow::Result<Server> {
        let mut server = Server {
            directory: directory.to_owned(),
            socket: socket.to_owned(),
            arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
            process: None,
        };
        server.restart()?;
        Ok(server)
    }

    /// Starts it, when it does not run; it listens afterwards.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let child = Command::new(program()?)
            .arg("disk-server")
            .arg(&self.directory)
            .arg("--vhost")
            .arg(&self.socket)
            .args(&self.arguments)
            .env("RUST_LOG", "info")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        self.process = Some(child);
        // A connection would be a front end: the server's own word is taken instead.
        let look = || (self.listens(), self.said());
        until_seen("the disk is served", look, |(listens, _)| !matches!(listens, Ok(false))).0?;
        // Also a QEMU under another account may connect.
        std::fs::set_permissions(&self.socket, std::fs::Permissions::from_mode(0o777))?;
        Ok(())
    }

    /// Whether the process that runs now has the socket: its number is in the kernel's list of listeners.
    fn listens(&mut self) -> anyhow::Result<bool> {
        let process = self.process.as_mut().context("no server was started")?;
        if let Some(status) = process.try_wait()? {
            anyhow::bail!("the disk's server ended: {status}: {}", self.said());
        }
        let socket = self.socket.to_string_lossy().into_owned();
        let inodes: Vec<String> = std::fs::read_to_string("/proc/net/unix")?
            .lines()
            // The fourth word says that it listens: a socket that is only bound refuses.
            .filter(|line| line.ends_with(&socket) && line.split_whitespace().nth(3) == Some(LISTENS))
            .filter_map(|line| line.split_whitespace().nth(6).map(|inode| format!("socket:[{inode}]")))
            .collect();
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", process.id()))?;
        Ok(descriptors
            .flatten()
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .any(|target| inodes.iter().any(|inode| target.as_os_str() == inode.as_str())))
    }

    fn log(&self) -> PathBuf {
        self.socket.with_extension("log")
    }

    /// What it wrote to its log.
    pub fn said(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Bytes that it has read since it started, of its disk above all (`rchar`, proc_pid_io(5)).
    pub fn read_bytes(&self) -> anyhow::Result<u64> {
        let process = self.process.as_ref().context("no server runs")?.id();
        let counts = std::fs::read_to_string(format!("/proc/{process}/io"))?;
        let read = counts.lines().find_map(|line| line.strip_prefix("rchar: ")).context("no count")?;
        Ok(read.parse()?)
    }

    /// Kills it: nothing of what it has in memory is written.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    /// The disk, as a guest gets it.
    pub fn backend(&self, id: &str) -> GuestDisk {
        GuestDisk::new(id, DiskBackend::VhostUser { socket: self.socket.clone(), reconnect_ms: Some(100) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A process that has gone already is as good.
        let _ = self.kill();
    }
}
