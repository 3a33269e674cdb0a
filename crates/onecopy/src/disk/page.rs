//! The page of metrics of a disk's server.

use std::sync::Arc;

use onecopy_disk_server::Served;
use onecopy_host::Observed;

/// What the page tells.
pub struct DiskPage(pub Arc<Served>);

impl Observed for DiskPage {
    async fn metrics(&self) -> String {
        self.0.metrics()
    }

    async fn status(&self) -> serde_json::Value {
        serde_json::to_value(self.0.info()).expect("a disk's figures are strings and numbers")
    }

    async fn health(&self) -> Result<(), String> {
        match self.0.info().hydration.and_then(|hydration| hydration.trouble) {
            Some(trouble) => Err(format!("the base cannot be reached: {trouble}")),
            None => Ok(()),
        }
    }
}
