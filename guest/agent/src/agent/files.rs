//! Files that the host writes: whole or not at all, also when the guest dies on the way.

use super::replies::{Result, failed, malformed};
use super::users;
use crate::protocol::WriteFile;
use std::fs::{File, OpenOptions, Permissions, remove_file, rename};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Component, Path, PathBuf};

/// All the bits that a file's permissions have.
const MODE_MAX: u32 = 0o7777;

pub(crate) fn write(file: &WriteFile) -> Result<()> {
    let path = Path::new(&file.path);
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(malformed(format!("{:?} is no file's path", file.path)));
    };
    if !path.is_absolute() || !plain || file.path.contains('\0') {
        return Err(malformed(format!("{:?} is no absolute path without ..", file.path)));
    }
    if file.mode > MODE_MAX {
        return Err(malformed(format!("{:o} are no permissions", file.mode)));
    }
    let owner = match &file.owner {
        Some(name) => Some(users::find(name)?),
        None => None,
    };
    let new = directory.join(format!(".{}.new", name.to_string_lossy()));
    let written = write_new(&new, file, owner.map(|user| (user.user_id, user.group_id))).and_then(|()| {
        rename(&new, path)?;
        File::open(directory)?.sync_all()
    });
    if written.is_err() {
        // What is left of it is in the way of nobody.
        let _ = remove_file(&new);
    }
    written.map_err(|error| failed(&format!("writing {}", file.path), error))
}

fn write_new(new: &PathBuf, file: &WriteFile, owner: Option<(u32, u32)>) -> io::Result<()> {
    // Nobody else may read it before its permissions are what they shall be.
    let mut target = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(new)?;
    target.write_all(&file.content.0)?;
    if let Some((user, group)) = owner {
        fchown(&target, Some(user), Some(group))?;
    }
    target.set_permissions(Permissions::from_mode(file.mode))?;
    target.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::FailureKind;

    fn file(path: String, mode: u32) -> WriteFile {
        WriteFile { path, mode, owner: None, content: "new".into() }
    }

    #[test]
    fn a_file_is_replaced_whole_with_its_permissions() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("name");
        std::fs::write(&path, "older and longer").unwrap();
        write(&file(path.display().to_string(), 0o640)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(path.metadata().unwrap().permissions().mode() & MODE_MAX, 0o640);
        assert_eq!(directory.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn paths_that_are_none_are_refused() {
        for path in ["", "/", "relative", "/tmp/../etc/x", "/tmp/a\0b"] {
            assert_eq!(write(&file(path.to_string(), 0o600)).unwrap_err().kind, FailureKind::Malformed, "{path:?}");
        }
        assert_eq!(write(&file("/tmp/x".to_string(), 0o10000)).unwrap_err().kind, FailureKind::Malformed);
        assert_eq!(write(&file("/no/such/directory".to_string(), 0o600)).unwrap_err().kind, FailureKind::Failed);
    }
}
