//! What a machine is made of: the file `machine.toml` of its directory.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use onecopy_disk::vhost_user::QUEUES_MAX;
use onecopy_hypervisor::QemuVersion;
use serde::{Deserialize, Serialize};

use super::MachineError;
use super::files::write_own_file;
use super::network::BridgedNetwork;

/// Form of the file that this program reads and writes.
const FORMAT: u32 = 1;

/// Memory of a machine that nobody gave another size: a server with its usual pool, its connections and its file cache.
pub const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;

/// The least memory that the guest's kernel and a server start with.
pub const MEMORY_BYTES_MIN: u64 = 256 << 20;

/// Memory is given in pages as large as a huge one, so that every back end can have it.
const MEMORY_UNIT_BYTES: u64 = 2 << 20;

/// Size of a disk that nobody gave another size; only what is written takes place.
pub const DISK_BYTES_DEFAULT: u64 = 16 << 30;

/// Disks have whole megabytes: every file system and partition can have that.
const DISK_UNIT_BYTES: u64 = 1 << 20;

/// As many processors as the disk's back end has queues, so that each has one of its own; more than any host of ours
/// gives to one machine.
pub const PROCESSORS_MAX: u32 = QUEUES_MAX as u32;

/// More ports than anybody forwards by hand.
const FORWARDS_MAX: usize = 32;

/// A guest whose agent has not answered for so long is unresponsive, where nobody has said otherwise, in seconds:
/// without hardware help and on a busy host an answer may take a minute.
const SILENT_AFTER_S_DEFAULT: u64 = 180;

/// Whoever waits longer for a unresponsive guest waits for ever.
const SILENT_AFTER_S_MAX: u64 = 86_400;

/// The port of a server in a guest.
pub const GUEST_PORT: u16 = 5432;

/// How a machine's disk is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Over NBD: QEMU's own device, which can be checkpointed and forked.
    Nbd,
    /// By vhost-user-blk: the disk's process reads and writes the guest's memory itself.
    Vhost,
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Transport, String> {
        match text {
            "nbd" => Ok(Transport::Nbd),
            "vhost" => Ok(Transport::Vhost),
            _ => Err("it is neither nbd nor vhost".to_owned()),
        }
    }
}

/// What a machine is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineConfiguration {
    /// Form of this file.
    pub format: u32,
    /// Memory.
    pub memory_bytes: u64,
    /// Processors.
    pub processors: u32,
    /// Size of the disk. It is fixed when the disk is made.
    pub disk_bytes: u64,
    /// Directory of the guest image that the disk begins with.
    pub image: PathBuf,
    /// The guest runs a PostgreSQL server, which is started with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub postgresql: bool,
    /// Its memory is a file that a memory server of ours serves, which checkpoints are taken of, and its disk comes
    /// over NBD.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub checkpoints: bool,
    /// How its disk is attached; none: over NBD where it can be checkpointed, else by vhost-user-blk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// The guest is unresponsive when it runs and its agent has not answered for so many seconds.
    #[serde(default = "silent_after_s_default", skip_serializing_if = "is_silent_after_s_default")]
    pub silent_after_s: u64,
    /// A guest that has become unresponsive is ended, as by a power cut, so that its supervisor boots it again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub end_when_silent: bool,
    /// As a fork that shares its parent's memory: the kernel may merge what it has changed with equal pages of others.
    /// What others have is then told by the time that its writes take: for machines that trust each other.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub merge_equal_pages: bool,
    /// Its card is on a bridge; none: QEMU's own network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<BridgedNetwork>,
    /// Ports of 127.0.0.1 that lead into the guest.
    #[serde(default, rename = "forward", skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<Forward>,
}

/// A port of this host on 127.0.0.1 that leads to one of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// Port of 127.0.0.1; 0 in a request: any free one.
    pub host_port: u16,
    /// The guest's.
    pub guest_port: u16,
}

impl FromStr for Forward {
    type Err = String;

    /// Understands `HOST:GUEST`.
    fn from_str(text: &str) -> Result<Forward, String> {
        let ports = text.split_once(':').and_then(|(host, guest)| Some((host.parse().ok()?, guest.parse().ok()?)));
        match ports {
            Some((host_port, guest_port)) if guest_port != 0 => Ok(Forward { host_port, guest_port }),
            _ => Err("it is not of the form HOST:GUEST, two ports; HOST 0: any free one".to_owned()),
        }
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.host_port, self.guest_port)
    }
}

impl MachineConfiguration {
    /// A machine of the default size from this image.
    pub fn new(image: PathBuf) -> MachineConfiguration {
        MachineConfiguration {
            format: FORMAT,
            memory_bytes: MEMORY_BYTES_DEFAULT,
            processors: 1,
            disk_bytes: DISK_BYTES_DEFAULT,
            image,
            postgresql: false,
            checkpoints: false,
            transport: None,
            silent_after_s: SILENT_AFTER_S_DEFAULT,
            end_when_silent: false,
            merge_equal_pages: false,
            network: None,
            forwards: Vec::new(),
        }
    }

    /// How its disk is attached.
    pub fn transport(&self) -> Transport {
        self.transport.unwrap_or(if self.checkpoints { Transport::Nbd } else { Transport::Vhost })
    }

    /// The port of 127.0.0.1 that leads to this port of the guest.
    pub fn host_port(&self, guest_port: u16) -> Option<u16> {
        self.forwards.iter().find(|forward| forward.guest_port == guest_port).map(|forward| forward.host_port)
    }

    /// Where the guest's server is reached from this host; none: nowhere.
    pub fn server_place(&self) -> Option<(IpAddr, u16)> {
        match &self.network {
            Some(network) => network.address.map(|own| (own.address, GUEST_PORT)),
            None => self.host_port(GUEST_PORT).map(|port| (Ipv4Addr::LOCALHOST.into(), port)),
        }
    }

    /// Refuses what no machine can be.
    ///
    /// # Errors
    /// [`MachineError::InvalidConfiguration`] with what is wrong and what would be right.
    pub fn check(&self) -> Result<(), MachineError> {
        let invalid = |reason: String| Err(MachineError::InvalidConfiguration { reason });
        if self.memory_bytes < MEMORY_BYTES_MIN || !self.memory_bytes.is_multiple_of(MEMORY_UNIT_BYTES) {
            return invalid(format!(
                "{} bytes of memory are not at least 256MB and a multiple of 2MB; give another --memory",
                self.memory_bytes
            ));
        }
        if self.processors == 0 || self.processors > PROCESSORS_MAX {
            let processors = self.processors;
            return invalid(format!(
                "{processors} processors are not 1 to {PROCESSORS_MAX}; give another --processors"
            ));
        }
        if self.disk_bytes == 0 || !self.disk_bytes.is_multiple_of(DISK_UNIT_BYTES) {
            return invalid(format!(
                "a disk of {} bytes is not a multiple of 1MB; give another --disk",
                self.disk_bytes
            ));
        }
        if self.silent_after_s == 0 || self.silent_after_s > SILENT_AFTER_S_MAX {
            let seconds = self.silent_after_s;
            return invalid(format!("{seconds} s are not 1 to {SILENT_AFTER_S_MAX}; give another silent_after_s"));
        }
        if self.checkpoints && self.transport() == Transport::Vhost {
            return invalid(
                "by vhost a disk's process writes into memory that QEMU has not locked, which no checkpoint can be \
                 taken of; give --transport nbd, or leave out --checkpoints"
                    .to_owned(),
            );
        }
        if let Some(network) = &self.network {
            network.check().or_else(invalid)?;
            if !self.forwards.is_empty() {
                let reason = "ports are forwarded into QEMU's own network alone; a machine on a bridge is reached by \
                              its address: leave out --forward, or --network bridge=..";
                return invalid(reason.to_owned());
            }
            if self.postgresql && network.address.is_none() {
                let reason = "a server on a bridge is reached by an address that is known here; give \
                              --network bridge=..,address=ADDRESS/BITS";
                return invalid(reason.to_owned());
            }
        }
        if self.forwards.len() > FORWARDS_MAX {
            return invalid(format!("{} ports are forwarded, at most {FORWARDS_MAX} can be", self.forwards.len()));
        }
        let mut taken = BTreeSet::new();
        match self.forwards.iter().find(|forward| forward.host_port != 0 && !taken.insert(forward.host_port)) {
            Some(twice) => {
                invalid(format!("port {} leads to two of the guest's; give another --forward", twice.host_port))
            }
            None => Ok(()),
        }
    }

    /// Refuses machines that can be checkpointed where there can be none: below this QEMU, or by this account.
    ///
    /// # Errors
    /// [`MachineError::NoCheckpoints`] with what is missing.
    pub fn check_checkpoints(version: QemuVersion) -> Result<(), MachineError> {
        if version < QemuVersion::LOCKS_ON_FAULT {
            let reason = format!("needs QEMU {} or newer, and this is {version}", QemuVersion::LOCKS_ON_FAULT);
            return Err(MachineError::NoCheckpoints { reason });
        }
        refuse_memory_elsewhere()
    }

    /// Refuses a machine on a bridge where nobody could plug it in.
    ///
    /// # Errors
    /// [`MachineError::InvalidConfiguration`] with what is missing.
    pub fn check_network(&self, version: QemuVersion) -> Result<(), MachineError> {
        if self.network.is_none() {
            return Ok(());
        }
        if version < QemuVersion::RECONNECT_MS {
            let reason = format!(
                "a machine on a bridge needs QEMU {} or newer, and this is {version}",
                QemuVersion::RECONNECT_MS
            );
            return Err(MachineError::InvalidConfiguration { reason });
        }
        BridgedNetwork::refuse_elsewhere()
    }

    /// Reads the file.
    ///
    /// # Errors
    /// [`MachineError::Directory`]; [`MachineError::InvalidFile`] when it is not such a file.
    pub fn read(path: &Path) -> Result<MachineConfiguration, MachineError> {
        let text = fs::read_to_string(path).map_err(MachineError::file("read", path))?;
        let invalid = |reason: String| MachineError::InvalidFile { path: path.to_owned(), reason };
        let configuration: MachineConfiguration = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        if configuration.format != FORMAT {
            return Err(invalid(format!("it has form {}, this program knows {FORMAT}", configuration.format)));
        }
        configuration.check().map_err(|error| invalid(error.to_string()))?;
        Ok(configuration)
    }

    /// Replaces the file as a whole; it belongs to `user`.
    ///
    /// # Errors
    /// [`MachineError::Postgres`] when it cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), MachineError> {
        let text = toml::to_string(self).expect("numbers, paths and lists have a TOML form");
        let text = format!("# Written by onecopy; it counts from the machine's next start.\n{text}");
        write_own_file(path, text.as_bytes(), 0o644)
    }
}

fn silent_after_s_default() -> u64 {
    SILENT_AFTER_S_DEFAULT
}

fn is_silent_after_s_default(seconds: &u64) -> bool {
    *seconds == SILENT_AFTER_S_DEFAULT
}

/// Refuses where no memory can be mounted.
pub(crate) fn refuse_memory_elsewhere() -> Result<(), MachineError> {
    let missing = |reason: &str| Err(MachineError::NoCheckpoints { reason: reason.to_owned() });
    if !rustix::process::geteuid().is_root() {
        return missing("is started by root alone, who may mount its memory");
    }
    match fs::metadata("/dev/fuse") {
        Ok(device) if device.rdev() != 0 => Ok(()),
        _ => missing("needs FUSE on its host (/dev/fuse is not there)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("machine.toml");
        let mut configuration = MachineConfiguration::new("/image".into());
        configuration.forwards = vec!["15432:5432".parse().unwrap(), "0:80".parse().unwrap()];
        fs::write(&path, toml::to_string(&configuration).unwrap()).unwrap();
        assert_eq!(MachineConfiguration::read(&path).unwrap(), configuration);
        (configuration.silent_after_s, configuration.end_when_silent, configuration.checkpoints) = (30, true, true);
        (configuration.transport, configuration.merge_equal_pages) = (Some(Transport::Nbd), true);
        fs::write(&path, toml::to_string(&configuration).unwrap()).unwrap();
        assert_eq!(MachineConfiguration::read(&path).unwrap(), configuration);
        let mut on_bridge = configuration.clone();
        (on_bridge.forwards, on_bridge.network) = (Vec::new(), bridged("bridge = 'br0'\nfilter = false"));
        fs::write(&path, toml::to_string(&on_bridge).unwrap()).unwrap();
        assert_eq!(MachineConfiguration::read(&path).unwrap(), on_bridge);
        fs::write(&path, toml::to_string(&configuration).unwrap()).unwrap();
        assert_eq!(MachineConfiguration::read(&path).unwrap(), configuration);
        assert_eq!(configuration.host_port(GUEST_PORT), Some(15432));
        for (text, expected) in [("format = 9", "missing field"), ("memory_bytes = 1\n", "machine.toml")] {
            fs::write(&path, text).unwrap();
            let error = MachineConfiguration::read(&path).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    fn bridged(text: &str) -> Option<BridgedNetwork> {
        Some(toml::from_str(text).unwrap())
    }

    #[test]
    fn a_disk_is_attached_as_was_chosen_or_as_checkpoints_need_it() {
        let mut configuration = MachineConfiguration::new("/image".into());
        assert_eq!(configuration.transport(), Transport::Vhost, "as machines had it before it could be chosen");
        configuration.checkpoints = true;
        assert_eq!(configuration.transport(), Transport::Nbd);
        configuration.checkpoints = false;
        configuration.transport = Some("nbd".parse().unwrap());
        assert_eq!(configuration.transport(), Transport::Nbd);
        "scsi".parse::<Transport>().unwrap_err();
    }

    #[test]
    fn a_server_is_reached_by_a_forwarded_port_or_its_address() {
        let mut configuration = MachineConfiguration::new("/image".into());
        assert_eq!(configuration.server_place(), None);
        configuration.forwards = vec!["15432:5432".parse().unwrap()];
        assert_eq!(configuration.server_place(), Some(("127.0.0.1".parse().unwrap(), 15432)));
        configuration.network = bridged("bridge = 'br0'\naddress = '192.0.2.10/24'");
        assert_eq!(configuration.server_place(), Some(("192.0.2.10".parse().unwrap(), GUEST_PORT)));
    }

    #[test]
    fn what_no_machine_can_be_is_refused_with_its_option() {
        type Change = fn(&mut MachineConfiguration);
        let cases: [(Change, &str); 12] = [
            (|machine| machine.memory_bytes = 255 << 20, "--memory"),
            (|machine| machine.memory_bytes += 4096, "--memory"),
            (|machine| machine.processors = 0, "--processors"),
            (|machine| machine.processors = 65, "--processors"),
            (|machine| machine.disk_bytes = 1000, "--disk"),
            (|machine| machine.silent_after_s = 0, "silent_after_s"),
            (|machine| machine.silent_after_s = 86_401, "silent_after_s"),
            (|machine| machine.forwards = vec!["1:2".parse().unwrap(), "1:3".parse().unwrap()], "--forward"),
            (|machine| (machine.checkpoints, machine.transport) = (true, Some(Transport::Vhost)), "--transport nbd"),
            (|machine| machine.network = bridged("bridge = 'a/b'"), "a/b"),
            (
                |machine| {
                    machine.network = bridged("bridge = 'br0'");
                    machine.forwards = vec!["1:2".parse().unwrap()];
                },
                "--forward",
            ),
            (
                |machine| {
                    machine.network = bridged("bridge = 'br0'");
                    machine.postgresql = true;
                },
                "address=ADDRESS/BITS",
            ),
        ];
        for (change, option) in cases {
            let mut configuration = MachineConfiguration::new("/image".into());
            configuration.check().unwrap();
            change(&mut configuration);
            let error = configuration.check().unwrap_err().to_string();
            assert!(error.contains(option), "{error}");
        }
        for text in ["", "1", "1:", ":1", "x:1", "1:0", "1:2:3", "70000:1"] {
            assert!(text.parse::<Forward>().is_err(), "{text}");
        }
    }
}
