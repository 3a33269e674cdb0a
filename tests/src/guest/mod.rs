//! Guests: booted from the built image, or restored as they were after a boot. Each has a directory of its own that
//! goes away with the value, as does its QEMU.

mod image;
mod saved;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use onecopy_guest_agent::protocol::Execute;
use onecopy_hypervisor::configuration::{Disk, Incoming};
use onecopy_hypervisor::{Agent, Ending, Machine, MachineConfiguration, MachineDirectory, Qemu, TimeLimits};
use onecopy_testing::guest_exercise;
use tempfile::TempDir;

pub use image::{IMAGE, Image, file_disk};
pub use saved::Saved;

/// Memory of a guest: enough for PostgreSQL with small buffers.
pub const MEMORY_BYTES: u64 = 512 << 20;
/// What a command in a guest may take; an emulated processor is slow, and may have to share.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);
/// Lines of the console that an error shows.
const CONSOLE_LINES: usize = 30;
/// A restored guest finds what was not there when it was saved, and gives its first network card what that would have
/// after a boot (`onecopy-init`).
const FIND_DEVICES: &str = "set -e; echo 1 > /sys/bus/pci/rescan; if [ -e /sys/class/net/eth0 ]; then \
     ip address replace 10.0.2.15/24 dev eth0; ip link set eth0 up; ip route replace default via 10.0.2.2; fi";

/// Limits that a machine which has more to do does not reach; a test that waits longer has failed.
pub fn long_time_limits() -> TimeLimits {
    let long = Duration::from_secs(300);
    TimeLimits { start: long, power_down: long, quit: long, kill: long, pause: long, agent: long }
}

/// A machine of the image, without disks.
fn configuration(image: &Image) -> MachineConfiguration {
    MachineConfiguration::new("guest", MEMORY_BYTES, image.boot(""))
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

    /// Boots the image from a copy of its root file system, with a configuration that `change` has changed; it gets the
    /// guest's directory for more disks. The first disk is the copy. What is not about booting is quicker with
    /// [`TestGuest::restored`].
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
        let mut configuration = configuration(image);
        configuration.disks.push(root);
        change(&mut configuration, directory.path())?;
        TestGuest::start(&configuration, directory).await?.greeted().await
    }

    /// A guest as it is after a boot, for all that is not about booting: it takes a tenth of the time.
    ///
    /// # Errors
    ///
    /// What did not work, with the end of the guest's console.
    pub async fn restored() -> anyhow::Result<TestGuest> {
        TestGuest::restored_with(|_, _| Ok(())).await
    }

    /// The same on a machine that `change` has given more disks, networks or another account. The root disk, the first,
    /// may be another one that holds the same. The rest is as it was saved.
    ///
    /// # Errors
    ///
    /// What did not work, with the end of the guest's console.
    pub async fn restored_with(
        change: impl FnOnce(&mut MachineConfiguration, &Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<TestGuest> {
        TestGuest::restored_from(Saved::Booted, TestGuest::directory()?, change).await
    }

    /// Any saved guest in a directory of [`TestGuest::directory`], which gets its root disk as `root.img`. Its clock is
    /// right, and its random numbers are its own; its boot id, machine id and name are those of all that are restored.
    ///
    /// # Errors
    ///
    /// What did not work, with the end of the guest's console.
    pub async fn restored_from(
        saved: Saved,
        directory: Arc<TempDir>,
        change: impl FnOnce(&mut MachineConfiguration, &Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<TestGuest> {
        let image = Image::find(IMAGE)?;
        let held = saved.hold(&image).await?;
        let mut configuration = saved::saved_configuration(&image);
        configuration.disks.push(file_disk("root", held.root_in(directory.path())?));
        let like_saved = configuration.clone();
        change(&mut configuration, directory.path())?;
        saved::ensure_fits(&like_saved, &configuration)?;
        configuration.incoming = Some(Incoming::Deferred);
        let guest = TestGuest::start(&configuration, directory).await?;
        held.load(&guest.machine).await?;
        let guest = guest.greeted().await?;
        guest.agent().set_clock().await?;
        if configuration.disks.len() > 1 || !configuration.networks.is_empty() {
            guest.run(FIND_DEVICES).await?;
        }
        Ok(guest)
    }

    async fn start(configuration: &MachineConfiguration, directory: Arc<TempDir>) -> anyhow::Result<TestGuest> {
        let run = MachineDirectory::new(directory.path().join("run"))?;
        let machine = Machine::start(&Qemu::find()?, configuration, &run, &[], long_time_limits()).await?;
        Ok(TestGuest { machine, agent: None, directory })
    }

    /// Waits until its agent answers.
    async fn greeted(mut self) -> anyhow::Result<TestGuest> {
        match self.machine.agent().await {
            Ok(agent) => {
                self.agent = Some(agent);
                Ok(self)
            }
            Err(error) => bail!("{error}\n{}", self.machine.console().tail(CONSOLE_LINES)),
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

    /// Puts the program of the verifying workload into a guest that was booted; one that was restored has it.
    ///
    /// # Errors
    ///
    /// When it was not built, or the guest does not take it.
    pub async fn put_exercise(&self) -> anyhow::Result<()> {
        let program = guest_exercise::program()?;
        Ok(self.agent().write_file(guest_exercise::PLACE, guest_exercise::MODE, None, &program).await?)
    }

    /// Runs the verifying workload (`guest-exercise`) with these arguments; what it reports. Wrong data are no error
    /// here: `errors` counts them.
    ///
    /// # Errors
    ///
    /// When it did not run.
    pub async fn exercise(&self, arguments: &str) -> anyhow::Result<serde_json::Value> {
        // Status 1 says that the report has errors.
        let output = self.run(&format!("guest-exercise {arguments} || [ $? = 1 ]")).await?;
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
