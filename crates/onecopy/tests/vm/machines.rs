//! A directory with machines; whatever happens, nothing of them outlives its test.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use onecopy_testing::process::{self, arguments, kill_all, lives};
use onecopy_testing::wait::until_within;
use serde_json::Value;

use crate::directory::ClusterDirectory;

/// Far beyond what a guest needs without hardware help on a busy machine; a test that waits longer has failed.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// A directory whose machines end with it.
pub struct MachineDirectory {
    pub directory: ClusterDirectory,
}

impl MachineDirectory {
    pub fn new() -> MachineDirectory {
        MachineDirectory { directory: ClusterDirectory::new() }
    }

    pub fn within(place: &Path) -> MachineDirectory {
        MachineDirectory { directory: ClusterDirectory::within(place) }
    }

    /// One whose directory has a path that no Unix socket can have.
    pub fn deep() -> MachineDirectory {
        MachineDirectory { directory: ClusterDirectory::named(&"deep".repeat(30)) }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path()
    }

    pub fn home(&self, machine: &str) -> PathBuf {
        self.path().join("machines").join(machine)
    }

    /// Puts lines before all others of the file that says what a machine is made of.
    pub fn configure(&self, machine: &str, lines: &str) {
        let file = self.home(machine).join("machine.toml");
        let text = std::fs::read_to_string(&file).expect("read");
        std::fs::write(&file, format!("{lines}\n{text}")).expect("write");
    }

    /// The number in a file of a machine, or of its `run`, while that process lives.
    pub fn process(&self, machine: &str, file: &str) -> Option<u32> {
        let read = |directory: &str| std::fs::read_to_string(self.home(machine).join(directory).join(file));
        let number = read("").or_else(|_| read("run")).ok()?.trim().parse().ok()?;
        lives(number).then_some(number)
    }

    /// What `onecopy vm list` says of one machine; null when it is not there.
    #[track_caller]
    pub fn machine(&self, name: &str) -> Value {
        let list: Value = serde_json::from_str(&self.directory.run(&["vm", "list", "--json"]).ok()).expect("JSON");
        let found = list.as_array().expect("a list").iter().find(|machine| machine["name"] == name);
        found.cloned().unwrap_or_default()
    }

    /// What the guest of a machine says.
    #[track_caller]
    pub fn guest(&self, machine: &str, command: &str) -> String {
        self.directory.run(&["vm", "exec", machine, "--", "sh", "-c", command]).ok().trim().to_owned()
    }

    /// Kills a process of a machine as a crash would, and waits until it is gone.
    #[track_caller]
    pub fn kill(&self, machine: &str, file: &str) -> u32 {
        let number = self.process(machine, file).unwrap_or_else(|| panic!("{file} of {machine} names a process"));
        process::kill(number);
        number
    }

    /// Every process that works for a machine of this directory.
    pub fn processes(&self) -> Vec<u32> {
        let root = self.path().join("machines");
        let root = root.to_string_lossy();
        process::all().filter(|number| arguments(*number).iter().any(|word| word.contains(&*root))).collect()
    }
}

impl Drop for MachineDirectory {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for entry in std::fs::read_dir(self.path().join("machines")).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                for file in [
                    "keeper.log",
                    "disk.log",
                    "memory.log",
                    "run/console.log",
                    "end.json",
                    "migration.json",
                    "arrival.json",
                ] {
                    match std::fs::read_to_string(entry.path().join(file)) {
                        Ok(text) => eprintln!("{name} {file}:\n{text}"),
                        Err(error) => eprintln!("{name} {file}: {error}"),
                    }
                }
            }
        }
        // In order first, as far as it goes: the daemon would start again what is killed.
        let _ = self.directory.run(&["down"]);
        kill_all(|| self.processes());
        for entry in std::fs::read_dir(self.path().join("machines")).into_iter().flatten().flatten() {
            // Where nothing is mounted, and that is what is wanted, it complains.
            let _ =
                Command::new("umount").arg("--lazy").arg(entry.path().join("memory")).stderr(Stdio::null()).status();
        }
    }
}

/// Waits for a guest until `holds`.
#[track_caller]
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    until_within(WAIT_MAX, what, holds);
}
