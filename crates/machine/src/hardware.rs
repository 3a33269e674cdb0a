//! What a machine's checkpoint is good for: the QEMU, board, processors and devices that it was taken on.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use onecopy_hypervisor::Machine;
use serde::{Deserialize, Serialize};

const FILE: &str = "hardware.json";

/// Options of QEMU that say what the guest finds, and what its state fits to.
const OPTIONS: [&str; 6] = ["-accel", "-machine", "-cpu", "-smp", "-m", "-device"];

/// Among them where the host's own processor is the guest's, as far as KVM passes it on (`-cpu max`).
const KVM: &str = "-accel kvm";

/// Lines of /proc/cpuinfo that say what a processor is.
const MODEL: [&str; 3] = ["vendor_id", "cpu family", "model"];

/// The line that says what it can do.
const FEATURES: &str = "flags";

/// What of these a machine may have otherwise.
const IGNORED: [&str; 5] = ["mac=", "cyls=", "heads=", "secs=", "thread="];

/// A machine's hardware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hardware {
    qemu: String,
    /// Options with their values, in QEMU's order.
    options: Vec<String>,
    /// The host's processor, where it is the guest's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    processor: Option<Processor>,
}

/// A host's processor, as the kernel tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Processor {
    model: Vec<String>,
    features: BTreeSet<String>,
}

impl Processor {
    fn of_host() -> Result<Processor, String> {
        let path = "/proc/cpuinfo";
        std::fs::read_to_string(path).map(|text| Processor::read(&text)).map_err(|error| format!("{path}: {error}"))
    }

    /// The first one: those of a host are alike.
    fn read(text: &str) -> Processor {
        let line = |name: &str| {
            let found = text.lines().filter_map(|line| line.split_once(':')).find(|(key, _)| key.trim() == name);
            found.map_or("", |(_, value)| value.trim())
        };
        Processor {
            model: MODEL.map(|name| format!("{name} {}", line(name))).to_vec(),
            features: line(FEATURES).split_whitespace().map(str::to_owned).collect(),
        }
    }

    /// A guest may go on where all is that it has found.
    fn check(&self, other: &Processor) -> Result<(), String> {
        if self.model != other.model {
            let (was, is) = (self.model.join(", "), other.model.join(", "));
            return Err(format!("its checkpoints are of another processor: {was} then, {is} now"));
        }
        let missing: Vec<&str> = self.features.difference(&other.features).map(String::as_str).collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(format!("its checkpoints are of a processor that also had {}", missing.join(" "))),
        }
    }
}

impl Hardware {
    /// That of a machine that is started here with these arguments.
    pub(crate) fn new(qemu: &str, arguments: &[String]) -> Result<Hardware, String> {
        let pairs = arguments.windows(2).filter(|pair| OPTIONS.contains(&pair[0].as_str()));
        let options: Vec<String> = pairs.map(|pair| pair.join(" ")).collect();
        let has_hosts = options.iter().any(|option| option.starts_with(KVM));
        let processor = has_hosts.then(Processor::of_host).transpose()?;
        Ok(Hardware { qemu: qemu.to_owned(), options, processor })
    }

    /// That of a machine that runs, as its QEMU was started.
    pub(crate) fn of_process(machine: &Machine) -> Result<Hardware, String> {
        let path = format!("/proc/{}/cmdline", machine.process_id());
        let arguments = std::fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
        let words = String::from_utf8_lossy(&arguments);
        let words: Vec<String> = words.split('\0').map(str::to_owned).collect();
        Hardware::new(&machine.monitor().version().to_string(), &words)
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
            // Checkpoints of before this was looked at do not have it.
            let both = self.processor.as_ref().zip(other.processor.as_ref());
            return both.map_or(Ok(()), |(was, is)| was.check(is));
        }
        if missing.is_none() && new.is_none() {
            return Err("its checkpoints are of the same hardware in another order".to_owned());
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
        Hardware::new("10.0", &words).unwrap()
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
        // A device that a guest finds elsewhere is another one for it.
        let swapped = known.check(&hardware(&["-smp", "1", "-machine", "q35", "-device", "virtio-blk-pci"]));
        assert!(swapped.unwrap_err().ends_with("in another order"));
        let newer = Hardware { qemu: "10.1".to_owned(), ..known.clone() };
        let said = known.check(&newer).unwrap_err();
        assert!(said.contains("10.0") && said.contains("10.1"), "{said}");
        let host = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon\n\
                    flags\t\t: fpu avx2 avx512f\n";
        let of = |text: &str| Hardware { processor: Some(Processor::read(text)), ..known.clone() };
        assert_eq!(of(host).check(&of(&host.replace("Xeon", "another name").replace("fpu", "fpu new"))), Ok(()));
        assert_eq!(of(host).check(&known), Ok(()), "nobody has looked at that one");
        let said = of(host).check(&of(&host.replace(" avx512f", ""))).unwrap_err();
        assert!(said.ends_with("also had avx512f"), "{said}");
        for (from, to) in [("GenuineIntel", "AuthenticAMD"), (": 85", ": 106")] {
            let said = of(host).check(&of(&host.replace(from, to))).unwrap_err();
            assert!(said.contains(&from[2..]) && said.contains(&to[2..]), "{said}");
        }
        assert!(!hardware(&["-accel", "kvm"]).processor.unwrap().features.is_empty());
        assert_eq!(hardware(&["-accel", "tcg"]).processor, None);
        let known = of(host);
        let directory = tempfile::tempdir().unwrap();
        known.write(directory.path()).unwrap();
        assert_eq!(Hardware::read(directory.path()), Ok(known));
    }
}
