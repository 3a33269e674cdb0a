//! A disk served over NBD by a process of its own, which can be killed and started again, also in another network.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::Context;
use onecopy_disk_server::{DiskClient, DiskServerError};
use onecopy_testing::until_seen;

/// What the server of a disk answers, also in a test that is a future.
pub fn ask_disk<T>(
    directory: &Path,
    ask: impl FnOnce(&mut DiskClient) -> Result<T, DiskServerError>,
) -> Result<T, DiskServerError> {
    tokio::task::block_in_place(|| ask(&mut DiskClient::connect(directory)?))
}

/// `onecopy disk-server` on a disk's directory, with an NBD server.
pub struct NbdServerProcess {
    directory: PathBuf,
    socket: PathBuf,
    arguments: Vec<String>,
    /// What stands before the program: the way into another network.
    prefix: Vec<String>,
    process: Option<Child>,
}

impl NbdServerProcess {
    /// Serves the disk at `directory` at a Unix socket, with more arguments of `onecopy disk-server`.
    pub fn start(directory: &Path, socket: &Path, arguments: &[&str]) -> anyhow::Result<NbdServerProcess> {
        NbdServerProcess::start_in(&[], directory, socket, arguments)
    }

    /// The same by a program before it, as `ip netns exec NAME`.
    pub fn start_in(
        prefix: &[&str],
        directory: &Path,
        socket: &Path,
        arguments: &[&str],
    ) -> anyhow::Result<NbdServerProcess> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let mut server = NbdServerProcess {
            directory: directory.to_owned(),
            socket: socket.to_owned(),
            arguments: words(arguments),
            prefix: words(prefix),
            process: None,
        };
        server.restart()?;
        Ok(server)
    }

    /// Starts it; it listens afterwards.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        let program = crate::served::program()?;
        let words: Vec<&str> =
            self.prefix.iter().map(String::as_str).chain([program.to_str().context("a path")?]).collect();
        let log = File::options().create(true).append(true).open(self.socket.with_extension("log"))?;
        let child = Command::new(words[0])
            .args(&words[1..])
            .arg("disk-server")
            .arg(&self.directory)
            .arg("--nbd")
            .arg(format!("unix:{}", self.socket.display()))
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        self.process = Some(child);
        let look = || (self.listens(), self.said());
        until_seen("the disk is served", look, |(listens, _)| !matches!(listens, Ok(false))).0?;
        // Also a QEMU under another account may connect.
        std::fs::set_permissions(&self.socket, std::fs::Permissions::from_mode(0o777))?;
        Ok(())
    }

    /// Whether it listens; the control socket is the last that it opens.
    fn listens(&mut self) -> anyhow::Result<bool> {
        let process = self.process.as_mut().context("no server was started")?;
        if let Some(status) = process.try_wait()? {
            anyhow::bail!("the disk's server ended: {status}: {}", self.said());
        }
        Ok(UnixStream::connect(&self.socket).is_ok() && ask_disk(&self.directory, |_| Ok(())).is_ok())
    }

    /// What it wrote to its log.
    pub fn said(&self) -> String {
        std::fs::read_to_string(self.socket.with_extension("log")).unwrap_or_default()
    }

    /// Kills it: nothing of what it has in memory is written.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }
}

impl Drop for NbdServerProcess {
    fn drop(&mut self) {
        // A process that has gone already is as good.
        let _ = self.kill();
    }
}
