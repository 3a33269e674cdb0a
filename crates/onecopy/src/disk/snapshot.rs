//! `onecopy disk snapshot`: a disk's durable moments.

use std::path::PathBuf;

use clap::Args;
use onecopy_disk::Snapshot as Made;
use onecopy_disk_server::protocol::Request;
use onecopy_disk_server::{self as disk, DiskClient, DiskServerError};

use crate::output;

/// Keep what a disk holds now under a name, or delete such a snapshot
///
/// Taken while a machine writes it holds what a power cut would leave. It takes no room until the disk changes.
#[derive(Debug, Args)]
pub struct Snapshot {
    /// The disk's directory
    directory: PathBuf,
    /// The snapshot's name
    #[arg(required_unless_present = "list", conflicts_with = "list")]
    name: Option<String>,
    /// Delete it
    #[arg(long, conflicts_with = "list")]
    delete: bool,
    /// List the snapshots there are
    #[arg(long)]
    list: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

impl Snapshot {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        match (&self.name, self.delete) {
            (Some(name), true) => self.delete(name),
            (Some(name), false) => self.make(name),
            (None, _) => self.list(),
        }
    }

    fn make(&self, name: &str) -> anyhow::Result<()> {
        let made: Made = match disk::served(&self.directory)? {
            Some(mut server) => server.snapshot(name)?,
            None => disk::at_rest(&self.directory, |disk| disk.snapshot(name))?,
        };
        match self.json {
            true => output::say(serde_json::to_string(&made)?),
            false => output::say(format_args!("{}@{} is kept.", self.directory.display(), made.name)),
        }
        Ok(())
    }

    fn delete(&self, name: &str) -> anyhow::Result<()> {
        match disk::served(&self.directory)? {
            Some(mut server) => server.ask::<()>(&Request::DeleteSnapshot { name: name.to_owned() })?,
            None => disk::at_rest(&self.directory, |disk| disk.delete_snapshot(name))?,
        }
        match self.json {
            true => output::say(serde_json::json!({ "deleted": name })),
            false => output::say(format_args!("{}@{name} is deleted.", self.directory.display())),
        }
        Ok(())
    }

    fn list(&self) -> anyhow::Result<()> {
        let snapshots = snapshots(&self.directory)?;
        if self.json {
            output::say(serde_json::to_string(&snapshots)?);
            return Ok(());
        }
        for snapshot in snapshots {
            output::say(snapshot.name);
        }
        Ok(())
    }
}

/// A disk's snapshots, in the order in which they were made.
fn snapshots(directory: &std::path::Path) -> Result<Vec<Made>, DiskServerError> {
    let told = match disk::served(directory)? {
        Some(mut server) => listed(&mut server)?,
        None => None,
    };
    match told {
        Some(snapshots) => Ok(snapshots),
        None => disk::at_rest(directory, |disk| Ok(disk.snapshots())),
    }
}

/// Those of a served disk; none while no transport has it.
fn listed(server: &mut DiskClient) -> Result<Option<Vec<Made>>, DiskServerError> {
    Ok(server.info()?.snapshots)
}
