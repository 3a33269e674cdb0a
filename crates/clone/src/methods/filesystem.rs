//! What the file systems of a source and its clone can do, found out by trying.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use onecopy_postgres::Directory;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, ioctl_ficlone, openat, statx};

use crate::CloneError;
use crate::plan::Plan;
use crate::target::TABLESPACES_DIRECTORY;

/// Sharing is by blocks: an empty file has none that could be refused.
const PROBE_BYTES: usize = 4096;

/// A directory of the source and the one where the clone's counterpart will be made; both exist.
#[derive(Debug)]
pub(super) struct Pair {
    /// Open: where a tablespace's link leads is for PostgreSQL's account to say, at any time anew.
    source: Directory,
    target: PathBuf,
}

impl Pair {
    /// For messages.
    pub fn paths(&self) -> [&Path; 2] {
        [self.source.path(), &self.target]
    }

    /// To open files in; good while this lives.
    pub fn directories(&self) -> [PathBuf; 2] {
        [self.source.by_descriptor(), self.target.clone()]
    }
}

/// The data directory and each tablespace elsewhere.
pub(super) fn pairs(plan: &Plan) -> Result<Vec<Pair>, CloneError> {
    let data_directory = &plan.source.data_directory;
    let source = Directory::open(data_directory).map_err(CloneError::file("open", data_directory))?;
    let links = Path::new(TABLESPACES_DIRECTORY);
    let failed = |path: &Path| CloneError::file("look for tablespaces in", data_directory.join(path));
    let mut tablespaces = Vec::new();
    for name in source.open_directory(links).and_then(|directory| directory.names()).map_err(failed(links))? {
        let tablespace = links.join(name);
        if source.read_link(&tablespace).is_ok() {
            let source = source.open_directory(&tablespace).map_err(failed(&tablespace))?;
            tablespaces.push(Pair { source, target: existing(&plan.tablespaces)? });
        }
    }
    let data = Pair { source, target: existing(&plan.target)? };
    Ok([data].into_iter().chain(tablespaces).collect())
}

/// The directory itself or the first above it that exists.
fn existing(directory: &Path) -> Result<PathBuf, CloneError> {
    let absolute = std::path::absolute(directory).map_err(CloneError::file("resolve", directory))?;
    Ok(absolute.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/")).to_owned())
}

/// A file in this directory that has no name and vanishes when it is closed.
pub(super) fn nameless_file(directory: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(openat(CWD, directory, flags, Mode::RUSR | Mode::WUSR)?)
}

/// Lets a new file of `target` share the blocks of one of `source`; the error says why it cannot.
pub(super) fn share_blocks(pair: &Pair) -> io::Result<()> {
    let [source, target] = pair.directories();
    let (from, to) = (nameless_file(&source)?, nameless_file(&target)?);
    rustix::io::write(&from, &[1; PROBE_BYTES])?;
    Ok(ioctl_ficlone(&to, &from)?)
}

/// The name of the file system on which this lies, as in `ext4`.
pub(super) fn type_name(path: &Path) -> String {
    let mount = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).map(|found| found.stx_mnt_id);
    let mounts = fs::read_to_string("/proc/self/mountinfo");
    let found = mount.ok().zip(mounts.ok()).and_then(|(mount, mounts)| type_of_mount(&mounts, mount));
    found.unwrap_or_else(|| "of an unknown type".to_owned())
}

/// Source of the format: proc_pid_mountinfo(5).
fn type_of_mount(mounts: &str, mount: u64) -> Option<String> {
    let line = mounts.lines().find(|line| line.split(' ').next().and_then(|id| id.parse().ok()) == Some(mount))?;
    line.split_once(" - ")?.1.split(' ').next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_is_found_by_the_mount() {
        let mounts = "21 1 8:1 / / rw shared:1 - ext4 /dev/vda rw\n212 21 7:0 / /a\\040b rw - xfs /dev/loop0 rw\n2 x";
        for (mount, expected) in [(21, Some("ext4")), (212, Some("xfs")), (2, None), (1, None)] {
            assert_eq!(type_of_mount(mounts, mount).as_deref(), expected);
        }
        assert_eq!(type_name(Path::new("/proc")), "proc");
    }

    #[test]
    fn a_directory_to_be_is_where_its_parent_is() {
        let directory = tempfile::tempdir().expect("a directory");
        assert_eq!(existing(&directory.path().join("a/b/c")).expect("found"), directory.path());
        assert_eq!(existing(directory.path()).expect("found"), directory.path());
    }

    proptest::proptest! {
        #[test]
        fn no_list_of_mounts_panics(mounts: String, mount: u64) {
            let _ = type_of_mount(&mounts, mount);
        }
    }
}
