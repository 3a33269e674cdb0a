//! Whether an installation of PostgreSQL has an extension that servers load at their start.
//!
//! A server that is told to load a library which is not there does not start: so it is looked for first.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Binaries;

/// Where a server's modules are, from the directory of its programs: Debian's layout and the sources'.
const LIBRARY_DIRECTORIES: [&str; 3] = ["../lib", "../lib/postgresql", "../lib64/pgsql"];

/// Where its extensions are described, from the same directory; `{}` is the major version.
const CONTROL_DIRECTORIES: [&str; 4] = [
    "../../../../share/postgresql/{}/extension",
    "../share/extension",
    "../share/postgresql/extension",
    "../share/pgsql/extension",
];

/// An extension that is installed wholly: its library and its SQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstalledExtension {
    /// Its name, which is also that of its library.
    pub name: String,
    /// What `CREATE EXTENSION` makes.
    pub version: String,
    /// Its library.
    pub library: PathBuf,
}

/// Why an extension cannot be used.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum ExtensionMissing {
    #[error("no {file} in {}", list(looked_at))]
    NoFile { file: String, looked_at: Vec<PathBuf> },
    #[error("{path} names no default_version")]
    NoVersion { path: PathBuf },
}

impl InstalledExtension {
    /// Looks for an extension beside `binaries`: where the `pg_config` of the same directory says, if there is one,
    /// else where Debian's packages and PostgreSQL's own build put it.
    ///
    /// # Errors
    /// [`ExtensionMissing`].
    pub fn find(binaries: &Binaries, name: &str) -> Result<InstalledExtension, ExtensionMissing> {
        let directory = binaries.directory();
        let major = binaries.major_version().to_string();
        let beside = |candidate: &str| directory.join(candidate.replace("{}", &major));
        let configured = pg_config(directory);
        let libraries = match &configured {
            Some((libraries, _)) => vec![libraries.clone()],
            None => LIBRARY_DIRECTORIES.into_iter().map(beside).collect(),
        };
        let controls = match &configured {
            Some((_, share)) => vec![share.join("extension")],
            None => CONTROL_DIRECTORIES.into_iter().map(beside).collect(),
        };
        let library = file_in(&libraries, format!("{name}.so"))?;
        let control = file_in(&controls, format!("{name}.control"))?;
        let text = std::fs::read_to_string(&control).unwrap_or_default();
        let version = default_version(&text).ok_or(ExtensionMissing::NoVersion { path: control })?;
        Ok(InstalledExtension { name: name.to_owned(), version, library })
    }
}

/// The directories of libraries and of shared files, as the `pg_config` in the directory of the programs tells them.
///
/// Source: PostgreSQL documentation, pg_config; it finds them from its own place, as the server does
/// (`src/common/config_info.c`).
fn pg_config(directory: &Path) -> Option<(PathBuf, PathBuf)> {
    let program = directory.join("pg_config");
    // `--pkglibdir` and `--sharedir` at once: one answer a line, in the order of the options.
    let output = Command::new(program).args(["--pkglibdir", "--sharedir"]).current_dir("/").output().ok()?;
    let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    let mut lines = text.lines().map(PathBuf::from);
    Some((lines.next()?, lines.next()?))
}

fn file_in(directories: &[PathBuf], file: String) -> Result<PathBuf, ExtensionMissing> {
    let found = directories.iter().map(|directory| directory.join(&file)).find(|path| path.is_file());
    found.ok_or_else(|| ExtensionMissing::NoFile { file, looked_at: directories.to_vec() })
}

/// The value of `default_version` in a control file, which has the form of a configuration file.
fn default_version(control: &str) -> Option<String> {
    crate::written_settings::value_in(control, "default_version").filter(|version| !version.is_empty())
}

fn list(directories: &[PathBuf]) -> String {
    directories.iter().map(|directory| directory.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// An installation with these files beside its programs.
    fn installation(bin: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Binaries) {
        let root = tempfile::tempdir().expect("a directory");
        let programs = root.path().join(bin);
        fs::create_dir_all(&programs).expect("made");
        for program in ["postgres", "initdb", "pg_basebackup"] {
            let path = programs.join(program);
            fs::write(&path, "#!/bin/sh\necho 'postgres (PostgreSQL) 16.3'\n").expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        }
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("below the root")).expect("made");
            fs::write(path, content).expect("written");
        }
        let binaries = Binaries::in_directory(&programs).expect("programs");
        (root, binaries)
    }

    #[test]
    fn both_layouts_are_found() {
        let control = "# what it does\ndefault_version = '1.0'\nrelocatable = true\n";
        for (bin, library, share) in [
            ("bin", "lib/some.so", "share/extension/some.control"),
            (
                "usr/lib/postgresql/16/bin",
                "usr/lib/postgresql/16/lib/some.so",
                "usr/share/postgresql/16/extension/some.control",
            ),
        ] {
            let (root, binaries) = installation(bin, &[(library, ""), (share, control)]);
            let found = InstalledExtension::find(&binaries, "some").expect("installed");
            assert_eq!((found.name.as_str(), found.version.as_str()), ("some", "1.0"));
            assert_eq!(found.library.canonicalize().unwrap(), root.path().canonicalize().unwrap().join(library));
        }
    }

    #[test]
    fn half_an_extension_is_none() {
        let cases: [(&[(&str, &str)], &str); 4] = [
            (&[], "no some.so in"),
            (&[("lib/some.so", "")], "no some.control in"),
            (&[("share/extension/some.control", "default_version = '1.0'")], "no some.so in"),
            (&[("lib/some.so", ""), ("share/extension/some.control", "#default_version = '1'")], "default_version"),
        ];
        for (files, expected) in cases {
            let (_root, binaries) = installation("bin", files);
            let missing = InstalledExtension::find(&binaries, "some").expect_err("not whole").to_string();
            assert!(missing.contains(expected), "{missing}");
        }
    }

    #[test]
    fn a_real_installation_has_its_own() {
        let binaries = Binaries::find(None).expect("PostgreSQL");
        let found = InstalledExtension::find(&binaries, "pg_prewarm").expect("contrib is installed");
        assert!(found.library.is_file(), "{found:?}");
        assert!(InstalledExtension::find(&binaries, "no_such_extension").is_err());
    }
}
