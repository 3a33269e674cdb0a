//! A swap file of a test's own: without swap a squeeze would kill instead of slow down.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// A swap file that is in use; taken out of use and removed with the value.
#[derive(Debug)]
pub struct SwapFile {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl SwapFile {
    /// Makes one and puts it into use.
    ///
    /// # Errors
    ///
    /// What the programs said; this is not root.
    pub fn begin(bytes: u64) -> anyhow::Result<SwapFile> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("swap");
        // Not sparse: swapon(8) refuses holes.
        run(Command::new("fallocate").arg("--length").arg(bytes.to_string()).arg(&path))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        run(Command::new("mkswap").arg("--quiet").arg(&path))?;
        run(Command::new("swapon").arg(&path))?;
        Ok(SwapFile { path, _directory: directory })
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        if let Err(error) = run(Command::new("swapoff").arg(&self.path)) {
            eprintln!("{} stays in use: {error:#}", self.path.display());
        }
    }
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = Path::new(command.get_program()).to_owned();
    let output = command.output().with_context(|| program.display().to_string())?;
    ensure!(output.status.success(), "{}: {}", program.display(), String::from_utf8_lossy(&output.stderr));
    Ok(())
}
