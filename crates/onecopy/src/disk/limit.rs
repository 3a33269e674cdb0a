//! `onecopy disk limit`: how fast a served disk copies its base.

use std::path::PathBuf;

use clap::Args;
use onecopy_disk_server::DiskClient;
use onecopy_disk_server::protocol::Request;

use super::amount;

/// Bound how fast a served disk copies its base in the background; what a machine asks for comes at once
#[derive(Debug, Args)]
pub struct Limit {
    /// The disk's directory
    directory: PathBuf,
    /// Bytes a second, as 64M; 0 for as fast as it goes
    #[arg(value_name = "SIZE", value_parser = amount::rate)]
    bytes_per_second: u64,
}

impl Limit {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let bytes_per_second = (self.bytes_per_second > 0).then_some(self.bytes_per_second);
        Ok(DiskClient::connect(&self.directory)?.ask(&Request::SetLimit { bytes_per_second })?)
    }
}
