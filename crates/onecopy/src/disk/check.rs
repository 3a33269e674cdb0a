//! `onecopy disk check`: whether a disk's files are sound.

use std::path::PathBuf;

use clap::Args;
use onecopy_disk::{At, CheckReport, Disk, DiskError, Source};
use onecopy_disk_server::{self as disk, DiskServerError};

use super::copying::Copying;
use crate::output;

/// Bytes that are read at a time.
const STEP_BYTES: u64 = 1 << 20;

/// How often the files of a served disk are looked at before they count as damaged.
const LOOKS_WHILE_SERVED: u32 = 5;

/// Look whether a disk's files are sound: format, sums, and that each block is referred to rightly
///
/// Ends with 1 when something is wrong.
#[derive(Debug, Args)]
pub struct Check {
    /// The disk's directory
    directory: PathBuf,
    /// Also read all that the disk holds; for a disk at rest
    #[arg(long)]
    content: bool,
    /// The findings as JSON
    #[arg(long)]
    json: bool,
}

impl Check {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        let is_served = disk::served(&self.directory)?.is_some();
        let report = self.look(is_served)?;
        self.tell(&report)?;
        anyhow::ensure!(report.is_sound(), "{} is damaged: {}", self.directory.display(), report.problems.join("; "));
        if self.content && is_served {
            anyhow::bail!(
                "{0} is sound, but its content is read when it is at rest: onecopy disk stop {0}",
                self.directory.display()
            );
        }
        if self.content {
            disk::at_rest(&self.directory, |disk| self.read_all(disk))?;
        }
        Ok(())
    }

    /// Looks at the files. Those of a served disk change meanwhile: only what is wrong each time is wrong.
    fn look(&self, is_served: bool) -> Result<CheckReport, DiskServerError> {
        let mut looks = if is_served { LOOKS_WHILE_SERVED } else { 1 };
        loop {
            let report = Disk::check(&self.directory)
                .map_err(|source| DiskServerError::Disk { directory: self.directory.clone(), source })?;
            looks -= 1;
            if report.is_sound() || looks == 0 {
                return Ok(report);
            }
        }
    }

    /// Reads everything, so that what cannot be read is found.
    fn read_all(&self, disk: &Disk) -> Result<(), DiskError> {
        let view = disk.view(&At::Current)?;
        let mut copying = Copying::begin(view.size_bytes(), self.json);
        let mut bytes = vec![0; STEP_BYTES as usize];
        for start in (0..view.size_bytes()).step_by(STEP_BYTES as usize) {
            let end = view.size_bytes().min(start + STEP_BYTES);
            for extent in view.extents(start..end)?.into_iter().filter(|extent| !extent.is_zero) {
                let length = (extent.range.end.min(end) - extent.range.start.max(start)) as usize;
                view.read(extent.range.start.max(start), &mut bytes[..length])?;
            }
            copying.show(end);
        }
        Ok(())
    }

    fn tell(&self, report: &CheckReport) -> anyhow::Result<()> {
        if self.json {
            output::say(serde_json::to_string(report)?);
            return Ok(());
        }
        let closed = if report.was_closed { "closed in order" } else { "not closed in order, which is no harm" };
        output::say(format_args!(
            "{}: {}, {} blocks, {} snapshots, {} places in use, {} changes in the journal.",
            self.directory.display(),
            closed,
            report.current_blocks,
            report.snapshots,
            report.used_places,
            report.journal_records
        ));
        Ok(())
    }
}
