//! What the guest's kernel and QEMU say, read from their logs' ends, and the logs kept from growing without end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::HypervisorError;

/// A log longer than this is cut.
const LOG_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// What is left of it then.
const LOG_BYTES_KEPT: u64 = 1024 * 1024;
/// As much of a log's end is looked at for its last lines.
const TAIL_BYTES: u64 = 64 * 1024;

/// The log's directory may be another account's: a link there leads nowhere, and a pipe keeps nobody waiting.
const NOT_ELSEWHERE: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;

/// A log that another process appends to.
#[derive(Debug, Clone)]
pub struct Console {
    path: PathBuf,
}

impl Console {
    /// The log at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Console {
        Console { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its last lines, at most `lines`, without the control characters that a boot loader sends to a terminal; empty
    /// when there is no log.
    pub fn tail(&self, lines: usize) -> String {
        let text = end_of(&self.path, TAIL_BYTES).unwrap_or_default();
        let text = printable(&String::from_utf8_lossy(&text));
        let all: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Puts what an earlier run has written aside, as `*.old`.
    pub(crate) fn put_aside(&self) -> Result<(), HypervisorError> {
        let mut old = self.path.clone().into_os_string();
        old.push(".old");
        match std::fs::rename(&self.path, old) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(HypervisorError::file("put aside", &self.path)(error))
            }
            _ => Ok(()),
        }
    }

    /// Cuts it when it has become too long, and keeps its end. What is written in this moment may be lost.
    pub(crate) fn bound(&self) -> io::Result<()> {
        match std::fs::symlink_metadata(&self.path) {
            Ok(metadata) if metadata.is_file() && metadata.len() > LOG_BYTES_MAX => {}
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
        let kept = end_of(&self.path, LOG_BYTES_KEPT)?;
        // The writer appends: wherever the end is, it goes on there.
        let mut log = open_of_account(OpenOptions::new().append(true), &self.path)?;
        log.set_len(0)?;
        log.write_all(&kept)
    }
}

/// Opens a file in a directory that may be another account's: no link is followed, nothing is waited for. A file with a
/// second name may be anybody's: the account may have put it there (where `fs.protected_hardlinks` is off).
///
/// # Errors
/// It cannot be opened, or is no file of one name.
pub fn open_of_account(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let log = options.custom_flags(NOT_ELSEWHERE).open(path)?;
    let found = log.metadata()?;
    // One without any was replaced just now.
    match found.is_file() && found.nlink() <= 1 {
        true => Ok(log),
        false => Err(io::Error::other("it is no file of one name")),
    }
}

fn end_of(path: &Path, bytes: u64) -> io::Result<Vec<u8>> {
    let mut file = open_of_account(OpenOptions::new().read(true), path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
    let mut end = Vec::new();
    file.take(bytes).read_to_end(&mut end)?;
    Ok(end)
}

/// The text without escape sequences (ECMA-48: ESC [ parameters, then a letter) and other control characters.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\u{1b}' => {
                if characters.next_if_eq(&'[').is_some() {
                    while characters.next_if(|next| !('@'..='~').contains(next)).is_some() {}
                }
                characters.next();
            }
            '\n' | '\t' => out.push(character),
            control if control.is_control() => {}
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_told_without_what_is_for_terminals() {
        let directory = tempfile::tempdir().unwrap();
        let console = Console::new(directory.path().join("console.log"));
        assert_eq!(console.tail(3), "");
        let text = "\u{1b}[2J\u{1b}[01;01Hone\r\n\r\n[    0.1] two\r\nthree \u{1b}c\u{7}bell\nfour";
        std::fs::write(console.path(), text).unwrap();
        assert_eq!(console.tail(2), "three bell\nfour");
        assert_eq!(console.tail(100), "one\n[    0.1] two\nthree bell\nfour");
    }

    #[test]
    fn a_link_in_the_place_of_a_log_is_neither_read_nor_cut() {
        let directory = tempfile::tempdir().unwrap();
        let elsewhere = directory.path().join("elsewhere");
        let text = "secret\n".repeat(1 << 20);
        std::fs::write(&elsewhere, &text).unwrap();
        let console = Console::new(directory.path().join("console.log"));
        std::os::unix::fs::symlink(&elsewhere, console.path()).unwrap();
        assert_eq!(console.tail(1), "");
        console.bound().unwrap();
        assert!(std::fs::read_to_string(&elsewhere).unwrap() == text);
    }

    #[test]
    fn a_second_name_of_a_file_in_the_place_of_a_log_is_neither_read_nor_written() {
        let directory = tempfile::tempdir().unwrap();
        let elsewhere = directory.path().join("elsewhere");
        let text = "secret\n".repeat(1 << 20);
        std::fs::write(&elsewhere, &text).unwrap();
        let console = Console::new(directory.path().join("console.log"));
        std::fs::hard_link(&elsewhere, console.path()).unwrap();
        assert_eq!(console.tail(1), "");
        console.bound().unwrap_err();
        open_of_account(OpenOptions::new().create(true).append(true), console.path()).unwrap_err();
        assert!(std::fs::read_to_string(&elsewhere).unwrap() == text);
        // Nor does a pipe keep anybody waiting.
        let pipe = directory.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        for options in [OpenOptions::new().read(true), OpenOptions::new().append(true)] {
            open_of_account(options, &pipe).unwrap_err();
        }
        std::fs::remove_file(&elsewhere).unwrap();
        assert_eq!(console.tail(1), "secret", "its only name");
    }

    #[test]
    fn a_log_is_cut_while_somebody_appends() {
        let directory = tempfile::tempdir().unwrap();
        let console = Console::new(directory.path().join("console.log"));
        let mut writer = OpenOptions::new().create(true).append(true).open(console.path()).unwrap();
        let line = [b'x'; 1023].into_iter().chain([b'\n']).collect::<Vec<u8>>();
        for _ in 0..=LOG_BYTES_MAX / 1024 {
            writer.write_all(&line).unwrap();
        }
        console.bound().unwrap();
        assert_eq!(std::fs::metadata(console.path()).unwrap().len(), LOG_BYTES_KEPT);
        writer.write_all(b"the last\n").unwrap();
        console.bound().unwrap();
        assert_eq!(std::fs::metadata(console.path()).unwrap().len(), LOG_BYTES_KEPT + 9);
        assert!(console.tail(1) == "the last");
    }
}
