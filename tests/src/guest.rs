//! A guest that boots the built image, in a directory of its own that goes away with the value, as does its QEMU.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use onecopy_guest_agent::protocol::Execute;
use onecopy_hypervisor::configuration::{AsynchronousIo, Boot, Disk, DiskDoor, FileFormat, KERNEL_ARGUMENTS};
use onecopy_hypervisor::{Agent, Ending, Machine, MachineConfiguration, MachineDirectory, Qemu, TimeLimits};
use tempfile::TempDir;

/// The image that tests boot.
pub const IMAGE: &str = "postgresql-17";
/// Memory of a guest: enough for PostgreSQL with small buffers.
pub const MEMORY_BYTES: u64 = 512 << 20;
/// Where images lie when `ONECOPY_GUEST_DIRECTORY` names no other place, as in `guest/build-image.sh`.
const IMAGES: &str = "/var/cache/onecopy/guest";
/// What a command in a guest may take; an emulated processor is slow, and may have to share.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);
/// Lines of the console that an error shows.
const CONSOLE_LINES: usize = 30;

/// Limits that a machine which has more to do does not reach; a test that waits longer has failed.
pub fn patient() -> TimeLimits {
    let long = Duration::from_secs(300);
    TimeLimits { start: long, power_down: long, quit: long, kill: long, pause: long, agent: long }
}

/// The built image's files.
#[derive(Debug, Clone)]
pub struct Image {
    directory: PathBuf,
}

impl Image {
    /// The image of that name, like [`IMAGE`]. It stays the same also when a newer one is built.
    ///
    /// # Errors
    ///
    /// When there is none; says how to get it.
    pub fn find(name: &str) -> anyhow::Result<Image> {
        let images = std::env::var_os("ONECOPY_GUEST_DIRECTORY").map_or_else(|| IMAGES.into(), PathBuf::from);
        let link = images.join(name);
        let directory = link.canonicalize().with_context(|| format!("no image {}: run make guest", link.display()))?;
        Ok(Image { directory })
    }

    /// The root file system, not to be written to: [`Image::root_in`] gives one that may be.
    pub fn root(&self) -> PathBuf {
        self.directory.join("root.img")
    }

    /// The description.
    pub fn manifest(&self) -> PathBuf {
        self.directory.join("manifest.toml")
    }

    /// How it is booted, with further words for the guest's kernel.
    pub fn boot(&self, arguments: &str) -> Boot {
        Boot::Kernel {
            kernel: self.directory.join("vmlinuz"),
            initrd: Some(self.directory.join("initrd")),
            arguments: format!("{KERNEL_ARGUMENTS} root=/dev/vda quiet {arguments}"),
        }
    }

    /// A copy of the root file system of its own, on a disk of that size; `directory` gets it as `root.img`.
    ///
    /// # Errors
    ///
    /// When it cannot be copied.
    pub fn root_in(&self, directory: &Path, size_bytes: u64) -> anyhow::Result<PathBuf> {
        let copy = directory.join("root.img");
        let copied =
            Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(self.root()).arg(&copy).output()?;
        ensure!(copied.status.success(), "cp: {}", String::from_utf8_lossy(&copied.stderr));
        let file = std::fs::OpenOptions::new().write(true).open(&copy)?;
        file.set_len(size_bytes.max(file.metadata()?.len()))?;
        Ok(copy)
    }
}

/// A raw file as a guest's disk.
pub fn file_disk(id: &str, path: PathBuf) -> Disk {
    let format = FileFormat::Raw;
    Disk::new(
        id,
        DiskDoor::File { path, format, read_only: false, direct: false, asynchronous_io: AsynchronousIo::Threads },
    )
}

/// A guest that runs.
#[derive(Debug)]
pub struct TestGuest {
    machine: Machine,
    agent: Option<Agent>,
    directory: Arc<TempDir>,
}

impl TestGuest {
    /// A directory for a guest and its disks, which QEMU under any account reaches.
    ///
    /// # Errors
    ///
    /// When it cannot be made.
    pub fn directory() -> anyhow::Result<Arc<TempDir>> {
        let directory = tempfile::tempdir()?;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        Ok(Arc::new(directory))
    }

    /// Boots the image from a copy of its root file system, as it is.
    ///
    /// # Errors
    ///
    /// What did not work, with the end of the guest's console.
    pub async fn boot() -> anyhow::Result<TestGuest> {
        TestGuest::boot_with(|_, _| Ok(())).await
    }

    /// The same with a configuration that `change` has changed; it gets the guest's directory for more disks. The first disk is
    /// the root file system's copy.
    ///
    /// # Errors
    ///
    /// What did not work, with the end of the guest's console.
    pub async fn boot_with(
        change: impl FnOnce(&mut MachineConfiguration, &Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<TestGuest> {
        let image = Image::find(IMAGE)?;
        let directory = TestGuest::directory()?;
        let root = image.root_in(directory.path(), 0)?;
        TestGuest::boot_from(&image, directory, file_disk("root", root), change).await
    }

    /// Boots the image from any disk that holds its root file system, in a directory of [`TestGuest::directory`].
    ///
    /// # Errors
    ///
    /// What did not work, with the end of the guest's console.
    pub async fn boot_from(
        image: &Image,
        directory: Arc<TempDir>,
        root: Disk,
        change: impl FnOnce(&mut MachineConfiguration, &Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<TestGuest> {
        let mut configuration = MachineConfiguration::new("guest", MEMORY_BYTES, image.boot(""));
        configuration.disks.push(root);
        change(&mut configuration, directory.path())?;
        let run = MachineDirectory::new(directory.path().join("run"))?;
        let machine = Machine::start(&Qemu::find()?, &configuration, &run, &[], patient()).await?;
        match machine.agent().await {
            Ok(agent) => Ok(TestGuest { machine, agent: Some(agent), directory }),
            Err(error) => {
                machine.kill();
                bail!("{error}\n{}", machine.console().tail(CONSOLE_LINES))
            }
        }
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The guest's agent.
    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("a test that has hung up asks the machine for an agent")
    }

    /// Ends the connection to the agent, which serves one at a time.
    pub fn hang_up(&mut self) {
        self.agent = None;
    }

    /// Where its disks are.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// What a script of bash writes to its standard output, run by root.
    ///
    /// # Errors
    ///
    /// When it ends with another status than 0: what it complained.
    pub async fn run(&self, script: &str) -> anyhow::Result<String> {
        self.run_as(None, script).await
    }

    /// What one SQL statement in the guest's own server gives, unaligned.
    ///
    /// # Errors
    ///
    /// What `psql` said.
    pub async fn sql(&self, statement: &str) -> anyhow::Result<String> {
        let quoted = statement.replace('\'', r"'\''");
        self.run_as(Some("postgres"), &format!("psql -XAtq -v ON_ERROR_STOP=1 -c '{quoted}' postgres")).await
    }

    async fn run_as(&self, user: Option<&str>, script: &str) -> anyhow::Result<String> {
        let execute = Execute {
            argv: ["bash", "-c", script].map(str::to_owned).to_vec(),
            user: user.map(str::to_owned),
            timeout_ms: u64::try_from(COMMAND_TIMEOUT.as_millis())?,
            ..Execute::default()
        };
        let ended = self.agent().execute_as(execute).await?;
        let output = ended.stdout.to_text();
        ensure!(ended.status == Some(0), "{script}: {:?}\n{output}{}", ended.status, ended.stderr.to_text());
        Ok(output.trim_end().to_owned())
    }

    /// Runs the verifying workload (`guest-agent exercise`) with these arguments; what it reports. Wrong data are no error here:
    /// `errors` counts them.
    ///
    /// # Errors
    ///
    /// When it did not run.
    pub async fn exercise(&self, arguments: &str) -> anyhow::Result<serde_json::Value> {
        // Status 1 says that the report has errors.
        let output = self.run(&format!("guest-agent exercise {arguments} || [ $? = 1 ]")).await?;
        serde_json::from_str(&output).with_context(|| format!("no report: {output}"))
    }

    /// Presses the power button and waits for the guest's end; what is left of it in its directory.
    ///
    /// # Errors
    ///
    /// When it does not end.
    pub async fn power_down(self) -> anyhow::Result<(Arc<Ending>, Arc<TempDir>)> {
        let ending = self.machine.power_down().await?;
        Ok((ending, Arc::clone(&self.directory)))
    }
}

impl Drop for TestGuest {
    fn drop(&mut self) {
        self.machine.kill();
    }
}
