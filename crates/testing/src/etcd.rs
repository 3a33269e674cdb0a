//! etcd, as Debian packages it: one member, which is a cluster.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::port::free_port;
use crate::process::kill;
use crate::{TestDirectory, until};

/// A member of its own; killed when dropped.
#[derive(Debug)]
pub struct EtcdServer {
    child: Child,
    url: String,
    _directory: TestDirectory,
}

impl EtcdServer {
    /// One that answers.
    ///
    /// # Panics
    ///
    /// When it does not start: `make setup` installs it.
    #[track_caller]
    pub fn start() -> EtcdServer {
        EtcdServer::start_with(None)
    }

    /// One that answers over TLS alone, with these keys of a host, and only who has keys of the same authority.
    #[track_caller]
    pub fn encrypted(keys: &Path) -> EtcdServer {
        EtcdServer::start_with(Some(keys))
    }

    #[track_caller]
    fn start_with(keys: Option<&Path>) -> EtcdServer {
        let directory = TestDirectory::new().expect("a directory");
        let [port, peers] = [free_port(), free_port()];
        let scheme = if keys.is_some() { "https" } else { "http" };
        let (url, peers) = (format!("{scheme}://127.0.0.1:{port}"), format!("http://127.0.0.1:{peers}"));
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(directory.join("data"));
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &format!("default={peers}")]);
        if let Some(keys) = keys {
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(keys.join("ca.pem"));
            command.arg("--cert-file").arg(keys.join("host.pem")).arg("--key-file").arg(keys.join("host.key"));
        }
        let log = std::fs::File::create(directory.join("log")).expect("a log");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("run etcd");
        let server = EtcdServer { child, url, _directory: directory };
        until("etcd listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        server
    }

    /// By which clients reach it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        kill(self.child.id());
        let _ = self.child.wait();
    }
}
