//! `onecopy disk export`: a disk's content as a raw image.

use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::HumanBytes;
use onecopy_disk::{At, Source, View};
use onecopy_disk_server::protocol::Request;
use onecopy_disk_server::{self as disk, DiskClient, DiskServerError};

use super::copying::Copying;
use super::place::DiskPlace;
use crate::output;

/// Write what a disk or a snapshot of it holds to a new raw image, with holes where it holds zeros
#[derive(Debug, Args)]
pub struct Export {
    /// The disk, DIRECTORY or DIRECTORY@SNAPSHOT; a disk that is served is written as it is at the beginning
    #[arg(value_parser = DiskPlace::parse)]
    disk: DiskPlace,
    /// The image to be made
    file: PathBuf,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Export {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        let directory = &self.disk.directory;
        let size_bytes = match (&self.disk.snapshot, disk::served(directory)?) {
            (Some(name), _) => {
                let view = View::open(directory, name).map_err(|source| named(directory, source))?;
                self.write(&view)?
            }
            (None, Some(mut server)) => self.write_served(&mut server)?,
            (None, None) => {
                let disk = disk::open_at_rest(directory)?;
                let view = disk.view(&At::Current).map_err(|source| named(directory, source))?;
                let written = self.write(&view);
                drop(view);
                disk.close().map_err(|source| named(directory, source))?;
                written?
            }
        };
        match self.json {
            true => output::say(serde_json::json!({ "event": "exported", "size_bytes": size_bytes })),
            false => output::say(format_args!("{}: {}.", self.file.display(), HumanBytes(size_bytes))),
        }
        Ok(())
    }

    /// Writes a snapshot that is there only for that.
    fn write_served(&self, server: &mut DiskClient) -> anyhow::Result<u64> {
        let name = format!("export-{}", std::process::id());
        let directory = &self.disk.directory;
        server.snapshot(&name)?;
        let written = View::open(directory, &name)
            .map_err(|source| anyhow::Error::from(named(directory, source)))
            .and_then(|view| self.write(&view));
        // The server has let go of who has said nothing for so long.
        let deleted =
            DiskClient::connect(directory).and_then(|mut server| server.ask(&Request::DeleteSnapshot { name }));
        let size_bytes = written?;
        deleted.map(|()| size_bytes).map_err(anyhow::Error::from)
    }

    /// Writes the image; what is unfinished is removed. Returns its size.
    fn write(&self, view: &View) -> anyhow::Result<u64> {
        let size_bytes = view.size_bytes();
        anyhow::ensure!(!self.file.exists(), "{} exists; remove it or name another file", self.file.display());
        let mut copying = Copying::begin(size_bytes, self.json);
        onecopy_disk::export(view, &self.file, |done_bytes| copying.show(done_bytes)).map_err(|source| {
            // Removed as far as possible: the failure that is told is the first one.
            let _ = std::fs::remove_file(&self.file);
            named(&self.disk.directory, source)
        })?;
        Ok(size_bytes)
    }
}

fn named(directory: &Path, source: onecopy_disk::DiskError) -> DiskServerError {
    DiskServerError::Disk { directory: directory.to_owned(), source }
}
