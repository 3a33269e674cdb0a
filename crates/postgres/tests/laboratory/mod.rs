//! Where the real tests happen: a directory, free ports, servers that do not outlive the test.

// Each test program uses a part of it.
#![allow(dead_code)]

#[path = "../../../../tests/src/ports.rs"]
mod ports;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use onecopy_postgres::{Binaries, Role, Server, ServerOptions, ServiceUser, recommended_settings};
use tempfile::TempDir;

/// A name that needs every kind of quoting.
const AWKWARD_NAME: &str = "it's \\ \"quoted\"";
/// A password that needs every kind of quoting.
const AWKWARD_PASSWORD: &str = "it's a \\ \"pass\" word=1";
/// What has not happened by then never does, on a busy machine, too.
pub const WAIT_MAX: Duration = Duration::from_secs(180);

/// A directory of one test. When it is dropped, also by a failure, every process that works in it is killed.
pub struct Laboratory {
    directory: TempDir,
}

impl Laboratory {
    pub fn new() -> Laboratory {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).expect("searchable");
        Laboratory { directory }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A port that nobody has now, and that nobody else takes.
    pub fn free_port(&self) -> u16 {
        ports::free_port().expect("a free port")
    }

    pub fn options(&self, name: &str, role: Role) -> ServerOptions {
        let binaries = Binaries::find(None).expect("PostgreSQL is installed");
        let user = ServiceUser::resolve(None).expect("its account exists");
        let home = self.path().join(name);
        let mut options = ServerOptions::new(binaries, user, home, self.free_port(), AWKWARD_PASSWORD.to_owned());
        options.settings = recommended_settings(role, AWKWARD_NAME);
        options.settings.set("shared_buffers", "16MB");
        options.start_timeout = WAIT_MAX;
        options
    }

    /// A new server, not started.
    pub async fn leader(&self) -> Server {
        Server::create(self.options("leader", Role::Leader)).await.expect("made")
    }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        let Ok(entries) = std::fs::read_dir("/proc") else { return };
        for entry in entries.filter_map(Result::ok) {
            let works_here = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(self.path()));
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if let (true, Some(process)) = (works_here, number.and_then(rustix::process::Pid::from_raw)) {
                let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            }
        }
    }
}

/// Waits until something holds.
pub async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WAIT_MAX, wait).await.unwrap_or_else(|_| panic!("waited in vain for {what}"));
}
