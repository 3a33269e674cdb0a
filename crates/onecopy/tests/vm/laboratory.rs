//! A directory with machines; whatever happens, nothing of them outlives its test.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::directory::{TestDirectory, lives, send};

/// Far beyond what a guest needs without hardware help on a busy machine; a test that waits longer has failed.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// A directory whose machines end with it.
pub struct Laboratory {
    pub directory: TestDirectory,
}

impl Laboratory {
    pub fn new() -> Laboratory {
        Laboratory { directory: TestDirectory::new() }
    }

    /// One whose directory has a path that no Unix socket can have.
    pub fn deep() -> Laboratory {
        Laboratory { directory: TestDirectory::named(&"deep".repeat(30)) }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path()
    }

    pub fn home(&self, machine: &str) -> PathBuf {
        self.path().join("machines").join(machine)
    }

    /// The number in a file of a machine, or of its `run`, while that process lives.
    pub fn process(&self, machine: &str, file: &str) -> Option<u32> {
        process(&self.home(machine), file)
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
        send("KILL", number);
        wait_until("it is gone", || !lives(number));
        number
    }

    /// Every process that works for a machine of this directory.
    pub fn processes(&self) -> Vec<u32> {
        let root = self.path().join("machines");
        let root = root.to_string_lossy();
        let entries = std::fs::read_dir("/proc").expect("the list of processes").flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
        let works = |number: &u32| {
            let arguments = std::fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&arguments).contains(&*root)
        };
        numbers.filter(works).collect()
    }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for entry in std::fs::read_dir(self.path().join("machines")).into_iter().flatten().flatten() {
                for log in ["keeper.log", "disk.log", "end.json"] {
                    let text = std::fs::read_to_string(entry.path().join(log)).unwrap_or_default();
                    eprintln!("{} {log}:\n{text}", entry.file_name().to_string_lossy());
                }
            }
        }
        // In order first, as far as it goes: the daemon would start again what is killed.
        let _ = self.directory.run(&["down"]);
        for number in self.processes() {
            let _ = std::process::Command::new("kill").args(["-KILL", &number.to_string()]).status();
        }
    }
}

fn process(home: &Path, file: &str) -> Option<u32> {
    let text =
        std::fs::read_to_string(home.join(file)).or_else(|_| std::fs::read_to_string(home.join("run").join(file)));
    let number = text.ok()?.trim().parse().ok()?;
    lives(number).then_some(number)
}

#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < WAIT_MAX, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
