//! Whether every file that the server has open would raise events.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use onecopy_postgres::{innermost_number, processes_of};
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
    let is_session =
        |process_id: &u32| innermost_number(*process_id).is_some_and(|number| number.cast_signed() == session_process);
    if processes.iter().any(is_session) {
        return Ok(());
    }
    let reason = format!(
        "its server's processes cannot be seen: the one that serves us calls itself {session_process} and is none of \
         the {} that work there and run a program named postgres; run onecopy outside of containers or in the server's \
         own PID namespace, start the server by PostgreSQL's program under its own name, or use --mode copy",
        processes.len()
    );
    Err(CloneError::CannotClone { path: data_directory.to_owned(), reason })
}

/// Descriptors of the image's files that these processes have and that would raise no events. A file is told by its
/// birth as well: the inode of one that was removed since it was listed may be that of a new one, where nobody watches.
pub(super) fn unarmed(processes: &[u32], image: &Image) -> Result<Vec<UnarmedDescriptor>, CloneError> {
    let paths: HashMap<FileIdentity, &Path> =
        image.files.iter().map(|file| (file.identity, file.path.as_path())).collect();
    let probe = Probe::new()?;
    let mut found = Vec::new();
    for &process_id in processes {
        let listed = descriptors_of(process_id).into_iter().filter(|(_, identity)| paths.contains_key(identity));
        for (number, _) in listed {
            let Some(descriptor) = duplicate(process_id, number)? else { continue };
            let identity = FileIdentity::of_descriptor(&descriptor);
            let identity = identity.map_err(CloneError::kernel("look at a descriptor"))?;
            // It may have been closed and used for another file since it was listed.
            let Some(path) = paths.get(&identity) else { continue };
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

/// The descriptors of a process with the files that they lead to; none of a process that has ended.
fn descriptors_of(process_id: u32) -> Vec<(i32, FileIdentity)> {
    let directory = Path::new("/proc").join(process_id.to_string()).join("fd");
    let Ok(entries) = fs::read_dir(&directory) else { return Vec::new() };
    let described = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let number = entry.file_name().to_str()?.parse().ok()?;
        let metadata = fs::metadata(entry.path()).ok().filter(fs::Metadata::is_file)?;
        Some((number, FileIdentity::of(&metadata)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::ImageFile;

    /// As when a relation was dropped after the directory was listed, and a file that is not watched, as those of
    /// `pg_wal` and `pg_logical`, has got its inode.
    #[test]
    fn another_file_with_the_inode_of_one_that_is_gone_is_no_unarmed_descriptor_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = File::create_new(directory.path().join("file")).unwrap();
        let identity = FileIdentity::of_descriptor(&file).unwrap();
        let gone = FileIdentity { born_nanoseconds: identity.born_nanoseconds - 1, ..identity };
        let found = [identity, gone].map(|identity| {
            let listed = ImageFile { path: "base/5/1".into(), size_bytes: 0, mode: 0o600, identity };
            let image = Image { files: vec![listed], ..Image::default() };
            unarmed(&[std::process::id()], &image).unwrap()
        });
        let expected = UnarmedDescriptor { process_id: std::process::id(), path: "base/5/1".into() };
        assert_eq!(found, [vec![expected], vec![]]);
    }
}
