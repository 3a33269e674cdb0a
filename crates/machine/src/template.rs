//! What machines are made of: the template of a cluster's machines, and what a command line changes of it.

use std::path::PathBuf;

use onecopy_hypervisor::Qemu;
use serde::{Deserialize, Serialize};

use super::configuration::{DISK_BYTES_DEFAULT, MEMORY_BYTES_DEFAULT};
use super::{Forward, GuestImage, MachineConfiguration, MachineError};

/// What the machines of a cluster are made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineTemplate {
    /// Memory.
    pub memory_bytes: u64,
    /// Processors.
    pub processors: u32,
    /// Size of the disk of a machine that is made from now on.
    pub disk_bytes: u64,
    /// Directory of the guest image that a disk begins with.
    pub image: PathBuf,
    /// Memory is a file that checkpoints are taken of, so that machines can be forked.
    #[serde(default)]
    pub checkpoints: bool,
}

/// What is asked for; what is left out stays as it was, or gets its default.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachineOverrides {
    /// Memory.
    pub memory_bytes: Option<u64>,
    /// Processors.
    pub processors: Option<u32>,
    /// Size of a new disk.
    pub disk_bytes: Option<u64>,
    /// Directory of the guest image.
    pub image: Option<PathBuf>,
    /// Whether checkpoints can be taken; by default where this host and account can.
    pub checkpoints: Option<bool>,
}

impl MachineOverrides {
    /// Whether anything is asked for.
    pub fn is_empty(&self) -> bool {
        *self == MachineOverrides::default()
    }

    /// `before`, changed as is asked for.
    ///
    /// # Errors
    /// [`MachineError::NoImage`], [`MachineError::InvalidConfiguration`]; [`MachineError::NoCheckpoints`] where they
    /// are asked for.
    pub fn applied_to(&self, before: Option<&MachineTemplate>) -> Result<MachineTemplate, MachineError> {
        let named = self.image.as_deref().or(before.map(|before| before.image.as_path()));
        let image = GuestImage::find(named)?;
        let check = || match Qemu::find() {
            Ok(qemu) => MachineConfiguration::check_checkpoints(qemu.version()),
            Err(error) => Err(MachineError::NoHypervisor { reason: error.to_string() }),
        };
        if self.checkpoints == Some(true) {
            check()?;
        }
        let before_this = before.map(|before| before.checkpoints);
        let checkpoints = self.checkpoints.or(before_this).unwrap_or_else(|| check().is_ok());
        let shape = MachineTemplate {
            memory_bytes: self
                .memory_bytes
                .or(before.map(|before| before.memory_bytes))
                .unwrap_or(MEMORY_BYTES_DEFAULT),
            processors: self.processors.or(before.map(|before| before.processors)).unwrap_or(1),
            disk_bytes: self.disk_bytes.or(before.map(|before| before.disk_bytes)).unwrap_or(DISK_BYTES_DEFAULT),
            image: image.directory,
            checkpoints,
        };
        shape.configuration(Vec::new(), true).check()?;
        Ok(shape)
    }
}

impl MachineTemplate {
    /// A machine of this shape, with these ports.
    pub fn configuration(&self, forwards: Vec<Forward>, postgresql: bool) -> MachineConfiguration {
        let (memory_bytes, processors, disk_bytes) = (self.memory_bytes, self.processors, self.disk_bytes);
        let configuration = MachineConfiguration::new(self.image.clone());
        let checkpoints = self.checkpoints;
        MachineConfiguration {
            memory_bytes,
            processors,
            disk_bytes,
            forwards,
            postgresql,
            checkpoints,
            ..configuration
        }
    }
}
