//! The file that tells of a directory that it is a clone that is not whole.

use std::ffi::OsStr;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use onecopy_postgres::{ConnectionParameters, Directory, ServiceUser};
use rustix::fs::{FileType, Statx};
use serde::{Deserialize, Serialize};

use super::CloneLocation;
use crate::CloneError;
use crate::plan::Plan;

/// The marker's name in the data directory.
pub const MARKER_FILE: &str = "onecopy.incomplete";
/// Its name until it is written as a whole: half a marker must never be read.
pub(super) const UNFINISHED_MARKER_FILE: &str = "onecopy.incomplete.new";

/// No marker has so many bytes: names and a few paths.
const MARKER_BYTES_MAX: u64 = 64 << 10;

/// Whose a directory is in which a service may have begun a clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The service's: its marker is there.
    Service,
    /// Nobody's yet: not there, or with nothing in it but perhaps a marker that was never finished. So much is left of
    /// a clone whose service is killed before it has written the marker.
    Nobody,
    /// Somebody else's, or that of a clone that is whole.
    Other,
}

/// What is needed to remove a clone that will not become whole, and to tell a person what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marker {
    /// Program and version.
    pub made_by: String,
    /// The source's data directory.
    pub source_data_directory: PathBuf,
    /// Where its tablespaces are.
    pub tablespaces: PathBuf,
    /// The account of its server.
    pub user_name: String,
    /// The rendezvous directory of the service that fills it; empty: it is made by whoever runs the command, `reflink`.
    pub service_directory: PathBuf,
    /// The replication slot that is kept for it; none for a prepared directory that is nobody's yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<String>,
    /// How the source is reached, without the password.
    pub source: ConnectionParameters,
}

impl Marker {
    /// That of a test's clone, which nobody looks into but the test.
    #[cfg(test)]
    pub(crate) fn of_test(tablespaces: &Path) -> Marker {
        Marker {
            made_by: "a test".to_owned(),
            source_data_directory: "/source".into(),
            tablespaces: tablespaces.to_owned(),
            user_name: "postgres".to_owned(),
            service_directory: "/run/onecopy/test".into(),
            slot: None,
            source: ConnectionParameters {
                host: "127.0.0.1".to_owned(),
                port: 5432,
                user: "postgres".to_owned(),
                password: None,
                database: "postgres".to_owned(),
                application_name: None,
            },
        }
    }

    /// That of a plan.
    pub fn of(plan: &Plan, service_directory: &Path) -> Marker {
        Marker {
            made_by: format!("onecopy {}", env!("CARGO_PKG_VERSION")),
            source_data_directory: plan.source.data_directory.clone(),
            tablespaces: plan.tablespaces.clone(),
            user_name: plan.user_name.clone(),
            service_directory: service_directory.to_owned(),
            slot: Some(plan.slot.clone()),
            source: ConnectionParameters { password: None, ..plan.source.connection.clone() },
        }
    }

    /// Puts it into the directory, over an older one: whole or not at all.
    ///
    /// # Errors
    /// [`CloneError::File`].
    pub fn write(&self, location: &CloneLocation) -> Result<(), CloneError> {
        // A password must not get into a file that a backup may take along.
        let source = ConnectionParameters { password: None, ..self.source.clone() };
        let text = toml::to_string(&Marker { source, ..self.clone() });
        let text = text.map_err(|error| CloneError::file("describe", MARKER_FILE)(std::io::Error::other(error)))?;
        location.write(Path::new(UNFINISHED_MARKER_FILE), text.as_bytes(), 0o600)?;
        let renamed = location.open()?.rename(Path::new(UNFINISHED_MARKER_FILE), Path::new(MARKER_FILE));
        renamed.map_err(CloneError::file("write", location.directory.join(MARKER_FILE)))
    }

    /// Whose a directory is, for the service with this rendezvous directory.
    ///
    /// # Errors
    /// [`CloneError::File`], also for a marker that is none.
    pub fn owner(data_directory: &Path, service_directory: &Path) -> Result<Owner, CloneError> {
        // First: a directory that is not given to its account yet is root's, and no marker of root's is believed where
        // that account could have put it.
        if holds_nothing(data_directory)? {
            return Ok(Owner::Nobody);
        }
        let marker = Marker::read(data_directory)?;
        let is_ours = marker.is_some_and(|marker| marker.service_directory == service_directory);
        Ok(if is_ours { Owner::Service } else { Owner::Other })
    }

    /// That of a data directory; none when it has none: it is whole, or not ours. One that names an account other than
    /// that which has written it is not believed: what it says decides what root removes.
    ///
    /// # Errors
    /// [`CloneError::File`], also for a file that is no marker;
    /// [`onecopy_postgres::PostgresError::UnknownServiceUser`].
    pub fn read(data_directory: &Path) -> Result<Option<Marker>, CloneError> {
        let path = data_directory.join(MARKER_FILE);
        let opened = Directory::open(data_directory).and_then(|directory| directory.open_read(Path::new(MARKER_FILE)));
        let file = match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(CloneError::file("read", &path))?,
        };
        let writer = file.metadata().map_err(CloneError::file("look at", &path))?.uid();
        let mut text = Vec::new();
        let read = file.take(MARKER_BYTES_MAX + 1).read_to_end(&mut text);
        read.map_err(CloneError::file("read", &path))?;
        if text.len() as u64 > MARKER_BYTES_MAX {
            let reason = format!("it has more than {MARKER_BYTES_MAX} bytes and is no marker; remove it by hand");
            return Err(CloneError::file("believe", &path)(std::io::Error::other(reason)));
        }
        let text =
            String::from_utf8(text).map_err(std::io::Error::other).map_err(CloneError::file("understand", &path))?;
        let marker: Marker =
            toml::from_str(&text).map_err(std::io::Error::other).map_err(CloneError::file("understand", &path))?;
        let named = ServiceUser::resolve(Some(&marker.user_name))?;
        if named.user_id() != writer {
            let reason = format!("it names the account {} and belongs to another", named.name());
            return Err(CloneError::file("believe", &path)(std::io::Error::other(reason)));
        }
        Ok(Some(marker))
    }

    /// Takes it away.
    pub(crate) fn remove(location: &CloneLocation) -> Result<(), CloneError> {
        let path = location.directory.join(MARKER_FILE);
        remove_if_there(location.open()?.remove_file(Path::new(MARKER_FILE)), &path)
    }
}

/// Whether a directory is not there, or has nothing in it but perhaps a marker that was never finished. One behind a
/// link holds something: the link.
fn holds_nothing(data_directory: &Path) -> Result<bool, CloneError> {
    let failed = || CloneError::file("read", data_directory);
    let Some((above, name)) = above(data_directory).map_err(failed())? else { return Ok(true) };
    let entries = match above.look_at(name) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        Ok(found) if !is_directory(&found) => return Ok(false),
        found => found.and_then(|_| above.open_child(name)?.names()).map_err(failed())?,
    };
    Ok(entries.iter().all(|entry| entry == UNFINISHED_MARKER_FILE))
}

/// The directory in which a clone's one is, and its name there; none when it is not there. Root looks for names and
/// removes them in this one alone, which is root's own or one of the account, who could have done the same.
pub(super) fn above(directory: &Path) -> std::io::Result<Option<(Directory, &OsStr)>> {
    let (Some(above), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Err(std::io::Error::other("it has no name"));
    };
    match Directory::open(above) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        above => Ok(Some((above?, name))),
    }
}

pub(super) fn is_directory(found: &Statx) -> bool {
    FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory
}

/// What is gone is removed.
pub(crate) fn remove_if_there(removed: std::io::Result<()>, path: &Path) -> Result<(), CloneError> {
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(CloneError::file("remove", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Whoever may write a marker decides how large it is and what it is.
    #[test]
    fn a_marker_is_not_read_without_end_and_not_waited_for() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(MARKER_FILE);
        let refusal = || Marker::read(directory.path()).expect_err("refused").to_string();
        let file = fs::File::create(&path).expect("made");
        for bytes in [MARKER_BYTES_MAX + 1, 200 << 30] {
            file.set_len(bytes).expect("sparse");
            assert!(refusal().contains("more than 65536 bytes"), "{}", refusal());
        }
        fs::remove_file(&path).expect("removed");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).expect("made");
        assert!(refusal().contains("no regular file"), "{}", refusal());
    }
}
