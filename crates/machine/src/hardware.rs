//! What a machine's checkpoint is good for: the QEMU, board, processors and devices that it was taken on.

use std::io::Write;
use std::path::Path;

use onecopy_hypervisor::Machine;
use serde::{Deserialize, Serialize};

const FILE: &str = "hardware.json";

/// Options of QEMU that say what the guest finds, and what its state fits to.
const OPTIONS: [&str; 6] = ["-accel", "-machine", "-cpu", "-smp", "-m", "-device"];

/// What of these a machine may have otherwise.
const IGNORED: [&str; 5] = ["mac=", "cyls=", "heads=", "secs=", "thread="];

/// A machine's hardware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hardware {
    qemu: String,
    /// Options with their values, in QEMU's order.
    options: Vec<String>,
}

impl Hardware {
    pub(crate) fn new(qemu: &str, arguments: &[String]) -> Hardware {
        let pairs = arguments.windows(2).filter(|pair| OPTIONS.contains(&pair[0].as_str()));
        Hardware { qemu: qemu.to_owned(), options: pairs.map(|pair| pair.join(" ")).collect() }
    }

    /// That of a machine that runs, as its QEMU was started.
    pub(crate) fn of_process(machine: &Machine) -> Result<Hardware, String> {
        let path = format!("/proc/{}/cmdline", machine.process_id());
        let arguments = std::fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
        let words = String::from_utf8_lossy(&arguments);
        let words: Vec<String> = words.split('\0').map(str::to_owned).collect();
        Ok(Hardware::new(&machine.monitor().version().to_string(), &words))
    }

    pub(crate) fn read(directory: &Path) -> Result<Hardware, String> {
        let path = directory.join(FILE);
        let text = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    pub(crate) fn write(&self, directory: &Path) -> std::io::Result<()> {
        let mut file = std::fs::File::create(directory.join(FILE))?;
        file.write_all(&serde_json::to_vec(self).expect("texts"))?;
        file.sync_all()
    }

    /// Without the cards' addresses, which come with their state: a fork has its parent's until it boots.
    /// And without a disk's geometry, which a machine is told that has come from another host: it has read it long ago.
    /// Nor does a guest find how many threads translate its processors.
    fn compared(&self) -> Vec<String> {
        let without = |option: &String| {
            let parts = option.split(',').filter(|part| !IGNORED.iter().any(|begin| part.starts_with(begin)));
            parts.collect::<Vec<_>>().join(",")
        };
        self.options.iter().map(without).collect()
    }

    /// Refuses another one, with what is different.
    pub(crate) fn check(&self, other: &Hardware) -> Result<(), String> {
        if self.qemu != other.qemu {
            return Err(format!("its checkpoints are of QEMU {}, and this is {}", self.qemu, other.qemu));
        }
        let (own, others) = (self.compared(), other.compared());
        let missing = own.iter().find(|option| !others.contains(option));
        let new = others.iter().find(|option| !own.contains(option));
        let none = || "nothing".to_owned();
        if own == others {
            return Ok(());
        }
        let (was, is) = (missing.cloned().unwrap_or_else(none), new.cloned().unwrap_or_else(none));
        Err(format!("its checkpoints are of other hardware: {was} then, {is} now"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hardware(arguments: &[&str]) -> Hardware {
        let words: Vec<String> = arguments.iter().map(|&word| word.to_owned()).collect();
        Hardware::new("10.0", &words)
    }

    /// Spec: D6
    #[test]
    fn t17_what_is_different_is_named_and_what_a_guest_does_not_find_is_not_looked_at() {
        let usual = ["-name", "a", "-machine", "q35", "-smp", "1", "-device", "virtio-blk-pci", "-S"];
        let known = hardware(&usual);
        assert_eq!(known.check(&hardware(&["-machine", "q35", "-smp", "1", "-device", "virtio-blk-pci"])), Ok(()));
        let translated = hardware(&["-accel", "tcg,tb-size=256", "-smp", "2"]);
        assert_eq!(translated.check(&hardware(&["-accel", "tcg,tb-size=256,thread=single", "-smp", "2"])), Ok(()));
        translated.check(&hardware(&["-accel", "kvm", "-smp", "2"])).unwrap_err();
        let changed = |from: &str, to: &str| {
            let words: Vec<&str> = usual.iter().map(|&word| if word == from { to } else { word }).collect();
            known.check(&hardware(&words)).unwrap_err()
        };
        for (from, to) in [("1", "2"), ("q35", "microvm"), ("virtio-blk-pci", "vhost-user-blk-pci")] {
            let said = changed(from, to);
            assert!(said.contains(from) && said.contains(to), "{said}");
        }
        let more = [&usual[..], &["-device", "virtio-balloon-pci"]].concat();
        assert!(known.check(&hardware(&more)).unwrap_err().contains("nothing then, -device virtio-balloon-pci now"));
        let newer = Hardware { qemu: "10.1".to_owned(), ..known.clone() };
        let said = known.check(&newer).unwrap_err();
        assert!(said.contains("10.0") && said.contains("10.1"), "{said}");
        let directory = tempfile::tempdir().unwrap();
        known.write(directory.path()).unwrap();
        assert_eq!(Hardware::read(directory.path()), Ok(known));
    }
}
