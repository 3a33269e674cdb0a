//! Commands on a machine's devices.

use std::os::fd::OwnedFd;

use serde::Deserialize;
use serde_json::{Value, json};

use super::Monitor;
use crate::HypervisorError;

/// A block device, as `query-block` tells of it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct BlockDevice {
    /// Its name, empty for one that has only a device's.
    pub device: String,
    /// Its device's path.
    #[serde(default)]
    pub qdev: Option<String>,
    /// What is in it; null when nothing is.
    #[serde(default)]
    pub inserted: Option<Value>,
    /// `failed`, `nospace` or `ok`, where QEMU keeps it.
    #[serde(default, rename = "io-status")]
    pub io_status: Option<String>,
}

/// A character device, as `query-chardev` tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CharacterDevice {
    /// Its id.
    pub label: String,
    /// Where it leads.
    pub filename: String,
    /// The guest's side of it is open.
    #[serde(default)]
    pub frontend_open: bool,
}

impl Monitor {
    /// `query-block`. Disks behind vhost-user are no block devices of QEMU's.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::UnknownAnswer`].
    pub async fn block_devices(&self) -> Result<Vec<BlockDevice>, HypervisorError> {
        self.ask("query-block", json!({})).await
    }

    /// `query-chardev`: whether a vhost-user back end is connected is seen here.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::UnknownAnswer`].
    pub async fn character_devices(&self) -> Result<Vec<CharacterDevice>, HypervisorError> {
        self.ask("query-chardev", json!({})).await
    }

    /// `device_add`, with `driver`, `id`, `bus` (`port0`, ... of the configuration) and the device's own properties.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn add_device(&self, properties: Value) -> Result<(), HypervisorError> {
        self.tell("device_add", properties).await
    }

    /// `device_del`: asks the guest to let go of it; [`super::EventKind::DeviceDeleted`] says that it has.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn remove_device(&self, id: &str) -> Result<(), HypervisorError> {
        self.tell("device_del", json!({ "id": id })).await
    }

    /// `set_link`: the cable of a network card (its id in the configuration) is in or out.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn set_link(&self, network: &str, up: bool) -> Result<(), HypervisorError> {
        self.tell("set_link", json!({ "name": network, "up": up })).await
    }

    /// `getfd`: hands QEMU a descriptor under a name; a later one of the same name takes its place.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn give_descriptor(&self, name: &str, descriptor: OwnedFd) -> Result<(), HypervisorError> {
        self.execute_with_descriptor("getfd", json!({ "fdname": name }), descriptor).await.map(|_| ())
    }
}
