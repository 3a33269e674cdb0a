//! The memory of a checkpoint as a file that never changes: forks map it privately, and have its page cache in common.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use onecopy_checkpoint::image::{Checkpoint, Image};
use onecopy_postgres::ServiceUser;
use rustix::fs::{Gid, Mode};

use crate::files::absent_is_fine;
use crate::{MachineError, MachineHome};

/// What such files begin with, in the directory of the machine whose memory it was.
const FROZEN: &str = "frozen.";

/// A number is given again where all checkpoints were moved away; and what was written before the host has booted may
/// not be on its disk.
fn name_of(checkpoint: &Checkpoint) -> std::io::Result<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(format!("{FROZEN}{}-{}-{}", checkpoint.number, checkpoint.taken_unix_ms, boot.trim()))
}

/// The file of a checkpoint; the first fork makes it.
///
/// # Errors
/// [`MachineError::Memory`]: the checkpoint is damaged, or there is no room; [`MachineError::File`].
pub(super) fn freeze(
    parent: &MachineHome,
    image: &Image,
    checkpoint: &Checkpoint,
    user: &ServiceUser,
) -> Result<PathBuf, MachineError> {
    let name = name_of(checkpoint).map_err(MachineError::file("name the memory of", parent.root()))?;
    let path = parent.root().join(&name);
    // Of several who begin at once one makes it. Who dies lets the next one begin.
    let turn = File::open(parent.root()).and_then(|directory| directory.lock().map(|()| directory));
    let _turn = turn.map_err(MachineError::file("lock", parent.root()))?;
    if path.exists() {
        return Ok(path);
    }
    let view = image.view(checkpoint.number).map_err(parent.memory_failed())?;
    image.check_space(view.present().count() as u64).map_err(parent.memory_failed())?;
    let unfinished = parent.root().join(format!("{name}.new"));
    absent_is_fine(fs::remove_file(&unfinished)).map_err(MachineError::file("remove", &unfinished))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished);
    let file = file.map_err(MachineError::file("create", &unfinished))?;
    let filled = view.fill(&file).map_err(parent.memory_failed()).and_then(|()| {
        // QEMU's account reads it, and cannot change what other forks see.
        let group = Gid::from_raw(user.group_id());
        let given = rustix::fs::fchown(&file, None, Some(group))
            .and_then(|()| rustix::fs::fchmod(&file, Mode::RUSR | Mode::RGRP));
        given.map_err(|error| MachineError::file("give its group", &unfinished)(error.into()))?;
        fs::rename(&unfinished, &path).map_err(MachineError::file("rename", &unfinished))
    });
    if filled.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    filled.map(|()| path)
}

/// Removes those of checkpoints that are forgotten, and what killed forks have left, while no fork is being made. Who
/// has one mapped keeps it.
///
/// # Errors
/// The operating system refuses.
pub(super) fn forget(parent: &MachineHome, image: &Image) -> std::io::Result<()> {
    let known = image.checkpoints().iter().map(name_of).collect::<std::io::Result<Vec<String>>>()?;
    for entry in fs::read_dir(parent.root())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(FROZEN) && !known.contains(&name) {
            absent_is_fine(fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}
