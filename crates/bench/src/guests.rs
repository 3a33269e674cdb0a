//! Machines with a server and a workload in each, made by a user's commands, in a directory that goes away.

use std::ffi::OsString;
use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use onecopy_host::Directory;
use onecopy_host::machines::Machines;
use onecopy_hypervisor::Qemu;
use onecopy_machine::{CheckpointTaken, GuestImage, Machine, MachineName};
use onecopy_postgres::ConnectionParameters;
use onecopy_testing::{guest_exercise, process};
use tempfile::TempDir;

use crate::pgbench::{Counts, parse};

/// How long what is waited for may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// How often a server is asked that does not answer yet.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Where PostgreSQL's programs are in a guest.
const PROGRAMS: &str = "/usr/lib/postgresql/17/bin";

/// The machines of an experiment. Dropped, they end and their directory goes away.
pub struct Guests {
    program: PathBuf,
    machines: Machines,
    root: PathBuf,
    _directory: TempDir,
}

impl Guests {
    /// None as yet, in a directory of `place`.
    ///
    /// # Errors
    /// What machines need is missing.
    pub fn new(place: &Path) -> anyhow::Result<Guests> {
        GuestImage::find(None).context("no guest image: run `make guest`")?;
        ensure!(rustix::process::geteuid().is_root(), "checkpoints of machines need root");
        let program = std::env::current_exe()?.with_file_name("onecopy");
        ensure!(program.exists(), "{} does not exist: run `cargo build -p onecopy`", program.display());
        let directory = tempfile::Builder::new().prefix("ob-").tempdir_in(place)?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o711))?;
        let root = directory.path().join("d");
        let machines = Machines::of(Directory::new(&root)?)?;
        Ok(Guests { program, machines, root, _directory: directory })
    }

    /// What runs in and below them.
    pub fn versions() -> anyhow::Result<Vec<String>> {
        let (qemu, image) = (Qemu::find()?, GuestImage::find(None)?);
        let postgresql = image.postgresql_major.map_or_else(String::new, |major| format!("PostgreSQL {major}"));
        let accelerator = if onecopy_hypervisor::kvm_runs_guests() { "KVM" } else { "TCG (no hardware help)" };
        Ok(vec![format!("QEMU {}", qemu.version()), accelerator.to_owned(), postgresql])
    }

    /// Runs a command of the program; what it says.
    pub fn run(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(&self.program);
        let output = command.args(arguments).env("ONECOPY_DIR", &self.root).stdin(Stdio::null()).output()?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "onecopy {}: {}", arguments.join(" "), complaint.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The directory of them all.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Begins a command that serves others, and says with its first line where; that is the last word of it.
    pub fn serve(&self, arguments: &[OsString]) -> anyhow::Result<(Child, String)> {
        let mut command = Command::new(&self.program);
        command.args(arguments).env("ONECOPY_DIR", &self.root).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("it was piped")?).read_line(&mut line)?;
        let address = line.trim().trim_end_matches('.').rsplit(' ').next().unwrap_or_default();
        ensure!(address.contains(':'), "{arguments:?} does not serve");
        Ok((child, address.to_owned()))
    }

    /// Makes a machine that runs, with the program of the workloads.
    pub async fn create(&self, name: &str, memory_mib: u64, more: &[&str]) -> anyhow::Result<()> {
        let memory = format!("--memory={memory_mib}MB");
        self.run(&[&["vm", "create", name, &memory, "--disk=8GB", "--start"], more].concat())?;
        Ok(())
    }

    /// Puts the program of the workloads into a guest.
    pub async fn install(&self, name: &str) -> anyhow::Result<()> {
        let place = guest_exercise::PLACE;
        let command = format!("mkdir -p $(dirname {place}); cat > {place}; chmod 755 {place}");
        self.execute(name, &command, guest_exercise::program()?).await.map(|_| ())
    }

    /// What a guest's shell says.
    pub async fn guest(&self, name: &str, command: &str) -> anyhow::Result<String> {
        self.execute(name, command, Vec::new()).await
    }

    async fn execute(&self, name: &str, command: &str, input: Vec<u8>) -> anyhow::Result<String> {
        let argv = ["sh", "-c", command].map(str::to_owned).to_vec();
        let executed = self.machines.execute(&name.parse()?, argv, None, input, ANSWER_TIMEOUT).await?;
        let said = executed.stdout.to_text();
        ensure!(executed.status == Some(0), "{command} in {name}: {said}{}", executed.stderr.to_text());
        Ok(said.trim().to_owned())
    }

    /// How its server is reached.
    pub fn access(&self, name: &str) -> anyhow::Result<ConnectionParameters> {
        self.machines.access(&name.parse()?)?.with_context(|| format!("{name} has no server"))
    }

    /// What stands before a program of PostgreSQL's in a guest.
    pub fn client(&self, name: &str) -> anyhow::Result<String> {
        let access = self.access(name)?;
        let password = access.password.unwrap_or_default();
        Ok(format!("PGPASSWORD={password} PGHOST=127.0.0.1 PGUSER=postgres PGDATABASE=postgres {PROGRAMS}/"))
    }

    /// Runs pgbench in a guest.
    pub async fn pgbench(&self, name: &str, options: &str) -> anyhow::Result<Counts> {
        let said = self.guest(name, &format!("{}pgbench -n {options}", self.client(name)?)).await?;
        parse(&said).with_context(|| said)
    }

    /// Until the server in a machine has answered this; how long that took.
    pub async fn answers(&self, name: &str, query: &str) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        let access = self.access(name)?;
        loop {
            let asked =
                async { access.connect_as_client().await?.batch_execute(query).await.map_err(anyhow::Error::from) };
            match asked.await {
                Ok(()) => return Ok(begun.elapsed()),
                Err(error) if begun.elapsed() > ANSWER_TIMEOUT => {
                    return Err(error.context(format!("{name} is silent")));
                }
                Err(_) => tokio::time::sleep(LOOK_INTERVAL).await,
            }
        }
    }

    /// The machine of a name.
    pub fn machine(&self, name: &str) -> anyhow::Result<Machine> {
        Ok(self.machines.get(&name.parse::<MachineName>()?)?)
    }

    /// Takes a checkpoint.
    pub async fn checkpoint(&self, name: &str, keep: Option<u64>) -> anyhow::Result<CheckpointTaken> {
        Ok(self.machine(name)?.checkpoint(keep).await?)
    }

    /// Ends and removes a machine.
    pub fn remove(&self, name: &str) -> anyhow::Result<()> {
        self.run(&["vm", "stop", "--force", name])?;
        self.run(&["vm", "delete", name])?;
        Ok(())
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        process::kill_all(|| process::of_directory(&self.root));
        for entry in std::fs::read_dir(self.root.join("machines")).into_iter().flatten().flatten() {
            // One without a mount complains.
            let mut unmount = Command::new("umount");
            let _ = unmount.arg("--lazy").arg(entry.path().join("memory")).stderr(Stdio::null()).status();
        }
    }
}
