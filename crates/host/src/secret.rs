//! Passwords of a cluster's roles: made once, kept in files that only their owner reads.

use std::fs;
use std::path::Path;

use rand::RngExt;
use rand::distr::Alphanumeric;

use crate::HostError;
use onecopy_directory::atomic_file;

/// Letters and digits of a password: 190 bits, and nothing that a URL or a shell must quote.
const PASSWORD_CHARACTERS: usize = 32;

/// The passwords of one cluster. `Debug` does not show them.
#[derive(Clone)]
pub struct Secrets {
    /// Of the superuser, with which the router and the host administer the servers.
    pub superuser: String,
    /// Of the role that followers replicate with.
    pub replication: String,
    /// Of the role that clients log in as.
    pub client: String,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secrets(..)")
    }
}

impl Secrets {
    /// Reads the passwords in `directory`; makes those that are missing.
    ///
    /// # Errors
    /// [`HostError::File`] when a file cannot be read or written.
    pub fn read_or_make(directory: &Path) -> Result<Secrets, HostError> {
        Ok(Secrets {
            superuser: read_or_make_one(&directory.join("superuser"))?,
            replication: read_or_make_one(&directory.join("replication"))?,
            client: read_or_make_one(&directory.join("client"))?,
        })
    }
}

/// The password of the role for clients.
///
/// # Errors
/// [`HostError::File`] when the file cannot be read.
pub fn client_password(directory: &Path) -> Result<String, HostError> {
    read(&directory.join("client"))
}

fn read(path: &Path) -> Result<String, HostError> {
    let text = fs::read_to_string(path).map_err(HostError::file("read", path))?;
    let password = text.lines().next().unwrap_or_default();
    if password.is_empty() {
        return Err(HostError::EmptyPassword { path: path.to_owned() });
    }
    Ok(password.to_owned())
}

fn read_or_make_one(path: &Path) -> Result<String, HostError> {
    if path.exists() {
        return read(path);
    }
    let password: String = rand::rng().sample_iter(Alphanumeric).take(PASSWORD_CHARACTERS).map(char::from).collect();
    atomic_file::write(path, 0o600, format!("{password}\n").as_bytes())?;
    Ok(password)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn made_once_and_only_for_their_owner() {
        let directory = tempfile::tempdir().unwrap();
        let first = Secrets::read_or_make(directory.path()).unwrap();
        let second = Secrets::read_or_make(directory.path()).unwrap();
        assert_eq!(first.superuser, second.superuser);
        assert_eq!(first.client, client_password(directory.path()).unwrap());
        assert_ne!(first.superuser, first.client);
        assert_eq!(first.replication.len(), PASSWORD_CHARACTERS);
        assert!(!format!("{first:?}").contains(&first.client));
        for name in ["superuser", "replication", "client"] {
            let mode = fs::metadata(directory.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }

    #[test]
    fn an_empty_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("client"), "\n").unwrap();
        assert!(matches!(client_password(directory.path()), Err(HostError::EmptyPassword { .. })));
    }
}
