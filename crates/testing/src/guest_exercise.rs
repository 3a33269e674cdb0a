//! The program `guest-exercise` on its way into a guest, whose agent writes it there.

use anyhow::{Context, ensure};

/// Where it lies in a guest: where the agent finds programs by their names.
pub const PLACE: &str = "/usr/lib/onecopy/guest-exercise";
/// Its permissions there.
pub const MODE: u32 = 0o755;
/// A file goes to an agent in one line of at most 4 MiB, in base64.
const BYTES_MAX: usize = 3_000_000;

/// The program, as it was built with the one that asks.
///
/// # Errors
///
/// It was not built, or is too long for its way.
pub fn program() -> anyhow::Result<Vec<u8>> {
    let own = std::env::current_exe()?;
    // Test programs lie one directory deeper than the others.
    let directory = own.ancestors().skip(1).find(|directory| !directory.ends_with("deps"));
    let path = directory.context("a program lies in a directory")?.join("guest-exercise");
    let program = std::fs::read(&path)
        .with_context(|| format!("no {}: build onecopy-testing in the same profile", path.display()))?;
    ensure!(program.len() <= BYTES_MAX, "{} has {} bytes, more than an agent takes", path.display(), program.len());
    Ok(program)
}
