//! QEMU's program and its version: what an older one calls otherwise, or does not have.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::HypervisorError;

/// The variable that names the program.
const PROGRAM_VARIABLE: &str = "ONECOPY_QEMU";
/// What it is called where the variable is not set.
const PROGRAM: &str = "qemu-system-x86_64";

/// A version of QEMU, such as 10.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    /// Before the point.
    pub major: u32,
    /// Behind it.
    pub minor: u32,
}

impl QemuVersion {
    /// The oldest that has all that we cannot do without: network streams over Unix sockets.
    pub const OLDEST: QemuVersion = QemuVersion { major: 7, minor: 2 };

    /// Streams reconnect (`-netdev stream,reconnect`).
    pub(crate) const STREAM_RECONNECTS: QemuVersion = QemuVersion { major: 8, minor: 1 };
    /// Times of reconnecting are given in milliseconds.
    pub const RECONNECT_MS: QemuVersion = QemuVersion { major: 9, minor: 2 };
    /// Memory can be locked page by page, each from its first use on.
    pub const LOCKS_ON_FAULT: QemuVersion = QemuVersion { major: 10, minor: 0 };
    /// Translated processors may have a thread each. Before, one that the host lets wait can use what another one has
    /// freed when the guest moved its devices' addresses at its boot: QEMU aborts, or the guest hangs (its issue 3040).
    /// That 10.0.4 has it mended, too, its number does not say here.
    pub(crate) const THREAD_PER_PROCESSOR: QemuVersion = QemuVersion { major: 10, minor: 1 };
    /// KVM's device can be given as a path.
    pub(crate) const KVM_DEVICE: QemuVersion = QemuVersion { major: 9, minor: 0 };

    /// The version in what `qemu-system-x86_64 --version` prints.
    fn in_banner(banner: &str) -> Option<QemuVersion> {
        let (_, version) = banner.split_once("version ")?;
        let mut numbers = version.split(|character: char| !character.is_ascii_digit());
        Some(QemuVersion { major: numbers.next()?.parse().ok()?, minor: numbers.next()?.parse().ok()? })
    }
}

impl std::fmt::Display for QemuVersion {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

/// An installed QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qemu {
    program: PathBuf,
    version: QemuVersion,
}

impl Qemu {
    /// The program that `ONECOPY_QEMU` names, or `qemu-system-x86_64` of the path.
    ///
    /// # Errors
    /// [`HypervisorError::NoQemu`], [`HypervisorError::OldQemu`].
    pub fn find() -> Result<Qemu, HypervisorError> {
        let program = std::env::var_os(PROGRAM_VARIABLE).map_or_else(|| PathBuf::from(PROGRAM), PathBuf::from);
        Qemu::at(program)
    }

    /// The QEMU that `program` is.
    ///
    /// # Errors
    /// [`HypervisorError::NoQemu`], [`HypervisorError::OldQemu`].
    pub fn at(program: impl Into<PathBuf>) -> Result<Qemu, HypervisorError> {
        let program = program.into();
        let no_qemu = |reason: &dyn std::fmt::Display| HypervisorError::NoQemu {
            looked_at: format!("{}: {reason}", program.display()),
        };
        let output = Command::new(&program).arg("--version").output().map_err(|error| no_qemu(&error))?;
        let banner = String::from_utf8_lossy(&output.stdout);
        let version = QemuVersion::in_banner(&banner)
            .ok_or_else(|| no_qemu(&format!("--version says {:?}", banner.lines().next().unwrap_or_default())))?;
        if version < QemuVersion::OLDEST {
            let (found, needed) = (version.to_string(), QemuVersion::OLDEST.to_string());
            return Err(HypervisorError::OldQemu { program, found, needed });
        }
        Ok(Qemu { program, version })
    }

    /// The program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Its version.
    pub fn version(&self) -> QemuVersion {
        self.version
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_banners() {
        let found = |banner| QemuVersion::in_banner(banner).map(|version| version.to_string());
        assert_eq!(found("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright").as_deref(), Some("10.0"));
        assert_eq!(found("QEMU emulator version 7.2.17\n").as_deref(), Some("7.2"));
        assert_eq!(found("QEMU emulator version 11.0.50 (v11.0.0-rc1)").as_deref(), Some("11.0"));
        assert_eq!(found("bash: no such version").as_deref(), None);
        assert_eq!(found("").as_deref(), None);
    }

    #[test]
    fn what_is_no_qemu_is_named_with_the_remedy() {
        for program in ["/nonexistent/qemu", "true"] {
            let error = Qemu::at(program).unwrap_err().to_string();
            assert!(error.contains(program) && error.contains("make setup"), "{error}");
        }
    }
}
