//! The server's log file: bounded in size, and its end quoted in errors.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::beneath::Directory;
use crate::{PostgresError, ServiceUser};

/// A longer log is cut: its newer half is kept beside it as `.1`, what is older is gone.
const LOG_BYTES_MAX: u64 = 16 << 20;
/// How much of a log's end is looked at for complaints.
const TAIL_BYTES_MAX: u64 = 64 << 10;
/// Most lines that an error quotes.
const COMPLAINT_LINES_MAX: usize = 12;

/// A server's log: the postmaster's standard error, appended to.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
}

impl LogFile {
    pub(crate) fn new(path: PathBuf) -> LogFile {
        LogFile { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it for a postmaster to write.
    pub(crate) fn open(&self, user: &ServiceUser) -> Result<File, PostgresError> {
        let (home, name) = self.place();
        let opened = Directory::open_for(home, user).and_then(|home| home.open_append(name, user, 0o600));
        opened.map_err(PostgresError::file("open", &self.path))
    }

    fn place(&self) -> (&Path, &Path) {
        (self.path.parent().unwrap_or(Path::new("/")), Path::new(self.path.file_name().unwrap_or_default()))
    }

    /// Where the log ends now, in bytes.
    pub(crate) fn end(&self) -> u64 {
        std::fs::metadata(&self.path).map_or(0, |metadata| metadata.len())
    }

    /// The last complaints after the position `since`; says so when there are none or the log cannot be read.
    pub(crate) fn complaints(&self, since: u64) -> String {
        match self.tail(since, TAIL_BYTES_MAX) {
            Ok(tail) => match complaints_in(&String::from_utf8_lossy(&tail)) {
                lines if lines.is_empty() => format!("(no complaint in {})", self.path.display()),
                lines => lines,
            },
            Err(error) => format!("(cannot read {}: {error})", self.path.display()),
        }
    }

    /// Cuts the log when it has become too long. The server goes on writing to the same file: it appends, so it
    /// continues at the new end; lines that it writes during the cut are lost.
    pub(crate) fn bound(&self, user: &ServiceUser) -> Result<(), PostgresError> {
        if self.end() <= LOG_BYTES_MAX {
            return Ok(());
        }
        let newer_half = self.tail(0, LOG_BYTES_MAX / 2).map_err(PostgresError::file("read", &self.path))?;
        let mut old_path = self.path.clone().into_os_string();
        old_path.push(".1");
        user.write_file(Path::new(&old_path), &newer_half, 0o600)?;
        self.open(user)?.set_len(0).map_err(PostgresError::file("truncate", &self.path))
    }

    /// The bytes after `since`, only the last `bytes_max` of them.
    fn tail(&self, since: u64, bytes_max: u64) -> io::Result<Vec<u8>> {
        let (home, name) = self.place();
        let mut file = Directory::open(home)?.open_read(name)?;
        let length = file.metadata()?.len();
        // A log shorter than `since` was cut meanwhile: all of it is new.
        let since = if since > length { 0 } else { since };
        file.seek(SeekFrom::Start(since.max(length.saturating_sub(bytes_max))))?;
        let mut tail = Vec::new();
        file.take(bytes_max).read_to_end(&mut tail)?;
        Ok(tail)
    }
}

/// The lines in which a server says what went wrong. What goes wrong before there is a session is often said at level
/// LOG.
fn complaints_in(log: &str) -> String {
    const SIGNS: [&str; 12] = [
        "PANIC:  ",
        "FATAL:  ",
        "ERROR:  ",
        "WARNING:  ",
        "HINT:  ",
        "DETAIL:  ",
        "could not",
        "was terminated by",
        "LOG:  invalid",
        "LOG:  parameter",
        "LOG:  syntax error",
        "LOG:  unrecognized",
    ];
    // The loader and the first steps of the program write without a prefix.
    let complains = |line: &&str| line.contains("postgres: ") || SIGNS.iter().any(|sign| line.contains(sign));
    let lines: Vec<&str> = log.lines().filter(complains).collect();
    lines[lines.len().saturating_sub(COMPLAINT_LINES_MAX)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_found_and_bounded() {
        let busy = "LOG:  starting PostgreSQL\n\
                    LOG:  could not bind IPv4 address \"127.0.0.1\": Address already in use\n\
                    HINT:  Is another postmaster already running?\nFATAL:  could not create any TCP/IP sockets\n\
                    LOG:  shut down\n";
        assert_eq!(complaints_in(busy).lines().count(), 3);
        assert_eq!(complaints_in("LOG:  ready\n"), "");
        let many: String = (0..100).map(|number| format!("ERROR:  number {number}\n")).collect();
        assert_eq!(complaints_in(&many).lines().count(), COMPLAINT_LINES_MAX);
        assert!(complaints_in(&many).ends_with("number 99"));
    }

    #[test]
    fn only_what_is_new_is_quoted() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = LogFile::new(directory.path().join("server.log"));
        assert!(log.complaints(0).starts_with("(cannot read"));
        std::fs::write(log.path(), "ERROR:  old\n").expect("written");
        let end = log.end();
        assert!(log.complaints(end).starts_with("(no complaint"));
        std::fs::write(log.path(), "ERROR:  old\nERROR:  new\n").expect("written");
        assert_eq!(log.complaints(end), "ERROR:  new");
        std::fs::write(log.path(), "E ERROR:  1").expect("cut");
        assert_eq!(log.complaints(end), "E ERROR:  1");
    }

    #[test]
    fn a_long_log_is_cut_and_its_end_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let user = ServiceUser::resolve(None).expect("an account");
        let log = LogFile::new(directory.path().join("server.log"));
        let mut content = vec![b'.'; LOG_BYTES_MAX as usize];
        std::fs::write(log.path(), &content).expect("written");
        log.bound(&user).expect("short enough");
        assert_eq!(log.end(), LOG_BYTES_MAX);
        content.extend(b"the end");
        std::fs::write(log.path(), &content).expect("written");
        log.bound(&user).expect("cut");
        assert_eq!(log.end(), 0);
        let kept = std::fs::read(directory.path().join("server.log.1")).expect("kept");
        assert_eq!(kept.len() as u64, LOG_BYTES_MAX / 2);
        assert!(kept.ends_with(b"the end"));
    }
}
