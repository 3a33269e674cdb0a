//! A file system that shares blocks, in a file, mounted for a test.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// Its size; the file is sparse.
const SIZE_BYTES: u64 = 8 << 30;

/// A mounted XFS; unmounted and removed with the value.
#[derive(Debug)]
pub struct Xfs {
    directory: tempfile::TempDir,
}

impl Xfs {
    /// Makes and mounts one.
    ///
    /// # Errors
    ///
    /// The tools are missing, this is not root, or no loop device is left.
    pub fn mount() -> anyhow::Result<Xfs> {
        let directory = tempfile::tempdir()?;
        let image = directory.path().join("image");
        std::fs::File::create(&image)?.set_len(SIZE_BYTES)?;
        run(Command::new("mkfs.xfs").arg("-q").arg(&image))?;
        let place = directory.path().join("mounted");
        std::fs::create_dir(&place)?;
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        run(Command::new("mount").args(["-o", "loop"]).args([&image, &place]))?;
        Ok(Xfs { directory })
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let place = self.path();
        if run(Command::new("umount").arg(&place)).is_err() {
            // Whoever still has something open keeps the file system, but not the name.
            let _ = run(Command::new("umount").arg("--lazy").arg(&place));
        }
    }
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = Path::new(command.get_program()).to_owned();
    let output = command.output().with_context(|| format!("{} (make setup installs it)", program.display()))?;
    ensure!(output.status.success(), "{}: {}", program.display(), String::from_utf8_lossy(&output.stderr));
    Ok(())
}
