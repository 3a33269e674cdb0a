//! Whether every file that the server has open would raise events.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use onecopy_postgres::processes_of;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::watched::Source;
use crate::CloneError;
use crate::fanotify::Probe;
use crate::image::{FileIdentity, Image};

/// Unarmed descriptors that are looked for: one is enough to need the barrier, some more to tell of.
const UNARMED_MAX: usize = 64;

/// A descriptor through which a process of the server accesses a file unseen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnarmedDescriptor {
    /// The process.
    pub process_id: u32,
    /// The file, from the data directory.
    pub path: PathBuf,
}

impl Source {
    /// Descriptors of the image's files that processes of the server have and that would raise no events, some dozens
    /// at most.
    ///
    /// # Errors
    /// [`CloneError::Kernel`], [`CloneError::File`], those of [`Image::scan`].
    pub fn probe(&self) -> Result<Vec<UnarmedDescriptor>, CloneError> {
        let image = Image::scan_open(&self.directory)?.image;
        unarmed(&processes_of(&self.data_directory), &image)
    }
}

/// Refuses a server of which these would be all processes, but not that of a session of ours: then its others are not
/// seen either. So it is with one of another PID namespace that is none below ours, or whose program has another name
/// than PostgreSQL gives it.
pub(super) fn check_seen(data_directory: &Path, processes: &[u32], session_process: i32) -> Result<(), CloneError> {
    if processes.iter().any(|process_id| own_number(*process_id) == Some(session_process)) {
        return Ok(());
    }
    let reason = format!(
        "its server's processes cannot be seen: the one that serves us calls itself {session_process} and is none of the {} that work there \
         and run a program named postgres; run onecopy outside of containers or in the server's own PID namespace, start the server by \
         PostgreSQL's program under its own name, or use --mode copy",
        processes.len()
    );
    Err(CloneError::CannotClone { path: data_directory.to_owned(), reason })
}

/// The number of a process in its own PID namespace, which is the innermost one; none when it has ended. Source:
/// proc_pid_status(5).
fn own_number(process_id: u32) -> Option<i32> {
    let status = fs::read(format!("/proc/{process_id}/status")).ok()?;
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"NSpid:"))?;
    std::str::from_utf8(line).ok()?.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Descriptors of the image's files that these processes have and that would raise no events.
pub(super) fn unarmed(processes: &[u32], image: &Image) -> Result<Vec<UnarmedDescriptor>, CloneError> {
    let paths: HashMap<(u64, u64), &Path> =
        image.files.iter().map(|file| (file.identity.place(), file.path.as_path())).collect();
    let probe = Probe::new()?;
    let mut found = Vec::new();
    for &process_id in processes {
        for (number, _) in descriptors_of(process_id).into_iter().filter(|(_, place)| paths.contains_key(place)) {
            let Some(descriptor) = duplicate(process_id, number)? else { continue };
            let place = FileIdentity::of_descriptor(&descriptor).map_err(CloneError::kernel("look at a descriptor"))?;
            // It may have been closed and used for another file since it was listed.
            let Some(path) = paths.get(&place.place()) else { continue };
            if !probe.is_armed(&descriptor)? {
                found.push(UnarmedDescriptor { process_id, path: path.to_path_buf() });
                if found.len() == UNARMED_MAX {
                    return Ok(found);
                }
            }
        }
    }
    Ok(found)
}

/// The descriptors of a process with device and inode of what they lead to; none of a process that has ended.
fn descriptors_of(process_id: u32) -> Vec<(i32, (u64, u64))> {
    let directory = Path::new("/proc").join(process_id.to_string()).join("fd");
    let Ok(entries) = fs::read_dir(&directory) else { return Vec::new() };
    let described = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let number = entry.file_name().to_str()?.parse().ok()?;
        let metadata = fs::metadata(entry.path()).ok().filter(fs::Metadata::is_file)?;
        Some((number, FileIdentity::of(&metadata).place()))
    });
    described.collect()
}

/// The same open file as another process has; none when the process or the descriptor is gone.
fn duplicate(process_id: u32, number: i32) -> Result<Option<File>, CloneError> {
    let Some(process) = i32::try_from(process_id).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let duplicated = pidfd_open(process, PidfdFlags::empty())
        .and_then(|process| pidfd_getfd(process, number, PidfdGetfdFlags::empty()));
    match duplicated {
        Ok(descriptor) => Ok(Some(File::from(descriptor))),
        Err(rustix::io::Errno::SRCH | rustix::io::Errno::BADF) => Ok(None),
        Err(error) => Err(CloneError::kernel("look into the server's processes")(io::Error::from(error))),
    }
}
