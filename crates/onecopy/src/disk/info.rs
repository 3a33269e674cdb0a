//! `onecopy disk info`: what a disk is, holds and does.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::HumanBytes;
use onecopy_disk::{BaseSpecification, CheckReport, Disk, Geometry, Hydration};
use onecopy_disk_server::protocol::{PageMapStatus, ServedDisk};
use onecopy_disk_server::{self as disk, DiskServerError};
use serde::Serialize;

use crate::output;

/// Show what a disk is, what it holds, who serves it, and how far the copy of its base is
#[derive(Debug, Args)]
pub struct Info {
    /// The disk's directory
    directory: PathBuf,
    /// Everything, as one JSON document
    #[arg(long)]
    json: bool,
}

/// What is known of a disk.
#[derive(Debug, Serialize)]
struct Known {
    geometry: Geometry,
    /// Its server, if it is served.
    served: Option<ServedDisk>,
    /// What its files hold, if it is not.
    at_rest: Option<CheckReport>,
}

impl Info {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        let named = |source| DiskServerError::Disk { directory: self.directory.clone(), source };
        let geometry = Disk::geometry(&self.directory).map_err(named)?;
        let served = disk::served(&self.directory)?.map(|mut server| server.info()).transpose()?;
        let at_rest = match served {
            Some(_) => None,
            // Opening it would be for its holder alone; looking is for all.
            None => Some(Disk::check(&self.directory).map_err(named)?),
        };
        let known = Known { geometry, served, at_rest };
        match self.json {
            true => output::say(serde_json::to_string(&known)?),
            false => output::say(text(&self.directory, &known).trim_end()),
        }
        Ok(())
    }
}

/// For people.
fn text(directory: &Path, known: &Known) -> String {
    let Known { geometry, served, at_rest } = known;
    let mut text = format!("{}: {}", directory.display(), HumanBytes(geometry.size_bytes));
    if let Some(base) = &geometry.base {
        let how = if geometry.copy_base { "copied from" } else { "over" };
        let _ = write!(text, ", {how} {}", base_text(base));
    }
    text.push('\n');
    match (served, at_rest) {
        (Some(served), _) => served_text(served, &mut text),
        (None, Some(report)) => {
            let _ = writeln!(
                text,
                "at rest: {} of its own, {} snapshots{}",
                HumanBytes(report.used_places * onecopy_disk::BLOCK_BYTES),
                report.snapshots,
                if report.is_sound() { "" } else { "; damaged, see `onecopy disk check`" }
            );
        }
        (None, None) => {}
    }
    text
}

fn base_text(base: &BaseSpecification) -> String {
    match base {
        BaseSpecification::Raw { path } => path.display().to_string(),
        BaseSpecification::Disk { directory, snapshot } => format!("{}@{snapshot}", directory.display()),
        BaseSpecification::Nbd { url, .. } => url.clone(),
    }
}

fn served_text(served: &ServedDisk, text: &mut String) {
    let attached = if served.is_attached { "" } else { ", which waits for a machine" };
    let _ = writeln!(text, "served by process {}{attached}", served.process_id);
    for transport in &served.transports {
        let _ = writeln!(text, "  {} at {}", transport.kind, transport.address);
    }
    if let Some(disk) = &served.disk {
        let (allocated, current) = (HumanBytes(disk.allocated_bytes), HumanBytes(disk.current_bytes));
        let _ = writeln!(text, "{allocated} of its own, {current} current, {} snapshots", disk.snapshots);
        let (read, written) = (HumanBytes(disk.read_bytes), HumanBytes(disk.written_bytes));
        let _ = writeln!(
            text,
            "{} reads ({read}), {} writes ({written}), {} flushes, {} discards",
            disk.reads, disk.writes, disk.flushes, disk.discards
        );
    }
    if let Some(hydration) = &served.hydration {
        text.push_str(&hydration_text(hydration));
    }
    if let Some(map) = &served.page_map {
        text.push_str(&page_map_text(map));
    }
}

fn hydration_text(hydration: &Hydration) -> String {
    let (copied, total) = (HumanBytes(hydration.copied_bytes), HumanBytes(hydration.total_bytes));
    let trouble = hydration.trouble.as_ref().map(|trouble| format!("; waits: {trouble}")).unwrap_or_default();
    format!("copied: {copied} of {total}{trouble}\n")
}

fn page_map_text(status: &PageMapStatus) -> String {
    let map = &status.figures;
    format!(
        "page map: {} blocks known, {} of memory, {} pages asked for, {} found by hint, {} by index\n",
        map.known_blocks,
        HumanBytes(map.memory_bytes),
        map.lookups,
        map.found_by_hint,
        map.found_by_index
    )
}
