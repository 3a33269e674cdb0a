//! The server's log: its last lines, and kept from filling the guest's disk.

use super::LOG;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

/// A log that is longer is cut.
const BYTES_MAX: u64 = 32 << 20;
/// What is left of it.
const BYTES_KEPT: u64 = 8 << 20;
/// How often it is looked at.
const INTERVAL: Duration = Duration::from_secs(5);
/// As much as is read for the last lines, and as many of them are told.
const TOLD_BYTES_MAX: u64 = 64 << 10;
const TOLD_LINES_MAX: usize = 20;

/// Keeps the log short from now on.
pub(crate) fn bound_log() {
    std::thread::spawn(|| {
        let mut told = String::new();
        loop {
            std::thread::sleep(INTERVAL);
            match bound(Path::new(LOG), BYTES_MAX, BYTES_KEPT) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    // Once, not every time.
                    let error = error.to_string();
                    if told != error {
                        eprintln!("onecopy-guest: cutting {LOG}: {error}");
                    }
                    told = error;
                }
                _ => told.clear(),
            }
        }
    });
}

/// Cuts a log that is longer than `most` down to its last `kept` bytes, from a line's begin on. The server writes at
/// its end, wherever that is (pg_ctl opens it to append); what it writes in the moment of cutting may be lost.
fn bound(path: &Path, most: u64, kept: u64) -> io::Result<()> {
    // Its directory is the server's: what it has put there as a link is not followed.
    let mut log = open(path, OpenOptions::new().read(true).append(true))?;
    if log.metadata()?.len() <= most {
        return Ok(());
    }
    let end = end_of(&mut log, kept)?;
    let line = end.iter().position(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    log.set_len(0)?;
    log.write_all(&end[line..])
}

/// The last lines, for whoever asks why the server does not do as it shall.
pub(super) fn last_lines() -> String {
    let end = open(Path::new(LOG), OpenOptions::new().read(true)).and_then(|mut log| end_of(&mut log, TOLD_BYTES_MAX));
    last_lines_of(&end.unwrap_or_default())
}

fn last_lines_of(end: &[u8]) -> String {
    let text = String::from_utf8_lossy(end);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TOLD_LINES_MAX)..].join("\n")
}

fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed()).open(path)
}

fn end_of(log: &mut File, bytes: u64) -> io::Result<Vec<u8>> {
    let length = log.metadata()?.len();
    log.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
    let mut end = Vec::new();
    log.take(bytes).read_to_end(&mut end)?;
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{read, read_to_string, write};

    /// Spec: A7
    #[test]
    fn v16_a_log_is_cut_at_a_line_while_its_writer_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut writer = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        for number in 0..100 {
            writeln!(writer, "line {number:03}").unwrap();
        }
        bound(&path, 900, 20).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 900, "as long as it may be");
        bound(&path, 899, 20).unwrap();
        writeln!(writer, "after").unwrap();
        assert_eq!(read_to_string(&path).unwrap(), "line 098\nline 099\nafter\n");
    }

    #[test]
    fn a_link_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("target"), directory.path().join("link"));
        write(&target, [b'x'; 1000]).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        bound(&link, 10, 5).unwrap_err();
        assert_eq!(read(&target).unwrap().len(), 1000);
    }

    #[test]
    fn only_the_end_of_a_log_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        write(&path, "line\n".repeat(100_000)).unwrap();
        let end = end_of(&mut File::open(&path).unwrap(), TOLD_BYTES_MAX).unwrap();
        assert_eq!(end.len() as u64, TOLD_BYTES_MAX);
        assert_eq!(last_lines_of(&end).lines().count(), TOLD_LINES_MAX);
    }
}
