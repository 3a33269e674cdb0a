//! Finding the programs of a PostgreSQL server.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{MAJOR_VERSION_MAX, MAJOR_VERSION_MIN, PostgresError, ServiceUser};

/// Where Debian's packages (and those of apt.postgresql.org) put the versions side by side.
const DEBIAN_ROOT: &str = "/usr/lib/postgresql";

/// A version is told in fewer bytes.
const VERSION_BYTES_MAX: u64 = 4096;

/// The programs that a server is made of, all of one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binaries {
    directory: PathBuf,
    major_version: u32,
    version: String,
}

impl Binaries {
    /// Finds the programs: in `explicit` and nowhere else when it is given; else what `pg_config` on the PATH names,
    /// else the newest supported version among Debian's directories.
    ///
    /// # Errors
    /// [`PostgresError::BinariesNotFound`] names every place that was looked at; [`PostgresError::UnsupportedVersion`]
    /// when `explicit` holds another version.
    pub fn find(explicit: Option<&Path>) -> Result<Binaries, PostgresError> {
        if let Some(directory) = explicit {
            return Binaries::in_directory(directory);
        }
        let mut looked_at = Vec::new();
        let mut candidates = Vec::new();
        match pg_config_bindir() {
            Ok(directory) => candidates.push(directory),
            Err(reason) => looked_at.push(format!("pg_config on the PATH: {reason}")),
        }
        let versions = (MAJOR_VERSION_MIN..=MAJOR_VERSION_MAX).rev();
        candidates.extend(versions.map(|major| Path::new(DEBIAN_ROOT).join(major.to_string()).join("bin")));
        for directory in candidates {
            match Binaries::in_directory(&directory) {
                Ok(binaries) => return Ok(binaries),
                Err(PostgresError::BinariesNotFound { looked_at: place }) => looked_at.push(place),
                Err(error) => looked_at.push(error.to_string()),
            }
        }
        Err(PostgresError::BinariesNotFound { looked_at: looked_at.join("; ") })
    }

    /// Takes the programs of one directory.
    ///
    /// # Errors
    /// [`PostgresError::BinariesNotFound`] when a program is missing there, [`PostgresError::UnsupportedVersion`].
    pub fn in_directory(directory: &Path) -> Result<Binaries, PostgresError> {
        Binaries::asked(directory, |program| {
            let mut command = Command::new(program);
            command.current_dir("/");
            command
        })
    }

    /// The same of a directory that a server's account may have chosen: none of its programs is run with more than that
    /// account's rights.
    ///
    /// # Errors
    /// As [`Binaries::in_directory`].
    pub fn in_directory_of(directory: &Path, user: &ServiceUser) -> Result<Binaries, PostgresError> {
        Binaries::asked(directory, |program| user.command(program))
    }

    fn asked(directory: &Path, command: impl Fn(&Path) -> Command) -> Result<Binaries, PostgresError> {
        let not_found = |reason: String| PostgresError::BinariesNotFound {
            looked_at: format!("{}: {reason}", directory.display()),
        };
        for program in ["postgres", "initdb", "pg_basebackup"] {
            if !directory.join(program).is_file() {
                return Err(not_found(format!("no {program}")));
            }
        }
        let program = directory.join("postgres");
        let said = first_words(command(&program).arg("--version"))
            .map_err(|source| PostgresError::Spawn { program: program.clone(), source })?;
        let found = String::from_utf8_lossy(&said).trim().to_owned();
        let unsupported =
            |found: &str| PostgresError::UnsupportedVersion { program: program.clone(), found: found.to_owned() };
        let (version, major_version) = parse_version(&found).ok_or_else(|| unsupported(&found))?;
        if !(MAJOR_VERSION_MIN..=MAJOR_VERSION_MAX).contains(&major_version) {
            return Err(unsupported(&version));
        }
        // Servers run with the working directory `/`, where a relative path would mean something else.
        let directory = directory.canonicalize().map_err(PostgresError::file("resolve", directory))?;
        Ok(Binaries { directory, major_version, version })
    }

    /// The directory that holds them, absolute.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Major version, 15 to 18.
    pub fn major_version(&self) -> u32 {
        self.major_version
    }

    /// Full version, as in `15.20`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The path of one program, as in `binaries.program("psql")`; it is not checked that it exists.
    pub fn program(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

/// The beginning of what a program prints; it need not mean well, and is killed when that is there.
fn first_words(command: &mut Command) -> std::io::Result<Vec<u8>> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut said = Vec::new();
    let stdout = child.stdout.take();
    let read = stdout.map_or(Ok(0), |stdout| stdout.take(VERSION_BYTES_MAX).read_to_end(&mut said));
    let _ = child.kill();
    child.wait()?;
    read.map(|_| said)
}

/// Asks the `pg_config` on the PATH for the directory of the programs.
fn pg_config_bindir() -> Result<PathBuf, String> {
    let output = Command::new("pg_config").arg("--bindir").output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(output.status.to_string());
    }
    match String::from_utf8_lossy(&output.stdout).trim() {
        "" => Err("no answer".to_owned()),
        directory => Ok(PathBuf::from(directory)),
    }
}

/// Takes `15.20` and 15 from `postgres (PostgreSQL) 15.20 (Debian 15.20-1)`; also `18beta1` and `19devel` have a
/// number.
fn parse_version(answer: &str) -> Option<(String, u32)> {
    let version = answer.strip_prefix("postgres (PostgreSQL) ")?.split_whitespace().next()?;
    let digits: String = version.chars().take_while(char::is_ascii_digit).collect();
    Some((version.to_owned(), digits.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn versions_are_read() {
        for (answer, version, major) in [
            ("postgres (PostgreSQL) 15.20 (Debian 15.20-0+deb12u1)", "15.20", 15),
            ("postgres (PostgreSQL) 18beta1", "18beta1", 18),
            ("postgres (PostgreSQL) 9.6.24", "9.6.24", 9),
        ] {
            assert_eq!(parse_version(answer), Some((version.to_owned(), major)));
        }
        for answer in ["", "psql (PostgreSQL) 15.1", "postgres (PostgreSQL) devel"] {
            assert_eq!(parse_version(answer), None);
        }
    }

    #[test]
    fn a_directory_without_programs_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let error = Binaries::find(Some(directory.path())).expect_err("empty").to_string();
        assert!(error.contains(&directory.path().display().to_string()) && error.contains("--pg-bindir"), "{error}");
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let directory = tempfile::tempdir().expect("a directory");
        for program in ["postgres", "initdb", "pg_basebackup"] {
            let path = directory.path().join(program);
            std::fs::write(&path, "#!/bin/sh\necho 'postgres (PostgreSQL) 14.9'\n").expect("written");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
        }
        let error = Binaries::in_directory(directory.path()).expect_err("version 14");
        assert!(matches!(&error, PostgresError::UnsupportedVersion { found, .. } if found == "14.9"), "{error}");
    }
}
