//! A server of MariaDB of one test: own directory, own socket, no port; gone with the test.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use onecopy_memory::engine::MariaDbAccess;
use onecopy_postgres::ServiceUser;
use onecopy_testing::{TestDirectory, until};

pub struct MariaDbServer {
    directory: TestDirectory,
    process: Child,
}

impl MariaDbServer {
    /// Makes a server and starts it with a pool of so many MiB.
    pub fn start(pool_mib: u64) -> MariaDbServer {
        let directory = TestDirectory::new().expect("a directory");
        let data = directory.join("data");
        // Its own: a server that starts removes what others have in its directory for temporary tables.
        let temporary = directory.join("temporary");
        service_user().create_directory(&temporary).expect("a directory of its account");
        let made = Command::new("mariadb-install-db")
            .args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"])
            .args(as_service_user())
            .arg(format!("--datadir={}", data.display()))
            .arg(format!("--tmpdir={}", temporary.display()))
            .output()
            .expect("MariaDB is installed");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let process = spawn(directory.path(), pool_mib);
        let mut server = MariaDbServer { directory, process };
        server.wait_until_ready();
        server
    }

    /// Ends it as a crash does.
    pub fn kill(&mut self) {
        self.process.kill().expect("it lives");
        self.process.wait().expect("it is ours");
    }

    /// Starts it again with a pool of so many MiB.
    pub fn start_again(&mut self, pool_mib: u64) {
        self.process = spawn(self.directory.path(), pool_mib);
        self.wait_until_ready();
    }

    /// As the account that may do everything. It is found as on a machine without option files.
    pub fn access(&self) -> MariaDbAccess {
        let socket = Some(self.directory.join("data/socket"));
        MariaDbAccess { program: None, defaults_file: None, socket, user: Some("root".to_owned()) }
    }

    /// Runs statements and gives the rows.
    pub fn sql(&self, statements: &str) -> String {
        let output = self.client(statements).output().expect("the client is installed");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// A file that only its owner reads.
    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.directory.join(name);
        fs::write(&path, content).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("closed");
        path
    }

    fn client(&self, statements: &str) -> Command {
        let mut command = Command::new("mariadb");
        command.args(["--no-defaults", "--batch", "--skip-column-names", "--user=root", "--execute", statements]);
        command.arg(format!("--socket={}", self.directory.join("data/socket").display()));
        command
    }

    fn wait_until_ready(&mut self) {
        until("mariadbd is ready", || {
            if let Some(status) = self.process.try_wait().expect("it is ours") {
                let log = fs::read_to_string(self.directory.join("data/log")).unwrap_or_default();
                panic!("mariadbd ended: {status}\n{log}");
            }
            self.client("SELECT 1").output().expect("the client is installed").status.success()
        });
    }
}

fn spawn(directory: &Path, pool_mib: u64) -> Child {
    let data = directory.join("data");
    // It works in its data directory, and ends with that.
    Command::new("mariadbd")
        .current_dir(&data)
        .args(["--no-defaults", "--skip-networking", "--innodb-buffer-pool-load-at-startup=OFF"])
        .args(as_service_user())
        .arg(format!("--datadir={}", data.display()))
        .arg(format!("--tmpdir={}", directory.join("temporary").display()))
        .arg(format!("--socket={}", data.join("socket").display()))
        .arg(format!("--pid-file={}", data.join("pid").display()))
        .arg(format!("--log-error={}", data.join("log").display()))
        .arg(format!("--innodb-buffer-pool-size={pool_mib}M"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("MariaDB is installed")
}

/// It refuses to run as root: then it gets the account that servers of tests have.
fn as_service_user() -> Option<String> {
    rustix::process::geteuid().is_root().then(|| format!("--user={}", service_user().name()))
}

fn service_user() -> ServiceUser {
    ServiceUser::resolve(None).expect("the account of servers exists")
}
