//! The file by which a server tells where its published memory is. It lies in the data directory, belongs to the
//! server's user, and is not believed: what it names is checked when it is opened.

use std::fs;
use std::io;
use std::path::Path;

use crate::{MemoryError, untrusted_file};

/// Its name in the data directory (`extension/src/publish.c`).
const FILE_NAME: &str = "onecopy_memory.published";
/// The only version that is understood.
const VERSION: u64 = 1;

/// What the file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Announcement {
    /// When the server's shared memory was made; microseconds since 2000. Its next one has another.
    pub start_us: u64,
    /// At which address the server's processes see the description of what is published.
    pub address: u64,
}

impl Announcement {
    /// Reads the file of the server of this directory.
    ///
    /// # Errors
    /// [`MemoryError::NotAllowed`]: the server has never loaded the extension. [`MemoryError::Malformed`],
    /// [`MemoryError::File`].
    pub fn read(data_directory: &Path) -> Result<Announcement, MemoryError> {
        let path = data_directory.join(FILE_NAME);
        let text = match untrusted_file::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound && fs::metadata(data_directory).is_ok() => {
                return Err(MemoryError::NotAllowed {
                    what: "to take published memory",
                    reason: "the server has not loaded onecopy (shared_preload_libraries)".to_owned(),
                });
            }
            Err(source) => return Err(MemoryError::File { action: "read", path, source }),
        };
        Announcement::parse(&text).map_err(|reason| MemoryError::Malformed { path, reason: reason.to_owned() })
    }

    fn parse(text: &str) -> Result<Announcement, &'static str> {
        let number = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.and_then(|value| value.parse::<u64>().ok()).ok_or("a line is missing")
        };
        if number("version")? != VERSION {
            return Err("it is of another version of onecopy");
        }
        Ok(Announcement { start_us: number("start_us")?, address: number("address")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_file_is_understood_and_no_other() {
        let text = "version 1\npostmaster 77\nstart_us 5\naddress 140000\n";
        assert_eq!(Announcement::parse(text), Ok(Announcement { start_us: 5, address: 140_000 }));
        for length in 0..text.len() - 1 {
            // A number that is cut off is another number: the address is checked when it is used.
            let cut = Announcement::parse(&text[..length]);
            assert!(cut.is_err() || text[..length].contains("address 1"), "{length}: {cut:?}");
        }
        let other = text.replace("version 1", "version 2");
        assert!(Announcement::parse(&other).expect_err("other").contains("another version"));
        for (from, to) in [("address 140000", "address -1"), ("start_us 5", "start_us 99999999999999999999999")] {
            Announcement::parse(&text.replace(from, to)).expect_err(to);
        }
    }

    #[test]
    fn a_server_without_the_extension_has_none() {
        let directory = tempfile::tempdir().expect("a directory");
        let message = Announcement::read(directory.path()).expect_err("none").to_string();
        assert!(message.contains("shared_preload_libraries"), "{message}");
        fs::create_dir(directory.path().join(FILE_NAME)).expect("made");
        Announcement::read(directory.path()).expect_err("a directory");
        let gone = directory.path().join("gone");
        assert!(matches!(Announcement::read(&gone), Err(MemoryError::File { .. })));
    }
}
